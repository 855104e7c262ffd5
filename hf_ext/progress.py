"""Progress of long work: a moving bar on a terminal, and a line now and then in a log or a pipe."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from .terminal import is_quiet

# Seconds between the lines of what is no terminal.
_PAUSE = 30.0
_LINE = "{desc}{percentage:.0f} % ({n_fmt} of {total_fmt}{unit}), {rate_fmt}, {remaining} left{postfix}"
_ENDLESS = "{desc}{n_fmt}{unit}, {rate_fmt}, {elapsed} so far{postfix}"


def progress(items: Iterable[Any] | None = None, description: str = "", *, shown: bool = True, **options: Any) -> Any:
    """
    Shows on standard error how far some work is; `hf-ext COMMAND -q` shows nothing.

    Args:
        items (`Iterable`, *optional*): What is worked through; without it, [`~tqdm.tqdm.update`] is called.
        description (`str`, *optional*): The name of the work.
        shown (`bool`, defaults to `True`): Show it, as one process of several does.
        options (`Any`): Of `tqdm`, such as `total`, `initial`, `unit` and `leave`.
    """
    hidden = not shown or is_quiet()
    name = f"{description}: " if description else None
    if hidden or sys.stderr.isatty():
        return tqdm(items, name, disable=hidden, **options)
    return _Lines(items, name, **{**options, "mininterval": _PAUSE, "miniters": 0})


class _Lines(tqdm):  # type: ignore[type-arg]
    """A bar that writes whole lines: where nobody watches, a log keeps them."""

    def update(self, n: float | None = 1) -> bool | None:
        """Counts, and writes a line if the last one is old enough."""
        due = super().update(n)
        if due:
            values = {**self.format_dict, "bar_format": _LINE if self.total else _ENDLESS, "n": round(self.n, 2)}
            # Numbers are padded, to stand still in a bar.
            self.fp.write(f"{' '.join(self.format_meter(**values).split())}\n")
            self.fp.flush()
        return due

    def refresh(self, *_: Any, **__: Any) -> None:
        """Draws nothing: [`update`] decides, and what others write need not be drawn around."""

    def clear(self, *_: Any, **__: Any) -> None:
        """Clears nothing: a line stays."""

    def close(self) -> None:
        """Ends without a last line: the result says that it is done."""
        self.sp = None
        super().close()
