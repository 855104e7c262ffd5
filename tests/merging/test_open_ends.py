"""Merges whose base, tokens or layers are not what they seem."""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hf_ext.emr import EMRModel
from hf_ext.emr.arithmetic import SUB_BLOCK
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import DataError, UsageError
from hf_ext.files import TakenError
from hf_ext.merging.extracting import is_linear
from hf_ext.merging.merge import merge_checkpoints
from hf_ext.merging.plan import make_plan
from hf_ext.merging.updating import add_task, remove_task
from hf_ext.merging.vectors import NotFiniteError
from tests.emr.emr_testing import write_weights
from tests.hub.published import contents
from tests.kit.refusals import refused
from tests.merging.merging import CONFIG, merge, siblings

MERGES = [{}, {"method": "onebit"}, {"method": "task_arithmetic", "masks": True}]


@pytest.mark.parametrize("options", MERGES)
def test_a_task_that_was_mirrored_about_the_base_is_not_merged_again(sources, tmp_path, options):
    """The sums of its differences are what they were."""
    place = shutil.copytree(sources, tmp_path / "sources")
    artifact = merge(siblings(place, "a", "b"), tmp_path / "artifact", **options)
    before, base = contents(artifact), load_file(place / "base" / "model.safetensors")
    tensors = load_file(place / "a" / "model.safetensors")
    tensors["odd.weight"] = 2 * base["odd.weight"] - tensors["odd.weight"]
    write_weights(place / "a", tensors, config=CONFIG)
    with refused(DataError, "task 'a'"):
        add_task(artifact, "c", str(place / "c"))
    assert contents(artifact) == before


@pytest.mark.parametrize("options", [{}, {"method": "average", "allow_missing": True}, {"method": "onebit"}])
def test_a_base_between_two_tasks_is_told(sources, tmp_path, options):
    place = shutil.copytree(sources, tmp_path / "sources")
    base, own = (load_file(place / name / "model.safetensors") for name in ("base", "a"))
    mirrored = {name: 2 * base[name] - own[name] for name in base if own[name].shape == base[name].shape}
    write_weights(place / "b", mirrored, config=CONFIG)
    artifact = merge(siblings(place, "a", "b"), tmp_path / "artifact", **options)
    told = json.loads((artifact / "report.json").read_text())["warnings"]
    assert any("cancel" in text and "a and b (-1.00)" in text for text in told)


@pytest.mark.parametrize(
    ("kind", "rows", "refuses"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, 6, True),
        ({"model_type": "llama", "architectures": ["NobodysModel"]}, 6, True),
        # its tokens have rows in a head that is not shared
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2Model"]}, 6, False),
    ],
)
def test_tokens_in_rows_that_a_known_class_has_elsewhere_are_refused_in_one_model(tmp_path, kind, rows, refuses):
    for name, token in (("base", "one"), ("a", "two")):
        tensors = {"model.embed_tokens.weight": torch.ones(rows, 2), "model.norm.weight": torch.ones(2)}
        folder = write_weights(tmp_path / name, tensors, config={"vocab_size": 4, "num_hidden_layers": 1} | kind)
        (folder / "tokenizer.model").write_text(token)
    with refused(DataError, "'a'", "vocabulary") if refuses else contextlib.nullcontext():
        make_plan(siblings(tmp_path, "a", method="average")).close()
    make_plan(siblings(tmp_path, "a")).close()


