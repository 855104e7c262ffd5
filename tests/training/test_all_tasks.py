"""hf-ext evaluate --all-tasks: recipes, what answers for a task, comparison with the individual models, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)

from hf_ext.emr import EMRModel
from hf_ext.tasks.classification import TextClassification, ZeroShotImages
from hf_ext.tasks.multiple_choice import MultipleChoice, render
from hf_ext.tasks.texts import byte_tokenizer
from hf_ext_cli.main import main
from tests.emr.emr_testing import perturb, tiny_bert, tiny_semanir
from tests.emr.use_testing import merge

TEXTS = ["a b c", "d e", "f g h i", "a", "z y x w v", "b b"]


def evaluate(*words: str | Path, code: int = 0) -> Result:
    done = CliRunner().invoke(main, ["evaluate", *map(str, words)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


def write_recipe(folder: Path, name: str = "recipe", **changes: Any) -> Path:
    """A recipe for texts and tasks `two` and `five`, with changes."""
    rows = [{"text": text, "label": index % 2} for index, text in enumerate(TEXTS)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"data": {"path": str(folder / "texts.jsonl"), "split": "test"}}
    recipe = {"method": "text-classification", "tasks": {"two": source, "five": source}, **changes}
    (folder / f"{name}.yaml").write_text(json.dumps(recipe))
    return folder / f"{name}.yaml"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merge of two classifiers that are far from each other, and the recipe of the merge."""
    place = tmp_path_factory.mktemp("all-tasks")
    base = tiny_bert(place / "base")
    tasks = {
        "two": tiny_bert(place / "two", 1, base=base, noise=0.5),
        "five": tiny_bert(place / "five", 2, base=base, num_labels=5, noise=0.5),
    }
    merge(base, tasks, place / "merged")
    (place / "merge.yaml").write_text(
        json.dumps({"base": str(base), "tasks": {name: str(path) for name, path in tasks.items()}})
    )
    write_recipe(place)
    return place


def test_each_task_is_scored_by_its_own_model(place: Path, tmp_path: Path):
    recipe = place / "recipe.yaml"
    alone = tmp_path / "individual.json"
    evaluate(place / "merge.yaml", "--config", recipe, "--all-tasks", "--output", alone)
    out = tmp_path / "emr.json"
    printed = evaluate(
        place / "merged", "--config", recipe, "--all-tasks", "--output", out, "--against", alone
    ).stdout.splitlines()
    result, individual = json.loads(out.read_text()), json.loads(alone.read_text())
    em = EMRModel.from_pretrained(place / "merged")
    tokenizer = AutoTokenizer.from_pretrained(place / "base")
    for name in ("two", "five"):
        right = []
        with em.task(name) as model, torch.no_grad():
            for index, text in enumerate(TEXTS):
                found = model(**tokenizer(text, return_tensors="pt")).logits.argmax()
                right.append(int(found) == index % 2)
        row = result["tasks"][name]
        assert row["value"] == pytest.approx(np.mean(right))
        assert row["individual"] == individual["tasks"][name]["value"]
        assert row["of_individual"] == (pytest.approx(row["value"] / row["individual"]) if row["individual"] else None)
        shown = next(line for line in printed if line.startswith(name))
        assert shown.split()[1:4] == ["accuracy", f"{row['value']:.4f}", f"{row['individual']:.4f}"]
    assert result["mean"]["value"] == pytest.approx(np.mean([row["value"] for row in result["tasks"].values()]))
    assert {(row["merged_task"], row["metric"]) for row in result["results"]} == {
        (name, metric) for name in ("two", "five") for metric in ("accuracy", "matthews")
    }
    assert printed[0].split() == ["task", "metric", "score", "individual", "of", "it"]
    with Image.open(tmp_path / "emr.png") as picture:
        assert picture.format == "PNG"


def test_one_task_another_metric_and_one_model_for_all(place: Path, tmp_path: Path):
    recipe = place / "recipe.yaml"
    chosen = evaluate(place / "merged", "--config", recipe, "--all-tasks", "--task", "five", "--json")
    assert list(json.loads(chosen.stdout)["tasks"]) == ["five"]
    words = ("--config", recipe, "--all-tasks", "--metric", "matthews", "--json")
    changed = json.loads(evaluate(place / "merged", *words).stdout)
    assert changed["tasks"]["two"]["metric"] == "matthews"
    # A model that is no merge answers for every task of the recipe.
    whole = json.loads(evaluate(place / "five", "--config", recipe, "--all-tasks", "--json").stdout)["tasks"]
    assert list(whole) == ["two", "five"] and whole["two"]["value"] == whole["five"]["value"]


