"""gradio, imported so that no event loop of its own is left open; where it is not installed nothing here runs."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.kit.pictures import noise


@contextlib.contextmanager
def closed_loops() -> Iterator[None]:
    """
    gradio makes event loops for its locks, at import and for each page, and forgets them: Python warns of each that is
    collected, and where warnings are errors that ends whatever is imported just then. They are kept and closed.
    """
    make, made = asyncio.new_event_loop, []

    def new_event_loop() -> asyncio.AbstractEventLoop:
        made.append(make())
        return made[-1]

    asyncio.new_event_loop = new_event_loop
    try:
        yield
    finally:
        asyncio.new_event_loop = make
        asyncio.set_event_loop(None)
        for loop in made:
            loop.close()


try:
    with closed_loops():
        import gradio  # noqa: F401
except ModuleNotFoundError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def without_open_loops() -> Iterator[None]:
    """The same for pages that a test makes."""
    with closed_loops():
        yield


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A small picture with noise."""
    Image.fromarray(noise(24, 40, 3)).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"
