"""open_checkpoint on local files: bit for bit, exact bytes, and every malformed file refused by name."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hf_ext.errors import UsageError
from hf_ext.hub.checkpoints import CheckpointError, open_checkpoint, parse_header
from hf_ext.hub.header_format import MAX_HEADER_BYTES
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

from .checkpoint_files import assert_same, sharded, some_tensors


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt", "step": "3"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same(checkpoint, tensors)
        assert checkpoint.metadata == {"format": "pt", "step": "3"}
        assert checkpoint.commit is None
        info = checkpoint.info("brain")
        assert (info.dtype, info.shape, info.nbytes, info.file) == (torch.bfloat16, (6, 2), 24, "model.safetensors")


def test_a_tensor_reads_its_bytes_only_into_new_memory_each_time(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(some_tensors(), path)
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.bytes_read == header
        checkpoint["single"].zero_()
        assert checkpoint.bytes_read == header + 2 * 3 * 4 * 4
        assert "double" in checkpoint and checkpoint.info("double").shape == (3, 5)
        assert checkpoint.bytes_read == header + 96
        assert checkpoint["single"].equal(some_tensors()["single"])
    with refused(UsageError, "closed"):
        checkpoint["single"]
    assert path.read_bytes() == content


@given(st.data())
@settings(max_examples=30)
def test_blocks_are_slices_of_the_flat_tensor(tmp_path, data):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        name = data.draw(st.sampled_from(sorted(tensors)))
        start = data.draw(st.integers(0, tensors[name].numel()))
        stop = data.draw(st.integers(start, tensors[name].numel()))
        before = checkpoint.bytes_read
        block = torch.empty(stop - start, dtype=tensors[name].dtype)
        checkpoint.will_need(name, start, stop)
        checkpoint.read_into(name, start, stop, block)
        expected = tensors[name].reshape(-1)[start:stop]
        assert block.dtype == expected.dtype and block.view(torch.uint8).equal(expected.view(torch.uint8))
        assert checkpoint.bytes_read - before == (stop - start) * tensors[name].element_size()


def test_shards_read_as_one_checkpoint(tmp_path):
    tensors = sharded(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same(checkpoint, tensors)
        assert checkpoint.metadata == {"format": "pt"}
        assert {checkpoint.info(name).file for name in checkpoint} == {p.name for p in tmp_path.glob("*.safetensors")}
    with open_checkpoint(tmp_path / "model.safetensors.index.json") as checkpoint:
        assert_same(checkpoint, tensors)


def test_a_model_by_the_name_of_any_library_is_preferred_and_a_choice_between_strangers_is_refused(tmp_path):
    for name in ("other", "diffusion_pytorch_model", "adapter_model", "diffusion_pytorch_model.fp16"):
        (tmp_path / name).mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / name / f"{name}.safetensors")
        with open_checkpoint(str(tmp_path / name)) as checkpoint:
            assert_same(checkpoint, {"w": torch.ones(2)})
    save_file({"b": torch.ones(2)}, tmp_path / "adapter_model" / "b.safetensors")
    with open_checkpoint(tmp_path / "adapter_model") as checkpoint:
        assert list(checkpoint) == ["w"]
    save_file({"b": torch.ones(2)}, tmp_path / "other" / "b.safetensors")
    # Variants without the plain file too; what is left alone is opened.
    for name in ("model.fp16", "model.no_ema"):
        (tmp_path / "variants").mkdir(exist_ok=True)
        save_file({"w": torch.ones(2)}, tmp_path / "variants" / f"{name}.safetensors")
    for folder, names in (("other", ["b", "other"]), ("variants", ["model.fp16", "model.no_ema"])):
        with refused(CheckpointError, *(f"{name}.safetensors" for name in names)):
            open_checkpoint(tmp_path / folder)
        (tmp_path / folder / f"{names[0]}.safetensors").unlink()
        with open_checkpoint(tmp_path / folder) as checkpoint:
            assert_same(checkpoint, {"w": torch.ones(2)})


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pkl"])
def test_pickles_are_refused_by_name(tmp_path, name):
    torch.save({"w": torch.ones(1)}, tmp_path / name)
    for source in (tmp_path, tmp_path / name):
        with refused(CheckpointError, name, "save_pretrained"):
            open_checkpoint(source)


def test_nothing_to_open(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    for source, options, kind, *facts in (
        (tmp_path, {}, CheckpointError, "notes.txt"),
        (tmp_path / "absent", {}, CheckpointError, "folder", "file"),
        ("a/b/c", {}, CheckpointError, "org/name"),
        *((name, {}, CheckpointError, name, "no such file or folder") for name in ("w/ü", "modèle/bert", "модель")),
        (tmp_path, {"revision": "main"}, UsageError, "meaning", "local"),
        ("org/name@v1", {"revision": "v2"}, UsageError, "revisions", "two"),
    ):
        with refused(kind, *facts):
            open_checkpoint(source, **options)


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=150)
@example(b"{}", True)
@example(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', True)
def test_arbitrary_bytes_are_a_checkpoint_error_or_what_safetensors_reads_too(tmp_path, content, framed):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(content)) + content if framed else content)
    try:
        with open_checkpoint(path) as checkpoint:
            names = sorted(checkpoint)
    except CheckpointError as error:
        assert "model.safetensors" in str(error)
    else:
        assert names == sorted(load_file(path))


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "model.safetensors"
    save_file({"a": torch.randn(3), "b": torch.randn(2, 2)}, whole)
    content = whole.read_bytes()
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        with refused(CheckpointError, "model.safetensors"):
            open_checkpoint(cut)
    # A file that is cut after it was opened is read in part.
    save_file({"w": torch.ones(100)}, cut)
    with open_checkpoint(cut) as checkpoint:
        os.truncate(cut, cut.stat().st_size - 10)
        with refused(CheckpointError, "model.safetensors", "390", "400 bytes"):
            checkpoint["w"]


NAMES = ["../evil.safetensors", "/etc/x.safetensors", "sub/a.safetensors", "a\\b.safetensors", "..", "a.bin", 7]
INDEXES = ["[]", "{", "{}", '{"weight_map": {}}', '{"weight_map": [1]}']


@pytest.mark.parametrize("index", INDEXES + [json.dumps({"weight_map": {"w": name}}) for name in NAMES])
def test_an_index_is_whole_and_its_names_never_leave_the_folder(tmp_path, index):
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path / "evil.safetensors", folder / "sub" / "a.safetensors"):
        save_file({"w": torch.ones(1)}, place)
    (folder / "model.safetensors.index.json").write_text(index)
    with refused(CheckpointError, "index.json"):
        open_checkpoint(folder)


def test_links_that_leave_the_folder_are_refused(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "secret.safetensors")
    index = json.dumps({"weight_map": {"w": "model-1.safetensors"}})
    folder = write_files(tmp_path / "checkpoint", {"model.safetensors.index.json": index})
    (folder / "model-1.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with refused(CheckpointError, "model-1.safetensors"):
        open_checkpoint(folder)
    with open_checkpoint(folder / "model-1.safetensors") as checkpoint:
        assert checkpoint["w"].item() == 1


def test_shards_must_hold_what_the_index_says(tmp_path):
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())["weight_map"]
    first = whole["layer.0.weight"]
    less = {name: file for name, file in whole.items() if name != "layer.0.weight"}
    for wrong, *facts in (
        (less, "00001", "-of-00003", "layer.0.weight"),
        (whole | {"ghost": "model-9.safetensors"}, "model-9.safetensors"),
        (whole | {"ghost": first}, "ghost"),
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with refused(CheckpointError, *facts):
            open_checkpoint(tmp_path)


whole = torch.empty(12, dtype=torch.int64)
RUNS = [(3, 11, whole[:8]), (-1, 2, whole[:3]), (3, 2, whole[:1]), (0, 4, torch.empty(4)), (0, 4, whole[:5])]
RUNS += [(0, 4, whole[:4].view(2, 2)), (0, 4, whole[:8:2])]


@pytest.mark.parametrize(("start", "stop", "out"), RUNS)
def test_read_into_refuses_runs_and_memory_that_do_not_fit(tmp_path, start, stop, out):
    save_file(some_tensors(), tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint, refused(UsageError, "long"):
        checkpoint.read_into("long", start, stop, out)


# Headers: what the library reads, and every malformed one refused by name.


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
    for shape, data in (([4, 1], b"12"), ([], b"")):
        header = {"a": entry(shape, 0, len(data), "F4")}
        with refused(CheckpointError, "multiple"):
            parse_header(json.dumps(header).encode(), 0, "model.safetensors")
        with refused(CheckpointError, "model.safetensors"):
            open_checkpoint(write_raw(tmp_path / "model.safetensors", header, data))


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
