"""Groups of commands, which suggest a command for an unknown name."""

import difflib
from collections.abc import Iterator

import click

from .terminal import add_loudness


class Group(click.Group):
    """A group that suggests commands of any group for an unknown name, and adds -q and -v to its commands."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        return command if command is None or isinstance(command, click.Group) else add_loudness(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # click refuses options itself, and shell completion passes unfinished names.
        known = name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name) is not None
        if not known:
            raise click.UsageError(unknown_command(ctx, name), ctx)
        return super().resolve_command(ctx, args)


def unknown_command(ctx: click.Context, name: str) -> str:
    """The error message for a name that the group of the context does not have."""
    root, group = ctx.find_root(), ctx.command
    assert isinstance(root.command, click.Group) and isinstance(group, click.Group)
    commands = ", ".join(group.list_commands(ctx))
    within = " ".join(["hf-ext", *ctx.command_path.split()[1:]])
    # The same name in another group is the closest: `dit sample` suggests `sample`.
    places = {" ".join(path): path[-1] for path in _paths(root, root.command)}
    close = difflib.get_close_matches(name, [*places.values()], n=1)
    meant = [repr(f"hf-ext {place}") for place, last in places.items() if last in close]
    hint = f"did you mean {' or '.join(meant)}?"
    return f"no command {f'{within} {name}'!r}; {hint if meant else f'the commands are {commands}.'}"


def _paths(ctx: click.Context, group: click.Group) -> Iterator[tuple[str, ...]]:
    """The path of every command below a group."""
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        yield (name,)
        if isinstance(command, click.Group):
            for rest in _paths(ctx, command):
                yield (name, *rest)
