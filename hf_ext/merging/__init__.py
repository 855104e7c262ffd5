"""Merging of fine-tunes: plan, engine, methods, card, and updates of an artifact."""

import lazy_loader

# The names are in __init__.pyi; each is imported on first use, which keeps commands fast.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
