"""Time and rounding of merges into one model, beside mergekit 0.1.5, from the same YAML files.

Run with the Python of hf-ext; `--mergekit` is a Python that has mergekit:
`python examples/benchmarks/emr_mergekit.py --folder /scratch --mergekit /mergekit/bin/python --rounding`
`--sizes "27 M" --rounds 9` measures some of the times; without `--rounding` what is known of it stays.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from emr_measuring import ENVIRONMENT, HERE, prepare, remove
from safetensors.torch import load_file
from timing import Content, in_turns, markdown_table, median_ratio, run
from transformers import LlamaConfig, LlamaForCausalLM

WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic": {},
    "slerp": {"parameters": {"t": 0.4}},
    "model_stock": {},
    "ties": {"parameters": {"density": 0.5}},
}
SIZES = {
    "27 M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 16000},
    "196 M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 13, "vocab_size": 28000},
    "474 M": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 15, "vocab_size": 32000},
}


def write_models(folder: Path, sizes: dict[str, int], dtype: torch.dtype) -> int:
    """Writes a Llama and three that differ a little from it; the number of weights."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, tie_word_embeddings=True, **sizes))
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name in ("base", *WEIGHTS):
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(base[key] if name == "base" else base[key] + 2e-3 * torch.randn_like(parameter))
        model.to(dtype).save_pretrained(folder / name)
        model.float()
    return model.num_parameters()


def write_configuration(folder: Path, method: str, dtype: str) -> Path:
    """The YAML file that both read."""
    models: list[dict[str, Any]] = [
        {"model": str(folder / name), "parameters": {"weight": weight}} for name, weight in WEIGHTS.items()
    ]
    if method == "slerp":
        models = [{"model": str(folder / name)} for name in ("base", "a")]
    given = {"merge_method": method, "models": models, "dtype": dtype, **METHODS[method]}
    if method != "linear":
        given["base_model"] = str(folder / "base")
    path = folder / f"{method}-{dtype}.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


class Tools:
    """
    Both programs, each in a process that imports once and merges as often as it is asked to.

    Both have one core: threads of OpenMP that wait for others on a busy machine would count as processor time.
    """

    def __init__(self, folder: Path, mergekit: str) -> None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
        self.log = (folder / "log").open("w")
        self.children = {}
        for tool, program, python in (("hf-ext", "hf_ext_merge", sys.executable), ("mergekit", "mergekit", mergekit)):
            command = [python, str(HERE / "emr_programs.py"), program]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
            self.children[tool] = subprocess.Popen(command, env=environment, text=True, **pipes)

    def merge(self, tool: str, config: Path, out: Path) -> dict[str, Any]:
        """Time and processor time of one merge; what is at `out` goes first."""
        remove(out)
        child = self.children[tool]
        assert child.stdin is not None and child.stdout is not None
        print(json.dumps({"config": str(config), "out": str(out)}), file=child.stdin, flush=True)
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"{tool} ended; its last words are in {self.log.name}")
        row = json.loads(line)
        return {key: row[key] for key in ("seconds", "processor_seconds")}

    def close(self) -> None:
        """Ends both."""
        for child in self.children.values():
            child.communicate()
        self.log.close()


def exact_ties(base: torch.Tensor, *models: torch.Tensor) -> torch.Tensor:
    """TIES of one tensor in float64. Of values as large as the smallest that is kept, all are kept, as hf-ext does;
    mergekit keeps some of them. In bfloat16 they are many."""
    vectors = [model - base for model in models]
    for vector in vectors:
        kept = max(1, int(METHODS["ties"]["parameters"]["density"] * vector.numel()))
        vector[vector.abs() < vector.abs().flatten().kthvalue(vector.numel() - kept + 1).values] = 0
    weighted = [weight * vector for weight, vector in zip(WEIGHTS.values(), vectors, strict=True)]
    sign = torch.where(sum(weighted) >= 0, 1.0, -1.0)
    agrees = [vector.sign() == sign for vector in vectors]
    divisor = sum(weight * agree for weight, agree in zip(WEIGHTS.values(), agrees, strict=True))
    total = sum(vector * agree for vector, agree in zip(weighted, agrees, strict=True))
    return base + total / torch.where(divisor == 0, 1.0, divisor)


