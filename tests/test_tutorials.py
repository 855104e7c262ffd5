"""The tutorials run from top to bottom, in an empty folder, without a network."""

import json
import os
import re

import pytest

from tests.kit.document_stage import ROOT
from tests.kit.studies import module_loader

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
load = module_loader(ROOT / "docs")
MACHINE_PATHS = re.compile("/(home|root|tmp|work)" + "/")


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_keeps_what_it_printed(tutorial):
    cells = [cell for cell in json.loads(tutorial.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs and all(cell["execution_count"] for cell in cells), "python docs/run_tutorials.py runs it anew"
    assert not MACHINE_PATHS.search("".join("".join(output.get("text", [])) for output in outputs))


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_begins_with_its_result(tutorial):
    """Each number of the result is printed below, as it is or as a share of 1, up to rounding."""
    first, *cells = json.loads(tutorial.read_text("utf-8"))["cells"]
    result = re.search(r"\*\*Result:\*\* .*?\n\n", "".join(first["source"]), re.DOTALL)
    assert result, "the first cell says **Result:** what comes out"
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    printed = [[output.get("text"), output.get("data", {}).get("text/plain")] for output in outputs]
    shown = json.dumps([printed, [cell["source"] for cell in cells]])
    found = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", shown)]
    for text in re.findall(r"\d+(?:\.\d+)?", result[0]):
        half = 0.5001 * 10.0 ** -len(text.partition(".")[2])
        assert any(abs(float(text) - scale * number) <= half for number in found for scale in (1, 100)), text


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs(load, tutorial, tmp_path, monkeypatch):
    pytest.importorskip("nbclient", reason="the extra docs is not installed")
    # Put back afterwards: the run sets them.
    for name in ("PATH", "HF_HOME"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    module = load("run_tutorials")
    notebook = module.execute(tutorial, str(tmp_path))
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    # `!command` shows a failure and goes on; "error" is also the head of a column.
    kept = [output for cell in cells for output in cell.outputs if module.clear(output, str(tmp_path))]
    shown = "".join(output.get("text", "") for output in kept)
    assert not re.search(r"^(Usage|Error|\w*Error|Traceback)\b|not found", shown, re.MULTILINE), shown
