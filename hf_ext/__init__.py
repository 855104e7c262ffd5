"""hf_ext: NeurIPS 2024 methods as Hugging Face plugins. Importing it registers the models with transformers."""

import os
import sys
from importlib import import_module
from typing import Any

import lazy_loader

from .hub.folder_kinds import register

__version__ = "0.3.0"

# Modules that register additions in the tables of a method's room, which does not import them.
_ADDITIONS = {
    "mrconv": (".fast.mrconv", ".answers.audio_pipeline"),
    "semanir": (".fast.semanir", ".restoration.pipeline"),
}
# The names are in __init__.pyi, each imported at first use.
_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """A name of the stub; a model comes with the additions to its room."""
    found = _find(name)
    _, _, room = getattr(found, "__module__", "").partition(f"{__name__}.")
    for addition in _ADDITIONS.get(room.partition(".")[0], ()):
        import_module(addition, __name__)
    return found


def _register_models() -> None:
    """Imports each method's room and its additions, which register models and pipelines with transformers."""
    for room, additions in _ADDITIONS.items():
        for part in (f".{room}", *additions):
            import_module(part, __name__)


def _wants_models() -> bool:
    """
    True if models should be registered: always, except in programs that first check their arguments.

    Two thirds of the time of an import go into transformers, which registration needs. HF_EXT_REGISTER_MODELS=0 leaves
    it out, for a Hub or a merge; each name above still imports what it needs, and a method is registered when its task
    is imported. `python -m hf_ext` and `python -m hf_ext.training` cannot set it in time: Python imports this package,
    to find the program, before any line of the program runs. While it looks, it has put "-m" in place of the program's
    path, and only then; what follows "-m" on the command line is the module that is being looked for.
    """
    if os.environ.get("HF_EXT_REGISTER_MODELS", "1") == "0":
        return False
    words = sys.orig_argv
    looks_for = words[words.index("-m") + 1 :][:1] if sys.argv[:1] == ["-m"] and "-m" in words else []
    return looks_for not in (["hf_ext"], ["hf_ext.training"])


# Code for publishing merges is imported when a folder is published.
register(lambda: import_module(".merging.publishing", __name__).MERGES)
if _wants_models():
    _register_models()
