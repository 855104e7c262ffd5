"""Scores of one of the paper's tables, task by task, as an evaluate.yaml says, on the GPU if there is one.

python examples/emr/paper/score.py merge.yaml evaluate.yaml individual.json
python examples/emr/paper/score.py merged evaluate.yaml emr.json --against individual.json

SOURCE is the YAML file of a merge, whose models each answer for their own task; a merge with tasks; or one model that
answers for all. With --against each score is also given as a share of the individual model's, and drawn beside.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment
from sklearn.metrics import matthews_corrcoef
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CLIPModel,
    CLIPVisionModel,
    pipeline,
)
from transformers.modeling_outputs import BaseModelOutput

from hf_ext.answers.classifying import load_head, load_reader
from hf_ext.data.opening import open_source
from hf_ext.emr.artifact import read_tasks
from hf_ext.emr.weights import task_checkpoint
from hf_ext.errors import run_script
from hf_ext.files import read_json, write_json
from hf_ext.merging.configuration import MergeConfig
from hf_ext.settings import build, read_yaml
from hf_ext.tasks.pictures import in_colours
from hf_ext.training.arguments import DataSource
from hf_ext.training.models import adapter_base

# Templates may be anybody's: no attributes of Python, no silent blanks.
JINJA = SandboxedEnvironment(undefined=StrictUndefined)


@dataclass
class Entry:
    """One task of a recipe: its data, how it is scored, the metric of the table, and options of the method."""

    method: str
    data: dict
    metric: str = "accuracy"
    task: dict = field(default_factory=dict)


def score_texts(
    place: str, rows: Any, batch: int, text_columns: list[str], max_length: int = 512, **labels: Any
) -> dict[str, float]:
    """Classes of texts or of pairs, or the number that a model of one output gives."""
    model = load_head(AutoModelForSequenceClassification, place)
    tokenizer = load_reader(AutoTokenizer, adapter_base(place) or place)
    # GPT-2 has no token for padding. Decoders find the last token by this id: it must be what pads here.
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side, model.config.pad_token_id = "right", tokenizer.pad_token_id
    texts = [
        dict(zip(("text", "text_pair"), row, strict=False))
        for row in zip(*(rows[name] for name in text_columns), strict=True)
    ]
    run = pipeline("text-classification", model=model, tokenizer=tokenizer)
    words = {"truncation": True, "max_length": max_length, "function_to_apply": "none", "top_k": 1}
    found = [best for (best,) in run(texts, batch_size=batch, **words)]
    if model.config.num_labels == 1:
        return compare([item["score"] for item in found], list(rows[labels.get("label_column", "label")]))
    return compare(read_numbers(model, found), read_labels(rows, **labels))


def score_pictures(
    place: str, rows: Any, batch: int, image_column: str = "image", processor: str | None = None, **labels: Any
) -> dict[str, float]:
    """Classes of pictures by the model's own head."""
    model = load_head(AutoModelForImageClassification, place)
    run = pipeline(
        "image-classification", model=model, image_processor=load_reader(AutoImageProcessor, processor or place)
    )
    found = run([in_colours(picture, "RGB") for picture in rows[image_column]], batch_size=batch, top_k=1)
    return compare(read_numbers(model, [best for (best,) in found]), read_labels(rows, **labels))


@torch.no_grad()
def score_by_texts(
    place: str, rows: Any, batch: int, class_names: list[str], templates: list[str], clip: str, **labels: Any
) -> dict[str, float]:
    """Classes of pictures by the nearest text of a CLIP: the mean of the features of a class's templates."""
    encoder, whole = load_head(CLIPVisionModel, place), load_head(CLIPModel, clip)
    tokenizer, processor = load_reader(AutoTokenizer, clip), load_reader(AutoImageProcessor, clip)
    head = []
    for name in class_names:
        texts = [template.replace("{}", name) for template in templates]
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(whole.device)
        features = whole.text_projection(whole.text_model(**tokens).pooler_output)
        head.append(F.normalize(F.normalize(features, dim=-1).mean(0), dim=-1))
    found = []
    for first in range(0, len(rows), batch):
        pictures = [in_colours(picture, "RGB") for picture in rows[first : first + batch]["image"]]
        pixels = processor(pictures, return_tensors="pt")["pixel_values"].to(encoder.device, encoder.dtype)
        features = whole.visual_projection(encoder(pixel_values=pixels).pooler_output.to(whole.dtype))
        found += (F.normalize(features, dim=-1) @ torch.stack(head).T).argmax(-1).tolist()
    return compare(found, read_labels(rows, **labels))


def score_choices(
    place: str, rows: Any, batch: int, prompts: list[str], choices: list[str], max_length: int = 512, **labels: Any
) -> dict[str, float]:
    """Answers to prompts by their log-likelihood under an encoder-decoder, as T0 is scored; the median of the prompts.

    Causal models go through lm-evaluation-harness: examples/emr/lm_harness.py.
    """
    model, tokenizer = (
        load_head(AutoModelForSeq2SeqLM, place),
        load_reader(AutoTokenizer, adapter_base(place) or place),
    )
    truth = read_labels(rows, **labels)
    scores = []
    for prompt in prompts:
        found = []
        for first in range(0, len(rows), batch):
            examples = [rows[place] for place in range(first, min(first + batch, len(rows)))]
            found += choose(model, tokenizer, examples, prompt, choices, max_length)
        scores.append(compare(found, truth)["accuracy"])
    return {"accuracy": float(np.median(scores)), "lowest": min(scores), "highest": max(scores)}


