"""The names of `hf_ext.files` that the rooms of merging still import from here."""

from ..files import recover_folder, replace_folder, stays_inside
from ..files import sync as sync_folder

__all__ = ["recover_folder", "replace_folder", "stays_inside", "sync_folder"]
