"""The manifest and the files of an artifact: what is written is read back, what is hostile is refused; rescalers."""

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_ext.emr.arithmetic import SUMS, compute_scales
from hf_ext.emr.artifact import open_extras, open_masks, open_unified, read_sums
from hf_ext.emr.manifest import Manifest, SourceRecord, TaskRecord, TensorRecord
from hf_ext.hub.header_format import CheckpointError
from tests.kit.refusals import refused

SUM_COLUMNS = {"columns": ",".join(SUMS)}
SUMMED = ("abs", "masked_abs", "square", "masked_dot", "masked_square")
ABS, MASKED_ABS, SQUARE, MASKED_DOT, MASKED_SQUARE = map(SUMS.index, SUMMED)


@pytest.fixture
def written(tmp_path: Path) -> Manifest:
    """Two tensors, of which one is merged over its first 600 elements by the task `a.b`; written by hand."""
    folder, place = tmp_path, tmp_path / "tasks" / "a.b"
    place.mkdir(parents=True)
    save_file({"w": torch.zeros(100, 7), "ids": torch.arange(3)}, folder / "model.safetensors")
    save_file({"m.w": torch.zeros(128, dtype=torch.uint8)}, place / "mask.safetensors")
    save_file({"m.w": torch.ones(120), "head": torch.ones(2, 2)}, place / "extra.safetensors")
    save_file({"sums": torch.ones(1, 10, dtype=torch.float64)}, place / "sums.safetensors", metadata=SUM_COLUMNS)
    size = (folder / "model.safetensors").stat().st_size
    files = {"model.safetensors": {"bytes": size, "sha256": "a" * 64, "header_sha256": "b" * 64}}
    task = TaskRecord(
        origin=SourceRecord("me/a", "c" * 40, files), architecture="BertForSequenceClassification", base_prefix="",
        task_prefix="m.", scale=0.1, density=0.5, shared=("m.ids",), tails={"m.w": (120, 6)},
    )  # fmt: skip
    manifest = Manifest(
        library="transformers", base=SourceRecord("me/base", None, files),
        unified={"model.safetensors": {"bytes": size}}, method={"method": "emr", "rescale": "global"},
        tensors=(TensorRecord("w", (100, 7), torch.float32, 600), TensorRecord("ids", (3,), torch.int64, 0)),
        aliases={"tied": "w"}, tasks={"a.b": task}, version="0.1.0",
    )  # fmt: skip
    manifest.write(folder)
    return manifest


@pytest.fixture
def folder(written: Manifest, tmp_path: Path) -> Path:
    return tmp_path


def test_what_is_written_is_read_back(written, tmp_path):
    manifest = Manifest.read(tmp_path)
    assert manifest == written and list(manifest.merged) == ["w"]
    assert manifest.tasks["a.b"].base_name("m.w") == "w"
    with open_unified(tmp_path, manifest) as unified, open_masks(tmp_path, manifest, "a.b") as masks:
        assert set(unified) == {"w", "ids"} and set(masks) == {"m.w"}
    with open_extras(tmp_path, manifest, "a.b") as extras:
        assert set(extras) == {"m.w", "head"}
    assert read_sums(tmp_path, manifest, "a.b").shape == (1, 10)
    text = (tmp_path / "emr.json").read_text()
    assert '"scale_hex": "0x1.999999999999ap-4"' in text and '"scale": 0.1' in text


@given(scales=st.dictionaries(st.text(min_size=1), st.floats(0, 1e300), min_size=1))
def test_scales_are_exact(folder, scales):
    manifest = Manifest.read(folder)
    task = dataclasses.replace(manifest.tasks["a.b"], scale=None, scales=scales)
    dataclasses.replace(manifest, tasks={"a.b": task}).write(folder)
    assert Manifest.read(folder).tasks["a.b"].scales == scales


