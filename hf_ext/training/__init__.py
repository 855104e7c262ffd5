"""Training of every method through accelerate: one loop, exact resume, evaluation."""

import lazy_loader

# The names are in __init__.pyi. Each is imported at first use: the files of a run are read, and their mistakes found,
# before torch is imported.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
