"""Classes of an evaluation go by their names, and rows need pictures."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image

from hf_ext.data.opening import match_classes
from hf_ext.errors import DataError
from hf_ext.settings import build
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.tasks.series import SeriesClassificationTask
from hf_ext.tasks.signals import ImageTask, PixelTask
from hf_ext.training import TrainingArguments, train
from hf_ext.training.launch import evaluate_checkpoint
from tests.kit.process_state import forget_accelerate
from tests.kit.refusals import refused

from .diffusion_testing import MODEL as DIFFUSION

TINY = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}


def write_classes(folder: Path, *names: str) -> str:
    """A folder with one grey picture of 4 x 4 for each class, as bright as its name is long."""
    for name in names:
        (folder / name).mkdir(parents=True)
        Image.new("L", (4, 4), len(name)).save(folder / name / "one.png")
    return str(folder)


class Noted(PixelTask):
    """Notes the classes that are evaluated: the length of each name, by its brightness, and its number."""

    def evaluate_batch(self, model, examples, indices):
        rows = super().evaluate_batch(model, examples, indices)
        brightness = [int(np.asarray(example["image"])[0, 0]) for example in examples]
        self.noted = list(zip(brightness, [int(row["label"]) for row in rows], strict=True))
        return rows


def run_classes(folder: Path, train_path: str, eval_path: str, **options) -> Noted:
    values = {
        "method": "mrconv-pixels",
        "output_dir": str(folder),
        "data": {"train": {"path": train_path}, "eval": {"path": eval_path}},
        "model": TINY,
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": "none",
    }
    forget_accelerate()
    task = Noted(image_size=4, num_labels=3, **options)
    train(task, build(TrainingArguments, values))
    return task


def test_evaluation_data_are_scored_by_the_names_of_their_classes(tmp_path):
    trained = write_classes(tmp_path / "t", "a", "bb", "ccc")
    fewer, other = write_classes(tmp_path / "v", "a", "ccc"), write_classes(tmp_path / "w", "a", "dddd")
    assert run_classes(tmp_path / "run", trained, fewer).noted == [(1, 0), (3, 2)]
    with refused(DataError, "dddd", "label"):
        run_classes(tmp_path / "other", trained, other)
    # Names of the task are those of the classes, in training too; where they are other words, numbers count.
    task = run_classes(tmp_path / "order", trained, fewer, label_names=["ccc", "a", "bb"])
    assert task.noted == [(1, 1), (3, 0)]
    task = run_classes(tmp_path / "words", trained, fewer, label_names=["one", "two", "three"])
    assert task.noted == [(1, 0), (3, 2)]
    # The evaluation of a checkpoint goes by the recipe's names, or the checkpoint's own.
    recipe = tmp_path / "run.yaml"
    for names in (["ccc", "a", "bb"], []):
        values = {"method": "mrconv-pixels", "data": {"eval": {"path": fewer}}}
        recipe.write_text(json.dumps({**values, "task": {"image_size": 4, "num_labels": 3, "label_names": names}}))
        found = evaluate_checkpoint(str(tmp_path / "order" / "snapshot"), recipe)
        scores = {row["metric"]: row["value"] for row in found["results"]}
        expected = json.loads((tmp_path / "order" / "snapshot" / "eval.json").read_text())["results"]
        assert scores["loss"] == pytest.approx(next(row["value"] for row in expected if row["metric"] == "loss"))


def diffusion(**model) -> DisentangledDiTTask:
    task = build(DisentangledDiTTask, {"image_size": 8}, "task")
    task.build_model({**DIFFUSION, "num_classes": 2, **model}, None)
    return task


CLASSES = {"image_size": 8, "num_labels": 2}
TASKS = [PixelTask(**CLASSES), ImageTask(**CLASSES), diffusion(), SemanIRTask(patch_size=8)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
def test_a_row_without_a_picture_is_refused_in_words(task):
    for value, facts in ((None, ["image", "picture"]), ("a.png", ["picture", "str"])):
        with refused(DataError, *facts):
            task.training_sample({"image": value, "label": 0}, np.random.default_rng(0))


@pytest.mark.parametrize("column", ["x", "image"])
def test_a_task_learns_the_names_of_the_classes(column):
    if column == "x":
        task = SeriesClassificationTask(columns=["x"], num_labels=2, max_length=4)
        kind, values = datasets.List(datasets.Value("float32")), [[0.0, 1.0]] * 2
    else:
        task = build(DisentangledDiTTask, {"image_size": 8}, "task")
        kind, values = datasets.Image(), [Image.new("RGB", (8, 8))] * 2

    def data(labels: list[int], *names: str) -> datasets.Dataset:
        features = datasets.Features({column: kind, "label": datasets.ClassLabel(names=list(names))})
        return datasets.Dataset.from_dict({column: values[: len(labels)], "label": labels}, features=features)

    task.read_data(data([0, 1], "left", "right"))
    assert task.known_classes == ["left", "right"]
    assert match_classes(data([0, 1], "right", "left"), task)["label"][:] == [1, 0]
    assert match_classes(data([0], "right"), task)["label"][:] == [1]
    with refused(DataError, "up"):
        match_classes(data([0, 1], "left", "up"), task)
