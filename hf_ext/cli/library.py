"""Fast imports of hf_ext and torch for commands."""

import importlib
import os

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


def register_models() -> None:
    """Registers the package's models with transformers."""
    importlib.import_module("hf_ext")._register_models()
