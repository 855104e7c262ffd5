"""EMR-Merging (Huang et al., NeurIPS 2024): one model and a 1-bit mask per task, as arithmetic, format and use."""

from typing import TYPE_CHECKING

import hf_ext.fast.emr_operators  # noqa: F401

from ..lazy import make_lazy

if TYPE_CHECKING:
    from .model import EMRModel

__all__ = ["EMRModel"]

# Arithmetic and format, which merging uses, need no model and so no transformers.
__getattr__, __dir__ = make_lazy(globals(), {"EMRModel": ".model"})
