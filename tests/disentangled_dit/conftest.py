"""Warnings of diffusers' schedulers, which make numpy arrays of tensors: numpy 2 deprecates that."""

from pathlib import Path

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.is_relative_to(Path(__file__).parent):
        for text in ("__array__ implementation doesn't accept a copy", "__array_wrap__ must accept context"):
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}:DeprecationWarning"))
