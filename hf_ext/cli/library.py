"""Fast imports of hf_ext and torch for commands."""

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Read by hf_ext/__init__.py.
_SETTING = "HF_EXT_REGISTER_MODELS"


def import_without_models() -> None:
    """Imports hf_ext without its models, transformers and torch, unless the user set HF_EXT_REGISTER_MODELS."""
    # The variable is set only during the import, so child processes do not inherit it.
    if _SETTING in os.environ:
        return
    os.environ[_SETTING] = "0"
    try:
        importlib.import_module("hf_ext")
    finally:
        del os.environ[_SETTING]


@contextmanager
def import_at_once() -> Iterator[None]:
    """Imports in a block without garbage collection, and exempts the imported objects from it afterwards."""
    # torch and transformers create a million objects that live as long as the process. Python scans them for garbage
    # repeatedly during the import and once more at exit: each takes a fifth of the processor time of a short command.
    # Frozen objects are still freed when nothing refers to them; only cycles of them are not.
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.freeze()
            gc.enable()


def register_models() -> None:
    """Registers the package's models with transformers."""
    importlib.import_module("hf_ext")._register_models()
