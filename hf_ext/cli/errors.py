"""Exit codes of hf-ext, and how an exception becomes a message on the terminal.

0: done. 1: it was tried and failed (disk, network, the Hub refused, interrupted). 2: what was given cannot be used.
"""

from typing import ClassVar

import click


class Failed(click.ClickException):
    """Something outside failed: the disk, the network, a Hub that refused."""

    exit_code: ClassVar[int] = 1


class Unusable(click.ClickException):
    """What the user gave cannot be used; click's own usage errors end with the same code."""

    exit_code: ClassVar[int] = 2


def library_failures() -> tuple[type[BaseException], ...]:
    """What libraries raise beside OSError when something outside fails; they are imported only when that happens."""
    import httpx2
    from safetensors import SafetensorError

    return (httpx2.HTTPError, SafetensorError)


def message(error: BaseException) -> str:
    """What to show of an exception: its text, or its name where it has none; of a failed request the address too."""
    import httpx2

    text = str(error) or type(error).__name__
    if not isinstance(error, httpx2.RequestError):
        return text
    try:
        return f"{text} ({error.request.url})"
    except RuntimeError:
        # httpx2 raises it where the error belongs to no request.
        return text
