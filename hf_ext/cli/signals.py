"""End of a command by SIGINT or SIGTERM, without what it keeps in temporary folders."""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

# Seconds that other threads have to end: those of huggingface_hub send large files, and cannot be interrupted.
_GRACE_SECONDS = 5.0


class Interrupted(KeyboardInterrupt):
    """A signal, as an exception that no library takes for an error; its argument is the exit code."""


@contextmanager
def ended_by_signals(advice: str) -> Iterator[None]:
    """
    Has SIGINT and SIGTERM end what is inside with a line and, as shells have it, exit code 130 or 143. Temporary
    folders and the processes that it waits for go as at any exception. If a thread does not end, the process does.
    """
    # Only the main thread may set handlers, and what `nohup` and a shell's background have switched off stays off.
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before: dict[signal.Signals, Any] = {}
    with tempfile.TemporaryDirectory(prefix="hf-ext-") as place:

        def stop(number: int, frame: FrameType | None) -> None:
            for each in before:
                signal.signal(each, signal.SIG_IGN)
            os.write(2, f"Error: interrupted by {signal.Signals(number).name}; {advice}\n".encode())
            # It is not cancelled, since Python waits for threads after the last line too.
            last = threading.Timer(_GRACE_SECONDS, _end, (place, 128 + number))
            last.daemon = True
            last.start()
            raise Interrupted(128 + number)

        # All temporary folders of the command lie in this one.
        tempfile.tempdir, outside = place, tempfile.tempdir
        try:
            for each in numbers:
                if (handler := signal.getsignal(each)) != signal.SIG_IGN:
                    before[each] = handler
                    signal.signal(each, stop)
            yield
        except Interrupted as stopped:
            raise click.exceptions.Exit(stopped.args[0]) from None
        finally:
            tempfile.tempdir = outside
            for each, handler in before.items():
                signal.signal(each, handler)


def _end(place: str, code: int) -> None:
    shutil.rmtree(place, ignore_errors=True)
    os._exit(code)