def compare_rounding(folder: Path, merge: Callable[[str, Path, Path], Any]) -> list[dict[str, Any]]:
    """Distance of bfloat16 results from float64 (mergekit's): the largest, and the share beyond one rounding."""
    rows = []
    models = [load_file(folder / name / "model.safetensors") for name in ("base", *WEIGHTS)]
    for method in METHODS:
        results = {}
        for name, tool, dtype in (
            ("exact", "mergekit", "float64"),
            ("hf-ext", "hf-ext", "bfloat16"),
            ("mergekit", "mergekit", "bfloat16"),
        ):
            out = folder / f"{method}-{name}"
            merge(tool, write_configuration(folder, method, dtype), out)
            results[name] = load_file(out / "model.safetensors")
            shutil.rmtree(out)
        for tool in ("hf-ext", "mergekit"):
            largest, wrong, elements = 0.0, 0, 0
            for key, exact in results["exact"].items():
                if (method, tool) == ("ties", "hf-ext"):
                    exact = exact_ties(*(weights[key].double() for weights in models))
                # A spacing of bfloat16 at the exact value; rounding once costs half of it.
                spacing = torch.ldexp(torch.ones_like(exact), exact.abs().clamp_min(1e-30).frexp().exponent - 8)
                distance = (results[tool][key].double() - exact).abs()
                largest = max(largest, distance.max().item())
                wrong += int((distance > 0.51 * spacing).sum())
                elements += exact.numel()
            rows.append({"method": method, "tool": tool, "largest": largest, "beyond_one_rounding": wrong / elements})
    return rows


def draw(found: dict[str, Any]) -> str:
    times = []
    for size, methods in found["times"].items():
        for method, tools in methods.items():
            ours, theirs = tools["hf-ext"], tools["mergekit"]
            pairs = {key: [statistics.median(row[key] for row in rows) for rows in (ours, theirs)] for key in ours[0]}
            ratio = median_ratio(*([row["processor_seconds"] for row in rows] for rows in (ours, theirs)))
            cells = [f"{value:.2f}" for value in (*pairs["processor_seconds"], ratio, *pairs["seconds"])]
            times.append([size, method, *cells])
    rounding = [
        [row["method"], row["tool"], f"{row['largest']:.1e}", f"{row['beyond_one_rounding']:.2%}"]
        for row in found["rounding"]
    ]
    header = ["weights", "method", "processor s", "mergekit's", "median ratio", "seconds", "mergekit's"]
    table = markdown_table(["method", "tool", "largest distance", "share beyond one rounding"], rounding)
    return f"{markdown_table(header, times)}\n{table}"


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """Rounding on small models, then the times on models of each size, in rounds in which both take turns."""
    scratch = prepare(words)
    if not words.mergekit:
        sys.exit("--mergekit PYTHON is needed: the interpreter of an environment with mergekit 0.1.5")
    known = json.loads(words.output.read_text())["rounding"] if words.output.is_file() else []
    found: dict[str, Any] = {"times": {}, "rounding": known, "weights": {}}
    tools = Tools(scratch, words.mergekit)
    if words.rounding:
        halves = scratch / "bfloat16"
        write_models(halves, SIZES["27 M"], torch.bfloat16)
        found["rounding"] = compare_rounding(halves, tools.merge)
    for size in words.sizes[:1] if words.quick else words.sizes:
        folder = scratch / size.replace(" ", "")
        found["weights"][size] = write_models(folder, SIZES[size], torch.float32)
        times = found["times"][size] = {}
        for method in METHODS:
            merge = partial(tools.merge, config=write_configuration(folder, method, "float32"), out=folder / "out")
            for tool in tools.children:
                # what is imported or compiled at the first merge
                merge(tool)
            times[method] = in_turns([*tools.children], 1 if words.quick else words.rounds, merge)
            yield found
        shutil.rmtree(folder)
    tools.close()


if __name__ == "__main__":
    words = {"sizes": [*SIZES], "rounds": 5, "rounding": False, "quick": False}
    run("emr_mergekit", __doc__, measure, draw, folder="", mergekit="", **words)
