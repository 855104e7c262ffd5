"""Data as somebody has them, and a training of what `hf-ext init` wrote for them."""

import json
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import soundfile
import yaml
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.data.splits import hash_inputs
from tests.kit.command_line import run

# Two steps on one core, whatever the recipe was written for.
SHORT = [
    "--max_steps",
    "2",
    "--warmup_steps",
    "0",
    "--eval_steps",
    "2",
    "--save_steps",
    "2",
    "--data.num_workers",
    "0",
]


def measured(recipe: dict) -> int:
    """How many examples measure; none of them is trained on."""
    learned, other = (open_source(DataSource(**recipe["data"][part])) for part in ("train", "eval"))
    assert (
        not {key for keys in hash_inputs(learned) for key in keys}
        & {key for keys in hash_inputs(other) for key in keys}
        and len(learned) > 0
    )
    return len(other)


def names_of(source: dict) -> set[str]:
    """The files of a source of pictures."""
    data = open_source(DataSource(**source)).cast_column("image", datasets.Image(decode=False))
    return {Path(value["path"]).name for value in data["image"]}


def write_pictures(folder: str, classes: list[str], count: int, size=(40, 32), mode: str = "RGB") -> None:
    generator = np.random.default_rng(0)
    for name in classes:
        Path(folder, name).mkdir(parents=True)
        for number in range(count):
            channels = () if mode == "L" else (3,)
            pixels = generator.integers(0, 256, (size[1], size[0], *channels), dtype=np.uint8)
            Image.fromarray(pixels, mode).save(Path(folder, name, f"{number}.png"))


def write_sounds(folder: str, classes: list[str], count: int, rate: int, seconds: float) -> None:
    generator = np.random.default_rng(0)
    for name in classes:
        Path(folder, name).mkdir(parents=True)
        for number in range(count):
            soundfile.write(Path(folder, name, f"{number}.wav"), generator.normal(0, 0.1, int(rate * seconds)), rate)


def write_tables(folder: str, names: list[str], rows: int, label: bool = False) -> None:
    generator = np.random.default_rng(0)
    for name in names:
        path = Path(folder, f"{name}.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{a:.3f},{b:.3f}" + (f",{'up' if a > 0 else 'down'}" if label else "") for a, b in
                 generator.normal(size=(rows, 2))]  # fmt: skip
        path.write_text("\n".join(["x,y" + (",label" if label else ""), *lines]))


def train(method: str, data: str, *words: str | Path, init: Sequence[str] = ()) -> dict:
    """What `init` wrote, after it was trained for two steps."""
    said = run("init", method, "mine", "--data", data, *init).stdout
    file = Path("mine", f"{method}.yaml")
    assert said.endswith(f"{file}\nnext: hf-ext train {file}\n")
    text = file.read_text()
    assert f"hf-ext train {file}" in text and text.count("#") > 8
    recipe = yaml.safe_load(text)
    assert Path(recipe["data"]["train"]["path"]).exists()
    run("data", "check", file, "--data.num_workers", "0")
    run("train", file, *SHORT, *words)
    assert Path("mine/run/snapshot").is_dir()
    if "eval" in recipe["data"]:
        scores = [json.loads(line) for line in Path("mine/run/metrics.jsonl").read_text().splitlines()]
        assert any(key.startswith("eval") for row in scores for key in row)
    return recipe
