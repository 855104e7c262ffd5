"""Fixtures of the tests of pictures in and out."""

import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def hide_library(monkeypatch) -> Callable[[str], None]:
    """Makes the import of a library fail, as where it is not installed."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)
