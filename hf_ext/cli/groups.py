"""Groups of commands, which suggest a command for an unknown name."""

import difflib
from collections.abc import Iterator

import click

from .terminal import add_loudness


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
        assert isinstance(root.command, click.Group)
        # The same name in another group is the closest: `dit sample` suggests `sample`.
        places = {" ".join(path): path[-1] for path in _paths(root, root.command)}
        close = difflib.get_close_matches(name, [*places.values()], n=1)
        meant = [repr(f"hf-ext {place}") for place, last in places.items() if last in close]
        known = f"the commands are {', '.join(self.list_commands(ctx))}."
        within = " ".join(["hf-ext", *ctx.command_path.split()[1:], name])
        hint = f"did you mean {' or '.join(meant)}?" if meant else known
        raise click.UsageError(f"no command {within!r}; {hint}", ctx)


def _paths(ctx: click.Context, group: click.Group) -> Iterator[tuple[str, ...]]:
    """The path of every command below a group."""
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        yield (name,)
        if isinstance(command, click.Group):
            for rest in _paths(ctx, command):
                yield (name, *rest)
