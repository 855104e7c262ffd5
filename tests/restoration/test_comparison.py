"""The page of pictures before and after."""

import os
import re
from urllib.parse import unquote_to_bytes

from hf_ext.restoration.comparison import write_page


def test_a_page_names_its_pictures_from_where_it_lies(tmp_path):
    """Names are text, not markup, or no text at all; kinds that browsers do not show are left out."""
    names = ("a.png", "b c#1.JPG", '"><script>x</script>.webp', "d.tif", "e%41.gif", os.fsdecode(b"a\xff.png"))
    pairs = [(name, tmp_path / "in" / name, tmp_path / "out" / "deep" / name) for name in names]
    pairs.append(("f.heic", tmp_path / "in" / "f.heic", tmp_path / "out" / "f.png"))
    pairs.append(("standard input", b"content", tmp_path / "out" / "stdin.png"))
    (tmp_path / "out").mkdir()
    write_page(tmp_path / "out" / "page.html", pairs)
    page = (tmp_path / "out" / "page.html").read_text()
    assert page.count("<figure>") == 5 and "<script" not in page and "3 of 8" in page
    addresses = re.findall(r'src="([^"]*)"', page)
    found = [(tmp_path / "out" / os.fsdecode(unquote_to_bytes(address))).resolve() for address in addresses]
    assert found == [tmp_path / side / name for name in names if name != "d.tif" for side in ("out/deep", "in")]
    write_page(tmp_path / "page.html", pairs[:1])
    assert "Left out" not in (tmp_path / "page.html").read_text()
