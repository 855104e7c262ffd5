"""The page docs/secrets.md: which secrets of the corpus a push finds, by place and by disguise.

python -m tests.hub.secret_scores
"""

from __future__ import annotations

import tempfile
import textwrap
from pathlib import Path

from hf_ext.hub.disclosure import SecretFound, refuse_secret

from .secret_corpus import DISGUISES, PLACES, shapes
from .secret_uses import NOT_FOUND, uses

Answers = dict[tuple[str, str], SecretFound | None]
PAGE = Path(__file__).parents[2] / "docs" / "secrets.md"
HEAD = """# Secrets that a push finds

A push is refused if a file contains a token, a key or a password. This page counts the secrets that the search finds:
{kinds} made-up secrets of different kinds, each in {places} places of a folder and in {disguises} disguises.
`python -m tests.hub.secret_scores` writes the page, and a test compares it with the search.

- **Places:** {found:,} of {all:,}. The search was written with these places in view.
- **Disguises:** {disguised:,} of {all_disguised:,}. They were listed after the search was written, which then found
  48 %: a better estimate for unknown disguises. Half of the gaps were closed afterwards.
- **New kinds:** 103 of 115 that were listed later without a look at the search. The other 12 were added.
- **An outside test:** 73 of 105 kinds and 35 of 49 places. Of the missing ones, 30 kinds and 10 places were added.
- **Everyday uses:** all but {unfound} of {uses} commands, tables, settings, addresses and lines of code and prose, in
  4 places each.
- **Two blind lists of uses:** 377 of 660 of the first, and 500 of 552 of the second (138 shapes that developers leave,
  in 4 places each). All but one of the 13 shapes missing from the second were added.
- **Harmless files:** none of more than 600 with placeholders and other uses of the same letters is refused, and none
  of 62 of the second blind list.

`SECURITY.md` lists more that the search does not find.

"""
GROUPS = (("places", PLACES), ("disguises", DISGUISES))


def find(folder: Path, name: str, content: bytes) -> SecretFound | None:
    """Runs the search on a file."""
    path = folder / name
    path.write_bytes(content)
    try:
        refuse_secret(path, name)
    except SecretFound as error:
        return error
    return None


def find_all(folder: Path) -> Answers:
    """Runs it on each kind in each place and each disguise."""
    places = (PLACES | DISGUISES).items()
    return {(kind, place): find(folder, *write(text)) for kind, text in shapes().items() for place, write in places}


def write_page(answers: Answers) -> str:
    """The page: totals of each group, names with all kinds found, and a table of the other names."""
    kinds, totals, text = list(shapes()), {}, ""
    for title, names in GROUPS:
        left = {name: [kind for kind in kinds if answers[kind, name] is None] for name in names}
        totals[title] = len(kinds) * len(names) - sum(map(len, left.values()))
        whole = [name for name in names if not left[name]]
        text += f"## {title.capitalize()}\n\nAll {len(kinds)} secrets are found in these {len(whole)} {title}:\n\n"
        text += "\n".join(textwrap.wrap("; ".join(whole) + ".", 119)) + "\n\n"
        if len(whole) < len(names):
            text += f"| {title} with gaps | found | not found | kinds that are not found |\n|---|---:|---:|---|\n"
        for name, missed in left.items():
            if missed:
                found = [kind for kind in kinds if kind not in missed]
                told = (
                    ", ".join(missed)
                    if len(missed) < len(found)
                    else f"all{' but ' if found else ''}{', '.join(found)}"
                )
                text += f"| {name} | {len(kinds) - len(missed)} | {len(missed)} | {told} |\n"
        text = text.rstrip("\n") + "\n\n"
    head = HEAD.format(
        kinds=len(kinds), places=len(PLACES), disguises=len(DISGUISES), found=totals["places"],
        all=len(kinds) * len(PLACES), disguised=totals["disguises"], all_disguised=len(kinds) * len(DISGUISES),
        uses=len(uses()), unfound=len(NOT_FOUND),
    )  # fmt: skip
    return head + text.rstrip("\n") + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        PAGE.write_text(write_page(find_all(Path(place))), encoding="utf-8")
