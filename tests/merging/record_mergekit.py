"""Writes `mergekit.safetensors`: four small models and what mergekit 0.1.5 makes of them, by the YAML files below.

Run with a Python that has mergekit, from the root of the repository: `python tests/merging/record_mergekit.py`
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RECORDED = Path(__file__).with_name("mergekit.safetensors")
MODELS = ("base", "a", "b", "c")
LAYERS = 3


def _models(**parameters: list[Any]) -> list[dict[str, Any]]:
    """Entries of a, b and c with a value of each parameter for each; None leaves it out."""
    found = []
    for place, model in enumerate("abc"):
        own = {name: values[place] for name, values in parameters.items() if values[place] is not None}
        found.append({"model": model, **({"parameters": own} if own else {})})
    return found


_BY_PART = [{"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]}, {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]}]
_LAYERED = [[0.1, 0.9], [{"filter": "mlp", "value": 2}, {"value": [1, 0.5, 1]}], None]
_WITH_BASE = [{"model": "base"}, *_models(weight=[0.5, -0.2, [0.3, 0.6]])]
_WITH_DENSITY = _models(weight=[0.5, 0.3, 1.0], density=[0.3, [0.5, 0.9], None])
_SLERPED = [{"sources": [{"model": model, "layer_range": [0, LAYERS]} for model in ("base", "a")]}]
# The first word is the method; all but `linear` have a base.
CASES: dict[str, dict[str, Any]] = {
    "linear": {"models": _models(weight=[0.5, 0.2, 0.7])},
    "linear by layer": {"models": _models(weight=_LAYERED), "parameters": {"weight": 0.3}},
    "slerp": {"slices": _SLERPED, "parameters": {"t": [*_BY_PART, {"value": 0.5}]}},
    "task_arithmetic": {"models": _WITH_BASE, "parameters": {"lambda": 0.8}},
    "task_arithmetic normalized": {"models": _models(weight=[0.5, 0.2, 0.9]), "parameters": {"normalize": True}},
    "ties": {"models": _WITH_DENSITY, "parameters": {"normalize": True, "int8_mask": True, "lambda": 0.9}},
    "ties not normalized": {"models": _models(), "parameters": {"normalize": False, "weight": 0.4, "density": 0.5}},
    "model_stock": {"models": _models()},
    "model_stock by row": {"models": _models(), "parameters": {"filter_wise": True}},
}
for _name, _case in CASES.items():
    _case["merge_method"] = _name.split()[0]
    if _case["merge_method"] != "linear":
        _case["base_model"] = "base"


def in_folder(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    case = copy.deepcopy(case) | {"dtype": "float32"}
    if "base_model" in case:
        case["base_model"] = str(folder / case["base_model"])
    entries = case["models"] if "models" in case else case["slices"][0]["sources"]
    for entry in entries:
        entry["model"] = str(folder / entry["model"])
    return case


def main() -> None:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=12, num_hidden_layers=LAYERS, **sizes)
    recorded: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        start = LlamaForCausalLM(config).state_dict()
        common = {name: 0.02 * torch.randn_like(values) for name, values in start.items()}
        for name in MODELS:
            model = LlamaForCausalLM(config)
            moved = {k: v + (name != "base") * (common[k] + 0.02 * torch.randn_like(v)) for k, v in start.items()}
            model.load_state_dict(moved)
            model.save_pretrained(folder / name)
            stored = load_file(folder / name / "model.safetensors")
            recorded |= {f"{name}/{key}": value for key, value in stored.items()}
        for name, case in CASES.items():
            out = folder / "out" / name
            given = MergeConfiguration.model_validate(in_folder(case, folder))
            run_merge(given, str(out), MergeOptions(write_model_card=False))
            merged = load_file(out / "model.safetensors") if (out / "model.safetensors").exists() else {}
            for shard in out.glob("model-*.safetensors"):
                merged |= load_file(shard)
            recorded |= {f"{name}/{key}": value for key, value in merged.items()}
    save_file(recorded, RECORDED, metadata={"config": config.to_json_string()})


if __name__ == "__main__":
    main()
