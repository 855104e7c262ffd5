"""Reproduces a table of arXiv 2411.03177: says what remains of it, runs that, and collects the table.

python examples/disentangled_dit/paper/reproduce.py TABLE WORK [--run | --slurm] [--with OWN.yaml] [--processes N]
TABLE is a folder of rows/. Without --run the remaining commands are printed, with --slurm as jobs that wait for one
another: `... --slurm | bash`. The same command goes on after a kill. WORK/TABLE.md is the table of what is measured.
OWN.yaml overlays the recipes of `all` rows, of a base or of TABLE/ROW: `all: {batch: 64}`.
"""

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.errors import DataError, UsageError, run_script
from hf_ext.files import read_json, whole_file, write_json
from hf_ext.settings import build, read_yaml, refuse_unknown

PAPER = Path(__file__).resolve().parent
sys.path[:0] = [str(PAPER.parent), str(PAPER.parents[1])]

from experiments import count_parameters, table

TABLES = sorted(path.name for path in (PAPER / "rows").iterdir())
SLURM = PAPER.parents[1] / "accelerate" / "slurm.sh"
# Programs of Python, and one that is not.
TRAINING, COMMAND = ("-m", "hf_ext.training"), ("-m", "hf_ext_cli.main")
PEERS, PARTS = (str(PAPER.parent / "peers.py"),), (str(PAPER / "parts.py"),)
DOWNLOAD = ("hf", "download")
# Processes of slurm.sh.
NODES = 16
OURS = "ours"
# Options that decide how the work is done, and no result.
FREE = {"batch-size", "device", "workers", "max-bad-examples", "per_device_train_batch_size", "num_workers", "measure"}
# Numbers of a score that a table shows.
SHOWN = ("fid", "feature_distance", "clip_score", "content_distance", "detail_distance")


@strict
@dataclass
class Recipe:
    """
    Settings of a row.

    Args:
        data (`dict`): `repository` of the Hub, or a `path`; and `split`.
        latents (`dict`): Options of `hf-ext dit precompute`.
        batch (`int`): Of a step, over all processes.
        train (`dict`): Arguments of the training, without its data.
        samples (`dict[str, dict]`): For each set of pictures the options of `hf-ext sample`; `prompts`, the column of
            captions of the training data, or of other data (`repository` or `path`, `column`); `measure`, a list of
            `fid` and `clip`.
        score (`dict`): Options of `hf-ext dit score`: `network`, `clip`, `split` and `size` of the training data.
        drift (`list[str]`, *optional*): Sets of equal noise: how far the pictures drift from one to another.
        peer (`str`, defaults to `"ours"`): A network of peers.py.
        start (`str`, *optional*): `TABLE/ROW` whose model the training goes on from.
        trained (`str`, *optional*): `TABLE/ROW` whose model is measured; there is no training then.
    """

    data: dict
    latents: dict
    batch: int
    train: dict
    samples: dict
    score: dict
    drift: list[str] = field(default_factory=list)
    peer: str = OURS
    start: str | None = None
    trained: str | None = None


@dataclass(frozen=True)
class Step:
    """A command: what it runs, whether processes share the work, what it needs; `out` takes what it prints."""

    name: str
    program: tuple[str, ...]
    words: tuple[str, ...]
    done: bool
    needs: tuple[str, ...] = ()
    shared: bool = False
    out: Path | None = None

    def line(self, processes: int) -> str:
        """The command of a shell."""
        launch = ["accelerate", "launch", "--multi_gpu", "--num_processes", str(processes)]
        first = [] if self.program == DOWNLOAD else launch if self.shared and processes > 1 else ["python"]
        line = shlex.join([*first, *self.program, *self.words])
        if self.out is None:
            return line
        # The file appears when it is complete.
        folder, part, out = (shlex.quote(str(path)) for path in (self.out.parent, f"{self.out}.part", self.out))
        return f"mkdir -p {folder} && {line} > {part} && mv {part} {out}"

    def job(self, after: list[str]) -> str:
        """The same as a job of SLURM, after others."""
        options = f"--parsable --dependency=afterok:{':'.join(after)}" if after else "--parsable"
        if not self.shared:
            return f"sbatch {options} --gpus=1 --wrap={shlex.quote(self.line(1))}"
        program = shlex.quote(shlex.join(["python", *self.program]))
        return f"PROGRAM={program} sbatch {options} --export=ALL {shlex.join([str(SLURM), *self.words])}"


def merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `above` over those of `below`, section by section; null takes a field out."""
    merged = {**below, **above}
    for name, value in above.items():
        if isinstance(value, dict):
            before = below.get(name)
            merged[name] = merge(before if isinstance(before, dict) else {}, value)
    return {name: value for name, value in merged.items() if value is not None}


def read_recipe(name: str, own: dict[str, Any]) -> Recipe:
    """The recipe of `TABLE/ROW`: its bases, its own fields, and a user's."""
    files, layers = [PAPER / "rows" / f"{name}.yaml"], list[dict[str, Any]]()
    for file in files:
        layers.insert(0, read_yaml(file))
        if base := layers[0].pop("base", None):
            files.append(PAPER / "base" / f"{base}.yaml")
    overlays = [own.get(key) or {} for key in ("all", *(file.stem for file in files[:0:-1]), name)]
    fields: dict[str, Any] = {}
    for layer in (*layers, *overlays):
        fields = merge(fields, layer)
    return build(Recipe, fields, name)


def words_of(options: dict[str, Any]) -> list[str]:
    """Options of a command line; true is a flag, a list several."""
    words = []
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            words += [] if one is False else [f"--{name}"] if one is True else [f"--{name}", str(one)]
    return words


def lasting(value: Any) -> Any:
    """Settings without those that change no result."""
    return {name: lasting(it) for name, it in value.items() if name not in FREE} if isinstance(value, dict) else value


