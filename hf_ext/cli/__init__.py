"""Command line of hf-ext, installed as hf_ext_cli so that --help imports neither models nor torch."""

import importlib
import os

# hf_ext reads it while it is imported: modules such as `hf_ext.terminal` are cheap, and commands that need the models
# register them. Child processes do not inherit it.
_SETTING = "HF_EXT_REGISTER_MODELS"
_given = _SETTING in os.environ
os.environ.setdefault(_SETTING, "0")
try:
    _package = importlib.import_module("hf_ext")
finally:
    if not _given:
        del os.environ[_SETTING]


def register_models() -> None:
    _package._register_models()
