"""The page docs/secrets.md: which secrets of the corpus a push finds, by kind and by place.

python -m tests.hub.secret_scores
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hf_ext.hub.disclosure import SecretFound, refuse_secrets

from .secret_corpus import DISGUISES, PLACES, shapes

Answers = dict[tuple[str, str], SecretFound | None]
PAGE = Path(__file__).parents[2] / "docs" / "secrets.md"
HEAD = """# What a push finds of secrets

`python -m tests.hub.secret_scores` wrote this page, and the tests compare it with what is found. Each of {kinds}
made-up secrets, all of other kinds, was put into each of {places} places of a folder: of {all:,}, {found:,} are
refused. The search was written with these places at hand. The disguises were thought of afterwards: at first sight it
found 48 % of them, which is the better measure of what it does with others; half of the gaps were closed then. Of
115 kinds that were listed later, without a look at the search, it found 103; the other 12 are in it now. Of 105 kinds
and 49 places that an outsider then brought, it found 73 and 35; 30 and 10 of the gaps are closed.
`SECURITY.md` says what no search can see.

"""


def find(folder: Path, name: str, content: bytes) -> SecretFound | None:
    """What the search says of a folder with one file."""
    path = folder / name
    path.write_bytes(content)
    try:
        refuse_secrets(folder)
    except SecretFound as error:
        return error
    finally:
        path.unlink()
    return None


def find_all(folder: Path) -> Answers:
    """What it says of each kind in each place and each disguise."""
    places = (PLACES | DISGUISES).items()
    return {(kind, place): find(folder, *write(text)) for kind, text in shapes().items() for place, write in places}


def write_page(answers: Answers) -> str:
    """The page."""
    missed = [pair for pair, error in answers.items() if error is None]
    kinds, here = list(shapes()), [pair for pair in answers if pair[1] in PLACES]
    found = sum(answers[pair] is not None for pair in here)
    text = HEAD.format(kinds=len(kinds), places=len(PLACES), found=found, all=len(here))
    tables = (
        ("place", PLACES, kinds, 1),
        ("disguise", DISGUISES, kinds, 1),
        ("kind", kinds, [*PLACES, *DISGUISES], 0),
    )
    for title, names, others, at in tables:
        text += f"## By {title}\n\n| {title} | found of {len(others)} | not found |\n|---|---:|---|\n"
        for name in names:
            left = [pair[1 - at] for pair in missed if pair[at] == name]
            told = ", ".join(left) if 2 * len(left) < len(others) else f"{len(left)}"
            text += f"| {name} | {len(others) - len(left)} | {told if left else ''} |\n"
        text += "\n"
    return text[:-1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        PAGE.write_text(write_page(find_all(Path(place))), encoding="utf-8")
