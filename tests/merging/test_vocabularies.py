"""Rows of tokens in a merge: resized and reordered vocabularies, and the files that tell them."""

import contextlib
import json

import pytest
from torch import ones
from transformers import PreTrainedTokenizerFast

from hf_ext.errors import DataError
from hf_ext.merging.plan import make_plan
from hf_ext.merging.tensors import KEPT
from tests.emr.emr_testing import WORDS, resized, tiny_bert, write_tokenizer, write_weights
from tests.kit.refusals import refused
from tests.merging.merging import siblings

EMBEDDING = "embeddings.word_embeddings.weight"
CHANGED = (*WORDS[:7], "changed", *WORDS[8:])
SWAPPED = (*WORDS[:7], WORDS[8], WORDS[7], *WORDS[9:])


@pytest.mark.parametrize(
    ("kind", "words", "method", "fact"),
    [
        *((kind, CHANGED, "average", "'changed'") for kind in ("tokenizer.json", "vocab.json", "vocab.txt")),
        ("tokenizer.json", (*WORDS, "new"), "average", f"{len(WORDS) + 1} tokens"),
        ("tokenizer.json", SWAPPED, "slerp", "token 7 is"),
    ],
)
def test_rows_of_other_tokens_are_kept_and_refused_in_one_model(tmp_path, kind, words, method, fact):
    base = tiny_bert(tmp_path / "base")
    task = resized(tmp_path / "a", base, words, 1)
    if kind != "tokenizer.json":
        for folder in (base, task):
            vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
            (folder / "tokenizer.json").unlink()
            text = json.dumps(vocabulary) if kind == "vocab.json" else "\n".join(vocabulary)
            (folder / kind).write_text(text)
    config = siblings(tmp_path, "a")
    with make_plan(config) as plan:
        (said,) = (text for text in plan.warnings if EMBEDDING in text)
        assert fact in said and "keeps its own" in said
        assert [item.name for item in plan.own_tensors(KEPT)] == [EMBEDDING]
    with refused(DataError, "'a'", "another vocabulary", fact):
        make_plan(config | {"method": method})
    # what the refusal advises
    with make_plan(config | {"method": method, "exclude": [".*word_embeddings"]}) as plan:
        assert EMBEDDING in {row.name for row in plan.copied_rows}


@pytest.mark.parametrize("known", [len(WORDS) - 2, 0])
def test_tasks_with_other_tokens_in_a_row_that_the_base_leaves_open_are_not_mixed(tmp_path, known):
    base = tiny_bert(tmp_path / "base")
    for name in "xy":
        write_tokenizer(tiny_bert(tmp_path / name, 1, base=base, task_head=False), (*WORDS[:-2], name))
    (base / "tokenizer.json").unlink()
    if known:
        write_tokenizer(base, WORDS[:known])
    with refused(DataError, "'y'", f"token {len(WORDS) - 2}", "'x'"):
        make_plan(siblings(tmp_path, "x", "y", method="average"))
    with make_plan(siblings(tmp_path, "x", "y")) as plan:
        assert [item.task for item in plan.own_tensors(KEPT) if item.name == EMBEDDING] == [1]


SIZE = {"vocab_size": 4}
VOCABULARIES = {
    "tokenizer.model": ("one", "two"),
    "sentencepiece.bpe.model": ("one", "two"),
    "tekken.json": ("[1]", "[2]"),
    # of several languages, in the same rows
    "vocab.json": ('{"en": {"x": 2}}', '{"en": {"x": 2}, "de": {"y": 2}}'),
    "added_tokens.json": ('{"x": 2, "y": 3}', '{"y": 2, "x": 3}'),
    "tokenizer_config.json": [json.dumps({"added_tokens_decoder": {"2": {"content": token}}}) for token in "xy"],
}


