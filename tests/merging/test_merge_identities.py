"""Every identity of EMR-Merging, from checkpoints on disk to weights that are restored from the result.

They are those of the specification, section 1.5, for compiled kernels and for plain torch.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_ext.emr.arithmetic import SUMS
from hf_ext.emr.artifact import open_masks, open_unified, read_sums
from hf_ext.emr.emr_loader import restore
from hf_ext.emr.manifest import Manifest
from hf_ext.merging.merge import merge_checkpoints
from tests.emr.conftest import kernels
from tests.emr.emr_testing import write_weights
from tests.emr.reference_ops import unpack_mask

__all__ = ["kernels"]

Tensors = dict[str, torch.Tensor]
SHAPES = {"wide": (300, 70), "bias": (13,), "scalar": (), "one": (1,)}


@pytest.fixture
def merged(tmp_path: Path, kernels: str) -> Callable[..., Path]:
    """`merged(base, [task, ...], **options)`: the folder of the merge; the tasks are called t0, t1, ..."""
    count = iter(range(100))

    def merge(base: Tensors, tasks: list[Tensors], **options: Any) -> Path:
        place = tmp_path / str(next(count))
        named = {f"t{i}": str(write_weights(place / f"t{i}", task)) for i, task in enumerate(tasks)}
        config = {"base": str(write_weights(place / "base", base)), "tasks": named, "workers": 2} | options
        return merge_checkpoints(config, place / "out", progress=False).path

    return merge


def dyadic(seed: int, scale: float = 1.0, share: float = 0.7) -> Tensors:
    """Numbers with few bits, some of them 0, so that sums and products of some are exact."""
    rng = np.random.default_rng(seed)
    return {
        name: torch.tensor(np.where(rng.random(shape) < share, rng.integers(-64, 64, shape), 0) / 64 * scale).float()
        for name, shape in SHAPES.items()
    }


def gaussian(seed: int, scale: float = 1e-2) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}


def added(first: Tensors, second: Tensors, factor: float = 1.0) -> Tensors:
    return {name: first[name] + factor * second[name] for name in first}


def converted(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype and found[name].shape == expected[name].shape
        assert torch.equal(found[name], expected[name]), name


def scales(folder: Path) -> list[float | None]:
    return [task.scale for task in Manifest.read(folder).tasks.values()]


def masks(folder: Path, task: str) -> Tensors:
    manifest = Manifest.read(folder)
    with open_masks(folder, manifest, task) as file:
        return {name: unpack_mask(file[name], manifest.merged[name].elements) for name in file}


def unified(folder: Path) -> Tensors:
    with open_unified(folder, Manifest.read(folder)) as file:
        return {name: file[name] for name in file}


MODES = ("global", "official", "tensor", "l2", "tensor_l2")
HALVES = ((torch.bfloat16, "global"), (torch.float16, "l2"))


@pytest.mark.parametrize(("dtype", "rescale"), [*((torch.float32, mode) for mode in (*MODES, "none")), *HALVES])
def test_one_task_comes_back(merged, dtype, rescale):
    base = converted(gaussian(0, 1.0), dtype)
    task = converted(added(gaussian(0, 1.0), gaussian(1)), dtype)
    folder = merged(base, [task], rescale=rescale)
    assert_equal(unified(folder), task)
    restored = restore(folder, "t0")
    if dtype == torch.float32:
        torch.testing.assert_close(restored, task, rtol=0, atol=2**-23)
    else:
        assert_equal(restored, task)
    for name, bits in masks(folder, "t0").items():
        assert torch.equal(bits, (task[name] != base[name]).flatten())


def split(vector: Tensors) -> list[Tensors]:
    """Three parts of a vector with disjoint supports."""
    rng = np.random.default_rng(3)
    owner = {name: torch.tensor(rng.integers(0, 3, value.shape)) for name, value in vector.items()}
    return [{name: value * (owner[name] == part) for name, value in vector.items()} for part in range(3)]


def multiply(vector: Tensors) -> list[Tensors]:
    return [{name: value * factor for name, value in vector.items()} for factor in (0.25, 1.0, 0.5)]


@pytest.mark.parametrize(
    ("make", "expected", "rescale"),
    [
        *((lambda vector: [vector] * 5, [1.0] * 5, "global"), (split, [1.0] * 3, "global")),
        *((multiply, [0.25, 1.0, 0.5], mode) for mode in MODES),
    ],
)
def test_tasks_that_do_not_contradict_each_other_come_back(merged, make, expected, rescale):
    base, vector = dyadic(0), dyadic(1)
    tasks = [added(base, part) for part in make(vector)]
    folder = merged(base, tasks, rescale=rescale)
    assert_equal(unified(folder), added(base, vector))
    for index, task in enumerate(tasks):
        assert_equal(restore(folder, f"t{index}"), task)
    found = Manifest.read(folder).tasks
    if rescale in ("tensor", "tensor_l2"):
        nonzero = [name for name in vector if vector[name].any()]
        assert all(found[f"t{i}"].scales[name] == factor for i, factor in enumerate(expected) for name in nonzero)
    else:
        assert scales(folder) == expected


def test_permuted_tasks_permute_the_result(merged):
    base, order = dyadic(0), [2, 0, 3, 1]
    tasks = [added(base, dyadic(seed)) for seed in (1, 2, 3, 4)]
    first, second = merged(base, tasks), merged(base, [tasks[index] for index in order])
    assert_equal(unified(second), unified(first))
    assert scales(second) == [scales(first)[index] for index in order]
    for place, index in enumerate(order):
        assert_equal(masks(second, f"t{place}"), masks(first, f"t{index}"))


def test_scaling_all_vectors_scales_the_unified_one_only(merged):
    base, vectors = dyadic(0), [dyadic(seed) for seed in (1, 2, 3)]
    once, twice = (merged(base, [added(base, vector, factor) for vector in vectors]) for factor in (1.0, 2.0))
    assert scales(once) == scales(twice)
    for name, value in unified(once).items():
        assert torch.equal(2 * (value - base[name]), unified(twice)[name] - base[name])
    for task in ("t0", "t1", "t2"):
        assert_equal(masks(twice, task), masks(once, task))


def test_masks_lie_within_supports_cover_the_unified_vector_and_leave_no_sign_conflict(merged):
    base = dyadic(0)
    tasks = [added(base, dyadic(seed, share=0.4)) for seed in (1, 2, 3)]
    folder = merged(base, tasks)
    common, covered = unified(folder), {name: torch.zeros(base[name].numel(), dtype=torch.bool) for name in base}
    for index, task in enumerate(tasks):
        restored = restore(folder, f"t{index}")
        for name, bits in masks(folder, f"t{index}").items():
            vector = (task[name] - base[name]).flatten()
            assert not (bits & (vector == 0)).any()
            assert not ((restored[name] - base[name]).flatten() * vector < 0).any()
            covered[name] |= bits
    for name in base:
        assert torch.equal(covered[name], (common[name] != base[name]).flatten())


@pytest.mark.parametrize("count", [2, 4, 8])
def test_density_of_independent_gaussian_vectors(merged, count):
    base = gaussian(0)
    folder = merged(base, [added(base, gaussian(seed + 1)) for seed in range(count)])
    expected = 0.5 + math.asin(1 / math.sqrt(count)) / math.pi
    for task in Manifest.read(folder).tasks.values():
        # standard deviation of a share of 21,000
        assert abs(task.density - expected) < 5 * 0.5 / math.sqrt(21_000)


def textbook(base: Tensors, tasks: list[Tensors], mode: str) -> tuple[Tensors, list[Tensors], list[float]]:
    """The paper's two passes over whole task vectors, with its typo mended; ties elect nobody."""
    elected, chosen = {}, [{} for _ in tasks]
    upper, lower = np.zeros((2, len(tasks)))
    for name in base:
        vectors = [task[name].double() - base[name].double() for task in tasks]
        gamma = torch.stack(vectors).sum(0).sign()
        epsilon = torch.stack([torch.where(v * gamma > 0, v.abs(), 0.0) for v in vectors]).amax(0)
        elected[name] = gamma * epsilon
        for index, vector in enumerate(vectors):
            mask = vector * elected[name] > 0
            chosen[index][name] = mask.flatten()
            count = vector.numel() if mode == "official" else 1
            upper[index] += float(vector.abs().sum()) / count
            lower[index] += float((mask * elected[name].abs()).sum()) / count
    return elected, chosen, list(upper / lower)


