"""EMR-Merging on a device: merging of weights in its memory, switching of tasks, batches of mixed tasks.

`merge` elects, masks and sums one tensor of eight tasks, `restore` computes a task's weights: torch,
with the compiled kernels of the CPU on the same bytes for comparison. `switch` sets a task of a GPT-2 in place, beside
copying all weights; `mixed` is a forward of one batch of several tasks, beside one batch of one task.
"""

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from emr_measuring import write_base, write_task
from parts import Case, Values, in_turns, read_words, run_part

import hf_ext
from hf_ext.emr import arithmetic, ops

TASKS = 8


def block(n: int, dtype: torch.dtype, device: str) -> list[Any]:
    """Arguments of a merge of one tensor."""
    generator = torch.Generator(device).manual_seed(0)
    base = torch.randn(n, generator=generator, device=device)
    tasks = [(base + 0.01 * torch.randn(n, generator=generator, device=device)).to(dtype) for _ in range(TASKS)]
    masks = torch.zeros(TASKS, -(-n // 8), dtype=torch.uint8, device=device)
    sums = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in ((TASKS, 10), (4,), (TASKS, TASKS))]
    return [base.to(dtype), tasks, torch.empty(n, dtype=dtype, device=device), masks, ops.Sums(*sums)]


def kernels(name: str) -> Any:
    return arithmetic if name == "torch" else arithmetic.find_kernels("cpu")


def tensors(name: str, n: int, dtype: str, words: Any) -> dict[str, Values]:
    """Merge and restore by one way; bytes that must pass, a second, tell how near to the memory's speed that is."""
    device = "cpu" if name == "compiled, CPU" else words.device
    given, way, kind = block(n, getattr(torch, dtype), device), kernels(name.split(",")[0]), getattr(torch, dtype)
    out = torch.empty(n, dtype=kind, device=device)
    calls = {
        "merge": lambda: way.run_block(*given, 0, "zero"),
        "restore": lambda: way.restore(given[0], given[2], given[3][1], 0.7, out),
    }
    rows = in_turns(calls, words, dtype=dtype, sizes={"weights": n, "tasks": TASKS})
    # Read: base and tasks, written: unified and masks; read: base, unified and a mask, written: a task.
    passed = {"merge": n * kind.itemsize * (TASKS + 2) + TASKS * n // 8, "restore": n * kind.itemsize * 3 + n // 8}
    for call, row in rows.items():
        if "median" in row:
            row["gigabytes_a_second"] = passed[call] / row["median"] / 1e9
    return rows


class Artifact:
    """A merge of fine-tunes of a GPT-2 in a folder of this process, made when it is first asked for."""

    def __init__(self, words: Any):
        self.shape = (64, 2) if words.tiny else (768, 12)
        self.folder = Path(tempfile.mkdtemp())
        self.tasks = [f"task{index}" for index in range(1, 3 if words.tiny else TASKS + 1)]
        self.device = words.device

    def load(self) -> hf_ext.EMRModel:
        """The model of the first task on the device."""
        out = self.folder / "out"
        if not out.exists():
            write_base(self.folder / "base", *self.shape)
            for seed, name in enumerate(self.tasks, 1):
                write_task(self.folder / "base", self.folder / name, seed)
            tasks = {name: str(self.folder / name) for name in self.tasks}
            config = {"base": str(self.folder / "base"), "tasks": tasks, "method": "emr"}
            hf_ext.merge_checkpoints(config, out, progress=False)
        return hf_ext.EMRModel.from_pretrained(out, self.tasks[0], device=self.device)

    def remove(self) -> None:
        """Leaves nothing behind."""
        shutil.rmtree(self.folder, ignore_errors=True)


def switch(artifact: Artifact, words: Any) -> dict[str, Values]:
    merged, turn = artifact.load(), iter(range(10**9))
    weights = list(merged.model.state_dict().values())
    copies = [weight.clone() for weight in weights]
    for task in artifact.tasks:
        merged.set_task(task)

    @torch.no_grad()
    def copy() -> None:
        for weight, saved in zip(weights, copies, strict=True):
            weight.copy_(saved)

    calls = {"switch": lambda: merged.set_task(artifact.tasks[next(turn) % len(artifact.tasks)]), "copy": copy}
    return in_turns(calls, words, sizes={"weights": sum(weight.numel() for weight in weights)})


def mixed(artifact: Artifact, words: Any) -> dict[str, Values]:
    merged = artifact.load()
    rows, length = (2, 8) if words.tiny else (16, 128)
    batch = {"input_ids": torch.randint(1000, (rows, length), device=words.device)}
    several = [artifact.tasks[index % len(artifact.tasks)] for index in range(rows)]
    calls = {
        "one task": torch.no_grad()(partial(merged, **batch, task_ids=[artifact.tasks[0]] * rows)),
        "mixed tasks": torch.no_grad()(partial(merged, **batch, task_ids=several)),
    }
    return in_turns(calls, words, sizes={"batch": rows, "length": length, "tasks": len(set(several))})


def make_cases(words: Any, artifact: Artifact) -> dict[str, Case]:
    ways = ["torch", "compiled, CPU"]
    cases: dict[str, Case] = {}
    for n in (2**12,) if words.tiny else (2**20, 2**24, 2**27):
        for dtype in ("float32", "bfloat16"):
            for way in ways:
                if way != "compiled, CPU" or n <= 2**24:
                    cases[f"{n} weights, {dtype}, {way}"] = partial(tensors, way, n, dtype, words)
    cases |= {"switch": partial(switch, artifact, words), "mixed": partial(mixed, artifact, words)}
    return cases


if __name__ == "__main__":
    given_words = read_words()
    made = Artifact(given_words)
    try:
        run_part(given_words, make_cases(given_words, made))
    finally:
        made.remove()
