"""The loader that travels with an artifact: by itself, without this package, and bit-equal to it."""

import functools
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_ext.emr import EMRModel, emr_loader
from hf_ext.emr.weights import TaskWeights
from tests.cli.fuzzing import CHANGES
from tests.emr.emr_testing import tiny_bert
from tests.emr.use_testing import edit_manifest, equal, flip, merge_family, restored
from tests.kit import warm_python
from tests.kit.refusals import refused

# A process in which everything that the loader must do without cannot be imported.
ALONE = """
import runpy, sys

refused = {"hf_ext", "transformers", "huggingface_hub", "numba", "diffusers"}
assert not refused & {name.split(".")[0] for name in sys.modules}

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ModuleNotFoundError("refused: " + name)

sys.meta_path.insert(0, Refused())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def merge(folder: Path, dtype: torch.dtype | None = None, **options: object) -> Path:
    return merge_family(folder, functools.partial(tiny_bert, dtype=dtype), ("a", "b.2"), given=options)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(tmp_path_factory.mktemp("loader"))


@pytest.fixture
def copy(merged: Path, tmp_path: Path) -> Path:
    return shutil.copytree(merged, tmp_path / "merged")


def run_alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-c", ALONE, str(folder / "emr_loader.py"), *arguments]
    return warm_python.run(command, cwd=folder.parent, env=environment)


def test_the_shipped_loader_needs_torch_and_safetensors_only(merged: Path, tmp_path: Path):
    assert (merged / "emr_loader.py").read_bytes() == Path(emr_loader.__file__).read_bytes()
    done = run_alone(merged, str(merged), "b.2", str(tmp_path / "out.safetensors"))
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "out.safetensors")
    emr = EMRModel.from_pretrained(merged, "b.2")
    assert equal(found, dict(emr.model.state_dict()))
    assert equal(found, load_file(emr.export("b.2", tmp_path / "export") / "model.safetensors"))
    # Who can read a folder can read all that was written there.
    (tmp_path / "plain").touch()
    written = [path for folder in (tmp_path, merged) for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode for path in written} == {(tmp_path / "plain").stat().st_mode}
    with refused(SystemExit, "emr_loader", "'c'", "'a', 'b.2'"):
        emr_loader.main([str(merged), "c", str(tmp_path / "no.safetensors")])
    # A place that cannot be written is told.
    for out in (tmp_path / "absent" / "a.safetensors", tmp_path):
        with refused(SystemExit, "emr_loader: "):
            emr_loader.main([str(merged), "a", str(out)])
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".safetensors"] == ["out.safetensors"]


KINDS = {
    "bfloat16": {"dtype": torch.bfloat16, "rescale": "tensor_l2"},
    "shards": {"rescale": "official", "include_base": True, "max_shard_size": "4KB"},
    "raw": {"exclude": [".*pooler.*"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_bit_equal_to_the_package(kind: str, tmp_path: Path):
    folder = merge(tmp_path, **KINDS[kind])
    for task in ("a", "b.2"):
        assert equal(emr_loader.restore(folder, task), restored(TaskWeights(folder), task))


def test_a_tail_that_an_earlier_version_wrote(copy: Path, merged: Path):
    name, tail, extra = "bert.pooler.dense.weight", torch.arange(16.0), copy / "tasks" / "a" / "extra.safetensors"
    save_file(load_file(extra) | {name: tail}, extra)
    tails = {name: {"shape": [17, 16]}}
    edit_manifest(copy, lambda manifest: (manifest.update(files={}), manifest["tasks"]["a"].update(tails=tails)))
    found = emr_loader.restore(copy, "a")[name]
    assert torch.equal(found, torch.cat([emr_loader.restore(merged, "a")[name], tail[None]]))
    assert torch.equal(found, TaskWeights(copy).restore("a", name))


def test_a_base_somewhere_else(copy: Path, merged: Path, tmp_path: Path):
    edit_manifest(copy, lambda manifest: manifest["base"].update(source="org/base", revision="0" * 40))
    with refused(ValueError, "org/base", "commit 0", "model.safetensors"):
        emr_loader.restore(copy, "a")
    base = merged.parent / "base"
    for given in (base, base / "model.safetensors"):
        assert equal(emr_loader.restore(copy, "a", given), emr_loader.restore(merged, "a"))
    other = shutil.copytree(base, tmp_path / "other")
    flip(other / "model.safetensors")
    with refused(ValueError, "sha256", "org/base"):
        emr_loader.restore(copy, "a", other)
    with refused(ValueError, "no such file"):
        emr_loader.restore(copy, "a", tmp_path)


# What the manifest alone must be, tests/emr/test_artifact.py has: the package reads it by the same function.
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m["tensors"][5].update(name="other"), "no merged"),
        (lambda m: (m["tasks"]["a"].pop("scale_hex"), m["tasks"]["a"].update(scales={})), "no scale"),
        (lambda m: m["base"].update(files={"model.bin": {"bytes": 1}}), ".safetensors"),
        (lambda m: m["base"].update(source="x" * 256), "`source` of the base"),
        (lambda m: m["tasks"]["a"].update(shared=["bert.other"]), "'other'"),
        (lambda m: m["base"]["files"]["model.safetensors"].update(bytes=7), "bytes"),
    ],
)
def test_a_manifest_that_does_not_fit(change, named: str, copy: Path):
    edit_manifest(copy, change)
    with refused(ValueError, named):
        emr_loader.restore(copy, "a")


def test_files_that_are_damaged(copy: Path, tmp_path: Path):
    mask = copy / "tasks" / "a" / "mask.safetensors"

    def refuse(*facts: str, folder: Path = copy) -> None:
        with refused(ValueError, *facts):
            emr_loader.restore(folder, "a")

    tensors = load_file(mask)
    flip(mask)
    refuse("mask.safetensors", "SHA-256", "emr.json")
    edit_manifest(copy, lambda manifest: manifest.update(files={}))
    save_file(tensors | {name: values[:1] for name, values in list(tensors.items())[:1]}, mask)
    refuse("elements", "bytes")
    mask.write_bytes(b"no")
    refuse("safetensors", "file")
    # Links that leave the folder, of a file and of a task's folder.
    for path in (copy / "model.safetensors", mask.parent):
        aside = path.rename(tmp_path / path.name)
        path.symlink_to(aside)
        refuse("leaves", "folder")
        path.unlink()
        aside.rename(path)
    refuse("emr.json", folder=copy / "tasks")
    (copy / "emr.json").write_text("{")
    refuse("JSON")


def test_any_changed_manifest_or_file_is_a_value_error(copy):
    """Hundreds of them: never an AttributeError or TypeError, and never an error of the system."""
    chance = random.Random(0)
    files, refused = sorted(path for path in copy.rglob("*") if path.suffix in CHANGES), 0
    for _ in range(300):
        changed = copy / "emr.json" if chance.random() < 0.7 else chance.choice(files)
        data = changed.read_bytes()
        changed.write_bytes(CHANGES[changed.suffix](data, chance))
        try:
            emr_loader.restore(copy, "a")
        except ValueError as error:
            assert str(error)
            refused += 1
        finally:
            changed.write_bytes(data)
    assert 100 < refused < 300 and emr_loader.restore(copy, "a")
