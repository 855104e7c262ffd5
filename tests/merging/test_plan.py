"""The plan and its sources: incompatible checkpoints, and that nothing but headers is read for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import ones

from hf_ext.emr import arithmetic
from hf_ext.errors import DataError
from hf_ext.files import read_json, write_json
from hf_ext.hub.header_format import CheckpointError
from hf_ext.merging.plan import Plan, make_plan, plan_lines, plan_values, resolve_plan
from hf_ext.merging.sources import open_weights
from hf_ext.merging.tensors import COMPARED, KEPT, SHARED, SKIPPED, Own, Row
from tests.emr.emr_testing import (
    WORDS,
    family,
    push_folder,
    raw_plan,
    resized,
    tiny_bert,
    tiny_gpt2,
    tiny_unet,
    write_weights,
)
from tests.kit.refusals import refused
from tests.merging.merging import merge, siblings, write_set

pytestmark = pytest.mark.usefixtures("own_cache")


def prefixes(plan: Plan) -> list[tuple[str, str]]:
    return [(names.base_prefix, names.task_prefix) for names in plan.matching.names]


def plan_in(place: Path, base: str, *tasks: str) -> Plan:
    return make_plan(siblings(place, *tasks, base=base))


def test_classifiers_of_a_bare_base(tmp_path):
    base = tiny_bert(tmp_path / "base")
    tiny_bert(tmp_path / "two", 1, base=base)
    tiny_bert(tmp_path / "five", 2, base=base, num_labels=5, max_shard_size=9000)
    tiny_bert(tmp_path / "bare", 3, base=base, task_head=False)
    with plan_in(tmp_path, "base", "two", "five", "bare") as plan:
        stored = load_file(base / "model.safetensors")
        assert set(stored) == set(plan.base.tensors) and not plan.copied_rows
        assert prefixes(plan) == [("", "bert."), ("", "bert."), ("", "")]
        assert list(plan.merged_rows) == [
            Row(name, (*stored[name].shape,), torch.float32, {0: f"bert.{name}", 1: f"bert.{name}", 2: name})
            for name in plan.base.tensors
        ]
        assert set(plan.own_tensors(KEPT)) == {
            Own(index, f"classifier.{name}", f"classifier.{name}", shape, torch.float32, KEPT, "not in the base")
            for index, labels in ((0, 2), (1, 5))
            for name, shape in (("weight", (labels, 16)), ("bias", (labels,)))
        }
        assert resolve_plan(plan).own == plan.own and not plan.warnings and not plan.own_tensors(SKIPPED)


def test_a_base_with_a_head_and_bare_tasks(tmp_path):
    tiny_bert(tmp_path / "base", 1, base=tiny_bert(tmp_path / "bare"))
    with plan_in(tmp_path, "base", "bare") as plan:
        assert prefixes(plan) == [("bert.", "")]
        assert len(plan.merged_rows) == len(plan.tasks[0].tensors)
        assert {item.name for item in plan.copied_rows} == {"classifier.weight", "classifier.bias"}


TIED = {"lm_head.weight": "transformer.wte.weight"}


@pytest.fixture
def tied(tmp_path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Weights of a GPT-2 and of a fine-tune, `base` and `a`, whose files lack the tied head."""
    family(tmp_path, tiny_gpt2, "a")
    base, task = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "a"))
    return base, task, read_json(tmp_path / "base" / "config.json")


def test_tied_weights_are_merged_once_however_the_file_says_it(tied, tmp_path):
    weights, _, config = tied
    with plan_in(tmp_path, "base", "a") as plan:
        # no file holds the other name, so the class of transformers, which would know it, is not imported
        assert plan.matching.aliases == {}
        assert "lm_head.weight" not in {part.name for part in plan.merged_rows} and not plan.own_tensors(KEPT)
    head = weights["transformer.wte.weight"].clone()
    write_weights(tmp_path / "doubled", weights | {"lm_head.weight": head}, config=config)
    write_weights(tmp_path / "named", weights, config={}, metadata=TIED)
    for folder in ("doubled", "named"):
        with plan_in(tmp_path, folder, "a") as plan:
            assert plan.matching.aliases == TIED and len(plan.merged_rows) == len(weights) and not plan.copied_rows
            assert plan.sizes.unified == sum(tensor.nbytes for tensor in weights.values())
            assert not resolve_plan(plan).own_tensors(KEPT, SHARED)
    write_weights(tmp_path / "broken", weights | {"lm_head.weight": head + 1}, config=config)
    with plan_in(tmp_path, "broken", "a") as plan, refused(ValueError, *map(repr, TIED), *map(repr, TIED.values())):
        resolve_plan(plan)


