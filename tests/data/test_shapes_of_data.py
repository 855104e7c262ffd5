"""docs/data.md: the command before each block reads the layout that the block shows."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from hf_ext.data.survey import look_at
from hf_ext.data.writing import write_recipe
from tests.kit.own_data import write_files

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
SHAPES = re.findall(
    r"\*\*(.+?):\*\* `hf-ext init (\w+) r --data (\S+)`.*?\n\n```(?:text|csv)\n(.*?)\n```", PAGE.read_text("utf-8")
    , re.DOTALL
)  # fmt: skip
COPIES = 6


def make_file(ending: str, number: int) -> str | bytes:
    """What is in a small file of a kind, another for each number."""
    held = io.BytesIO()
    if ending == ".png":
        Image.effect_noise((40, 40), 10 + number).convert("RGB").save(held, "png")
    elif ending == ".wav":
        soundfile.write(held, np.sin(np.arange(800) * number / 9) / 4, 8000, format="WAV")
    elif ending == ".csv":
        return "x,y\n" + "".join(f"{number + step},{step}\n" for step in range(5))
    return held.getvalue() or f"words of number {number}"


def make_table(head: str, lines: list[str]) -> str:
    """A table with copies of the rows that a block shows."""
    rows = [head]
    for index, line in enumerate(lines * COPIES):
        key, _, rest = line.partition(",")
        # Times rise, patients come once, a machine has several rows.
        names = {"time": f"{index / 10}", "patient": f"p{index}", "machine": f"{key}-{index // len(lines)}"}
        rows.append(f"{names[head.partition(',')[0]]},{rest}")
    return "\n".join(rows)


def write_shape(place: str, block: str) -> None:
    """What a block shows: a table, an array, or files, of which there are several."""
    lines = block.splitlines()
    if place.endswith(".npz"):
        np.savez(place, X=np.random.default_rng(0).normal(size=(8, 9, 2)), y=np.arange(8) % 2)
    elif place.endswith(".txt"):
        write_files(".", {place: "\n".join(f"{line} {copy}" for copy in range(COPIES) for line in lines)})
    elif place.endswith(".csv"):
        write_files(".", {place: make_table(lines[0], lines[1:])})
    else:
        files = {
            re.sub(r"\d+(?=\.\w+$)", str(number), line): make_file(Path(line).suffix, number + 7 * lines.index(line))
            for number in range(1, COPIES + 1)
            for line in lines
            if not line.endswith("labels.csv")
        }
        table = "name,label\n" + "".join(f"{Path(name).name},{'ab'[n // 2 % 2]}\n" for n, name in enumerate(files))
        write_files(".", files | {line: table for line in lines if line.endswith("labels.csv")})


def test_the_page_shows_them():
    assert len(SHAPES) >= 11


@pytest.mark.parametrize(("title", "method", "place", "block"), SHAPES, ids=[shape[0] for shape in SHAPES])
def test_a_shape_is_understood(tmp_path, monkeypatch, title, method, place, block):
    monkeypatch.chdir(tmp_path)
    write_shape(place, block)
    survey, kinds = look_at(place, restores=method == "semanir"), {"semanir": "pictures pairs", "dit": "pictures"}
    assert survey.kind in kinds.get(method, "series sounds texts pictures").split()
    assert ("class" in title or survey.kind in ("series", "sounds")) <= (len(survey.classes) == 2)
    assert (survey.kind == "pairs") == title.startswith("Pairs")
    assert (survey.captions is not None) == ("captions" in title)
    assert place.rstrip("/") in write_recipe(method, Path("r"), survey, gpu=False)


@pytest.mark.parametrize(
    ("blocks", "unknown", "unmeasured"),
    [
        (["walk"] * 40 + ["sit"] * 40 + ["run"] * 40, [], ["walk", "sit"]),
        (["walk"] * 48 + ["sit"] * 48 + ["run"] * 24, ["run"], ["walk", "sit"]),
        ([2] * 48 + [1] * 48 + [0] * 24, ["0"], ["1", "2"]),
        (["walk", "sit", "run"] * 40, [], []),
        (["walk"] * 60 + ["walk", "sit"] * 30, [], []),
    ],
)
def test_blocks_of_a_recording_that_a_part_misses_are_told(tmp_path, blocks, unknown, unmeasured):
    lines = [f"{step},{step * 37 % 11 / 7:.3f},{label}" for step, label in enumerate(blocks)]
    place = write_files(tmp_path, {"blocks.csv": "\n".join(["time,x,label", *lines])}) / "blocks.csv"
    told = [note for note in look_at(str(place)).notes if "WARNING" in note]
    assert len(told) == bool(unknown or unmeasured)
    first, _, second = " ".join(told).partition("the evaluation")
    assert all(name in first for name in unknown) and all(name in second for name in unmeasured)
