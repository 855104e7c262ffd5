"""Average, task arithmetic, TIES and DARE, block by block, against plain references on whole vectors and peft's."""

import math
from typing import Annotated

import numpy as np
import pytest
import torch
from peft.utils import merge_utils
from safetensors.torch import load_file

from hf_ext.emr.manifest import Manifest
from hf_ext.merging.configuration import MergeConfig
from hf_ext.merging.methods import METHODS, Option, merge_method
from hf_ext.merging.methods.registry import MethodError
from hf_ext.merging.vectors import STEP, kept_elements, mix
from tests.emr.emr_testing import write_weights
from tests.kit.command_line import run
from tests.kit.refusals import refused
from tests.merging.merging import merge, run_method, siblings

# The tensors of a little model: sizes that no block divides, one of several units, a single element, none.
SIZES = (1000, 1, 37, 20_000, 777, 0)
NAMES = [f"layer.{index}.weight" for index in range(len(SIZES))]
ELEMENTS = sum(SIZES)


@pytest.fixture
def merged(tmp_path):
    """`merged(base, models, **options)`: the merged tensors, of checkpoints that are read in blocks from the disk."""

    def merge_these(base, models, out="out", **options):
        names = [f"t{index}" for index in range(len(models))]
        for name, tensors in zip(("base", *names), (base, *models), strict=True):
            write_weights(tmp_path / name, dict(zip(NAMES, tensors, strict=False)))
        config = siblings(tmp_path, *names, workers=5, memory="1MB", **options)
        found = load_file(merge(config, tmp_path / out) / "model.safetensors")
        return [found[name] for name in NAMES if name in found]

    return merge_these


def model(seed, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, generator=generator) * scale).to(dtype) for size in SIZES]


def checkpoints(tasks=4, dtype=torch.float32):
    """A base and fine-tuned models; some task vectors are zero in places, as they are in low precision."""
    base = model(0, dtype)
    changes = [model(1 + task, scale=1e-2) for task in range(tasks)]
    return base, [
        [(b + c * (c.abs() > 2e-3)).to(dtype) for b, c in zip(base, change, strict=True)] for change in changes
    ]


def flat(tensors):
    return torch.cat([tensor.double() for tensor in tensors])


def task_vectors(base, models):
    return [torch.cat([w.float() - b.float() for w, b in zip(m, base, strict=True)]) for m in models]


def whole_ties(base, models, density, weight):
    """TIES written plainly: whole vectors, sorted, fp64."""
    vectors = torch.stack(task_vectors(base, models))
    kept = max(1, int(density * vectors.shape[1]))
    for row in vectors:
        row[row.abs() < row.abs().sort(descending=True).values[kept - 1]] = 0
    vectors = vectors.double()
    sign = torch.where(vectors.sum(0) >= 0, 1.0, -1.0)
    agrees = vectors * sign > 0
    mean = (vectors * agrees).sum(0) / agrees.sum(0).clamp(min=1)
    return flat(base) + weight * mean


@pytest.mark.parametrize(("weight", "used"), [(None, 0.3), (0.7, 0.7)])
def test_task_arithmetic_is_that_of_peft(merged, weight, used):
    base, models = checkpoints()
    moved = merge_utils.task_arithmetic(task_vectors(base, models), torch.full((len(models),), used))
    found = flat(merged(base, models, method="task_arithmetic", weight=weight))
    torch.testing.assert_close(found, flat(base) + moved.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("density", "dtype"), [(0.05, torch.float32), (0.2, torch.bfloat16), (0.5, torch.float16), (1.0, torch.float32)]
)
def test_ties_on_blocks_is_ties_on_whole_vectors(merged, density, dtype):
    base, models = checkpoints(dtype=dtype)
    found = flat(merged(base, models, method="ties", density=density, weight=0.9, dtype="float32"))
    torch.testing.assert_close(found, whole_ties(base, models, density, 0.9), rtol=1e-6, atol=1e-6)