def test_a_task_that_untied_its_head_keeps_it_and_one_that_repeats_it_does_not(tied, tmp_path):
    _, task, config = tied
    embedding = task["transformer.wte.weight"]
    for name, head in (("repeated", embedding.clone()), ("untied", embedding + 1)):
        write_weights(tmp_path / name, task | {"lm_head.weight": head}, config=config)
    del task["transformer.wte.weight"]
    write_weights(tmp_path / "renamed", task | {"lm_head.weight": embedding}, config=config)
    with plan_in(tmp_path, "base", "repeated", "untied", "renamed") as plan:
        assert [item.reason for item in plan.own_tensors(COMPARED)] == ["tied to another tensor in the base"] * 2
        # The class ties the one that the file lacks to the one that it has.
        assert all(len(row.members) == 3 for row in plan.merged_rows)
        resolved = resolve_plan(plan)
        assert [(item.task, item.name) for item in resolved.own_tensors(KEPT)] == [(1, "lm_head.weight")]
        assert not resolved.own_tensors(SHARED)


def test_a_class_that_cannot_be_built_is_warned_of(tied, tmp_path):
    weights, _, config = tied
    head = weights["transformer.wte.weight"].clone()
    for changes, fact in (
        ({"n_head": 0}, "GPT2LMHeadModel cannot be built from its configuration ("),
        # code that comes with the model may tie what it likes
        ({"architectures": ["Own"]}, "none of transformers"),
    ):
        for name in ("base", "a"):
            write_weights(tmp_path / name, weights | {"lm_head.weight": head}, config=config | changes)
        with plan_in(tmp_path, "base", "a") as plan:
            first, second = plan.warnings
            assert plan.matching.aliases == {} and fact in first and "this saves no space" in second


