"""Modules of examples/benchmarks/gpu, by their bare names: import it as `from tests.kit.gpu import ...`."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "examples" / "benchmarks" / "gpu"


def load(name: str) -> ModuleType:
    """The module under its bare name, imported once; its folders leave `sys.path` again."""
    if name in sys.modules:
        return sys.modules[name]
    places = [str(GPU), str(GPU.parent)]
    before = list(sys.path)
    sys.path[:0] = places
    try:
        return importlib.import_module(name)
    finally:
        sys.path[:] = before
