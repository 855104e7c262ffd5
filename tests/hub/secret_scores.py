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

A push is refused if a file contains a token, a key or a password. This page counts which secrets the search finds. A
test puts each of {kinds} made-up secrets, all of different kinds, into each of {places} places of a folder, and writes
each in {disguises} disguises. `python -m tests.hub.secret_scores` writes this page, and a test compares it with the
search.

- **Places:** {found:,} of {all:,} are refused. The search was written with these places in view.
- **Disguises:** {disguised:,} of {all_disguised:,} are refused. They were listed after the search was written, which
  then found 48 %: a better estimate for unknown disguises. Half of the gaps were closed afterwards.
- **New kinds:** of 115 kinds that were listed later without a look at the search, it found 103. The other 12 were
  added.
- **An outside test:** of 105 kinds and 49 places, it found 73 and 35. Of the missing ones, 30 kinds and 10 places were
  added.
- **Everyday uses:** a second table has {uses} commands, tables, settings, addresses and lines of code and prose, in 4
  places each. The search refuses all but {unfound}. A test counts them, and that none of more than 600 files with
  placeholders and with other uses of the same letters is refused.
- **Blind lists of uses:** of a first one it refused 377 of 660; of a later one, 138 shapes that developers leave in 4
  places each, 500 of 552, and of 62 harmless files none. All but one of the 13 missing shapes were added.

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
