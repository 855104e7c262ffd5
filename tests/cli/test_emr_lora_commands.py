"""hf-ext emr extract-lora."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.emr.use_testing import merge_berts
from tests.kit.command_line import run


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_berts(tmp_path_factory.mktemp("berts"))


def test_extract_lora_of_a_task_and_of_a_fine_tune(merged: Path, tmp_path: Path):
    text = run("emr", "extract-lora", merged, "five", tmp_path / "five", "--rank", "4").stdout
    assert "written: 13 matrices of rank 4, error 0.6" in text
    found = json.loads(run("emr", "extract-lora", merged.parent / "two", tmp_path / "two", "--base",
                           merged.parent / "base", "--error", "0.5", "--lora-only", "--json").stdout)  # fmt: skip
    assert found == {"path": str(tmp_path / "two"), **json.loads((tmp_path / "two" / "report.json").read_text())}
    assert found["error_of_matrices"] <= 0.5 < found["error"]
    text = run("emr", "extract-lora", merged, "five", tmp_path / "only", "--rank", "1", "--lora-only").stdout
    assert "left out: classifier.weight (new with the task)" in text and "more, which report.json names" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{x}", "five", "{x}-out"], "Give either --rank or --error"),
        (["{x}", "five", "{x}-out", "--rank", "1", "--error", "0.1"], "Give either --rank or --error"),
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
