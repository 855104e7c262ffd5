"""The report of a merge against the same measures computed from whole vectors."""

import json
import math

import numpy as np
import pytest
import torch

from hf_ext.emr.arithmetic import SUMS, TOTALS, Sums
from hf_ext.emr.report import TensorSums, make_report, report_legend, report_markdown, report_tables
from hf_ext_cli.output import aligned_table
from tests.emr.reference_ops import mask_block, merge_block, relative_error

SIZES = {"checkpoints": 4000, "base": 1000, "unified": 900, "masks": 100, "extras": 8}


class Merge:
    """Tensors, their merge by the textbook operations, and the sums of it."""

    def __init__(self, base, tasks, participates=None, unified=None, **method):
        self.base, self.tasks, self.unified = base, tasks, []
        self.method = {"method": "emr", "rescale": "global", "masks": None, **method}
        count = len(tasks)
        self.participates = np.ones((len(base), count), bool) if participates is None else participates
        self.sums = np.zeros((len(base), count, len(SUMS)))
        self.totals, self.gram = np.zeros((len(base), len(TOTALS))), np.zeros((count, count))
        for index, tensor in enumerate(base):
            who = np.flatnonzero(self.participates[index])
            found = Sums.zeros(len(who))
            weights = [tasks[task][index] for task in who]
            merged = torch.empty_like(tensor) if unified is None else unified[index]
            operation = merge_block if unified is None else mask_block
            operation(tensor, weights, merged, None, found)
            self.unified.append(merged)
            self.sums[index, who], self.totals[index] = found.tasks, found.totals
            self.gram[np.ix_(who, who)] += found.gram.numpy()

    def report(self, sizes=SIZES):
        masks = self.method["masks"]
        elements = np.array([tensor.numel() for tensor in self.base])
        return make_report(
            [f"task-{index}" for index in range(len(self.tasks))],
            TensorSums(elements, self.participates, self.sums, self.totals, self.gram),
            method=self.method,
            masks=self.method["method"] == "emr" if masks is None else masks,
            sizes=sizes,
        )

    def vectors(self, task, tensors=None):
        """τ, τ_uni, the mask, W0 and W_t over the tensors in which the task takes part, fp64."""
        own = [i for i in np.flatnonzero(self.participates[:, task]) if tensors is None or i in tensors]
        base, uni, weights = (
            torch.cat([tensors[i].double() for i in own]) for tensors in (self.base, self.unified, self.tasks[task])
        )
        vector, common = weights - base, uni - base
        return vector, common, vector * common > 0, base, weights


def tensors(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * scale for size in (300, 100, 7, 200, 50, 1)]


def fine_tunes(*scales):
    base, changes = tensors(0), [tensors(seed, scale) for seed, scale in enumerate(scales, 1)]
    return base, [[b + c for b, c in zip(base, change, strict=True)] for change in changes]


UNEVEN, EVEN = (0.1, 0.1, 0.02), (0.1, 0.1, 0.1)


@pytest.fixture(scope="module")
def merge():
    base, tasks = fine_tunes(*EVEN)
    participates = np.ones((6, 3), bool)
    participates[3, 1] = participates[5, 2] = False
    return Merge(base, tasks, participates)


@pytest.fixture(scope="module")
def report(merge):
    return merge.report()


