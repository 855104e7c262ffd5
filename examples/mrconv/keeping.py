"""What the study had reached, for the next machine: results/reached.zip, small enough to be committed.

It has the runs on spoken digits that go on, a megabyte each with the state that they resume from, and of all others
what was measured: those on pictures are larger, and begin anew. Paths in it are relative to the study's folder.
"""

import json
import zipfile
from pathlib import Path

from measuring import choose_rate
from runs import COMPARISONS, MARKS, candidates, find_mark

from hf_ext.files import read_json, whole_file

KEPT = Path(__file__).resolve().parent / "results" / "reached.zip"
SECONDS = "core_seconds.json"
# Comparisons whose runs are small.
RESUMED = ("digits",)
# Made again by whoever needs them.
LEFT_OUT = {".py", ".png", ".lock"}


def find_open_runs(study: Path, data: dict[str, str]) -> set[str]:
    """Runs that go on: all candidates of a model until its rate is chosen, then the chosen one; no ablation."""
    found = set()
    for comparison, details in COMPARISONS.items():
        for model in details.models:
            runs = candidates(comparison, model)
            if all(find_mark(study, run, MARKS[comparison][0]).is_dir() for run in runs):
                runs = [choose_rate(study, data, comparison, model)]
            found |= {run.name for run in runs}
    return found


def keep(study: Path, data: dict[str, str], target: Path = KEPT) -> None:
    """Writes what the next machine goes on from, once all that was reached is scored."""
    files = [*(study / "marks").rglob("*.json")]
    left_open = find_open_runs(study, data)
    resumed = {name for name in left_open if name.startswith(tuple(f"{comparison}-" for comparison in RESUMED))}
    # What begins anew has used nothing.
    used = {name: value for name, value in read_json(study / SECONDS).items() if name not in left_open - resumed}
    for name in sorted(resumed):
        files += [path for path in (study / "runs" / name).rglob("*") if path.is_file()]
    with whole_file(target) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            if not LEFT_OUT & {path.suffix, path.name}:
                archive.write(path, path.relative_to(study).as_posix())
        archive.writestr(SECONDS, json.dumps(used))


def bring_back(study: Path, source: Path = KEPT) -> None:
    """Lays out what was kept, where nothing has run yet."""
    if source.is_file() and not (study / SECONDS).is_file():
        with zipfile.ZipFile(source) as archive:
            # The file that says that all is there comes last.
            seconds, *others = sorted(archive.namelist(), key=lambda name: name != SECONDS)
            archive.extractall(study, others)
            archive.extract(seconds, study)