def test_the_method_of_a_training_is_a_method_of_a_recipe(tmp_path: Path):
    base = tiny_semanir(tmp_path / "base")
    tasks = {name: tiny_semanir(tmp_path / name, seed, base=base, noise=0.1) for seed, name in enumerate("ab", 1)}
    folder = tmp_path / "pictures"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (16, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "one.png")
    noises = {
        name: {"degradation": {"kind": "gaussian_noise", "sigma": sigma}} for name, sigma in (("a", 15), ("b", 50))
    }
    entries = {name: {"data": {"path": str(folder)}, "task": task} for name, task in noises.items()}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"method": "semanir", "tasks": entries}))
    merged = merge(base, tasks, tmp_path / "merged")
    result = json.loads(evaluate(merged, "--config", recipe, "--all-tasks", "--json").stdout)
    assert {row["metric"] for row in result["tasks"].values()} == {"psnr"}
    one = tmp_path / "run.yaml"
    one.write_text(json.dumps({"method": "semanir", "data": {"eval": entries["a"]["data"]}, "task": noises["a"]}))
    alone = json.loads(evaluate(merged, "--task", "a", "--config", one, "--json").stdout)["results"]
    assert alone[0]["metric"] == "psnr"
    assert result["tasks"]["a"]["value"] == pytest.approx(alone[0]["value"])


SOURCE = {"path": "nowhere.jsonl", "split": "test"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": {"two": {"data": SOURCE}}}, "says nothing of five: add them to its section tasks"),
        (
            {"tasks": {"two": {"data": SOURCE, "methods": "x"}}},
            r"unknown key 'methods' in section 'tasks.two'.* 'method'",
        ),
        ({"tasks": {"two": {"task": {}}}}, r"missing key\(s\) data in section 'tasks.two'"),
        ({"tasks": {"two": {"data": {"paths": "x"}}}}, r"unknown key 'paths' in section 'tasks.two.data'"),
        ({"tasks": {"two": 5}}, "tasks.two must be a mapping of keys, got 5"),
        ({"tasks": {}}, r"tasks must hold an entry for each task, by its name; got \[\]"),
        ({"method": "bert"}, "tasks.two: unknown method 'bert'; allowed: .*multiple-choice"),
        ({"task": {"max_lengths": 5}}, "task 'two': unknown key 'max_lengths' in section 'task'.*'max_length'"),
        ({"task": {"text_columns": []}}, "task 'two': .*text_columns must be one or two names"),
        ({"metric": "f1"}, "task 'two': text-classification has no metric 'f1'; allowed: accuracy, matthews"),
        ({"task": {"text_columns": ["words"]}}, "task 'two': the data has no column 'words'; it has .*text"),
        ({"task": {"labels": ["x", "y"]}}, r"task 'two': column 'label' holds 0, .*allowed: one of \['x', 'y'\]"),
        ({"task": {"label_column": "text"}}, "task 'two': column 'text' holds 'a b c', .*allowed: 0 to 1"),
        ({"method": "multiple-choice"}, "task 'two': .*prompts must hold a template or more"),
    ],
)
def test_mistakes_of_a_recipe_are_said(place: Path, tmp_path: Path, changes: dict[str, Any], message: str):
    recipe = write_recipe(tmp_path, **changes)
    done = evaluate(place / "merged", "--config", recipe, "--all-tasks", code=2)
    assert "Traceback" not in done.output
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(done.stderr)


def test_mistakes_of_the_command_are_said(place: Path, tmp_path: Path):
    recipe = place / "recipe.yaml"
    run, other = tmp_path / "run.yaml", tmp_path / "other.json"
    run.write_text(json.dumps({"method": "semanir"}))
    other.write_text(json.dumps({"results": [{"metric": "psnr", "value": 30.0}]}))
    for words, message in (
        ((place / "merged", "--config", run, "--all-tasks"), "has no section tasks"),
        ((place / "merged", "--config", recipe, "--against", recipe), "--against belongs to --all-tasks"),
        ((place / "merged", "--config", recipe), "is a recipe of tasks: add --all-tasks"),
        ((place / "merged", "--config", recipe, "--all-tasks", "--task", "six"), "no task 'six'"),
        ((place / "merged", "--config", recipe, "--all-tasks", "--against", other), "is no result of hf-ext evaluate"),
        ((place / "base", "--config", recipe, "--all-tasks"), "has no classifier.bias, classifier.weight"),
        ((place / "merged", "--config", recipe, "--all-tasks", "--metric", "pearson"), "gives accuracy, matthews"),
    ):
        assert message in evaluate(*words, code=2).stderr


