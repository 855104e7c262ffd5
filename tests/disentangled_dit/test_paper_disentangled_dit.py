"""The paper's tables: valid recipes, a driver that does what remains, and every row to its end when it is tiny."""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_ext.errors import DataError, OtherRun, UsageError
from hf_ext.training import TrainingArguments
from hf_ext.training import main as train
from hf_ext.training.arguments import build, read_yaml
from tests.kit.command_line import run
from tests.kit.process_state import forget_accelerate
from tests.kit.refusals import refused
from tests.kit.scorers import write_clip, write_inception
from tests.kit.studies import EXAMPLES, module_loader
from tests.tasks.diffusion_testing import write_table

from .pipeline_testing import make_vae, write_encoder

PAPER = EXAMPLES / "disentangled_dit" / "paper"
TABLES = sorted(path.name for path in (PAPER / "rows").iterdir())
ROWS = sorted(f"{path.parent.name}/{path.stem}" for path in PAPER.glob("rows/*/*.yaml"))
load_peers, load = module_loader(PAPER.parent), module_loader(PAPER)
reproduce = pytest.fixture(lambda load_peers, load: load("reproduce"))


def test_every_row_has_a_valid_recipe_of_the_specified_length_batch_and_size(reproduce, load_peers):
    peers, sizes = load_peers("peers"), {}
    for name in ROWS:
        recipe = reproduce.read_recipe(name, {})
        others = [other for other in (recipe.start, recipe.trained) if other is not None]
        assert len(others) < 2 and set(others) <= set(ROWS), name
        wide = recipe.train["task"]["image_size"] == 512
        assert recipe.batch == (384 if wide else 2048) and recipe.train["learning_rate"] == 1e-4
        assert recipe.train["max_steps"] == (100000 if wide else 124000 if "cc12m" in str(recipe.data) else 120000)
        assert recipe.latents["size"] == recipe.score["size"] == recipe.train["task"]["image_size"]
        # A larger model goes on from a smaller one.
        assert bool(others) >= wide
        arguments = build(TrainingArguments, {**recipe.train, "output_dir": "x", "data": {"train": {"path": "x"}}})
        task = peers.make_task(arguments, recipe.peer)
        if not others:
            with torch.device("meta"):
                sizes[name] = task.build_model(arguments.model, None).num_parameters() / 1e6
    found = {name.rpartition("-")[2]: round(sizes[name]) for name in sizes if "architectures/imagenet" in name}
    assert found == {"unet": 404, "dit": 750, "mdtv2": 699, "pixart": 606, "mmdit": 1332, "ours": 1335}


def test_fields_of_a_user_are_laid_over_those_of_a_row_and_its_bases(reproduce):
    own = {
        "all": {"batch": 8, "train": {"model": {"preset": None, "num_layers": 2}}},
        "imagenet-256": {"batch": 16, "data": {"path": "photos"}},
        "architectures/imagenet-512-6-ours": {"batch": 32},
    }
    small, large = (reproduce.read_recipe(f"architectures/imagenet-{side}-6-ours", own) for side in (256, 512))
    assert (small.batch, large.batch) == (16, 32) and large.data["path"] == "photos"
    assert small.train["model"] == {"in_channels": 4, "sample_size": 32, "num_classes": 1000, "num_layers": 2}
    with refused(UsageError, "peer"):
        reproduce.read_recipe(ROWS[0], {"all": {"peers": "dit"}})


