"""
Processes of Python that start with torch imported: forks of a process that waits with it.

The import of torch takes more processor time than all else that most tests do in processes of their own; what the
Hugging Face libraries import beside it takes a third of the rest. Nothing that the waiting process has imported reads
the environment of the Hugging Face libraries, and none of these is among it.
"""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_WAITING = """
import json, os, signal, sys
import scipy.stats, torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp
import torch.distributed.tensor, torch.export, torch.nn.attention.flex_attention
import filelock, fsspec, httpx2, jinja2.ext, jinja2.sandbox, pandas, PIL.Image, psutil, pyarrow.dataset, regex
import requests, safetensors.torch, xml.etree.ElementTree, yaml
early = {"accelerate", "datasets", "diffusers", "hf_ext", "huggingface_hub", "peft", "transformers"} & set(sys.modules)
assert not early, f"{early} were imported before the environment of the process is known"

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

# What follows happens in the fork.
signal.alarm(job["timeout"])
for number, (name, mode) in enumerate([(os.devnull, "rb"), (job["stdout"], "wb"), (job["stderr"], "wb")]):
    with open(name, mode) as file:
        os.dup2(file.fileno(), number)
os.chdir(job["cwd"])
os.environ.clear()
os.environ.update(job["env"])
sys.argv = ["-c", *job["words"]]
exec(compile(job["script"], "<string>", "exec"))
"""


@cache
def _waiting() -> subprocess.Popen[str]:
    """The process that waits, with one thread for torch, until this one ends."""
    # -E: PYTHONPATH and the like are not for the forks.
    process = subprocess.Popen(
        [sys.executable, "-E", "-c", _WAITING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    @atexit.register
    def end() -> None:
        process.communicate()

    return process


def run(
    command: Sequence[str], *, env: Mapping[str, str], cwd: str | Path, timeout: int = 300, **_: Any
) -> subprocess.CompletedProcess[str]:
    """
    As `subprocess.run(command, capture_output=True, text=True)` of `[sys.executable, "-c", script, *words]`. Of the
    environment, nothing counts that Python itself reads when it starts; at the timeout a signal ends the process.
    """
    python, option, script, *words = command
    assert (python, option) == (sys.executable, "-c"), command
    waiting = _waiting()
    assert waiting.stdin is not None and waiting.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        texts = {name: f"{folder}/{name}" for name in ("stdout", "stderr")}
        job = {"script": script, "words": words, "env": dict(env), "cwd": str(cwd), "timeout": timeout, **texts}
        waiting.stdin.write(json.dumps(job) + "\n")
        waiting.stdin.flush()
        code = int(waiting.stdout.readline())
        printed = {name: Path(path).read_text(encoding="utf-8") for name, path in texts.items()}
    return subprocess.CompletedProcess(command, code, **printed)
