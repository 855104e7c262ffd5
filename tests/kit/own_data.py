"""Data as somebody has them: small folders of pictures, sounds and tables, and what a survey makes of them."""

from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from PIL import Image

from hf_ext.data.opening import open_source
from hf_ext.data.source import DataSource
from hf_ext.data.splits import hash_inputs


def open_apart(train: dict[str, Any], other: dict[str, Any]) -> tuple[Any, Any]:
    """The data of a training and of its evaluation, which share no example."""
    learned, measured = (open_source(DataSource(**words)) for words in (train, other))
    keys = [{key for keys in hash_inputs(data) for key in keys} for data in (learned, measured)]
    assert not keys[0] & keys[1] and len(learned) > 0
    return learned, measured


def write_files(folder: str | Path, files: dict[str, str | bytes]) -> Path:
    """Texts, or bytes, under their names in a folder."""
    for name, held in files.items():
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
        Path(folder, name).write_bytes(held if isinstance(held, bytes) else held.encode())
    return Path(folder)


def write_pictures(folder: str | Path, classes: list[str], count: int, size=(40, 32), mode: str = "RGB") -> None:
    """Pictures of noise in a folder for each class; folders of other names have other pictures."""
    generator = np.random.default_rng(list(Path(folder).name.encode()))
    for name in classes:
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            channels = () if mode == "L" else (3,)
            pixels = generator.integers(0, 256, (size[1], size[0], *channels), dtype=np.uint8)
            Image.fromarray(pixels, mode).save(Path(folder, name, f"{number}.png"))


def write_classes(folder: Path, *names: str, side: int = 8) -> str:
    """A folder with one grey picture for each class, as bright as its name is long."""
    for name in names:
        (folder / name).mkdir(parents=True)
        Image.new("L", (side, side), len(name)).save(folder / name / "one.png")
    return str(folder)


def write_sounds(folder: str | Path, classes: list[str], count: int, rate: int, seconds: float) -> None:
    generator = np.random.default_rng(0)
    for name in classes:
        Path(folder, name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            soundfile.write(Path(folder, name, f"{number}.wav"), generator.normal(0, 0.1, int(rate * seconds)), rate)


def write_tables(folder: str | Path, names: list[str], rows: int, label: bool = False) -> None:
    generator = np.random.default_rng(0)
    for name in names:
        lines = [f"{a:.3f},{b:.3f}" + (f",{'up' if a > 0 else 'down'}" if label else "") for a, b in
                 generator.normal(size=(rows, 2))]  # fmt: skip
        write_files(folder, {f"{name}.csv": "\n".join(["x,y" + (",label" if label else ""), *lines])})
