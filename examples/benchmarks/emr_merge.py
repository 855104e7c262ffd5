"""The cost of a merge with masks, beside the authors' layout in memory and the floor of reading the inputs and writing
the result; emr_mergekit.py compares merges into one model.

    python examples/benchmarks/emr_merge.py --folder SCRATCH [--quick]

Eight fine-tunes of GPT-2 small (124 M, fp32) are written to SCRATCH and kept there (4.5 GB; the larger model of the
memory curve, 15 GB, is removed). Every row is a process of its own on two cores, with its inputs in the page cache.
Rows run in turns, in an order that turns too, and the median of three rounds counts. Needs Linux (/proc). `--quick`
tries everything on a small model once, and writes its results to SCRATCH. before.py compares merges of two
installations.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emr_measuring import make_set, prepare, remove, run_child, run_program, run_rounds, warm
from timing import Content, run

TASKS = 8
MODELS = {"full": {"width": 768, "layers": 12}, "large": {"width": 2048, "layers": 22}}
QUICK_MODELS = {"full": {"width": 256, "layers": 4}, "large": {"width": 512, "layers": 8}}


class Benchmark:
    """The settings of one run and where its files lie."""

    def __init__(self, words: argparse.Namespace, scratch: Path) -> None:
        self.rounds = 1 if words.quick else 3
        self.models = QUICK_MODELS if words.quick else MODELS
        self.scratch, self.set, self.out, self.stderr = (scratch / name for name in ("", "gpt2", "out", "last.log"))
        self.files = make_set(self.set, TASKS, **self.models["full"])

    def config(self, folder: Path, tasks: int = TASKS) -> dict[str, Any]:
        """A merge of `tasks` tasks; more than there are are the same files again."""
        sources = {f"task{index + 1}": str(folder / f"task{index % TASKS + 1}") for index in range(tasks)}
        return {"base": str(folder / "base"), "tasks": sources}

    def program(self, name: str, **words: Any) -> dict[str, Any]:
        warm(self.files)
        return run_program(name, {**words, "out": str(self.out)}, self.stderr)

    def merge_command(self) -> dict[str, Any]:
        warm(self.files)
        file = self.scratch / "merge.yaml"
        file.write_text(json.dumps(self.config(self.set)))
        command = [str(Path(sys.executable).with_name("hf-ext")), "merge", str(file), str(self.out)]
        return run_child(command, self.stderr)[1]

    def read_write(self, threads: int) -> dict[str, Any]:
        """As many bytes as our merge writes: the unified weights and a bit a weight for each task."""
        size = self.files[0].stat().st_size
        sizes = [size, *[size // 32] * TASKS]
        return self.program("read_write", files=list(map(str, self.files)), sizes=sizes, threads=threads)

    def measure_rows(self) -> dict[str, dict[str, Any]]:
        base, *tasks = map(str, self.files)
        rows = {
            "merge": lambda: self.program("hf_ext_merge", config=self.config(self.set)),
            "merge_command": self.merge_command,
            "in_memory": lambda: self.program("in_memory", base=base, tasks=tasks),
            "read_write_2": lambda: self.read_write(2),
            "read_write_1": lambda: self.read_write(1),
        }
        return run_rounds(rows, self.rounds, self.out)

    def measure_memory(self) -> list[dict[str, Any]]:
        """Peak of the same merge for 2, 8 and 30 tasks, and for two tasks of a model ten times as large."""
        rows, large = [], self.scratch / "large"
        for folder, tasks, size in (*((self.set, tasks, "full") for tasks in (2, 8, 30)), (large, 2, "large")):
            files = make_set(folder, min(tasks, TASKS), **self.models[size])
            remove(self.out)
            row = self.program("hf_ext_merge", config=self.config(folder, tasks))
            rows.append({"size": size, "tasks": tasks, "parameters": files[0].stat().st_size // 4, **row})
            print(f"{size}, {tasks} tasks: {row['peak_above_imports'] / 1e6:.0f} MB above imports", flush=True)
        remove(large)
        return rows


def measure(words: argparse.Namespace) -> Iterator[Content]:
    """All rows, then the memory."""
    benchmark = Benchmark(words, prepare(words))
    found = {"models": benchmark.models, "tasks": TASKS, "rows": benchmark.measure_rows()}
    yield {**found, "memory": benchmark.measure_memory()}


if __name__ == "__main__":
    run("emr_merge", __doc__, measure, None, folder="", quick=False)
