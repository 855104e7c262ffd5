"""The three TweetEval tasks of the study: their files as JSON lines."""

import json
from pathlib import Path

import numpy as np

SEED = 0
TRAIN_LIMIT, TEST_LIMIT = 3_000, 200
PARTS = {"train": ("train", TRAIN_LIMIT), "test": ("test", TEST_LIMIT)}
TASKS = ("irony", "emotion", "hate")


def read_part(tweeteval: Path, task: str, part: str) -> list[dict[str, str | int]]:
    """The tweets of a part; where they are more than its limit, a seeded choice of them in their order."""
    prefix, limit = PARTS[part]
    folder = tweeteval / task
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


def write_task(tweeteval: Path, task: str, out: Path) -> None:
    """Writes train and test as JSON lines, and the names of the classes."""
    out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        # tweets of one length in one batch need no padding
        rows = sorted(read_part(tweeteval, task, part), key=lambda row: len(str(row["text"])))
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    classes = (tweeteval / task / "mapping.txt").read_text(encoding="utf-8").strip("\n").split("\n")
    names = [line.split("\t")[1] for line in classes]
    (out / "labels.json").write_text(json.dumps(names, ensure_ascii=False), encoding="utf-8")
