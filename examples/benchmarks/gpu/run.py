"""One command for a GPU that is at hand for minutes: runs the parts, keeps what they measured, writes one table.

    make gpu                      # all parts, on the GPU
    make gpu PART=semanir,dit     # some
    make gpu DEVICE=cpu           # the rehearsal: all parts on tiny sizes
    make gpu LIMIT=150            # seconds of a part; 480 by default

Each part has a process of its own and at most `--limit` seconds. What it measured lies in RESULTS/PART.json, whole
after every case. A part that is complete for this commit and device is skipped; one that is not, or has failed, goes
on with the same command. Exit code: 0, 1 if a part failed, 2 if there is nothing to run on.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
from timing import installed_versions, markdown_table, write_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LIBRARIES = ("torch", "triton", "transformers", "diffusers", "accelerate", "peft", "numba", "hf-ext")
PARTS = {name: HERE / f"{name}.py" for name in ("semanir", "mrconv", "dit")}
REHEARSAL = ROOT / "scratch" / "gpu"
# What decides a result. Committing results, or a sentence, makes none of them old.
SOURCES = ("hf_ext", "pipelines", "pyproject.toml", "examples/*.py")


def source_state() -> dict[str, Any]:
    """Last commit of the code, and whether it was changed since; where there is no git, what COMMIT says."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", *words, "--", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (("log", "-1", "--format=%H"), ("status", "--porcelain"))
        )
        return {"commit": commit, "dirty": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        commit = os.environ.get("COMMIT", "")
        return {"commit": commit or "unknown", "dirty": not commit}


def describe(device: str) -> dict[str, Any]:
    """Device, versions and state of the code: the head of every result."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()}), tiny sizes"
    versions = installed_versions(*LIBRARIES) | ({"cuda": torch.version.cuda} if device == "cuda" else {})
    return {"device": name, "versions": versions, **source_state()}


def begin(path: Path, head: dict[str, Any]) -> dict[str, Any]:
    """The part's content under this head; rows of another commit or device, or of changed code, go."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    same = not head["dirty"] and all(found.get(name) == head[name] for name in ("device", "commit", "dirty"))
    return found if same else {**head, "rows": [], "seconds": 0.0, "complete": False}


def start(script: Path, words: argparse.Namespace, path: Path) -> tuple[int | None, str]:
    """Runs a part's process; its exit code, None if it was stopped at the limit, and the end of what it wrote."""
    command = [sys.executable, str(script), "--device", words.device, "--output", str(path)]
    command += ["--tiny"] * (words.device == "cpu")
    places = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "HF_HUB_OFFLINE": "1"}
    if words.device == "cpu":
        # Tiny operations on several threads spend their time waiting for each other where cores are shared.
        environment["OMP_NUM_THREADS"] = "1"
    log = path.with_suffix(".log")
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        code = None
        try:
            code = child.wait(timeout=words.limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # With the processes that it started itself.
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")[-2000:]


def run_part(script: Path, words: argparse.Namespace, path: Path, content: dict[str, Any]) -> str:
    """Runs a part to its end or its limit; what went wrong."""
    clock = time.monotonic()
    write_json(path, {name: value for name, value in content.items() if name != "error"})
    code, tail = start(script, words, path)
    content = json.loads(path.read_text(encoding="utf-8"))
    error = "; ".join(f"{row['key']}: {row['error']}" for row in content["rows"] if "error" in row)
    if not error and code:
        error = f"ended with exit code {code} at {content.get('running')}: {tail}"
    elif not content["rows"]:
        error = f"no row within {words.limit:g} seconds: {tail}"
    content |= {"seconds": round(content["seconds"] + time.monotonic() - clock, 1), "complete": code == 0}
    write_json(path, content | ({"error": error} if error else {}))
    return error


def row_cells(row: dict[str, Any]) -> list[str]:
    """A row of the table: times in milliseconds, memory in MiB, then whatever else the row has."""
    time_cell = (
        f"{1e3 * row['median']:.3g} ({1e3 * row['min']:.3g} to {1e3 * row['max']:.3g})" if "median" in row else ""
    )
    memory = "" if row.get("bytes") is None else f"{row['bytes'] / 2**20:.1f}"
    shown = ("key", "case", "median", "min", "max", "rounds", "bytes", "dtype", "sizes")
    rest = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in row.items()}
    others = [f"{name} {value}" for name, value in rest.items() if name not in shown]
    others += [" ".join(f"{name} {value}" for name, value in row["sizes"].items())] if row.get("sizes") else []
    cells = [row["key"], row.get("dtype", ""), time_cell, memory, ", ".join(others)]
    return [" ".join(cell.split()).replace("|", "\\|")[:300] for cell in cells]


def table(results: Path) -> str:
    """Everything that lies in the folder, as Markdown."""
    lines = ["# What `make gpu` measured", ""]
    for path in sorted(results.glob("*.json")):
        part = json.loads(path.read_text(encoding="utf-8"))
        versions = ", ".join(f"{library} {version}" for library, version in part["versions"].items())
        state = "failed" if "error" in part else "complete" if part["complete"] else "not complete"
        changed = " with changes" if part["dirty"] else ""
        lines += [f"## {path.stem}: {state}", ""]
        lines += [f"{part['device']}; commit {part['commit'][:12]}{changed}; {versions}.", ""]
        header = ["case", "type", "ms, median (least to greatest)", "MiB", "more"]
        lines.append(markdown_table(header, [row_cells(row) for row in part["rows"]]))
        if "error" in part:
            lines += ["```", part["error"], "```", ""]
    return "\n".join(lines)


def main(argv: list[str] | None = None, parts: dict[str, Path] = PARTS) -> int:
    """Runs the parts that were asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="", help=f"some of {', '.join(parts)}, separated by commas; all by default")
    parser.add_argument("--device", default="", choices=("", "cpu", "cuda"))
    parser.add_argument("--results", default="", help="folder of the results")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds of a part")
    words = parser.parse_args(argv)
    names = [name for name in words.part.split(",") if name] or list(parts)
    if unknown := sorted(set(names) - set(parts)):
        parser.error(f"unknown part {', '.join(unknown)}; allowed: {', '.join(parts)}")
    if words.device != "cpu" and not torch.cuda.is_available():
        print("There is no CUDA device here. `make gpu DEVICE=cpu` is the rehearsal: tiny sizes on the CPU.")
        return 2
    words.device = words.device or "cuda"
    default = REHEARSAL if words.device == "cpu" else HERE.parent / "results" / "gpu"
    results, head = Path(words.results).resolve() if words.results else default, describe(words.device)
    print(f"{head['device']}, commit {head['commit'][:12]}{' with changes' if head['dirty'] else ''}")
    print(", ".join(f"{library} {version}" for library, version in head["versions"].items()), flush=True)
    errors = []
    for name in names:
        path = results / f"{name}.json"
        content = begin(path, head)
        if content["complete"]:
            print(f"{name}: there already", flush=True)
            continue
        errors.append(run_part(parts[name], words, path, content))
        complete = json.loads(path.read_text(encoding="utf-8"))["complete"]
        state = "complete" if complete else "stopped at its limit: run it again to go on"
        print(f"{name}: {errors[-1] or state}", flush=True)
        (results / "README.md").write_text(table(results), encoding="utf-8")
    print(results / "README.md")
    return 1 if any(errors) else 0


if __name__ == "__main__":
    sys.exit(main())
