"""How long each token of an MRConv stream takes, beside the same of another checkout: means, quantiles and the worst.

    git worktree add ../before 3e83276
    OMP_NUM_THREADS=1 python examples/benchmarks/mrconv_latency.py --before ../before

The language model of mrconv_generation.py, merged. A prompt as long as the context fills the kernels, then as many
tokens again are generated, or fewer (--tokens). Both versions run in processes of their own, which take turns of 64
tokens; the time is the thread's own, on one thread. As in any process in real time, Python's garbage collector need
not look through what was loaded before.
"""

import argparse
import contextlib
import gc
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from mrconv_generation import LAYERS, VOCABULARY, WIDTH, make_mrconv
from tqdm import tqdm
from versions import installed_versions

import hf_ext
from hf_ext.mrconv import MRConvCache, MRConvForCausalLM

HERE = Path(__file__).resolve().parent
PACKAGE = Path(hf_ext.__file__).resolve().parent
TURN = 64
QUANTILES = {"p50": 50, "p99": 99, "p99.9": 99.9}


def collect_tensors(value: Any, without: tuple[Any, ...] = ()) -> dict[int, torch.Tensor]:
    """The tensors that an object of hf_ext holds, by their address, but for those of some objects."""
    if isinstance(value, torch.Tensor):
        return {value.data_ptr(): value}
    if any(value is other for other in without):
        return {}
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        parts = list(vars(value).values()) if type(value).__module__.startswith("hf_ext.") else []
    return {address: tensor for part in parts for address, tensor in collect_tensors(part, without).items()}


