"""python examples/mrconv/make_series.py [FOLDER]

Writes small data sets of the kinds that people bring into the new folder FOLDER (default data/series), made from a
seed: sensors/ (vibrations, a CSV file each, with classes and values), beats/ (like an electrocardiogram, with a class
at each position), and from the documentation that comes with Python topics/ (texts).
"""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pandas as pd

from hf_ext.files import whole_folder

COUNTS = {"train": 900, "test": 300}
FAULTS = ("sound", "loose", "worn")
# Of a wave: centre and width as shares of a beat, height in two leads.
WAVES = {"P": (0.2, 0.025, 0.15, 0.1), "QRS": (0.4, 0.012, 1.0, -0.6), "T": (0.65, 0.05, 0.3, 0.35)}


def make_vibration(fault: str, generator: np.random.Generator) -> tuple[pd.DataFrame, dict[str, float]]:
    """A knock as three axes measure it, 200 times a second: a damped oscillation; its frequency and decay."""
    time = np.arange(generator.integers(160, 257)) / 200
    frequency, decay = generator.uniform(5, 20), generator.uniform(1, 6)
    wave = np.sin(2 * np.pi * frequency * time + generator.uniform(0, 6.3))
    if fault == "loose":
        # What is loose is stopped on one side.
        wave = np.minimum(wave, 0.2)
    if fault == "worn":
        wave = wave + 0.6 * np.sin(2 * np.pi * 2.7 * frequency * time)
    direction = generator.normal(size=3)
    signal = np.exp(-decay * time)[:, None] * wave[:, None] * direction / np.linalg.norm(direction)
    noise = 0.07 * generator.normal(size=signal.shape)
    table = pd.DataFrame(9.81 * (signal + noise) + [0, 0, 9.81], columns=["x", "y", "z"])
    return table, {"frequency": frequency, "decay": decay}


def make_beats(generator: np.random.Generator) -> pd.DataFrame:
    """Two leads at 100 samples a second; the class of a position is that of its wave, if there is one."""
    count = int(generator.integers(500, 801))
    time, start = np.arange(count) / 100, generator.uniform(-1, 0)
    leads = 0.1 * np.sin(2 * np.pi * generator.uniform(0.1, 0.4) * time)[:, None] + 0.05 * generator.normal(
        size=(count, 2)
    )
    labels = np.full(count, "none", dtype=object)
    while start < time[-1]:
        length = generator.uniform(0.6, 1.1)
        for name, (centre, width, *heights) in WAVES.items():
            # Now and then an atrium does not beat.
            if name == "P" and generator.uniform() < 0.1:
                continue
            place = (time - start) / length - centre * generator.uniform(0.95, 1.05)
            leads += np.exp(-0.5 * (place / width) ** 2)[:, None] * heights * generator.uniform(0.8, 1.2)
            labels[np.abs(place) < 2.5 * width] = name
        start += length
    return pd.DataFrame({"lead1": leads[:, 0], "lead2": leads[:, 1], "label": labels})


def write_all(out: Path) -> None:
    """All three, whole or not at all."""
    if out.exists():
        sys.exit(f"{out} exists: name another folder, or remove it first.")
    with whole_folder(out) as folder:
        for number, (split, count) in enumerate(COUNTS.items()):
            (folder / "sensors" / split).mkdir(parents=True)
            (folder / "beats" / split).mkdir(parents=True)
            rows = []
            for index in range(count):
                name, generator = f"{index:04}.csv", np.random.default_rng((number, index))
                fault = FAULTS[index % len(FAULTS)]
                table, values = make_vibration(fault, generator)
                table.to_csv(folder / "sensors" / split / name, index=False, float_format="%.3f")
                rows.append({"file_name": name, "label": fault, **values})
                if index < count // 3:
                    make_beats(generator).to_csv(folder / "beats" / split / name, index=False, float_format="%.3f")
            pd.DataFrame(rows).to_csv(folder / "sensors" / split / "metadata.csv", index=False)
        (folder / "topics").mkdir()
        for split, kept in (("train", lambda index: index % 10), ("test", lambda index: not index % 10)):
            texts = [text for index, (_, text) in enumerate(sorted(topics.items())) if kept(index)]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (folder / "topics" / f"{split}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 2 or sys.argv[1:] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    write_all(Path(sys.argv[1] if len(sys.argv) == 2 else "data/series"))
