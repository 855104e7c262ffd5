"""A page of pictures before and after their restoration, with a slider each."""

import html
import os
from pathlib import Path
from urllib.parse import quote

from hf_ext.files import whole_file

# Formats that browsers show.
_SHOWN = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".avif")
_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Before and after</title>
<style>
body {{ font-family: sans-serif; max-width: 1100px; margin: auto; padding: 1em }}
figure {{ margin: 0 0 2em; width: fit-content; max-width: 100%; --at: 50% }}
figure div {{ position: relative; line-height: 0 }}
img {{ max-width: 100% }}
img.before {{ position: absolute; inset: 0; width: 100%; height: 100% }}
img.before {{ clip-path: inset(0 calc(100% - var(--at)) 0 0) }}
img.after {{ clip-path: inset(0 0 0 var(--at)) }}
input {{ width: 100% }}
</style>
<p>Left of the slider: before. Right: after.{left_out}</p>
{figures}
</html>
"""
_FIGURE = """<figure><figcaption>{title}</figcaption>
<div><img class="after" loading="lazy" src="{after}" alt="after">
<img class="before" loading="lazy" src="{before}" alt="before"></div>
<input type="range" min="0" max="100" aria-label="Share that is shown as before"
 oninput="this.parentNode.style.setProperty('--at', this.value + '%')"></figure>"""


def is_page(file: Path) -> bool:
    """True for a page that `write_page` wrote."""
    head = _PAGE.partition("</title>")[0].encode()
    with open(file, "rb") as opened:
        return opened.read(len(head)) == head


def write_page(page: Path, pairs: list[tuple[str, Path | bytes, Path]]) -> None:
    """Writes a page of pictures by title, before and after; what browsers do not show is left out and counted."""
    figures = [
        _FIGURE.format(
            title=html.escape(title), before=_address(before, page.parent), after=_address(after, page.parent)
        )
        for title, before, after in pairs
        if isinstance(before, Path) and {before.suffix.lower(), after.suffix.lower()} <= {*_SHOWN}
    ]
    hidden = len(pairs) - len(figures)
    told = f" Left out: {hidden} of {len(pairs)}, by a pipe or of kinds that browsers do not show." if hidden else ""
    with whole_file(page) as file:
        # A name of a file may be no text.
        file.write(_PAGE.format(figures="\n".join(figures), left_out=told).encode(errors="replace"))


def _address(file: Path, folder: Path) -> str:
    """The address of a file for a page in a folder."""
    try:
        return quote(os.fsencode(Path(os.path.relpath(file, folder)).as_posix()))
    except ValueError:
        # Of another drive.
        return file.resolve().as_uri()