def count_bytes(tensors: dict[int, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def make_model(context: int) -> MRConvForCausalLM:
    """Outside of inference mode: only the kernels of such a model are kept from one cache to the next."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return make_mrconv(context).eval().reparameterize()


@torch.inference_mode()
def serve(model: MRConvForCausalLM, context: int) -> None:
    """Answer each line, a number of tokens, with their seconds; the last, empty line with what is held."""
    prompt, cache = torch.randint(VOCABULARY, (1, context)), MRConvCache(model.config)
    # Twice: the first cache prepares the kernels.
    model(prompt, cache=MRConvCache(model.config), logits_to_keep=1)
    begin = time.thread_time()
    model(prompt, cache=cache, logits_to_keep=1)
    print(json.dumps({"prompt_seconds": time.thread_time() - begin, "package": str(PACKAGE)}), flush=True)
    token = torch.ones(1, 1, dtype=torch.long)
    gc.collect()
    gc.freeze()
    for line in iter(sys.stdin.readline, "\n"):
        seconds = []
        for _ in range(int(line)):
            begin = time.thread_time()
            token = model(token, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
            seconds.append(time.thread_time() - begin)
        print(json.dumps(seconds), flush=True)
    state = {address: tensor for layer in cache.layers for address, tensor in held_by_stream(layer).items()}
    kernels = {address: tensor for layer in cache.layers for address, tensor in collect_tensors(layer.kernel).items()}
    # Merged kernels are the model's.
    for buffer in model.buffers():
        kernels.pop(buffer.data_ptr(), None)
    print(json.dumps({"state_bytes": count_bytes(state), "shared_bytes": count_bytes(kernels)}), flush=True)


def held_by_stream(layer: Any) -> dict[int, torch.Tensor]:
    return collect_tensors(layer, (layer.kernel,))


def start(context: int, tree: Path | None) -> subprocess.Popen[str]:
    """A process that serves this version, or that of another checkout."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if tree is not None:
        environment["PYTHONPATH"] = str(tree.resolve())
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(context)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker: subprocess.Popen[str], line: str) -> Any:
    assert worker.stdin is not None
    # Where it has ended, there is no answer either.
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.write(line + "\n")
        worker.stdin.flush()
    return read_answer(worker)


def read_answer(worker: subprocess.Popen[str]) -> Any:
    assert worker.stdout is not None
    answer = worker.stdout.readline()
    if not answer:
        sys.exit(f"A process that measures ended with status {worker.wait()}; what it said last stands above.")
    return json.loads(answer)


def begin_rows(workers: dict[str, subprocess.Popen[str]], trees: dict[str, Path | None]) -> dict[str, Any]:
    """What each process says first; an error where it has not loaded the version that it stands for."""
    rows = {name: read_answer(worker) for name, worker in workers.items()}
    for name, tree in trees.items():
        loaded, wanted = Path(rows[name].pop("package")), PACKAGE if tree is None else (tree / "hf_ext").resolve()
        if loaded != wanted:
            sys.exit(f"The process of {name!r} loaded {loaded}, not {wanted}: nothing was measured.")
    return rows


def measure(context: int, tokens: int, trees: dict[str, Path | None]) -> dict[str, Any]:
    """What each version holds and takes: milliseconds by token, in order."""
    workers = {name: start(context, tree) for name, tree in trees.items()}
    rows = begin_rows(workers, trees)
    times: dict[str, list[float]] = {name: [] for name in workers}
    for _ in tqdm(range(tokens // TURN), f"context {context}"):
        for name, worker in workers.items():
            times[name] += ask(worker, str(TURN))
    for name, worker in workers.items():
        rows[name] |= ask(worker, "")
        worker.communicate()
        values = 1000 * np.array(times[name])
        rows[name] |= {"tokens": len(values), "mean": values.mean(), "worst": values.max(), "times": values}
        rows[name] |= {quantile: np.percentile(values, share) for quantile, share in QUANTILES.items()}
    return rows


def table(rows: dict[int, dict[str, Any]]) -> str:
    """Markdown, milliseconds and megabytes."""
    head = [
        "context",
        "version",
        "tokens",
        "mean",
        *QUANTILES,
        "worst",
        "worst / mean",
        "prompt",
        "state, MB",
        "shared, MB",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---|---" + "|---:" * (len(head) - 2) + "|"]
    for context, versions in rows.items():
        for name, row in versions.items():
            cells = [f"{row['tokens']:,}"]
            cells += [f"{row[key]:.2f}" for key in ("mean", *QUANTILES, "worst")]
            cells += [f"{row['worst'] / row['mean']:.1f}", f"{1000 * row['prompt_seconds']:.0f}"]
            cells += [f"{row[key] / 1e6:.1f}" for key in ("state_bytes", "shared_bytes")]
            lines.append(f"| {context:,} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: dict[int, dict[str, Any]], path: Path) -> None:
    """The latency of every token, a panel for each context."""
    figure = Figure(figsize=(11, 3 * len(rows)), layout="constrained")
    for panel, (context, versions) in zip(
        figure.subplots(len(rows), 1, squeeze=False)[:, 0], rows.items(), strict=True
    ):
        for name, row in versions.items():
            panel.plot(row["times"], linewidth=0, marker=".", markersize=2, label=name)
        panel.set(yscale="log", xlabel=f"token after a prompt of {context:,}", ylabel="ms")
        panel.grid(alpha=0.3)
        panel.legend(loc="upper left")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--before", type=Path, help="another checkout of this repository")
    parser.add_argument("--tokens", type=int, help="at most so many tokens of each context")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "mrconv_latency.json")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.serve is not None:
        return serve(make_model(words.serve), words.serve)
    if words.before is not None and not (words.before / "hf_ext" / "__init__.py").is_file():
        parser.error(f"--before {words.before}: there is no hf_ext in it; give the root of a checkout")
    if min([*words.contexts, words.tokens or TURN]) < TURN:
        parser.error(f"--contexts and --tokens: give {TURN} or more, versions take turns of so many tokens")
    words.output.parent.mkdir(parents=True, exist_ok=True)
    trees: dict[str, Path | None] = {"before": words.before} if words.before is not None else {}
    rows = {}
    for context in words.contexts:
        rows[context] = measure(context, min(context, words.tokens or context), {**trees, "now": None})
        # After each context: it is a long run.
        write(rows, words.output)
    print(table(rows))


def write(rows: dict[int, dict[str, Any]], output: Path) -> None:
    shown = {
        context: {name: {key: row[key] for key in row if key != "times"} for name, row in versions.items()}
        for context, versions in rows.items()
    }
    content = {
        "contexts": shown,
        "layers": LAYERS,
        "width": WIDTH,
        "dtype": "float32",
        "batch": 1,
        "device": f"CPU ({platform.machine()}), 1 thread of {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "versions": installed_versions("torch", "transformers", "hf-ext"),
    }
    output.write_text(json.dumps(content, indent=2) + "\n")
    output.with_suffix(".md").write_text(table(rows))
    plot(rows, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
