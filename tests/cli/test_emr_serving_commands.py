"""hf-ext emr extract-lora and serve."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hf_ext_cli.main import main
from tests.emr.use_testing import merge_berts


def run(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_berts(tmp_path_factory.mktemp("berts"))


def test_extract_lora_of_a_task_and_of_a_fine_tune(merged: Path, tmp_path: Path):
    text = run("emr", "extract-lora", merged, "five", tmp_path / "five", "--rank", "4").stdout
    assert "written: 13 matrices of rank 4, error 0.6" in text and "vLLM: does not read modules" in text
    found = json.loads(run("emr", "extract-lora", merged.parent / "two", tmp_path / "two", "--base",
                           merged.parent / "base", "--error", "0.5", "--lora-only", "--json").stdout)  # fmt: skip
    assert found == {"path": str(tmp_path / "two"), **json.loads((tmp_path / "two" / "report.json").read_text())}
    assert found["error_of_matrices"] <= 0.5 < found["error"] and found["vllm"]["max_lora_rank"] == 8
    text = run("emr", "extract-lora", merged, "five", tmp_path / "only", "--rank", "1", "--lora-only").stdout
    assert "left out: classifier.weight (new with the task)" in text and "more, which report.json names" in text
    assert "vLLM: --max-lora-rank 1" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{x}", "five", "{x}-out"], "Give one of --rank and --error"),
        (["{x}", "five", "{x}-out", "--rank", "1", "--error", "0.1"], "Give one of --rank and --error"),
        (["{x}", "{x}-out", "--rank", "1"], "Missing option --base"),
        (["{x}", "--rank", "1"], "Expected ARTIFACT TASK OUT"),
        (["{x}", "six", "{x}-out", "--rank", "1"], "there is no task 'six'"),
        (["nowhere/at/all", "five", "{x}-out", "--rank", "1"], "nowhere/at/all: no such folder"),
    ],
)
def test_extract_lora_refuses_in_words(merged: Path, words: list[str], message: str):
    result = run("emr", "extract-lora", *(word.format(x=merged) for word in words), code=2)
    assert message in result.stderr and "Traceback" not in result.output
    assert not merged.with_name("merged-out").exists()


def test_serve_tells_its_address_and_its_models(merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    from starlette.testclient import TestClient

    def ask(self: Any, sockets: Any) -> None:
        """Stands in for the loop of the server: one client asks, and somebody presses Ctrl-C."""
        with TestClient(self.config.app) as client:
            body = {"model": "five", "input": "a b"}
            assert client.post("/v1/classify", json=body).status_code == 401
            found = client.post("/v1/classify", json=body, headers={"Authorization": "Bearer secret"})
            assert found.json()["data"][0]["num_classes"] == 5
        assert len(sockets) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn.Server, "run", ask)
    (tmp_path / "token").write_text("secret\n")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        options = ("--port", "0", "--task", "five", "--token-file", tmp_path / "token")
        text = run("emr", "serve", merged, *options).stdout
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert re.fullmatch(r"Serving \S+ at http://127\.0\.0\.1:\d+/v1; Ctrl-C .*\n  five  classification\n", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", "0.0.0.0", "--task", "two"), "host '0.0.0.0' is not loopback: set a token"),
        (("--task", "six"), "there is no task 'six'"),
        ((), "task 'plain' is a BertModel, which neither classifies, generates nor restores"),
        (("--task", "two", "--device", "nothing"), "cannot be loaded"),
    ],
)
def test_serve_refuses_in_words(merged: Path, options: tuple[str, ...], message: str):
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        result = run("emr", "serve", merged, "--port", "0", *options, code=2)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert message in result.stderr and "Traceback" not in result.output


@pytest.mark.slow
def test_serve_as_a_process_answers_and_ends_with_sigterm(merged: Path):
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    command = [sys.executable, "-m", "hf_ext_cli.main", "emr", "serve", str(merged), "--port", "0", "--task", "two"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stderr is not None
        address = re.search(r"http://\S+/v1", server.stdout.readline())
        assert address is not None
        with urllib.request.urlopen(f"{address[0]}/models") as response:
            assert [model["id"] for model in json.load(response)["data"]] == ["two"]
        server.terminate()
        assert server.wait(60) == 0 and "Traceback" not in server.stderr.read()
