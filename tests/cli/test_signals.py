"""What signals leave: nothing of a push that one ends, and no decoder of a server that is killed."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from transformers import BertModel

from tests.hub.published import save_bert
from tests.hub.unfaithful_hub import UnfaithfulHub
from tests.kit.hub import client_environment

pytestmark = pytest.mark.slow


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


# One file is sent by the main thread; several are by threads, which nobody can interrupt.
ENDS = [("SIGINT", "a file"), ("SIGTERM", "a file"), ("SIGTERM", "files"), ("SIGTERM", "the check")]


@pytest.mark.parametrize(("name", "where"), ENDS)
def test_a_push_that_a_signal_ends_leaves_nothing(slow_hub, tmp_path, name, where):
    bert = BertModel.from_pretrained(save_bert(tmp_path / "bert"))
    bert.save_pretrained(tmp_path / "model", max_shard_size="1KB" if where == "files" else "1GB")
    (tmp_path / "temporary").mkdir()
    words = ["push", tmp_path / "model", "me/bert", "--endpoint", slow_hub.url]
    words += [] if where == "the check" else ["--no-check"]
    environment = client_environment(slow_hub.url, tmp_path / "home") | {"TMPDIR": str(tmp_path / "temporary")}
    command = [Path(sys.executable).with_name("hf-ext"), *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as push:
        probes = psutil.Process(push.pid).children
        wait_until(lambda: probes() if where == "the check" else "PUT" in {method for method, *_ in slow_hub.asked})
        family = probes()
        push.send_signal(getattr(signal, name))
        _, told = push.communicate(timeout=60)
    assert push.returncode == 128 + getattr(signal, name), told
    assert [line for line in told.splitlines() if line.startswith("Error")] == [
        f"Error: interrupted by {name}; the copy is removed. Push again."
    ]
    assert "Traceback" not in told and list((tmp_path / "temporary").iterdir()) == []
    assert not psutil.wait_procs(family, 30)[1]


DECODER = """
import os, time
from hf_ext.answers import limits

def read_image(*_):
    print(os.getpid(), flush=True)
    time.sleep(600)

limits.read_image = read_image
limits.Limits().read(b"a picture")
"""


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
