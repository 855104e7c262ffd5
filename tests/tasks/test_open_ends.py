"""Examples without a class, places that cannot be written, and models of other tasks, told before the work."""

import json
from pathlib import Path

import datasets
import numpy as np
import peft
import pytest
import torch
import yaml
from PIL import Image

from hf_ext.errors import DataError, UsageError
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.diffusion_data import Crops, View, load_autoencoder, write_row, write_tar
from hf_ext.tasks.diffusion_noise import make_scheduler
from hf_ext.tasks.diffusion_transfer import Checkpoint, Transfer, is_part_of, transfer
from hf_ext.tasks.picture_scores import score
from hf_ext.tasks.precompute import precompute
from hf_ext.tasks.sequences import MRConvTask
from hf_ext.tasks.series import PositionsTask, SeriesClassificationTask, SeriesRegressionTask
from hf_ext.tasks.texts import LanguageModelTask, MaskedLanguageModelTask, RetrievalTask, TextTask
from hf_ext.training import evaluate_checkpoint
from hf_ext.training.arguments import DataSource, build
from hf_ext.training.evaluation import evaluate, write_results
from hf_ext.training.models import STARTED_ANEW, load_trained
from tests.kit.refusals import refused

from .diffusion_testing import MODEL, rows_of, settings
from .test_precompute_campaign import png


@pytest.mark.parametrize("form", ["tar", "jsonl"])
def test_an_example_without_a_class_is_listed_and_left_out(tmp_path, vae, form):
    place = tmp_path / "data"
    place.mkdir()
    pictures = np.random.default_rng(0).integers(256, size=(8, 16, 16, 3), dtype=np.uint8)
    if form == "tar":
        parts = [{"png": png(pixels), "cls": b"1"} for pixels in pictures]
        del parts[6]["cls"]
        with (place / "0.tar").open("wb") as file:
            write_tar(file, ((f"{number:03d}", part) for number, part in enumerate(parts)))
    else:
        for number, pixels in enumerate(pictures):
            (place / f"{number:03d}.png").write_bytes(png(pixels))
        rows = [{"file_name": f"{number:03d}.png", "label": None if number == 6 else 1} for number in range(8)]
        (place / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = precompute(settings(place, vae, max_bad_examples=0.5), tmp_path / "out")
    assert len(rows_of(out)) == 7
    (listed,) = map(json.loads, (out / "bad_examples.jsonl").read_text().splitlines())
    assert "006" in listed["file"] and "class" in listed["reason"]


@pytest.mark.parametrize("kind", ["folder", "below a file"])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_read(tmp_path, kind):
    place = tmp_path / "kept.npz"
    if kind == "folder":
        place.mkdir()
    else:
        place.write_bytes(b"")
        place = place / "kept.npz"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"method": "semanir", "data": {"eval": {"path": "nowhere"}}}))
    with refused(UsageError if kind == "folder" else OSError, "kept.npz"):
        score("nowhere", "nowhere", "nobody/network", keep=place, device="cpu")
    with refused(UsageError if kind == "folder" else OSError, "kept.npz"):
        evaluate_checkpoint("nowhere", tmp_path / "run.yaml", output=place)


def test_parts_from_the_base_itself_are_not_opened_again(tmp_path, vae, monkeypatch):
    task = build(DisentangledDiTTask, {"image_size": 16, "vae": str(vae)}, "task")
    task.id2label = {0: "cat", 1: "dog"}
    model, base = task.build_model(MODEL, None), str(tmp_path / "base")
    task.save_model(model, model.state_dict(), tmp_path / "base")
    part = load_autoencoder(base)
    assert is_part_of(base, "vae", part, str(vae))
    monkeypatch.setattr("hf_ext.tasks.diffusion_transfer.open_checkpoint", None)
    assert is_part_of(base, "vae", part, f"{base}/")
    assert is_part_of(base, "text_encoder", part, str(vae))


# Of latents: all in the data, and one that a training reads; the last is of none like the model's.
READ = [
    *(([64, 96], [size], size, None) for size in ([64, 64], [80, 48], [56, 72])),
    ([32, 32], [[32, 32], [64, 64]], [64, 64], None),
    ([32, 32], [[64, 64]], [64, 64], "32 × 32"),
    ([64, 96], [[32, 32]], [32, 32], "78 × 78"),
]


