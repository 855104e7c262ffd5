"""The plan: every rule about tensors, incompatible checkpoints, and that nothing but headers is read for it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import close_session, constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_ext.emr.merging_emr import merge_checkpoints
from hf_ext.emr.plan_emr import Copied, Extra, Part, Plan, Shared, make_plan, resolve_plan
from tests.emr.emr_testing import (
    WORDS,
    push_folder,
    tiny_bert,
    tiny_gpt2,
    tiny_semanir,
    tiny_unet,
    write_tokenizer,
    write_weights,
)

Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _clean_client(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield
    close_session()


def raw(folder: Path, base: Tensors, *tasks: Tensors, **options: Any) -> Plan:
    """A plan of raw checkpoints without configurations; the tasks are called t0, t1, …"""
    write_weights(folder / "base", base)
    for index, task in enumerate(tasks):
        write_weights(folder / f"t{index}", task)
    names = {f"t{index}": str(folder / f"t{index}") for index in range(len(tasks))}
    return make_plan({"base": str(folder / "base"), "tasks": names} | options)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def reasons(plan: Plan) -> dict[tuple[int, str], str]:
    return {(item.task, item.name): item.reason for item in (*plan.extras, *plan.undecided)}


# Models.


def test_classifiers_of_a_bare_base(tmp_path):
    base = tiny_bert(tmp_path / "base")
    tasks = {
        "two": tiny_bert(tmp_path / "two", 1, base=base),
        "five": tiny_bert(tmp_path / "five", 2, base=base, num_labels=5, max_shard_size=9000),
        "bare": tiny_bert(tmp_path / "bare", 3, base=base, task_head=False),
    }
    with make_plan({"base": str(base), "tasks": {name: str(path) for name, path in tasks.items()}}) as plan:
        stored = load_file(base / "model.safetensors")
        assert [part.name for part in plan.merged] == list(plan.base.tensors) and not plan.copied
        assert set(stored) == set(plan.base.tensors)
        assert plan.renames == (("", "bert."), ("", "bert."), ("", ""))
        for part in plan.merged:
            assert part == Part(
                part.name,
                tuple(stored[part.name].shape),
                torch.float32,
                stored[part.name].numel(),
                (f"bert.{part.name}", f"bert.{part.name}", part.name),
            )
        assert set(plan.extras) == {
            Extra(index, f"classifier.{name}", shape, torch.float32, 0, "not in the base")
            for index, labels in ((0, 2), (1, 5))
            for name, shape in (("weight", (labels, 16)), ("bias", (labels,)))
        }
        assert resolve_plan(plan) == (plan.extras, ()) and not plan.warnings and not plan.skipped


def test_a_base_with_a_head_and_bare_tasks(tmp_path):
    bare = tiny_bert(tmp_path / "bare")
    base = tiny_bert(tmp_path / "base", 1, base=bare)
    with make_plan({"base": str(base), "tasks": {"a": str(bare)}}) as plan:
        assert plan.renames == (("bert.", ""),)
        assert len(plan.merged) == len(plan.tasks[0].tensors)
        assert {item.name for item in plan.copied} == {"classifier.weight", "classifier.bias"}


def test_other_heads_in_base_and_task_are_not_mixed(tmp_path):
    bare = tiny_bert(tmp_path / "bare")
    base, task = (tiny_bert(tmp_path / str(labels), labels, base=bare, num_labels=labels) for labels in (2, 3))
    with make_plan({"base": str(base), "tasks": {"a": str(task)}}) as plan:
        assert set(reasons(plan).values()) == {"shape [3], in the base [2]", "shape [3, 16], in the base [2, 16]"}
        assert {item.name for item in plan.copied} == {"classifier.weight", "classifier.bias"}


def test_a_diffusers_model_and_our_own(tmp_path):
    for tiny, library in ((tiny_unet, "diffusers"), (tiny_semanir, "transformers")):
        base = tiny(tmp_path / f"{library}-base")
        task = tiny(tmp_path / f"{library}-task", 1, base=base)
        with make_plan({"base": str(base), "tasks": {"a": str(task)}}) as plan:
            assert plan.base.library == library and len(plan.merged) == len(plan.base.tensors)
            assert not plan.extras and not plan.aliases


def test_tied_weights_are_merged_once_however_the_file_says_it(tmp_path):
    base = tiny_gpt2(tmp_path / "base")
    task = tiny_gpt2(tmp_path / "task", 1, base=base)
    with make_plan({"base": str(base), "tasks": {"a": str(task)}}) as plan:
        # from the class of transformers: neither the file's names nor its metadata tell
        assert plan.aliases == {"lm_head.weight": "transformer.wte.weight"}
        assert "lm_head.weight" not in {part.name for part in plan.merged} and not plan.extras
    weights = load_file(base / "model.safetensors")
    doubled = weights | {"lm_head.weight": weights["transformer.wte.weight"].clone()}
    config = json.loads((base / "config.json").read_text())
    write_weights(tmp_path / "doubled", doubled, config=config)
    named = {"lm_head.weight": "transformer.wte.weight"}
    write_weights(tmp_path / "named", weights, config={}, metadata=named)
    for folder in ("doubled", "named"):
        with make_plan({"base": str(tmp_path / folder), "tasks": {"a": str(task)}}) as plan:
            assert plan.aliases == named and len(plan.merged) == len(weights) and not plan.copied
            assert plan.unified_bytes == sum(tensor.nbytes for tensor in weights.values())
            assert resolve_plan(plan) == ((), ())


def test_a_task_that_untied_its_head_keeps_it_and_one_that_repeats_it_does_not(tmp_path):
    base = tiny_gpt2(tmp_path / "base")
    task = load_file(tiny_gpt2(tmp_path / "task", 1, base=base) / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    embedding = task["transformer.wte.weight"]
    write_weights(tmp_path / "repeated", task | {"lm_head.weight": embedding.clone()}, config=config)
    write_weights(tmp_path / "untied", task | {"lm_head.weight": embedding + 1}, config=config)
    only_head = {name: value for name, value in task.items() if "wte" not in name} | {"lm_head.weight": embedding}
    write_weights(tmp_path / "renamed", only_head, config=config)
    tasks = {name: str(tmp_path / name) for name in ("repeated", "untied", "renamed")}
    with make_plan({"base": str(base), "tasks": tasks}) as plan:
        assert [item.reason for item in plan.undecided] == ["tied to another tensor in the base"] * 3
        extras, shared = resolve_plan(plan)
        assert [(item.task, item.name) for item in extras] == [(1, "lm_head.weight"), (2, "lm_head.weight")]
        assert not shared


def test_a_base_whose_tied_tensors_differ_is_refused(tmp_path):
    base = tiny_gpt2(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    broken = weights | {"lm_head.weight": weights["transformer.wte.weight"] + 1}
    write_weights(tmp_path / "broken", broken, config=json.loads((base / "config.json").read_text()))
    message = r"'lm_head.weight' and 'transformer.wte.weight' differ.*save_pretrained"
    config = {"base": str(tmp_path / "broken"), "tasks": {"a": str(base)}}
    with make_plan(config) as plan, pytest.raises(ValueError, match=message):
        resolve_plan(plan)


# Single tensors.


def test_what_is_missing_somewhere(tmp_path):
    base = {"a": ones(4), "b": ones(4), "only_base": ones(4)}
    with raw(tmp_path, base, {"a": ones(4), "b": ones(4), "only_task": ones(2)}, {"a": ones(4)}) as plan:
        assert [(part.name, part.task_names) for part in plan.merged] == [("a", ("a", "a")), ("b", ("b", None))]
        assert plan.copied == (Copied("only_base", (4,), torch.float32),)
        assert reasons(plan) == {(0, "only_task"): "not in the base"}
        assert any("does not take part in 1 merged tensors" in line for line in plan.lines())


def test_integers_are_compared_and_stored_only_where_they_differ(tmp_path):
    base = {
        "w": ones(4),
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "bytes": torch.zeros(3, dtype=torch.uint8),
    }
    same = dict(base)
    other = base | {"ids": torch.arange(1, 6), "mask": torch.tensor([True, True]), "bytes": torch.zeros(3)}
    with raw(tmp_path, base, same, other) as plan:
        assert [part.name for part in plan.merged] == ["w"]
        assert [item.name for item in plan.copied] == [name for name in plan.base.tensors if name != "w"]
        # another type cannot be equal
        assert [(item.task, item.name) for item in plan.extras] == [(1, "bytes")]
        extras, shared = resolve_plan(plan)
        assert set(shared) == {Shared(0, "ids"), Shared(0, "mask"), Shared(0, "bytes")}
        assert {(item.task, item.name) for item in extras} == {(1, "ids"), (1, "mask"), (1, "bytes")}


def test_running_statistics_stay_with_each_task(tmp_path):
    norm = {
        "bn.weight": ones(4),
        "bn.bias": ones(4),
        "bn.running_mean": ones(4),
        "bn.running_var": ones(4),
        "bn.num_batches_tracked": torch.tensor(7),
    }
    with raw(tmp_path, norm, norm, norm | {"bn.num_batches_tracked": torch.tensor(8)}) as plan:
        assert {part.name for part in plan.merged} == {"bn.weight", "bn.bias"}
        assert {item.name for item in plan.copied} == set(norm) - {"bn.weight", "bn.bias"}
        assert {(item.task, item.name) for item in plan.extras} == {
            (task, f"bn.running_{what}") for task in (0, 1) for what in ("mean", "var")
        }
        extras, shared = resolve_plan(plan)
        assert shared == (Shared(0, "bn.num_batches_tracked"),) and len(extras) == 5


def test_buffers_that_follow_from_the_configuration(tmp_path):
    base = {
        "w": ones(4, 4),
        "rotary.inv_freq": ones(4),
        "embeddings.position_ids": torch.arange(4)[None],
        "h.0.attn.bias": ones(1, 1, 4, 4),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    with raw(tmp_path, base, base, base | {"rotary.inv_freq": ones(4) / 2}) as plan:
        assert [part.name for part in plan.merged] == ["w"] and not plan.extras
        extras, shared = resolve_plan(plan)
        assert [(item.task, item.name) for item in extras] == [(1, "rotary.inv_freq")] and len(shared) == 7


def test_a_buffer_that_the_model_no_longer_saves_is_dropped(tmp_path):
    base = tiny_bert(tmp_path / "base")
    task = tiny_bert(tmp_path / "task", 1, base=base)
    weights = load_file(task / "model.safetensors") | {"bert.embeddings.position_ids": torch.arange(16)[None]}
    write_weights(task, weights)
    with make_plan({"base": str(base), "tasks": {"a": str(task)}}) as plan:
        assert [(index, name) for index, name, _ in plan.skipped] == [(0, "bert.embeddings.position_ids")]
        assert {item.name for item in plan.extras} == {"classifier.weight", "classifier.bias"}
        assert any("skipped bert.embeddings.position_ids" in line for line in plan.lines())


def test_excluded_tensors_by_the_names_of_either_side(tmp_path):
    base = {"encoder.a": ones(4), "encoder.b": ones(4), "head": ones(4), "encoder.c": ones(4)}
    task = {f"bert.{name}": value for name, value in base.items()}
    with raw(tmp_path, base, task, base, exclude=["head", r"bert\..*b$", "coder"]) as plan:
        # anchored at the start: "coder" matches nothing
        assert [(part.name, part.task_names) for part in plan.merged] == [
            ("encoder.a", ("bert.encoder.a", "encoder.a")),
            ("encoder.b", (None, "encoder.b")),
            ("encoder.c", ("bert.encoder.c", "encoder.c")),
        ]
        assert reasons(plan) == {
            (0, "bert.head"): "excluded",
            (1, "head"): "excluded",
            (0, "bert.encoder.b"): "excluded",
        }


def test_small_tensors_raw(tmp_path):
    base = {"w": ones(4, 4), "bias": ones(4), "scale": torch.tensor(1.0)}
    with raw(tmp_path, base, base, small_raw=True) as plan:
        assert [part.name for part in plan.merged] == ["w"]
        assert reasons(plan) == {(0, "bias"): "one-dimensional", (0, "scale"): "one-dimensional"}
    with raw(tmp_path, base, base) as plan:
        assert len(plan.merged) == 3 and not plan.extras


def test_other_shapes_are_kept_or_refused(tmp_path):
    base = {"w": ones(4, 4), "positions": ones(8, 4)}
    task = {"w": ones(4, 4), "positions": ones(16, 4)}
    with raw(tmp_path, base, task, base) as plan:
        assert reasons(plan) == {(0, "positions"): "shape [16, 4], in the base [8, 4]"}
        assert [part.task_names for part in plan.merged if part.name == "positions"] == [(None, "positions")]
    with pytest.raises(
        ValueError, match=r"'positions' is \[8, 4\] in the base and \[16, 4\] in task 't0'.*shape_policy: extra"
    ):
        raw(tmp_path, base, task, shape_policy="error")
    # no vocabulary: its leading rows need not mean the same
    with raw(tmp_path, base, task, shape_policy="overlap") as plan:
        assert reasons(plan) == {(0, "positions"): "shape [16, 4], in the base [8, 4]"}


def test_types_of_base_tasks_and_result(tmp_path):
    base = {"w": ones(4, dtype=torch.bfloat16), "ids": torch.arange(3)}
    tasks = [{"w": ones(4, dtype=dtype)} for dtype in (torch.float16, torch.float32, torch.bfloat16)]
    with raw(tmp_path, base, *tasks) as plan:
        assert plan.merged == (Part("w", (4,), torch.bfloat16, 4, ("w", "w", "w")),) and not plan.warnings
        assert plan.bytes_read == 4 * (2 + 2 + 4 + 2) + 24
    with raw(tmp_path, base, *tasks, dtype="float32") as plan:
        assert plan.merged[0].dtype == torch.float32 and plan.copied[0].dtype == torch.int64
        assert plan.unified_bytes == 16 + 24


def test_float64_is_said_to_be_treated_as_float32(tmp_path):
    double = {"w": ones(4, dtype=torch.float64)}
    with raw(tmp_path, double, {"w": ones(4)}, double) as plan:
        assert plan.merged[0].dtype == torch.float32
        assert [warning.partition(" (")[0] for warning in plan.warnings] == ["base", "task 't1'"]
        assert all("treated as float32" in warning for warning in plan.warnings)


def test_empty_and_single_elements(tmp_path):
    base = {"w": ones(3), "empty": ones(0, 4), "scalar": torch.tensor(2.0)}
    with raw(tmp_path, base, base) as plan:
        assert {part.name: part.elements for part in plan.merged} == {"w": 3, "scalar": 1}
        assert resolve_plan(plan) == ((), (Shared(0, "empty"),))


# Vocabularies.


def resized(folder: Path, base: Path, words: tuple[str, ...], seed: int) -> Path:
    """A fine-tune whose embedding has rows for `words`, and a tokenizer for them."""
    tiny_bert(folder, seed, base=base, task_head=False)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["embeddings.word_embeddings.weight"]
    rows = torch.cat([embedding, torch.randn(64, embedding.shape[1])])[: len(words)]
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": len(words)}
    write_weights(folder, weights | {"embeddings.word_embeddings.weight": rows}, config=config)
    return write_tokenizer(folder, words)


EMBEDDING = "embeddings.word_embeddings.weight"


def test_the_common_rows_of_resized_vocabularies(tmp_path):
    base = tiny_bert(tmp_path / "base")
    more, less = (*WORDS, "new", "newer"), WORDS[:-3]
    tasks = {
        "more": resized(tmp_path / "more", base, more, 1),
        "less": resized(tmp_path / "less", base, less, 2),
        "same": tiny_bert(tmp_path / "same", 3, base=base, task_head=False),
    }
    config = {"base": str(base), "tasks": {name: str(path) for name, path in tasks.items()}}
    with make_plan(config | {"shape_policy": "overlap"}) as plan:
        part = next(part for part in plan.merged if part.name == EMBEDDING)
        rows = len(less)
        assert part == Part(EMBEDDING, (len(WORDS), 16), torch.float32, rows * 16, (EMBEDDING,) * 3)
        assert [(item.task, item.shape, item.start, item.nbytes) for item in plan.extras] == [
            (0, (len(more), 16), rows * 16, 5 * 64),
            # nothing left over, but another shape than the base's
            (1, (len(less), 16), rows * 16, 0),
            (2, (len(WORDS), 16), rows * 16, 3 * 64),
        ]
        assert any(EMBEDDING in line and "of these in part" in line for line in plan.lines())
        assert plan.mask_bytes[0] == sum(64 * math.ceil(part.elements / 512) for part in plan.merged)
    with make_plan(config) as plan:
        kept = {(item.task, item.name) for item in plan.extras}
        assert kept == {(0, EMBEDDING), (1, EMBEDDING)} and all(item.start == 0 for item in plan.extras)
    with pytest.raises(ValueError, match="shape_policy: extra"):
        make_plan(config | {"shape_policy": "error"})


@pytest.mark.parametrize("kind", ["tokenizer.json", "vocab.json", "vocab.txt"])
def test_rows_of_other_tokens_are_refused_with_the_token(tmp_path, kind):
    base = tiny_bert(tmp_path / "base")
    task = resized(tmp_path / "task", base, (*WORDS[:7], "changed", *WORDS[8:], "new"), 1)
    if kind != "tokenizer.json":
        for folder in (base, task):
            vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
            (folder / "tokenizer.json").unlink()
            text = json.dumps(vocabulary) if kind == "vocab.json" else "\n".join(vocabulary)
            (folder / kind).write_text(text)
    config = {"base": str(base), "tasks": {"a": str(task)}, "shape_policy": "overlap"}
    with pytest.raises(ValueError, match=r"token 7 is 'd' in the base and 'changed' in task 'a'.*shape_policy: extra"):
        make_plan(config)
    for path in task.glob(kind):
        path.unlink()
    with pytest.raises(ValueError, match=r"task 'a' .*has no tokenizer.json, vocab.json or vocab.txt"):
        make_plan(config)


# Refusals.


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"w": ones(4)}, {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"w": ones(4), "a.weight": torch.ones(4, dtype=torch.int8)}, {}, "weight 'a.weight' is torch.int8"),
        ({"w": ones(4), "a.weight": ones(4).to(torch.float8_e4m3fn)}, {}, "'a.weight' is torch.float8_e4m3fn"),
        ({"w": ones(4), "a.weight_scale": ones(4)}, {}, "'a.weight_scale' belongs to a quantised weight"),
        ({"w": ones(4), "a.qweight": torch.ones(4, dtype=torch.int32)}, {}, "'a.qweight' belongs to"),
        ({"w": ones(4), "a.SCB": ones(4)}, {}, "'a.SCB' belongs to"),
        ({"w": ones(4), "a.weight.absmax": ones(4)}, {}, "'a.weight.absmax' belongs to"),
        ({"w": ones(4), "a.weight.quant_state.bitsandbytes__nf4": ones(4)}, {}, "belongs to a quantised"),
    ],
)
def test_quantised_checkpoints_are_refused(tmp_path, tensors, config, message):
    write_weights(tmp_path / "odd", tensors, config=config)
    write_weights(tmp_path / "plain", {"w": ones(4)}, config={})
    for base, task, who in (("odd", "plain", "base"), ("plain", "odd", "task 'a'")):
        with pytest.raises(ValueError, match=rf"{who} .*is quantised: .*{message}.*dequantize"):
            make_plan({"base": str(tmp_path / base), "tasks": {"a": str(tmp_path / task)}})


def test_a_base_that_is_not_the_base_is_refused(tmp_path):
    bert, gpt2, unet = tiny_bert(tmp_path / "bert"), tiny_gpt2(tmp_path / "gpt2"), tiny_unet(tmp_path / "unet")
    task = tiny_bert(tmp_path / "task", 1, base=bert)
    with pytest.raises(ValueError, match=r"task 'a' .*has model_type 'bert', base .*has 'gpt2': .*Give the model"):
        make_plan({"base": str(gpt2), "tasks": {"a": str(task)}})
    with pytest.raises(ValueError, match="is a transformers model, base .* a diffusers model"):
        make_plan({"base": str(unet), "tasks": {"a": str(task)}})
    wide = tiny_bert(tmp_path / "wide", hidden_size=32)
    message = (
        r"task 'a' .*is no fine-tune of base .*: of 41 floating-point tensors \(base: 39\) only \d+ have the same "
        r"name and shape. \d+ have another shape, for instance '[\w.]+': base \[.*\], task \[.*\]. 2 are not in the "
        r"base, for instance \['classifier.bias', 'classifier.weight'\]. Give the model"
    )
    with pytest.raises(ValueError, match=message):
        make_plan({"base": str(wide), "tasks": {"a": str(task)}})


def test_checkpoints_with_other_names_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"only 0 have the same name and shape. 2 are not in the base, .*\['c', 'd'\]"
    ):
        raw(tmp_path, {"a": ones(4), "b": ones(4)}, {"c": ones(4), "d": ones(4)})
    with pytest.raises(ValueError, match="nothing to merge: .*exclude"):
        raw(tmp_path, {"a": ones(4)}, {"a": ones(4)}, exclude=["a"])


def test_settings_that_differ_are_warned_of(tmp_path):
    base = tiny_bert(tmp_path / "base")
    task = tiny_bert(tmp_path / "task", 1, base=base)
    config = json.loads((task / "config.json").read_text()) | {"num_attention_heads": 4}
    (task / "config.json").write_text(json.dumps(config))
    with make_plan({"base": str(base), "tasks": {"a": str(task)}}) as plan:
        assert len(plan.warnings) == 1 and "num_attention_heads 4, the base 2" in plan.warnings[0]
        assert any(line.startswith("warning") for line in plan.lines())


# The merged model of method "given".


def test_a_given_model_is_matched_by_name(tmp_path):
    base = tiny_bert(tmp_path / "base")
    tasks = {name: str(tiny_bert(tmp_path / name, seed, base=base)) for seed, name in enumerate("ab", 1)}
    given = tiny_bert(tmp_path / "given", 3, base=base)
    config = {"base": str(base), "tasks": tasks, "method": "given", "merged": str(given)}
    with make_plan(config) as plan:
        assert plan.given is not None and plan.given_names == {part.name: f"bert.{part.name}" for part in plan.merged}
        assert any(line.startswith("merged model") for line in plan.lines())
    other = {name: value for name, value in load_file(given / "model.safetensors").items() if "pooler" not in name}
    write_weights(tmp_path / "given", other)
    with pytest.raises(
        ValueError, match=r"merged model .*'pooler.dense.bias' must be floating-point \[16\] and is missing"
    ):
        make_plan(config)


# Sizes, the Hub, output.


def test_the_sizes(tmp_path):
    base = {"w": ones(100, 10), "n": torch.arange(5)}
    with raw(tmp_path, base, base | {"head": ones(7)}, {"w": ones(100, 10)}, include_base=True) as plan:
        # 1,000 bits are 125 bytes, which end at 128
        assert plan.mask_bytes == (128, 128) and plan.extra_bytes == (40 + 28, 0)
        assert plan.unified_bytes == 4040 and plan.base.nbytes == 4040
        assert plan.result_bytes == 4040 + 256 + 68 + 2 * 80
        assert plan.bytes_written == plan.result_bytes + 4040
        assert plan.checkpoints_bytes == 4068 + 4000
        # base and tasks once, "n" of the base copied and compared, the head, and the copy of the base
        assert plan.bytes_read == 3 * 4000 + 40 + 80 + 28 + 4040
        assert plan.peak_memory == plan.config.memory_bytes == 64_000_000
    with raw(tmp_path, base, base, {"w": ones(100, 10, dtype=torch.bfloat16)}, keep_state=True) as plan:
        # sum, highest and lowest in float32, two masks for each task
        assert plan.state_bytes == 3 * 4000 + 4 * 128
    with raw(tmp_path, base, base, method="average") as plan:
        assert plan.result_bytes == plan.bytes_written == plan.unified_bytes == 4040
        assert "average, one model" in "\n".join(plan.lines())


def test_the_merge_writes_what_the_plan_says(tmp_path):
    base = tiny_bert(tmp_path / "base")
    tasks = {"a": resized(tmp_path / "a", base, (*WORDS, "new"), 1), "b": tiny_bert(tmp_path / "b", 2, base=base)}
    config = {"base": str(base), "tasks": {name: str(path) for name, path in tasks.items()}}
    config |= {"shape_policy": "overlap", "keep_state": True, "include_base": True, "dtype": "bfloat16"}
    with make_plan(config) as plan:
        written, result = plan.bytes_written, plan.result_bytes
    folder = merge_checkpoints(config, tmp_path / "out", progress=False).path
    sizes = {
        path.relative_to(folder).as_posix(): sum(tensor.nbytes for tensor in load_file(path).values())
        for path in folder.rglob("*.safetensors")
    }
    # of all tasks together, a few numbers for each tensor
    del sizes["sums.safetensors"]
    assert sum(sizes.values()) == written
    apart = {name for name in sizes if name.startswith("base/") or name.endswith("state.safetensors")}
    assert sum(size for name, size in sizes.items() if name not in apart) == result


def test_a_plan_over_the_hub_reads_headers_only(tmp_path, hub):
    base = tiny_bert(tmp_path / "base")
    tasks = [tiny_bert(tmp_path / name, seed, base=base, max_shard_size=9000) for seed, name in enumerate("ab", 1)]
    headers = 0
    for folder, name in zip((base, *tasks), ("base", "a", "b"), strict=True):
        push_folder(hub.url, f"org/{name}", folder)
        for path in folder.glob("*.safetensors"):
            headers += 8 + int.from_bytes(path.read_bytes()[:8], "little")
        headers += sum(path.stat().st_size for path in folder.glob("*.index.json"))
    config = {"base": "org/base@main", "tasks": {"a": "org/a", "b": "org/b"}}
    with make_plan(config, endpoint=hub.url, token=False) as plan:
        lines, described = plan.lines(), json.loads(json.dumps(plan.to_dict()))
        assert plan.header_bytes == headers
        assert {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")} == {"config.json"}
        assert lines[0].startswith(f"base    org/base@{plan.base.commit[:12]}: BertModel, 39 tensors")
        assert described["tasks"]["a"]["revision"] == plan.tasks[0].commit
        assert [item["name"] for item in described["tasks"]["a"]["extras"]] == ["classifier.bias", "classifier.weight"]
        assert described["result_bytes"] == plan.result_bytes and len(described["merged"]) == 39


def test_a_hub_checkpoint_that_does_not_fit_fails_before_any_download(tmp_path, hub):
    push_folder(hub.url, "org/base", tiny_bert(tmp_path / "base"))
    push_folder(hub.url, "org/other", tiny_gpt2(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"task 'a' \(org/other\) has model_type 'gpt2'"):
        make_plan({"base": "org/base", "tasks": {"a": "org/other"}}, endpoint=hub.url, token=False)
    assert {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")} == {"config.json"}


def test_every_source_is_closed_when_one_cannot_be_opened(tmp_path, recwarn):
    write_weights(tmp_path / "base", {"w": ones(4)})
    with pytest.raises(ValueError, match="task 'b'"):
        make_plan({"base": str(tmp_path / "base"), "tasks": {"a": str(tmp_path / "base"), "b": "./nowhere"}})
    assert not [warning for warning in recwarn if warning.category is ResourceWarning]


def test_a_class_that_cannot_be_built_is_warned_of(tmp_path):
    base = tiny_gpt2(tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"n_head": 0}
    (base / "config.json").write_text(json.dumps(config))
    with make_plan({"base": str(base), "tasks": {"a": str(base)}}) as plan:
        assert plan.aliases == {} and len(plan.warnings) == 1
        assert "GPT2LMHeadModel cannot be built from its configuration (" in plan.warnings[0]


def test_a_malformed_tokenizer_is_named(tmp_path):
    base = tiny_bert(tmp_path / "base")
    task = resized(tmp_path / "task", base, (*WORDS, "new"), 1)
    (task / "tokenizer.json").write_text('{"model": {"vocab": 3}}')
    with pytest.raises(ValueError, match=r"task 'a' .*tokenizer.json is malformed"):
        make_plan({"base": str(base), "tasks": {"a": str(task)}, "shape_policy": "overlap"})


# Fuzz.

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.float8_e4m3fn, torch.int8),
)
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


options = st.fixed_dictionaries(
    {},
    optional={
        "small_raw": st.booleans(),
        "shape_policy": st.sampled_from(["extra", "overlap", "error"]),
        "exclude": st.lists(st.sampled_from([".*a", "m", "b.w$"]), max_size=2),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
    },
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(families(), options)
def test_every_tensor_has_one_place_or_the_plan_is_refused(tmp_path, family, options):
    base, tasks = family

    def filled(described):
        return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in described.items()}

    try:
        plan = raw(tmp_path, filled(base), *map(filled, tasks), **options)
    except ValueError as error:
        assert len(str(error)) > 40
        return
    with plan:
        root = [*(part.name for part in plan.merged), *(item.name for item in plan.copied), *plan.aliases]
        assert sorted(root) == sorted(base) and plan.merged
        extras, shared = resolve_plan(plan)
        for index, task in enumerate(tasks):
            places = [part.task_names[index] for part in plan.merged if part.task_names[index] is not None]
            places += [item.name for item in (*extras, *shared) if item.task == index]
            assert sorted(places) == sorted(task)
        for part in plan.merged:
            assert part.elements == math.prod(base[part.name][0]) > 0 and part.dtype.is_floating_point
            for index, name in enumerate(part.task_names):
                assert name is None or tasks[index][name][0] == part.shape
        json.dumps(plan.to_dict())
        assert plan.lines() and plan.bytes_read > 0


header_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F8_E4M3", "F4", ""]) | header_values,
        "shape": st.lists(st.integers(-1, 2**65), max_size=3) | header_values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | header_values,
    }
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(["w", "v", "../w", "__metadata__"]), entries | header_values, max_size=3),
    st.integers(0, 40),
)
def test_any_header_is_planned_or_refused_as_a_value_error(tmp_path, header, length):
    write_weights(tmp_path / "base", {"w": ones(3)})
    (tmp_path / "task").mkdir(exist_ok=True)
    text = json.dumps(header).encode()
    (tmp_path / "task" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(length))
    try:
        make_plan({"base": str(tmp_path / "base"), "tasks": {"t": str(tmp_path / "task")}}).close()
    except ValueError as error:
        assert "'t'" in str(error)
