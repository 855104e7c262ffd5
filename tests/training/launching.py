"""Processes that the tests start."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(**changes: str) -> dict[str, str]:
    """One thread each and no GPU, so that results are bit-equal."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", **changes}


def launch_two(module: str, *words: str, code: int = 0) -> str:
    """
    Runs a module in two processes, as `examples/accelerate/ddp_2_cpu.yaml` says; their output.

    `accelerate launch --cpu --num_processes 2` would start a single one without saying so.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = ROOT / "examples" / "accelerate" / "ddp_2_cpu.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    done = subprocess.run(
        [*launcher, "--main_process_port", str(port), "-m", module, *words],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert done.returncode == code, done.stdout
    return done.stdout
