"""The cost of merging, side by side in one run: EMR, average and TIES of this package, the authors' layout in memory,
mergekit and fusion_bench, and the floor of reading the inputs and writing the result.

    python examples/benchmarks/emr_merge.py --folder SCRATCH [--mergekit PYTHON] [--fusion_bench PYTHON] [--quick]

Eight fine-tunes of GPT-2 small (124 M, fp32) are written to SCRATCH and kept there (4.5 GB; the larger model of the
memory curve, 15 GB, is removed). Every row is a process of its own on two cores, with its inputs in the page cache.
Rows run in turns, forwards and backwards, and the median counts. PYTHON is the interpreter of an environment that has
the other tool. A stopped benchmark goes on where it was. Needs Linux (/proc). `--quick` tries everything on a small
model once, and writes its results to SCRATCH. `--before CHECKOUT` only compares the command with that of an earlier
checkout of this repository, in processor time: that says something on a machine with other work too.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from emr_measuring import CORES, HERE, RunLog, file_sizes, keep_to_cores, remove, run_child, run_program, warm
from emr_results import write_results

TASKS = 8
MODELS = {"full": {"width": 768, "layers": 12}, "large": {"width": 2048, "layers": 22}}
QUICK_MODELS = {"full": {"width": 256, "layers": 4}, "large": {"width": 512, "layers": 8}}
# Rows that take minutes run once.
ONCE = ("mergekit_ties", "fusion_bench")
COPIES = 200


class Benchmark:
    """The settings of one run and where its files lie."""

    def __init__(self, words: argparse.Namespace) -> None:
        self.words = words
        self.models = QUICK_MODELS if words.quick else MODELS
        self.scratch = words.folder.resolve() / ("quick" if words.quick else "full")
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.set, self.out = self.scratch / "gpt2", self.scratch / "out"
        self.rounds = 1 if words.quick else words.rounds
        self.settings = {"models": self.models, "tasks": TASKS}
        self.log = RunLog(self.scratch / "runs.jsonl", self.settings)
        self.stderr = self.scratch / "last.log"

    def make_set(self, folder: Path, tasks: int, size: str) -> None:
        shape = [word for key, value in self.models[size].items() for word in (f"--{key}", str(value))]
        run_child([sys.executable, str(HERE / "emr_sets.py"), str(folder), "--tasks", str(tasks), *shape], self.stderr)

    def files(self, folder: Path, tasks: int) -> list[Path]:
        names = ["base"] + [f"task{index}" for index in range(1, tasks + 1)]
        return [folder / name / "model.safetensors" for name in names]

    def config(self, method: str, folder: Path, tasks: int = TASKS) -> dict[str, Any]:
        """A merge of `tasks` tasks; more than there are are the same files again."""
        sources = {f"task{index + 1}": str(folder / f"task{index % TASKS + 1}") for index in range(tasks)}
        return {"base": str(folder / "base"), "tasks": sources, "method": method}

    def merge(self, method: str) -> dict[str, Any]:
        words = {"config": self.config(method, self.set), "out": str(self.out)}
        return run_program("hf_ext_merge", words, self.stderr)

    def merge_command(self) -> dict[str, Any]:
        file = self.scratch / "merge.yaml"
        file.write_text(json.dumps(self.config("emr", self.set)))
        command = [str(Path(sys.executable).with_name("hf-ext")), "merge", str(file), str(self.out)]
        return run_child(command, self.stderr)[1]

    def in_memory(self) -> dict[str, Any]:
        base, *tasks = map(str, self.files(self.set, TASKS))
        return run_program("in_memory", {"base": base, "tasks": tasks, "out": str(self.out)}, self.stderr)

    def mergekit(self, method: str) -> dict[str, Any]:
        parameters = {"weight": 1.0} if method == "linear" else {"weight": 1.0, "density": 0.2}
        models = [{"model": str(self.set / f"task{index}"), "parameters": parameters} for index in range(1, TASKS + 1)]
        content = {"merge_method": method, "models": models, "dtype": "float32"}
        if method == "ties":
            content["base_model"] = str(self.set / "base")
        file = self.scratch / f"mergekit_{method}.yaml"
        file.write_text(json.dumps(content))
        words = {"config": str(file), "out": str(self.out)}
        return run_program("mergekit", words, self.stderr, self.words.mergekit, sample=True)

    def fusion_bench(self) -> dict[str, Any]:
        base, *tasks = (str(file.parent) for file in self.files(self.set, TASKS))
        words = {"base": base, "tasks": tasks}
        return run_program("fusion_bench", words, self.stderr, self.words.fusion_bench)

    def read_write(self, threads: int, flush: bool = True) -> dict[str, Any]:
        """As many bytes as our merge writes: the unified weights and a bit a weight for each task."""
        files = self.files(self.set, TASKS)
        size = files[0].stat().st_size
        words = {"files": list(map(str, files)), "out": str(self.out), "sizes": [size, *[size // 32] * TASKS]}
        return run_program("read_write", {**words, "threads": threads, "flush": flush}, self.stderr)

    def rows(self) -> dict[str, Any]:
        rows = {
            "merge": lambda: self.merge("emr"),
            "merge_command": self.merge_command,
            "in_memory": self.in_memory,
            "average": lambda: self.merge("average"),
            "ties": lambda: self.merge("ties"),
            "read_write_2_threads": lambda: self.read_write(2),
            "read_write_1_thread": lambda: self.read_write(1),
            "read_write_unflushed": lambda: self.read_write(2, flush=False),
        }
        if self.words.mergekit:
            rows["mergekit_linear"] = lambda: self.mergekit("linear")
            rows["mergekit_ties"] = lambda: self.mergekit("ties")
        if self.words.fusion_bench:
            rows["fusion_bench"] = self.fusion_bench
        chosen = self.words.rows.split(",") if self.words.rows else list(rows)
        return {name: run for name, run in rows.items() if name in chosen}

    def measure_rows(self) -> None:
        self.make_set(self.set, TASKS, "full")
        rows = self.rows()
        for turn in range(self.rounds):
            for name in rows if turn % 2 == 0 else reversed(rows):
                key = f"{name}/{turn}"
                if key in self.log.rows or (turn and name in ONCE):
                    continue
                remove(self.out)
                warm(self.files(self.set, TASKS))
                row = rows[name]()
                sizes = file_sizes(self.out)
                self.log.add(key, {**row, "result_bytes": sum(sizes.values())})
                print(f"{key:24} {row.get('seconds', row['process_seconds']):8.2f} s  ", flush=True)
        remove(self.out)

    def measure_memory(self) -> None:
        """Peak of the same merge for 2, 8 and 30 tasks, and for two tasks of a model ten times as large."""
        cases = [(self.set, tasks, "full") for tasks in (2, TASKS, 30)] + [(self.scratch / "large", 2, "large")]
        for folder, tasks, size in cases:
            key = f"memory_{size}/{tasks}"
            if key in self.log.rows:
                continue
            self.make_set(folder, min(tasks, TASKS), size)
            files = self.files(folder, min(tasks, TASKS))
            remove(self.out)
            warm(files)
            words = {"config": self.config("emr", folder, tasks), "out": str(self.out)}
            row = run_program("hf_ext_merge", words, self.stderr, sample=True)
            model = {"tasks": tasks, "parameters": files[0].stat().st_size // 4, "size": size}
            self.log.add(key, {**model, **row})
            print(f"{key:24} {row['peak_above_imports'] / 1e6:8.1f} MB above imports", flush=True)
        remove(self.out)
        remove(self.scratch / "large")

    def measure_use(self) -> None:
        """Switching a task in place beside copying all weights, the sizes of the result's files."""
        if "use/0" in self.log.rows:
            return
        self.make_set(self.set, TASKS, "full")
        remove(self.out)
        self.merge("emr")
        sizes = file_sizes(self.out)
        tasks = [f"task{index}" for index in range(1, TASKS + 1)]
        words = {"artifact": str(self.out), "tasks": tasks, "base": str(self.set / "base")}
        count = 20 if self.words.quick else COPIES
        row = run_program("switch", {**words, "rounds": count, "threads": CORES}, self.stderr)
        self.log.add("use/0", {**row, "files": sizes})
        print(f"{'use/0':24} switched {count} times", flush=True)
        remove(self.out)

    def measure_versions(self, before: Path) -> dict[str, list[float]]:
        """Processor time of the whole command, in turns with that of another checkout of this repository."""
        self.make_set(self.set, TASKS, "full")
        code = self.scratch / "before"
        code.mkdir(exist_ok=True)
        for name, target in {"hf_ext": "hf_ext", "hf_ext_cli": "hf_ext/cli"}.items():
            (code / name).unlink(missing_ok=True)
            (code / name).symlink_to(before.resolve() / target)
        file = self.scratch / "merge.yaml"
        file.write_text(json.dumps(self.config("emr", self.set)))
        command = [sys.executable, "-m", "hf_ext_cli.main", "merge", str(file), str(self.out)]
        commands = {"now": command, "before": ["env", f"PYTHONPATH={code}", *command]}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(self.rounds):
            for name in commands if turn % 2 == 0 else reversed(commands):
                remove(self.out)
                warm(self.files(self.set, TASKS))
                row = run_child(commands[name], self.stderr)[1]
                seconds[name].append(row["process_processor_seconds"])
                print(f"{name:8} {seconds[name][-1]:8.2f} s of processor time", flush=True)
        remove(self.out)
        return seconds


