"""Checkpoints of one model whose files name its tensors differently, as transformers reads them."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import DataError
from hf_ext.merging.extracting import extract_lora, open_fine_tune
from hf_ext.merging.loading import build_empty, compare_settings
from hf_ext.merging.plan import make_plan, resolve_plan
from hf_ext.merging.tensors import KEPT
from tests.emr.emr_testing import perturb, write_weights
from tests.kit.refusals import refused
from tests.merging.merging import merge, siblings

_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
_TEXT = {"vocab_size": 32, "max_position_embeddings": 16, **_SMALL}
_VISION = {"image_size": 8, "patch_size": 4, **_SMALL}


OLD_NORMS = {r"LayerNorm\.weight": "LayerNorm.gamma", r"LayerNorm\.bias": "LayerNorm.beta"}
_LLAVA = transformers.LlavaConfig(
    text_config=transformers.LlamaConfig(**_TEXT),
    vision_config=transformers.CLIPVisionConfig(**_VISION, projection_dim=16),
    image_token_index=3,
    vision_feature_layer=-1,
)
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_QWEN_VL = transformers.Qwen2VLConfig(
    text_config={**_TEXT, "num_key_value_heads": 2, "rope_parameters": _ROPE},
    vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
)
# A model, and of its names in files a pattern and what other versions of the library wrote there; the first that fits.
FAMILIES: dict[str, tuple[type, Any, dict[str, str]]] = {
    "llava": (
        transformers.LlavaForConditionalGeneration,
        _LLAVA,
        {r"^language_model\.model\.": "model.language_model.", r"^language_model\.lm_head": "lm_head", "^": "model."},
    ),
    "qwen2-vl": (
        transformers.Qwen2VLForConditionalGeneration,
        _QWEN_VL,
        {"^visual": "model.visual", r"^model\.": "model.language_model."},
    ),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig(**_TEXT), OLD_NORMS),
    "roberta": (transformers.RobertaForMaskedLM, transformers.RobertaConfig(**_TEXT), OLD_NORMS),
    "llama without its prefix": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**_TEXT), {r"^model\.": ""}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_names_of_the_same_tensors_are_the_same_tensors(tmp_path, family):
    """A base, a task that is named as it is, and one that is named as other versions of the library wrote it."""
    kind, settings, names = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(settings)
    for seed, task in enumerate(("base", "same", "other")):
        perturb(model, seed, 2e-3 * (seed > 0))
        model.save_pretrained(tmp_path / task)

    def rename(name: str) -> str:
        pattern = next((pattern for pattern in names if re.search(pattern, name)), "$^")
        return re.sub(pattern, names.get(pattern, ""), name)

    weights = load_file(tmp_path / "other" / "model.safetensors")
    renamed = {rename(name): value for name, value in weights.items()}
    assert renamed.keys() != weights.keys()
    write_weights(tmp_path / "other", renamed)
    config = siblings(tmp_path, "same", "other")
    merge(config | {"method": "average"}, tmp_path / "merged")
    merged, same, other = (load_model(tmp_path / name) for name in ("merged", "same", "other"))
    for name, value in merged.items():
        torch.testing.assert_close(value, (same[name] + other[name]) / 2, rtol=1e-6, atol=1e-7)
    with make_plan(config) as plan:
        assert not plan.own and all(len(row.members) == 2 for row in plan.merged_rows)
    exported = load_model(TaskWeights(merge(config, tmp_path / "emr")).export("other", tmp_path / "exported"))
    assert exported.keys() == other.keys()


def load_model(folder: Path) -> dict[str, torch.Tensor]:
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, told = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(told[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    return model.state_dict()


@pytest.mark.parametrize("tied", ["base", "task"])
def test_a_tensor_that_one_ties_is_there_in_both(tmp_path, tied):
    torch.manual_seed(0)
    for name in ("base", "task", "other"):
        settings = transformers.LlamaConfig(**_TEXT, tie_word_embeddings=name == tied)
        transformers.LlamaForCausalLM(settings).save_pretrained(tmp_path / name)
    config = siblings(tmp_path, "task", "other", method="average")
    if tied == "task":
        merged = load_model(merge(config, tmp_path / "merged"))
        parts = [load_model(tmp_path / name) for name in config["tasks"]]
        torch.testing.assert_close(merged["lm_head.weight"], sum(part["lm_head.weight"] for part in parts) / 2)
    else:
        # One matrix has no place for two.
        with make_plan(config) as plan, refused(DataError, "lm_head.weight", "'task'", "allow_missing"):
            resolve_plan(plan)
        with make_plan(config | {"allow_missing": True}) as plan:
            assert any("lm_head.weight" in text for text in resolve_plan(plan).warnings)
        with make_plan(config | {"method": "emr"}) as plan:
            assert {item.name for item in resolve_plan(plan).own_tensors(KEPT)} == {"lm_head.weight"}


# Of a tensor that no task has in the base's form, the model would get the base's.
@pytest.mark.parametrize(
    ("tensors", "others"),
    [({}, "a"), *(({"b": torch.ones(3)}, others) for others in ("a", "")), ({"b": torch.ones(2).char()}, "")],
)
def test_what_one_model_would_make_of_some_tasks_is_refused(tmp_path, tensors, others):
    for name in ("base", *others):
        write_weights(tmp_path / name, {"w": torch.ones(4), "b": torch.ones(2)})
    write_weights(tmp_path / "t", {"w": torch.ones(4)} | tensors)
    config, one = siblings(tmp_path, *others, "t"), siblings(tmp_path, *others, "t", method="average")
    with refused(DataError, "'t'", " b,", "allow_missing"):
        make_plan(one)
    with make_plan(one | {"allow_missing": True}) as plan:
        told = ("'t'", " b:") if others else ("cannot contain b",)
        assert any(all(fact in text for fact in told) for text in plan.warnings)
    with make_plan(one | {"exclude": ["b"]}) as plan:
        assert "b" in {row.name for row in plan.copied_rows}
    with make_plan(config) as plan:
        assert {item.name for item in plan.own} == tensors.keys()
    with refused(ValueError, "allow_missing"):
        make_plan(config | {"allow_missing": True})


EXPERTS = {"num_key_value_heads": 2, "max_position_embeddings": 64} | _TEXT
MIXTRAL = EXPERTS | {"num_local_experts": 4}
QWEN = EXPERTS | {"num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("MixtralForCausalLM", MIXTRAL),
        ("Qwen3MoeForCausalLM", QWEN),
        ("OlmoeForCausalLM", EXPERTS | {"num_experts": 4}),
    ],
)
@pytest.mark.parametrize("stacked", [(), ("base",), ("a",), ("a", "b"), ("base", "a", "b")])
def test_experts_are_in_one_form_in_all_models_or_refused(tmp_path, kind, settings, stacked):
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings))
    for seed, name in enumerate(("base", "a", "b")):
        perturb(model, seed, 2e-3 * (seed > 0))
        model.save_pretrained(tmp_path / name, save_original_format=name not in stacked)
    config = siblings(tmp_path, "a", "b", method="average")
    fits = len(stacked) in (0, 3)
    with contextlib.nullcontext() if fits else refused(DataError, "experts", "allow_missing"):
        merged, a, b = (
            load_model(folder) for folder in (merge(config, tmp_path / "m"), tmp_path / "a", tmp_path / "b")
        )
        for name, value in merged.items():
            torch.testing.assert_close(value, (a[name] + b[name]) / 2, rtol=1e-6, atol=1e-7)
    lost = ("a" not in stacked) and "base" in stacked
    with refused(DataError, "experts", "save_original_format") if lost else contextlib.nullcontext():
        with open_fine_tune(str(tmp_path / "base"), str(tmp_path / "a")) as pair:
            report = extract_lora(pair, tmp_path / "lora", rank=64)
        # one by one they are no part of the class, and told with what they cost
        assert (
            any("experts" in item["name"] for item in report["left_out"]) == (report["error"] > 0.1) == (not stacked)
        )


def write_classifier(folder: Path, kind: str, head: str, labels: dict[int, str]) -> None:
    """A small model of two classes; of a class that transformers does not have, or is slow to build, two tensors."""
    if kind in ("OwnForImages", "RTDetrForObjectDetection"):
        prefix = "" if kind == "OwnForImages" else "model.decoder."
        tensors = {"model.body.weight": torch.ones(8, 8), f"{prefix}{head}": torch.ones(2, 8)}
        write_weights(folder, tensors, config={"architectures": [kind], "id2label": labels})
        return
    model_class = getattr(transformers, kind)
    sizes = {**_VISION, "image_size": [8, 8], "num_detection_tokens": 4} if kind.startswith("Yolos") else _TEXT
    model_class(model_class.config_class(**sizes, id2label=labels)).save_pretrained(folder)


def test_classes_whose_head_is_not_found_are_refused_and_a_model_without_one_is_not(tmp_path):
    for kind, allowed in (("OwnModel", False), ("BertModel", True), ("timm", False)):
        for name, labels in (("base", "xy"), ("a", "xy"), ("b", "yx")):
            told = {"label_names": [*labels]} if kind == "timm" else {"id2label": dict(enumerate(labels))}
            write_weights(tmp_path / name, {"w": torch.ones(8, 8)}, config={"architectures": [kind], **told})
        config = siblings(tmp_path, "a", "b", method="average")
        with contextlib.nullcontext() if allowed else refused(DataError, "'b'", "'y'"):
            make_plan(config).close()


NAMES, UNNAMED = ["neg", "pos"], ["LABEL_0", "LABEL_1"]
BERT = ("BertForSequenceClassification", "classifier.weight")


@pytest.mark.parametrize(
    ("kind", "head", "base", "a", "b", "allowed"),
    [
        (*BERT, NAMES, NAMES, ["NEG", "POS"], True),
        (*BERT, NAMES, NAMES, ["cat", "dog"], False),
        (*BERT, UNNAMED, NAMES, NAMES[::-1], False),
        (*BERT, UNNAMED, NAMES, UNNAMED, True),
        # a row for no object, too
        ("YolosForObjectDetection", "class_labels_classifier", NAMES, NAMES, NAMES[::-1], False),
        # its head is a part of the base model
        ("RTDetrForObjectDetection", "class_embed", NAMES, NAMES, NAMES[::-1], False),
        # code that comes with the model
        ("OwnForImages", "classifier.weight", NAMES, NAMES, NAMES[::-1], False),
    ],
)
def test_one_model_has_one_meaning_of_each_class(tmp_path, kind, head, base, a, b, allowed):
    for name, labels in (("base", base), ("a", a), ("b", b)):
        write_classifier(tmp_path / name, kind, head, dict(enumerate(labels)))
    config = siblings(tmp_path, "a", "b")
    if not allowed:
        with refused(DataError, "'b'", repr(b[0]), head):
            make_plan(config | {"method": "average"})
    one = {"method": "average", "exclude": [] if allowed else [".*class.*"]}
    for choice in (one, {"method": "emr"}):
        with make_plan(config | choice) as plan:
            assert plan.merged_rows


LLAMA = transformers.LlamaConfig(**_TEXT).to_dict()
LLAVA = json.loads(_LLAVA.to_json_string(use_diff=False))
UNET = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.36.0", "sample_size": 8}
OWN = {"_class_name": "Own", "_diffusers_version": "0"}
HEADS, PARTIAL, GROUPS = "num_attention_heads", "partial_rotary_factor", "num_conv_pos_embedding_groups"
CLIP = {"model_type": "clip", "text_config": {"model_type": "clip_text_model", HEADS: 4}}
NO_MEANING = {"attention_dropout": 0.5, "use_cache": False, "eos_token_id": 7, "id2label": {"0": "x"}}

OF_POSITIONS = [
    ("esm", "position_embedding_type", "rotary"),
    ("wav2vec2-conformer", "position_embeddings_type", "rotary"),
    ("wav2vec2-bert", "position_embeddings_type", "rotary"),
    ("smollm3", "no_rope_layers", [0] * 36),
]
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


# A configuration, changes of it (None: not told), the setting that differs, and whether it changes what weights mean.
@pytest.mark.parametrize(
    ("config", "changes", "key", "meaning"),
    [
        (LLAMA, {"num_attention_heads": 4, "head_dim": 4, "num_key_value_heads": 4}, "num_attention_heads", True),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters.rope_theta", True),
        # As transformers 4 wrote it.
        (LLAMA, {"rope_parameters": None, "rope_theta": 1e6}, "rope_parameters.rope_theta", True),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act", False),
        (LLAMA, {"rms_norm_eps": 1e-3}, "rms_norm_eps", False),
        (LLAMA, {"max_position_embeddings": 64}, "max_position_embeddings", False),
        (LLAMA, {"rope_parameters": None, "rope_theta": 10000.0, "transformers_version": "4.40"}, None, False),
        (LLAMA, NO_MEANING, None, False),
        (LLAVA, {"vision_config": LLAVA["vision_config"] | {"hidden_act": "relu"}}, "vision_config.hidden_act", False),
        # the default is 8
        (UNET, {"attention_head_dim": 4}, "attention_head_dim", True),
        (UNET, {"attention_head_dim": 8, "block_out_channels": [320, 640, 1280, 1280]}, None, False),
        (UNET | {"attention_head_dim": [8, 8]}, {"attention_head_dim": [4, 8]}, "attention_head_dim", True),
        (UNET, {"act_fn": "gelu"}, "act_fn", False),
        (UNET, {"_name_or_path": "x", "_diffusers_version": "0.30.0"}, None, False),
        (OWN, {"num_heads": 4}, None, False),
        (OWN | {"num_heads": 2}, {"num_heads": 4}, "num_heads", True),
        ({"model_type": "distilbert"}, {"n_heads": 6}, "n_heads", True),
        ({"model_type": "codegen"}, {"rotary_dim": 32}, "rotary_dim", True),
        ({"model_type": "swin"}, {"num_heads": [1, 2, 4, 8]}, "num_heads", True),
        ({"model_type": "wav2vec2"}, {GROUPS: 8}, GROUPS, True),
        ({"model_type": "own", PARTIAL: 0.5}, {PARTIAL: 1}, PARTIAL, True),
        ({"model_type": "deepseek_v3"}, {"rope_interleave": False}, "rope_interleave", True),
        ({"model_type": "falcon"}, {"alibi": True}, "alibi", True),
        *(({"model_type": kind}, {key: value}, key, True) for kind, key, value in OF_POSITIONS),
        (LLAMA, {"rope_parameters": LINEAR}, "rope_parameters.rope_type", False),
        (LLAMA, {"rope_parameters": LINEAR | {"rope_theta": 1e6}}, "rope_parameters.rope_theta", True),
        # a part that was fine-tuned alone
        (CLIP, CLIP["text_config"] | {"text_config": None, HEADS: 2}, HEADS, True),
        (CLIP, CLIP["text_config"] | {"text_config": None, "hidden_act": "relu"}, "hidden_act", False),
        (CLIP, CLIP["text_config"] | {"text_config": None}, None, False),
        # ours: a key that an earlier version did not write has its default, and keys of other kinds mean nothing
        ({"model_type": "semanir"}, {"interpolated_base": False, "train_top_k": [2]}, None, False),
        ({"model_type": "semanir"}, {"interpolated_base": True}, "interpolated_base", False),
        ({"model_type": "semanir"}, {"image_mean": [0.5, 0.5, 0.5]}, "image_mean", False),
        ({"model_type": "bert"}, {"image_mean": [0.5]}, None, False),
    ],
)
def test_settings_that_change_what_is_computed_are_compared(tmp_path, config, changes, key, meaning):
    told = {name: value for name, value in (config | changes).items() if name not in changes or value is not None}
    for name, settings in (("base", config), ("a", told)):
        write_weights(tmp_path / name, {"w": torch.ones(4)}, config=settings)
    given = siblings(tmp_path, "a")
    with make_plan(given) as plan:
        mixed = [text for text in plan.warnings if "mixes" in text]
        assert any(f"has {key} " in text for text in mixed) if key else not mixed
    with refused(DataError, key, "'a'") if meaning else contextlib.nullcontext():
        make_plan(given | {"method": "average"}).close()


@pytest.mark.parametrize(
    ("wrapper", "architectures", "said"), [("x.y.", "A", True), ("x.y.", "B", False), ("", "A", False)]
)
def test_names_that_a_program_changed_are_matched_and_said(tmp_path, wrapper, architectures, said):
    names = ("layer.0.w", "layer.1.w", "head.w")
    for name, prefix, kind in (("base", "", "A"), ("a", wrapper, architectures)):
        tensors = {f"{prefix}{own}": torch.ones(4) for own in names}
        write_weights(tmp_path / name, tensors, config={"architectures": [kind]})
    with make_plan(siblings(tmp_path, "a", method="average")) as plan:
        assert len(plan.merged_rows) == 3
        assert any("x.y." in text for text in plan.warnings) == said


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.0, 5.0), (float("-inf"), 5.0)])
def test_settings_that_are_infinite_are_read(tmp_path: Path, limit: tuple[float, float]):
    small = {
        "hidden_size": 16,
        "num_heads": 4,
        "head_dim": 8,
        "state_size": 4,
        "num_hidden_layers": 1,
        "vocab_size": 9,
    }
    transformers.Mamba2Config(**small, time_step_limit=limit, n_groups=1).save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["Mamba2ForCausalLM"]}
    model = build_empty(told)
    assert model is not None and tuple(model.config.time_step_limit) == limit
    ((name, *_),) = compare_settings(told, told | {"time_step_limit": [0.0, 7.0]})
    assert name == "time_step_limit" and compare_settings(told, told | {"chunk_size": 256}) == []
