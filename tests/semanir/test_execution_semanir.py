"""Execution of SemanIR: attention implementations, half precision, offloading, torch.compile, torch.export."""

import copy
import json

import accelerate
import numpy as np
import pytest
import torch
from torch.export import Dim
from transformers import AutoModelForImageToImage

from hf_ext.errors import UsageError
from hf_ext.semanir import SemanIRForImageRestoration, modeling_semanir
from hf_ext.semanir.modeling_semanir import bilinear_demosaick
from hf_ext.semanir.ops_semanir import partition_windows, unpack_keys
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer
from tests.semanir.test_whole_image_semanir import COLUMNAR, DEMOSAICKING, UNSHUFFLED, make_images, make_model, restore

WITH_MEAN = {**COLUMNAR, "scale": 2, "image_mean": [0.4, 0.5, 0.6]}
INTERPOLATED = {**WITH_MEAN, "interpolated_base": True}


def test_attention_is_chosen_by_the_switch_of_transformers(monkeypatch, tmp_path):
    model = make_model(**COLUMNAR)
    assert model.config._attn_implementation == "auto"
    model.save_pretrained(tmp_path)
    assert "attn" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded = AutoModelForImageToImage.from_pretrained(tmp_path, attn_implementation="eager")
    assert loaded.config._attn_implementation == loaded.model.config._attn_implementation == "eager"
    images, seen, original = make_images(1, 3, 9, 13), [], modeling_semanir.key_semantic_attention
    attend = lambda *arguments: seen.append(arguments[-1]) or original(*arguments)  # noqa: E731
    monkeypatch.setattr(modeling_semanir, "key_semantic_attention", attend)
    eager = restore(loaded, images)
    loaded.set_attn_implementation("sdpa")
    torch.testing.assert_close(restore(loaded, images), eager, atol=1e-5, rtol=0)
    assert seen == ["eager"] * 4 + ["sdpa"] * 4
    from_config = lambda name: SemanIRForImageRestoration._from_config(model.config, attn_implementation=name)  # noqa: E731
    for name in ("flash_attention_2", "dense", "paged|eager"):
        for choose in (model.set_attn_implementation, from_config):
            with refused(ValueError, "'auto', 'eager', 'sdpa', 'native', 'triton'"):
                choose(name)


def mosaic_of(image: torch.Tensor) -> torch.Tensor:
    """RGGB samples of an RGB image, packed."""
    red, green, blue = image[:, 0], image[:, 1], image[:, 2]
    return torch.stack([red[:, ::2, ::2], green[:, ::2, 1::2], green[:, 1::2, ::2], blue[:, 1::2, 1::2]], dim=1)


def test_bilinear_demosaicking_keeps_samples_and_restores_ramps():
    image = torch.stack([torch.arange(80.0).view(8, 10), torch.arange(80.0).view(8, 10) / 2, torch.full((8, 10), 3.0)])
    restored = bilinear_demosaick(mosaic_of(image[None]))
    torch.testing.assert_close(restored[..., 1:-1, 1:-1], image[None, :, 1:-1, 1:-1])
    noise = make_images(2, 3, 8, 6)
    assert torch.equal(mosaic_of(bilinear_demosaick(mosaic_of(noise))), mosaic_of(noise))
    assert bilinear_demosaick(make_images(1, 4, 1, 1)).shape == (1, 3, 2, 2)


@pytest.mark.parametrize("upsampler", ["direct", "pixelshuffle"])
def test_untrained_demosaicking_is_nearly_bilinear(upsampler):
    mosaic = make_images(1, 4, 7, 9)
    restored = restore(tiny_restorer(**DEMOSAICKING, upsampler=upsampler), mosaic)
    assert restored.shape == (1, 3, 14, 18)
    assert 0 < (restored - bilinear_demosaick(mosaic)).abs().mean() < 0.05


def enlarge_line(line: np.ndarray, scale: int) -> np.ndarray:
    """Bicubic interpolation in one dimension, by Keys' kernel of a = -0.75, as torch has it: sample by sample."""

    def kernel(x: float) -> float:
        a, x = -0.75, abs(x)
        return (a + 2) * x**3 - (a + 3) * x**2 + 1 if x <= 1 else a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0

    places = (np.arange(len(line) * scale) + 0.5) / scale - 0.5
    near = np.floor(places).astype(int)[:, None] + np.arange(-1, 3)
    weights = np.array([[kernel(place - tap) for tap in taps] for place, taps in zip(places, near, strict=True)])
    return (weights * line[near.clip(0, len(line) - 1)]).sum(axis=1)


