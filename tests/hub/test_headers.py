"""Headers of safetensors files: what the library reads, and every malformed header refused by name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from hf_ext.hub.checkpoints import CheckpointError, open_checkpoint
from hf_ext.hub.header_format import MAX_HEADER_BYTES
from hf_ext.hub.safetensors_headers import parse_header
from tests.kit.refusals import refused


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with any header whatsoever."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: list[object], start: object, stop: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


MALFORMED = {
    "not JSON": (b"{nonsense", b"", "not valid JSON"),
    "deep": (b"[" * 100_000, b"", "not valid JSON"),
    "not an object": ([1], b"", "expected a JSON object, got list"),
    "repeated name": (b'{"a": {"dtype": "U8"}, "a": {"dtype": "U8"}}', b"x", "repeats"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "must map strings to strings"),
    "extra key": ({"a": entry([1], 0, 4) | {"x": 1}}, b"abcd", "must have dtype, shape and data_offsets"),
    "dtype is a list": ({"a": entry([1], 0, 4, ["F32"])}, b"abcd", "has dtype"),
    "bool size": ({"a": entry([True], 0, 4)}, b"abcd", "non-negative"),
    "huge size": ({"a": entry([2**64, 0], 0, 0)}, b"", "non-negative"),
    "one offset": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, b"", "two non-negative integers"),
    "wrong length": ({"a": entry([2], 0, 4)}, b"abcd", r"has data_offsets \[0, 4\]; .* need \[0, 8\]"),
    "reversed offsets": ({"a": entry([1], 4, 0)}, b"abcd", r"has data_offsets \[4, 0\]; .* need \[0, 4\]"),
    "gap": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"x" * 12, r"'b' has .* \[8, 12\]; .* need \[4, 8\]"),
    "overlap": ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, b"x" * 8, r"'b' has .* \[4, 8\]; .* need \[8, 12\]"),
    "file too short": ({"a": entry([2], 0, 8)}, b"x" * 7, "the file has"),
    "file too long": ({"a": entry([2], 0, 8)}, b"x" * 9, "the file has"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_header_of_a_hub_is_an_error_that_says_what_is_wrong(case):
    header, data, message = MALFORMED[case]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        parse_header(text, 8 + len(text) + len(data), "model.safetensors")


def test_a_tensor_of_four_bits_needs_whole_bytes(tmp_path):
    for shape in ([4, 1], []):
        header = {"a": entry(shape, 0, 2 if shape else 0, "F4")}
        with refused(CheckpointError, "multiple"):
            parse_header(json.dumps(header).encode(), 0, "model.safetensors")
        write_raw(tmp_path / "model.safetensors", header, b"12" if shape else b"")
        with refused(CheckpointError, "model.safetensors"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pipe", "model.safetensors"])
def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"not a regular file|no \.safetensors file"):
        open_checkpoint(tmp_path / name)
    with refused(CheckpointError, "safetensors", "file"):
        open_checkpoint(tmp_path)


def test_header_lengths(tmp_path):
    path = tmp_path / "model.safetensors"
    for length, fact in ((MAX_HEADER_BYTES + 1, "25000000"), (3, "cut")):
        with refused(CheckpointError, fact):
            open_checkpoint(write_raw(path, {}, length=length))
    path.write_bytes(b"1234")
    with refused(CheckpointError, "4 bytes"):
        open_checkpoint(path)
