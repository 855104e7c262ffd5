"""Pictures of the Hub: streamed, and encoded as those that lie here, with the same resumption."""

import sys
from pathlib import Path

import datasets
import pytest
from huggingface_hub import HfApi

from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.tasks import precompute as module
from hf_ext.tasks.diffusion_latents import read_row
from hf_ext.tasks.precompute import precompute
from tests.disentangled_dit.pipeline_testing import make_vae
from tests.kit.hub import run_python
from tests.kit.models import assert_same_answers

from .diffusion_testing import pack_tars, rows_of, settings
from .test_precompute import killed, nothing_copied, write_folder

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from tests.tasks.test_precompute_hub import main
main()
"""


def write_rows(photos: Path, folder: Path, files: int) -> Path:
    """The pictures of a folder in parquet files."""
    paths = sorted(photos.iterdir())
    columns = {"image": [{"path": path.name, "bytes": path.read_bytes()} for path in paths]}
    rows = datasets.Dataset.from_dict(columns, features=datasets.Features({"image": datasets.Image(decode=False)}))
    rows = rows.cast_column("image", datasets.Image())
    for number in range(files):
        rows.shard(files, number).to_parquet(folder / f"train-{number:05d}-of-{files:05d}.parquet")
    return folder


def main() -> None:
    """In a process whose Hub is the embedded one: each kind of files, whole, interrupted, and changed on the way."""
    root, form, api, patch = Path(sys.argv[1]), sys.argv[2], HfApi(), pytest.MonkeyPatch()
    bad = write_folder(root / "photos")
    folder = root / ("photos" if form == "files" else form)
    if form != "files":
        folder.mkdir()
        pack_tars(root / "photos", folder, 5) if form == "tars" else write_rows(root / "photos", folder, 5)
    make_vae().save_pretrained(root / "vae")
    api.create_repo("me/photos", repo_type="dataset")
    api.upload_folder(folder_path=folder, repo_id="me/photos", repo_type="dataset")
    options = {"max_bad_examples": 0.3, "workers": 1, "batch_size": 1}
    here = rows_of(precompute(settings(folder, root / "vae", **options), root / "here"))
    there = settings(Path("me/photos"), root / "vae", **options)
    with nothing_copied(patch):
        whole = precompute(there, root / "whole")
        with killed(patch, module, "cut_view", 12):
            precompute(there, root / "out")
        kept = {path.name: path.stat().st_mtime_ns for path in (root / "out.partial").glob("*.parquet")}
        assert 0 < len(kept) < len([*whole.glob("*.parquet")])
        # Another commit, of the same files.
        api.upload_file(repo_id="me/photos", path_or_fileobj=b"words", path_in_repo="README.md", repo_type="dataset")
        out = precompute(there, root / "out")
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert all((out / name).stat().st_mtime_ns == time for name, time in kept.items())
    listed = (out / "bad_examples.jsonl").read_text()
    assert listed.count("\n") == len(bad) and all(Path(name).stem in listed for name in bad)

    def places(rows):
        return sorted([*row["crop"], row["flip"]] for row in rows)

    found, wanted = (rows_of(place) for place in (out, whole))
    for row, other in zip(found, wanted, strict=True):
        assert_same_answers(read_row(row)[0].half(), read_row(other)[0].half())
    # The place and the mirroring of a picture follow from its content, wherever it is.
    assert len(found) == 25 - len(bad) and places(found) == places(here)


@pytest.mark.parametrize("form", ["tars", "rows", "files"])
def test_pictures_of_the_hub_are_encoded_without_a_copy_and_go_on_after_a_kill(tmp_path, form):
    with EmbeddedHub(tmp_path / "hub") as hub:
        run_python(SCRIPT, hub.url, tmp_path / "home", str(ROOT), str(tmp_path), form)