def digest(*values: Any) -> str:
    """Eight characters that stand for settings."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


class Plan:
    """The steps of rows, each once and after what it needs, with what is done already."""

    def __init__(self, work: Path, own: dict[str, Any], processes: int):
        self.work, self.processes = work, processes
        self.recipe = cache(lambda name: read_recipe(name, own))
        self.steps: dict[str, Step] = {}
        self.kept: dict[Path, str] = {}

    def add(
        self, name: str, program: tuple[str, ...], words: list[Any], done: bool, needs: list[str], **more: Any
    ) -> str:
        """Notes a step, unless another row had it already."""
        kept = Step(name, program, tuple(map(str, words)), done, tuple(dict.fromkeys(needs)), **more)
        if self.steps.setdefault(name, kept) != kept:
            raise UsageError(f"the step {name!r} would be done in two ways; the rows must agree about it.")
        return name

    def keep(self, place: Path, **settings: Any) -> Path:
        """Notes the settings of a training, of pictures or of a score, which must stay once it is there."""
        from hf_ext.tasks.precompute import keep_settings  # here, as what it imports takes seconds

        noted = place.with_name(f"{place.name}.recipe")
        if not place.exists():
            noted.unlink(missing_ok=True)
        keep_settings(noted, settings, f"{place} was made by another recipe")
        return place

    def data(self, source: dict[str, Any]) -> tuple[str, list[str]]:
        """A data set, and the download that it needs."""
        if "path" in source:
            return str(source["path"]), []
        folder = self.work / "data" / source["repository"].replace("/", "--")
        words = [source["repository"], "--repo-type", "dataset", "--local-dir", folder]
        # What the program prints at its end is kept: then all files are there.
        out = folder.with_name(f"{folder.name}.complete")
        return str(folder), [self.add(f"data {words[0]}", DOWNLOAD, words, out.is_file(), [], out=out)]

    def latents(self, row: Recipe) -> tuple[Path, list[str]]:
        """Latents of a row's data."""
        data, needs = self.data(row.data)
        kept, options = (["--split", row.data["split"], *words_of(of)] for of in (lasting(row.latents), row.latents))
        out = self.work / "latents" / f"{Path(data).name}-{row.latents['size']}-{digest(data, kept)}"
        words = ["dit", "precompute", data, out, *options]
        return out, [self.add(f"latents {out.name}", COMMAND, words, out.is_dir(), needs, shared=True)]

    def training(self, name: str) -> dict[str, Any]:
        """The settings that a row's model follows from."""
        found = {**lasting(asdict(self.recipe(name))), "samples": None, "score": None, "drift": None}
        return found | {key: found[key] and digest(self.training(found[key])) for key in ("start", "trained")}

    def snapshot(self, name: str) -> tuple[Path, list[str]]:
        """The model of a row, and its training or that of the row that it is taken from."""
        row = self.recipe(name)
        if row.trained is not None:
            return self.snapshot(row.trained)
        folder, (latents, needs) = self.work / "rows" / name, self.latents(row)
        self.keep(folder / "run", **self.training(name))
        share = self.processes * row.train["per_device_train_batch_size"]
        if row.batch % share:
            raise DataError(f"{name}: batch {row.batch} is no multiple of {share}, what {self.processes} see at once.")
        settings = {**row.train, "output_dir": str(folder / "run"), "data": {"train": {"path": str(latents)}}}
        settings["data"] |= {"num_workers": row.train.get("data", {}).get("num_workers", 0)}
        if row.start is not None:
            start, more = self.snapshot(row.start)
            settings["init_from"], needs = str(start), [*needs, *more]
        write_json(folder / "train.yaml", {**settings, "gradient_accumulation_steps": row.batch // share}, 1)
        program, words = (TRAINING, []) if row.peer == OURS else (PEERS, [row.peer])
        report = folder / "run" / "snapshot" / "training.json"
        done = report.is_file() and read_json(report)["steps"] >= row.train["max_steps"]
        step = self.add(f"train {name}", program, [*words, folder / "train.yaml"], done, needs, shared=True)
        return folder / "run" / "snapshot", [step]

    def peer(self, name: str) -> str:
        """The network of a row's model."""
        row = self.recipe(name)
        return row.peer if row.trained is None else self.peer(row.trained)

    def row(self, name: str) -> None:
        """All steps of a row."""
        row, folder, (snapshot, trained) = self.recipe(name), self.work / "rows" / name, self.snapshot(name)
        drawn, followed = dict[str, list[str]](), dict[str, str]()
        for kind, entry in row.samples.items():
            options, needs = dict(entry), list(trained)
            prompts, measure = options.pop("prompts", None), options.pop("measure", [])
            if prompts is not None:
                texts, more = self.prompts(row, prompts, options["count"])
                options, needs = {**options, "prompts": str(texts)}, [*needs, *more]
            followed[kind] = digest(about := {"training": digest(self.training(name)), **lasting(entry)})
            out = self.keep(folder / kind, **about)
            program, words = COMMAND if self.peer(name) == OURS else PEERS, words_of(options)
            lines, words = out / "metadata.jsonl", ["sample", snapshot, "--out", out, *words]
            done = lines.is_file() and len(lines.read_text(encoding="utf-8").splitlines()) >= options["count"]
            drawn[kind] = [self.add(f"sample {name} {kind}", program, words, done, needs, shared=True)]
            if measure:
                self.score(row, f"{name} {kind}", out, measure, drawn[kind], followed[kind])
        if row.drift:
            out = self.keep(folder / "drift.json", **{kind: followed[kind] for kind in row.drift})
            words = ["drift", *(folder / kind for kind in row.drift)]
            needs = [step for kind in row.drift for step in drawn[kind]]
            self.add(f"score {name} drift", PARTS, words, out.is_file(), needs, out=out)

    def prompts(self, row: Recipe, source: dict[str, Any], count: int) -> tuple[Path, list[str]]:
        """A file of captions, of the training data or of others."""
        own = {"repository", "path"}.isdisjoint(source)
        data, needs = self.latents(row) if own else self.data(source)
        out = self.work / "prompts" / f"{Path(data).name}-{count}-{digest(str(data), source)}.txt"
        words = ["prompts", data, source["column"], count, source.get("split", "train")]
        return out, [self.add(f"prompts {out.name}", PARTS, words, out.is_file(), needs, out=out)]

    def score(self, row: Recipe, name: str, pictures: Path, measure: list[str], needs: list[str], about: str) -> None:
        """The scores of a set of pictures; the statistics of the real ones are made once, by the first."""
        options = {"max-bad-examples": row.latents.get("max-bad-examples", 0.001), **row.score}
        clip, words = options.pop("clip", None), ["dit", "score", pictures]
        asked = {"clip": clip if "clip" in measure else None, **(lasting(options) if "fid" in measure else {})}
        out = self.keep(pictures.with_suffix(".json"), pictures=about, **asked)
        if "fid" in measure:
            data, more = self.data(row.data)
            real = self.work / "real" / f"{Path(data).name}-{digest(data, lasting(options))}.npz"
            if real.is_file() or real in self.kept:
                words += [real, "--network", options["network"]]
                more = [] if real.is_file() else [self.kept[real]]
            else:
                real.parent.mkdir(parents=True, exist_ok=True)
                words += [data, *words_of(options), "--keep", real]
                if not out.is_file():
                    self.kept[real] = f"score {name}"
            needs = [*needs, *more]
        words += ["--clip", clip] * ("clip" in measure)
        self.add(f"score {name}", COMMAND, [*words, "--json"], out.is_file(), needs, out=out)

    def remaining(self) -> list[Step]:
        """Steps that are not done. Nothing is made for what is done: a scored row needs no training."""
        wanted: set[str] = set()
        for step in reversed(self.steps.values()):
            if not step.done and (step.name in wanted or step.name.startswith("score ")):
                wanted |= {step.name, *step.needs}
        return [step for step in self.steps.values() if step.name in wanted and not step.done]


def rows_of(name: str) -> list[str]:
    """The rows of a table, in the order of their files."""
    if name not in TABLES:
        raise UsageError(f"there is no table {name!r}; allowed: {', '.join(TABLES)}.")
    return [f"{name}/{path.stem}" for path in sorted((PAPER / "rows" / name).glob("*.yaml"))]


def collect(plan: Plan, rows: list[str]) -> str:
    """The table of what has been measured so far."""
    scores: dict[str, dict[str, str]] = {}
    for name in rows:
        snapshot, _ = plan.snapshot(name)
        report = snapshot / "training.json"
        found = {}
        if report.is_file():
            told = read_json(report)
            found = {"parameters": f"{count_parameters(snapshot / 'transformer'):,}", "steps": f"{told['steps']:,}"}
            found |= {"pictures seen": f"{told['samples']:,}", "commit": str(told["commit"])[:12]}
        for kind in [*plan.recipe(name).samples, "drift"]:
            if (path := plan.work / "rows" / name / f"{kind}.json").is_file():
                measured = read_json(path)
                found |= {f"{kind}: {key}": f"{measured[key]:.4g}" for key in SHOWN if key in measured}
        scores[name] = found
    columns = list(dict.fromkeys(column for row in scores.values() for column in row if column != "commit"))
    lines = [
        [name.partition("/")[2], *(row.get(column, "–") for column in (*columns, "commit"))]
        for name, row in scores.items()
    ]
    return table([rows[0].partition("/")[0], *columns, "commit"], lines) + "\n"


def execute(line: str) -> int:
    """Runs a command with the programs that belong to this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(line, shell=True, env={**os.environ, "PATH": path}).returncode


def reproduce(words: list[str] | None = None) -> int:
    """Prints or runs what remains of a table, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("work", type=Path)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--run", action="store_true")
    how.add_argument("--slurm", action="store_true")
    parser.add_argument("--with", dest="own", type=Path)
    parser.add_argument("--processes", type=int)
    given = parser.parse_args(words)
    own = {} if given.own is None else read_yaml(given.own)
    bases = [path.stem for path in (PAPER / "base").glob("*.yaml")]
    refuse_unknown(own, ["all", *bases, *(row for table in TABLES for row in rows_of(table))], f" in {given.own}")
    processes = given.processes or (NODES if given.slurm else 1)
    if processes < 1:
        raise UsageError(f"--processes is {processes}; allowed: 1 or more.")
    rows, work = rows_of(given.table), given.work.resolve()

    def look() -> Plan:
        plan = Plan(work, own, processes)
        for name in rows:
            plan.row(name)
        with whole_file(work / f"{given.table}.md", "w") as file:
            file.write(collect(plan, rows))
        return plan

    steps = look().remaining()
    if given.run:
        for number, step in enumerate(steps, 1):
            print(f"{number} of {len(steps)}: {step.name}", flush=True)
            if code := execute(step.line(processes)):
                return code
        look()
        print((work / f"{given.table}.md").read_text(encoding="utf-8"))
    elif given.slurm:
        # Each job after those that it needs; downloads run at once.
        print("set -e")
        jobs = {step.name: f"job_{number}" for number, step in enumerate(steps) if step.program != DOWNLOAD}
        for step in steps:
            job = step.job([f"${jobs[need]}" for need in step.needs if need in jobs])
            print(f"{jobs[step.name]}=$({job})" if step.name in jobs else step.line(1))
    else:
        print("\n".join(step.line(processes) for step in steps))
    return 0


if __name__ == "__main__":
    run_script(reproduce)
