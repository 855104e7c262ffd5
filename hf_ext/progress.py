"""Progress of long work: a bar on a terminal, and occasional lines in a log or a pipe."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from threading import Event, Thread
from typing import Any

from tqdm import tqdm

from .terminal import is_quiet

# Seconds between lines in a log or a pipe.
_PAUSE = 30.0
_LINE = "{desc}{percentage:.0f} % ({n_fmt} of {total_fmt}{unit}), {rate_fmt}, {remaining} left{postfix}"
_ENDLESS = "{desc}{n_fmt}{unit}, {rate_fmt}, {elapsed} so far{postfix}"


def progress(items: Iterable[Any] | None = None, description: str = "", *, shown: bool = True, **options: Any) -> Any:
    """
    Shows on standard error how far some work is: items, or calls of [`~tqdm.tqdm.update`]. `hf-ext COMMAND -q` shows
    nothing, nor does a process that is not `shown`; the options are those of `tqdm`.
    """
    hidden = not shown or is_quiet()
    name = f"{description}: " if description else None
    if hidden or sys.stderr.isatty():
        return tqdm(items, name, disable=hidden, **options)
    return _Lines(items, name, **{**options, "mininterval": _PAUSE, "miniters": 0})


@contextlib.contextmanager
def waiting(description: str) -> Iterator[None]:
    """Writes a line every 30 seconds, where no terminal shows a library's own bars, until the block ends."""
    if is_quiet() or sys.stderr.isatty():
        yield
        return
    begun, ended, stream = time.monotonic(), Event(), sys.stderr

    def tell() -> None:
        while not ended.wait(_PAUSE):
            stream.write(f"{description}: {time.monotonic() - begun:.0f} s so far\n")
            stream.flush()

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


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
