"""Command line of hf-ext, installed as hf_ext_cli so that --help imports neither models nor torch."""

from .library import import_without_models

# Modules such as `hf_ext.terminal` are cheap to import; commands that need the models register them.
import_without_models()
