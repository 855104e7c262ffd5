"""Imports of hf_ext and torch by commands."""

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

# Read by hf_ext/__init__.py.
_SETTING = "HF_EXT_REGISTER_MODELS"


def import_without_models() -> None:
    """Imports hf_ext without its models, transformers and torch, unless the user has set what is to be done."""
    # The setting is there only while hf_ext is imported: processes that the command starts do not inherit it.
    if _SETTING in os.environ:
        return
    os.environ[_SETTING] = "0"
    try:
        importlib.import_module("hf_ext")
    finally:
        del os.environ[_SETTING]


@contextmanager
def import_at_once() -> Iterator[None]:
    """A block of imports without the collector of garbage, which afterwards leaves alone what they made."""
    # torch and transformers make a million objects that live as long as the process. Python looks through them for
    # garbage again and again while they are imported, and once more when it ends: a fifth of the processor time of a
    # short command each. Frozen objects are freed as ever when nothing refers to them; only cycles of them are not.
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.freeze()
            gc.enable()


def register_models() -> None:
    """Registers the package's models with transformers, for a command that builds whatever a checkpoint names."""
    importlib.import_module("hf_ext")._register_models()
