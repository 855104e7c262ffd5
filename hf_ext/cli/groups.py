"""Groups of commands, and their answer to an unknown name."""

import difflib
from collections.abc import Iterator

import click

from .terminal import add_loudness


class Group(click.Group):
    """A group that names the command that was meant, in whatever group it is; its commands have -q and -v."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        return command if command is None or isinstance(command, click.Group) else add_loudness(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # An option is click's to refuse, and the shell completes what is not finished.
        known = name.startswith("-") or ctx.resilient_parsing or self.get_command(ctx, name) is not None
        if not known:
            raise click.UsageError(unknown_command(ctx, name), ctx)
        return super().resolve_command(ctx, args)


def unknown_command(ctx: click.Context, name: str) -> str:
    """The message for a command that is not in the group of a context."""
    root, group = ctx.find_root(), ctx.command
    assert isinstance(root.command, click.Group) and isinstance(group, click.Group)
    within = [word for word in (context.info_name for context in _path(ctx)) if word]
    places = {" ".join(path): path for path in _paths(root, root.command)}
    # The same word elsewhere is meant before one that only looks like it: `dit sample` is `sample`.
    moved = [place for place, path in places.items() if path[-1] == name]
    here = difflib.get_close_matches(name, group.list_commands(ctx), n=1)
    anywhere = difflib.get_close_matches(name, [path[-1] for path in places.values()], n=1)
    close = [" ".join([*within, *here])] if here else [p for p, path in places.items() if path[-1] in anywhere]
    meant = moved or close
    hint = f"did you mean {' or '.join(repr(f'hf-ext {place}') for place in meant)}?"
    allowed = f"the commands are {', '.join(group.list_commands(ctx))}."
    return f"no command {' '.join(['hf-ext', *within, name])!r}; {hint if meant else allowed}"


def _path(ctx: click.Context) -> list[click.Context]:
    """The contexts of the groups below the root, in which a context is the last."""
    found = list[click.Context]()
    place: click.Context | None = ctx
    while place is not None and place.parent is not None:
        found.insert(0, place)
        place = place.parent
    return found


def _paths(ctx: click.Context, group: click.Group) -> Iterator[tuple[str, ...]]:
    """The words of every command below a group."""
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        yield (name,)
        if isinstance(command, click.Group):
            for rest in _paths(ctx, command):
                yield (name, *rest)
