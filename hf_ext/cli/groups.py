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
    within = [word for word in (context.info_name for context in _path(ctx)) if word]
    places = {" ".join(path): path for path in _paths(root, root.command)}
    # The same name in another group comes before a similar name: `dit sample` suggests `sample`.
    moved = [place for place, path in places.items() if path[-1] == name]
    here = difflib.get_close_matches(name, group.list_commands(ctx), n=1)
    anywhere = difflib.get_close_matches(name, [path[-1] for path in places.values()], n=1)
    close = [" ".join([*within, *here])] if here else [p for p, path in places.items() if path[-1] in anywhere]
    meant = moved or close
    hint = f"did you mean {' or '.join(repr(f'hf-ext {place}') for place in meant)}?"
    allowed = f"the commands are {', '.join(group.list_commands(ctx))}."
    return f"no command {' '.join(['hf-ext', *within, name])!r}; {hint if meant else allowed}"


def _path(ctx: click.Context) -> list[click.Context]:
    """The contexts from below the root down to this one."""
    found = list[click.Context]()
    place: click.Context | None = ctx
    while place is not None and place.parent is not None:
        found.insert(0, place)
        place = place.parent
    return found


def _paths(ctx: click.Context, group: click.Group) -> Iterator[tuple[str, ...]]:
    """The path of every command below a group."""
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        yield (name,)
        if isinstance(command, click.Group):
            for rest in _paths(ctx, command):
                yield (name, *rest)
