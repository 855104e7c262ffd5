"""How commands import hf_ext and torch."""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator

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


def register_models() -> None:
    """Registers the package's models with transformers, for a command that builds whatever a checkpoint names."""
    for room in ("mrconv", "semanir", "fast.mrconv"):
        importlib.import_module(f"hf_ext.{room}")


@contextlib.contextmanager
def import_undisturbed() -> Iterator[None]:
    """Keeps Python from looking for garbage while a new process imports torch and transformers."""
    # They make a million objects that stay, and Python looks through all of them time and again: a fifth of the
    # imports' processor time. Frozen, they are left out of every later look too, and loader processes share their
    # memory. A program that has already imported torch may have garbage of its own: there, nothing is changed.
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
