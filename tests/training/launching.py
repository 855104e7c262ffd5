"""Processes that the tests start."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.kit import warm_python

ROOT = Path(__file__).resolve().parents[2]


def environment(**changes: str) -> dict[str, str]:
    """One thread each and no GPU, so that results are bit-equal."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", **changes}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


# Words: a module, whose `main` all processes of a group call; for each group a port, how they end, and its words.
_FORKS = """
import importlib, json, os, sys
name, *pairs = sys.argv[1:]
module = importlib.import_module(name)
for port, ends, words in map(json.loads, pairs):
    children = []
    for rank in map(str, range(len(ends))):
        children.append(os.fork())
        if not children[-1]:
            sys.argv = [name, *words]
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(len(ends))}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(len(ends))}
            module.main()
            sys.exit()
    assert [os.waitpid(child, 0)[1] for child in children] == ends
"""


def fork_two(module: str, *words: str) -> None:
    """Calls a module's `main` in two processes that find each other as launched ones do, but import only once."""
    fork_pairs(module, ([0, 0], list(words)))


def fork_pairs(module: str, *pairs: tuple[list[int], list[str]]) -> None:
    """The same for one group of processes after the other, each with how its members end, a signal's number or 0."""
    told = [json.dumps([free_port(), *pair]) for pair in pairs]
    done = warm_python.run([sys.executable, "-c", _FORKS, module, *told], cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr


def launcher(module: str, *words: str) -> list[str]:
    """
    The command that runs a module in two processes, as `examples/accelerate/ddp_2_cpu.yaml` says.

    `accelerate launch --cpu --num_processes 2` would start a single one without saying so.
    """
    config = str(ROOT / "examples" / "accelerate" / "ddp_2_cpu.yaml")
    options = ["--config_file", config, "--main_process_port", free_port(), "-m", module]
    return [sys.executable, "-m", "accelerate.commands.launch", *options, *words]


def launch_two(module: str, *words: str, code: int = 0) -> str:
    """Runs a module in two processes; their output."""
    done = subprocess.run(
        launcher(module, *words),
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert done.returncode == code, done.stdout
    return done.stdout
