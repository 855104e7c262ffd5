"""Writes .gpu/, what `make gpu` needs on a machine with a GPU and no network: wheels, small data, and their LOCK.

    make gpu-bundle [DATA=folder]

Wheels are for Python 3.12 on x86-64 Linux, in the versions that are installed here, and come from pip's configured
index; torch and what else is large must be there. Our own wheel is built from the tree. DATA is the folder that
`make gpu DATA=...` takes; of its photographs as many are copied as fit. It all stays under 48 MiB.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from parts import write_json
from run import ROOT, source_state

FOLDER = ROOT / ".gpu"
LIMIT = 48 * 2**20
PYTHON = "3.12"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
# What such a machine lacks, or may have too old: all small. The last group are libraries that these need.
BRING = (
    *("transformers", "diffusers", "datasets", "evaluate", "peft", "accelerate", "huggingface_hub", "hf-xet"),
    *("pathspec", "h11", "filelock", "click", "tifffile", "numpngw"),
    *("httpx2", "httpcore2", "truststore", "anyio", "idna", "dill", "multiprocess", "xxhash", "fsspec", "regex"),
    *("starlette", "uvicorn"),  # of the tests
    *("importlib_metadata", "lazy-importer", "lazy-loader", "zipp", "typing-extensions", "tokenizers"),
)


def download_wheels(folder: Path) -> None:
    """Wheels of what is brought, by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *(f"{name}=={version(name)}" for name in BRING)], check=True)


def build_wheel(folder: Path, root: Path) -> None:
    """Our own, from the tree and without the released models; setuptools would take up what an earlier build left."""
    shutil.rmtree(root / "build", ignore_errors=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    without = {**os.environ, "HF_EXT_WITHOUT_MODELS": "1"}
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL, env=without)


def size(files: list[Path]) -> int:
    """Bytes of files."""
    return sum(file.stat().st_size for file in files)


def copy_data(source: Path, folder: Path, room: int) -> None:
    """CIFAR-10 whole, then every n-th photograph, with the least n that fits."""
    chosen = sorted((source / "cifar10").glob("*.parquet"))
    room -= size(chosen)
    photos = sorted((source / "bsds500").glob("t*/*.jpg"))
    steps = (step for step in range(1, len(photos) + 1) if size(photos[::step]) <= room)
    chosen += photos[:: next(steps, len(photos) + 1)]
    for file in chosen:
        target = folder / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def write_lock(folder: Path, root: Path) -> None:
    """Commit of the code, and size and hash of every file."""
    files = {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }
    content = {**source_state(root), "python": PYTHON, "files": files}
    write_json(folder / "LOCK", content)


def bundle(folder: Path, data: str, limit: int = LIMIT, root: Path = ROOT) -> int:
    """Makes the folder anew; its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    build_wheel(wheels, root)
    download_wheels(wheels)
    room = limit - size(list(wheels.iterdir()))
    if data:
        copy_data(Path(data).resolve(), folder / "data", room - 2**20)
    write_lock(folder, root)
    taken = size([path for path in folder.rglob("*") if path.is_file()])
    if taken > limit:
        raise SystemExit(f"{folder} has {taken / 2**20:.1f} MiB; {limit >> 20} are allowed: bring less.")
    return taken


COMMANDS = """On the machine with the GPU, in the copy of this tree:

  python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target .gpu/site .gpu/wheels/*.whl
  PYTHONPATH=$PWD/.gpu/site make gpu PY=python3{data}
  PYTHONPATH=$PWD/.gpu/site:$PWD python3 -P -m pytest -o pythonpath=examples/mrconv/data -m gpu tests

The installed wheel comes before the tree on the path: `hf_ext.pipelines` exists only in the wheel.

Where a command may run for minutes only, PART=name,name and LIMIT=seconds of a part keep to them.
What comes back, with the states of the trainings, in files of at most 15 MiB, and how it gets into this tree:

  tar czf - examples/benchmarks/results/gpu | split -b 15m - gpu-results.tar.gz.
  cat gpu-results.tar.gz.* | tar xzf -

A later visit goes on where examples/benchmarks/results/gpu/state, which git ignores, lies there too.
"""


def main() -> None:
    """Writes the bundle and says how to use it."""
    data = os.environ.get("DATA", "")
    taken = bundle(FOLDER, data)
    count = len(json.loads((FOLDER / "LOCK").read_text(encoding="utf-8"))["files"])
    print(f"{FOLDER}: {count} files, {taken / 2**20:.1f} MiB\n")
    print(COMMANDS.format(data=" DATA=$PWD/.gpu/data" if data else ""))


if __name__ == "__main__":
    main()
