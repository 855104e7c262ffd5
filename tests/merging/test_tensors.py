"""What happens to each tensor of a merge: every rule, a fuzz of headers, shapes and types."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import ones

from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import DataError
from hf_ext.merging.merge import merge_checkpoints
from hf_ext.merging.plan import make_plan, plan_lines, plan_values, resolve_plan
from hf_ext.merging.tensors import KEPT, SHARED, SKIPPED, Row
from hf_ext.merging.vectors import NotFiniteError
from tests.emr.emr_testing import family, raw_plan, reasons, tiny_bert, write_weights
from tests.kit.refusals import refused


def decided(plan):
    """What the tasks keep and what they share with the base once all is compared, by task and name."""
    plan = resolve_plan(plan)
    return tuple([(item.task, item.name) for item in plan.own_tensors(rule)] for rule in (KEPT, SHARED))


def test_what_is_missing_somewhere(tmp_path):
    base = {"a": ones(4), "b": ones(4), "only_base": ones(4)}
    with raw_plan(tmp_path, base, {"a": ones(4), "b": ones(4), "only_task": ones(2)}, {"a": ones(4)}) as plan:
        assert {part.name: part.members for part in plan.merged_rows} == {"a": {0: "a", 1: "a"}, "b": {0: "b"}}
        assert plan.copied_rows == (Row("only_base", (4,), torch.float32),)
        assert reasons(plan) == {(0, "only_task"): "not in the base"}
        assert any("does not take part in 1 merged tensors" in line for line in plan_lines(plan))
    # Of another shape is missing too, and kept.
    base = {"w": ones(4, 4), "positions": ones(8, 4)}
    with raw_plan(tmp_path, base, base | {"positions": ones(16, 4)}, base) as plan:
        assert reasons(plan) == {(0, "positions"): "shape [16, 4], in the base [8, 4]"}
        assert [part.members for part in plan.merged_rows if part.name == "positions"] == [{1: "positions"}]


NORM = {f"bn.{name}": ones(4) for name in ("weight", "bias", "running_mean", "running_var")}
NUMBERS = {"ids": torch.arange(5), "mask": torch.tensor([True, False]), "bytes": torch.zeros(3).byte()}
BUFFERS = {"rotary.inv_freq": ones(4), "embeddings.position_ids": torch.arange(4)[None]}
BUFFERS |= {"h.0.attn.bias": ones(1, 1, 4, 4), "h.0.attn.masked_bias": torch.tensor(-1e4)}
# The base, what the second task has otherwise, what is merged, and what each task keeps although it is equal.
OTHERS = {"ids": torch.arange(1, 6), "mask": torch.tensor([True, True]), "bytes": torch.zeros(3)}
COUNT = "bn.num_batches_tracked"
RULES: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str, str]] = {
    "whole numbers": ({"w": ones(4)} | NUMBERS, OTHERS, "w", ""),
    "running statistics": (
        *(NORM | {COUNT: torch.tensor(7)}, {COUNT: torch.tensor(8)}),
        *("bn.weight bn.bias", "bn.running_mean bn.running_var"),
    ),
    # a bias of each head is no mask
    "buffers that follow from the configuration": (
        {"w": ones(4, 4), "h.1.attn.bias": ones(1, 2, 4, 4)} | BUFFERS,
        *({"rotary.inv_freq": ones(4) / 2}, "w h.1.attn.bias", ""),
    ),
    "single elements and none": ({"empty": ones(0, 4), "scalar": torch.tensor(2.0)}, {}, "scalar", ""),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_is_merged_kept_and_shared(tmp_path, rule):
    base, changes, *names = RULES[rule]
    merged, kept = (set(text.split()) for text in names)
    with raw_plan(tmp_path, base, base, base | changes) as plan:
        assert {part.name: part.elements for part in plan.merged_rows} == {n: base[n].numel() for n in merged}
        assert {item.name for item in plan.copied_rows} == base.keys() - merged
        own, shared = decided(plan)
        rest = base.keys() - merged - kept
        assert set(own) == {(task, name) for task in (0, 1) for name in kept} | {(1, name) for name in changes}
        assert set(shared) == {(0, name) for name in rest} | {(1, name) for name in rest - changes.keys()}


def test_a_buffer_that_the_model_no_longer_saves_is_dropped(tmp_path):
    config = family(tmp_path, tiny_bert, "a")
    weights = load_file(tmp_path / "a" / "model.safetensors")
    write_weights(tmp_path / "a", weights | {"bert.embeddings.position_ids": torch.arange(16)[None]})
    with make_plan(config) as plan:
        assert [(item.task, item.name) for item in plan.own_tensors(SKIPPED)] == [(0, "bert.embeddings.position_ids")]
        assert {item.name for item in plan.own_tensors(KEPT)} == {"classifier.weight", "classifier.bias"}
        assert any("skipped bert.embeddings.position_ids" in line for line in plan_lines(plan))


def test_excluded_tensors_by_the_names_of_either_side(tmp_path):
    base = {"encoder.a": ones(4), "encoder.b": ones(4), "head": ones(4), "encoder.c": ones(4)}
    task = {f"bert.{name}": value for name, value in base.items()}
    with raw_plan(tmp_path, base, task, base, exclude=["head", r"bert\..*b$", "coder"]) as plan:
        # anchored at the start: "coder" matches nothing
        assert [(part.name, part.members) for part in plan.merged_rows] == [
            ("encoder.a", {0: "bert.encoder.a", 1: "encoder.a"}),
            ("encoder.b", {1: "encoder.b"}),
            ("encoder.c", {0: "bert.encoder.c", 1: "encoder.c"}),
        ]
        assert reasons(plan) == dict.fromkeys([(0, "bert.head"), (1, "head"), (0, "bert.encoder.b")], "excluded")


@pytest.mark.parametrize("method", ["average", "emr"])
def test_what_takes_no_part_may_hold_anything(tmp_path, method):
    spoilt = {"w": ones(4), "keep": torch.full((3,), float("nan")), "mask": torch.full((2,), -torch.inf)}
    with raw_plan(tmp_path, spoilt, spoilt, spoilt, method=method, exclude=["keep"]) as plan:
        out = merge_checkpoints(plan.config, tmp_path / "out", progress=False).path
        assert load_file(out / "model.safetensors")["keep"].isnan().all()


CONSTANTS = {
    "attn_bias": torch.full((40, 40), -torch.inf).triu(1),
    "h.0.attn.causal": torch.full((1, 1, 9, 9), torch.inf).tril(-1),
    "pad.weight": torch.tensor([[1.0, 2.0], [float("nan"), float("nan")]]),
    "limit": torch.tensor(-torch.inf),
    "half": torch.full((3,), -torch.inf, dtype=torch.bfloat16),
    # beyond what is looked at first
    "late": torch.cat([torch.zeros(5000), torch.tensor([torch.inf])]),
}


@pytest.mark.parametrize("method", ["average", "ties", "slerp", "emr", "onebit"])
def test_constants_with_infinity_are_carried_over_whatever_their_name(tmp_path, method):
    base = {"w": ones(4)} | CONSTANTS
    tasks = [base | {"w": ones(4) * factor} for factor in ((2,) if method == "slerp" else (2, 3))]
    with raw_plan(tmp_path, base, *tasks, method=method) as plan:
        # Headers alone, as a dry run reads them, do not tell.
        assert {*CONSTANTS} <= {row.name for row in plan.merged_rows}
        resolved = resolve_plan(plan)
        assert not {*CONSTANTS} & {row.name for row in resolved.merged_rows}
        assert [text for text in resolved.warnings if "attn_bias" in text and "carried over" in text]
        out = merge_checkpoints(plan.config, tmp_path / "out", progress=False).path
    if method in ("emr", "onebit"):
        out = TaskWeights(out).export("t0", tmp_path / "task")
    found = load_file(out / "model.safetensors")
    for name, values in CONSTANTS.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), values.view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("name", CONSTANTS)
def test_infinity_in_a_tensor_that_differs_is_refused(tmp_path, name):
    base = {"w": ones(4)} | CONSTANTS
    changed = CONSTANTS[name].clone()
    changed.view(-1)[0] = 7
    with (
        raw_plan(tmp_path, base, base, base | {name: changed}, method="average") as plan,
        refused(NotFiniteError, name),
    ):
        merge_checkpoints(plan.config, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ({"exclude": ["w", "nothing", "ody"]}, {"nothing", "ody"}),
        ({"exclude": ["w", "m.body"]}, set()),
        ({"method": "task_arithmetic", "weight": {"t0": [{"filter": "bod", "value": [0, 1]}], "t1": 1}}, {"w"}),
        ({"method": "task_arithmetic", "weight": {}}, {"t0, t1"}),
        ({"method": "ties_by_tensor", "density": [{"filter": "ody", "value": 1}], "weight": {"t1": 0}}, {"w", "t0"}),
        ({"method": "task_arithmetic", "weight": {"t0": [{"filter": "x", "value": 1}, {"value": 0}], "t1": 1}}, {"x"}),
    ],
)
def test_patterns_that_fit_nothing_and_defaults_that_are_taken_are_said(tmp_path, options, unused):
    base = {"w": ones(4), "body": ones(4)}
    with raw_plan(tmp_path, base, {f"m.{name}": value for name, value in base.items()}, base, **options) as plan:
        told = [text for text in plan.warnings if "no tensor" in text or "not given for" in text]
        assert len(told) == len(unused) and all(any(name in text for text in told) for name in unused)


def test_types_of_base_tasks_and_result(tmp_path):
    base = {"w": ones(4, dtype=torch.bfloat16), "ids": torch.arange(3)}
    tasks = [{"w": ones(4, dtype=dtype)} for dtype in (torch.float16, torch.float32, torch.bfloat16)]
    with raw_plan(tmp_path, base, *tasks) as plan:
        assert plan.merged_rows == (Row("w", (4,), torch.bfloat16, {0: "w", 1: "w", 2: "w"}),)
        # float16 and float32 are told of, bfloat16 is not
        *told, size = plan.warnings
        assert [text.partition(":")[0] for text in told] == ["t0", "t1"] and "this saves no space" in size
        assert all("in bfloat16, which does not hold all of it" in text for text in told)
        assert plan.sizes.read == 4 * (2 + 2 + 4 + 2) + 24
    double = {"w": ones(4, dtype=torch.float64)}
    with raw_plan(tmp_path, double, {"w": ones(4)}, double) as plan:
        assert plan.merged_rows[0].dtype == torch.float32
        *told, size = plan.warnings
        assert [text.partition(" (")[0] for text in told] == ["base", "task 't1'"]
        assert all("treated as float32" in text for text in told) and "this saves no space" in size
    with raw_plan(tmp_path, base, *tasks, dtype="float32") as plan:
        assert plan.merged_rows[0].dtype == torch.float32 and plan.copied_rows[0].dtype == torch.int64
        assert plan.sizes.unified == 16 + 24


def test_one_model_says_what_of_the_tasks_it_leaves_out(tmp_path):
    base = {"w": ones(4), "v": ones(3), "u": ones(2)}
    tasks = [base | {"head": ones(2)}, {"w": ones(4), "v": ones(5), "u": ones(2)}, {"w": ones(4), "u": ones(2)}]
    with raw_plan(tmp_path, base, *tasks, method="average", allow_missing=True) as plan:
        lost, narrow, other, absent = plan.warnings
        assert ["'t0'" in lost and "head" in lost, "'t1'" in narrow and "v" in narrow] == [True, True]
        assert "'t1'" in other and "lacks" in other and "'t2'" in absent and "lacks v" in absent
        assert any("left out: not in the base" in line for line in plan_lines(plan))
    with raw_plan(tmp_path, base, *tasks) as plan:
        assert not [text for text in plan.warnings if "merged model" in text]
        assert any("kept: not in the base" in line for line in plan_lines(plan))


# Of the base a tensor that no task has, and tensors of the tasks that it has not: the same in another form, or others.
@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ({"x.0.v": ones(3)}, {}, True),
        ({"x.0.v": ones(3)}, {"x.wrapped.0.v": ones(3)}, False),
        ({"v": ones(3)}, {"v_new": ones(3)}, True),
        ({"mask_token": ones(3)}, {"prompt": ones(3)}, True),
        ({"x.0.cos_cached": ones(3)}, {"x.0.adapter": ones(3)}, True),
        ({"classifier.out_proj.weight": ones(3, 3)}, {"classifier.weight": ones(3, 3)}, True),
        ({"x.0.stack": ones(2, 3)}, {"x.0.e.0.v": ones(3), "x.0.e.1.v": ones(3)}, False),
        ({"x.0.e.0.v": ones(3), "x.0.e.1.v": ones(3)}, {"x.0.stack": ones(2, 3)}, False),
        ({"norm.gamma": ones(3)}, {"norm.weight": ones(3)}, True),
        ({"x.0.qkv.weight": ones(9, 3)}, {f"x.0.{part}.weight": ones(3, 3) for part in "qkv"}, False),
        # heads, a pooler, and what the model computes
        ({"lm_head.dense.weight": ones(3, 3)}, {"classifier.dense.weight": ones(3, 3)}, True),
        ({"cls.0.weight": ones(2, 3)}, {"score.0.weight": ones(2, 3)}, True),
        ({"body.pooler.weight": ones(3, 3)}, {"classifier.weight": ones(2, 3)}, True),
        ({"x.0.v": ones(3)}, {"x.0.rotary.inv_freq": ones(3), "x.0.attn_mask": ones(3)}, True),
        ({"x.0.v": ones(3)}, {"x.0.count": torch.arange(3), "x.0.empty": ones(0)}, True),
        ({"x.0.inv_freq": ones(3)}, {"x.0.v": ones(3)}, True),
        ({"x.0.bn.running_mean": ones(3)}, {"x.0.v": ones(3)}, True),
    ],
)
def test_what_no_task_has_is_the_bases_with_a_line_unless_the_tasks_may_have_it_in_another_form(
    tmp_path, ours, theirs, fits
):
    shared = {"w": ones(4), "x.0.u": ones(2), "norm.b": ones(1), "body.u": ones(2)}
    models = (shared | ours, shared | theirs, shared | theirs)
    if not fits:
        with refused(DataError, "'t0'", next(iter(ours)), "allow_missing"):
            raw_plan(tmp_path, *models, method="average")
        with raw_plan(tmp_path, *models, method="average", exclude=[f"^{name}" for name in ours]) as plan:
            assert {row.name for row in plan.merged_rows} == shared.keys()
    with raw_plan(tmp_path, *models, method="average", allow_missing=not fits) as plan:
        told = [text for text in plan.warnings if "no task has" in text]
        assert len(told) == any("inv_freq" not in name and "cached" not in name for name in ours)
        assert all(name in told[0] for name in ours if told)
    raw_plan(tmp_path, *models).close()


@pytest.mark.parametrize("agreed", [False, True])
@pytest.mark.parametrize(
    ("name", "ours", "theirs", "allowed"),
    [
        ("table", torch.arange(4), torch.arange(4).flip(0), False),
        ("table", torch.arange(3), torch.arange(3.0), False),
        ("rotary.inv_freq", ones(4), ones(4) / 2, True),
        ("attention_mask", torch.tensor([0.0, -torch.inf]), torch.tensor([-torch.inf, 0.0]), True),
    ],
)
def test_one_model_does_not_lose_what_differs_without_a_word(tmp_path, name, ours, theirs, allowed, agreed):
    base, other = {"w": ones(4), name: ours}, {"w": ones(4), name: theirs}
    tasks = (other if agreed else base, other)
    for options, said in (({}, 1 + agreed), ({"allow_missing": True}, 1 + agreed), ({"exclude": [name]}, 0)):
        with raw_plan(tmp_path, base, *tasks, method="average", **options) as plan:
            if not allowed and not options:
                with refused(DataError, name, "allow_missing"):
                    resolve_plan(plan)
            else:
                assert sum(name in text for text in resolve_plan(plan).warnings) == said
    with raw_plan(tmp_path, base, *tasks) as plan:
        assert (1, name) in decided(plan)[0]


def stats(*values, count):
    return {"bn.running_mean": torch.tensor(values), "bn.running_var": ones(3) * count, COUNT: torch.tensor(count)}


FIRST, SECOND, START = stats(0.1, -0.0, 1e-45, count=9), stats(0.7, 3.0, -2.0, count=4), stats(5.0, 5.0, 5.0, count=1)


@pytest.mark.parametrize(
    ("method", "options", "shares"),
    [
        *((method, {}, (0, 0.5, 0.5)) for method in ("average", "elect", "ties", "ties_by_tensor", "model_stock")),
        ("average", {"weight": {"t0": 1, "t1": 0}}, (0, 1, 0)),
        ("average", {"weight": {"t0": -1, "t1": -3}}, (0, 0.25, 0.75)),
        ("average", {"weight": {"t0": 2, "t1": -1}, "drop": 0.5}, (0, 1, 0)),
        ("average", {"weight": {"t0": [{"filter": "bn", "value": 3}, {"value": 0}], "t1": 1}}, (0, 0.75, 0.25)),
        ("slerp", {"t": 0.25}, (0, 0.75, 0.25)),
        ("slerp", {"t": 1}, (0, 0, 1)),
        ("task_arithmetic", {"weight": 0.25}, (0.5, 0.25, 0.25)),
        ("task_arithmetic", {"weight": {"t0": 0, "t1": 1}}, (0, 0, 1)),
        ("task_arithmetic", {"weight": 2}, (0, 0.5, 0.5)),
        ("task_arithmetic", {"weight": 0}, (1, 0, 0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("equal", [False, True])
def test_one_model_gets_the_mean_of_running_statistics_by_the_shares_of_its_weights(
    tmp_path, method, options, shares, dtype, equal
):
    models = [START, FIRST, FIRST if equal else SECOND]
    models = [{n: v.to(dtype) if v.is_floating_point() else v for n, v in model.items()} for model in models]
    written = [{"w": torch.arange(4.0) * place} | model for place, model in enumerate(models, 1)]
    with raw_plan(tmp_path, *written, method=method, **options) as plan:
        out = merge_checkpoints(plan.config, tmp_path / "out", progress=False).path
        told = [text for text in resolve_plan(plan).warnings if COUNT in text]
        assert plan_values(plan)["averaged"] == sorted(START) and not plan_values(plan)["copied"]
    held = [(share, model) for share, model in zip(shares, models, strict=True) if share]
    assert len(told) == (len({min(place, 1) if equal else place for place in range(3) if shares[place]}) > 1)
    found = load_file(out / "model.safetensors")
    for name, values in models[0].items():
        parts = [model[name].double() * share for share, model in held]
        mean = sum(parts[1:], parts[0])
        expected = (mean if values.is_floating_point() else mean.round()).to(values.dtype)
        assert found[name].view(-1).view(torch.uint8).equal(expected.view(-1).view(torch.uint8)), name


HALF, WIDE = ones(3).half(), {"dtype": "float32"}
LACKS, LOST, MEAN, NARROW, NONE = "merged from the other", "cannot contain", "their mean", "float16", "no task has"


@pytest.mark.parametrize(
    ("models", "options", "expected", "said"),
    [
        ([torch.tensor(7), torch.tensor([8]), torch.tensor(4)], {}, torch.tensor(6), [MEAN]),
        ([torch.tensor(7.0), torch.tensor(9), torch.tensor(4)], {}, torch.tensor(6.5), [MEAN]),
        ([torch.tensor(7), torch.tensor(9.0), torch.tensor([[5]])], WIDE, torch.tensor(7), [MEAN]),
        ([ones(3), ones(1, 3) * 3, HALF], {}, ones(3) * 2, [MEAN]),
        ([ones(3), ones(5), ones(3) * 2], {}, ones(3) * 2, [LOST]),
        ([ones(3), ones(3).to(torch.complex64), ones(3) * 2], {}, ones(3) * 2, [LOST]),
        ([HALF, ones(3) * 1e5, ones(3) * 3e5], WIDE, ones(3) * 2e5, [MEAN]),
        ([HALF, ones(3) * 3, ones(3)], {}, HALF * 2, [NARROW, MEAN]),
        ([HALF, ones(3), HALF], {"dtype": "bfloat16"}, HALF, [NARROW, MEAN]),
        ([ones(3), HALF, HALF], {"dtype": "bfloat16"}, ones(3), []),
        ([ones(3), ones(3) * 2, None], {}, ones(3) * 2, [LACKS]),
        ([ones(3), ones(3) * 2, None], {"method": "slerp", "t": 1}, ones(3) * 2, [LACKS]),
        ([ones(3), None, ones(3) * 3], {"method": "task_arithmetic", "weight": 0.5}, ones(3) * 2, [LACKS, MEAN]),
        ([ones(3), ones(3) * 2, ones(3)], {"weight": {"t0": 1, "t1": 0}}, ones(3) * 2, []),
        ([ones(3), None, None], {}, ones(3), [NONE]),
    ],
)
@pytest.mark.parametrize("name", [COUNT, "bn.running_var"])
def test_running_statistics_of_another_kind_or_of_some_tasks_are_merged(
    tmp_path, name, models, options, expected, said
):
    written = [{"w": HALF.bfloat16()} | ({} if values is None else {name: values}) for values in models]
    with raw_plan(tmp_path, *written, **{"method": "average"} | options) as plan:
        out = merge_checkpoints(plan.config, tmp_path / "out", progress=False).path
        told = resolve_plan(plan).warnings
    found = load_file(out / "model.safetensors")[name]
    assert found.equal(expected) and (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert len(told) == len(said) and all(any(part in text for text in told) for part in said)


def test_running_statistics_that_cannot_be_averaged(tmp_path):
    base = {"w": ones(4), **START}
    nan = base | {"bn.running_var": ones(3) * torch.nan}
    with raw_plan(tmp_path, nan, nan, nan, method="average") as plan:
        merge_checkpoints(plan.config, tmp_path / "same", progress=False)
    half = {name: value.half() if value.is_floating_point() else value for name, value in base.items()}
    for start, change in ((base, nan), (half, {"bn.running_var": ones(3) * 1e6})):
        with (
            refused(NotFiniteError, "bn.running_var"),
            raw_plan(tmp_path, start, base | change, method="average") as plan,
        ):
            merge_checkpoints(plan.config, tmp_path / "bad", progress=False)
        with raw_plan(tmp_path, start, base | change, method="average", exclude=["bn.running_var"]) as plan:
            merge_checkpoints(plan.config, tmp_path / "kept", progress=False, overwrite=True)
        assert load_file(tmp_path / "kept" / "model.safetensors")["bn.running_var"].equal(start["bn.running_var"])


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
DTYPES += (torch.complex64, torch.float8_e4m3fn, torch.int8)
NAMES = [f"{prefix}{name}" for prefix in ("", "m.") for name in ("a.w", "a.bias", "b.w", "bn.running_var", "inv_freq")]
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
# mostly what a model holds, sometimes anything
changes = st.dictionaries(
    st.sampled_from(NAMES),
    st.tuples(st.sampled_from([(2, 3), (3,)]) | shapes, st.sampled_from(DTYPES[:3]) | st.sampled_from(DTYPES)),
    max_size=2,
)


@st.composite
def families(draw):
    """A base, and tasks that were made from it by changing, adding, dropping and renaming tensors."""
    dtype = draw(st.sampled_from(DTYPES[:4]))
    base = {"a.w": ((2, 3), dtype), "b.w": ((3, 2), dtype), "a.bias": ((3,), dtype)} | draw(changes)
    tasks = []
    for _ in range(draw(st.integers(1, 3))):
        task = base | draw(changes)
        for name in draw(st.sets(st.sampled_from(sorted(task)), max_size=2)):
            del task[name]
        prefix = draw(st.sampled_from(["", "", "p.", "model.p."]))
        tasks.append({prefix + name: about for name, about in task.items()})
    return base, tasks


excluded = st.lists(st.sampled_from([".*a", "m", "b.w$"]), max_size=2)
options = {"exclude": excluded, "dtype": st.sampled_from(["float32", "bfloat16"])}


@settings(max_examples=80)
@given(families(), st.fixed_dictionaries({}, optional=options))
def test_every_tensor_has_one_place_or_the_plan_is_refused(tmp_path, family, options):
    base, tasks = family

    def filled(described):
        return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in described.items()}

    try:
        plan = raw_plan(tmp_path, filled(base), *map(filled, tasks), **options)
    except ValueError as error:
        assert len(str(error)) > 40
        return
    with plan:
        root = [*(row.name for row in (*plan.merged_rows, *plan.copied_rows)), *plan.matching.aliases]
        assert sorted(root) == sorted(base) and plan.merged_rows
        extras, shared = decided(plan)
        for index, task in enumerate(tasks):
            places = [part.members[index] for part in plan.merged_rows if index in part.members]
            places += [name for owner, name in (*extras, *shared) if owner == index]
            assert sorted(places) == sorted(task)
        for part in plan.merged_rows:
            assert part.elements == math.prod(base[part.name][0]) > 0 and part.dtype.is_floating_point
            assert all(tasks[index][name][0] == part.shape for index, name in part.members.items())
        json.dumps(plan_values(plan))
        assert plan_lines(plan) and plan.sizes.read > 0
