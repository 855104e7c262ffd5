"""Records of which picture, model and options made each result, in a hidden file of its folder; without torch."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import try_to_load_from_cache

from hf_ext.files import hash_file, read_json_object

from .camera import DECODER_ERRORS, open_picture
from .jobs import Job, Plan

NAME = ".hf-ext-restored.jsonl"
# Files that make a model what it is.
_MODEL_FILES = (".safetensors", ".bin", ".json")
_CONFIGS = ("config.json", "adapter_config.json")
State = Literal["missing", "same", "ours", "foreign"]


class Records:
    """The records of a folder of results, for a model as [`identify_model`] has it and all options that count."""

    def __init__(self, folder: Path, model: str, options: dict[str, Any]):
        self.file = folder / NAME
        self.folder, self._resolved = folder, os.path.realpath(folder)
        self.recipe = json.dumps([model, options], sort_keys=True)
        # Hashes of what made each result, and of the result.
        self.found = _read(self.file)

    def state(self, job: Job) -> State:
        """Tells apart: nothing, the same, another one of ours, which may be damaged, and an unknown file."""
        assert job.out is not None
        if not job.out.exists():
            return "missing"
        if not job.out.is_file():
            return "foreign"
        records, content = self.found.get(self._name(job.out), []), hash_file(job.out)
        if any(recorded == content for _, recorded in records):
            return "same" if (self._made_by(job), content) in records else "ours"
        # Somebody's file may be broken too: a result that was cut off is one that a record names, or empty.
        cut_off = (bool(records) or not job.out.stat().st_size) and not is_whole(job.out)
        return "ours" if cut_off else "foreign"

    def is_done(self, job: Job) -> bool:
        """True where another command has made the result since the jobs were chosen."""
        if job.replace or job.out is None or not job.out.exists():
            return False
        self.found = _read(self.file)
        return self.state(job) == "same"

    def is_result(self, path: Path) -> bool:
        """True for a file that this command wrote and nobody changed since."""
        if not self.found:
            return False
        with suppress(ValueError):
            name = Path(os.path.realpath(path)).relative_to(self._resolved).as_posix()
            recorded = {content for _, content in self.found.get(name, [])}
            return bool(recorded) and path.is_file() and hash_file(path) in recorded
        return False

    def add(self, job: Job, data: bytes) -> None:
        """Records a result that is about to be written: no kill leaves a result without a record."""
        # Lines of several processes do not mix: each is one short write.
        assert job.out is not None
        record = {"made_by": self._made_by(job), "content": hashlib.sha256(data).hexdigest()}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps({"result": self._name(job.out), **record}) + "\n")

    def _name(self, result: Path) -> str:
        return result.relative_to(self.folder).as_posix()

    def _made_by(self, job: Job) -> str:
        picture = hashlib.sha256(job.source).hexdigest() if isinstance(job.source, bytes) else hash_file(job.source)
        return hashlib.sha256(f"{picture} {self.recipe}".encode()).hexdigest()


def choose_jobs(plan: Plan, records: Records | None, overwrite: bool) -> tuple[Plan, list[Job]]:
    """The jobs of a plan that are not done, and the plan without those whose result would replace a foreign file."""
    jobs, to_do, refused = list[Job](), list[Job](), dict(plan.refused)
    for job in plan.jobs:
        state: State = "missing"
        if records is not None and job.out is not None and job.out.exists():
            state = "ours" if overwrite and job.out.is_file() else records.state(job)
        if state == "foreign":
            told = f"{job.name}: {job.out} exists, and was not written by this command or was changed since"
            refused[job.name] = f"{told}; move it, or give --overwrite to replace it if it is a file."
            continue
        jobs.append(job)
        if state != "same":
            to_do.append(job._replace(replace=state != "missing"))
    return plan._replace(jobs=jobs, refused=refused), to_do


def identify_model(source: str) -> str:
    """A folder's model by what is in its files, a Hub's by name and commit in the cache; an adapter with its base."""
    folder, found = Path(source), source
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.suffix in _MODEL_FILES and path.is_file())
        lines = (f"{path.relative_to(folder).as_posix()} {hash_file(path)}" for path in files)
        found = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    else:
        name, _, revision = source.partition("@")
        for config in _CONFIGS:
            if isinstance(cached := try_to_load_from_cache(name, config, revision=revision or None), str):
                # .../snapshots/COMMIT/config.json
                folder = Path(cached).parent
                found = f"{name}@{folder.name}"
    base = read_json_object(folder / _CONFIGS[1], optional=True).get("base_model_name_or_path")
    return f"{found} on {identify_model(base)}" if base and base != source else found


def is_whole(path: Path) -> bool:
    """Tells a picture that can be decoded to its end; one that is too large for the memory passes for it."""
    data = path.read_bytes()
    # Pillow reads these without their last bytes; a BMP tells its length.
    png, gif, bmp = b"IEND\xaeB`\x82" in data, b"\0;" in data, int.from_bytes(data[2:6], "little") <= len(data)
    if not {b"\x89P": png, b"GI": gif, b"BM": bmp}.get(data[:2], True):
        return False
    try:
        with suppress(MemoryError), open_picture(path) as image:
            for number in range(getattr(image, "n_frames", 1)):
                image.seek(number)
                image.load()
    except DECODER_ERRORS:
        return False
    return True


def _read(file: Path) -> dict[str, list[tuple[str, str]]]:
    """The records of a file by result; of a line that a killed process cut off, what a later one added behind it."""
    found: dict[str, list[tuple[str, str]]] = {}
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):
            values = json.loads(line[max(0, line.rfind('{"result": ')) :])
            record = str(values["made_by"]), str(values["content"])
            found.setdefault(str(values["result"]), []).append(record)
    return found
