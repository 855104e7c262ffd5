"""Files of resume states from elsewhere: refused where they hold more than tensors and plain values."""

# A pickle may run any code when it is loaded. accelerate loads some without looking, and so does torch with the index
# of a sharded state (`.metadata`) and with the values in it that are no tensors (`default_planner.load_bytes`). So
# each file is read here once, before: whole pickles and every entry of a sharded file with `weights_only`, the index
# with an unpickler that knows only the classes it consists of.

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import load
from torch.distributed.checkpoint.metadata import Metadata

from ..errors import DataError

# What an index consists of, by module; of `torch` its types of numbers too.
_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    **dict.fromkeys(["pathlib", "pathlib._local"], {"PosixPath", "WindowsPath"}),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an index")


def refuse_code(path: Path, name: str) -> None:
    """
    Refuses a file of a state that would run code.

    Args:
        path (`Path`): The file; of a sharded state its `.metadata`, with which its other files are checked.
        name (`str`): What to call it.

    Raises:
        DataError: If it is damaged, or holds anything but tensors and plain values.
    """
    try:
        if path.name == ".metadata":
            _check_shards(path)
        else:
            load(path, map_location="cpu", weights_only=True)
    # A damaged pickle may raise anything.
    except Exception as error:
        raise DataError(f"{name} is damaged, or holds more than tensors and numbers: it is not loaded.") from error


def _check_shards(index: Path) -> None:
    with index.open("rb") as file:
        found: Metadata = _IndexUnpickler(file).load()
    for entry in found.storage_data.values():
        part = index.parent / entry.relative_path
        # torch opens what the index names, and lets it name a decoder.
        if part.parent != index.parent or entry.transform_descriptors is not None:
            raise pickle.UnpicklingError("a part elsewhere")
        with part.open("rb") as file:
            file.seek(entry.offset)
            torch.load(io.BytesIO(file.read(entry.length)), weights_only=True, map_location="cpu")
