"""Runs tutorials in empty folders and keeps what they printed: `python docs/run_tutorials.py [NAME...]`.

Kept are results, pictures and what commands say; not progress bars, warnings, colours and what names this machine.
"""

import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "tutorials"
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def clear(output: dict, place: str) -> bool:
    """Takes out of an output what is of this run alone; False if nothing is left."""
    if output.get("name") == "stderr":
        return False
    if "text" in output:
        text = _COLOURS.sub("", output["text"]).replace(f"{place}/", "").replace("\r\n", "\n")
        # A bar is written over itself: what stood there last is seen.
        lines = [line.rpartition("\r")[2] for line in text.split("\n")]
        lines = [line for line in lines if not re.search(r"\d+%\|", line)]
        output["text"] = "\n".join(lines)
        return bool(output["text"].strip())
    # Pillow gives a picture twice.
    if "image/jpeg" in output.get("data", {}):
        del output["data"]["image/png"]
    return True


def execute(path: Path, place: str) -> nbformat.NotebookNode:
    """A tutorial after a run in an empty folder, with the commands of this Python's environment."""
    os.environ["HF_HOME"] = f"{place}/.home"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=800, resources={"metadata": {"path": place}}).execute()
    return notebook


def run(path: Path) -> float:
    """Runs one tutorial and writes it with its outputs; seconds that it took."""
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        notebook = execute(path, place)
        seconds = time.perf_counter() - began
    for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.outputs = [output for output in cell.outputs if clear(output, place)]
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = number
        cell.metadata = {}
    # Without the version of this Python; the site colours by the lexer.
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    nbformat.write(notebook, path)
    return seconds


def main() -> None:
    """The tutorials that were named, or all."""
    paths = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    names = sys.argv[1:] or list(paths)
    if unknown := [name for name in names if name not in paths]:
        sys.exit(f"no tutorial {', '.join(unknown)}; there are {', '.join(paths)}")
    for name in names:
        print(f"{name}: {run(paths[name]):.0f} s", flush=True)


if __name__ == "__main__":
    main()
