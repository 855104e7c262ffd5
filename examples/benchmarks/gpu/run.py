"""One command for a GPU that is at hand for minutes: runs the parts, keeps what they measured, writes one table.

    make gpu                      # all parts, on the GPU
    make gpu PART=correct,emr     # some
    make gpu DEVICE=cpu           # the rehearsal: all parts on tiny sizes
    make gpu LIMIT=150            # seconds of a part; 480 by default

Each part has a process of its own and at most `--limit` seconds. What it measured lies in RESULTS/PART.json, whole
after every case. A part that is complete for this commit and device is skipped, an incomplete one goes on, one that
fails leaves its message and the others go on. Exit code: 0, 1 if a part failed, 2 if there is nothing to run on.
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
from parts import DEVICE_LOST, OK, UNFINISHED, Rows, write_json
from timing import installed_versions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LIBRARIES = ("torch", "triton", "transformers", "diffusers", "accelerate", "peft", "numba", "hf-ext")
# Of each part: the script and its words.
PARTS = {name: [f"{name}.py"] for name in ("correct", "semanir", "mrconv", "dit", "emr")}
PARTS |= {f"train-{task}": ["train.py", "--task", task] for task in ("denoise", "scifar", "cifar10")}
REHEARSAL = ROOT / "scratch" / "gpu"
# What decides a result. Committing results, or a sentence, makes none of them old.
SOURCES = ("hf_ext", "pipelines", "pyproject.toml", "examples/*.py")


def source_state(root: Path = ROOT) -> dict[str, Any]:
    """Last commit of the code, and whether it was changed since; where there is no git, what the bundle says."""
    try:
        commit, changes = (
            subprocess.run(
                ["git", *words, "--", *SOURCES], cwd=root, capture_output=True, text=True, check=True
            ).stdout.strip()
            for words in (("log", "-1", "--format=%H"), ("status", "--porcelain"))
        )
        return {"commit": commit, "dirty": bool(changes)}
    except (OSError, subprocess.CalledProcessError):
        lock = root / ".gpu" / "LOCK"
        if not lock.is_file():
            return {"commit": "unknown", "dirty": True}
        content = json.loads(lock.read_text(encoding="utf-8"))
        return {"commit": content["commit"], "dirty": content["dirty"]}


def describe(device: str, root: Path = ROOT) -> dict[str, Any]:
    """Device, versions and state of the code: the head of every result."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()}), tiny sizes"
    versions = installed_versions(*LIBRARIES) | ({"cuda": torch.version.cuda} if device == "cuda" else {})
    return {"device": name, "versions": versions, **source_state(root)}


def is_done(path: Path, head: dict[str, Any]) -> bool:
    """Tells that a result is complete, of this device and of this commit without changes."""
    if not path.is_file() or head["dirty"]:
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    return bool(found["complete"]) and all(found[name] == head[name] for name in ("device", "commit", "dirty"))


def begin(path: Path, head: dict[str, Any], keeps: bool) -> dict[str, Any]:
    """The part's file with this head; rows of another commit or device go, but for trainings, whose visits add up."""
    content: dict[str, Any] = {"rows": [], "seconds": 0.0}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        same = not head["dirty"] and all(found[name] == head[name] for name in ("device", "commit", "dirty"))
        if same or keeps:
            content = {name: found[name] for name in (*content, "running") if name in found}
    content = {**head, **content, "complete": False}
    write_json(path, content)
    return content


def start(name: str, words: argparse.Namespace, path: Path, limit: float, more: list[str]) -> tuple[int, str]:
    """Runs a part's process; its exit code, UNFINISHED if it was stopped, and the end of what it wrote."""
    script, *own = words.parts[name]
    command = [sys.executable, str(HERE / script), *own, "--device", words.device, "--output", str(path)]
    command += ["--limit", str(limit)] + ["--tiny"] * (words.device == "cpu") + more
    places = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "HF_HUB_OFFLINE": "1"}
    if words.device == "cpu":
        # Tiny operations on several threads spend their time waiting for each other where cores are shared.
        environment["OMP_NUM_THREADS"] = "1"
    log = path.with_suffix(".log")
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = UNFINISHED
        finally:
            # With the processes that it started itself.
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    return code, log.read_text(encoding="utf-8", errors="replace")[-2000:]


