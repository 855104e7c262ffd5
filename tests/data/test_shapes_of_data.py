"""docs/data.md: the command before each block reads the layout that the block shows."""

import re
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hf_ext.data.survey import look_at
from hf_ext.data.writing import write_recipe

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
SHAPES = re.findall(
    r"\*\*(.+?):\*\* `hf-ext init (\w+) r --data (\S+)`.*?\n\n```(?:text|csv)\n(.*?)\n```", PAGE.read_text("utf-8")
    , re.DOTALL
)  # fmt: skip
COPIES = 6


def write_file(path: Path, number: int) -> None:
    """A small file of the kind that its ending says, another for each number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        Image.effect_noise((40, 40), 10 + number).convert("RGB").save(path)
    elif path.suffix == ".wav":
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes((np.sin(np.arange(800) * number / 9) * 9000).astype(np.int16).tobytes())
    elif path.suffix == ".csv":
        path.write_text("x,y\n" + "".join(f"{number + step},{step}\n" for step in range(5)), encoding="utf-8")
    else:
        path.write_text(f"words of number {number}", encoding="utf-8")


def write_shape(place: str, block: str) -> None:
    """What a block shows: a table, an array, or files, of which there are several."""
    lines = block.splitlines()
    if place.endswith(".txt"):
        rows = [f"{line} {copy}" for copy in range(COPIES) for line in lines]
        Path(place).write_text("\n".join(rows), encoding="utf-8")
        return
    if "," in lines[0]:
        if place.endswith(".csv"):
            first, rows = lines[0].partition(",")[0], []
            for copy in range(COPIES):
                for index, row in enumerate(lines[1:], copy * (len(lines) - 1)):
                    key, _, rest = row.partition(",")
                    # Times rise, patients come once, a machine has several rows.
                    names = {"time": f"{index / 10}", "patient": f"p{index}", "machine": f"{key}-{copy}"}
                    rows.append(f"{names[first]},{rest}")
            Path(place).write_text("\n".join([lines[0], *rows]), encoding="utf-8")
        else:
            np.savez(place, X=np.random.default_rng(0).normal(size=(8, 9, 2)), y=np.arange(8) % 2)
        return
    names = []
    for number in range(1, COPIES + 1):
        for line in lines:
            if not line.endswith("labels.csv"):
                names.append(re.sub(r"\d+(?=\.\w+$)", str(number), line))
                write_file(Path(names[-1]), number + 7 * lines.index(line))
    for line in lines:
        if line.endswith("labels.csv"):
            rows = [f"{Path(name).name},{'ab'[index // 2 % 2]}" for index, name in enumerate(dict.fromkeys(names))]
            Path(line).write_text("\n".join(["name,label", *rows]), encoding="utf-8")


def test_the_page_shows_them():
    assert len(SHAPES) >= 11


@pytest.mark.parametrize(("title", "method", "place", "block"), SHAPES, ids=[shape[0] for shape in SHAPES])
def test_a_shape_is_understood(tmp_path, monkeypatch, title, method, place, block):
    monkeypatch.chdir(tmp_path)
    write_shape(place, block)
    survey = look_at(place, restores=method == "semanir")
    assert survey.kind in {"semanir": ("pictures", "pairs"), "dit": ("pictures",)}.get(
        method, ("series", "sounds", "texts", "pictures")
    )
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
    place = tmp_path / "blocks.csv"
    lines = [f"{step},{step * 37 % 11 / 7:.3f},{label}" for step, label in enumerate(blocks)]
    place.write_text("\n".join(["time,x,label", *lines]))
    told = [note for note in look_at(str(place)).notes if "WARNING" in note]
    assert len(told) == bool(unknown or unmeasured)
    first, _, second = " ".join(told).partition("the evaluation")
    assert all(name in first for name in unknown) and all(name in second for name in unmeasured)
