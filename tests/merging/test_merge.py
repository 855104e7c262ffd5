"""The streaming merge: the same bits however it is run, whole or not at all, and what it refuses."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_ext.emr import arithmetic
from hf_ext.emr.arithmetic import SUB_BLOCK
from hf_ext.emr.artifact import open_unified
from hf_ext.emr.emr_loader import restore
from hf_ext.emr.manifest import Manifest
from hf_ext.errors import DataError, UsageError
from hf_ext.files import TakenError, read_json, write_json
from hf_ext.hub.checkpoints import open_checkpoint
from hf_ext.merging.merge import merge_checkpoints
from hf_ext.merging.plan import Plan, plan_lines
from hf_ext.merging.vectors import NotFiniteError
from tests.emr.emr_testing import family, tiny_bert, tiny_gpt2, tiny_semanir, tiny_unet, write_weights
from tests.kit.refusals import refused

from .merging import assert_same_files, contents, merge, siblings, weights_of


@pytest.mark.parametrize(
    "options",
    [
        {"include_base": True, "max_shard_size": "150KB"},
        {"tie": "negative", "rescale": "tensor", "dtype": "bfloat16"},
        {"method": "elect", "dtype": "float16"},
    ],
)
def test_every_way_to_compute_gives_the_same_files(config, tmp_path, monkeypatch, options):
    """Compiled code that reads and writes files itself, compiled blocks, and plain torch but for the order of sums."""
    kernels, done = arithmetic.find_kernels("cpu"), []
    if kernels.run_files is None:
        pytest.skip("numba is missing")

    def run_files(*arguments) -> bool:
        done.append(kernels.run_files(*arguments))
        return done[-1]

    monkeypatch.setattr(arithmetic, "compiled_kernels", lambda: kernels._replace(run_files=run_files))
    # in one block and in several: five workers with so little memory have one sub-block each
    first = merge(config, tmp_path / "merged-calls", workers=5, memory="1MB", **options)
    assert done and all(done)
    monkeypatch.setattr(arithmetic, "compiled_kernels", lambda: kernels._replace(run_files=None))
    assert_same_files(merge(config, tmp_path / "merged-blocks", **options), first)
    monkeypatch.setattr(arithmetic, "compiled_kernels", lambda: None)
    plain = merge(config, tmp_path / "merged-torch", **options)
    assert weights_of(first) == weights_of(plain)
    if "method" not in options:
        ours, theirs = (Manifest.read(folder).tasks.values() for folder in (first, plain))
        for task, other in zip(ours, theirs, strict=True):
            assert (task.scale or 0) == pytest.approx(other.scale or 0, rel=1e-12)
            assert task.scales == pytest.approx(other.scales, rel=1e-12)


@pytest.mark.parametrize("make", [tiny_bert, tiny_gpt2, tiny_unet, tiny_semanir])
def test_real_models_load_from_the_root_and_tasks_are_restored(tmp_path, make):
    given = family(tmp_path, make, "abc")
    base, folder = tmp_path / "base", merge(given, tmp_path / "merged-out")
    with open_checkpoint(base) as started, open_unified(folder, Manifest.read(folder)) as unified:
        assert set(unified) == set(started)
    for task, source in given["tasks"].items():
        with open_checkpoint(source) as own:
            torch.testing.assert_close(restore(folder, task), {name: own[name] for name in own}, rtol=0, atol=4e-3)
    # Of transformers, the root says that it is of no task; diffusers would complain of a key that it does not know.
    own = {} if make is tiny_unet else {"emr_tasks": ["a", "b", "c"]}
    assert read_json(folder / "config.json") == read_json(base / "config.json") | own


def test_the_artifact_holds_what_others_need(config, tmp_path):
    place = tmp_path / "t1"
    (place / "chat_template.jinja").write_text("{{ messages }}")
    write_json(place / "tokenizer_config.json", read_json(place / "tokenizer_config.json"), indent=8)
    (place / "tokenizer.json").write_text((place / "tokenizer.json").read_text().replace('"x"', '"xx"'))
    (place / "training.log").write_text("no small file")
    folder = merge(config, tmp_path / "merged-out")
    names = contents(folder).keys()
    assert {"config.json", "tokenizer.json", "emr.json", "emr_loader.py", "README.md", "report.json"} <= names
    # what is the base's is kept once
    assert {"tasks/t0/config.json", "tasks/t0/mask.safetensors", "tasks/t0/extra.safetensors"} <= names
    assert "tasks/t0/tokenizer.json" not in names and not [name for name in names if "state" in name]
    assert {"tasks/t1/chat_template.jinja", "tasks/t1/tokenizer.json"} <= names
    assert not {"tasks/t1/tokenizer_config.json", "tasks/t1/training.log"} & names
    manifest = Manifest.read(folder)
    assert manifest.method["method"] == "emr" and "workers" not in manifest.method and "base" not in manifest.method
    assert manifest.base.files["model.safetensors"]["sha256"]
    assert not any(file["sha256"] for file in manifest.tasks["t0"].origin.files.values())
    report = read_json(folder / "report.json")
    assert report["sources"]["base"]["source"] == config["base"] and report["library"] == "transformers"
    assert [entry["task"] for entry in report["tasks"]] == ["t0", "t1", "t2"]


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"include_base": True, "max_shard_size": "150KB"}, "emr.json"),
        ({"drop": 0.3}, "emr.json"),
        ({"method": "onebit"}, "emr.json"),
        ({"method": "ternary"}, "emr.json"),
        ({"method": "average"}, "model.safetensors"),
        ({"method": "ties", "density": 0.3}, "model.safetensors"),
        ({"method": "elect", "drop": 0.5, "seed": 7}, "model.safetensors"),
        ({"method": "ties", "masks": True, "rescale": "l2", "drop": 0.3}, "emr.json"),
    ],
)
def test_the_same_bits_for_any_number_of_workers_and_any_memory(config, tmp_path, options, files):
    first = merge(config, tmp_path / "merged-first", workers=1, **options)
    for workers, memory in ((5, "64MB"), (3, "1MB")):
        again = merge(config, tmp_path / f"merged-{workers}", workers=workers, memory=memory, **options)
        assert_same_files(again, first)
    assert (first / files).exists() and (files == "emr.json" or not (first / "emr.json").exists())
    assert len(list(first.glob("model-*.safetensors"))) == 3 * ("max_shard_size" in options)
    assert not list(tmp_path.glob(".*"))
    if "drop" in options:
        other = load_file(merge(config, tmp_path / "merged-other", **options | {"seed": 8}) / "model.safetensors")
        assert not torch.equal(other["a.weight"], load_file(first / "model.safetensors")["a.weight"])


def test_masks_for_a_model_that_is_given(config, tmp_path):
    average = merge(config, tmp_path / "average", method="average")
    given = merge(config, tmp_path / "merged-given", method="given", merged=str(average), rescale="l2")
    same = merge(config, tmp_path / "merged-same", method="average", masks=True, rescale="l2")
    ours, theirs = contents(given), contents(same)
    assert not [name for name in ours if name.endswith(".safetensors") and ours[name] != theirs[name]]


@pytest.mark.parametrize("place", ["base", "t0"])
@pytest.mark.parametrize("method", ["emr", "average"])
def test_a_merge_with_masks_is_no_checkpoint(config, tmp_path, place, method):
    artifact = str(merge(config, tmp_path / "artifact"))
    given = {"base": artifact} if place == "base" else {"tasks": config["tasks"] | {place: artifact}}
    with refused(DataError, place, "emr export"):
        merge(config | given, tmp_path / "again", method=method)


@pytest.mark.parametrize(
    ("whose", "value"), [("base", float("nan")), ("t1", float("nan")), ("t1", float("inf")), ("base", -float("inf"))]
)
@pytest.mark.parametrize("method", ["emr", "elect", "average", "ties", "slerp"])
def test_nan_and_infinity_are_refused_with_the_tensor_and_the_task(config, tmp_path, whose, value, method):
    """By the sums of a merge that is measured, by a look at each vector in others: all kinds of methods."""
    config = config | {"method": method, "tasks": {name: config["tasks"][name] for name in ("t0", "t1")}}
    base = load_file(tmp_path / "base" / "model.safetensors")
    spoilt = base if whose == "base" else {name: tensor.clone() for name, tensor in base.items()}
    spoilt["b.weight"][SUB_BLOCK * 2] = value
    if whose == "t1":
        shutil.rmtree(tmp_path / "t1")
    write_weights(tmp_path / whose, spoilt)
    with refused(ValueError, "base" if whose == "base" else "task 't1'", "b.weight", "NaN"):
        merge(config, tmp_path / "merged-out")
    # nothing to go on from
    assert not list(tmp_path.glob("*merged-out*"))


def test_nan_in_a_head_or_an_overflow_of_the_result_is_refused(config, tmp_path):
    with open_checkpoint(config["tasks"]["t2"]) as own:
        tensors = {name: own[name] for name in own}
    shutil.rmtree(tmp_path / "t2")
    tensors["head.weight"][0, 0] = float("nan")
    write_weights(tmp_path / "t2", tensors)
    with refused(ValueError, "head.weight", "t2"):
        merge(config, tmp_path / "merged-out")
    write_weights(tmp_path / "x" / "base", {"w": torch.zeros(4)})
    write_weights(tmp_path / "x" / "a", {"w": torch.full((4,), 1e5)})
    with refused(NotFiniteError, "torch.float16"):
        merge(siblings(tmp_path / "x", "a", dtype="float16"), tmp_path / "merged-out")


def test_nothing_is_overwritten_unless_asked_and_only_a_merge(config, tmp_path):
    out = merge(config, tmp_path / "merged-out")
    before = contents(out)
    with pytest.raises(TakenError):
        merge(config, out, rescale="l2")
    assert contents(out) == before

    def replace(config: dict[str, Any], place: Path = out, **options: Any) -> None:
        merge_checkpoints(config | options, place, overwrite=True, progress=False)

    replace(config, method="average")
    assert not (out / "emr.json").exists()
    replace(config)
    assert contents(out) == before
    # tasks are restored from the base, which must not be replaced but by a copy of it
    replace(config, include_base=True)
    moved = config | {"base": str(out / "base")}
    with refused(UsageError, out / "base", "include_base"):
        replace(moved)
    replace(moved, include_base=True)
    with refused(UsageError, out / "base"):
        replace(moved, method="average")
    # so with a task, which is the user's, if it was put inside
    inside = shutil.copytree(config["tasks"]["t0"], out / "t0")
    with refused(UsageError, inside, "'t0'"):
        replace(config, tasks={"t0": str(inside)})
    mine = tmp_path / "mine"
    mine.mkdir()
    for name, text in (("config.json", "{}"), ("emr.json", "no json"), ("report.json", "[]")):
        (mine / name).write_text(text)
        with pytest.raises(TakenError):
            replace(config, mine)
    assert len(list(mine.iterdir())) == 3


def test_one_plan_is_shown_before_any_weight_is_read(config, tmp_path):
    shown: list[tuple[Plan, int]] = []

    def show(found: Plan) -> None:
        assert plan_lines(found)
        shown.append((found, found.header_bytes))
        assert found.header_bytes == sum(source.checkpoint.bytes_read for source in (found.base, *found.tasks))
        assert not list(tmp_path.glob(".*"))

    merge_checkpoints(config, tmp_path / "merged", progress=False, show=show)
    # its sources are those that were merged: they have read more than headers since
    ((found, headers),) = shown
    assert found.header_bytes > headers and all(source.checkpoint.bytes_read for source in found.sources)
    with pytest.raises(RuntimeError, match="no"):
        merge_checkpoints(config, tmp_path / "other", show=lambda found: (_ for _ in ()).throw(RuntimeError("no")))
    assert not (tmp_path / "other").exists()
