"""Which files of an upload a `.gitignore` leaves out: git's rules by `pathspec`, at a bounded cost."""

from __future__ import annotations

import re
import time

from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from .errors import HubError

_MAXIMUM_CHARACTERS = 256 << 10
_MAXIMUM_LINE = 4096
_MAXIMUM_STEPS = 10**7
_MAXIMUM_SECONDS = 5.0
# `pathspec` has expressions of its own for all names and for all below a folder; these say the same in other words.
_EVERY_NAME = re.compile(r"\A(!?)(?:\*\*/)*\*\*?(/?)\s*\Z")
_ALL_BELOW = re.compile(r"/\*\*(/?)\s*\Z")
_STAR = re.compile(r"\*(?=\\?(.?))")


class IgnoreRules:
    """The patterns of a `.gitignore`: the last one that matches decides, and an ignored folder hides all below it."""

    # `pathspec` translates the patterns. Its own search for the one that decides is not git's: there a pattern that
    # names a folder decides for all below it, also for what a later pattern brings back.
    #
    # It turns a pattern into one regular expression, which Python tries by backtracking and without letting another
    # thread run: `*a*a*a*a*a*a*a*ab` against sixty letters takes minutes. So the number of tries is bounded before the
    # expression is tried (`_count_steps`). A star that is followed by a letter stops only where that letter is, `**`
    # only at a slash, and a star at the end of a name only there: the product of how often each can stop, times the
    # length of the path, is at least the number of steps. For ordinary rules it is small: `*-*-*-*-*.log` against the
    # name of a log takes some thousands. The time of all tries of a request is bounded too, and looked at in between.

    def __init__(self, content: str):
        if len(content) > _MAXIMUM_CHARACTERS:
            raise HubError(400, f".gitignore may have at most {_MAXIMUM_CHARACTERS} characters, got {len(content)}")
        self._deadline = time.thread_time() + _MAXIMUM_SECONDS
        self._folders: dict[str, bool] = {"": False}
        # Of each pattern the expression, whether it ignores, and its text if it can stop in more than one place.
        self._patterns: list[tuple[re.Pattern[str], bool, str | None]] = []
        for number, line in enumerate(content.splitlines(), 1):
            try:
                if len(line) > _MAXIMUM_LINE:
                    raise ValueError(f"longer than {_MAXIMUM_LINE} characters")
                pattern = GitIgnoreSpecPattern(_ALL_BELOW.sub(r"/**/*\1", _EVERY_NAME.sub(r"\1?*\2", line)))
            except (ValueError, re.error) as error:
                raise HubError(400, f"line {number} of .gitignore is no pattern: {line[:100]!r} ({error})") from error
            if pattern.regex is not None and pattern.include is not None:
                self._patterns.append((pattern.regex, pattern.include, line if line.count("*") > 1 else None))
            self._check_time()
        self._patterns.reverse()

    def match(self, path: str) -> bool:
        """Whether a file is ignored."""
        return self._hides(path.rpartition("/")[0]) or self._decide(path)

    def _hides(self, folder: str) -> bool:
        """Whether a folder, or one above it, is ignored: then no rule brings back what is below."""
        if folder not in self._folders:
            self._folders[folder] = self._hides(folder.rpartition("/")[0]) or self._decide(f"{folder}/")
        return self._folders[folder]

    def _decide(self, path: str) -> bool:
        """What the last pattern says that matches a file, or a folder with a slash at its end."""
        self._check_time()
        for expression, ignores, text in self._patterns:
            if text is not None and _count_steps(text, path) > _MAXIMUM_STEPS:
                raise HubError(400, f"pattern {text[:100]!r} of .gitignore has too many stars for {path[:100]!r}")
            if expression.fullmatch(path):
                return ignores
        return False

    def _check_time(self) -> None:
        """Refuse to go on when the request has used up its time."""
        if time.thread_time() > self._deadline:
            raise HubError(400, f".gitignore takes more than {_MAXIMUM_SECONDS:g} seconds: shorten it, or send less")


def _count_steps(pattern: str, path: str) -> int:
    """No less than the number of steps that the regular expression of a pattern takes."""
    names = path.split("/")
    longest = max(map(len, names))
    steps = len(path) * len(names)
    for name in re.sub(r"(?:\*\*/)+", "**/", pattern).split("/"):
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