@pytest.mark.parametrize(
    ("tensors", "config", "fact"),
    [
        ({}, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config (gptq)"),
        ({"a.weight": torch.ones(4, dtype=torch.int8)}, {}, "weight 'a.weight' is torch.int8"),
        ({"a.weight": ones(4).to(torch.float8_e4m3fn)}, {}, "'a.weight' is torch.float8_e4m3fn"),
        ({"a.weight_scale": ones(4)}, {}, "'a.weight_scale' belongs to a quantised weight"),
        ({"a.qweight": torch.ones(4, dtype=torch.int32)}, {}, "'a.qweight'"),
        ({"a.SCB": ones(4)}, {}, "'a.SCB'"),
        ({"a.weight.quant_state.bitsandbytes__nf4": ones(4)}, {}, "bitsandbytes__nf4"),
    ],
)
def test_quantised_checkpoints_are_refused(tmp_path, tensors, config, fact):
    write_weights(tmp_path / "odd", {"w": ones(4)} | tensors, config=config)
    write_weights(tmp_path / "plain", {"w": ones(4)}, config={})
    for base, task, who in (("odd", "plain", "base"), ("plain", "odd", "task 'odd'")):
        with refused(ValueError, who, "is quantised", fact, "dequantize"):
            plan_in(tmp_path, base, task)


def test_a_base_that_is_not_the_base_is_refused_but_a_part_of_it_may_be_a_task(tmp_path):
    pictures, texts = {"vision.w": ones(4), "vision.b": ones(2)}, {"text.w": ones(3)}
    config = {"model_type": "clip", "vision_config": {"model_type": "clip_vision_model"}, "text_config": {}}
    write_weights(tmp_path / "base", pictures | texts, config=config)
    for task in ("clip_vision_model", "siglip_vision_model"):
        write_weights(tmp_path / task, pictures, config={"model_type": task})
    with plan_in(tmp_path, "base", "clip_vision_model") as plan:
        assert {row.name for row in plan.merged_rows} == {"vision.w", "vision.b"}
    with refused(DataError, "model_type", "siglip_vision_model", "clip"):
        plan_in(tmp_path, "base", "siglip_vision_model")
    tiny_bert(tmp_path / "a", 1, base=tiny_bert(tmp_path / "bert"))
    tiny_gpt2(tmp_path / "gpt2"), tiny_unet(tmp_path / "unet"), tiny_bert(tmp_path / "wide", hidden_size=32)
    for base, facts in (
        ("gpt2", ("a", "model_type", "bert")),
        ("unet", ("transformers", "diffusers")),
        ("wide", ("task 'a'", "41", "39", "'bert.embeddings.LayerNorm.bias' [16] ([32])")),
    ):
        with refused(DataError, *facts):
            plan_in(tmp_path, base, "a")
    with refused(DataError, "'c'", "'d'"):
        raw_plan(tmp_path, {"a": ones(4), "b": ones(4)}, {"c": ones(4), "d": ones(4)})
    with refused(DataError, "nothing", "exclude"):
        raw_plan(tmp_path, {"a": ones(4)}, {"a": ones(4)}, exclude=["a"])


def test_a_given_model_is_matched_by_name(tmp_path):
    config = family(tmp_path, tiny_bert)
    given = tiny_bert(tmp_path / "given", 3, base=tmp_path / "base")
    config |= {"method": "given", "merged": str(given)}
    with make_plan(config) as plan:
        assert plan.merged_model is not None
        stored = load_file(given / "model.safetensors")
        assert all(plan.merged_model.read(part.name).equal(stored[f"bert.{part.name}"]) for part in plan.merged_rows)
        assert any(line.startswith("merged model") for line in plan_lines(plan))
    other = {name: value for name, value in load_file(given / "model.safetensors").items() if "pooler" not in name}
    write_weights(tmp_path / "given", other)
    with refused(DataError, "pooler.dense.bias", "[16"):
        make_plan(config)


def test_the_sizes(tmp_path):
    base = {"w": ones(100, 10), "n": torch.arange(5)}
    with raw_plan(tmp_path, base, base | {"head": ones(7)}, {"w": ones(100, 10)}, include_base=True) as plan:
        # 1,000 bits are 125 bytes, which end at 128
        assert plan.sizes.masks == (128, 128) and plan.sizes.extras == (40 + 28, 0)
        assert plan.sizes.unified == 4040 and plan.base.nbytes == 4040
        assert plan.sizes.result == 4040 + 256 + 68 + 2 * 80
        assert plan.sizes.written == plan.sizes.result + 4040
        assert plan.sizes.checkpoints == 4068 + 4000
        assert plan.sizes.read == 2 * 4040 + 28 + 4000
        assert plan.sizes.memory == plan.config.memory_bytes == 64_000_000
    with raw_plan(tmp_path, base, base, method="average") as plan:
        assert plan.sizes.result == plan.sizes.written == plan.sizes.unified == 4040
        assert "average, one model" in "\n".join(plan_lines(plan))


def test_the_plan_says_that_plain_torch_is_slower(tmp_path, monkeypatch):
    config, slow = write_set(tmp_path), arithmetic.find_kernels("cpu").run_files is None
    for wanted in (slow, True):
        with make_plan(config) as plan:
            assert any("hf-ext[fast]" in line for line in plan_lines(plan)) == wanted
        monkeypatch.setattr(arithmetic, "compiled_kernels", lambda: None)


def test_the_merge_writes_what_the_plan_says(tmp_path):
    base = tiny_bert(tmp_path / "base")
    resized(tmp_path / "a", base, (*WORDS, "new"), 1), tiny_bert(tmp_path / "b", 2, base=base)
    config = siblings(tmp_path, "a", "b", include_base=True, dtype="bfloat16")
    with make_plan(config) as plan:
        written, result = plan.sizes.written, plan.sizes.result
    folder = merge(config, tmp_path / "out")
    # But for the sums of all tasks together, a few numbers for each tensor.
    paths = [path for path in folder.rglob("*.safetensors") if path != folder / "sums.safetensors"]
    sizes = {path: sum(tensor.nbytes for tensor in load_file(path).values()) for path in paths}
    assert sum(sizes.values()) == written
    assert sum(size for path, size in sizes.items() if path.parent.name != "base") == result


def test_a_plan_over_the_hub_reads_headers_and_small_files_only(tmp_path, hub):
    family(tmp_path, tiny_bert, max_shard_size=9000)
    about = tmp_path / "b" / "config.json"
    write_json(about, read_json(about) | {"_name_or_path": "other/model"})
    headers = 0
    for name in ("base", "a", "b"):
        push_folder(hub.url, f"org/{name}", tmp_path / name)
        for path in (tmp_path / name).glob("*.safetensors"):
            headers += 8 + int.from_bytes(path.read_bytes()[:8], "little")
        headers += sum(path.stat().st_size for path in (tmp_path / name).glob("*.index.json"))
    config = {"base": "org/base@main", "tasks": {"a": "org/a", "b": "org/b"}}
    with make_plan(config, endpoint=hub.url, token=False) as plan:
        lines, described = plan_lines(plan), json.loads(json.dumps(plan_values(plan)))
        assert plan.header_bytes == headers
        (warning,) = (text for text in plan.warnings if "'other/model'" in text)
        assert "'b'" in warning and "'org/base'" in warning
        small = {"config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"}
        assert {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")} <= small
        assert lines[0].split()[1:4] == [f"org/base@{plan.base.commit[:12]}:", "BertModel,", "39"]
        assert described["tasks"]["a"]["revision"] == plan.tasks[0].commit
        assert [item["name"] for item in described["tasks"]["a"]["extras"]] == ["classifier.bias", "classifier.weight"]
        assert described["result_bytes"] == plan.sizes.result and len(described["merged"]) == 39


def test_a_hub_checkpoint_that_does_not_fit_fails_before_any_download_and_open_sources_are_closed(tmp_path, hub):
    push_folder(hub.url, "org/base", tiny_bert(tmp_path / "base"))
    push_folder(hub.url, "org/other", tiny_gpt2(tmp_path / "other"))
    with refused(DataError, "org/other", "model_type", "gpt2"):
        make_plan({"base": "org/base", "tasks": {"a": "org/other"}}, endpoint=hub.url, token=False)
    assert {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")} == {"config.json"}
    # A file that stays open is told by a warning, which is an error here.
    with refused(CheckpointError, "b"):
        make_plan({"base": str(tmp_path / "base"), "tasks": {"a": str(tmp_path / "base"), "b": "./nowhere"}})


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("config", "[1]", "expected a JSON object, got list"),
        ("config", "[" * 100_000, "not valid JSON"),
        ("config", '{"a":' * 700 + "1" + "}" * 700, "levels deep"),
        ("adapter_config", "nonsense", "not valid JSON"),
        ("config", '{"id2label": ["a", "b"]}', "id2label must be"),
        ("config", '{"architectures": [null]}', "architectures must be"),
        ("config", '{"vocab_size": "8"}', "vocab_size must be"),
        ("adapter_config", '{"peft_type": {}}', "peft_type must be"),
    ],
)
def test_a_malformed_configuration_is_refused(tmp_path, name, content, fact):
    write_weights(tmp_path, {"w": ones(3)})
    (tmp_path / f"{name}.json").write_text(content)
    with refused(CheckpointError, "emotion", fact):
        open_weights("emotion", tmp_path)


def test_messages_name_the_source_and_say_what_to_do(tmp_path, hub):
    told = {
        "pytorch_model.bin": ("pytorch_model.bin", "save_pretrained"),
        "model_index.json": ("diffusers", "pipeline"),
    }
    for file, facts in told.items():
        (tmp_path / facts[1]).mkdir()
        (tmp_path / facts[1] / file).write_text("{}")
        with refused(CheckpointError, *facts):
            open_weights("base", tmp_path / facts[1])
    for label, source, fact in (("emotion", "./nothing/here", "emotion"), ("x", "org/none", "org/none@main")):
        with refused(CheckpointError, fact):
            open_weights(label, source, token=False, endpoint=hub.url)