TASK = ("tasks", "a.b")
HOSTILE = {
    "other format": (("format",), "x", '`format` must be "emr-merging"'),
    "newer version": (("format_version",), 3, "a newer hf-ext"),
    "bit order": (("bit_order",), "big", "`bit_order`"),
    "no task": (("tasks",), {}, "`tasks` must be an object with at least one task"),
    "parent as task": (("tasks",), {"..": {}}, "a task must be named by"),
    "line break in a task": (("tasks",), {"a\n": {}}, "a task must be named by"),
    "file in a folder": (("unified", "files"), {"../model.safetensors": {"bytes": 1}}, "without folders"),
    "hidden file": ((*TASK, "files"), {".env": {"bytes": 1}}, "without folders"),
    "negative length": (("unified", "files"), {"model.safetensors": {"bytes": -1}}, "`bytes`"),
    "hash": (("base", "files", "model.safetensors", "sha256"), "xyz", "`sha256`"),
    "base folder": (("base", "folder"), "../base", '`folder` of the base must be "base"'),
    "revision": (("base", "revision"), "main", "`revision` of the base must be a commit"),
    "no source": (("base", "source"), None, "`source` of the base must be a text"),
    "rescale": (("method", "rescale"), "magic", "`rescale` must be one of"),
    "merged as number": (("method", "merged"), 5, "`merged` a text or null"),
    "no tensors": (("tensors",), None, "`tensors` must be a list"),
    "huge size": (("tensors", 0, "shape"), [2**63, 7], "`shape` of 'w' must be a list of sizes"),
    "too many elements": (("tensors", 0, "elements"), 701, "`elements` of 'w' must be from 0 to 700"),
    "unknown type": (("tensors", 0, "dtype"), "F7", "the merged tensor 'w' must be float32"),
    "unknown type of what is not merged": (("tensors", 1, "dtype"), "F7", "`dtype` of 'ids' must be one of"),
    "type as list": (("tensors", 0, "dtype"), ["F32"], "`dtype` of 'w' must be a text"),
    "a tensor twice": (("tensors", 1, "name"), "w", "no tensor may come twice"),
    "alias of a tensor": (("aliases",), {"w": "w"}, "an alias must lead"),
    "infinite scale": ((*TASK, "scale_hex"), "inf", "`scale_hex` of task 'a.b' must be a finite hexadecimal number"),
    "negative scale": ((*TASK, "scale_hex"), "-0x1p+0", "not negative"),
    "scale as number": ((*TASK, "scale_hex"), 0.5, "in quotes"),
    "both scales": ((*TASK, "scales"), {}, "either scale_hex or scales"),
    "no such deltas": (("deltas",), 3, "`deltas` must be 1, 2 or missing"),
    "deltas of an earlier version": (("deltas",), 1, "`deltas` belongs to format_version 2"),
    "tails": ((*TASK, "tails"), {"m.w": [1]}, "the tail of 'm.w' must be an object"),
    "tail": ((*TASK, "tails"), {"m.w": {"shape": "x"}}, "`shape` of the tail of 'm.w' must be a list of sizes"),
    **{
        f"file {name}": (("files",), {name: {"bytes": 1, "sha256": "0" * 64}}, "a file must lie in the artifact")
        for name in ("/etc/passwd", "tasks/../x", ".env", "a\\b")
    },
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused(folder, case):
    keys, value, message = HOSTILE[case]
    record = json.loads((folder / "emr.json").read_text())
    place = functools.reduce(operator.getitem, keys[:-1], record)
    place[keys[-1]] = value
    if value is None:
        del place[keys[-1]]
    (folder / "emr.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=rf"(?s)^{folder}/emr\.json: .*{message}"):
        Manifest.read(folder)


def test_no_manifest_or_no_json(folder, tmp_path):
    with refused(CheckpointError, "emr.json"):
        Manifest.read(tmp_path / "absent")
    for text in ("", "[]", "{", '{"a": 1, "a": 2}'):
        (folder / "emr.json").write_text(text)
        with refused(CheckpointError, "emr.json"):
            Manifest.read(folder)


NAN = torch.full((1, 10), math.nan, dtype=torch.float64)
IDS = torch.arange(3)
WRONG_FILES: dict[str, tuple[str, dict[str, torch.Tensor], Callable[..., Any], str]] = {
    "root of another length": ("model.safetensors", {"w": torch.zeros(100, 7)}, open_unified, "bytes"),
    "root of another shape": ("model.safetensors", {"w": torch.zeros(7, 100), "ids": IDS}, open_unified, "['w']"),
    "short mask": ("mask.safetensors", {"m.w": torch.zeros(64, dtype=torch.uint8)}, open_masks, "600 elements"),
    "float mask": ("mask.safetensors", {"m.w": torch.zeros(128)}, open_masks, "600 elements"),
    "unknown mask": ("mask.safetensors", {"x": torch.zeros(128, dtype=torch.uint8)}, open_masks, "'x'"),
    "mask of unmerged": ("mask.safetensors", {"m.ids": torch.zeros(64, dtype=torch.uint8)}, open_masks, "'m.ids'"),
    "no tail": ("extra.safetensors", {"head": torch.zeros(1)}, open_extras, "no tail of 'm.w'"),
    "long tail": ("extra.safetensors", {"m.w": torch.zeros(121)}, open_extras, "the tail of 'm.w'"),
    "sums of others": ("sums.safetensors", {"sums": torch.zeros(2, 10).double()}, read_sums, "(2, 10)"),
    "no sums": ("sums.safetensors", {"x": torch.zeros(1)}, read_sums, "'x'"),
    "other columns": ("sums.safetensors", {"sums": torch.ones(1, 10).double()}, read_sums, "columns"),
    "sums that are no numbers": ("sums.safetensors", {"sums": NAN}, read_sums, "impossible"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_files_that_do_not_fit_the_manifest_are_refused(folder, case):
    name, tensors, read, fact = WRONG_FILES[case]
    manifest = Manifest.read(folder)
    place = folder if name.startswith("model") else folder / "tasks" / "a.b"
    save_file(tensors, place / name, metadata=SUM_COLUMNS if fact == "impossible" else None)
    with refused(CheckpointError, name.removeprefix("model.safetensors"), fact):
        read(folder, manifest, *(() if read is open_unified else ("a.b",)))


def toy_sums() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two tensors of 2 and 8 elements, two tasks; the second takes part in the second tensor only."""
    sums, columns = np.zeros((2, 2, len(SUMS))), [ABS, MASKED_ABS, SQUARE, MASKED_DOT, MASKED_SQUARE]
    sums[:, :, columns] = [[[3, 4, 5, 6, 8], [0] * 5], [[8, 16, 10, 12, 24], [6, 5, 4, 3, 2]]]
    return sums, np.array([2, 8]), np.array([[True, False], [True, True]])


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("global", [11 / 20, 6 / 5]),
        ("official", [(3 / 2 + 1) / (4 / 2 + 2), 6 / 5]),
        ("l2", [18 / 32, 3 / 2]),
        ("tensor", [[3 / 4, 1], [8 / 16, 6 / 5]]),
        ("tensor_l2", [[6 / 8, 1], [12 / 24, 3 / 2]]),
        ("none", [1, 1]),
    ],
)
def test_rescalers_by_hand(mode, expected):
    assert compute_scales(*toy_sums(), mode).tolist() == expected


def test_guards_of_the_rescalers():
    sums, elements, participates = toy_sums()
    sums[:, 0] = 0  # equals the base
    sums[1, 1, [MASKED_ABS, MASKED_DOT, MASKED_SQUARE]] = 0  # lost every vote
    for mode in ("global", "official", "l2", "tensor", "tensor_l2"):
        assert compute_scales(sums, elements, participates, mode).reshape(-1, 2)[-1].tolist() == [1, 0], mode
    # An empty tensor does not count.
    sums, elements, participates = toy_sums()
    elements[0], sums[0] = 0, 0
    assert compute_scales(sums, elements, participates, "official").tolist() == [0.5, 6 / 5]


def test_the_order_of_tensors_and_tasks_does_not_matter():
    rng = np.random.default_rng(0)
    sums = rng.random((50, 3, len(SUMS))) * 10.0 ** rng.integers(-9, 9, (50, 1, 1))
    elements, participates = rng.integers(1, 1000, 50), rng.random((50, 3)) < 0.8
    order = rng.permutation(50)
    for mode in ("global", "official", "l2"):
        once = compute_scales(sums, elements, participates, mode)
        again = compute_scales(sums[order][:, ::-1], elements[order], participates[order][:, ::-1], mode)
        assert once.tolist() == again[::-1].tolist()
