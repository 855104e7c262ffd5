"""Restorers for other programs: the fields of spandrel's descriptor, and the nodes for ComfyUI."""

import importlib.util
from pathlib import Path

import pytest
import torch

from hf_ext import Restorer, restore_image
from hf_ext.errors import DataError, UsageError
from hf_ext.hub.released import released
from hf_ext.semanir import SemanIRForImageRestoration
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer
from tests.semanir.test_whole_image_semanir import COLUMNAR, DEMOSAICKING, UNSHUFFLED, make_images, make_model

NODES = Path(__file__).parents[2] / "examples" / "comfyui" / "hf_ext_nodes.py"


@pytest.fixture(scope="module")
def nodes():
    """The file, as ComfyUI loads it."""
    spec = importlib.util.spec_from_file_location("hf_ext_nodes", NODES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("fields", "purpose", "scale", "channels", "multiple_of", "tags"),
    [
        ({**COLUMNAR, "scale": 3}, "SR", 3, (3, 3), 4, ["columnar"]),
        (UNSHUFFLED, "Restoration", 1, (3, 3), 16, ["u-shaped"]),
        (DEMOSAICKING, "Restoration", 2, (4, 3), 16, ["u-shaped"]),
    ],
    ids=["columnar", "u-shaped", "mosaic"],
)
def test_fields_are_those_of_the_model_and_calls_give_its_pictures(
    fields, purpose, scale, channels, multiple_of, tags
):
    model = make_model(**fields).train()
    restorer = Restorer(model)
    assert not model.training and restorer.model is model
    assert (restorer.purpose, restorer.scale, restorer.tiling) == (purpose, scale, "internal")
    assert (restorer.input_channels, restorer.output_channels) == channels
    assert restorer.size_requirements == (1, multiple_of, False) and restorer.tags == tags
    images = make_images(2, channels[0], 9, 13)
    restored = restorer(images)
    assert restored.shape == (2, channels[1], 9 * scale, 13 * scale)
    with torch.no_grad():
        torch.testing.assert_close(restored, model(images).reconstruction.clamp(0, 1))


def test_precision_is_changed_and_comes_back_as_the_pictures_have_it():
    restorer = Restorer(make_model(**COLUMNAR))
    images = make_images(1, 3, 9, 13)
    wanted = restorer(images)
    assert restorer.supports_bfloat16 and restorer.bfloat16().dtype == torch.bfloat16
    assert restorer(images).dtype == torch.float32
    assert restorer(images.bfloat16()).dtype == torch.bfloat16
    assert restorer.half().dtype == torch.float16
    assert restorer.float().cpu().eval().device == torch.device("cpu")
    # The weights were rounded twice.
    torch.testing.assert_close(restorer(images), wanted, atol=0.05, rtol=0)


def test_names_folders_and_tasks_of_merges_are_loaded(tmp_path):
    model = make_model(**COLUMNAR)
    model.save_pretrained(tmp_path)
    images = make_images(1, 3, 9, 13)
    loaded = Restorer.from_pretrained(tmp_path, device="cpu", dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16
    torch.testing.assert_close(Restorer.from_pretrained(tmp_path, device="cpu")(images), Restorer(model)(images))
    jpeg = Restorer.from_pretrained("restore-tasks", task="jpeg", device="cpu")
    noise = Restorer.from_pretrained("restore-tasks", task="noise", device="cpu")
    assert not torch.equal(jpeg(images), noise(images))


def test_what_restores_nothing_is_refused():
    with refused(DataError, "SemanIR"):
        Restorer.from_pretrained("spoken-digits")
    with refused(UsageError, "nowhere", "device"):
        Restorer.from_pretrained("denoise-gray", device="nowhere")
    restorer, images = Restorer(tiny_restorer()), make_images(1, 3, 5, 6)
    for wrong in (images.numpy(), 255 * images, -255 * images, images * torch.nan):
        with refused(UsageError, "255"):
            restorer(wrong)


def test_nodes_of_comfyui_restore_what_the_package_restores(nodes):
    load, restore = (nodes.NODE_CLASS_MAPPINGS[name]() for name in ("HfExtLoadRestorer", "HfExtRestoreImage"))
    assert nodes.NODE_DISPLAY_NAME_MAPPINGS.keys() == nodes.NODE_CLASS_MAPPINGS.keys()
    for node in (load, restore):
        # ComfyUI calls the function that the class names with the inputs that it names.
        assert callable(getattr(node, node.FUNCTION)) and isinstance(node.RETURN_TYPES, tuple)
    defaults = {name: options["default"] for name, (_, options) in load.INPUT_TYPES()["required"].items()}
    (restorer,) = load.load(**defaults)
    images = make_images(2, 20, 27, 3)
    assert set(restore.INPUT_TYPES()["required"]) == {"restorer", "image", "strength"}
    (restored,) = restore.restore(restorer=restorer, image=images, strength=0.5)
    assert restored.shape == images.shape and restored.dtype == torch.float32
    model = SemanIRForImageRestoration.from_pretrained(released("denoise-color")).eval()
    wanted = restore_image(model, images[1].numpy(), strength=0.5).clip(0, 1)
    torch.testing.assert_close(restored[1], torch.from_numpy(wanted), atol=1e-5, rtol=0)
    # ComfyUI's own node gives channels first, and tiles.
    (whole,) = restore.restore(restorer=restorer, image=images)
    first = restorer(images[:1].movedim(-1, -3)).movedim(-3, -1)
    torch.testing.assert_close(first, whole[:1], atol=1e-5, rtol=0)


def test_node_refuses_what_is_no_restorer(nodes):
    with refused(TypeError, "restorer"):
        nodes.RestoreImage().restore(torch.nn.Linear(1, 1), make_images(1, 8, 8, 3))


def test_float16_on_a_cpu_is_said_to_be_slow(tmp_path, caplog):
    tiny_restorer().save_pretrained(tmp_path)
    for dtype, said in ((None, 0), ("bfloat16", 0), ("float16", 1)):
        caplog.clear()
        Restorer.from_pretrained(tmp_path, device="cpu", dtype=dtype)
        assert sum("float16 takes" in message for message in caplog.messages) == said