PARTS = {"rows": Benchmark.measure_rows, "memory": Benchmark.measure_memory, "use": Benchmark.measure_use}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="scratch folder, outside the repository")
    parser.add_argument("--mergekit", metavar="PYTHON", help="interpreter of an environment with mergekit")
    parser.add_argument("--fusion_bench", metavar="PYTHON", help="interpreter of an environment with fusion-bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", help="only these rows, separated by commas")
    parser.add_argument("--parts", default=",".join(PARTS), help="only these parts, separated by commas")
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    parser.add_argument("--before", type=Path, help="only beside another checkout: processor time of whole commands")
    parser.add_argument("--results", type=Path, help="folder of the results (examples/benchmarks/results)")
    words = parser.parse_args()
    cores = keep_to_cores()
    benchmark = Benchmark(words)
    folder = words.results or (benchmark.scratch if words.quick else HERE / "results")
    if words.before is not None:
        seconds = benchmark.measure_versions(words.before)
        found = {"settings": benchmark.settings, "processor_seconds": seconds}
        found["median"] = {name: statistics.median(values) for name, values in seconds.items()}
        found["now / before"] = found["median"]["now"] / found["median"]["before"]
        (folder / "emr_merge_versions.json").write_text(json.dumps(found, indent=1) + "\n")
        return
    for part in words.parts.split(","):
        PARTS[part](benchmark)
    write_results(folder, benchmark.log, benchmark.settings, cores)


if __name__ == "__main__":
    main()