@pytest.mark.parametrize("task", range(3))
def test_measures_are_those_of_whole_vectors_and_every_mode_has_its_scale_and_error(merge, report, task):
    vector, common, mask, base, weights = merge.vectors(task)
    entry, masked = report["tasks"][task], common * mask
    scale = float(vector.abs().sum() / masked.abs().sum())
    expected = {"elements": vector.numel(), "norm": float(vector.norm()), "density": float(mask.double().mean())}
    expected["norm_to_base"] = float(vector.norm() / base.norm())
    assert {key: entry[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    conflict = {"task_vector": float((vector * common < 0).double().mean())}
    conflict["weights"] = float((weights * (base + common) < 0).double().mean())
    assert entry["sign_conflict"] == pytest.approx(conflict, rel=1e-6)
    assert conflict["task_vector"] > 0.1 and conflict["weights"] > 0
    cosine = float(torch.nn.functional.cosine_similarity(vector, common, dim=0))
    assert entry["cosine"] == pytest.approx({"unified": cosine}, rel=1e-6)
    for stage, other in (("unified", common), ("masked", masked), ("rescaled", scale * masked)):
        assert entry["error"][stage] == pytest.approx(relative_error(vector, other), rel=1e-5)
    assert entry["scales"]["global"] == pytest.approx(scale, rel=1e-6)
    assert entry["error"]["rescaled"] == entry["error"]["global"]
    assert entry["error"]["masked"] < entry["error"]["unified"]
    least_squares = float(vector @ masked / masked.square().sum())
    assert entry["scales"]["l2"] == pytest.approx(least_squares, rel=1e-6)
    assert entry["error"]["l2"] == pytest.approx(relative_error(vector, least_squares * masked), rel=1e-5)
    assert entry["scales"]["none"] == 1
    own, parts = np.flatnonzero(merge.participates[:, task]), {"tensor": [], "tensor_l2": []}
    upper = lower = 0.0
    for index in own:
        tau, uni, bits, _, _ = merge.vectors(task, {index})
        uni = uni * bits
        # Nothing is masked in where a single element lost: the restored tensor is the base's.
        parts["tensor"].append(float(tau.abs().sum() / uni.abs().sum()) if uni.any() else 0.0)
        parts["tensor_l2"].append(float(tau @ uni / uni.square().sum()) if uni.any() else 0.0)
        upper, lower = upper + float(tau.abs().mean()), lower + float(uni.abs().mean())
    least, *_, greatest = sorted(parts["tensor"])
    spread = {"least": least, "median": float(np.median(parts["tensor"])), "greatest": greatest}
    assert entry["scales"]["tensor"] == pytest.approx(spread, rel=1e-6)
    assert entry["scales"]["official"] == pytest.approx(upper / lower, rel=1e-6)
    sizes = torch.tensor([merge.base[index].numel() for index in own])
    for mode, scales in (parts | {"official": [upper / lower] * len(own)}).items():
        restored = masked * torch.repeat_interleave(torch.tensor(scales).double(), sizes)
        assert entry["error"][mode] == pytest.approx(relative_error(vector, restored), rel=1e-5)
    assert entry["error"]["tensor_l2"] <= entry["error"]["l2"] <= min(entry["error"]["global"], 1)


def test_the_published_error_of_gaussian_task_vectors():
    base = [torch.zeros(200_000)]
    generator = torch.Generator().manual_seed(0)
    tasks = [[torch.randn(200_000, generator=generator)] for _ in range(8)]
    mean = Merge(base, tasks).report()["mean"]
    assert mean["density"] == pytest.approx(0.5 + math.asin(8**-0.5) / math.pi, abs=2e-3)
    # The specification's numbers for eight tasks: .99, .64, .51, and .36 for 1-bit deltas.
    found = [mean["error"][key] for key in ("masked", "global", "l2", "one_bit")]
    assert found == pytest.approx([0.99, 0.64, 0.51, 0.36], abs=1e-2)


def test_cosines_of_pairs_come_from_the_upper_triangle(merge, report):
    assert np.diag(report["cosines"]) == pytest.approx([1, 1, 1])
    assert np.allclose(report["cosines"], np.transpose(report["cosines"]))
    first, second = (merge.vectors(task, [0, 1, 2, 4, 5])[0] for task in (0, 1))
    expected = float(first @ second) / float(merge.vectors(0)[0].norm() * merge.vectors(1)[0].norm())
    assert report["cosines"][0][1] == pytest.approx(expected, rel=1e-5)
    # Inner products that are not known make null.
    unknown = Merge(*fine_tunes(*UNEVEN))
    before = unknown.report()
    unknown.gram[0] = np.nan
    found = unknown.report()
    json.dumps(found, allow_nan=False)
    assert found["cosines"][0] == [None] * 3 and {**found, "cosines": []} == {**before, "cosines": []}
    report_markdown(found)


def test_the_mean_is_over_the_tasks_that_have_the_number():
    base, tasks = fine_tunes(0.1)
    report = Merge(base, [tasks[0], [tensor.clone() for tensor in base]]).report()
    own, same = report["tasks"]
    assert same["error"]["rescaled"] is None and same["cosine"]["unified"] is None and same["scales"]["global"] == 1
    assert report["mean"]["error"]["rescaled"] == own["error"]["rescaled"]
    assert report["mean"]["norm"] == pytest.approx(own["norm"] / 2)
    assert any("task-1 equals the base" in text for text in report["warnings"])
    # One task alone is restored exactly.
    assert own["error"]["rescaled"] == pytest.approx(0, abs=1e-12) and own["density"] == 1


def test_healthy_tasks_cause_no_warning_but_of_a_better_way_where_there_is_one(report):
    (text,) = report["warnings"]
    better = [entry for entry in report["tasks"] if entry["error"]["one_bit"] < entry["error"]["rescaled"]]
    assert 0 < len(better) < len(report["tasks"])
    mean = {key: np.mean([entry["error"][key] for entry in better]) for key in ("one_bit", "rescaled", "tensor_l2")}
    assert text.startswith("method onebit would restore")
    names = ", ".join(entry["task"] for entry in better)
    assert f"restore {names} better: error {mean['one_bit']:.3f}, here {mean['rescaled']:.3f}" in text
    assert f"Rescale tensor_l2 would come to {mean['tensor_l2']:.3f}." in text
    # One task is restored exactly by itself, 1-bit deltas keep only its mean magnitudes.
    alone = Merge(*fine_tunes(0.1)).report()
    assert alone["tasks"][0]["error"]["rescaled"] < alone["tasks"][0]["error"]["one_bit"]
    assert alone["warnings"] == warnings_of(*fine_tunes(*EVEN), masks=False) == []


def warnings_of(base, tasks, **method):
    return Merge(base, tasks, **method).report()["warnings"]


def test_tasks_that_do_not_go_together_are_warned_of():
    base, tasks = fine_tunes(*EVEN)
    texts = warnings_of(*fine_tunes(*UNEVEN))
    assert any("times as long as that of task-2" in text for text in texts)
    # A task that is outvoted but where others are huge.
    giant = torch.tensor([100.0, 0, 0, 0, 0, 0, 0])
    rival = -3.0 * (giant == 0)
    texts = warnings_of([torch.zeros(7)], [[giant], [1 + giant / 100], [rival]], rescale="none")
    assert any("task-1 is restored with a larger error" in text and "rescale l2 gives" in text for text in texts)
    # Fine-tunes of another base.
    other = [tensor * 2 for tensor in tensors(99)]
    far = [[o + 0.01 * c for o, c in zip(other, tensors(50 + i), strict=True)] for i in range(2)]
    texts = warnings_of(base, [*tasks, *far])
    assert sum("farther from the base than the base is from zero" in text for text in texts) == 2
    assert any("task-3 and task-4" in text and "another model than this base" in text for text in texts)
    assert any("all task vectors nearly coincide" in text for text in warnings_of(tensors(7), tasks))


def test_a_task_that_lost_every_vote_is_warned_of():
    base, tasks = fine_tunes(0.1)
    against = [[b - 0.5 * (w - b) for b, w in zip(base, tasks[0], strict=True)]]
    for masks, told in ((True, "its mask is empty"), (False, "nothing of it is in the result")):
        report = Merge(base, tasks + against, masks=masks).report()
        lost = report["tasks"][1]
        assert (lost["density"], lost["scales"]["global"], lost["error"]["rescaled"]) == (0, 0, 1)
        assert any(f"task-1 lost every election: {told}" in text for text in report["warnings"])


def test_a_single_model_has_no_masks_and_no_rescalers():
    base, tasks = fine_tunes(*EVEN)
    average = [torch.stack(parts).mean(0) for parts in zip(*tasks, strict=True)]
    sizes = SIZES | {"masks": 0, "extras": 0}
    report = Merge(base, tasks, unified=average, method="average").report(sizes=sizes)
    assert report["method"]["masks"] is False and report["sizes"] == sizes | {"artifact": 900}
    text = str(report_tables(report)) + report_legend(report)
    assert "λ" not in text and "1-bit" not in text and "error unified" in text


@pytest.mark.parametrize("rescale", ["global", "official", "tensor", "l2", "tensor_l2", "none"])
def test_tables_name_every_task_and_the_mode_in_use(rescale):
    report = Merge(*fine_tunes(*UNEVEN), rescale=rescale).report()
    table, *others = (aligned_table(*table) for table in report_tables(report))
    assert [line.split()[0] for line in table] == ["task", "task-0", "task-1", "task-2", "mean"]
    # Columns end at the same place.
    assert len({len(line) for line in table}) == 1
    error = report["tasks"][1]["error"]
    assert table[2].split()[-3:] == [f"{error[key]:.3f}" for key in ("masked", "rescaled", "one_bit")]
    assert max(map(len, table)) <= 100
    assert any("1,008" in line and "25.2 %" in line for line in (*table, *sum(others, [])))
    assert (report["sizes"]["artifact_and_base"], report["sizes"]["one_bit_and_base"]) == (2008, 1108)
    markdown = report_markdown(report)
    tables = [part for part in markdown.split("\n\n") if part.startswith("|")]
    assert len(tables) == 3
    for part in tables:
        assert len({line.count("|") for line in part.splitlines()}) == 1
    assert f"- **Warning**: {report['warnings'][0]}" in markdown
