"""Figures of matplotlib, which comes with the extra `plots`; they become files or pictures, never windows."""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from .files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of a size in inches, whose parts are laid out so that no text overlaps."""
    # A notebook names its own backend to all that it starts, also to an `hf-ext` of another environment, where
    # importing matplotlib then fails. Nothing here is shown in a window: any backend will do.
    backend = os.environ.get("MPLBACKEND", "")
    if backend.startswith("module://") and find_spec(backend.removeprefix("module://").partition(".")[0]) is None:
        os.environ["MPLBACKEND"] = "agg"
    # Imported here: it takes half a second, and most programs draw nothing.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: str | Path, dpi: float = 110) -> Path:
    """Writes a PNG that is whole or absent."""
    with warnings.catch_warnings(), whole_file(path) as file:
        # A name may have letters that the font lacks; they become boxes.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure.savefig(file, format="png", dpi=dpi)
    return Path(path)


def picture_of(figure: "Figure") -> Image.Image:
    """The figure as a picture in RGB."""
    canvas: Any = figure.canvas
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
