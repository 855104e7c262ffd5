"""Imports of hf_ext and torch by commands."""

import importlib
import os

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
    for room in ("mrconv", "semanir", "fast.mrconv", "fast.semanir"):
        importlib.import_module(f"hf_ext.{room}")
