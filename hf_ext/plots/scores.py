"""Scores of a merge's tasks as shares of the individual models' scores, drawn by Pillow."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_ext.files import whole_file

from .merges import LETTER, Paper

BAR, MEAN = "#0072b2", "#e69f00"


def draw_scores(result: Mapping[str, Any], path: str | Path) -> None:
    """
    Draws a bar for each task and one for their mean; a line marks the individual models.

    Args:
        result (`Mapping`): What [`hf_ext.training.evaluate_all`] returns, with the individual models' scores.
        path (`str` or `Path`): The PNG file.
    """
    rows = [(name, row.get("of_individual"), row["value"]) for name, row in result["tasks"].items()]
    mean = result["mean"]
    rows.append(("mean", mean.get("of_individual"), mean["value"]))
    known = [share for _, share, _ in rows if share is not None]
    edge = max(1.0, *known) if known else 1.0
    left, room, width = 0.3 + LETTER * max(len(name) for name, _, _ in rows), 0.24, 4.0
    paper = Paper(left + width + 1.6, 0.75 + room * len(rows))
    paper.text(left, 0.25, "score, as a share of the individual model's", size=9, anchor="lm")
    for place, (name, share, value) in enumerate(rows):
        y = 0.5 + room * (place + 0.5)
        paper.text(left - 0.08, y, name, anchor="rm")
        # Below zero, as a correlation may be, there is no bar.
        wide = width * max(share or 0.0, 0.0) / edge
        paper.box((left, y - 0.08, wide, 0.16), fill=MEAN if place == len(rows) - 1 else BAR)
        told = "no share" if share is None else f"{100 * share:.1f} %"
        paper.text(left + width + 0.1, y, f"{told}  ({value:.4f})", anchor="lm")
    bottom = 0.5 + room * len(rows)
    paper.line((left, 0.5), (left, bottom))
    paper.line((left + width / edge, 0.5), (left + width / edge, bottom), color="#d55e00")
    with whole_file(path) as file:
        paper.image.save(file, format="PNG")
