"""The three sets of the study: a base with its fine-tunes, what they learn from, and how they are scored.

`tweets`: MiniLM on three tasks of TweetEval. `pictures`: a ViT of handwritten digits on six tasks of small pictures.
`texts`: a GPT-2 on bytes of five domains. Every part of the data is written once, as a file that `data` names.
"""

import json
import pydoc_data.topics
import sys
import sysconfig
import unicodedata
import wave
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image
from tasks import ByteTask, PictureTask, TweetTask
from tweets import TASKS, read_part, write_task

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from digits import digits
from experiments import copy_minilm

EXAMPLES = Path(__file__).resolve().parent
# Classes of CIFAR-10.
VEHICLES = {0: "airplane", 1: "automobile", 8: "ship", 9: "truck"}
TRAIN_PICTURES, TEST_PICTURES, SIDE = 3_000, 300, 16
# Bytes of a training text and of a tested one, and how many of both.
TRAIN_BYTES, TEST_BYTES, TRAIN_TEXTS, TEST_TEXTS = 512, 127, 400, 40
DOMAINS = ("code", "manual", "tweets", "names", "sums")
BASE_DOMAINS = DOMAINS[:3]


@dataclass(frozen=True)
class Set:
    """
    One set: the class, names and score of its tasks, and what trains, writes and merges them. The recipe is of the
    base too, unless `ready_base` copies one into a folder; `fine_tuning` takes its place in a fine-tune. `exclude`
    names the heads, which tasks keep to themselves. `learning` has the options of AdaMerging, for classifiers.
    """

    name: str
    task: type
    tasks: tuple[str, ...]
    metric: str
    greater_is_better: bool
    recipe: Path
    fine_tuning: dict[str, Any]
    write: Callable[[Path, Path], None]
    ready_base: Callable[[Path], Path] | None = None
    exclude: tuple[str, ...] = ()
    learning: dict[str, Any] | None = None


def write_tweets(shared: Path, out: Path) -> None:
    """The tweets of every task."""
    for task in TASKS:
        write_task(shared / "tweeteval", task, out / task)


def read_vehicles(shared: Path, part: str, count: int) -> tuple[list[Image.Image], np.ndarray]:
    """A seeded choice of CIFAR-10's vehicles, smaller and in grey, with their classes."""
    file = str(shared / "cifar10" / f"{part}.parquet")
    data = datasets.load_dataset("parquet", data_files=file, split="train")
    labels = np.array(data["label"])
    chosen = np.random.default_rng(0).permutation(np.flatnonzero(np.isin(labels, [*VEHICLES])))[:count]
    pictures = [data[int(index)]["image"].convert("L").resize((SIDE, SIDE)) for index in chosen]
    return pictures, np.searchsorted([*VEHICLES], labels[chosen])


def read_digits(part: str) -> tuple[list[Image.Image], np.ndarray]:
    """The handwritten digits of scikit-learn; the last ones, by other writers, are for tests."""
    wanted = slice(-TEST_PICTURES, None) if part == "test" else slice(0, -TEST_PICTURES)
    pictures, labels = (values[wanted] for values in digits())
    return [Image.fromarray(values).resize((SIDE, SIDE)) for values in pictures], labels


def read_spoken(shared: Path, part: str) -> tuple[list[Image.Image], np.ndarray]:
    """The spoken digits as pictures of their spectrograms; recordings 0 to 4 are the official test set."""
    pictures, labels = [], []
    for path in sorted((shared / "fsdd").glob("*.wav")):
        digit, _, number = path.stem.split("_")
        if (int(number) < 5) == (part == "test"):
            pictures.append(draw_spectrogram(path))
            labels.append(int(digit))
    return pictures, np.array(labels)


def draw_spectrogram(path: Path) -> Image.Image:
    """The logarithm of a recording's spectrum over time, from 0 to 4 kHz, in grey."""
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32768
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(samples, 128), 256)[::64] * np.hanning(256)
    levels = np.log10(np.abs(np.fft.rfft(frames)).T[::-1] + 1e-4)
    pixels = np.clip((levels - levels.max() + 3) * 85, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BILINEAR)


