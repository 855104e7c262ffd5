"""Merging of many fine-tunes into one artifact: plan, engine, other methods beside EMR, card, later changes."""

import lazy_loader

# The names are in __init__.pyi. Each is imported at first use: a command that needs one does not wait for all.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
