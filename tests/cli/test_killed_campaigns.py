"""Precomputing and sampling under `accelerate launch`, killed again and again at random moments."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from pyarrow.parquet import read_table

from tests.cli.test_launched_commands import check_pictures, files
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_vae
from tests.kit.command_line import run
from tests.kit.models import assert_same_answers
from tests.training.launching import ROOT, environment, free_port, launch_two

pytestmark = pytest.mark.slow


def kill_repeatedly(words: list[str], folder: Path, kind: str, kills: int, most: int) -> None:
    """
    Starts the command again and again, and ends it by SIGKILL at a random moment after it has written its first of up
    to `most` files: all of its processes at once, as a node that fails, or one of both alone.
    """
    chance = random.Random(0)
    config = ROOT / "examples" / "accelerate" / "ddp_2_cpu.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    for number in range(kills):
        wanted = len([*folder.glob(kind)]) + chance.randint(1, most)
        with open(folder.parent / f"{folder.name}-{number}.log", "w") as log:
            command = [*launcher, "--main_process_port", free_port(), "-m", "hf_ext_cli.main", *words]
            process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)
            while len([*folder.glob(kind)]) < wanted:
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.01)
            time.sleep(chance.random() / 20)
            family = psutil.Process(process.pid).children(recursive=True)
            workers = [member for member in family if "hf_ext_cli.main" in " ".join(member.cmdline())]
            victims = [psutil.Process(process.pid), *family] if number % 2 else [chance.choice(workers)]
            for victim in victims:
                victim.kill()
            assert process.wait(120) != 0
            psutil.wait_procs(family, 60)


def write_photos(folder: Path, count: int, bad: int) -> tuple[list[str], list[str]]:
    """Picture files with their names as captions; the names of the good and of the bad ones."""
    folder.mkdir()
    generator, names = np.random.default_rng(0), [f"{number:04d}.png" for number in range(count)]
    broken = sorted(names[number] for number in generator.choice(count, bad, replace=False))
    for name in names:
        Image.fromarray(generator.integers(256, size=(20, 18, 3), dtype=np.uint8)).save(folder / name)
    for number, name in enumerate(broken):
        if number % 3 == 0:
            (folder / name).write_bytes((folder / name).read_bytes()[:300])
        else:
            Image.new(*[("RGB", (16, 200)), ("I;16", (16, 16))][number % 3 - 1]).save(folder / name)
    rows = [json.dumps({"file_name": name, "text": name}) + "\n" for name in names]
    (folder / "metadata.jsonl").write_text("".join(rows))
    return [name for name in names if name not in broken], broken


def test_latents_of_a_campaign_with_twelve_kills_are_those_of_the_good_pictures(tmp_path):
    good, broken = write_photos(tmp_path / "photos", 1200, 36)
    make_vae().save_pretrained(tmp_path / "vae")

    def words(out: str) -> list[str]:
        sizes = ["--size", "16", "--shard-size", "10", "--max-bad-examples", "0.03"]
        return ["dit", "precompute", *(str(tmp_path / name) for name in ("photos", out)), "--vae", str(tmp_path / "vae"),
                *sizes]  # fmt: skip

    kill_repeatedly(words("out"), tmp_path / "out.partial", "*.parquet", kills=12, most=8)
    launch_two("hf_ext_cli.main", *words("out"))
    run(*words("whole"))
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    found, expected = (
        [row for path in sorted((tmp_path / name).glob("*.parquet")) for row in read_table(path).to_pylist()]
        for name in ("out", "whole")
    )
    assert sorted(row["text"] for row in found) == good
    listed = [json.loads(line)["file"] for line in (tmp_path / "out" / "bad_examples.jsonl").read_text().splitlines()]
    assert sorted(Path(file).name for file in listed) == broken
    for row, wanted in zip(found, expected, strict=True):
        latents = (torch.frombuffer(bytearray(each["latent"]), dtype=torch.float16) for each in (row, wanted))
        assert_same_answers(*latents)
        assert {**row, "latent": None} == {**wanted, "latent": None}


def test_pictures_of_a_campaign_with_six_kills_are_those_of_one_process(tmp_path):
    make_pipeline().save_pretrained(tmp_path / "dit")

    def words(out: str) -> list[str]:
        options = ["--count", "300", "--batch-size", "4", "--steps", "4", "--device", "cpu"]
        return ["sample", str(tmp_path / "dit"), "--out", str(tmp_path / out), *options]

    kill_repeatedly(words("out"), tmp_path / "out", "*.png", kills=6, most=30)
    launch_two("hf_ext_cli.main", *words("out"))
    run(*words("whole"))
    assert len(files(tmp_path / "whole")) == 302
    for leftover in (tmp_path / "out").glob(".*.tmp-*"):
        leftover.unlink()
    check_pictures(tmp_path / "out", tmp_path / "whole")