def write_pictures(shared: Path, out: Path) -> None:
    """Pictures and classes of every task, one parquet file a part; the base learns the plain digits."""
    names = [str(digit) for digit in range(10)]
    random = np.random.default_rng(1)
    for part, count in (("train", TRAIN_PICTURES), ("test", TEST_PICTURES)):
        plain, labels = read_digits(part)
        turns = random.integers(4, size=len(plain))
        turned = [picture.rotate(90 * int(turn)) for picture, turn in zip(plain, turns, strict=True)]
        negative = [Image.eval(picture, lambda value: 255 - value) for picture in plain]
        noisy = [add_noise(picture, random) for picture in plain]
        for task, pictures in (("base", plain), ("negative", negative), ("noisy", noisy)):
            save_pictures(out / task, part, pictures, labels, names)
        save_pictures(out / "parity", part, plain, labels % 2, ["even", "odd"])
        save_pictures(out / "turned", part, turned, turns, ["0°", "90°", "180°", "270°"])
        save_pictures(out / "spoken", part, *read_spoken(shared, part), names)
        save_pictures(out / "vehicles", part, *read_vehicles(shared, part, count), list(VEHICLES.values()))


def add_noise(picture: Image.Image, random: np.random.Generator) -> Image.Image:
    """A picture with Gaussian noise of σ = 64."""
    pixels = np.asarray(picture) + 64 * random.standard_normal(picture.size[::-1])
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def save_pictures(
    folder: Path, part: str, pictures: Iterable[Image.Image], labels: np.ndarray, names: list[str]
) -> None:
    """A part of a task, and the names of its classes."""
    folder.mkdir(parents=True, exist_ok=True)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"image": [picture.convert("RGB") for picture in pictures], "label": labels}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(str(folder / f"{part}.parquet"))
    (folder / "labels.json").write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")


def read_domain(shared: Path, domain: str) -> str:
    """All text of a domain, as far as it is needed."""
    if domain == "code":
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        return "\n".join(path.read_text(encoding="utf-8") for path in paths)
    if domain == "manual":
        return "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    if domain == "tweets":
        return "\n".join(str(row["text"]) for row in read_part(shared / "tweeteval", "emotion", "train"))
    if domain == "names":
        # without the ideographs, whose names are numbers
        return "\n".join(filter(None, (unicodedata.name(chr(code), "") for code in range(0x3000))))
    random = np.random.default_rng(2)
    return "\n".join(f"{a}+{b}={a + b}" for a, b in random.integers(1000, size=(40_000, 2)))


def write_texts(shared: Path, out: Path) -> None:
    """Pieces of each domain; the tested ones come from the last fifth of it. The base has three domains in one."""
    base: dict[str, list[str]] = {"train": [], "test": []}
    for domain in DOMAINS:
        content = read_domain(shared, domain).encode()
        cut = len(content) * 4 // 5
        for part, text, length, count in (
            ("train", content[:cut], TRAIN_BYTES, TRAIN_TEXTS),
            ("test", content[cut:], TEST_BYTES, TEST_TEXTS),
        ):
            pieces = cut_pieces(text, length, count)
            save_texts(out / domain, part, pieces)
            if domain in BASE_DOMAINS:
                base[part] += pieces
    for part, pieces in base.items():
        save_texts(out / "base", part, pieces)


def cut_pieces(text: bytes, length: int, count: int) -> list[str]:
    """Pieces at equal distances; bytes of a character that was cut are left out."""
    starts = np.linspace(0, max(0, len(text) - length), count).astype(int)
    return [text[start : start + length].decode(errors="ignore") for start in starts]


def save_texts(folder: Path, part: str, pieces: list[str]) -> None:
    """A part of a domain as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": piece}) + "\n" for piece in pieces)
    (folder / f"{part}.jsonl").write_text(lines, encoding="utf-8")


SETS = {
    kit.name: kit
    for kit in (
        Set(
            "tweets",
            TweetTask,
            TASKS,
            "f1",
            True,
            EXAMPLES / "finetune.yaml",
            {},
            write_tweets,
            ready_base=copy_minilm,
            learning={"steps": 10, "learning_rate": 0.02, "batch_size": 8},
        ),
        Set(
            "pictures",
            PictureTask,
            ("turned", "negative", "noisy", "parity", "spoken", "vehicles"),
            "accuracy",
            True,
            EXAMPLES / "pictures.yaml",
            {"max_steps": 150, "learning_rate": 5e-4, "warmup_steps": 15},
            write_pictures,
            exclude=("classifier",),
            learning={"steps": 60, "learning_rate": 0.005, "batch_size": 16},
        ),
        Set(
            "texts",
            ByteTask,
            DOMAINS,
            "bits_per_byte",
            False,
            EXAMPLES / "texts.yaml",
            {"max_steps": 120, "learning_rate": 1e-3, "warmup_steps": 12},
            write_texts,
        ),
    )
}
