"""Rules of a `.gitignore`, which exclude files from uploads: patterns of `pathspec`, applied in the order of git."""

from __future__ import annotations

import re

from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from .errors import HubError

_MAXIMUM_CHARACTERS = 64 << 10
# `pathspec` has expressions of its own for all names and for all below a folder; these say the same in other words.
_EVERY_NAME = re.compile(r"\A(!?)(?:\*\*/)*\*\*?(/?)\s*\Z")
_ALL_BELOW = re.compile(r"/\*\*(/?)\s*\Z")


class IgnoreRules:
    """The patterns of a `.gitignore`: the last one that matches decides, and an ignored folder hides all below it."""

    # The search of `pathspec` for the pattern that decides is not git's: there a pattern that names a folder decides
    # for all below it, also for what a later pattern brings back.

    def __init__(self, content: str):
        if len(content) > _MAXIMUM_CHARACTERS:
            raise HubError(400, f".gitignore may have at most {_MAXIMUM_CHARACTERS} characters, got {len(content)}")
        self._folders: dict[str, bool] = {"": False}
        self._patterns: list[tuple[re.Pattern[str], bool]] = []
        for number, line in enumerate(content.splitlines(), 1):
            try:
                pattern = GitIgnoreSpecPattern(_ALL_BELOW.sub(r"/**/*\1", _EVERY_NAME.sub(r"\1?*\2", line)))
            except (ValueError, re.error) as error:
                raise HubError(
                    400, f"line {number} of .gitignore is not a valid pattern: {line[:100]!r} ({error})"
                ) from error
            if pattern.regex is not None and pattern.include is not None:
                self._patterns.append((pattern.regex, pattern.include))
        self._patterns.reverse()

    def match(self, path: str) -> bool:
        """Tell if a file is ignored."""
        return self._hides(path.rpartition("/")[0]) or self._decide(path)

    def _hides(self, folder: str) -> bool:
        """Tell if a folder or a parent of it is ignored; then no rule includes its files again."""
        if folder not in self._folders:
            self._folders[folder] = self._hides(folder.rpartition("/")[0]) or self._decide(f"{folder}/")
        return self._folders[folder]

    def _decide(self, path: str) -> bool:
        """The decision of the last pattern that matches a file, or a folder with a slash at its end."""
        return next((ignores for expression, ignores in self._patterns if expression.fullmatch(path)), False)
