"""Pictures of 16 bits are to a classifier what those of 8 are; rows need pictures; classes go by their names."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from hf_ext.answers.classifying import read_picture
from hf_ext.errors import DataError
from hf_ext.restoration.camera import UnreadableError
from hf_ext.restoration.encoding import Frames, Picture, encode_frames
from hf_ext.restoration.files import read_8_bits
from hf_ext.settings import build
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.tasks.pictures import in_colours
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.tasks.signals import ImageTask, PixelTask
from hf_ext.training.launch import evaluate_checkpoint
from tests.kit.own_data import write_classes
from tests.kit.pictures import encode
from tests.kit.refusals import refused
from tests.restoration.tiff_testing import grey_tiff
from tests.training.tiny import run

from .diffusion_testing import MODEL as DIFFUSION
from .diffusion_testing import make_arguments

# A ramp from black to white, and the same in 16 bits: as far from it as rounding allows.
RAMP = np.linspace(0, 255, 64).round().astype(np.uint8).reshape(8, 8)
DEEP = (RAMP.astype(int) * 257 + np.resize([-128, 0, 128], (8, 8))).clip(0, 65535).astype(np.uint16)
FLOATS = Image.fromarray(RAMP / np.float32(255))


def deep_picture(mode: str) -> Image.Image:
    deep = Image.fromarray(DEEP)
    return deep if mode == "I;16" else deep.convert("I") if mode == "I" else deep.convert("I").convert(mode)


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N", "I"])
def test_16_bits_become_8(mode):
    picture = deep_picture(mode)
    assert picture.mode == mode
    np.testing.assert_array_equal(np.asarray(in_colours(picture, "L")), RAMP)
    np.testing.assert_array_equal(np.asarray(in_colours(picture, "RGB")), np.stack([RAMP] * 3, axis=-1))


@pytest.mark.parametrize(("bits", "photometric"), [(12, 1), (16, 0), (16, 1)])
def test_16_bits_of_a_tiff_become_8_however_they_lie(bits, photometric):
    """Of a file, and of a row of data that has it."""
    values = np.rint(RAMP.astype(float) * (2**bits - 1) / 255).astype(int)
    data = grey_tiff(2**bits - 1 - values if photometric == 0 else values, bits=bits, photometric=photometric)
    np.testing.assert_array_equal(np.asarray(read_picture(data))[..., 0], RAMP)
    rows = datasets.Dataset.from_list([{"image": {"bytes": data, "path": None}}])
    example = rows.cast_column("image", datasets.Image())[0]
    np.testing.assert_array_equal(np.asarray(in_colours(example["image"], "L")), RAMP)
    np.testing.assert_array_equal(np.asarray(read_8_bits(data)), RAMP)


@pytest.mark.parametrize("values", [np.float32([[0, 1]]), np.int32([[-1, 70000]]), np.int32([[0, 65536]])])
def test_what_has_no_known_range_is_refused(values):
    mode = "F" if values.dtype == np.float32 else "I"
    said = f"a picture has PIL mode '{mode}' and values from {values.min():g} to {values.max():g},"
    with pytest.raises(ValueError, match=f"{said} and only whole .* 0 to 65535 .*: convert it to 8 bits"):
        in_colours(Image.fromarray(values), "RGB")


def trained(task: PixelTask | ImageTask, picture: Image.Image) -> torch.Tensor:
    example = {"image": picture, "label": 0}
    samples = task.training_sample(example, np.random.default_rng(0)), task.encode(example)
    return torch.stack([sample[next(iter(sample))] for sample in samples])


TWO_CLASSES = {"image_size": 8, "num_labels": 2}
IN_COLOURS = {**TWO_CLASSES, "mean": [0.5] * 3, "std": [0.5] * 3}
PLACES = {
    "grey pixels": lambda picture: trained(PixelTask(**TWO_CLASSES), picture),
    "coloured pixels": lambda picture: trained(PixelTask(**IN_COLOURS), picture),
    "images": lambda picture: trained(ImageTask(**TWO_CLASSES), picture),
    "a file": lambda picture: torch.from_numpy(np.array(read_picture(encode(picture, "TIFF")))),
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_takes_16_bits_and_refuses_floats(place):
    see = PLACES[place]
    wanted = see(Image.fromarray(RAMP))
    assert len(wanted.unique()) > 30
    for mode in ("I;16", "I"):
        torch.testing.assert_close(see(deep_picture(mode)), wanted, rtol=0, atol=0)
    with refused(DataError, "PIL", "8 bits"):
        see(FLOATS)


def test_a_server_takes_16_bits_and_says_what_else_to_send():
    colours = np.stack([RAMP, RAMP.T, 255 - RAMP], axis=-1)
    for pixels in (RAMP[..., None], colours):
        data = encode_frames(Frames([Picture(pixels.astype(np.uint16) * 257)]), "PNG")
        picture = read_8_bits(data)
        assert picture.mode == ("RGB" if pixels is colours else "L")
        np.testing.assert_array_equal(np.asarray(picture).reshape(pixels.shape), pixels)
    with refused(UnreadableError, "PIL", "16 bits"):
        read_8_bits(encode(FLOATS, "TIFF"))


TINY = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 4}


class Noted(PixelTask):
    """Notes the classes that are evaluated: the length of each name, by its brightness, and its number."""

    def evaluate_batch(self, model, examples, indices):
        rows = super().evaluate_batch(model, examples, indices)
        brightness = [int(np.asarray(example["image"])[0, 0]) for example in examples]
        self.noted = list(zip(brightness, [int(row["label"]) for row in rows], strict=True))
        return rows


def run_classes(folder: Path, train_path: str, eval_path: str, **options) -> Noted:
    values = {"method": "mrconv-pixels", "model": TINY, "max_steps": 1, "per_device_train_batch_size": 2}
    values["data"] = {"train": {"path": train_path}, "eval": {"path": eval_path}}
    task = Noted(image_size=4, num_labels=3, **options)
    run(task, make_arguments(folder, Path(train_path), **values))
    return task


def test_evaluation_data_are_scored_by_the_names_of_their_classes(tmp_path):
    trained, fewer, other = (
        write_classes(tmp_path / name, *names.split(), side=4)
        for name, names in (("t", "a bb ccc"), ("v", "a ccc"), ("w", "a dddd"))
    )
    assert run_classes(tmp_path / "run", trained, fewer).noted == [(1, 0), (3, 2)]
    with refused(DataError, "dddd", "label"):
        run_classes(tmp_path / "other", trained, other)
    # Names of the task are those of the classes, in training too; where they are other words, numbers count.
    order, words = ["ccc", "a", "bb"], ["one", "two", "three"]
    assert run_classes(tmp_path / "order", trained, fewer, label_names=order).noted == [(1, 1), (3, 0)]
    assert run_classes(tmp_path / "words", trained, fewer, label_names=words).noted == [(1, 0), (3, 2)]
    # The evaluation of a checkpoint goes by the recipe's names, or the checkpoint's own.
    recipe, snapshot = tmp_path / "run.yaml", tmp_path / "order" / "snapshot"
    for names in (order, []):
        values = {"method": "mrconv-pixels", "data": {"eval": {"path": fewer}}}
        recipe.write_text(json.dumps({**values, "task": {"image_size": 4, "num_labels": 3, "label_names": names}}))
        reports = evaluate_checkpoint(str(snapshot), recipe), json.loads((snapshot / "eval.json").read_text())
        scores = [{row["metric"]: row["value"] for row in report["results"]} for report in reports]
        assert scores[0]["loss"] == pytest.approx(scores[1]["loss"])


def diffusion(**model) -> DisentangledDiTTask:
    task = build(DisentangledDiTTask, {"image_size": 8}, "task")
    task.build_model({**DIFFUSION, "num_classes": 2, **model}, None)
    return task


PICTURE_TASKS = [PixelTask(**TWO_CLASSES), ImageTask(**TWO_CLASSES), diffusion(), SemanIRTask(patch_size=8)]


@pytest.mark.parametrize("task", PICTURE_TASKS, ids=lambda task: type(task).__name__)
def test_a_row_without_a_picture_is_refused_in_words(task):
    for value, facts in ((None, ["image", "picture"]), ("a.png", ["picture", "str"])):
        with refused(DataError, *facts):
            task.training_sample({"image": value, "label": 0}, np.random.default_rng(0))