def test_ties_is_that_of_peft_where_one_tensor_is_the_whole_vector(merged):
    # peft trims each tensor by itself, so it is given the whole vector as one tensor.
    base, models = checkpoints(tasks=5)
    found = flat(merged(base, models, method="ties", density=0.3))
    expected = merge_utils.ties(task_vectors(base, models), torch.ones(len(models)), 0.3)
    # A value that nothing agrees with is compared too: most are zero.
    torch.testing.assert_close(found - flat(base), expected.double(), rtol=1e-5, atol=3e-7)


@pytest.mark.parametrize(
    ("kept", "threshold"),
    # 400 elements are 2 or more in magnitude: of 591 wanted, the rest are ones, of which all 300 stay.
    [(591, 1.0), (295, 2.0), (ELEMENTS // 2, 0.0), (0, 3.0)],
)
def test_ties_at_the_threshold_are_all_kept(merged, kept, threshold):
    base, one = ([torch.zeros(size) for size in SIZES] for _ in range(2))
    one[0] = torch.tensor([3.0, -2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]).repeat(100)
    # down to subnormal numbers
    for scale in (1.0, 2.0**-149):
        density = (kept + 0.5) / ELEMENTS
        found = merged(base, [[scale * part for part in one]], f"out-{scale}", method="ties", density=density)
        # A task alone elects all that it keeps.
        assert torch.equal(found[0], scale * torch.where(one[0].abs() >= threshold, one[0], 0.0))


def test_a_sum_of_zero_elects_plus():
    base, models = torch.zeros(3), [torch.tensor([1.0, -2.0, -0.0]), torch.tensor([-1.0, 2.0, -0.0])]
    assert run_method("ties", base, models, weight=[1.0, 1.0], density=[1.0, 1.0]).tolist() == [1.0, 2.0, 0.0]


def test_random_numbers_have_no_pattern():
    n = 1 << 18
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1), (2**64 - 1, 0, 0)]
    streams = {key: kept_elements(*key, start=0, count=n, drop=0.5) for key in keys}
    signs = {key: 2.0 * kept - 1 for key, kept in streams.items()}
    limit = 5 * math.sqrt(n)
    for key, sign in signs.items():
        for lag in (1, 2, 3, 64, 1024, 8192):
            assert abs(float(sign[lag:] @ sign[:-lag])) < limit, (key, lag)
        # Even and odd elements come from the two halves of one number.
        assert abs(float(sign[::2] @ sign[1::2])) < limit
        for other, second in signs.items():
            if other < key:
                assert abs(float(sign @ second)) < limit, (key, other)
                assert abs(float(sign[1:] @ second[:-1])) < limit, (key, other)
    # Runs of eight, as bytes: chi-squared of 255 degrees of freedom, six standard deviations.
    counts = np.bincount(np.packbits(streams[0, 0, 0]), minlength=256)
    chi_squared = float(((counts - n / 8 / 256) ** 2).sum() / (n / 8 / 256))
    assert abs(chi_squared - 255) < 6 * math.sqrt(2 * 255)


@pytest.mark.parametrize("drop", [0.1, 0.5, 0.9])
def test_dare_drops_the_share_asked_for_and_keeps_the_expectation(merged, drop):
    n = 1 << 20
    (found,) = merged([torch.zeros(n)], [[torch.ones(n)]], method="average", drop=drop, seed=7)
    kept = found != 0
    assert torch.equal(found[kept], torch.ones(1).div(1 - drop).expand(int(kept.sum())))
    # Five standard deviations of a binomial count.
    assert abs(int(kept.sum()) - n * (1 - drop)) < 5 * math.sqrt(n * drop * (1 - drop))


def test_the_generator_is_splitmix64_and_its_numbers_stay_as_they_are():
    # The first three numbers that the published generator gives from a state of zero.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix(np.arange(1, 4, dtype=np.uint64) * STEP).tolist() == published
    # They are part of what a seed means: another sequence would make another model of the same configuration.
    kept = kept_elements(0, 0, 0, 0, 24, 0.5)
    assert kept_elements(0, 0, 0, 5, 7, 0.5).tolist() == kept[5:12].tolist()
    assert "".join(map(str, kept.astype(int))) == "110011100111101110100111"


