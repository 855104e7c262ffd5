"""One model by methods that mergekit has too: time, memory and rounding of both, from the same YAML files.

Run with the Python of hf-ext; `MERGEKIT` is one that has mergekit 0.1.5:
`python examples/benchmarks/emr_mergekit.py --mergekit MERGEKIT`
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from emr_measuring import run_program
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

RESULTS = Path(__file__).with_name("results") / "emr_mergekit"
WEIGHTED = [("a", 0.5), ("b", 0.3), ("c", 0.2)]
METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic": {},
    "slerp": {"parameters": {"t": 0.4}},
    "model_stock": {},
    "ties": {"parameters": {"density": 0.5}},
}


def write_models(folder: Path, dtype: torch.dtype) -> None:
    """A Llama of 33 M weights and three that differ a little."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16000, tie_word_embeddings=True, **sizes))
    for name in ("base", "a", "b", "c"):
        if name != "base":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(2e-3 * torch.randn_like(parameter))
        model.to(dtype).save_pretrained(folder / name)
        model.float()


def write_configuration(folder: Path, method: str, dtype: str) -> Path:
    """The YAML file that both read."""
    models: list[dict[str, Any]] = [
        {"model": str(folder / name), "parameters": {"weight": weight}} for name, weight in WEIGHTED
    ]
    if method == "slerp":
        models = [{"model": str(folder / name)} for name in ("base", "a")]
    given = {"merge_method": method, "models": models, "dtype": dtype, **METHODS[method]}
    if method != "linear":
        given["base_model"] = str(folder / "base")
    path = folder / f"{method}-{dtype}.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def compare_times(folder: Path, mergekit: str, rounds: int) -> list[dict[str, Any]]:
    """Both programs in turns, each in a process of its own; the median of the rounds."""
    rows = []
    for method in METHODS:
        config = write_configuration(folder, method, "float32")
        runs: dict[str, list[dict[str, Any]]] = {"hf-ext": [], "mergekit": []}
        for _ in range(rounds):
            for tool, found in runs.items():
                out = folder / "out"
                shutil.rmtree(out, ignore_errors=True)
                words = {"config": yaml.safe_load(config.read_text()) if tool == "hf-ext" else str(config)}
                program, python = ("hf_ext_merge", None) if tool == "hf-ext" else ("mergekit", mergekit)
                options = {} if python is None else {"python": python}
                found.append(run_program(program, {**words, "out": str(out)}, folder / "log", sample=True, **options))
        for tool, found in runs.items():
            keys = sorted(key for key, value in found[0].items() if isinstance(value, int | float))
            rows.append({"method": method, "tool": tool, **{key: median(run[key] for run in found) for key in keys}})
    return rows


def compare_rounding(folder: Path, mergekit: str) -> list[dict[str, Any]]:
    """Largest distance of a bfloat16 result from the merge in float32, and how many are further than one rounding."""
    rows = []
    for method in METHODS:
        results = {}
        for name, tool, dtype in (
            ("exact", "hf_ext_merge", "float32"),
            ("hf-ext", "hf_ext_merge", "bfloat16"),
            ("mergekit", "mergekit", "bfloat16"),
        ):
            config, out = write_configuration(folder, method, dtype), folder / f"{method}-{name}"
            told = str(config) if tool == "mergekit" else yaml.safe_load(config.read_text())
            python = {"python": mergekit} if tool == "mergekit" else {}
            run_program(tool, {"config": told, "out": str(out)}, folder / "log", **python)
            results[name] = load_file(out / "model.safetensors")
            shutil.rmtree(out)
        for tool in ("hf-ext", "mergekit"):
            largest, wrong, elements = 0.0, 0, 0
            for key, exact in results["exact"].items():
                unit = torch.ldexp(torch.ones_like(exact), exact.abs().clamp_min(1e-30).frexp().exponent - 8)
                distance = (results[tool][key].double() - exact.double()).abs()
                largest = max(largest, distance.max().item())
                # A half is what rounding once costs; the merge in float32 is itself rounded.
                wrong += int((distance > 0.51 * unit.double()).sum())
                elements += exact.numel()
            rows.append({"method": method, "tool": tool, "largest": largest, "beyond_one_rounding": wrong / elements})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mergekit", required=True, help="Python with mergekit 0.1.5")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found = {}
    for key, dtype in (("times", torch.float32), ("rounding", torch.bfloat16)):
        with tempfile.TemporaryDirectory() as place:
            write_models(Path(place), dtype)
            if key == "times":
                found[key] = compare_times(Path(place), arguments.mergekit, arguments.rounds)
            else:
                found[key] = compare_rounding(Path(place), arguments.mergekit)
    RESULTS.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [
        "| method | tool | processor s of the work | peak MB over imports | whole process s |",
        "|---|---|---|---|---|",
    ]
    for row in found["times"]:
        work, whole = row["processor_seconds"], row["process_seconds"]
        lines.append(
            f"| {row['method']} | {row['tool']} | {work:.2f} | {row['peak_above_imports'] / 1e6:.0f} | {whole:.1f} |"
        )
    lines += ["", "| method | tool | largest distance | share beyond one rounding |", "|---|---|---|---|"]
    for row in found["rounding"]:
        lines.append(f"| {row['method']} | {row['tool']} | {row['largest']:.1e} | {row['beyond_one_rounding']:.1%} |")
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
