"""End of a command by SIGINT or SIGTERM: one line, and the exit code that shells give."""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import click

# Seconds that other threads have to end: those of huggingface_hub send large files, and cannot be interrupted.
_GRACE_SECONDS = 5.0


class Interrupted(KeyboardInterrupt):
    """A signal, which has been reported, as an exception that no library takes for an error."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@contextmanager
def ended_by_signals(advice: str = "", *, own_folder: bool = False) -> Iterator[None]:
    """
    Has SIGINT and SIGTERM end what is inside with a line and, as shells have it, exit code 130 or 143. Files and
    processes that it waits for go as at any exception. If a thread does not end, the process does; with `own_folder`
    all temporary folders go with it.
    """
    # Only the main thread may set handlers, and what `nohup` and a shell's background have switched off stays off. Of
    # several processes the launcher decides: one that waits for another in gloo would not come to a handler.
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main and "LOCAL_RANK" not in os.environ else ()
    before: dict[signal.Signals, Any] = {}
    owner, outside = os.getpid(), tempfile.tempdir
    folder: AbstractContextManager[str | None] = nullcontext()
    if own_folder:
        folder = tempfile.TemporaryDirectory(prefix="hf-ext-")
    with folder as place:

        def stop(number: int, frame: FrameType | None) -> None:
            if os.getpid() != owner:
                # A process that was forked meanwhile, such as a loader's: it ends as it would without us.
                for each, handler in before.items():
                    signal.signal(each, handler)
                os.kill(os.getpid(), number)
                return
            for each in before:
                signal.signal(each, signal.SIG_IGN)
            os.write(2, f"{_describe(signal.Signals(number).name, advice)}\n".encode())
            # It is not cancelled, since Python waits for threads after the last line too.
            last = threading.Timer(_GRACE_SECONDS, _end, (place, 128 + number))
            last.daemon = True
            last.start()
            raise Interrupted(number)

        tempfile.tempdir = place or outside
        try:
            for each in numbers:
                if (handler := signal.getsignal(each)) not in (None, signal.SIG_IGN):
                    before[each] = handler
                    signal.signal(each, stop)
            yield
        except Interrupted as stopped:
            raise click.exceptions.Exit(stopped.exit_code) from None
        except KeyboardInterrupt:
            # Not from here: of a launched process, or of a library.
            if os.environ.get("RANK", "0") == "0":
                click.echo(_describe("SIGINT", advice), err=True)
            raise click.exceptions.Exit(128 + signal.SIGINT) from None
        finally:
            tempfile.tempdir = outside
            for each, handler in before.items():
                signal.signal(each, handler)


def _describe(name: str, advice: str) -> str:
    return f"Error: interrupted by {name}{f'; {advice}' if advice else '.'}"


def _end(place: str | None, code: int) -> None:
    if place is not None:
        shutil.rmtree(place, ignore_errors=True)
    os._exit(code)