def test_dare_before_emr_elects_among_the_changed_weights(merged):
    base, models = checkpoints(tasks=3)
    found = merged(base, models, method="elect", drop=0.5, seed=1)
    for tensor, size in enumerate(SIZES[:-1]):
        kept = [torch.from_numpy(kept_elements(1, task, tensor, 0, size, 0.5)) for task in range(3)]
        moved = [(own[tensor] - base[tensor]) * part / 0.5 for own, part in zip(models, kept, strict=True)]
        changed = torch.stack([base[tensor] + vector for vector in moved])
        total = torch.zeros(size)
        for row in changed:
            total += row - base[tensor]
        expected = torch.where(total > 0, changed.max(0).values, changed.min(0).values)
        assert torch.equal(found[tensor], torch.where(total == 0, base[tensor], expected))


def test_model_stock_of_one_task_is_that_task_and_of_opposed_ones_the_base():
    base, common = torch.randn(2, 6, 50, generator=torch.Generator().manual_seed(4))
    # On a coarse grid, so that the task vectors are exact.
    base, common = (base * 64).round() / 64, (common * 64).round() / 64
    assert torch.equal(run_method("model_stock", base, [base + common]), common + base)
    for other in (-common, torch.zeros(6, 50)):
        assert torch.equal(run_method("model_stock", base, [base + common, base + other]), base)


@pytest.fixture
def own_methods():
    """A method of blocks and one of whole tensors, as somebody else may write them."""

    @merge_method("halves", "half of each")
    def halves(tensor, *, share: Annotated[float, Option("How much of it.", above=0, most=1)] = 0.5):
        return tensor.base + share * sum(tensor.vectors)

    @merge_method("longest", "the longest task vector", whole=True)
    def longest(tensor):
        assert tensor.start == 0 and tensor.base.shape == tensor.shape
        return tensor.base + max(tensor.vectors, key=lambda vector: float(vector.norm()))

    merge_method("cut", "nothing")(lambda tensor: tensor.base[:1])
    yield
    del METHODS["halves"], METHODS["longest"], METHODS["cut"]


def test_an_own_method_has_its_options_in_files_checks_help_and_card(own_methods, merged, tmp_path):
    base, models = checkpoints(tasks=3)
    found = flat(merged(base, models, method="halves", share="2.5e-1", masks=True))
    expected = flat(base) + 0.25 * torch.stack(task_vectors(base, models)).double().sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "half of each" in card and "method: halves\n" in card and "share: 0.25\n" in card
    assert Manifest.read(tmp_path / "out").method["share"] == 0.25
    for fields, facts in (
        ({"method": "halves", "share": 2}, ("share", "(0, 1]", "2")),
        ({"share": 0.3}, ("share", "'emr'", "halves")),
        ({"method": "halve"}, ("'halves', 'longest', 'cut'", "'halve'")),
    ):
        with refused(ValueError, *facts):
            MergeConfig.from_dict({"base": "base", "tasks": {"a": "a"}, **fields})
    shown = run("merge", "--help").output
    assert "--share FLOAT" in shown and "[default: halves: 0.5]" in " ".join(shown.split())


def test_a_method_of_whole_tensors_gets_them_in_their_shape_and_has_to_return_it(own_methods, merged):
    base, models = checkpoints(tasks=3)
    found = merged(base, models, method="longest")
    again = merged(base, models, "again", method="longest", masks=True)
    for index, start in enumerate(base[:-1]):
        expected = start + max((model[index] - start for model in models), key=lambda vector: float(vector.norm()))
        assert torch.equal(found[index], expected) and torch.equal(again[index], expected)
    with refused(MethodError, "cut", "layer."):
        merged(base, models, "none", method="cut")
