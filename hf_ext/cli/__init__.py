"""Command line of hf-ext, installed as hf_ext_cli so that --help imports neither models nor torch."""

from .library import import_without_models

# What lies below all, such as `hf_ext.terminal`, is cheap; the models are registered by commands that need them.
import_without_models()
