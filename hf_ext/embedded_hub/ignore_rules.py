"""Which files of an upload a `.gitignore` leaves out: git's rules by `pathspec`, at a bounded cost."""

from __future__ import annotations

import re
import time

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from .errors import HubError

_MAXIMUM_CHARACTERS = 256 << 10
_MAXIMUM_LINE = 4096
_MAXIMUM_STEPS = 10**7
_MAXIMUM_SECONDS = 5.0
_STAR = re.compile(r"\*(?=\\?(.?))")


class IgnoreRules:
    """The patterns of a `.gitignore`: the last one that matches decides, and an ignored folder hides all below it.

    `pathspec` turns a pattern into one regular expression, which Python tries by backtracking and without letting
    another thread run: `*a*a*a*a*a*a*a*ab` against sixty letters takes minutes. So the number of tries is bounded
    before the expression is tried, and the client is told where the bound is too large. A star that is followed by a
    letter stops only where that letter is, `**` only at a slash, and a star at the end of a name only there: the
    product of how often each can stop, times the length of the path, is at least the number of steps. For ordinary
    rules it is small: `*-*-*-*-*.log` against the name of a log takes some thousands. The time of all tries of a
    request is bounded too, and looked at between them.

    Args:
        content (`str`):
            Text of the file.

    Raises:
        [`HubError`]: status 400 for a line that is no pattern, and for a file that is too long.
    """

    def __init__(self, content: str):
        if len(content) > _MAXIMUM_CHARACTERS:
            raise HubError(400, f".gitignore may have at most {_MAXIMUM_CHARACTERS} characters, got {len(content)}")
        self._deadline = time.thread_time() + _MAXIMUM_SECONDS
        # Patterns that can stop in more than one place.
        self._branching: list[str] = []
        patterns = []
        for number, line in enumerate(content.splitlines(), 1):
            try:
                if len(line) > _MAXIMUM_LINE:
                    raise ValueError(f"longer than {_MAXIMUM_LINE} characters")
                pattern = GitIgnoreSpecPattern(line)
            except (ValueError, re.error) as error:
                raise HubError(400, f"line {number} of .gitignore is no pattern: {line[:100]!r} ({error})") from error
            if pattern.include is not None:
                patterns.append(pattern)
                if line.count("*") > 1:
                    self._branching.append(line)
            self._check_time()
        self._rules = GitIgnoreSpec(patterns, backend="simple")

    def match(self, path: str) -> bool:
        """Whether a file is ignored.

        Raises:
            [`HubError`]: status 400 when finding out would take too long.
        """
        for pattern in self._branching:
            if _count_steps(pattern, path) > _MAXIMUM_STEPS:
                raise HubError(400, f"pattern {pattern[:100]!r} of .gitignore has too many stars for {path[:100]!r}")
        self._check_time()
        return bool(self._rules.match_file(path))

    def _check_time(self) -> None:
        """Refuse to go on when the request has used up its time."""
        if time.thread_time() > self._deadline:
            raise HubError(400, f".gitignore takes more than {_MAXIMUM_SECONDS:g} seconds: shorten it, or send less")


def _count_steps(pattern: str, path: str) -> int:
    """No less than the number of steps that the regular expression of a pattern takes."""
    names = path.split("/")
    longest = max(map(len, names))
    steps = len(path) * len(names)
    for name in pattern.split("/"):
        if name == "**":
            steps *= len(names)
            continue
        for following in _STAR.findall(name):
            if following in ("*", "?", "["):
                # Anything may follow.
                steps *= longest
            elif following:
                steps *= max(path.count(following), 1)
    return steps
