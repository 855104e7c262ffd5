"""End of a command by SIGINT or SIGTERM, without what it keeps in temporary folders."""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

# Seconds that other threads have to end: those of huggingface_hub send large files, and cannot be interrupted.
_GRACE_SECONDS = 5.0


class Interrupted(KeyboardInterrupt):
    """A signal, as an exception of the main thread that no library takes for an error."""


class Ended(click.ClickException):
    """The end by a signal: exit code 130 for SIGINT, 143 for SIGTERM, as shells have it."""

    def __init__(self, number: int, advice: str) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}; {advice}")
        self.exit_code = 128 + number


@contextmanager
def ended_by_signals(advice: str) -> Iterator[None]:
    """
    Has SIGINT and SIGTERM end what is inside with a line that says `advice`. Temporary folders and processes that wait
    in the main thread go as at any exception; if another thread does not end in time, the whole process does.
    """
    # What `nohup` and a shell's background have switched off stays off; only the main thread may set handlers.
    in_main = threading.current_thread() is threading.main_thread()
    known = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    numbers = [each for each in known if signal.getsignal(each) != signal.SIG_IGN]
    came: list[Ended] = []
    with tempfile.TemporaryDirectory(prefix="hf-ext-") as place:

        def end_all() -> None:
            shutil.rmtree(place, ignore_errors=True)
            os.write(2, f"Error: {came[0].message}\n".encode())
            os._exit(came[0].exit_code)

        timer = threading.Timer(_GRACE_SECONDS, end_all)
        timer.daemon = True

        def stop(number: int, frame: FrameType | None) -> None:
            for each in numbers:
                signal.signal(each, signal.SIG_IGN)
            came.append(Ended(number, advice))
            timer.start()
            raise Interrupted

        before = {number: signal.signal(number, stop) for number in numbers}
        # All temporary folders of the command lie in this one.
        tempfile.tempdir, outside = place, tempfile.tempdir
        try:
            yield
        except Interrupted:
            raise came[0] from None
        finally:
            timer.cancel()
            tempfile.tempdir = outside
            for number, handler in before.items():
                signal.signal(number, handler)
