"""What both of two real processes run: `python -m tests.training.two_processes FOLDER CASE…`, under a launcher."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import PartialState

from hf_ext.training import loop, train
from tests.kit.process_state import forget_accelerate

from . import failing
from .tiny import TinyTask, contents, make_arguments, run_interrupted

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
    return {
        "names": sorted(first),
        "differing": sorted(name for name in {*first, *second} if first.get(name) != second.get(name)),
        "metrics": metrics,
        "processes": json.loads((pieces / "args.json").read_text())["processes"],
    }


def main() -> None:
    root = Path(sys.argv[1])
    if sys.argv[2] in failing.CASES:
        failing.main()
    # To draw, and to wait five seconds at each end of a buffer, would take longer than all else.
    loop.plot_curves = lambda run: None
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.02
    # A second group in the same processes would find the addresses of the first at the launcher's store.
    PartialState.destroy_process_group = lambda self, group=None: None
    results = {case: compare(root, case) for case in sys.argv[2:]}
    if PartialState().is_main_process:
        (root / "results.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