@pytest.mark.parametrize("mode", ["official", "global"])
def test_equal_to_the_two_passes_of_the_paper(merged, mode):
    base = gaussian(0, 1.0)
    tasks = [added(base, gaussian(seed)) for seed in range(1, 6)]
    folder = merged(base, tasks, rescale=mode)
    elected, chosen, expected = textbook(base, tasks, mode)
    found = unified(folder)
    for name in base:
        assert torch.equal(found[name].double() - base[name].double(), elected[name])
    for index in range(5):
        assert_equal(masks(folder, f"t{index}"), chosen[index])
    # the weights are fp32, the textbook's vectors fp64
    assert np.allclose(scales(folder), expected, rtol=1e-6, atol=0)


def test_ties(merged):
    base = {"w": torch.zeros(3)}
    tasks = [{"w": torch.tensor([1.0, 2.0, 0.0])}, {"w": torch.tensor([-1.0, -1.0, 0.0])}]
    zero, negative = merged(base, tasks), merged(base, tasks, tie="negative")
    assert unified(zero)["w"].tolist() == [0, 2, 0]
    assert unified(negative)["w"].tolist() == [-1, 2, 0]
    assert masks(negative, "t1")["w"].tolist() == [True, False, False]
    assert masks(zero, "t1")["w"].tolist() == [False] * 3


