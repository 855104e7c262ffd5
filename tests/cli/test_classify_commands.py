"""hf-ext classify on real files: sounds, pictures, texts, series, adapters and tasks of a merge."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import peft
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    pipeline,
)

import hf_ext
from hf_ext import mrconv
from hf_ext.answers.classifying import answer_series
from hf_ext.answers.continuing import continue_text, load_language_model
from hf_ext.data.files import read_recording
from hf_ext.emr import EMRModel
from hf_ext.errors import UsageError
from hf_ext.tasks.signals import PixelTask
from hf_ext.tasks.texts import LanguageModelTask, byte_tokenizer
from tests.emr.emr_testing import tiny_bert, tiny_semanir
from tests.emr.use_testing import merge_family
from tests.kit import command_line
from tests.kit.document_stage import write_tone
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

classify = partial(command_line.run, "classify")
generate = partial(command_line.run, "generate")


SMALL = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}
LABELS = {"id2label": {0: "low", 1: "middle", 2: "high"}, "label2id": {"low": 0, "middle": 1, "high": 2}}


def answers(*words: str | Path, **options) -> list[dict]:
    return json.loads(classify(*words, "--json", **options).stdout)


def assert_likeliest(rows: list[dict], shares: torch.Tensor) -> None:
    """Probabilities, the largest first."""
    assert [row["score"] for row in rows] == pytest.approx(shares.sort().values.tolist()[::-1], abs=1e-5)


def shares_of(rows: list[dict], length: int) -> torch.Tensor:
    """The probabilities of each position, by the number of their class."""
    shares = torch.zeros(length, 3)
    for row in rows:
        shares[row["position"], LABELS["label2id"][row["label"]]] = row["score"]
    return shares


def test_sounds_are_heard_at_the_rate_of_the_model(tmp_path, caplog):
    write_tone(tmp_path / "a.wav", 0.3)
    write_tone(tmp_path / "b.wav", 0.2)
    (tmp_path / "notes.txt").write_text("no sound")
    found = answers("spoken-digits", tmp_path, "--top-k", 10)
    assert [item["input"] for item in found] == [str(tmp_path / "a.wav"), str(tmp_path / "b.wav")]
    runner = pipeline("audio-classification", model=str(hf_ext.released("spoken-digits")))
    rate = runner.feature_extractor.sampling_rate
    sound = read_recording({"path": str(tmp_path / "a.wav"), "bytes": None}, rate)
    expected = {item["label"]: item["score"] for item in runner({"raw": sound, "sampling_rate": rate}, top_k=10)}
    assert {item["label"]: item["score"] for item in found[0]["classes"]} == pytest.approx(expected, abs=1e-5)
    # A line for each, under a heading.
    lines = classify("spoken-digits", tmp_path).stdout.splitlines()
    assert lines[0].split() == ["input", "class", "probability"]
    best = found[0]["classes"][0]
    assert lines[1].split() == [str(tmp_path / "a.wav"), best["label"], f"{best['score']:.4f}"]
    write_tone(tmp_path / "long.wav", 9)
    classify("spoken-digits", tmp_path / "long.wav")
    assert "are averaged" in caplog.text


@torch.no_grad()
def test_pictures_become_what_the_model_takes(tmp_path):
    torch.manual_seed(0)
    config = mrconv.MRConvConfig(**SMALL, **LABELS, max_position_embeddings=64, input_size=1)
    model = mrconv.MRConvForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    processor = PixelTask(num_labels=3, image_size=8).processor()
    processor.save_pretrained(tmp_path / "model")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    (found,) = answers(tmp_path / "model", tmp_path / "photo.png", "--top-k", 3)
    shares = model(**processor(Image.fromarray(pixels), return_tensors="pt")).logits[0].softmax(-1)
    assert_likeliest(found["classes"], shares)
    assert found["classes"][0]["label"] == config.id2label[int(shares.argmax())]
    # What is on standard input is a picture too, and a list names files.
    piped = answers(tmp_path / "model", "-", "--top-k", 3, given=(tmp_path / "photo.png").read_bytes())
    assert piped == [{"input": "standard input", "classes": found["classes"]}]
    (tmp_path / "list").write_text(f"{tmp_path / 'photo.png'}\n")
    assert answers(tmp_path / "model", f"@{tmp_path / 'list'}", "--top-k", 3) == [found]


def save_text_model(folder: Path) -> mrconv.MRConvForSequenceClassification:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(32)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 32, "pad_token_id": tokenizer.pad_token_id}
    model = mrconv.MRConvForSequenceClassification(mrconv.MRConvConfig(**SMALL, **LABELS, **sizes)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@torch.no_grad()
def test_texts_are_given_as_they_are_or_a_line_each(tmp_path, caplog):
    model = save_text_model(tmp_path / "model")
    long = "a word and another " * 5
    (tmp_path / "texts").write_text(f"short\n\n{long}\n")
    found = answers(tmp_path / "model", f"@{tmp_path / 'texts'}", "short", "--top-k", 3)
    assert [item["input"] for item in found] == ["short", long, "short"] and found[0] == found[2]
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")(long, truncation=True, return_tensors="pt")
    shares = model(tokens.input_ids, attention_mask=tokens.attention_mask).logits[0].softmax(-1)
    assert_likeliest(found[1]["classes"], shares)
    told = [line for line in caplog.messages if " are used" in line]
    assert len(told) == 1 and told[0].startswith("a word") and "tokens: only the first 32 are used." in told[0]
    (piped,) = answers(tmp_path / "model", "-", "--top-k", 3, given=b"short\n")
    assert piped == found[0]
    # A tokenizer that does not know the length of its model.
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 10**30}))
    assert answers(tmp_path / "model", long, "--top-k", 3) == [found[1]]


def test_texts_of_a_pair_that_are_cut_are_told_of(tmp_path, caplog):
    tokenizer = byte_tokenizer(10**30)
    config = mrconv.MRConvConfig(
        **SMALL, vocab_size=len(tokenizer), max_position_embeddings=32, pad_token_id=0, input_columns=["a", "b"]
    )
    mrconv.MRConvForRetrieval(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "pairs.csv").write_text(f"a,b\n{'word ' * 30},short\nshort,{'word ' * 31}\nshort,short\n")
    assert len(answers(tmp_path / "model", tmp_path / "pairs.csv")) == 3
    told = [line.partition(" has ") for line in caplog.messages if "tokens: only the first 32 are used." in line]
    assert [name.removeprefix(str(tmp_path)) for name, _, _ in told] == [
        "/pairs.csv, row 1, a",
        "/pairs.csv, row 2, b",
    ]


SERIES = {**SMALL, "max_position_embeddings": 32, "input_size": 2, "input_columns": ["a", "b"]}
UNITS = {"input_mean": [100.0, 3.0], "input_std": [20.0, 1.0]}


def save_series_model(folder: Path, model_class, **fields):
    torch.manual_seed(0)
    model = model_class(mrconv.MRConvConfig(**{**SERIES, **UNITS, **fields})).eval()
    model.save_pretrained(folder)
    return model


def write_table(path: Path, length: int) -> torch.Tensor:
    values = np.random.default_rng(0).normal([100, 3], [20, 1], (length, 2)).round(3)
    lines = [f"2024-01-01T{row % 24:02}:00,{b},{a},yes" for row, (a, b) in enumerate(values)]
    path.write_text("\n".join(["time,b,a,note", *lines]))
    return torch.from_numpy(values).float()[None]


@torch.no_grad()
def test_series_are_read_by_their_columns(tmp_path, caplog):
    model = save_series_model(tmp_path / "model", mrconv.MRConvForSequenceClassification, **LABELS)
    values = write_table(tmp_path / "long.csv", 40)
    (found,) = answers(tmp_path / "model", tmp_path / "long.csv", "--top-k", 3)
    shares = model(input_values=values[:, :32]).logits[0].softmax(-1)
    assert_likeliest(found["classes"], shares)
    assert "has 40 positions: only the first 32 are used" in caplog.text
    # What is known of the files of a folder is none of them, whatever its name.
    texts = {
        "1/metadata.csv": "file_name,label\nlong.csv,low\n",
        "2/labels.csv": "file,class\nlong.csv,low\n",
        "3/about.jsonl": '{"file": "long.csv", "label": "low"}\n',
        "4/all.tsv": "which\tgait\ninner/long.csv\tlow\n",
    }
    write_files(tmp_path, texts)
    for folder in (tmp_path / name[0] for name in texts):
        inner = folder / ("inner" if folder.name == "4" else "")
        inner.mkdir(exist_ok=True)
        shutil.copy(tmp_path / "long.csv", inner)
        for word in (folder, folder / "**" / "*.*"):
            (named,) = answers(tmp_path / "model", word, "--top-k", 3)
            assert named["classes"] == found["classes"]
    # A named one is read all the same.
    assert "labels.csv" in classify(tmp_path / "model", tmp_path / "2" / "labels.csv", code=1).stderr
    (swapped,) = answers(tmp_path / "model", tmp_path / "long.csv", "--columns", "b, a", "--top-k", 3)
    assert swapped["classes"] != found["classes"]
    said = classify(tmp_path / "model", tmp_path / "long.csv", "--columns", "a,c", code=1).stderr
    assert "has no column c; it has time, b, a, note" in said and "1 of 1 input could not be classified" in said


@torch.no_grad()
def test_values_of_a_series_are_told_in_their_units(tmp_path, caplog):
    targets = {"problem_type": "regression", "target_mean": [70.0, 0.0], "target_std": [5.0, 1.0]}
    names = {"id2label": {0: "rate", 1: "depth"}, "label2id": {"rate": 0, "depth": 1}}
    model = save_series_model(tmp_path / "values", mrconv.MRConvForSequenceClassification, **targets, **names)
    values = write_table(tmp_path / "long.csv", 40)
    (found,) = answers(tmp_path / "values", tmp_path / "long.csv")
    assert [item["label"] for item in found["values"]] == ["rate", "depth"]
    expected = model(input_values=values[:, :32]).logits[0].tolist()
    assert [item["value"] for item in found["values"]] == pytest.approx(expected, rel=1e-4)
    assert "has 40 positions: only the first 32 are used" in caplog.text
    lines = [line.split() for line in classify(tmp_path / "values", tmp_path / "long.csv").stdout.splitlines()]
    assert lines[0] == ["input", "target", "value"] and float(lines[1][2]) == pytest.approx(expected[0], abs=1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    "whole", [{}, {"bidirectional": True}, {"input_delta_std": [1.0, 2.0]}, {"branch_norm": "layer"}], ids=str
)
def test_classes_of_positions_stream_where_the_model_can(whole, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hf_ext.answers.classifying._ROWS", 30)
    values = write_table(tmp_path / "long.csv", 100)
    model = save_series_model(tmp_path / "model", mrconv.MRConvForTokenClassification, **LABELS, **whole)
    (found,) = answers(tmp_path / "model", tmp_path / "long.csv", "--top-k", 3)
    rows = found["positions"]
    shares = shares_of(rows, rows[-1]["position"] + 1)
    full = model(input_values=values[:, :32]).logits[0].softmax(-1)
    torch.testing.assert_close(shares[:32], full, atol=1e-5, rtol=0)
    if whole:
        assert len(shares) == 32 and "has 100 positions: only the first 32 are used" in caplog.text
        return
    cache = mrconv.MRConvCache(model.config)
    parts = [model(input_values=values[:, [place]], cache=cache).logits for place in range(100)]
    torch.testing.assert_close(shares, torch.cat(parts, 1)[0].softmax(-1), atol=1e-5, rtol=0)
    # In words the likeliest class of each row.
    lines = classify(tmp_path / "model", tmp_path / "long.csv").stdout.splitlines()
    assert lines[0].split() == ["input", "position", "class", "probability"] and len(lines) == 101
    best = [LABELS["id2label"][place] for place in shares.argmax(1).tolist()]
    assert [line.split()[2] for line in lines[1:]] == best


@torch.no_grad()
@pytest.mark.parametrize(
    "said", ["a row of units: a in m, b in s", "sorted by it", "not all cells of time", "time repeats"]
)
def test_a_table_is_classified_as_it_trains(said, tmp_path, caplog):
    """Units, dates that fall and an encoding: the model sees what a training would."""
    model = save_series_model(tmp_path / "model", mrconv.MRConvForTokenClassification, **LABELS)
    frame = pd.DataFrame(np.random.default_rng(0).normal([100, 3], [20, 1], (20, 2)).round(3), columns=["a", "b"])
    frame.iloc[3, 1] = np.nan
    dated = frame.assign(date=pd.date_range("2024", periods=20, freq="D"))[::-1]
    measured = pd.concat([pd.DataFrame({"a": ["m"], "b": ["s"]}), frame.astype(object)])
    # Times that are not used are told of.
    spoiled = frame.assign(time=[*range(19), "err"] if "cells" in said else [*range(10)] * 2)
    table = measured if "units" in said else dated if "sorted" in said else spoiled
    table.to_csv(tmp_path / "table.csv", index=False, encoding="utf-16")
    ((_, found),) = answer_series(model, tmp_path / "table.csv", "positions", 3).items()
    values = torch.tensor(frame.to_numpy()).float()[None]
    expected = model(input_values=values, observed_mask=~values.isnan()).logits[0].softmax(-1)
    shares = shares_of(found, 20).flip(0) if table is dated else shares_of(found, 20)
    torch.testing.assert_close(shares, expected, atol=1e-5, rtol=0)
    assert said in caplog.text


@torch.no_grad()
def test_classes_that_do_not_exclude_each_other_have_a_sigmoid_each(tmp_path):
    kind = {**LABELS, "problem_type": "multi_label_classification"}
    model = save_series_model(tmp_path / "model", mrconv.MRConvForSequenceClassification, **kind)
    values = write_table(tmp_path / "table.csv", 20)
    (found,) = answers(tmp_path / "model", tmp_path / "table.csv", "--top-k", 3)
    assert_likeliest(found["classes"], model(input_values=values).logits[0].sigmoid())
    model.classifier.bias[0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    assert "not finite" in classify(tmp_path / "model", tmp_path / "table.csv", code=1).stderr


@torch.no_grad()
def test_each_series_of_a_file_has_an_answer(tmp_path):
    fields = {"input_size": 1, "input_columns": ["values"], "input_mean": [0.0], "input_std": [1.0]}
    fields |= {"id2label": dict(enumerate("123")), "label2id": {"1": 0, "2": 1, "3": 2}}
    model = save_series_model(tmp_path / "model", mrconv.MRConvForSequenceClassification, **fields)
    series = np.random.default_rng(0).normal(size=(3, 20)).round(3)
    lines = [",".join(map(str, row)) + ":x" for row in series]
    write_files(
        tmp_path, {"a.ts": "\n".join(["# made", "@univariate true", "@classLabel true x y", "@Data", "# x", *lines])}
    )
    # The model knows that a row is a series; what else the table has may be anything.
    wide = pd.DataFrame(series).add_prefix("t").assign(time=range(3), patient=7, age=50)
    wide.to_csv(tmp_path / "wide_and_more.csv", index=False)
    panel = pd.DataFrame({"id": np.repeat(["p", "q", "r"], 20), "values": series.ravel()})
    panel.to_csv(tmp_path / "panel.csv", index=False)
    # As the UCR archive has them: a class of the model is no step.
    numbers = pd.DataFrame(np.c_[[1, 2, 3], series])
    numbers.to_csv(tmp_path / "numbers_TEST.tsv", sep="\t", header=False, index=False)
    np.savez(tmp_path / "channels.npz", values=series[..., None], label=np.arange(3))
    shares = model(input_values=torch.from_numpy(series).float()[..., None]).logits.softmax(-1)
    for kind in ("a.ts", "wide_and_more.csv", "panel.csv", "numbers_TEST.tsv", "channels.npz"):
        found = answer_series(model, tmp_path / kind, "classes", 3)
        assert len(found) == 3 and all(name.startswith(str(tmp_path / kind)) for name in found)
        for answer, expected in zip(found.values(), shares, strict=True):
            assert_likeliest(answer, expected)


def test_series_that_do_not_fit_the_model_are_refused(tmp_path):
    save_series_model(tmp_path / "model", mrconv.MRConvForSequenceClassification, input_columns=None)
    file = tmp_path / "short.csv"
    write_table(file, 20)
    for words, said in (
        ([], "has 3 channels in time, b, a, the model takes 2"),
        (["--columns", "a,note"], "Correct the data, or set --columns."),
    ):
        assert said in classify(tmp_path / "model", file, *words, code=1).stderr
    assert len(answers(tmp_path / "model", file, "--columns", "a, b ")) == 1
    (tmp_path / "words.txt").write_text("a")
    assert "is not a file of a sequence" in classify(tmp_path / "model", tmp_path / "words.txt", code=1).stderr
    (tmp_path / "broken.csv").write_text("1,2")
    assert "cannot be read" in classify(tmp_path / "model", tmp_path / "broken.csv", code=1).stderr


def test_of_a_merge_the_task_answers(tmp_path):
    merged = merge_family(tmp_path, tiny_bert, num_labels=3)
    refused = classify(merged, "one two", code=2)
    assert "Name one of its tasks with --task: a, b" in refused.stderr
    model = EMRModel.from_pretrained(merged, task="b").eval()
    tokens = AutoTokenizer.from_pretrained(merged)("one two", return_tensors="pt")
    with torch.no_grad():
        expected = model(**tokens).logits[0].softmax(-1)
    (found,) = answers(merged, "one two", "--task", "b", "--top-k", 3)
    assert_likeliest(found["classes"], expected)


def test_an_adapter_brings_its_base(tmp_path):
    base = tiny_bert(tmp_path / "base", 1, base=tiny_bert(tmp_path / "bare"), num_labels=3)
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModelForSequenceClassification.from_pretrained(base), config)
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = AutoTokenizer.from_pretrained(base)("one two", return_tensors="pt")
    with torch.no_grad():
        expected = adapted.eval()(**tokens).logits[0].softmax(-1)
    (found,) = answers(tmp_path / "adapter", "one two", "--top-k", 3)
    assert_likeliest(found["classes"], expected)


def test_what_cannot_be_read_is_said_and_the_others_go_on(tmp_path):
    write_tone(tmp_path / "a.wav", 0.2)
    (tmp_path / "b.wav").write_bytes(b"no sound")
    result = classify("spoken-digits", tmp_path, code=1)
    assert f"{tmp_path / 'b.wav'} is not a readable sound file" in result.stderr
    assert "1 of 2 inputs could not be classified" in result.stderr
    assert result.stdout.splitlines()[1].startswith(str(tmp_path / "a.wav"))
    save_text_model(tmp_path / "texts")
    assert "half a surrogate pair" in classify(tmp_path / "texts", "a\udcff", "b", code=1).stderr
    nothing = classify("spoken-digits", "-", code=1, given=b"").stderr
    assert "a recording is not a readable sound file" in nothing and "1 of 1 input could not be classified" in nothing


def test_other_models_and_inputs_are_refused_in_words(tmp_path):
    tokens = mrconv.MRConvConfig(**SMALL, max_position_embeddings=32, vocab_size=9)
    tokens.problem_type = "regression"
    mrconv.MRConvForSequenceClassification(tokens).save_pretrained(tmp_path / "values")
    tiny_semanir(tmp_path / "restorer")
    save_text_model(tmp_path / "texts")
    (tmp_path / "empty").mkdir()
    (tmp_path / "list").write_bytes(b"\xff\xfe")
    for model, words, said in (
        (tmp_path / "values", ["a.csv"], "tells values"),
        (tmp_path / "restorer", ["a.png"], "is no classifier (SemanIRForImageRestoration)"),
        (tmp_path / "texts", ["x", "--task", "a"], "has no task 'a'"),
        ("spoken-digits", [tmp_path / "empty"], "no sounds found in"),
        ("spoken-digits", [tmp_path / "empty", "--time", "a"], "are for models of series"),
        ("spoken-digits", [tmp_path / "empty", "--columns", "a"], "is for models of series"),
        ("spoken-digits", ["a.wav", "--device", "tpu"], "device tpu cannot be used"),
        ("spoken-digits", ["a.wav", "--device", "meta"], "device meta cannot be used"),
        ("spoken-digits", [f"@{tmp_path / 'list'}"], "list is not a UTF-8 text with one name per line"),
    ):
        assert said in classify(model, *words, code=2).stderr
    for absent in (tmp_path / "absent.wav", tmp_path / "*.flac"):
        answered = classify("spoken-digits", absent, absent, code=1)
        assert f"{absent}: " in answered.stderr and not answered.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("writer")
    tokenizer = LanguageModelTask(max_length=32).tokenizer
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "kernel_size": 4, "max_position_embeddings": 32}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = mrconv.MRConvConfig(**sizes, **ends, vocab_size=len(tokenizer), bidirectional=False)
    mrconv.MRConvForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_likeliest_text_is_that_of_generate(model):
    said = generate(model, "The ", "--temperature", 0, "--max-new-tokens", 40).stdout
    network, tokenizer = load_language_model(str(model), "cpu")
    tokens = tokenizer("The ", return_tensors="pt").input_ids
    found = network.generate(tokens, max_new_tokens=40, do_sample=False)[0]
    assert said == tokenizer.decode(found, skip_special_tokens=True) + "\n"
    assert said.startswith("The ") and len(said) > 5
    assert generate(model, "-", "--temperature", 1e-45, "--max-new-tokens", 40, given="The \n").stdout == said


def test_a_seed_says_the_text_which_comes_in_parts(model):
    words = (model, "The ", "--max-new-tokens", 30, "--temperature", 1.5)
    first, again, other = (generate(*words, "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other
    assert generate(*words, "--seed", 1, "--top-p", 0.1).stdout != first
    network, tokenizer = load_language_model(str(model), "cpu")
    parts: list[str] = []
    # A model that learned nothing may end its text at once.
    network.generation_config.eos_token_id = None
    continue_text(network, tokenizer, "a b c d ", parts.append, max_new_tokens=600, temperature=1.0, seed=3)
    assert parts[0] == "a b c d " and len([part for part in parts if part]) > 2


def test_the_end_of_a_prompt_is_not_the_end_of_its_text(model, tmp_path):
    network, _ = load_language_model(str(model), "cpu")
    network.save_pretrained(tmp_path)
    # Of a classifier: it ends every text.
    byte_tokenizer(32).save_pretrained(tmp_path)
    words = ("The ", "--temperature", 0, "--max-new-tokens", 8)
    assert generate(tmp_path, *words).stdout == generate(model, *words).stdout


def test_no_more_tokens_are_asked_for_than_the_model_takes(tmp_path):
    folder, tokenizer = tmp_path / "gpt2", byte_tokenizer(16)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=16, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    LanguageModelTask(max_length=16).tokenizer.save_pretrained(folder)
    told = generate(folder, "The ", code=2).stderr
    assert "4 tokens, and 200 more are requested; the model takes 16: give --max-new-tokens 12 or less" in told
    assert "give a shorter text" in generate(folder, "The list is long, longer", code=2).stderr
    assert generate(folder, "The ", "--max-new-tokens", 12).stdout.startswith("The ")


def test_other_models_and_values_are_refused_in_words(model, tmp_path):
    restorer = tiny_semanir(tmp_path / "restorer")
    for words, said in (
        ((restorer, "a"), "is not a causal language model (SemanIRForImageRestoration)"),
        ((model, ""), "the text has no tokens: give"),
        ((model, "a", "--temperature", "nan"), "temperature is nan"),
        ((model, "a", "--top-p", 0), "is not in the range"),
        ((model, "a", "--top-p", "nan"), "top_p is nan"),
        ((model, "a", "--seed", 2**32), "is not in the range"),
        ((model, "a\udcff"), "half a surrogate pair"),
        ((model, "a", "--task", "a"), "has no task 'a'"),
    ):
        assert said in generate(*words, code=2).stderr
    with refused(UsageError, "temperature"):
        continue_text(AutoModelForCausalLM, None, "a", print, temperature=-1.0)
