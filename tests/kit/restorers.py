"""Tiny SemanIR restorers, and what `hf-ext restore` left in a folder."""

from pathlib import Path
from typing import Any

import torch

from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration

SIZES = {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4, "top_k": 6}


def tiny_restorer(**fields: Any) -> SemanIRForImageRestoration:
    """A restorer with its first weights, which nearly returns its input."""
    torch.manual_seed(0)
    return SemanIRForImageRestoration(SemanIRConfig(**{**SIZES, **fields})).eval()


def files(folder: Path) -> list[str]:
    """All but hidden ones, such as the record of results."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in found if not path.name.startswith("."))
