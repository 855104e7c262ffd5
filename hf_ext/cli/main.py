"""Command line hf-ext: finds commands, shows help, and turns exceptions into messages and exit codes."""

# Commands import what they call inside their functions: `hf-ext --help` imports neither a model nor torch.
import importlib
import traceback
from typing import Any

import click

from hf_ext import __version__
from hf_ext.terminal import guarded_streams, is_verbose, show_lines

from .errors import classify
from .groups import Group, add_loudness, kept_settings
from .signals import ended_by_signals

# Heading of the help: command: the module of this package that defines a function of that name.
COMMANDS = {
    "Use models": {
        **dict.fromkeys(("restore", "export"), "semanir"),
        "sample": "disentangled_dit",
        **dict.fromkeys(("classify", "generate"), "classify"),
        "app": "serving",
        "merge": "emr",
    },
    "Train and evaluate": {
        "init": "init",
        **dict.fromkeys(("train", "evaluate", "data", "recipes"), "training"),
    },
    "Publish": {"push": "publishing", "card": "publishing", "hub": "serving"},
    "Tools of one method": {"dit": "disentangled_dit", "emr": "emr"},
    "Information": dict.fromkeys(("models", "info", "doctor"), "information"),
}
MODULES = {name: module for commands in COMMANDS.values() for name, module in commands.items()}


class Commands(Group):
    """The group of all commands, each imported on use; expected errors are shown without a traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        return add_loudness(getattr(importlib.import_module(f".{MODULES[cmd_name]}", __package__), cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = formatter.width - max(map(len, MODULES)) - 6
        for heading, commands in COMMANDS.items():
            found = {name: self.get_command(ctx, name) for name in commands}
            with formatter.section(heading):
                formatter.write_dl([(name, one.get_short_help_str(width)) for name, one in found.items() if one])

    def main(self, *arguments: Any, **options: Any) -> Any:
        with guarded_streams(), kept_settings():
            return super().main(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with ended_by_signals():
                return super().invoke(ctx)
        # These carry their own exit code, or are a help; of a closed pipe click says nothing. What lists something
        # prints it at once, so that `hf-ext info x | head -1` is no failure.
        except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError, click.Abort, BrokenPipeError):
            raise
        except click.ClickException as error:
            vars(error)["message"] = show_lines(error, error.message)
            raise
        except Exception as error:
            shown = classify(error)
            if shown is None:
                raise
            if is_verbose():
                click.echo(traceback.format_exc(), err=True)
            raise shown from error


# With `color` click keeps escape codes in its output, which our streams make visible; without it, it removes them in a
# pipe.
@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "color": True})
@click.version_option(__version__, prog_name="hf-ext")
def main() -> None:
    """NeurIPS 2024 methods as Hugging Face plugins: use, train, evaluate, merge and publish their models.

    \b
    Examples:
      hf-ext restore denoise-color photos/ --out restored
      hf-ext classify spoken-digits digit.wav
      hf-ext train semanir/denoise_color --max_steps 100 --data.train.path photos/
      hf-ext merge --base org/base --task a=org/a --task b=org/b --out merged
      hf-ext push runs/denoise/snapshot org/name --private
      hf-ext COMMAND --help

    Every command accepts -q (errors and results only) and -v (more messages, and the traceback of an error).

    \b
    Exit codes: 0 success; 1 failure (disk, network, refused by the Hub); 2 unusable input (options, files,
    configuration); 75 training stopped with its state saved; 130 and 143 ended by Ctrl-C or SIGTERM.

    \b
    Shell completion, for bash (also zsh and fish):
      eval "$(_HF_EXT_COMPLETE=bash_source hf-ext)"
    """


if __name__ == "__main__":
    # `accelerate launch -m hf_ext_cli.main merge ...`
    main(prog_name="hf-ext")