def test_jobs_of_slurm_wait_for_what_they_need(reproduce, tmp_path, capsys):
    assert reproduce.reproduce(["schedule", str(tmp_path), "--slurm"]) == 0
    script = tmp_path / "jobs.sh"
    script.write_text(capsys.readouterr().out)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "hf").write_text("#!/bin/bash\necho complete\n")
    (programs / "sbatch").write_text(f'#!/bin/bash\necho "$PROGRAM|$*" >> {tmp_path}/jobs\nwc -l < {tmp_path}/jobs\n')
    for path in programs.iterdir():
        path.chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    subprocess.run(["bash", str(script)], env={**os.environ, "PATH": path}, check=True, timeout=60)
    jobs = (tmp_path / "jobs").read_text()
    # Two sets of latents, two pre-trainings and trainings, pictures and scores.
    kinds = [re.search(r"precompute|train\.yaml|score|sample", line)[0] for line in jobs.splitlines()]
    assert kinds == [*["precompute"] * 2, "train.yaml", *["train.yaml", "sample", "score"] * 2]
    assert re.findall(r"afterok:(\S+)", jobs) == ["2", "1:3", "4", "5", "1:3", "7", "8:6"]
    assert ["afterok" in line for line in jobs.splitlines()] == [False] * 2 + [True] * 7
    programs = re.findall(r"^(.*?)\|", jobs, re.M)[:3]
    assert programs == ["python -m hf_ext_cli.main"] * 2 + ["python -m hf_ext.training"]
    settings = json.loads((tmp_path / "rows/schedule/1-same/train.yaml").read_text())
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] * 16 == 384
    assert (tmp_path / "data" / "ILSVRC--imagenet-1k.complete").read_text() == "complete\n"


def test_what_cannot_be_reproduced_is_refused(reproduce, load_peers, tmp_path, monkeypatch, capsys):
    for words, kind, named in (
        (["tables"], UsageError, "architectures"),
        (["padding", "--processes", "-1"], UsageError, "-1"),
        (["padding", "--processes", "5"], DataError, "160"),
    ):
        with refused(kind, named):
            reproduce.reproduce([words[0], str(tmp_path), *words[1:]])
    for script, *words in (
        ("paper/reproduce.py", "tables", tmp_path),
        ("paper/parts.py", "drift", tmp_path, tmp_path),
        ("paper/parts.py", "prompts", tmp_path / "nowhere", "text", "1", "train"),
        ("controls.py", tmp_path / "nowhere"),
        ("distill.py", "score", "nobody", "nowhere", "--data", tmp_path),
    ):
        # A line, and no traceback.
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", [script, *map(str, words)])
            runpy.run_path(str(PAPER.parent / script), run_name="__main__")
        said = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and said[-1].startswith("Error: ") and "Traceback" not in str(said), script
    (tmp_path / "own.yaml").write_text("cc12m: {batch: 1}")
    with refused(UsageError, "cc12m-256"):
        reproduce.reproduce(["padding", str(tmp_path), "--with", str(tmp_path / "own.yaml")])


# What is there of a row, and a change of its recipe that the next command is given.
HELD = [
    ([], "train: {learning_rate: 1.0}, batch: 768, samples: {fid: {steps: 9}}, score: {network: other.pt}", None),
    (["run"], "samples: {fid: {steps: 9}}, score: {network: other.pt, clip: a/b}", None),
    (["run"], "train: {per_device_train_batch_size: 4, data: {num_workers: 1}}", None),
    (["run"], "train: {learning_rate: 1.0}", "run"),
    (["run"], "batch: 768", "run"),
    (["run"], "latents: {posterior: false}", "run"),
    (["run", "fid"], "samples: {fid: {batch-size: 1, device: cpu}}, score: {network: other.pt}", None),
    (["run", "fid"], "samples: {fid: {steps: 9}}", "fid"),
    # Pictures of another model, although that is no longer there.
    (["fid"], "train: {learning_rate: 1.0}", "fid"),
    (["run", "fid", "fid.json"], "score: {batch-size: 1, device: cpu, clip: a/b, max-bad-examples: 0.1}", None),
    (["run", "fid", "fid.json"], "score: {network: other.pt}", "fid.json"),
    (["fid.json"], "samples: {fid: {steps: 9}}", "fid.json"),
]


