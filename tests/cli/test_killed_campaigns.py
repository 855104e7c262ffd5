"""Precomputing and sampling under `accelerate launch`, killed again and again at random moments."""

import json
import random
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from hf_ext.restoration.files import read_image
from tests.cli.test_launched_commands import check_latents, files
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_vae
from tests.kit.command_line import run
from tests.kit.models import assert_same_picture
from tests.tasks.test_precompute import write_folder
from tests.training.launching import ROOT, environment, launch_two, launcher

pytestmark = pytest.mark.slow


def kill_repeatedly(words: list[str], folder: Path, kind: str, kills: int, most: int) -> None:
    """
    Starts the command again and again, and ends it by SIGKILL at a random moment after it has written 1 to `most`
    files: all of its processes at once, as a node that fails, or one of both alone.
    """
    chance = random.Random(0)
    for number in range(kills):
        wanted = len([*folder.glob(kind)]) + chance.randint(1, most)
        with open(folder.parent / f"{folder.name}-{number}.log", "w") as log:
            process = subprocess.Popen(
                launcher("hf_ext_cli.main", *words), cwd=ROOT, env=environment(), stdout=log, stderr=log
            )
            while len([*folder.glob(kind)]) < wanted:
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.01)
            time.sleep(chance.random() / 20)
            family = psutil.Process(process.pid).children(recursive=True)
            workers = [member for member in family if "hf_ext_cli.main" in " ".join(member.cmdline())]
            for victim in [process, *family] if number % 2 else [chance.choice(workers)]:
                victim.kill()
            assert process.wait(120) != 0
            psutil.wait_procs(family, 60)


# datasets leaves the file of a picture that cannot be decoded to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning")
def test_latents_of_a_campaign_with_twelve_kills_are_those_of_the_good_pictures(tmp_path):
    bad = write_folder(tmp_path / "photos", 1200, every=33)
    make_vae().save_pretrained(tmp_path / "vae")

    def words(out: str) -> list[str]:
        options = ["--size", "16", "--shard-size", "10", "--posterior", "--max-bad-examples", "0.04"]
        places = [str(tmp_path / name) for name in ("photos", out)]
        return ["dit", "precompute", *places, "--vae", str(tmp_path / "vae"), *options]

    kill_repeatedly(words("out"), tmp_path / "out.partial", "*.parquet", kills=12, most=4)
    launch_two("hf_ext_cli.main", *words("out"))
    run(*words("whole"))
    check_latents(tmp_path / "out", tmp_path / "whole")
    listed = [json.loads(line)["file"] for line in (tmp_path / "out" / "bad_examples.jsonl").read_text().splitlines()]
    assert {Path(file).name for file in listed} == bad.keys() and len(listed) == len(bad) == 38


def test_pictures_of_a_campaign_with_six_kills_are_those_of_one_process(tmp_path):
    make_pipeline().save_pretrained(tmp_path / "dit")

    def words(out: str) -> list[str]:
        options = ["--count", "300", "--batch-size", "4", "--steps", "4", "--device", "cpu"]
        return ["sample", str(tmp_path / "dit"), "--out", str(tmp_path / out), *options]

    kill_repeatedly(words("out"), tmp_path / "out", "*.png", kills=6, most=30)
    launch_two("hf_ext_cli.main", *words("out"))
    run(*words("whole"))
    names = [name for name in files(tmp_path / "out") if ".tmp-" not in name]
    assert names == files(tmp_path / "whole") and len(names) == 302
    for name in names:
        paths = [tmp_path / folder / name for folder in ("out", "whole")]
        if name.endswith(".png"):
            assert_same_picture(*(read_image(path).pixels for path in paths))
        else:
            assert paths[0].read_text() == paths[1].read_text()
