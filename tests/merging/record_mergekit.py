"""Writes `mergekit.safetensors`: four small models and what mergekit 0.1.5 makes of them, by the YAML files below.

Run with a Python that has mergekit, from the root of the repository: `python tests/merging/record_mergekit.py`
"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
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


_BY_PART = [
    {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
    {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
]
CASES: dict[str, dict[str, Any]] = {
    "linear": {"merge_method": "linear", "models": _models(weight=[0.5, 0.2, 0.7])},
    "linear by layer": {
        "merge_method": "linear",
        "models": _models(weight=[[0.1, 0.9], [{"filter": "mlp", "value": 2}, {"value": [1, 0.5, 1]}], None]),
        "parameters": {"weight": 0.3},
    },
    "slerp": {
        "merge_method": "slerp",
        "base_model": "base",
        "slices": [{"sources": [{"model": model, "layer_range": [0, LAYERS]} for model in ("base", "a")]}],
        "parameters": {"t": [*_BY_PART, {"value": 0.5}]},
    },
    "task_arithmetic": {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "models": [{"model": "base"}, *_models(weight=[0.5, -0.2, [0.3, 0.6]])],
        "parameters": {"lambda": 0.8},
    },
    "task_arithmetic normalized": {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "models": _models(weight=[0.5, 0.2, 0.9]),
        "parameters": {"normalize": True},
    },
    "ties": {
        "merge_method": "ties",
        "base_model": "base",
        "models": _models(weight=[0.5, 0.3, 1.0], density=[0.3, [0.5, 0.9], None]),
        "parameters": {"normalize": True, "int8_mask": True, "lambda": 0.9},
    },
    "ties not normalized": {
        "merge_method": "ties",
        "base_model": "base",
        "models": _models(),
        "parameters": {"normalize": False, "weight": 0.4, "density": 0.5},
    },
    "model_stock": {"merge_method": "model_stock", "base_model": "base", "models": _models()},
    "model_stock by row": {
        "merge_method": "model_stock",
        "base_model": "base",
        "models": _models(),
        "parameters": {"filter_wise": True},
    },
}


def in_folder(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration with its models in a folder."""
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
            recorded |= {
                f"{name}/{key}": value for key, value in load_file(folder / name / "model.safetensors").items()
            }
        for name, case in CASES.items():
            out = folder / "out" / name
            text = yaml.safe_dump(in_folder(case, folder))
            run_merge(
                MergeConfiguration.model_validate(yaml.safe_load(text)), str(out), MergeOptions(write_model_card=False)
            )
            merged = load_file(out / "model.safetensors") if (out / "model.safetensors").exists() else {}
            for shard in out.glob("model-*.safetensors"):
                merged |= load_file(shard)
            recorded |= {f"{name}/{key}": value for key, value in merged.items()}
    save_file(recorded, RECORDED, metadata={"config": config.to_json_string()})


if __name__ == "__main__":
    main()