@pytest.mark.parametrize(("there", "change", "refused_for"), HELD)
def test_what_is_there_of_a_row_is_held_to_its_recipe(reproduce, tmp_path, there, change, refused_for):
    words, own = ["schedule", str(tmp_path / "work"), "--with"], tmp_path / "own.yaml"
    own.write_text("all: {}")
    assert reproduce.reproduce([*words, str(own)]) == 0
    row = tmp_path / "work" / "rows" / "schedule" / "1-same"
    for name in there:
        (row / name).write_text("{}") if "." in name else (row / name).mkdir(parents=True)
    assert reproduce.reproduce([*words, str(own)]) == 0
    own.write_text(f"schedule/1-same: {{{change}}}")
    with contextlib.nullcontext() if refused_for is None else refused(OtherRun, row / refused_for):
        assert reproduce.reproduce([*words, str(own)]) == 0
    # The advice: without them anything may change.
    for path in (row / name for name in there):
        path.rmdir() if path.is_dir() else path.unlink()
    assert reproduce.reproduce([*words, str(own)]) == 0


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory) -> Path:
    """Tiny data, models and settings in place of the recipes'; the folder of the work is the same for all tables."""
    folder = tmp_path_factory.mktemp("paper")
    make_vae().save_pretrained(folder / "vae")
    write_encoder(folder / "encoder", 16)
    sizes = [(20, 18 + number) for number in range(6)]
    imagenet = write_table(folder / "imagenet", sizes, ["hen", "fish"], label=[0, 1] * 3)
    imagenet22k = write_table(folder / "imagenet22k", sizes, image="jpg", cls=[0, 1, 2] * 2)
    cc12m = write_table(folder / "cc12m", sizes, image="jpg", txt=["a red hen", "green fish", "hen on grass"] * 2)
    coco = write_table(folder / "coco", sizes, caption=[["a hen", "hen"], ["a fish"]] * 3)
    text = {"text_encoder": str(folder / "encoder"), "max_text_length": 6}
    model = dict.fromkeys(["preset", "block_out_channels", "sample_size", "in_channels", "num_classes"])
    model |= {"num_layers": 5, "num_attention_heads": 4, "attention_head_dim": 12, "joint_attention_dim": None}
    training = {"max_steps": 2, "warmup_steps": 0, "per_device_train_batch_size": 2, "mixed_precision": "no"}
    training |= {"save_steps": 1, "report_to": "none", "ema_decay": 0.5, "data": {"num_workers": 0}, "model": model}
    training["task"] = {"vae": str(folder / "vae"), "sample_steps": 1, "samples_per_class": 1}
    drawn = {"count": 2, "steps": 2, "dtype": "float32"}
    network, clip = write_inception(folder / "network.pt"), write_clip(folder / "clip")

    def of(side: int):
        return {"latents": {"size": side}, "train": {"task": {"image_size": side}}, "score": {"size": side}}

    own = {
        "all": {
            "batch": 4,
            "latents": {"vae": str(folder / "vae"), "device": "cpu", "max-bad-examples": 0},
            "train": training,
            "samples": {"fid": drawn},
            "score": {"network": network, "device": "cpu"},
        },
        "imagenet-256": {"data": {"path": str(imagenet)}, **of(16)},
        "imagenet-512": of(32),
        "cc12m-256": {
            "data": {"path": str(cc12m)},
            "latents": {"size": 16, "text-encoder": str(folder / "encoder"), "max-text-length": 6},
            "train": {"task": {"image_size": 16, **text}},
            "samples": {"clip": {**drawn, "prompts": {"repository": None, "path": str(coco)}}},
            "score": {"size": 16, "clip": clip, "split": "train"},
        },
        "cc12m-512": of(32),
        "sizes": {"samples": {f"size-{side}": drawn for side in (128, 256, 512, 1024)}},
        "crops/2-local-256": {"latents": {"local-size": 32}},
    }
    for side in (256, 512):
        own[f"imagenet22k-{side}"] = {"data": {"path": str(imagenet22k)}, "train": {"model": {"num_classes": 3}}}
    (folder / "own.yaml").write_text(json.dumps(own))
    return folder


