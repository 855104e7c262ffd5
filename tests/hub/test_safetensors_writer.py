"""SafetensorsWriter: what it writes is what safetensors reads, in any order, from many threads, or no room."""

import errno
import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from hf_ext.errors import DataError, UsageError
from hf_ext.hub.checkpoints import DTYPE_NAMES, open_checkpoint
from hf_ext.hub.header_format import MAX_HEADER_BYTES
from hf_ext.hub.safetensors_writer import SafetensorsWriter, plan_shards, shard_index
from hf_ext.system import reserve
from tests.kit.models import file_limit
from tests.kit.refusals import refused

from .checkpoint_files import assert_same, some_tensors


def layout(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_every_type_is_read_back_by_safetensors_and_by_us(tmp_path):
    tensors = some_tensors()
    writer = SafetensorsWriter(tmp_path / "model.safetensors", layout(tensors))
    for name, tensor in reversed(tensors.items()):
        writer.write(name, 0, tensor)
    writer.close()
    assert writer.size == (tmp_path / "model.safetensors").stat().st_size
    with open_checkpoint(tmp_path) as checkpoint:
        assert_same(checkpoint, tensors)
        assert checkpoint.metadata == {"format": "pt"}
        for name in checkpoint:
            assert checkpoint.info(name).offset % checkpoint.info(name).dtype.itemsize == 0
        assert min(checkpoint.info(name).offset for name in checkpoint) % 64 == 0
    assert_same(load_file(tmp_path / "model.safetensors"), tensors)


types = st.sampled_from([dtype for dtype in DTYPE_NAMES if dtype != torch.float8_e4m3fnuz])
shapes = st.lists(st.integers(0, 5), max_size=3)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
# A packed type has a last size, of which each element holds two.
kinds = st.tuples(types, shapes).filter(lambda kind: kind[0] != torch.float4_e2m1fn_x2 or kind[1])


@settings(max_examples=60)
@given(st.dictionaries(texts, kinds, min_size=1, max_size=6), st.randoms())
def test_any_names_types_and_shapes_written_in_pieces_in_any_order(tmp_path_factory, described, random):
    path = tmp_path_factory.mktemp("writer") / "model.safetensors"
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (dtype, shape) in described.items()}
    content = {name: random.randbytes(size) for name, size in sizes.items()}
    writer = SafetensorsWriter(path, {name: (dtype, tuple(shape)) for name, (dtype, shape) in described.items()})
    pieces = [(name, start) for name, data in content.items() for start in range(0, len(data), 7)]
    random.shuffle(pieces)
    for name, start in pieces:
        writer.write_bytes(name, start, memoryview(content[name][start : start + 7]))
    writer.close(sync=False)
    with open_checkpoint(path) as checkpoint:
        for name, (dtype, shape) in described.items():
            info = checkpoint.info(name)
            assert (info.dtype, info.shape) == (dtype, tuple(shape))
            assert path.read_bytes()[info.offset : info.offset + info.nbytes] == content[name]
    if torch.uint16 not in {dtype for dtype, _ in described.values()}:
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == set(described)


def test_a_file_of_the_same_size_keeps_its_data(tmp_path):
    described = {"x": (torch.float32, (4,)), "y": (torch.int64, (2,))}
    for start, values in ((1, [1.0, 2.0]), (3, [3.0])):
        writer = SafetensorsWriter(tmp_path / "a.safetensors", described)
        writer.write("x", start, torch.tensor(values))
        writer.flush()
        writer.close()
    assert load_file(tmp_path / "a.safetensors")["x"].tolist() == [0, 1, 2, 3]


def test_what_it_refuses(tmp_path):
    path = tmp_path / "a.safetensors"
    writer = SafetensorsWriter(path, {"x": (torch.float32, (4,))})
    for start, tensor, message in [
        (0, torch.zeros(4).half(), "takes contiguous torch.float32"),
        (0, torch.zeros(8)[::2], "contiguous: False"),
        (1, torch.zeros(4), r"elements \[1, 5\) are not inside 'x' of 4"),
        (-1, torch.zeros(2), "not inside"),
    ]:
        with pytest.raises(ValueError, match=message):
            writer.write("x", start, tensor)
    with pytest.raises(KeyError):
        writer.write("y", 0, torch.zeros(1))
    writer.close()
    writer.close()
    assert load_file(path)["x"].eq(0).all()
    with refused(DataError, "b.safetensors", "torch.complex128"):
        SafetensorsWriter(tmp_path / "b.safetensors", {"x": (torch.complex128, (1,))})
    with refused(OSError, "file"):
        SafetensorsWriter(tmp_path / "absent" / "b.safetensors", {})
    with refused(DataError, MAX_HEADER_BYTES):
        SafetensorsWriter(tmp_path / "b.safetensors", {"x" * MAX_HEADER_BYTES: (torch.float32, (4,))})


def test_a_system_that_cannot_reserve_gives_the_length_alone(tmp_path):
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(descriptor, b"1234")
    # It refuses to reserve nothing, as a file system that reserves nothing refuses everything.
    reserve(descriptor, 0, tmp_path / "file")
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)


def test_no_room_is_noticed_at_once_or_later_and_what_is_needed_is_said(tmp_path):
    path = tmp_path / "a.safetensors"
    message = r"this file needs 4,000,\d\d\d bytes in all, [\d,]+ are free"
    with file_limit(1 << 20), pytest.raises(OSError, match=message) as caught:
        SafetensorsWriter(path, {"x": (torch.float32, (1000, 1000))})
    assert caught.value.errno == errno.EFBIG and str(path) in str(caught.value)
    writer = SafetensorsWriter(path, {"x": (torch.float32, (1000,))})
    with file_limit(1000), pytest.raises(OSError, match=r"this file needs 4,\d\d\d bytes in all") as caught:
        writer.write("x", 0, torch.ones(1000))
    assert caught.value.errno == errno.EFBIG
    writer.write("x", 0, torch.ones(1000))
    writer.close()
    assert load_file(path)["x"].eq(1).all()


def test_shards_keep_the_order_and_their_index_is_read_by_us(tmp_path):
    tensors = {f"layer.{i}": torch.full((i + 1, 8), float(i)) for i in range(5)}
    sizes = {name: tensor.numel() * 4 for name, tensor in tensors.items()}
    shards = plan_shards(sizes, 100, "model")
    assert list(shards.values()) == [["layer.0", "layer.1"], ["layer.2"], ["layer.3"], ["layer.4"]]
    assert list(shards)[0] == "model-00001-of-00004.safetensors"
    for file, names in shards.items():
        writer = SafetensorsWriter(tmp_path / file, layout({name: tensors[name] for name in names}))
        for name in names:
            writer.write(name, 0, tensors[name])
        writer.close()
    (tmp_path / "model.safetensors.index.json").write_text(shard_index(shards, sizes))
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint) == list(tensors)
        assert_same(checkpoint, tensors)
    assert json.loads(shard_index(shards, sizes))["metadata"]["total_size"] == sum(sizes.values())
    assert plan_shards(sizes, sum(sizes.values()), "model") == {"model.safetensors": list(tensors)}
    assert plan_shards({}, 10, "model") == {"model.safetensors": []}
    with refused(UsageError, "max_shard_size"):
        plan_shards(sizes, 0, "model")