@torch.no_grad()
def choose(
    model: Any, tokenizer: Any, examples: list[dict[str, Any]], prompt: str, choices: list[str], max_length: int
) -> list[int]:
    """The likeliest answer to the prompt of each example: log-probabilities, summed over the answer's tokens."""
    options = {"padding": True, "truncation": True, "return_tensors": "pt"}
    questions = [JINJA.from_string(prompt).render(example).strip() for example in examples]
    answers = [JINJA.from_string(choice).render(example).strip() for example in examples for choice in choices]
    inputs = tokenizer(questions, max_length=max_length, **options).to(model.device)
    targets = tokenizer(text_target=answers, **options).to(model.device)
    labels = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, -100)
    # The encoder reads each prompt once, whatever the number of answers.
    states = model.get_encoder()(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]
    logits = model(
        encoder_outputs=BaseModelOutput(states.repeat_interleave(len(choices), 0)),
        attention_mask=inputs["attention_mask"].repeat_interleave(len(choices), 0),
        labels=labels,
    ).logits.float()
    found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    best: list[int] = (found * (labels != -100)).sum(-1).view(-1, len(choices)).argmax(-1).tolist()
    return best


def read_numbers(model: Any, found: list[dict[str, Any]]) -> list[int]:
    """The numbers of the classes that a pipeline named."""
    numbers = {name: number for number, name in model.config.id2label.items()}
    return [numbers[item["label"]] for item in found]


def read_labels(rows: Any, label_column: str = "label", labels: list[Any] | None = None) -> list[int]:
    """The right classes as numbers; `labels` holds the column's values in the order of the model's outputs."""
    return [labels.index(value) if labels else int(value) for value in rows[label_column]]


def compare(found: list[float], truth: list[float]) -> dict[str, float]:
    """Accuracy and Matthews correlation of classes, correlations of numbers; 0 where one side is constant."""
    pair = pd.DataFrame({"found": found, "truth": truth}, dtype=float)
    pearson, spearman = (float(pair.corr(kind).fillna(0.0).iloc[0, 1]) for kind in ("pearson", "spearman"))
    is_classes = bool((pair % 1 == 0).all(axis=None))
    return {
        "accuracy": float((pair["found"] == pair["truth"]).mean()),
        # A matrix of all pairs of classes, which scores are not.
        "matthews": float(matthews_corrcoef(pair["truth"], pair["found"])) if is_classes else 0.0,
        "pearson": pearson,
        "spearman": spearman,
        "pearson_spearman": (pearson + spearman) / 2,
    }


METHODS: dict[str, Callable[..., dict[str, float]]] = {
    "text-classification": score_texts,
    "image-classification": score_pictures,
    "zero-shot-images": score_by_texts,
    "multiple-choice": score_choices,
}


def read_settings(path: Path) -> dict[str, Any]:
    """Settings of a recipe, and those it has from the recipe that its `like` names."""
    given = read_yaml(path)
    like = given.pop("like", None)
    return given if like is None else {**read_settings(path.parent / like), **given}


def read_recipe(path: Path) -> tuple[dict[str, Entry], int]:
    """The tasks of a recipe, with what it says for all of them, and its batch size."""
    given = read_settings(path)
    batch, shared, tasks = given.pop("batch_size", 32), given.pop("task", {}), given.pop("tasks")
    entries = {
        name: build(Entry, {**given, **entry, "task": {**shared, **entry.get("task", {})}}, f"tasks.{name}")
        for name, entry in tasks.items()
    }
    return entries, batch


def find_checkpoints(source: str, names: list[str]) -> dict[str, tuple[str, str | None]]:
    """For each task a checkpoint, and its name in it where that is a merge."""
    if source.endswith((".yaml", ".yml")):
        return {name: (spec, None) for name, spec in MergeConfig.from_yaml(source).tasks.items()}
    merged = read_tasks(source)
    return {name: (source, None if merged is None else name) for name in merged or names}


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """A bar for each task: its score as a share of the individual model's."""
    figure, axes = plt.subplots(figsize=(6, 1 + 0.25 * len(rows)), layout="constrained")
    axes.barh(list(rows), [row["of_individual"] or 0.0 for row in rows.values()])
    axes.axvline(1.0, color="tab:red")
    axes.invert_yaxis()
    axes.set_xlabel("score, as a share of the individual model's")
    figure.savefig(path)


def main() -> None:
    """Scores each task, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    given = parser.parse_args()
    entries, batch = read_recipe(given.recipe)
    found = find_checkpoints(given.source, list(entries))
    if absent := found.keys() ^ entries.keys():
        raise SystemExit(f"{given.recipe} and {given.source} differ in the tasks {', '.join(sorted(absent))}.")
    known = read_json(given.against)["tasks"] if given.against else {}
    rows: dict[str, dict[str, Any]] = {}
    for name, (checkpoint, task) in found.items():
        entry = entries[name]
        row: dict[str, Any] = {"recipe": asdict(entry)}
        if known and known.get(name, {}).get("recipe") != row["recipe"]:
            raise SystemExit(f"{given.against}: task {name!r} was measured by another recipe; evaluate both by one.")
        with task_checkpoint(checkpoint, task) as place:
            data = open_source(build(DataSource, entry.data), f"tasks.{name}.data")
            row["scores"] = METHODS[entry.method](place, data, batch, **entry.task)
        row["value"] = row["scores"][entry.metric]
        if known:
            individual = known[name]["value"]
            row |= {"individual": individual, "of_individual": row["value"] / individual if individual > 0 else None}
        rows[name] = row
        print(f"{name:<16} {entry.metric:<16} {row['value']:.4f}  {row.get('individual', '')}")
        mean = float(np.mean([row["value"] for row in rows.values()]))
        write_json(given.out, {"tasks": rows, "mean": {"value": mean}})
    print(f"{'mean':<33} {mean:.4f}")
    if known:
        draw(rows, given.out.with_suffix(".png"))


if __name__ == "__main__":
    run_script(main)