def execute_here(load_peers, load, line: str) -> int:
    """Does in this process what a command of the driver does."""
    forget_accelerate()
    words, out, printed = shlex.split(line), None, io.StringIO()
    if words[0] == "mkdir":
        Path(words[2]).mkdir(parents=True, exist_ok=True)
        out, words = Path(words[-1]), words[4 : words.index(">")]
    _, program, *words = words
    if program == "-m":
        module, *words = words
        if module == "hf_ext.training":
            return train(words)
        assert module == "hf_ext_cli.main"
        printed.write(run(*words).stdout)
    elif program.endswith("peers.py"):
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(printed):
            assert not load_peers("peers").run(words)
    else:
        with contextlib.redirect_stdout(printed):
            load("parts").main(words)
    if out:
        out.write_text(printed.getvalue())
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_a_table_comes_to_its_end(reproduce, load_peers, load, stand_ins, table, monkeypatch, capsys):
    words, asked, done = [table, str(stand_ins / "work"), "--with"], [], []

    def execute(line: str) -> int:
        asked.append(line)
        if len(asked) % 9 == 8:
            return 130
        done.append(line)
        return execute_here(load_peers, load, line)

    monkeypatch.setattr(reproduce, "execute", execute)
    assert reproduce.reproduce([*words, str(stand_ins / "own.yaml")]) == 0
    planned = capsys.readouterr().out.splitlines()
    while code := reproduce.reproduce([*words, str(stand_ins / "own.yaml"), "--run"]):
        assert code == 130, asked[-1]
    # Each once, and nothing is left; a changed recipe is refused.
    assert done == planned
    capsys.readouterr()
    assert reproduce.reproduce([*words, str(stand_ins / "own.yaml")]) == 0 and not capsys.readouterr().out.strip()
    own = read_yaml(stand_ins / "own.yaml")
    own["all"]["score"]["batch-size"] = own["all"]["latents"]["batch-size"] = 3
    (stand_ins / "changed.yaml").write_text(json.dumps(own))
    assert reproduce.reproduce([*words, str(stand_ins / "changed.yaml")]) == 0 and not capsys.readouterr().out.strip()
    (stand_ins / "changed.yaml").write_text("all: {train: {learning_rate: 1.0}}")
    with refused(OtherRun, "recipe"):
        reproduce.reproduce([*words, str(stand_ins / "changed.yaml")])
    header, _, *rows = (stand_ins / "work" / f"{table}.md").read_text().splitlines()
    wanted = ["fid: fid"] + ["clip: clip_score"] * (table in ("padding", "crops-and-flips"))
    wanted += ["drift: content_distance"] * (table == "controls")
    assert len(rows) == sum(name.startswith(f"{table}/") for name in ROWS)
    for column in wanted:
        values = [row.split(" | ")[header.split(" | ").index(column)] for row in rows]
        # Where nothing can drift, nothing is measured.
        assert values.count("–") == (column.startswith("drift"))
        assert all(np.isfinite(float(value)) for value in values if value != "–")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a script of bash")
def test_a_driver_that_was_killed_in_a_training_goes_on(reproduce, load_peers, load, stand_ins, monkeypatch, tmp_path):
    own = read_yaml(stand_ins / "own.yaml")
    own["all"]["train"]["max_steps"] = 100000
    (tmp_path / "long.yaml").write_text(json.dumps(own))
    words = ["crops", str(tmp_path / "work"), "--run", "--with"]
    command = [sys.executable, str(PAPER / "reproduce.py"), *words, str(tmp_path / "long.yaml")]
    process = subprocess.Popen(command, start_new_session=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        metrics = tmp_path / "work/rows/architectures/imagenet-256-6-ours/run/metrics.jsonl"
        limit = time.monotonic() + 300
        while not metrics.is_file() or len(metrics.read_text().splitlines()) < 3:
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    seen = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    lines: list[str] = []
    monkeypatch.setattr(reproduce, "execute", lambda line: lines.append(line) or 1)
    assert reproduce.reproduce([*words, str(tmp_path / "long.yaml")]) == 1
    # Latents are there, and the training goes on to an end that is near.
    (line,) = lines
    settings = tmp_path / "work/rows/architectures/imagenet-256-6-ours/train.yaml"
    assert line == f"python -m hf_ext.training {settings}"
    assert train([str(settings), "--max_steps", str(seen[-1] + 5)]) == 0
    steps = [json.loads(row)["step"] for row in metrics.read_text().splitlines() if "loss" in row]
    assert steps == list(range(1, seen[-1] + 6))
