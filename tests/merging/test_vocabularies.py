"""tokenizer: union: the tokens of all models, and each row where its token is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_ext.merging.merge import merge_checkpoints
from hf_ext.merging.plan import make_plan
from hf_ext_cli.main import main
from tests.emr.emr_testing import perturb, tiny_adapter, write_tokenizer

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c")


def write_model(
    folder: Path, words: tuple[str, ...], added: tuple[str, ...] = (), *, rows: int = 0, **more: Any
) -> Path:
    """A tiny model with a row for each token, and more up to `rows`; all weights but those of rows are alike."""
    size = max(rows, len(words) + len(added))
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=size, max_position_embeddings=16, **shape, **more))
    perturb(model, len(words) + 10 * len("".join(added)) + rows, 0.5)
    model.save_pretrained(folder)
    write_tokenizer(folder, words)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(list(added), special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models_of(tmp_path_factory) -> dict[str, Path]:
    """The base has a row without a token; the tasks add tokens, in common and of their own, in other orders."""
    place = tmp_path_factory.mktemp("vocabularies")
    return {
        "base": write_model(place / "base", WORDS, rows=8),
        "x": write_model(place / "x", WORDS, ("<x>", "<y>")),
        "y": write_model(place / "y", WORDS, ("owl", "<y>"), rows=11),
    }


def merge(models_of: dict[str, Path], out: Path, **more: Any) -> Path:
    tasks = {name: str(path) for name, path in models_of.items() if name != "base"}
    config = {"base": str(models_of["base"]), "tasks": tasks, "method": "average", "tokenizer": "union", **more}
    merge_checkpoints(config, out, progress=False)
    return out


@pytest.mark.parametrize("tied", [False, True])
def test_each_row_is_where_its_token_is(models_of, tmp_path, tied):
    if tied:
        given = {"base": (WORDS, (), 8), "x": (WORDS, ("<x>", "<y>"), 0), "y": (WORDS, ("<y>",), 11)}
        models_of = {
            name: write_model(tmp_path / name, words, added, rows=rows, tie_word_embeddings=True)
            for name, (words, added, rows) in given.items()
        }
    merged = merge(models_of, tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(merged)
    tokens = [*WORDS, "<x>", "<y>", *([] if tied else ["owl"])]
    assert tokenizer.convert_ids_to_tokens(range(len(tokens))) == tokens
    assert tokenizer.tokenize("a<y>c owl") == ["a", "<y>", "c", "[UNK]" if tied else "owl"]
    assert not (merged / "vocab.txt").exists()
    model, origin = LlamaForCausalLM.from_pretrained(merged), {}
    assert model.config.vocab_size == (9 if tied else 10)
    for name, path in models_of.items():
        known = PreTrainedTokenizerFast.from_pretrained(path).get_vocab()
        origin[name] = (known, LlamaForCausalLM.from_pretrained(path))
    for side in ("get_input_embeddings", "get_output_embeddings"):
        rows = getattr(model, side)().weight
        for place, token in enumerate(tokens):
            held = {n: getattr(m, side)().weight[k[token]] for n, (k, m) in origin.items() if token in k}
            ours = held.get("base", torch.stack(list(held.values())).mean(0))
            wanted = torch.stack([held.get(name, ours) for name in ("x", "y")]).mean(0)
            torch.testing.assert_close(rows[place], wanted, rtol=1e-6, atol=1e-6, msg=f"{side} {token}")
    key = "model.layers.0.mlp.up_proj.weight"
    wanted = (origin["x"][1].state_dict()[key] + origin["y"][1].state_dict()[key]) / 2
    torch.testing.assert_close(model.state_dict()[key], wanted)


def test_any_run_of_elements_is_that_of_the_whole(models_of):
    tasks = {name: str(models_of[name]) for name in "xy"}
    config = {"base": str(models_of["base"]), "tasks": tasks, "method": "ties", "tokenizer": "union"}
    with make_plan(config) as plan:
        for source in (plan.base, *plan.tasks):
            whole = source.read("model.embed_tokens.weight").view(-1)
            assert source.tensors["model.embed_tokens.weight"].shape == (10, 8)
            for start, stop in ((0, 1), (3, 21), (8, 16), (47, 64), (13, 13)):
                part = torch.empty(stop - start)
                source.read_into("model.embed_tokens.weight", start, stop, part)
                assert part.equal(whole[start:stop])
            # of others the compiled kernels read the file
            assert source.location("model.norm.weight") is not None


def test_a_token_that_no_model_has_a_row_for_gets_zeros(models_of, tmp_path):
    base = write_model(tmp_path / "base", WORDS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    tokenizer.add_tokens(["<ghost>"])
    tokenizer.save_pretrained(base)
    config = {"base": str(base), "tasks": {"x": str(models_of["x"])}, "method": "average", "tokenizer": "union"}
    with make_plan(config) as plan:
        rows = [source.read("lm_head.weight") for source in (plan.base, *plan.tasks)]
        own = load_file(models_of["x"] / "model.safetensors")["lm_head.weight"]
    assert all(part.shape == (10, 8) and not part[7].any() and part[8:].equal(own[7:]) for part in rows)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_task_without_a_tokenizer_has_the_bases(models_of, tmp_path):
    adapter = tiny_adapter(tmp_path / "adapter", models_of["base"], target_modules=["q_proj"])
    merged = tmp_path / "merged"
    words = [
        "--base",
        models_of["base"],
        "--task",
        f"x={models_of['x']}",
        "--task",
        f"lora={adapter}",
        "--out",
        merged,
    ]
    how = ["--method", "average", "--tokenizer", "union", "--adapters", "delta"]
    result = CliRunner().invoke(main, ["merge", *map(str, words), *how])
    assert result.exit_code == 0, result.output
    assert LlamaForCausalLM.from_pretrained(merged).config.vocab_size == 9


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_the_rows_that_an_adapter_added_are_its_own(models_of, tmp_path):
    model = LlamaForCausalLM.from_pretrained(models_of["base"])
    model.resize_token_embeddings(9, mean_resizing=False)
    # peft keeps resized embeddings whole.
    get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(models_of["base"])
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    config = {"base": str(models_of["base"]), "tasks": {"a": str(tmp_path / "adapter")}, "adapters": "delta"}
    merged = tmp_path / "merged"
    merge_checkpoints(config | {"method": "average", "tokenizer": "union"}, merged, progress=False)
    place = AutoTokenizer.from_pretrained(merged).convert_tokens_to_ids("<new>")
    for side in ("get_input_embeddings", "get_output_embeddings"):
        own = getattr(model, side)().weight[tokenizer.convert_tokens_to_ids("<new>")]
        assert own.any() and getattr(LlamaForCausalLM.from_pretrained(merged), side)().weight[place].equal(own)


def test_a_number_for_each_token_beside_the_rows_is_refused(models_of, tmp_path):
    folder = tmp_path / "bart"
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    BartForConditionalGeneration(BartConfig(vocab_size=7, **sizes, **heads)).save_pretrained(folder)
    write_tokenizer(folder, WORDS)
    with pytest.raises(ValueError, match="'final_logits_bias' has a column for each token"):
        make_plan({"base": str(folder), "tasks": {"a": str(folder)}, "method": "average", "tokenizer": "union"})


def test_what_no_vocabulary_serves_is_refused_in_words(models_of, tmp_path):
    def change(name: str, **parts: Any) -> str:
        folder = write_model(tmp_path / name, WORDS, ("<x>",))
        told = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(told | parts))
        return str(folder)

    bpe = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    other = Tokenizer(models.BPE({"a": 0, "b": 1, "ba": 2}, [("b", "a")]))
    kinds = [json.loads(tokenizer.to_str())["model"] for tokenizer in (bpe, other)]
    plain = write_model(tmp_path / "plain", WORDS, rows=9)
    (plain / "tokenizer.json").unlink()
    bytes_level = json.loads(pre_tokenizers.ByteLevel().__getstate__())
    base = str(models_of["base"])
    for given, message in (
        ({"base": base, "tasks": {"a": change("bpe", model=kinds[0])}}, "is BPE, the base's WordLevel"),
        ({"base": base, "tasks": {"a": change("cut", pre_tokenizer=bytes_level)}}, "has another pre_tokenizer"),
        (
            {"base": change("b1", model=kinds[0]), "tasks": {"a": change("b2", model=kinds[1])}},
            r"\(BPE\) has other words than the base's",
        ),
        ({"base": base, "tasks": {"a": str(plain)}}, "9 tokens, the base 8, and no tokenizer.json"),
        ({"base": str(plain), "tasks": {"a": base}}, "has no tokenizer.json, to which"),
        ({"base": base, "tasks": {"a": base}, "method": "emr"}, "choose a method without masks"),
        ({"base": base, "tasks": {"a": base}, "method": "fisher", "statistics": {"a": "f"}}, "statistics lie in each"),
    ):
        with pytest.raises(ValueError, match=message):
            make_plan({"method": "average", "tokenizer": "union", **given})
