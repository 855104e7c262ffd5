"""Groups of commands, which suggest a command for an unknown name, and the options -q and -v of every command."""

import contextlib
import difflib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import click

from hf_ext.terminal import log_level

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
    try:
        # `datasets` logs broken files, with unescaped file names; our errors report them as well.
        with log_level("datasets.packaged_modules", logging.CRITICAL), warnings.catch_warnings():
            yield
    finally:
        logger.setLevel(level)
        logger.handlers[:] = handlers
        for name in _SETTINGS:
            os.environ.pop(name, None)
        os.environ |= {name: value for name, value in before.items() if value is not None}


def _set_loudness(context: click.Context, option: click.Parameter, given: bool) -> None:
    """Applies -q or -v, before anything is imported or read."""
    if not given or context.resilient_parsing:
        return
    quiet = option.name == "quiet"
    ours, others, word = ("QUIET", "DEBUG", "error") if quiet else ("DEBUG", "QUIET", "info")
    if os.environ.get(f"HF_EXT_{others}", "0") == "1":
        raise click.UsageError("-q and -v contradict each other; give one of them.", context)
    os.environ |= {f"HF_EXT_{ours}": "1"} | dict.fromkeys(_LIBRARIES, word)
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
    how: dict[str, Any] = {"is_flag": True, "expose_value": False, "is_eager": True, "callback": _set_loudness}
    command.params += [click.Option((f"-{name[0]}", f"--{name}"), help=text, **how) for name, text in texts.items()]
    return command


class Group(click.Group):
    """A group that suggests commands of any group for an unknown name, and adds -q and -v to its commands."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return add_loudness(super().get_command(ctx, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # click refuses options itself, and shell completion passes unfinished names.
        if name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        root = ctx.find_root()
        # The same name in another group is the closest: `dit sample` suggests `sample`.
        places = {" ".join(path): path[-1] for path in _paths(root, root.command)}
        close = difflib.get_close_matches(name, [*places.values()], n=1)
        meant = [repr(f"hf-ext {place}") for place, last in places.items() if last in close]
        known = f"the commands are {', '.join(self.list_commands(ctx))}."
        within = " ".join(["hf-ext", *ctx.command_path.split()[1:], name])
        hint = f"did you mean {' or '.join(meant)}?" if meant else known
        raise click.UsageError(f"no command {within!r}; {hint}", ctx)


def _paths(ctx: click.Context, command: click.Command | None) -> Iterator[tuple[str, ...]]:
    """The path of every command below a group."""
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            yield (name,)
            for rest in _paths(ctx, command.get_command(ctx, name)):
                yield (name, *rest)
