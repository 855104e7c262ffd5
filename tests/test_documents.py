"""README and documentation: links lead somewhere, commands exist, blocks run as they are written, the site builds."""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from hf_ext_cli.main import main
from tests.kit.document_stage import ROOT, make_stage
from tests.kit.hub import client_environment
from tests.kit.studies import module_loader

# `make docs` writes the first two.
GENERATED = {"options.md", "merge_methods.md"}
TABLES = "benchmark_tables.md"
PAGES = [
    "README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name not in {*GENERATED, TABLES}),
]
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>.+?) -->\n)?```(?P<language>bash|python)\n(?P<text>.*?)```", re.DOTALL)
# Commands that take fields of a YAML file as flags.
TAKE_FIELDS = {"train", "evaluate", "check", "hf_ext.training"}


@dataclass(frozen=True)
class Block:
    """A block of code of a page; `why` it is not run, if it is not."""

    language: str
    text: str
    why: str | None


def read_blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(found["language"], found["text"], found["why"]) for found in BLOCK.finditer(text)]


def read_commands(page: str) -> list[list[str]]:
    """The words of each `hf-ext` command of a page, in its blocks and in the middle of sentences."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for block in read_blocks(page) if block.language == "bash" for line in block.text.splitlines()]
    lines += re.findall(r"`(hf-ext [^`]+)`", text)
    found = [re.search(r"(?:hf-ext|hf_ext_cli\.main|LAUNCH) ([^#|>&]+)", line.strip()) for line in lines]
    return [match[1].split() for match in found if match]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page):
    for words in read_commands(page):
        command, context = main, click.Context(main)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name = words.pop(0)
            if not re.fullmatch(r"[a-z-]+", name):
                break  # `hf-ext COMMAND --help`
            command = command.get_command(context, name)
            assert command is not None, f"{page}: there is no command {name}"
        parameters = command.get_params(click.Context(command, parent=context))
        options = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
        for word in words:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag != "--help" and command.name not in TAKE_FIELDS:
                # The command finds an option of the merge method that it names later.
                of_method = "--method" in words and flag.removeprefix("--").replace("-", "_").isidentifier()
                assert flag in options or of_method, f"{page}: {command.name} has no {flag}"


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles_and_says_why_a_block_is_not_run(page):
    for block in read_blocks(page):
        if block.language == "python":
            compile(block.text, page, "exec")
        assert block.why is None or len(block.why) > 10


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", f"docs/{TABLES}"])
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        if not target.startswith("http") and Path(target).name not in GENERATED:
            assert (path.parent / target).exists(), f"{page}: {target}"


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 550
    for block in read_blocks("README.md"):
        assert block.why or len(block.text.strip().splitlines()) <= 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if any(not block.why for block in read_blocks(page))])
def test_blocks_run_as_they_are_written(page, tmp_path, url):
    stage = tmp_path / "stage"
    make_stage(stage, tmp_path / "models", url)
    environment = client_environment(url, tmp_path / "home")
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment["MPLBACKEND"] = "agg"
    for block in read_blocks(page):
        if block.why:
            continue
        python, bash = [sys.executable, "-W", "ignore", "-c"], ["bash", "-euo", "pipefail", "-c"]
        shell = bash if block.language == "bash" else python
        done = subprocess.run([*shell, block.text], cwd=stage, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{page}\n{block.text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    options = ["-b", "html", "-W", "--keep-going", "-q"]
    command = [sys.executable, "-m", "sphinx", *options, ROOT / "docs", tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "EMRModel" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")


def test_messages_in_troubleshooting_are_those_of_the_code():
    """Each message of the page, in parts between the dots, is a string of ours or, where named, of transformers."""
    said = ["has model type … but Transformers does not recognize this architecture"]
    for path in [*ROOT.glob("hf_ext/**/*.py"), *ROOT.glob("pipelines/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                said.append("…".join(part.value for part in node.values if isinstance(part, ast.Constant)))
    rows = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8").splitlines()
    messages = [text for row in rows if row.startswith("| `") for text in re.findall("`(.*?)`", row.split("|")[1])]
    parts = {part.strip(" .?;:,()[]") for message in messages for part in message.split("…")}
    assert len(messages) > 25
    whole = "\n".join(said)
    assert not [part for part in parts if len(part) > 5 and part not in whole]


TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
load = module_loader(ROOT / "docs")
each_tutorial = pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
MACHINE_PATHS = re.compile("/(home|root|tmp|work)" + "/")


@each_tutorial
def test_a_tutorial_keeps_what_it_printed_and_begins_with_its_result(tutorial):
    """Each number of the result is printed below, as it is or as a share of 1, up to rounding."""
    first, *cells = json.loads(tutorial.read_text("utf-8"))["cells"]
    run = [cell for cell in (first, *cells) if cell["cell_type"] == "code"]
    outputs = [output for cell in run for output in cell["outputs"]]
    assert outputs and all(cell["execution_count"] for cell in run), "python docs/run_tutorials.py runs it anew"
    assert not MACHINE_PATHS.search("".join("".join(output.get("text", [])) for output in outputs))
    result = re.search(r"\*\*Result:\*\* .*?\n\n", "".join(first["source"]), re.DOTALL)
    assert result, "the first cell says **Result:** what comes out"
    printed = [[output.get("text"), output.get("data", {}).get("text/plain")] for output in outputs]
    shown = json.dumps([printed, [cell["source"] for cell in cells]])
    found = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", shown)]
    for text in re.findall(r"\d+(?:\.\d+)?", result[0]):
        half = 0.5001 * 10.0 ** -len(text.partition(".")[2])
        assert any(abs(float(text) - scale * number) <= half for number in found for scale in (1, 100)), text


@pytest.mark.slow
@each_tutorial
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
