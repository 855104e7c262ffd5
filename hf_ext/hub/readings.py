"""Text of a file as a reader would see it: escapes decoded, wrapped lines joined, base64 opened.

A token is found by its shape, and a file can hold it in another shape that its readers undo. So a text is looked at
as it stands, and as parsers of JSON, YAML, HTML and addresses would give it. They are not called one by one: JSON
stands in Markdown, HTML in JSON, and what is malformed is published all the same. All that they undo is undone
together, until nothing changes any more; a text that is decoded once too often hides nothing.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import html
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from .header_format import CheckpointError, read_entries

# An escape may stand in an escape: a notebook in a string of JSON.
_ROUNDS = 4
_MARKS = dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32")
_MARKS |= dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16")
_ESCAPE = re.compile(
    r"\\(?:u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|U000([0-9A-Fa-f]{5})|([nrtbf])|([!-/:-@\[-`{-~])|([01][0-7]{2})"
    r"|\r?\n[ \t]*)"
)
# Characters without width, and colours: they part a word for a search and not for the eye, and a copy may lose them.
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]|\x1b\\[[0-9;]{0,20}m")
# YAML joins indented lines, and so does whoever wrapped one by hand, in a comment or a quotation too. Emphasis, tags
# and comments part a word for a search and not for the eye. Code adds strings, in notebooks over two lines of a list.
_TAG = r"</?(?:b|code|em|i|span|strong|u|wbr)\b[^<>]{0,80}>"
_CELL = r"\",\s{0,80}\"\s{0,80}"
_PARTED = rf"\r?\n[ \t>#]+|\*\*|<!--[^<>]{{0,80}}-->|{_TAG}|([\"'])\s{{0,80}}[+~]?\s{{0,80}}(?:{_CELL})?\1"
_WRAPPED = re.compile(rf"(?<=[\w\-+/=])(?:{_PARTED})(?=[\w\-+/=])")
_BASE64 = re.compile(r"[A-Za-z0-9+/_\-]{24,}(?:\r?\n[ \t]*[A-Za-z0-9+/_\-]{24,})*")
# Of what is no text, nothing is searched.
_WRITTEN = re.compile(rb"[\t\r\n -~]{8,}")
_URL_SAFE = str.maketrans("-_", "+/", " \t\r\n")


def read_text(path: Path) -> str:
    """The text of a file, of weights that of their header, where programs note how they were called."""
    content = None
    if path.suffix == ".safetensors":
        # All of it, where the rest of the file is not the tensors that its header describes.
        with contextlib.suppress(CheckpointError):
            content, _ = read_entries(path)
    if content is None:
        content = path.read_bytes()
    # A binary file may begin with such a mark too; its letters are then not two bytes each.
    wide = content.count(0) * 4 > len(content)
    encoding = next((name for mark, name in _MARKS.items() if wide and content.startswith(mark)), "utf-8")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError:
        return content.decode("latin-1")


def readings(text: str) -> Iterator[str]:
    """A text as it stands, decoded, with its wrapped lines joined, and what it holds in base64."""
    yield text
    # UTF-16 without a mark is read as letters with zeros between.
    decoded = text.replace("\0", "")
    for _ in range(_ROUNDS):
        before, decoded = decoded, _decode(decoded)
        if decoded == before:
            break
    if decoded != text:
        yield decoded
    joined = _WRAPPED.sub("", decoded)
    if joined != decoded:
        yield joined
    opened = joined
    for _ in range(2):
        if opened := "\n".join(_open_base64(opened)):
            yield opened


def _decode(text: str) -> str:
    """Undoes one round of escapes."""
    if "\\" in text:
        text = _ESCAPE.sub(_unescape, text)
    if "&" in text:
        text = html.unescape(text)
    if "%" in text:
        text = unquote(text, errors="replace")
    if text.isascii() and "\x1b" not in text:
        return text
    # Wide, raised and other forms of a letter are that letter.
    return unicodedata.normalize("NFKC", _INVISIBLE.sub("", text))


def _unescape(found: re.Match[str]) -> str:
    if digits := found[1] or found[2] or found[3]:
        return chr(int(digits, 16))
    if found[6]:
        return chr(int(found[6], 8))
    # A newline or tab ends a word, and parts rows and columns; a backslash before the end of a line goes on with it.
    return {"n": "\n", "t": "\t"}.get(found[4], " ") if found[4] else found[5] or ""


def _open_base64(text: str) -> Iterator[str]:
    for found in _BASE64.finditer(text):
        digits = found[0].translate(_URL_SAFE)
        # A run may begin with letters that belong to what stands before, so four beginnings are tried.
        for start in range(4):
            part = digits[start:]
            part = part[:-1] if len(part) % 4 == 1 else part
            for written in _WRITTEN.finditer(base64.b64decode(part + "=" * (-len(part) % 4))):
                yield written[0].decode()