def test_scores_that_were_measured_otherwise_are_not_compared(place: Path, tmp_path: Path):
    alone = tmp_path / "individual.json"
    evaluate(place / "merge.yaml", "--config", place / "recipe.yaml", "--all-tasks", "--output", alone)
    words = (place / "merged", "--config", place / "recipe.yaml", "--all-tasks", "--against", alone)
    evaluate(*words)
    for more, message in (
        (("--task.max_length", "5"), "task 'two' was measured with arguments"),
        (("--metric", "pearson"), "has no pearson of task 'two'"),
        (("--tasks.two.data.split", "train"), "task 'two' was measured with split 'test', this recipe has 'train'"),
        (("--tasks.two.task.labels", "[1, 0]"), "task 'two' was measured with arguments"),
        (("--output", alone), "holds the individual models' result"),
        (("--output", tmp_path / "o.png"), "name it .json"),
    ):
        assert message in evaluate(*words, *more, code=2).stderr
    # Another configuration of one data set, as GLUE's, is other data.
    content = json.loads(alone.read_text())
    alone.write_text(json.dumps(content | {"results": [{**row, "config": "mrpc"} for row in content["results"]]}))
    assert "task 'two' was measured with config 'mrpc', this recipe has None" in evaluate(*words, code=2).stderr


def test_a_text_is_scored_alike_alone_and_beside_longer_ones(tmp_path: Path):
    # The configuration names another token for padding than the tokenizer.
    tokenizer = byte_tokenizer(64)
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2, pad_token_id=50)
    model = GPT2ForSequenceClassification(config)
    perturb(model, 2, 0.5)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    task = TextClassification()
    built = task.build_model({}, str(tmp_path)).eval()
    assert built.config.pad_token_id == task.reader.pad_token_id != 50
    examples = [{"text": text, "label": 0} for text in TEXTS]
    with torch.no_grad():
        together = task.evaluate_batch(built, examples, [])
        assert together == [task.evaluate_batch(built, [example], [])[0] for example in examples]
    assert {row["class"] for row in together} == {0.0, 1.0}


def test_pictures_of_a_16_bit_encoder_are_recognised(tmp_path: Path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = byte_tokenizer(32)
    texts = {**sizes, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id or 1}
    pictures = {**sizes, "image_size": 8, "patch_size": 4}
    CLIPModel(CLIPConfig(text_config=texts, vision_config=pictures, projection_dim=8)).save_pretrained(
        tmp_path / "clip"
    )
    tokenizer.save_pretrained(tmp_path / "clip")
    CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=8).save_pretrained(tmp_path / "clip")
    encoder = CLIPVisionModel(CLIPVisionConfig(**pictures)).bfloat16()
    encoder.save_pretrained(tmp_path / "encoder")
    task = ZeroShotImages(class_names=["a", "b"], clip=str(tmp_path / "clip"))
    built = task.build_model({}, str(tmp_path / "encoder")).eval()
    picture = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    with torch.no_grad():
        (row,) = task.evaluate_batch(built, [{"image": picture, "label": 0}], [0])
    assert next(built.parameters()).dtype == torch.bfloat16 and row["accuracy"] in (0.0, 1.0)


@pytest.mark.parametrize("prompts", [["{{text}} so"], ["{{text}} so", "{{text}}?", "{{ text | upper }}"]])
def test_a_causal_model_chooses_the_likeliest_continuation(tmp_path: Path, prompts: list[str]):
    tokenizer = byte_tokenizer(64)
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2, **ends)
    ).eval()
    perturb(model, 0, 0.3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    choices = ["yes it is", "no", "{{text}}"]
    task = MultipleChoice(prompts=prompts, choices=choices)
    built = task.build_model({}, str(tmp_path))
    examples = [{"text": text, "label": index % 3} for index, text in enumerate(TEXTS)]
    right = []
    for template in prompts:
        found = []
        for example in examples:
            prompt = template.replace("{{text}}", example["text"])
            prompt = example["text"].upper() if "upper" in template else prompt
            start = tokenizer(prompt)["input_ids"]
            scores = []
            for choice in choices:
                answer = tokenizer(" " + choice.replace("{{text}}", example["text"]), add_special_tokens=False)[
                    "input_ids"
                ]
                with torch.no_grad():
                    logits = model(torch.tensor([start + answer])).logits[0].log_softmax(-1)
                scores.append(sum(float(logits[len(start) + at - 1, token]) for at, token in enumerate(answer)))
            found.append(float(int(np.argmax(scores)) == example["label"]))
        right.append(np.mean(found))
    with torch.no_grad():
        scores = task.summarize(task.evaluate_batch(built, examples, list(range(len(examples)))))
    assert scores == pytest.approx({"accuracy": np.median(right), "lowest": min(right), "highest": max(right)})


def test_templates_cannot_reach_python():
    with pytest.raises(ValueError, match="cannot be filled in"):
        render("{{ text.__class__.__mro__ }}", {"text": "a"})
    with pytest.raises(ValueError, match=r"cannot be filled in: 'words' is undefined. Columns: \['text'\]"):
        render("{{ words }}", {"text": "a"})
