"""The ten TweetEval tasks of the study: their files as JSON lines, and how long each is trained."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

SEED = 0
TRAIN_LIMIT, VALIDATION_LIMIT, TEST_LIMIT = 10_000, 500, 5_000
PARTS = {"train": ("train", TRAIN_LIMIT), "validation": ("val", VALIDATION_LIMIT), "test": ("test", TEST_LIMIT)}


class Tweets(NamedTuple):
    """One task: its folder below TweetEval's, and the epochs that the budget gives it."""

    folder: str
    epochs: int


# Smallest first. Stance has 355 to 620 training tweets for each target, irony 2,862, emotion 3,257.
TASKS = {
    "climate": Tweets("stance/climate", 10),
    "atheism": Tweets("stance/atheism", 10),
    "abortion": Tweets("stance/abortion", 10),
    "feminist": Tweets("stance/feminist", 10),
    "hillary": Tweets("stance/hillary", 10),
    "irony": Tweets("irony", 4),
    "emotion": Tweets("emotion", 4),
    "hate": Tweets("hate", 2),
    "offensive": Tweets("offensive", 2),
    "emoji": Tweets("emoji", 3),
}


def label_names(tweeteval: Path, task: str) -> list[str]:
    """The names of a task's classes; emoji have a description in the third column."""
    folder = tweeteval / TASKS[task].folder
    mapping = folder if (folder / "mapping.txt").is_file() else folder.parent
    lines = (mapping / "mapping.txt").read_text(encoding="utf-8").strip("\n").split("\n")
    return [line.split("\t")[2 if task == "emoji" else 1].strip("_") for line in lines]


def read_part(tweeteval: Path, task: str, part: str) -> list[dict[str, str | int]]:
    """The tweets of a part; where they are more than its limit, a seeded choice of them in their order."""
    prefix, limit = PARTS[part]
    folder = tweeteval / TASKS[task].folder
    # Only "\n" ends a tweet; some hold other line separators.
    texts, labels = (
        (folder / f"{prefix}_{kind}.txt").read_text(encoding="utf-8").strip("\n").split("\n")
        for kind in ("text", "labels")
    )
    if len(texts) != len(labels):
        raise ValueError(f"{folder}: {len(texts)} tweets in {prefix}_text.txt, {len(labels)} in {prefix}_labels.txt.")
    chosen = np.arange(len(texts))
    if len(texts) > limit:
        chosen = np.sort(np.random.default_rng(SEED).permutation(len(texts))[:limit])
    return [{"text": texts[index].strip(), "label": int(labels[index])} for index in chosen]


def write_task(tweeteval: Path, task: str, out: Path) -> int:
    """Writes train, validation and test as JSON lines and the names of the classes; the number of training tweets."""
    out.mkdir(parents=True, exist_ok=True)
    counts = {}
    for part in PARTS:
        rows = read_part(tweeteval, task, part)
        counts[part] = len(rows)
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    (out / "labels.json").write_text(json.dumps(label_names(tweeteval, task), ensure_ascii=False), encoding="utf-8")
    return counts["train"]