@pytest.mark.parametrize("upsampler", ["direct", "pixelshuffle"])
def test_untrained_enlargement_is_nearly_bicubic_where_that_is_its_base(upsampler):
    model, images = tiny_restorer(**INTERPOLATED, upsampler=upsampler), make_images(2, 3, 7, 9)
    wide = np.apply_along_axis(enlarge_line, 3, images.double().numpy(), 2)
    wanted = torch.from_numpy(np.apply_along_axis(enlarge_line, 2, wide, 2)).float()
    assert 0 < (restore(model, images) - wanted).abs().mean() < 0.02
    (last,) = (part for part in model.reconstruction if isinstance(part, modeling_semanir.SemanIRCorrection))
    torch.nn.init.zeros_(last.weight)
    torch.testing.assert_close(restore(model, images), wanted)


def test_bfloat16_deviates_by_rounding_and_by_keys_that_are_nearly_as_similar(monkeypatch):
    """Rounding swaps some keys at the border of the selection, which random weights answer with another image. With
    the same keys bfloat16 is near float32."""
    model, images, build = make_model(**UNSHUFFLED), make_images(1, 3, 24, 24), modeling_semanir.build_dictionary
    dictionaries, swapped = [], []

    def record(*arguments):
        dictionaries.append(build(*arguments))
        return dictionaries[-1]

    def replay(*arguments):
        own, recorded = build(*arguments), dictionaries.pop(0)
        if own.bits is not None:
            found, wanted = (unpack_keys(each.bits, own.window[0] * own.window[1]) for each in (own, recorded))
            swapped.append((found & ~wanted).sum() / found.sum())
        return recorded

    monkeypatch.setattr(modeling_semanir, "build_dictionary", record)
    expected = restore(model, images)
    monkeypatch.setattr(modeling_semanir, "build_dictionary", replay)
    restored = restore(model.bfloat16(), images)
    # The correction has a mean of 0.7 here.
    assert (restored - expected).abs().mean() < 0.03
    assert 0 < max(swapped) < 0.05


ONE_STAGE = {**COLUMNAR, "depths": [2], "num_heads": [2]}
SLOW = [pytest.param(fields, 1, marks=pytest.mark.slow) for fields in (UNSHUFFLED, WITH_MEAN, INTERPOLATED)]


@pytest.mark.parametrize(("fields", "memory_budget"), [(COLUMNAR, 1), (UNSHUFFLED, None), *SLOW])
def test_weights_may_lie_elsewhere_until_their_layer_runs(fields, memory_budget):
    model, images = make_model(**fields), make_images(1, 3, 24, 20)
    expected = restore(model, images)
    offloaded = accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    offloaded.memory_budget = memory_budget
    # Twice: what the first call loads is gone from memory in between.
    for _ in range(2):
        assert_near(restore(offloaded, images), expected)


