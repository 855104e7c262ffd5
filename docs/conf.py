"""The site: `make docs` builds it without a network; warnings, also of links that lead nowhere, are errors."""

import re
import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import merge_reference as merge_methods  # noqa: E402
import options_reference as options  # noqa: E402

project = "hf-ext"
author = "The hf-ext authors"
copyright = f"2026, {author}. Apache-2.0"
version = release = installed("hf-ext")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_click"]
# The notebook extension writes `jupyter_execute`, which the next build would take for pages.
exclude_patterns = ["_build", "jupyter_execute"]
html_theme = "furo"
html_title = f"hf-ext {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
# Markdown: anchors of headings down to the third level, notebooks as they were last run.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "dollarmath"]
nb_execution_mode = "off"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
# `Attributes:` of a class beside properties of these names.
napoleon_use_ivar = True
suppress_warnings = ["myst.header"]  # of README files that are included


def read_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Turns the Markdown of docstrings, as the Hugging Face libraries write it, into what Sphinx reads."""
    # Code: fences go, as what stands in them begins with >>>; [`Name`] and `name` are names.
    lines[:] = [line for line in lines if not line.strip().startswith("```")]
    text = re.sub(r"\[(`~?[^`]+`)\]", r"\1", "\n".join(lines))
    lines[:] = re.sub(r"(?<!`)`~?([^`]+)`(?!`)", r"``\1``", text).replace(" **", r" \**").split("\n")


# Pages that the code writes: every build makes them anew, and git does not keep them.
for page, module in (("options", options), ("merge_methods", merge_methods)):
    Path(__file__).with_name(f"{page}.md").write_text(module.write_reference(), encoding="utf-8")


def setup(app: Any) -> None:
    # Before napoleon, which reads the lists.
    app.connect("autodoc-process-docstring", read_docstring, priority=100)
