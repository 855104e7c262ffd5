"""Restorers by their names, and the nodes for ComfyUI."""

import importlib.util
from pathlib import Path

import pytest
import torch

from hf_ext import restore_image
from hf_ext.errors import DataError, UsageError
from hf_ext.hub.released import released
from hf_ext.restoration.restorer import load_model
from hf_ext.semanir import SemanIRForImageRestoration
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer
from tests.semanir.test_whole_image_semanir import COLUMNAR, make_images, make_model

NODES = Path(__file__).parents[2] / "examples" / "comfyui" / "hf_ext_nodes.py"


@pytest.fixture(scope="module")
def nodes():
    """The file, as ComfyUI loads it."""
    spec = importlib.util.spec_from_file_location("hf_ext_nodes", NODES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_folders_and_tasks_of_merges_are_loaded(tmp_path):
    model, images = make_model(**COLUMNAR), make_images(1, 3, 9, 13)
    model.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    plain = load_model(str(tmp_path), device="cpu")
    assert not plain.training
    torch.testing.assert_close(plain(images).reconstruction, model(images).reconstruction)
    merged = str(released("restore-tasks"))
    jpeg, noise = (load_model(merged, task, "cpu")(images).reconstruction for task in ("jpeg", "noise"))
    assert not torch.equal(jpeg, noise)


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


def test_what_restores_nothing_is_refused_and_float16_on_a_cpu_said_to_be_slow(tmp_path, caplog):
    with refused(DataError, "SemanIR"):
        load_model(str(released("spoken-digits")))
    with refused(UsageError, "nowhere", "device"):
        load_model(str(released("denoise-gray")), device="nowhere")
    tiny_restorer().save_pretrained(tmp_path)
    for dtype, said in ((None, 0), ("bfloat16", 0), ("float16", 1)):
        caplog.clear()
        load_model(str(tmp_path), device="cpu", dtype=dtype)
        assert sum("float16 takes" in message for message in caplog.messages) == said
