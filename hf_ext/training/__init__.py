"""Training of every method through accelerate: one loop, exact resume, evaluation."""

import lazy_loader

# The names are in __init__.pyi; each is imported on first use, so that errors in the file of a run are found before
# torch is imported.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
