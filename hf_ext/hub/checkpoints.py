"""Checkpoints as lazy mappings from name to tensor: a folder, the Hugging Face cache, or a Hub by range reads.

Opening reads the headers only. A tensor is read when it is asked for, and then exactly its bytes.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub import errors as hub
from huggingface_hub.hf_api import RepoFile

from ..errors import UsageError
from ..files import parse_json_object, stays_inside
from .header_format import BITS, CheckpointError, header_length, parse_entries
from .range_readers import LocalFile, RangeReader, RemoteFile

# In the order of transformers: the single file before the sharded form.
_STEMS = ("model", "diffusion_pytorch_model", "adapter_model", "pytorch_lora_weights")
_SUFFIX = ".safetensors"
# Of shards, if need be those of a variant, as transformers names it.
_INDEX = re.compile(r".*\.safetensors\.index(?:\.\w+)?\.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OFFLINE = (hub.OfflineModeIsEnabled, httpx2.TransportError)
# Of an index of shards, whose entries are plain strings: that of a trillion parameters has 20 MB.
_MAX_INDEX_BYTES = 50_000_000
# In the order of the names in headers.
_TYPES = """
float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
float4_e2m1fn_x2 complex64 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool
"""
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, kind) for name, kind in zip(BITS, _TYPES.split(), strict=True)}
# How a header names each type.
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Numbers in an element: torch packs two numbers of 4 bits into one, a header counts them one by one.
PACKED = {dtype: max(8 // BITS[name], 1) for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Place, dtype and shape of one tensor, known before any of its bytes are read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: str  # relative to the checkpoint
    offset: int  # first byte of the tensor in its file

    @property
    def numbers(self) -> int:
        """Count of numbers in the tensor; of `torch.float4_e2m1fn_x2` two in each element."""
        return math.prod(self.shape) * PACKED[self.dtype]


def parse_header(data: bytes | bytearray, file_size: int, file: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parses the JSON header of a safetensors file, whose tensors must tile the file without gap or overlap."""
    entries, metadata = parse_entries(data, file_size, file)
    found = {}
    for name, entry in entries.items():
        dtype, shape = _DTYPES[entry.dtype], entry.shape
        if PACKED[dtype] > 1:
            shape = (*shape[:-1], shape[-1] // PACKED[dtype])
        found[name] = TensorInfo(dtype, shape, entry.nbytes, file, entry.offset)
    return found, metadata


def common_dtype(infos: Iterable[TensorInfo]) -> torch.dtype:
    """The floating type that holds all values of tensors; of those of 8 bits, as which no model loads, float32."""
    found = {info.dtype for info in infos if info.dtype.is_floating_point}
    wide = {torch.float32 if dtype.itemsize == 1 else dtype for dtype in found}
    return functools.reduce(torch.promote_types, wide or {torch.float32})


def restore_dtypes(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Gives weights that were loaded in a [`common_dtype`] the types back that they have on disk."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in checkpoint:
            tensor.data = tensor.data.to(checkpoint.info(name).dtype)


def split_revision(source: str) -> tuple[str, str]:
    """Splits `org/name@revision`, as `from_pretrained` wants it."""
    if Path(source).expanduser().exists():
        return str(Path(source).expanduser()), "main"
    name, revision = split_id(source)
    return name, revision or "main"


def split_id(source: str) -> tuple[str, str | None]:
    """Splits `org/name@revision`; an empty revision, as of a variable that was not set, is not that of the default."""
    name, sign, revision = source.partition("@")
    if sign and not revision:
        raise UsageError(f"{source} names no revision after its @: name one, or leave the @ out")
    return name, revision or None


class Checkpoint(Mapping[str, torch.Tensor]):
    """
    A lazy, read-only mapping from tensor name to `torch.Tensor`, made by [`open_checkpoint`].

    `checkpoint[name]` reads the tensor's bytes into a new CPU tensor; nothing is kept. Use it as a context manager,
    or call [`~Checkpoint.close`]. `commit` is the resolved commit (`None` on disk), `metadata` the `__metadata__` of
    the file (of shards, what all of them say alike), `files` the safetensors files by name, and `bytes_read` counts
    the bytes of headers, indexes and tensors that were read so far.
    """

    def __init__(self, open_file: Callable[[str], RangeReader], entry: str, commit: str | None) -> None:
        self.commit = commit
        self.metadata: dict[str, str] = {}
        self.files: dict[str, RangeReader] = {}
        self.bytes_read = 0
        self._counting = threading.Lock()
        self._open_file = open_file
        self._readers: dict[str, RangeReader] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._closed = False
        try:
            if _INDEX.fullmatch(entry):
                self._read_index(entry)
            else:
                self._tensors, self.metadata = self._read_header(entry)
        except BaseException:
            self.close()
            raise

    def info(self, name: str) -> TensorInfo:
        """Describes a tensor without reading its data."""
        return self._tensors[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        info = self._tensors[name]
        data = torch.empty(info.nbytes, dtype=torch.uint8)
        self._fill(info.file, data.numpy().data, info.offset)
        return data.view(info.dtype).reshape(info.shape)

    def read_into(self, name: str, start: int, stop: int, out: torch.Tensor) -> None:
        """
        Reads the elements `[start, stop)` of a tensor in row-major order, and no other byte, into memory that is
        there: contiguous, of shape `[stop - start]` and the tensor's dtype, on the CPU. Threads may read at once.
        """
        info = self._require_block(name, start, stop)
        fits = out.dtype == info.dtype and out.shape == (stop - start,) and out.device.type == "cpu"
        if not fits or not out.is_contiguous():
            wanted = f"a contiguous {info.dtype} of shape [{stop - start}] on the CPU"
            got = f"got {out.dtype} {list(out.shape)} on {out.device}"
            raise UsageError(f"out for [{start}, {stop}) of tensor {name!r} must be {wanted}; {got}")
        self._fill(info.file, out.view(torch.uint8).numpy().data, info.offset + start * info.dtype.itemsize)

    def will_need(self, name: str, start: int, stop: int) -> None:
        """Says that a run of elements will be read soon, so that the system may fetch it from the disk meanwhile."""
        info = self._require_block(name, start, stop)
        size = info.dtype.itemsize
        self._readers[info.file].will_need(info.offset + start * size, (stop - start) * size)

    def location(self, name: str) -> tuple[int, int] | None:
        """Descriptor of the local file that holds a tensor, and its first byte; `None` if it is read from a Hub."""
        # For whoever reads without this object; `bytes_read` does not count that, and `close` closes the descriptor.
        info = self._tensors[name]
        descriptor = self._readers[info.file].descriptor
        return None if descriptor is None else (descriptor, info.offset)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def close(self) -> None:
        """Closes the files. Reading a tensor afterwards is an error."""
        self._closed = True
        for reader in self._readers.values():
            reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _require_block(self, name: str, start: int, stop: int) -> TensorInfo:
        info = self._tensors[name]
        length = info.nbytes // info.dtype.itemsize
        if not 0 <= start <= stop <= length:
            raise UsageError(f"block [{start}, {stop}) is not inside tensor {name!r} of {length} elements")
        return info

    def _fill(self, file: str, buffer: memoryview, start: int) -> None:
        if self._closed:
            raise UsageError("the checkpoint is closed; open it again to read from it")
        if len(buffer):
            self._readers[file].read_into(buffer, start)
            with self._counting:
                self.bytes_read += len(buffer)

    def _read_bytes(self, file: str, start: int, length: int) -> bytearray:
        data = bytearray(length)
        self._fill(file, memoryview(data), start)
        return data

    def _read_header(self, file: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        reader = self._readers[file] = self._open_file(file)
        prefix = self._read_bytes(file, 0, min(8, reader.size))
        header = self._read_bytes(file, 8, header_length(prefix, reader.size, file))
        reader.header_sha256 = hashlib.sha256(prefix + header).hexdigest()
        self.files[file] = reader
        return parse_header(header, reader.size, file)

    def _read_index(self, index: str) -> None:
        self._readers[index] = self._open_file(index)
        size = self._readers[index].size
        if size > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{index}: {size} bytes, at most {_MAX_INDEX_BYTES} are allowed; save it again.")
        weight_map = parse_json_object(self._read_bytes(index, 0, size), index, CheckpointError).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: no `weight_map` object in it; fetch or save it again.")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not re.fullmatch(r"[\w\-][\w.\- ]*\.safetensors", file):
                told = "only the name of a .safetensors file beside the index is allowed, without folders"
                advice = "do not use this checkpoint unless you trust its author."
                raise CheckpointError(f"{index}: tensor {name!r} is said to be in {file!r}; {told}: {advice}")
        metadata: list[set[tuple[str, str]]] = []
        for file in dict.fromkeys(weight_map.values()):
            tensors, strings = self._read_header(file)
            metadata.append(set(strings.items()))
            named = {name for name, holder in weight_map.items() if holder == file}
            if named != set(tensors):
                missing, extra = sorted(named - set(tensors)), sorted(set(tensors) - named)
                told = f"missing {missing[:3]}, not in the index {extra[:3]}; the files come from different saves"
                raise CheckpointError(f"{file}: does not match {index}: {told}: download or save all of them again.")
            self._tensors |= tensors
        self._tensors = {name: self._tensors[name] for name in weight_map}
        self.metadata = dict(set.intersection(*metadata))


def open_checkpoint(
    source: str | Path, *, revision: str | None = None, token: str | bool | None = None, endpoint: str | None = None
) -> Checkpoint:
    """
    Opens a safetensors checkpoint, on disk or on a Hub, without reading its tensors.

    It takes the first of these files: `model`, `diffusion_pytorch_model`, `adapter_model`, `pytorch_lora_weights`,
    each as one `.safetensors` file or as `.safetensors.index.json` with shards; else the only `.safetensors` file or
    index. Files of the resolved commit that are in the Hugging Face cache are read from there, the others by HTTP
    Range requests. Pickles are refused.

    Args:
        source (`str` or `Path`): A folder, a `.safetensors` file, a `.safetensors.index.json` file, or `org/name` or
            `org/name@revision` on a Hub. A path that exists on disk takes precedence.
        revision (`str`, *optional*): Branch, tag or commit, in place of `@revision`. Defaults to `main`.
        token (`str` or `bool`, *optional*): Token of the Hub; `None` uses the one that was logged in with, `False`
            none. It is never sent to another host that the Hub redirects to.
        endpoint (`str`, *optional*): Address of the Hub. Defaults to `HF_ENDPOINT`.

    Returns:
        [`Checkpoint`]: Mapping from tensor name to tensor.

    Raises:
        CheckpointError: No weights, a pickle, a missing shard, a malformed header or index, a file of the wrong
            length, a repository or revision that does not exist, or a Hub that cannot be reached. It is a `ValueError`
            and names the file.
        ValueError: `revision` with a local path, or two different revisions.

    Example:
        >>> import hf_ext
        >>> with hf_ext.open_checkpoint(hf_ext.released("denoise-color")) as checkpoint:
        ...     weight = checkpoint["model.extractor.weight"]
        >>> weight.dtype, weight.ndim
        (torch.float16, 4)
    """
    path = Path(source).expanduser()
    if path.exists():
        if revision is not None:
            raise UsageError(f"revision={revision!r} has no meaning for the local path {path}; leave it out")
        return _open_local(path)
    repo_id, written = split_id(str(source))
    if written and revision is not None and written != revision:
        raise UsageError(f"two revisions for {repo_id}: {written!r} and {revision!r}; give one")
    is_id = re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", repo_id, re.ASCII)
    if isinstance(source, Path) or not is_id or repo_id.startswith("."):
        raise CheckpointError(f"{source}: no such file or folder, and not of the form org/name or org/name@revision.")
    return _open_repository(repo_id, written or revision, token, endpoint)


def _open_local(path: Path, commit: str | None = None) -> Checkpoint:
    folder, names = path.parent, [path.name]
    if path.is_dir():
        folder, names = path, [item.name for item in path.iterdir() if item.is_file()]
    bare = path.is_dir() and not any(_SUFFIX in name for name in names)
    inner = sorted({item.parent.name for item in path.glob(f"*/*{_SUFFIX}")}) if bare else []
    entry = _find_entry(names, path, f"one of its folders: {', '.join(inner[:5])}" if inner else "a checkpoint")
    if folder != path and not _INDEX.fullmatch(entry):
        # The file itself was named, be it a link.
        return Checkpoint(lambda name: LocalFile(path, str(path)), entry, commit)
    return Checkpoint(lambda name: LocalFile(_inside(folder, name), str(folder / name)), entry, commit)


def _inside(folder: Path, name: str) -> Path:
    """The path of a file of the folder, refused when it is a link to somewhere else."""
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a shard is missing: fetch or save the checkpoint again.")
    if not stays_inside(folder, path):
        raise CheckpointError(f"{path}: a link that leaves the folder; copy the file into it, or open it directly.")
    return path


def _find_entry(names: list[str], where: object, advice: str = "a checkpoint") -> str:
    """The file to start from: the weights themselves or the index of their shards."""
    names = sorted(names)
    known = [stem + suffix for stem in _STEMS for suffix in (_SUFFIX, f"{_SUFFIX}.index.json")]
    if present := [name for name in known if name in names]:
        return present[0]
    indexes = [name for name in names if _INDEX.fullmatch(name)]
    if found := indexes or [name for name in names if name.endswith(_SUFFIX)]:
        if len(found) > 1:
            raise CheckpointError(f"{where}: which of {found[:5]}? In a folder of your own, keep one of them.")
        return found[0]
    if pickles := [name for name in names if name.endswith(PICKLES)]:
        told = "If you trust it, load it and save it as safetensors: model.save_pretrained(folder)."
        is_code = "is a pickle, which can run code when it is read, and is refused"
        raise CheckpointError(f"{where}: {pickles[0]} {is_code}. {told}")
    if "modules.json" in names:
        written = "SentenceTransformer(FOLDER).save_pretrained(NEW)"
        advice = f"what {written} writes: with the transformer, which modules.json has in a folder, at the root"
    raise CheckpointError(f"{where}: no .safetensors file here; found {names[:5]}. Give {advice}.")


@contextmanager
def explain_hub(where: str, endpoint: str | None) -> Iterator[None]:
    """Converts a failed request to a Hub into a [`CheckpointError`] that names its purpose."""
    endpoint = endpoint or constants.ENDPOINT
    try:
        yield
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.HFValidationError) as error:
        told = f"check the name, and pass a token if it is private ({str(error).splitlines()[0]})"
        lacks = f"no such repository or revision on {endpoint}, or no access to it"
        raise CheckpointError(f"{where}: {lacks}; {told}") from error
    except (hub.RevisionResolutionError, hub.LocalEntryNotFoundError, *_OFFLINE) as error:
        raise CheckpointError(f"{where}: {endpoint} cannot be reached and this is not in the cache.") from error
    except hub.HfHubHTTPError as error:
        raise CheckpointError(f"{where}: {str(error).splitlines()[0]}") from error


def _open_repository(repo_id: str, revision: str | None, token: str | bool | None, endpoint: str | None) -> Checkpoint:
    api = HfApi(endpoint=endpoint, token=token)
    where = f"{repo_id}@{revision or constants.DEFAULT_REVISION}"
    with explain_hub(where, api.endpoint):
        # falls back on the cache when the Hub cannot be reached
        commit = api.resolve_revision(repo_id, revision=revision).resolved
        try:
            files = list_files(api, repo_id, commit)
        except _OFFLINE:
            snapshot = Path(constants.HF_HUB_CACHE, f"models--{repo_id.replace('/', '--')}", "snapshots", commit)
            if not snapshot.is_dir():
                raise
            return _open_local(snapshot, commit)
    return open_listed(api, repo_id, commit, files)


def open_listed(api: HfApi, repo_id: str, commit: str, files: dict[str, RepoFile], folder: str = "") -> Checkpoint:
    """Opens the checkpoint in a folder (`name/`) of a repository whose files are known."""
    where = f"{repo_id}@{commit[:12]}"

    def open_file(name: str) -> RangeReader:
        name = folder + name
        if name not in files:
            raise CheckpointError(f"{where}: {name} is missing; the checkpoint is incomplete, so ask its owner.")
        size, lfs = files[name].size, files[name].lfs
        sha256 = None if lfs is None else lfs.sha256
        cached = try_to_load_from_cache(repo_id, name, revision=commit)
        if isinstance(cached, str) and Path(cached).stat().st_size == size:
            return LocalFile(Path(cached), f"{where}/{name} (cached)", sha256)
        return RemoteFile(api, repo_id, name, commit, size, sha256)

    names = [name.removeprefix(folder) for name in files if name.rpartition("/")[0] == folder.rstrip("/")]
    return Checkpoint(open_file, _find_entry(names, where), commit)


def list_files(api: HfApi, repo_id: str, commit: str, recursive: bool = False) -> dict[str, RepoFile]:
    """The files of a repository, or those at its root."""
    listed = api.list_repo_tree(repo_id, revision=commit, recursive=recursive)
    return {item.path: item for item in listed if isinstance(item, RepoFile)}
