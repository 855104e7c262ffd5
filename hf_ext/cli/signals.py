"""End of a command by SIGINT or SIGTERM: one line, and the exit code that shells give."""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import click

# Seconds that other threads have to end: those of huggingface_hub send large files, and cannot be interrupted.
_GRACE_SECONDS = 5.0
# Seconds that an import has: those of torch and transformers take longer, and what is imported is not needed any more.
_IMPORT_SECONDS = 1.5
# Seconds after which a signal that met an import comes again.
_RETRY_SECONDS = 0.05


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
    met: list[int] = []
    owner, outside = os.getpid(), tempfile.tempdir
    folder = tempfile.TemporaryDirectory(prefix="hf-ext-") if own_folder else nullcontext()
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
            met.append(number)
            os.write(2, f"{_describe(signal.Signals(number).name, advice)}\n".encode())
            # It is not cancelled, since Python waits for threads after the last line too.
            seconds = _IMPORT_SECONDS if _is_importing(frame) else _GRACE_SECONDS
            _call_later(seconds, _end, place, 128 + number)
            _leave(number, frame)

        tempfile.tempdir = place or outside
        try:
            for each in numbers:
                if (handler := signal.getsignal(each)) not in (None, signal.SIG_IGN):
                    before[each] = handler
                    signal.signal(each, stop)
            try:
                yield
            finally:
                # Also where the command came to its own end before the signal came again.
                if met:
                    raise click.exceptions.Exit(128 + met[0]) from None
        except KeyboardInterrupt:
            # Not from here: of a launched process, or of a library.
            if os.environ.get("RANK", "0") == "0":
                click.echo(_describe("SIGINT", advice), err=True)
            raise click.exceptions.Exit(128 + signal.SIGINT) from None
        finally:
            tempfile.tempdir = outside
            for each, handler in before.items():
                signal.signal(each, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """Raises [`Interrupted`] as soon as no module is being imported."""
    # A library whose import is cut short is half there: torch and NumPy then fail in ways of their own, or abort the
    # process. So the signal comes again until the import is over.
    if _is_importing(frame):
        signal.signal(number, _leave)
        _call_later(_RETRY_SECONDS, _signal_main_thread, number)
        return
    signal.signal(number, signal.SIG_IGN)
    raise Interrupted(number)


def _signal_main_thread(number: int) -> None:
    if signal.getsignal(number) is not _leave:
        # The command has come to its own end meanwhile.
        return
    # Sent to another thread, a signal would not end what the main thread waits for. Windows cannot choose.
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _call_later(seconds: float, function: Callable[..., Any], *arguments: Any) -> None:
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def _describe(name: str, advice: str) -> str:
    return f"Error: interrupted by {name}{f'; {advice}' if advice else '.'}"


def _end(place: str | None, code: int) -> None:
    if place is not None:
        shutil.rmtree(place, ignore_errors=True)
    os._exit(code)
