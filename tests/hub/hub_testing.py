"""Helpers for tests that talk to the embedded Hub; import them as `from tests.hub.hub_testing import ...`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def client_environment(url: str, home: str | Path, token: str | None = None) -> dict[str, str]:
    """
    Environment of a process whose Hugging Face libraries use the Hub at `url` and nothing else.

    The libraries read it when they are imported, which is why a test needs a process of its own.

    Args:
        url (`str`): `EmbeddedHub.url`.
        home (`str` or `Path`): Folder for caches and tokens, inside the test's temporary folder.
        token (`str`, *optional*): What the client sends; none by default, whatever the developer's environment holds.

    Returns:
        `dict[str, str]`: For `subprocess.run(..., env=...)`.
    """
    hidden = ("HF_", "HUGGING", "TRANSFORMERS_", "DIFFUSERS_", "PYTHONPATH", "PYTHONWARNINGS")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(hidden) and not name.lower().endswith("_proxy")
    }
    environment |= {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        # Pushing through Xet would need a server for it, which the embedded Hub is not.
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "OMP_NUM_THREADS": "1",
    }
    return environment | ({"HF_TOKEN": token} if token else {})


def run_python(script: str, url: str, home: str | Path, *arguments: str, token: str | None = None) -> str:
    """
    Run a Python script as a client of the Hub at `url` in its own process, and require that it succeeds.

    Args:
        script (`str`): Source text; it is dedented.
        url (`str`): `EmbeddedHub.url`.
        home (`str` or `Path`): Folder for caches; also the working directory.
        *arguments (`str`): For `sys.argv[1:]`.
        token (`str`, *optional*): What the client sends.

    Returns:
        `str`: What the script printed to its standard output.

    Raises:
        AssertionError: When it failed; with everything that it printed.
    """
    Path(home).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env=client_environment(url, home, token),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
