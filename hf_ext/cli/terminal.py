"""The way of all output to the terminal: letters that it cannot show, characters that would command it, -q and -v."""

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

import click

# Of ASCII and Latin-1 all but tab and new line; marks that turn the direction of writing; separators of lines.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# A bar of tqdm returns to the beginning of its line, and moves up from the bars below it.
_MOVES = re.compile(r"\r+|(?:\x1b\[A)+\Z")
# What -q and -v tell: ours, and what the libraries read when they are imported.
_LIBRARIES = ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY")
_BARS = ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")
_SETTINGS = ("HF_EXT_QUIET", "HF_EXT_DEBUG", *_LIBRARIES, *_BARS)
# The module of each library that is told where it is imported already.
_LOGGING = ("transformers.utils.logging", "diffusers.utils.logging", "datasets.utils.logging")


def escape(text: str) -> str:
    r"""The text with escapes, such as `\u001b`, in place of characters that would command a terminal."""
    # Four digits: so a string of JSON stays one.
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _Guarded:
    """A stream of text that lets nobody else command the terminal: names of files, models and labels are anybody's."""

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
    """Standard output and error print everything, and nothing that is not ours commands the terminal."""
    before = sys.stdout, sys.stderr
    if any(stream is None or isinstance(stream, _Guarded) for stream in before):
        yield
        return
    changed = [stream for stream in before if hasattr(stream, "reconfigure")]
    errors = [stream.errors for stream in changed]
    for stream in changed:
        # As Python's own standard error has it; a letter that is missing must not end a command.
        stream.reconfigure(errors="backslashreplace")
    guards: Any = tuple(map(_Guarded, before))
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
def kept_settings() -> Iterator[None]:
    """What -q and -v set lasts for one command, and for the processes that it starts."""
    before = {name: os.environ.get(name) for name in _SETTINGS}
    if not (sys.stderr and sys.stderr.isatty()):
        # The bars of libraries would fill a log.
        os.environ |= {name: "1" for name in _BARS if before[name] is None}
    logger = logging.getLogger("hf_ext")
    level, handlers = logger.level, list(logger.handlers)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def set_loudness(context: click.Context, option: click.Parameter, given: bool) -> None:
    """Sets what -q or -v says, before anything is imported or read."""
    if not given or context.resilient_parsing:
        return
    quiet = option.name == "quiet"
    if os.environ.get("HF_EXT_DEBUG" if quiet else "HF_EXT_QUIET", "0") == "1":
        raise click.UsageError("-q and -v contradict each other; give one of them.", context)
    os.environ["HF_EXT_QUIET" if quiet else "HF_EXT_DEBUG"] = "1"
    word = "error" if quiet else "info"
    os.environ |= dict.fromkeys(_LIBRARIES, word)
    logger = logging.getLogger("hf_ext")
    logger.setLevel(word.upper())
    for name in _LOGGING:
        if name in sys.modules:
            getattr(sys.modules[name], f"set_verbosity_{word}")()
    if quiet:
        os.environ |= dict.fromkeys(_BARS, "1")
        warnings.simplefilter("ignore")
    else:
        # Without a handler Python shows warnings only.
        logger.addHandler(logging.StreamHandler())


def add_loudness(command: click.Command) -> click.Command:
    """The command with the options -q and -v, which every one has."""
    if not any(option.name == "quiet" for option in command.params):
        texts = {"quiet": "Show errors and results only.", "verbose": "Show more, and the traceback of an error."}
        for name, text in texts.items():
            words = (f"-{name[0]}", f"--{name}", name)
            command.params.append(
                click.Option(words, is_flag=True, expose_value=False, is_eager=True, callback=set_loudness, help=text)
            )
    return command


def is_quiet() -> bool:
    """True after -q."""
    return os.environ.get("HF_EXT_QUIET", "0") == "1"


def is_verbose() -> bool:
    """True after -v, also in the other processes of a training."""
    return os.environ.get("HF_EXT_DEBUG", "0") == "1"


def note(text: str, to_stderr: bool = False) -> None:
    """Prints what is no result and no error: -q leaves it out."""
    if not is_quiet():
        click.echo(text, err=to_stderr)
