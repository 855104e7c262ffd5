"""
What both of two processes run: `main FOLDER CASE…`, under a launcher or `fork_two`.

A case is data and workers, of runs that are whole and in pieces, or a way to fail; then each process writes down how
its run ended.
"""

import contextlib
import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import PartialState
from PIL import Image

from hf_ext.distributed import scan_once
from hf_ext.tasks.series import SeriesRegressionTask
from hf_ext.training import Callback, train
from tests.kit.process_state import forget_accelerate

from .tiny import TinyTask, contents, evaluated, find_differences, make_arguments, run_interrupted

FAILURES = ("error", "kill", "busy", "patient")
STOPS = (3, 5)


def sources(root: Path) -> dict[str, dict[str, Any]]:
    """Training data by the name of the case; tests write the two folders."""
    return {
        "map": {"path": str(root / "examples")},
        "stream": {"path": str(root / "shards"), "streaming": True},
        "buffer": {"path": str(root / "shards"), "streaming": True, "shuffle_buffer": 5},
    }


def compare(root: Path, case: str, **changes: Any) -> dict[str, Any]:
    """Runs a case whole and in three pieces; what differs in the end."""
    kind, workers, *damage = case.split("-")
    data = {"train": sources(root)[kind], "eval": {"path": str(root / "examples")}, "num_workers": int(workers)}
    whole, pieces = root / f"{case}-whole", root / f"{case}-pieces"
    forget_accelerate()
    expected = train(TinyTask(), make_arguments(whole, data, **changes))
    for step in STOPS:
        run_interrupted(make_arguments(pieces, data, **changes), step)
        if damage and PartialState().is_main_process:
            newest = max((pieces / "state").glob("step-?"))
            (newest / "optimizer.bin").write_bytes(b"cut")
        PartialState().wait_for_everyone()
    forget_accelerate()
    metrics = train(TinyTask(), make_arguments(pieces, data, **changes))
    if not PartialState().is_main_process:
        return {}
    first, second = ({**contents(folder), "returned": told} for folder, told in ((whole, expected), (pieces, metrics)))
    processes = json.loads((pieces / "args.json").read_text())["processes"]
    differing = find_differences(first, second)
    return {"names": sorted(first), "differing": differing, "metrics": metrics, "processes": processes}


def fail(root: Path, case: str) -> None:
    """Fails, is killed or computes for too long in the second process, or does else for long in the first."""

    def rest() -> None:
        time.sleep(8 if case == "patient" else 0)

    class FailingTask(TinyTask):
        @scan_once
        def read_data(self, data: datasets.Dataset | datasets.IterableDataset) -> np.ndarray | None:
            rest()
            return super().read_data(data)

        def loss(self, model: torch.nn.Module, batch: dict[str, Any], step: int) -> torch.Tensor:
            if step == 1 and PartialState().process_index == 1:
                if case == "error":
                    raise ValueError("its disk is gone")
                if case == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(12 if case == "busy" else 0)
            return super().loss(model, batch, step)

        def sample_picture(self, model: torch.nn.Module, examples: list[dict[str, Any]]) -> Image.Image | None:
            rest()
            return super().sample_picture(model, examples)

    class Slow(Callback):
        def on_begin(self, step: int, folder: Path, model: torch.nn.Module) -> None:
            rest()

        def on_save(self, step: int, folder: Path, is_best: bool) -> None:
            rest()

    forget_accelerate()
    changes = {"timeout_minutes": 0.1, "max_steps": 3, "save_steps": 2} if case in ("busy", "patient") else {}
    said, kind, process = io.StringIO(), "", ""
    with contextlib.redirect_stderr(said):
        try:
            train(
                FailingTask(),
                make_arguments(root / "run", evaluated(root / "examples"), **changes),
                None,
                None,
                [Slow()],
            )
        except Exception as error:
            kind, process = type(error).__name__, str(error).partition(" of ")[0]
    ending = {"kind": kind, "said": said.getvalue(), "process": process}
    (root / f"ended-{os.environ['RANK']}.json").write_text(json.dumps(ending))
    # Without the group's own farewell, for which the other one would have to be there.
    os._exit(0)


def series() -> datasets.Dataset:
    """Series whose statistics have digits to lose."""
    rows = np.random.default_rng(0).normal(size=(9, 5)).cumsum(1)
    return datasets.Dataset.from_dict({"values": rows.tolist(), "target": rows.mean(1).tolist()})


class CountedTask(SeriesRegressionTask):
    """Counts how many examples it has read, and notes it when the model is built."""

    reads = 0

    def read_values(self, example: dict[str, Any]) -> np.ndarray:
        self.reads += 1
        return super().read_values(example)

    def build_model(self, config: dict[str, Any], init_from: str | None) -> torch.nn.Module:
        self.scans = {"reads": self.reads, **self.learned}
        return super().build_model(config, init_from)


def scan(root: Path) -> None:
    """Trains on series; each process writes down how many it read before, and what it knows of them."""
    forget_accelerate()
    task, model = CountedTask(max_length=8), {"hidden_size": 8, "num_hidden_layers": 1}
    train(task, make_arguments(root / "run", {}, model=model, max_steps=1), series())
    (root / f"scans-{os.environ['RANK']}.json").write_text(json.dumps(task.scans))
    torch.distributed.destroy_process_group()


def main() -> None:
    root, cases = Path(sys.argv[1]), sys.argv[2:]
    # To wait five seconds at each end of a buffer would take longer than all else.
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.02
    if cases == ["scan"]:
        scan(root)
        return
    if cases[0] in FAILURES:
        fail(root, cases[0])
    # A second group in the same processes would find the addresses of the first at the launcher's store.
    PartialState.destroy_process_group = lambda self, group=None: None
    results = {case: compare(root, case) for case in cases}
    if PartialState().is_main_process:
        (root / "results.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