def test_guards_of_the_rescaler(merged):
    base, vector = dyadic(0), dyadic(1, share=1.0)
    vector = {name: value + (value == 0) for name, value in vector.items()}
    folder = merged(base, [added(base, vector, -2.0), added(base, vector), base])
    assert scales(folder)[1:] == [0.0, 1.0]
    for task in ("t1", "t2"):
        assert_equal(restore(folder, task), base)
    report = json.loads((folder / "report.json").read_text())
    assert any("t1" in warning for warning in report["warnings"]), report["warnings"]


def test_empty_tensors_do_no_harm(merged):
    empty = {"empty": torch.zeros(0, 4)}
    base, task = dyadic(0) | empty, added(dyadic(0), dyadic(1)) | empty
    for mode in ("global", "official", "tensor"):
        assert_equal(restore(merged(base, [task, task], rescale=mode), "t1"), task)


def test_what_is_not_merged_comes_back_bit_for_bit(merged):
    start = gaussian(0)
    base = converted(start, torch.bfloat16) | {"ids": torch.arange(5), "flag": torch.tensor([True, False])}
    vector = gaussian(1)
    raw = {"ids": torch.arange(5), "flag": torch.tensor([True, True]), "head": torch.randn(3, 4).half()}
    raw |= {"bias": torch.randn(7), "bn.running_var": torch.rand(4), "bn.num_batches_tracked": torch.tensor(7)}
    one = converted(added(start, vector), torch.bfloat16) | raw
    two = converted(added(start, vector, 0.5), torch.bfloat16)
    two = {name: two[name] for name in ("wide", "scalar", "bias")} | {"ids": torch.arange(5) + 1}
    folder = merged(base, [one, two])
    restored, other = restore(folder, "t0"), restore(folder, "t1")
    assert set(restored) == set(one) and set(other) == set(two) and set(unified(folder)) == set(base)
    assert_equal({name: restored[name] for name in raw}, raw)
    assert torch.equal(other["ids"], two["ids"])
    assert Manifest.read(folder).tasks["t0"].shared == ("ids",)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_checkpoints_of_several_types(merged, dtype):
    base, kinds = converted(gaussian(0, 1.0), torch.float16), (torch.float32, torch.bfloat16, torch.float64)
    tasks = [converted(added(base, gaussian(seed)), kind) for seed, kind in enumerate(kinds, 1)]
    folder = merged(base, tasks, dtype=dtype)
    kind, common = getattr(torch, dtype), unified(folder)
    assert {tensor.dtype for tensor in (*common.values(), *restore(folder, "t0").values())} == {kind}
    for name, value in common.items():
        candidates = torch.stack([base[name].to(kind), *(task[name].float().to(kind) for task in tasks)])
        assert (candidates == value).any(0).all()


def test_sums_are_those_of_whole_vectors(merged):
    base = gaussian(0, 1.0)
    tasks = [added(base, gaussian(seed)) for seed in (1, 2, 3)]
    folder = merged(base, tasks)
    manifest, common = Manifest.read(folder), unified(folder)
    for index, task in enumerate(tasks):
        sums = read_sums(folder, manifest, f"t{index}")
        for row, name in enumerate(manifest.merged):
            vector, elected = (x[name].double().flatten() - base[name].double().flatten() for x in (task, common))
            bits = masks(folder, f"t{index}")[name]
            expected = {
                "abs": vector.abs().sum(),
                "square": vector.square().sum(),
                "nonzero": (vector != 0).sum(),
                "mask": bits.sum(),
                "masked_abs": elected[bits].abs().sum(),
                "masked_square": elected[bits].square().sum(),
                "masked_dot": (elected * vector)[bits].sum(),
                "dot": (elected * vector).sum(),
                "opposed": (elected * vector < 0).sum(),
                "weight_opposed": (common[name] * task[name] < 0).sum(),
            }
            assert np.allclose(sums[row], [float(expected[column]) for column in SUMS], rtol=1e-5, atol=1e-12)
