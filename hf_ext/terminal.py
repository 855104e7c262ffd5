"""Safe output to a terminal: escapes unprintable characters and control sequences."""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

# Of ASCII and Latin-1 all but tab and new line; marks that turn the direction of writing; separators of lines.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# A bar of tqdm returns to the beginning of its line, and moves up from the bars below it.
_MOVES = re.compile(r"\r+|(?:\x1b\[A)+\Z")


def escape(text: str) -> str:
    r"""The text with escapes, such as `\u001b`, in place of characters that would command a terminal."""
    # Four digits: so a string of JSON stays one.
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def escape_line(text: str) -> str:
    r"""As [`escape`], and `\u000a` for a new line, so that the name of a file cannot write a line of its own."""
    return escape(text).replace("\n", "\\u000a")


def count_of(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun: `1 example`, `1,200 examples`; `plural` where it is not the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def show_lines(error: BaseException, text: str) -> str:
    r"""The text of an exception in which no name of a file begins a line: `\u000a` is the new line of a name."""
    # Errors of ours and of click are one line; where they cite other lines, these stand two blanks further in. Those
    # of libraries may have several, which are moved there.
    ours = type(error).__module__.partition(".")[0] in ("hf_ext", "hf_ext_cli", "click")
    return re.sub(r"\n(?!  )", r"\\u000a" if ours else "\n  ", text.strip())


class _Guarded:
    """A text stream that escapes control sequences, since names of files, models and labels are untrusted."""

    # Whatever is printed comes by: click's own errors, the lines of libraries, the text that a model writes. What may
    # move is a bar, which begins with a return or is nothing but steps upwards; a name stands in a line with other
    # words, or ends with a new line. Our own styles are drawn by rich on the stream within (`output.find_terminal`),
    # whose texts were escaped before.

    def __init__(self, stream: TextIO):
        self.within = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.within, name)

    @property
    def encoding(self) -> str:
        """That of the stream; of ASCII its superset Latin-1, as click goes round a stream of ASCII."""
        name = self.within.encoding or "utf-8"
        return "latin-1" if name.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968", "646") else name

    def fileno(self) -> int:
        """The number of the file; on Windows none: click would write to the console itself."""
        if sys.platform == "win32":
            raise OSError("a guarded stream of Windows has no number")
        return self.within.fileno()

    def write(self, text: str) -> int:
        """Writes a text with its commands escaped; a bar's moves at its beginning stay."""
        moves = _MOVES.match(text)
        start = moves.end() if moves else 0
        self.within.write(text[:start] + escape(text[start:]))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Writes texts as [`write`] does."""
        for line in lines:
            self.write(line)


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Guards standard output and error: all text is printable, and foreign control sequences are escaped."""
    before = sys.stdout, sys.stderr
    if any(isinstance(stream, _Guarded) for stream in before):
        yield
        return
    with contextlib.ExitStack() as opened:
        # A service may close them. Then a file of the user's would get their numbers, to which libraries write.
        streams = [stream or opened.enter_context(open(os.devnull, "w", encoding="utf-8")) for stream in before]
        changed = [stream for stream in streams if hasattr(stream, "reconfigure")]
        errors = [stream.errors for stream in changed]
        for stream in changed:
            # As Python's own standard error has it; a letter that is missing must not end a command.
            stream.reconfigure(errors="backslashreplace")
        guards: Any = tuple(map(_Guarded, streams))
        sys.stdout, sys.stderr = guards
        try:
            yield
        finally:
            # Click puts another stream in the place of one whose reader has gone.
            if (sys.stdout, sys.stderr) == guards:
                sys.stdout, sys.stderr = before
            for stream, kept in zip(changed, errors, strict=True):
                if not stream.closed:
                    stream.reconfigure(errors=kept)


@contextlib.contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Gives the logger of a library another level until the block ends."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def is_quiet() -> bool:
    """True after -q."""
    return os.environ.get("HF_EXT_QUIET", "0") == "1"


def is_verbose() -> bool:
    """True after -v, also in the other processes of a training."""
    return os.environ.get("HF_EXT_DEBUG", "0") == "1"