@pytest.mark.parametrize(
    ("config", "refuses"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}, True),
        ({"_class_name": "UNet2DModel", "_diffusers_version": "0.30"}, True),
        ({"model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"]}, False),
    ],
)
@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_adapters_of_any_name_inside_base_and_task_are_refused(tmp_path, config, refuses, prefix):
    """Of a class without such layers; code that is not here may have them."""
    names = [f"{prefix}x.{name}" for name in ("base_layer.weight", "lora_A.mine.weight", "lora_B.mine.weight")]
    for name in ("base", "a"):
        write_weights(tmp_path / name, dict.fromkeys(names, torch.ones(2, 2)), config=config)
    with refused(DataError, "merge_and_unload") if refuses else contextlib.nullcontext():
        make_plan(siblings(tmp_path, "a", method="average")).close()


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module.", "net.x."])
def test_names_of_a_wrapper_are_no_names_of_a_task(tmp_path, wrapper):
    """A model with them would have random weights, as would one of a base that has them."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=9))
    model.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "a")
    expected = {name: value + 0.1 for name, value in model.state_dict().items()}
    inner = f"layers.1.{wrapper.removeprefix('module.') * ('_' in wrapper)}"
    write_weights(tmp_path / "a", {wrapper + name.replace("layers.1.", inner): expected[name] for name in expected})
    out = merge(siblings(tmp_path, "a"), tmp_path / "out")
    TaskWeights(out).export("a", tmp_path / "plain")
    one = merge(siblings(tmp_path, "a", method="average"), tmp_path / "one")
    found = [transformers.LlamaForCausalLM.from_pretrained(place) for place in (tmp_path / "plain", one)]
    for found_model in (EMRModel.from_pretrained(out, "a").model, *found):
        torch.testing.assert_close(dict(found_model.state_dict()), expected, rtol=1e-6, atol=1e-6)
    assert any("wrap" in text for text in json.loads((out / "report.json").read_text())["warnings"])
    with refused(DataError, "base", "wrap"):
        make_plan({"base": str(tmp_path / "a"), "tasks": {"a": str(tmp_path / "base")}}).close()


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM"])
def test_a_task_without_tensors_of_its_class_is_no_model(tmp_path, architecture):
    config = transformers.BertConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1)
    tensors = transformers.BertModel(config, add_pooling_layer=False).state_dict()
    told = config.to_dict() | {"architectures": [architecture]}
    for name in ("base", "a"):
        write_weights(tmp_path / name, tensors, config=told)
    out = merge(siblings(tmp_path, "a"), tmp_path / "out")
    with refused(DataError, "random", "pooler" if architecture == "BertModel" else "cls"):
        EMRModel.from_pretrained(out, "a")


@pytest.mark.parametrize("method", ["ties", "ternary"])
@pytest.mark.parametrize(
    ("density", "kept"),
    [(0.1, "50.0%"), (0.5, None), (0.6, "100.0%"), (0.46, None), (0.0001, "50.0%"), ({"a": 0.2, "b": 0.5}, "50.0%")],
)
def test_a_share_that_equal_elements_exceed_is_told(tmp_path, method, density, kept):
    """As in the authors' code, all that are as large as the last one stay."""
    for name, step in zip("0abc", (0, 1, 1, 1), strict=True):
        moved = step * torch.tensor([1.0, -1.0, 2.0, 2.0]).repeat(SUB_BLOCK)
        write_weights(tmp_path / name, {"w": (1 + moved / 128).bfloat16(), "v": torch.ones(8)})
    config = siblings(
        tmp_path, "a", "b", base="0", method=method, density=density, exclude=["v"], max_shard_size="5GB"
    )
    out = merge(config, tmp_path / "out")
    told = [text for text in json.loads((out / "report.json").read_text())["warnings"] if "`density`" in text]
    tasks = ["a"] if isinstance(density, dict) else ["a", "b"] if kept else []
    assert [task for task in "ab" if f"task '{task}': {kept} of" in str(told)] == tasks
    assert len(told) == (bool(tasks) if method == "ties" else len(tasks))
    assert all(("ties_by_tensor" in text) == (method == "ties") for text in told)
    if method == "ternary" and not isinstance(density, dict) and kept:
        told = add_task(out, "c", str(tmp_path / "c"), frozen=True)["warnings"]
        assert any("task 'c': " + kept in text for text in told)
        remove_task(out, "a")
        assert "'a'" not in str(json.loads((out / "report.json").read_text())["warnings"])


def _replace(config, out):
    merge_checkpoints(config, out, overwrite=True, progress=False)


def test_scores_of_an_earlier_merge_are_kept_and_said(sources, tmp_path):
    out = merge(siblings(sources, "a", "b"), tmp_path / "out")
    (out / "eval.json").write_text('{"results": []}')
    assert any("eval.json" in text for text in add_task(out, "c", str(sources / "c"))["warnings"])
    assert (out / "eval.json").read_text() == '{"results": []}'


_MINE = ("LICENSE", "notes.txt", "results/scores.csv", "tasks/a/eval.json", ".git/config", "before_after.png")


@pytest.mark.parametrize(
    "change", ["add", "frozen", "remove a", "remove b", "overwrite", "one model", "one model again"]
)
@pytest.mark.parametrize("card", [None, "---\nlicense: mit\n---\n\n# Mine\n"])
def test_what_its_owner_put_into_a_merge_stays_there(sources, tmp_path, change, card):
    again = change.startswith("one model")
    options = {"method": "average", "allow_missing": True} if again else {}
    out = merge(siblings(sources, "a", "b", **(options if change.endswith("again") else {})), tmp_path / "out")
    before = contents(out)
    mine = {name: name.encode() for name in _MINE} | ({"README.md": card.encode()} if card else {})
    for name, data in mine.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
    if change in ("add", "frozen", "overwrite"):
        # the owner's files are theirs after an update too
        add_task(out, "d", str(sources / "a"), frozen=True)
    if change in ("add", "frozen"):
        add_task(out, "c", str(sources / "c"), frozen=change == "frozen")
    elif change.startswith("remove"):
        remove_task(out, change[-1])
    else:
        _replace(siblings(sources, "a", "b", **options), out)
    after = contents(out)
    assert {name: after.get(name) for name in mine} == mine
    own = {*before, *(name for name in after if name.startswith(("tasks/c/", "tasks/d/")))}
    assert {*after} - {*mine} <= own and (card or b"Written by hf-ext" in after["README.md"])
    if (out / "emr.json").is_file():
        assert not {*json.loads(after["emr.json"])["files"]} & {*mine}
    if again:
        assert not any(name.endswith("mask.safetensors") for name in after)


