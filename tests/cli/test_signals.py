"""Commands that a signal ends: one line, the exit code of shells, and nothing half written or left behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from transformers import BertModel

from tests.hub.published import save_bert
from tests.hub.unfaithful_hub import UnfaithfulHub
from tests.kit.hub import client_environment

IMPORTING = """
import signal
import time
import click
from hf_ext.cli.signals import ended_by_signals

# A suite in the background of a shell hands on that this signal is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with ended_by_signals():
        import slow_library
        print(slow_library.DONE, flush=True)
        {then}
except click.exceptions.Exit as end:
    print(end.exit_code, flush=True)
"""
LIBRARY = """
import signal

signal.raise_signal(signal.{name})
DONE = "imported"
"""


# Some commands come to their own end before the signal comes again.
@pytest.mark.parametrize("then", ["time.sleep(60)", "pass", "raise ValueError"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_waits_for_the_import_that_it_meets(tmp_path, name, then):
    (tmp_path / "slow_library.py").write_text(LIBRARY.format(name=name))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-c", IMPORTING.format(then=then)]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout == f"imported\n{128 + getattr(signal, name)}\n", run.stderr
    assert run.stderr == f"Error: interrupted by {name}.\n"


def wait_until(done, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def slow_hub(hub):
    """A Hub that takes no large file before the test ends."""
    proxy, over = UnfaithfulHub(hub.url), threading.Event()

    def rule(method, path, body, forward):
        if method == "PUT":
            over.wait(120)
        reply = forward(body)
        # Files are sent here too.
        return reply._replace(body=reply.body.replace(hub.url.encode(), proxy.url.encode()))

    proxy.rule = rule
    yield proxy
    over.set()
    proxy.stop()


def end_by(name: str, words: list, environment: dict[str, str], ready) -> str:
    """Signals a command once `ready` says so, and has it end with the code of the signal; what it wrote."""
    command = [Path(sys.executable).with_name("hf-ext"), *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        ready(run)
        run.send_signal(getattr(signal, name))
        _, told = run.communicate(timeout=60)
    assert run.returncode == 128 + getattr(signal, name), told
    assert "Traceback" not in told and "Aborted" not in told
    return told


def find_errors(told: str) -> list[str]:
    return [line for line in told.splitlines() if line.startswith("Error")]


# One file is sent by the main thread; several are by threads, which nobody can interrupt.
ENDS = [("SIGINT", "a file"), ("SIGTERM", "a file"), ("SIGTERM", "files"), ("SIGTERM", "the check")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "where"), ENDS)
def test_a_push_that_a_signal_ends_leaves_nothing(slow_hub, tmp_path, name, where):
    bert = BertModel.from_pretrained(save_bert(tmp_path / "bert"))
    bert.save_pretrained(tmp_path / "model", max_shard_size="1KB" if where == "files" else "1GB")
    (tmp_path / "temporary").mkdir()
    words = ["push", tmp_path / "model", "me/bert", "--endpoint", slow_hub.url]
    words += [] if where == "the check" else ["--no-check"]
    environment = client_environment(slow_hub.url, tmp_path / "home") | {"TMPDIR": str(tmp_path / "temporary")}
    family: list[psutil.Process] = []

    def ready(push):
        probes = psutil.Process(push.pid).children
        wait_until(lambda: probes() if where == "the check" else "PUT" in {method for method, *_ in slow_hub.asked})
        family.extend(probes())

    told = end_by(name, words, environment, ready)
    assert find_errors(told) == [f"Error: interrupted by {name}; the copy is removed. Push again."]
    assert list((tmp_path / "temporary").iterdir()) == [] and not psutil.wait_procs(family, 30)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_restoring_that_a_signal_ends_leaves_whole_pictures(tmp_path, name):
    (tmp_path / "photos").mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(256, size=(60, 96, 96, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    out = tmp_path / "out"

    def ready(restore):
        wait_until(lambda: out.is_dir() and [*out.glob("*.png")])

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    told = end_by(name, ["restore", "denoise-color", tmp_path / "photos", "--out", out], environment, ready)
    assert find_errors(told) == [f"Error: interrupted by {name}."]
    # Beside them lies the list of those that are done.
    files = [file for file in out.iterdir() if file.suffix != ".jsonl"]
    assert 0 < len(files) < 60
    for file in files:
        with Image.open(file) as picture:
            assert picture.size == (96, 96)
            picture.load()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_merge_that_waits_for_a_hub_ends_at_once(tmp_path, name):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = client_environment(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "home")
        silent.settimeout(120)
        kept: list[socket.socket] = []

        def ready(merge):
            # Its question is read and never answered.
            kept.append(silent.accept()[0])
            kept[0].recv(1)

        words = ["merge", "--base", "me/base", "--task", "a=me/a", "--task", "b=me/b", "--out", tmp_path / "out"]
        told = end_by(name, words, environment, ready)
        kept[0].close()
    assert find_errors(told) == [f"Error: interrupted by {name}."] and not (tmp_path / "out").exists()


DECODER = """
import os, time
from hf_ext.answers import limits

def read_image(*_):
    print(os.getpid(), flush=True)
    time.sleep(600)

limits.read_image = read_image
limits.Limits().read(b"a picture")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a server decodes in a process of its own on Linux only")
def test_a_decoder_ends_with_its_server(tmp_path):
    server = subprocess.Popen([sys.executable, "-c", DECODER], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        decoder = psutil.Process(int(server.stdout.readline()))
        assert decoder.ppid() == server.pid
    finally:
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        server.stdout.close()
    wait_until(lambda: not decoder.is_running() or decoder.status() == psutil.STATUS_ZOMBIE, 30)
