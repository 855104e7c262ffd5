"""Figures of matplotlib, which comes with the extra `plots`; they become pictures, never windows."""

import os
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image


def new_figure(width: float, height: float) -> Any:
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


def picture_of(figure: Any) -> Image.Image:
    """The figure as a picture in RGB."""
    figure.canvas.draw()
    return Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3].copy())