def test_weights_may_lie_on_disk(tmp_path):
    model, images = make_model(**COLUMNAR), make_images(1, 3, 24, 20)
    model.save_pretrained(tmp_path / "model")
    room = {"cpu": sum(parameter.numel() * 4 for parameter in model.parameters()) // 2}
    options = {"device_map": "auto", "max_memory": room, "offload_folder": tmp_path / "offload"}
    offloaded = SemanIRForImageRestoration.from_pretrained(tmp_path / "model", **options)
    assert "meta" in {parameter.device.type for parameter in offloaded.parameters()}
    assert_near(restore(offloaded, images), restore(model, images))


# The checker of torch 2.15 asks the copies that it makes for their gradients.
checker_warnings = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@checker_warnings
@pytest.mark.parametrize(
    ("size", "window", "shift"),
    [((4, 6), (2, 2), (1, 1)), ((4, 6), (2, 2), (0, 0)), ((4, 6), (4, 6), (0, 0)), ((4, 6), (2, 6), (1, 0))],
)
def test_operators_of_windows_are_what_torch_takes_for_operators(size, window, shift):
    features = torch.randn(1, *size, 2, dtype=torch.float64, requires_grad=True)
    cut, join = torch.ops.hf_ext_semanir.cut.default, torch.ops.hf_ext_semanir.join.default
    windows = cut(features, window, shift)
    assert windows.equal(partition_windows(features, window, shift))
    assert join(windows, size, window, shift).equal(features)
    torch.library.opcheck(cut, (features, window, shift))
    torch.library.opcheck(join, (windows.detach().requires_grad_(), size, window, shift))
    torch.autograd.gradcheck(lambda x: join(cut(x, window, shift) ** 2, size, window, shift), (features,))


@checker_warnings
@pytest.mark.parametrize("dense", [False, True])
def test_operators_of_the_kernels_are_what_torch_takes_for_operators(dense):
    pytest.importorskip("numba")
    tokens = torch.randn(3, 9, 6)
    choose = torch.ops.hf_ext_semanir.choose_keys.default
    torch.library.opcheck(choose, (tokens, torch.zeros(3, 9, dtype=torch.uint8), 4, True, True))
    bits = None if dense else choose(tokens, None, 4, False, True)
    query, key, value = (torch.randn(3, 2, 9, 5, requires_grad=True) for _ in range(3))
    given = (query, key, value, torch.rand(2, requires_grad=True), torch.randn(2, 25, requires_grad=True), bits, 3, 3)
    torch.library.opcheck(torch.ops.hf_ext_semanir.attend.default, given)


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Rounding of float32, of the order of 1e-6 of the largest value, is allowed twenty times over."""
    torch.testing.assert_close(found, wanted, atol=2e-5 * wanted.abs().max().item(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [ONE_STAGE, WITH_MEAN, INTERPOLATED, UNSHUFFLED, DEMOSAICKING])
def test_exported_model_takes_any_batch_and_size(fields, tmp_path):
    """Whole windows, the smallest size, and an odd rest."""
    model = make_model(**fields)
    unit, channels = model.config.multiple_of, model.config.num_channels
    images = make_images(2, channels, 3 * unit - 3, 4 * unit - 1)
    sizes = [(1, 3 * unit, 2 * unit), (3, unit + 1, 4 * unit), (1, 2 * unit + 3, 5 * unit - 1)]
    others = [make_images(batch, channels, height, width) for batch, height, width in sizes]
    any_size = {"pixel_values": {0: Dim("batch", min=1), 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}}
    # A budget that would cut the image is not obeyed: the graph must not depend on it.
    model.memory_budget = 1
    with torch.no_grad():
        program = torch.export.export(model, (), {"pixel_values": images}, dynamic_shapes=any_size)
    model.memory_budget = None
    # Another program has torch, but not our operators.
    assert not any("semanir" in str(node.target) for node in program.graph.nodes if node.op == "call_function")
    torch.export.save(program, tmp_path / "model.pt2")
    exported = torch.export.load(tmp_path / "model.pt2").module()
    for batch in (images, *others):
        assert_near(exported(pixel_values=batch).reconstruction, restore(model, batch))


def test_native_attention_is_not_exported():
    pytest.importorskip("numba")
    model = make_model(**ONE_STAGE)
    model.set_attn_implementation("native")
    with refused(UsageError, "native"), torch.no_grad():
        torch.export.export(model, (), {"pixel_values": make_images(2, 3, 9, 9)})


# What torch's compiler itself is warned of.
compiler_warnings = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning"
)


@compiler_warnings
def test_a_compiled_graph_calls_the_kernels():
    """Each layer's windows, selection and attention are one step each: nothing is left that would be slow."""
    pytest.importorskip("numba")
    graphs = []
    torch._dynamo.reset()
    model, images = make_model(**ONE_STAGE), make_images(1, 3, 12, 12)
    compiled = torch.compile(model, backend=lambda module, inputs: graphs.append(module) or module, fullgraph=True)
    assert_near(restore(compiled, images), restore(model, images))
    (graph,) = graphs
    called = [str(node.target).split(".")[-2] for node in graph.graph.nodes if "semanir" in str(node.target)]
    assert {name: called.count(name) for name in set(called)} == {"cut": 5, "join": 2, "choose_keys": 2, "attend": 2}


@compiler_warnings
@pytest.mark.slow
@pytest.mark.parametrize("fields", [COLUMNAR, UNSHUFFLED], ids=["columnar", "u-shaped"])
def test_compiled_model_restores_and_trains_alike(fields):
    """Both are compared with float64: ten times the error of either is allowed, relative to each tensor's largest."""
    torch._dynamo.reset()
    model, images = make_model(**fields), make_images(1, 3, 10, 12)
    exact = copy.deepcopy(model).double()
    model.memory_budget = 1
    compiled = torch.compile(model, backend="aot_eager")
    assert_near(restore(compiled, images).double(), restore(exact, images.double()))
    for runner, given in ((compiled, images), (exact, images.double())):
        runner.train()
        runner(given, labels=given).loss.backward()
    for found, wanted in zip(model.parameters(), exact.parameters(), strict=True):
        allowed = 1e-4 * wanted.grad.abs().max().item()
        torch.testing.assert_close(found.grad.double(), wanted.grad, atol=allowed, rtol=0)


@compiler_warnings
def test_a_compiled_model_has_a_graph_for_each_size():
    """`compile()` asks for no graph of many sizes, whose gradients torch cannot compile."""
    sizes, model = [], make_model(**{**ONE_STAGE, "depths": [1]})

    def keep(module, inputs):
        shapes = [tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor)]
        sizes.append([shape for shape in shapes if shape[:2] == (1, 3)])
        return module

    torch._dynamo.reset()
    model.compile(backend=keep)
    for side in (9, 14, 9):
        restore(model, make_images(1, 3, side, side))
    # The third call has the first one's graph.
    assert sizes == [[(1, 3, 9, 9)], [(1, 3, 14, 14)]]
    assert all(type(side) is int for (shape,) in sizes for side in shape)
