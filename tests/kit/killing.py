"""Work that ends in the middle, as by a kill, in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Killed(BaseException):
    """Ends the work as a kill would: nothing catches it."""


@contextmanager
def killed(*functions: tuple[Any, str], after: int) -> Iterator[None]:
    """A block that ends as a kill does, in place of one more call of these functions (owner, name) than `after`."""
    done: list[str] = []

    def count(name: str, plain: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            if len(done) > after:
                raise Killed
            return plain(*arguments, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        for owner, name in functions:
            patch.setattr(owner, name, count(name, getattr(owner, name)))
        yield
