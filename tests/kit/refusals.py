"""Refusals by class and facts: no test of a room's functions pins the wording of a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(kind: type[BaseException], *named: object, **fields: Any) -> Iterator[pytest.ExceptionInfo]:
    """
    The block ends with an exception of `kind` whose fields have these values and whose text names these facts.

    A fact is what only the case can know: the option, file, task or number at fault, as a reader looks for it. The
    words around it are free.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    different = {
        name: getattr(error, name, None) for name, value in fields.items() if getattr(error, name, None) != value
    }
    assert not different, f"{error!r} has {different}, not {fields}"
    missing = [str(fact) for fact in named if str(fact) not in str(error)]
    assert not missing, f"{error!r} does not name {missing}"
