"""Commands in two processes: the results of one, also after a process was killed, once or again and again."""

import json
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from PIL import Image
from pyarrow.parquet import read_table

from hf_ext.restoration.files import read_image
from hf_ext.restoration.records import NAME
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.tasks.diffusion_data import SPREAD
from tests.disentangled_dit.pipeline_testing import make_pipeline, make_vae
from tests.kit.command_line import run
from tests.kit.models import assert_same_answers, assert_same_picture
from tests.tasks.diffusion_testing import write_judge, write_pictures
from tests.tasks.test_precompute import write_folder
from tests.training.launching import ROOT, environment, fork_pairs, launch_two, launcher

BROKEN = ("b.png", "e.png")


def files(folder: Path) -> list[str]:
    """All but the record of results."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    return sorted(str(path.relative_to(folder)) for path in found)


def write_photos(folder: Path) -> None:
    """Nine pictures of different sizes, in two folders; two of them are none."""
    (folder / "more").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for index, name in enumerate("abcdefghi"):
        place = folder / ("more" if name > "g" else "") / f"{name}.png"
        Image.fromarray(generator.integers(256, size=(8 + index, 13, 3), dtype=np.uint8)).save(place)
    for name in BROKEN:
        (folder / name).write_text("no picture")


def write_inputs(root: Path) -> None:
    torch.manual_seed(0)
    sizes = {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4, "top_k": 6}
    SemanIRForImageRestoration(SemanIRConfig(**sizes)).save_pretrained(root / "model")
    make_vae().save_pretrained(root / "vae")
    make_pipeline().save_pretrained(root / "dit")
    write_judge(root / "judge")
    write_photos(root / "photos")
    write_pictures(root / "pictures", count=11, size=(20, 18))
    # Two batches of two and one of one: one of two processes has a batch to repeat.
    write_pictures(root / "scored", count=5, size=(16, 16))
    config = {"method": "semanir", "task": {"degradation": {"kind": "gaussian_noise", "sigma": 25}}}
    config |= {"data": {"eval": {"path": str(root / "scored")}}, "per_device_eval_batch_size": 2}
    (root / "run.yaml").write_text(yaml.safe_dump(config))


COMMANDS = {
    "restore": "restore {root}/model {root}/photos --out {root}/{out}",
    "precompute": "dit precompute {root}/pictures {root}/{out} --vae {root}/vae --posterior --size 16 --shard-size 2",
    "evaluate": "evaluate {root}/model --config {root}/run.yaml --output {root}/{out}",
    "sample": "sample {root}/dit --out {root}/{out} --device cpu --class-labels hen,1,4 --count 11 --steps 2",
    "score": "dit score {root}/scored {root}/pictures --network {root}/judge --device cpu --kernel --json",
}


def words(command: str, root: Path, out: str = "", *more: str) -> list[str]:
    batches = [] if command in ("restore", "evaluate") else ["--batch-size", "2"]
    return [*COMMANDS[command].format(root=root, out=out).split(), *batches, *more]


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> Path:
    """A folder with what two processes left, in four launches, three ended by a kill: one start for all tests."""
    root = tmp_path_factory.mktemp("launched")
    write_inputs(root)
    names = "\n".join(str(root / "photos" / name) for name in ("a.png", "c.png", "d.png"))

    def job(words: list[str], *copied: str, **more: str) -> dict[str, object]:
        """A command, before which a folder is copied."""
        return {"words": words, **more} | ({"copy": [str(root / name) for name in copied]} if copied else {})

    restored = job(words("restore", root, "killed"), kill_at="f.png")
    # Whichever part it has taken first.
    encoded = job(words("precompute", root, "latents-killed"), kill_at="train-")
    # Its batches are of the numbers 2 and 3, 6 and 7, 10.
    drawn = job(words("sample", root, "drawn-killed"), kill_at="000007.png")
    listed = ["restore", str(root / "model"), "@-", "--out", str(root / "listed")]
    no_model = ["restore", str(root / "photos"), str(root / "pictures"), "--out", str(root / "never")]
    latents = words("precompute", root, "latents-killed")
    jobs = {
        "restore-goes-on": job(words("restore", root, "killed"), "killed", "killed-copy"),
        "restore": job(words("restore", root, "two", "--compare")),
        "restore-again": job(words("restore", root, "two")),
        "restore-listed": job(listed, stdin=names),
        "no-model": job(no_model),
        "precompute-goes-on": job(latents, "latents-killed.partial", "latents-copy.partial"),
        "precompute": job(words("precompute", root, "latents-two")),
        "precompute-again": job(words("precompute", root, "latents-two")),
        "sample-goes-on": job(words("sample", root, "drawn-killed"), "drawn-killed", "drawn-copy"),
        "sample": job(words("sample", root, "drawn-two")),
        "score": job(words("score", root)),
        "evaluate": job(words("evaluate", root, "two.json")),
    }
    fork_pairs(
        "tests.cli.launched",
        ([0, signal.SIGKILL], [str(root), json.dumps({"restore-killed": restored})]),
        ([0, signal.SIGKILL], [str(root), json.dumps({"precompute-killed": encoded})]),
        ([0, signal.SIGKILL], [str(root), json.dumps({"sample-killed": drawn})]),
        ([0, 0], [str(root), json.dumps(jobs)]),
    )
    return root


def said(root: Path, name: str, code: int = 0) -> dict:
    """The words of the first process, which ended with this code; the second one printed nothing."""
    first, second = (json.loads((root / f"{name}-{rank}.json").read_text()) for rank in (0, 1))
    assert first["code"] == code and {**second, "stderr": ""} == {"code": 0, "stdout": "", "stderr": ""}
    # These show a bar, or that weights are loaded.
    assert not second["stderr"] or name in ("evaluate", "score")
    return first


def check_killed(root: Path, name: str) -> None:
    killed = json.loads((root / f"{name}-killed-0.json").read_text())
    assert killed["code"] == 1 and "another process of this launch ended" in killed["stderr"]


def check_pictures(found: Path, expected: Path) -> None:
    assert files(found) == files(expected)
    for name in files(expected):
        if name.endswith(".html"):
            assert (found / name).read_text() == (expected / name).read_text()
            continue
        assert_same_picture(read_image(found / name).pixels, read_image(expected / name).pixels)


def check_latents(found: Path, expected: Path) -> None:
    assert files(found) == files(expected)
    assert (found / "precompute.json").read_text() == (expected / "precompute.json").read_text()
    for path in expected.glob("*.parquet"):
        pairs = zip(read_table(found / path.name).to_pylist(), read_table(path).to_pylist(), strict=True)
        for row, wanted in pairs:
            for column in ("latent", SPREAD):
                assert_same_answers(
                    *(torch.frombuffer(bytearray(found[column]), dtype=torch.float16) for found in (row, wanted))
                )
            assert {**row, "latent": None, SPREAD: None} == {**wanted, "latent": None, SPREAD: None}


def without_speed(text: str) -> str:
    return re.sub(r"in \d+\.\d s, \d+\.\d+ MP/s", "in SECONDS", text)


@pytest.mark.slow
def test_two_processes_restore_what_one_does_and_say_it_once(launched, tmp_path):
    alone = run(*words("restore", launched, "one", "--compare"), code=1)
    first = said(launched, "restore", code=1)
    told, wanted = (
        [line for line in text.splitlines() if line and "Loading weights" not in line]
        for text in (first["stderr"], alone.stderr)
    )
    assert told == wanted and len(told) == 3
    assert [f"{name}: is not a picture" in line for name, line in zip(BROKEN, told, strict=False)] == [True, True]
    assert without_speed(first["stdout"].replace("/two", "/one")) == without_speed(alone.stdout)
    assert first["stdout"].startswith(f"7 restored to {launched / 'two'}; 0.00 megapixels in ")
    # The page too.
    check_pictures(launched / "two", launched / "one")


@pytest.mark.slow
def test_what_is_there_is_skipped_and_the_rest_is_tried_again(launched):
    first = said(launched, "restore-again", code=1)
    assert first["stdout"].startswith("0 restored") and "7 already restored" in first["stdout"]
    # Standard input is read by one of them.
    said(launched, "restore-listed")
    assert files(launched / "listed") == ["a.png", "c.png", "d.png"]


@pytest.mark.slow
def test_what_stops_all_is_said_once(launched):
    assert said(launched, "no-model", code=2)["stderr"].startswith("Error: ")
    assert not (launched / "never").exists()
    assert "exists: give another folder" in said(launched, "precompute-again", code=2)["stderr"]


@pytest.mark.slow
def test_a_restoration_whose_process_was_killed_goes_on_in_one_or_two(launched):
    check_killed(launched, "restore")
    left = files(launched / "killed-copy")
    assert {"a.png", "c.png", "d.png", "g.png", "more/i.png"} == {name for name in left if ".tmp-" not in name}
    assert [name[:11] for name in left if ".tmp-" in name] == [".f.png.tmp-"]
    first = said(launched, "restore-goes-on", code=1)
    assert first["stdout"].startswith("2 restored") and "5 already restored" in first["stdout"]
    run(*words("restore", launched, "killed-copy"), code=1)
    run(*words("restore", launched, "one-plain"), code=1)
    for name in ("killed", "killed-copy"):
        check_pictures(launched / name, launched / "one-plain")


@pytest.mark.slow
def test_latents_of_two_processes_are_those_of_one_also_after_a_kill(launched):
    run(*words("precompute", launched, "latents-one"))
    assert said(launched, "precompute")["stdout"] == f"{launched / 'latents-two'}\n"
    check_latents(launched / "latents-two", launched / "latents-one")
    check_killed(launched, "precompute")
    # The second process died with its first file, and the first one took over all that it had not begun.
    left = sorted(path.name[6:11] for path in (launched / "latents-copy.partial").glob("*.parquet"))
    assert len(left) == 5 and {*left} < {f"{number:05d}" for number in range(6)}
    run(*words("precompute", launched, "latents-copy"))
    for name in ("latents-killed", "latents-copy"):
        check_latents(launched / name, launched / "latents-one")
        assert not (launched / f"{name}.partial").exists()


@pytest.mark.slow
def test_drawn_pictures_of_two_processes_are_those_of_one_also_after_a_kill(launched):
    run(*words("sample", launched, "drawn-one"))
    assert said(launched, "sample")["stdout"] == f"{launched / 'drawn-two'}\n"
    check_killed(launched, "sample")
    left = [name for name in files(launched / "drawn-copy") if ".tmp-" not in name]
    assert left == [f"{number:06d}.png" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9)] + ["sampling.json"]
    run(*words("sample", launched, "drawn-copy"))
    names = [f"{number:06d}.png" for number in range(11)] + ["metadata.jsonl", "sampling.json"]
    for folder in (launched / name for name in ("drawn-one", "drawn-two", "drawn-killed", "drawn-copy")):
        assert [name for name in files(folder) if ".tmp-" not in name] == names
        for name in names[:11]:
            assert_same_picture(*(read_image(place / name).pixels for place in (folder, launched / "drawn-one")))
        for name in names[11:]:
            assert (folder / name).read_text() == (launched / "drawn-one" / name).read_text()


@pytest.mark.slow
def test_two_processes_score_every_example_once(launched):
    alone = run(*words("evaluate", launched, "one.json"))
    assert said(launched, "evaluate")["stdout"] == alone.stdout
    found, expected = (json.loads((launched / name).read_text())["results"] for name in ("two.json", "one.json"))
    for row, wanted in zip(found, expected, strict=True):
        assert row == wanted | {"value": pytest.approx(wanted["value"], rel=1e-6)}


@pytest.mark.slow
def test_distances_of_pictures_that_two_processes_read_are_those_of_one(launched):
    texts = said(launched, "score")["stdout"], run(*words("score", launched)).stdout
    found, alone = map(json.loads, texts)
    assert found == pytest.approx(alone, rel=1e-3) and found["pictures"] == 5 and found["reference_pictures"] == 11


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
@pytest.mark.slow
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


@pytest.mark.slow
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