@pytest.mark.parametrize(
    ("kind", "known", "config"),
    [
        *((kind, known, SIZE) for kind in VOCABULARIES for known in (True, False)),
        # The size of a vocabulary is found in every place.
        *(("tokenizer.model", True, at) for at in ({"text_config": SIZE}, {"encoder": SIZE, "decoder": SIZE})),
        ("tokenizer.model", True, {"a": {"b": SIZE}}),
        # of another type it is none
        ("tokenizer.model", True, {"text_config": {"vocab_size": [4]}, "a": SIZE}),
        # an old name; without a size the tokenizer tells the rows
        ("tokenizer.model", True, {"n_words": 4}),
        *(("added_tokens.json", True, at) for at in (None, {}, {"text_config": {}}, {"type_vocab_size": 9})),
        ("added_tokens.json", True, {"model_type": "clip", "text_config": {}}),
    ],
)
def test_rows_of_other_tokens_are_not_mixed(tmp_path, kind, known, config):
    """Whether the base tells its own or not, and whichever file tells them."""
    ours, theirs = VOCABULARIES[kind]
    for name, text in (("base", ours if known else None), ("a", ours), ("b", theirs)):
        folder = write_weights(tmp_path / name, {"body": ones(3, 3), "embed": ones(4, 2)}, config=config)
        if text is not None:
            (folder / kind).write_text(text)
        if kind in ("added_tokens.json", "tokenizer_config.json"):
            (folder / "vocab.json").write_text('{"u": 0, "v": 1}')
    given = siblings(tmp_path, "a", "b")
    with refused(DataError, "'embed'", "'b'"):
        make_plan(given | {"method": "average"})
    with make_plan(given) as plan:
        assert [(item.task, item.name) for item in plan.own_tensors(KEPT)] == [(1, "embed")]
    if known:
        with refused(DataError, "'embed'", "merged model"):
            make_plan(siblings(tmp_path, "a", method="given", merged=str(tmp_path / "b")))
    (tmp_path / "b" / kind).write_text(ours)
    make_plan(given | {"method": "average"}).close()


@pytest.mark.parametrize(
    ("config", "rows", "found"),
    [
        *(({"model_type": "clip", "text_config": at}, 49408, True) for at in ({}, {"max_position_embeddings": 5})),
        *(({"model_type": kind}, 4, found) for kind, found in (("own", None), ("vit", False))),
    ],
)
def test_a_size_is_the_default_of_its_class_or_unknown_or_the_class_has_none(tmp_path, config, rows, found):
    for name, token in (("base", "one"), ("a", "two")):
        folder = write_weights(tmp_path / name, {"body": ones(3, 3), "x": ones(rows, 1)}, config=config)
        (folder / "tokenizer.model").write_text(token)
    with make_plan(siblings(tmp_path, "a")) as plan:
        assert [item.name for item in plan.own_tensors(KEPT)] == (["x"] if found else [])
        assert any("vocab_size" in text for text in plan.warnings) == (found is None)
    with contextlib.nullcontext() if found is False else refused(DataError, "'a'", "vocabulary"):
        make_plan(siblings(tmp_path, "a", method="average")).close()


EMBEDDED = {"body": ones(3, 3), "embed": ones(4, 2)}


def test_of_tokenizers_in_several_forms_the_one_that_both_have_is_compared(tmp_path):
    for name, text in (("base", "one"), ("a", "one"), ("b", "two")):
        (write_weights(tmp_path / name, EMBEDDED, config=SIZE) / "tokenizer.model").write_text(text)
    write_tokenizer(tmp_path / "base", WORDS[:4])
    for task, kept in (("a", []), ("b", ["embed"])):
        with make_plan(siblings(tmp_path, task)) as plan:
            assert [item.name for item in plan.own_tensors(KEPT)] == kept


@pytest.mark.parametrize("form", ["spiece.model", "qwen.tiktoken", "vocab.bpe"])
def test_without_a_common_form_tokens_are_compared_as_transformers_loads_them(tmp_path, monkeypatch, form):
    for name in ("base", "a"):
        write_weights(tmp_path / name, EMBEDDED, config=SIZE)
    words = ("one", "two", "three", "four")
    write_tokenizer(tmp_path / "base", words)
    (tmp_path / "a" / form).write_text("no model")
    given = siblings(tmp_path, "a", method="average")
    with make_plan(given) as plan:
        (said,) = (text for text in plan.warnings if "not compared" in text)
        assert form in said and "'a'" in said and "\n" not in said
    for last in ("four", "other"):
        tokenizer = write_tokenizer(tmp_path / last, (*words[:3], last)) / "tokenizer.json"
        loaded = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
        monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, found=loaded, **__: found)
        if last == "other":
            with refused(DataError, "token 3", "other"):
                make_plan(given)
        else:
            with make_plan(given) as plan:
                assert not any("compared" in text for text in plan.warnings)


def test_a_token_that_only_one_side_names_stops_no_merge_and_a_malformed_tokenizer_is_named(tmp_path):
    base = tiny_bert(tmp_path / "base")
    write_tokenizer(base, WORDS[:-1])
    task = resized(tmp_path / "a", base, WORDS, 1)
    with make_plan(siblings(tmp_path, "a", method="average")) as plan:
        assert EMBEDDING in {row.name for row in plan.merged_rows}
    (task / "tokenizer.json").write_text('{"model": {"vocab": 3}}')
    with refused(DataError, "tokenizer", "malformed"):
        make_plan(siblings(tmp_path, "a"))