@pytest.mark.parametrize(("name", "lost"), [("config.json", "config"), ("tasks/c/mask.safetensors", "mask")])
def test_a_file_that_would_take_the_place_of_the_owners_is_refused(sources, tmp_path, name, lost):
    out = merge(siblings(sources, "a", "b"), tmp_path / "out")
    record = json.loads((out / "emr.json").read_text())
    record["files"].pop(name, None)
    (out / "emr.json").write_text(json.dumps(record))
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    with refused(TakenError, lost, path=out / name):
        _replace(siblings(sources, "a", "b", "c"), out)
    assert (out / name).read_text() == "mine"
    with refused(TakenError, path=out / name):
        add_task(out, "c", str(sources / "c"))
    os.rename(out / name, tmp_path / "mine")
    _replace(siblings(sources, "a", "b", "c"), out)


@pytest.mark.parametrize("options", [{}, {"method": "average", "allow_missing": True}])
def test_a_merge_does_not_replace_the_folder_that_holds_its_base(sources, tmp_path, options):
    out = merge(siblings(sources, "a", "b", include_base=True), tmp_path / "out")
    before = contents(out)
    with refused(UsageError, "base"):
        _replace(siblings(sources, "a", "b", **options) | {"base": str(out / "base")}, out)
    assert contents(out) == before


# Base and two tasks: halves of a tensor; type and options; whether a value of the first task would be infinite.
_HALVES = {
    "one step for two sizes": (60000, [(65000, 30000)], torch.float16, {"method": "onebit"}, True),
    "three signs": (60000, [(65000, 30000)], torch.float16, {"method": "ternary"}, True),
    "a base too large for the result": (
        1e6,
        [(1e6 + 1, 1e6 + 2)],
        torch.float32,
        {"method": "onebit", "dtype": "float16"},
        True,
    ),
    "rescaled": (0, [(60000, 50000), (-100, -60000)], torch.float16, {"rescale": "tensor"}, True),
    "rescaled by two tensors": (0, [(60000, 50000), (-100, -60000)], torch.float16, {}, True),
    "not rescaled": (0, [(60000, 50000), (-100, -60000)], torch.float16, {"rescale": "none"}, False),
    "a wider type": (60000, [(65000, 30000)], torch.float16, {"method": "onebit", "dtype": "float32"}, False),
    "near the end": (60000, [(65000, 65000)], torch.float16, {"method": "onebit"}, False),
    "bfloat16": (60000, [(65000, 30000)], torch.bfloat16, {"method": "onebit"}, False),
    "the end of float32": (3e38, [(3.3e38, 1e38)], torch.float32, {"method": "onebit"}, True),
}


@pytest.mark.parametrize("case", _HALVES)
@pytest.mark.parametrize("shard", ["5GB", "100B"])
def test_no_task_is_restored_with_infinity(tmp_path, case, shard):
    start, tasks, dtype, options, refuses = _HALVES[case]
    for name, halves in zip("0ab", [(start, start), *tasks], strict=False):
        tensors = {"w": torch.tensor(halves).repeat_interleave(32), "v": torch.ones(8, 8)}
        write_weights(tmp_path / name, {key: value.to(dtype) for key, value in tensors.items()})
    config = siblings(tmp_path, *"ab"[: len(tasks)], base="0", max_shard_size=shard, **options)
    with refused(NotFiniteError, "'w'", "'a'", "dtype") if refuses else contextlib.nullcontext():
        restored = TaskWeights(merge(config, tmp_path / "out")).restore("a", "w")
        assert restored.isfinite().all()
    assert not (tmp_path / ".out.partial").exists() and (tmp_path / "out").exists() != refuses
    if case == "not rescaled":
        with refused(DataError, "'w'", "float16", "rescale"):
            TaskWeights(tmp_path / "out", rescale="tensor").export("a", tmp_path / "plain")


class _Doubled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class _Router(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).topk(1)


class _Named(torch.nn.Linear):
    def forward(self, x):
        return x @ self.weight.T if self.bias is None else x @ self.weight.T + self.bias


_LAYERS = {
    "a plain one": (torch.nn.Linear, True),
    "a class of its own": (_Named, True),
    "Falcon's": (transformers.models.falcon.modeling_falcon.FalconLinear, True),
    "of GPT-2": (transformers.pytorch_utils.Conv1D, True),
    "of attention in torch": (torch.nn.modules.linear.NonDynamicallyQuantizableLinear, False),
    "doubled": (_Doubled, False),
    "a router": (_Router, False),
    "bilinear": (lambda rows, columns: torch.nn.Bilinear(rows, columns, 2), False),
}


@pytest.mark.parametrize("layer", _LAYERS)
def test_layers_of_other_classes_are_linear_if_their_answers_are(layer):
    make, linear = _LAYERS[layer]
    with torch.device("meta"):
        made = make(4, 5)
    before = dict(made.named_parameters())
    assert is_linear(made) == linear
    assert all(part is before[name] for name, part in made.named_parameters())