@pytest.mark.parametrize(("own", "sizes", "size", "told"), READ)
def test_latents_of_about_the_models_area_are_read(own, sizes, size, told):
    view = View(np.zeros((8, 8, 3)), (8, 8), (0, 0), False)
    row = lambda size: {**write_row(torch.zeros(3, *size), view), "label": 1}  # noqa: E731
    data = datasets.Dataset.from_list([row(each) for each in sizes])
    task = build(DisentangledDiTTask, {"image_size": own}, "task")
    task.read_data(data)
    task.build_model({**MODEL, "num_classes": 2}, None)
    read = lambda: task.training_sample(row(size), np.random.default_rng(0))  # noqa: E731
    if told is None:
        assert list(read()["latents"].shape) == [3, *size]
    else:
        with refused(DataError, "--size", told, str(own)):
            read()


def test_printing_inks_are_left_out_of_a_training_and_evaluated_as_pillow_reads_them():
    inks = Image.new("RGB", (8, 8), "teal").convert("CMYK")
    task = build(DisentangledDiTTask, {"image_size": 8}, "task")
    model = task.build_model({**MODEL, "num_classes": 2}, None)
    rows = [{"image": picture, "label": 0} for picture in (inks, inks.convert("RGB"))]
    with refused(DataError, "CMYK"):
        task.training_sample(rows[0], np.random.default_rng(0))
    first, second = task.evaluate_batch(model, rows, [0, 0])
    assert first["loss"] == pytest.approx(second["loss"])


def test_another_shape_of_equal_area_keeps_the_schedule():
    scheduler = make_scheduler("epsilon", {}, False)
    config = {"sample_size": 32, "patch_size": 2, "pos_embed_base_size": [16, 16]}
    checkpoint = Checkpoint(Path(), config, scheduler, None)
    for size, is_kept in (((16, 64), True), ((32, 64), False)):
        found, after, _ = transfer(checkpoint, size, Transfer(), Crops())
        assert found["sample_size"] == list(size) and (after is scheduler) == is_kept


SIZES = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}
NAMED: dict = {"columns": ["x", "y"], "target_columns": ["a", "b"], "num_labels": 2, "label_names": ["no", "yes"]}


def made(kind: type[MRConvTask], **given: object) -> MRConvTask:
    known = {name: value for name, value in {**NAMED, **given}.items() if name in kind.__dataclass_fields__}
    return kind(max_length=16, **known)


# What was trained, what scores it, the adapter on it, and what a refusal names.
SCORED = [
    *((kind, kind, {}, None, None) for kind in (TextTask, LanguageModelTask, MaskedLanguageModelTask, RetrievalTask)),
    *((kind, kind, {}, None, None) for kind in (PositionsTask, SeriesClassificationTask, SeriesRegressionTask)),
    (TextTask, TextTask, {"num_labels": 3, "label_names": []}, None, "classifier.weight"),
    (LanguageModelTask, TextTask, {}, None, "classifier.weight"),
    (TextTask, LanguageModelTask, {}, None, "another kind"),
    (TextTask, RetrievalTask, {}, None, "comparison.weight"),
    (PositionsTask, SeriesClassificationTask, {}, None, "another kind"),
    (SeriesRegressionTask, SeriesClassificationTask, {}, None, "another kind"),
    (SeriesClassificationTask, SeriesRegressionTask, {}, None, "another kind"),
    (SeriesRegressionTask, SeriesRegressionTask, {"target_columns": ["a"]}, None, "classifier.weight"),
    (SeriesRegressionTask, SeriesRegressionTask, {"target_columns": ["b", "a"]}, None, "target_columns"),
    (SeriesRegressionTask, SeriesRegressionTask, {"target_columns": ["c", "d"]}, None, None),
    (SeriesRegressionTask, SeriesRegressionTask, {"columns": ["y", "x"]}, None, "task.columns"),
    (PositionsTask, PositionsTask, {"columns": ["x", "z"]}, None, None),
    (TextTask, TextTask, {}, {}, None),
    (LanguageModelTask, LanguageModelTask, {}, {}, None),
    (LanguageModelTask, TextTask, {}, {"modules_to_save": ["classifier"]}, None),
    (LanguageModelTask, TextTask, {}, {}, "classifier.weight"),
    (SeriesRegressionTask, SeriesRegressionTask, {"columns": ["y", "x"]}, {}, "task.columns"),
]


