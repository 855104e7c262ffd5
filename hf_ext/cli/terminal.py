"""The options -q and -v of every command."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import click

from hf_ext.terminal import escape_line, is_quiet

# Variables that -q and -v set: our own, and those that libraries read when they are imported.
_LIBRARIES = ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY", "DATASETS_VERBOSITY", "HF_HUB_VERBOSITY")
_BARS = ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")
_SETTINGS = ("HF_EXT_QUIET", "HF_EXT_DEBUG", *_LIBRARIES, *_BARS)
# Modules with the verbosity of libraries that are imported already.
_LOGGING = ("transformers.utils.logging", "diffusers.utils.logging", "datasets.utils.logging")


@contextlib.contextmanager
def kept_settings() -> Iterator[None]:
    """Limits the settings of -q and -v to one command and its child processes."""
    before = {name: os.environ.get(name) for name in _SETTINGS}
    if not (sys.stderr and sys.stderr.isatty()):
        # Progress bars of libraries would fill a log.
        os.environ |= {name: "1" for name in _BARS if before[name] is None}
    logger = logging.getLogger("hf_ext")
    level, handlers = logger.level, list(logger.handlers)
    # `datasets` logs broken files, with unescaped file names; our errors report them as well.
    readers = logging.getLogger("datasets.packaged_modules")
    before_readers = readers.level
    readers.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        logger.setLevel(level)
        readers.setLevel(before_readers)
        logger.handlers[:] = handlers
        for name in _SETTINGS:
            os.environ.pop(name, None)
        os.environ |= {name: value for name, value in before.items() if value is not None}


def set_loudness(context: click.Context, option: click.Parameter, given: bool) -> None:
    """Applies -q or -v, before anything is imported or read."""
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
        # Without a handler Python prints warnings only.
        logger.addHandler(logging.StreamHandler())


def add_loudness(command: click.Command | None) -> click.Command | None:
    """Adds the options -q and -v to a command that is no group."""
    if command is None or isinstance(command, click.Group) or any(option.name == "quiet" for option in command.params):
        return command
    texts = {"quiet": "Show errors and results only.", "verbose": "Show more messages, and the traceback of an error."}
    how: dict[str, Any] = {"is_flag": True, "expose_value": False, "is_eager": True, "callback": set_loudness}
    for name, text in texts.items():
        command.params.append(click.Option((f"-{name[0]}", f"--{name}", name), help=text, **how))
    return command


def say(*lines: object, to_stderr: bool = False) -> None:
    """Prints lines; line breaks within one, for instance in a file name, are escaped."""
    for line in lines:
        click.echo(escape_line(str(line)), err=to_stderr)


def note(text: str) -> None:
    """Prints a message that -q suppresses."""
    if not is_quiet():
        say(text)
