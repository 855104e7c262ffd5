"""Prints the table of SECURITY.md: which made-up secrets the search finds, by kind and place, and detect-secrets.

Where detect-secrets is not installed its column is empty; another environment's is enough. From the root:
`PYTHONPATH=/tmp/other/lib/python3.11/site-packages python -m tests.hub.measure_secrets`
"""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from hf_ext.hub.disclosure import SecretFound, refuse_secret
from tests.hub import secret_uses
from tests.hub.secret_corpus import DISGUISES, PLACES, shapes

# A kind is what its text has; the first that fits.
KINDS = {
    "private keys, web tokens": r"PRIVATE KEY|PuTTY|AGE-SEC|\"(?:kty|private_key)|^eyJ",
    "addresses with a secret, webhooks": r"://",
    "passwords, headers, logins": r"(?i)password|authorization|auth\"?[=:]|curl|\.login\(|api_key:|\"username",
    "values beside a name": r"^[\w.\- {\"]{4,}\"?(?: = |=|: )",
    "tokens and keys with a form of their own": "",
}
# A token is split, escaped or written in letters of other widths.
GROUPS = {
    "text": ["a card", "a card's block", "a list in a card", "a continued line", "a template", "a vocabulary"],
    "encodings": [*list(PLACES)[-8:]],
    "disguises": [*DISGUISES],
}
GROUPS["structures"] = [place for place in PLACES if place not in sum(GROUPS.values(), [])]


def is_found(name: str, content: bytes, folder: Path) -> bool:
    (folder / name).write_bytes(content)
    try:
        refuse_secret(folder / name, name)
    except SecretFound:
        return True
    return False


def is_found_by_others(texts: Iterable[str], folder: Path) -> list[bool] | None:
    """Whether the detectors of detect-secrets that measure no entropy find each, alone in a file of text."""
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
        from detect_secrets.core.scan import scan_file
        from detect_secrets.settings import transient_settings
    except ImportError:
        return None
    names = {detector.__name__ for detector in get_mapping_from_secret_type_to_class().values()}
    found, path = [], folder / "README.md"
    with transient_settings({"plugins_used": [{"name": name} for name in names if "Entropy" not in name]}):
        for text in texts:
            path.write_text(f"{text}\n", encoding="utf-8")
            found.append(any(True for _ in scan_file(str(path))))
    return found


def count(corpus: dict[str, str], places: dict[str, Callable[[str], tuple[str, bytes]]], folder: Path) -> str:
    results = [is_found(*write(text), folder) for text in corpus.values() for write in places.values()]
    return f"{sum(results)} of {len(results)}"


def main() -> None:
    kinds: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for name, text in shapes().items():
        kinds[next(kind for kind, pattern in KINDS.items() if re.search(pattern, text))][name] = text
    rows = {kind: (made, {name: [*places] for name, places in GROUPS.items()}) for kind, made in kinds.items()}
    print(f"| kind | made | {' | '.join(GROUPS)} | detect-secrets, text |\n|---|---|{'---|' * (len(GROUPS) + 1)}")
    with tempfile.TemporaryDirectory() as name:
        folder, everything = Path(name), PLACES | DISGUISES
        for kind, (made, groups) in rows.items():
            cells = [count(made, {place: everything[place] for place in places}, folder) for places in groups.values()]
            others = is_found_by_others(made.values(), folder)
            print(f"| {kind} | {len(made)} | {' | '.join(cells)} | {'' if others is None else sum(others)} |")
        used = secret_uses.uses()
        others = is_found_by_others(used.values(), folder)
        cells = [count(used, {place: write}, folder) for place, write in secret_uses.PLACES.items()]
        print(f"uses, in {', '.join(secret_uses.PLACES)}: {', '.join(cells)}; others: {others and Counter(others)}")


if __name__ == "__main__":
    main()