@pytest.mark.parametrize(("trained", "scores", "given", "adapter", "told"), SCORED)
def test_a_model_is_scored_as_what_it_was_trained_for(tmp_path, trained, scores, given, adapter, told):
    base, place, task = made(trained), tmp_path / "base", made(scores, **given)
    model = base.build_model({**SIZES, "bidirectional": trained is MaskedLanguageModelTask}, None)
    base.save_model(model, model.state_dict(), place)
    if adapter is not None:
        model = made(scores).build_model({}, str(place))
        model.name_or_path, place = str(place), tmp_path / "adapter"
        config = peft.LoraConfig(target_modules="all-linear", **adapter)
        peft.get_peft_model(model, config).save_pretrained(place)
    if told is None:
        assert adapter or not getattr(load_trained(task, str(place)), STARTED_ANEW)
        load_trained(task, str(place))
    else:
        with refused(DataError, told):
            load_trained(task, str(place))


SERIES = {"x": [1.0, 2.0], "y": [3.0, 4.0], "a": 1.0, "b": 2.0}
BROKEN = [
    *((kind, {"text": "abcd", "label": 0}) for kind in (TextTask, LanguageModelTask, MaskedLanguageModelTask)),
    (RetrievalTask, {"text1": "ab", "text2": "c", "label": 0}),
    (PositionsTask, {**SERIES, "label": [0, 0]}),
    (SeriesClassificationTask, {**SERIES, "label": 0}),
    (SeriesRegressionTask, SERIES),
]


@pytest.mark.parametrize(("kind", "example"), BROKEN)
def test_answers_that_are_not_numbers_have_no_score(kind, example, caplog):
    task = made(kind)
    model = task.build_model({**SIZES, "bidirectional": kind is MaskedLanguageModelTask}, None)
    found = evaluate(task, model, datasets.Dataset.from_list([example] * 2))
    assert "NaN" not in caplog.text and all(map(np.isfinite, found.values()))
    torch.nn.init.constant_([*model.parameters()][-1], float("nan"))
    found = evaluate(task, model, datasets.Dataset.from_list([example] * 2))
    told = {name for name, value in found.items() if np.isnan(value)}
    assert told >= {*task.metric_names} - {"mae_of_mean"} and "2 of 2" in caplog.text


def test_scores_name_their_precision_and_are_numbers(tmp_path, caplog):
    task, out = made(TextTask), tmp_path / "eval.json"
    model = task.build_model(SIZES, None)
    task.save_model(model, model.state_dict(), tmp_path / "model")
    datasets.Dataset.from_list([{"text": "abcd", "label": 0}, {"text": "z", "label": 1}]).to_json(tmp_path / "d.jsonl")
    about = {"method": "mrconv-text", "mixed_precision": "fp16", "data": {"eval": {"path": str(tmp_path / "d.jsonl")}}}
    about["task"] = {"max_length": 16, "num_labels": 2, "label_names": NAMED["label_names"]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(about))
    score = lambda *flags: evaluate_checkpoint(str(tmp_path / "model"), tmp_path / "run.yaml", [*flags])  # noqa: E731
    (_, plain), (_, half) = score()["results"], score("--mixed_precision", "bf16")["results"]
    assert plain["value"] != half["value"] == pytest.approx(plain["value"], rel=0.02)
    assert ("mixed_precision" in plain["arguments"], half["arguments"]["mixed_precision"]) == (False, "bf16")
    torch.nn.init.constant_(model.classifier.bias, float("nan"))
    task.save_model(model, model.state_dict(), tmp_path / "model")
    with refused(DataError, "accuracy", "NaN"):
        score()
    write_results(out, task, {"accuracy": float("inf"), "loss": 1.0}, {"": DataSource("d")})
    assert [each["metric"] for each in json.loads(out.read_text())["results"]] == ["loss"]
    assert "accuracy (inf)" in caplog.text
