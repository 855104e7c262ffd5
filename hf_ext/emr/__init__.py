"""EMR-Merging (Huang et al., NeurIPS 2024): one model and a 1-bit mask per task, as arithmetic, format and use."""

import lazy_loader

# The name is in __init__.pyi and imported on first use: arithmetic and format, which merging uses, need no
# transformers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