def run_part(name: str, words: argparse.Namespace, head: dict[str, Any]) -> str | None:
    """Runs a part to its end or its limit; what went wrong."""
    path = words.results / f"{name}.json"
    content = begin(path, head, keeps=name.startswith("train-"))
    rows, clock, more = content["rows"], time.monotonic(), []
    while True:
        before, left = rows, words.limit - (time.monotonic() - clock)
        code, tail = start(name, words, path, left, more)
        part = Rows(path)
        if code < 0 and "running" in part.content:
            part.add(part.content["running"], {"": {"error": f"the process was ended by signal {-code}"}})
            code = DEVICE_LOST
        rows = part.content["rows"]
        # A process that died, or that the device has left, is replaced, as long as each one brings something.
        if code != DEVICE_LOST or rows == before or time.monotonic() - clock > 0.9 * words.limit:
            break
        more = ["--skip_failed"]
    content = json.loads(path.read_text(encoding="utf-8"))
    failed = [f"{row['key']}: {row['error']}" for row in rows if "error" in row]
    error = "; ".join(failed)
    if not failed and code not in (OK, UNFINISHED):
        error = f"ended with exit code {code}: {tail}"
    elif not rows:
        error = f"no row within {words.limit:g} seconds: {tail}"
    content["seconds"] = round(content["seconds"] + time.monotonic() - clock, 1)
    content["complete"] = code == OK
    content |= {"error": error} if error else {}
    write_json(path, content)
    return error or None


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


def table(results: Path, parts: dict[str, list[str]]) -> str:
    """Everything that lies in the folder, as Markdown."""
    lines = ["# What `make gpu` measured", ""]
    for name in parts:
        path = results / f"{name}.json"
        if not path.is_file():
            continue
        part = json.loads(path.read_text(encoding="utf-8"))
        versions = ", ".join(f"{library} {version}" for library, version in part["versions"].items())
        state = "failed" if "error" in part else "complete" if part["complete"] else "not complete"
        changed = " with changes" if part["dirty"] else ""
        lines += [
            f"## {name}: {state}",
            "",
            f"{part['device']}; commit {part['commit'][:12]}{changed}; {versions}.",
            "",
        ]
        lines += ["| case | type | ms, median (least to greatest) | MiB | more |", "|---|---|---|---|---|"]
        lines += [f"| {' | '.join(row_cells(row))} |" for row in part["rows"]] + [""]
        if "error" in part:
            lines += ["```", part["error"], "```", ""]
    return "\n".join(lines)


def find_device(wanted: str) -> str | None:
    """The device to run on, or None with a word why not."""
    if wanted != "cpu" and not torch.cuda.is_available():
        print("There is no CUDA device here. `make gpu DEVICE=cpu` is the rehearsal: tiny sizes on the CPU.")
        return None
    return wanted or "cuda"


def main(argv: list[str] | None = None, parts: dict[str, list[str]] = PARTS, root: Path = ROOT) -> int:
    """Runs the parts that were asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="", help=f"some of {', '.join(parts)}, separated by commas; all by default")
    parser.add_argument("--device", default="", choices=("", "cpu", "cuda"))
    parser.add_argument("--results", default="", help="folder of the results")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds of a part")
    words = parser.parse_args(argv)
    words.parts = parts
    names = [name for name in words.part.split(",") if name] or list(parts)
    unknown = sorted(set(names) - set(parts))
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; allowed: {', '.join(parts)}")
    words.device = find_device(words.device)
    if words.device is None:
        return 2
    default = REHEARSAL if words.device == "cpu" else HERE.parent / "results" / "gpu"
    words.results = Path(words.results).resolve() if words.results else default
    head = describe(words.device, root)
    print(f"{head['device']}, commit {head['commit'][:12]}{' with changes' if head['dirty'] else ''}")
    print(", ".join(f"{library} {version}" for library, version in head["versions"].items()), flush=True)
    errors = {}
    for name in names:
        path = words.results / f"{name}.json"
        if is_done(path, head):
            print(f"{name}: there already", flush=True)
            continue
        clock = time.monotonic()
        errors[name] = run_part(name, words, head)
        complete = json.loads(path.read_text(encoding="utf-8"))["complete"]
        state = errors[name] or ("complete" if complete else "stopped at its limit: run it again to go on")
        print(f"{name}: {time.monotonic() - clock:.0f} s, {state}", flush=True)
        (words.results / "README.md").write_text(table(words.results, parts), encoding="utf-8")
    print(words.results / "README.md")
    return 1 if any(errors.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
