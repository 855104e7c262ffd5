"""Restorers as ONNX files: any size, the numbers of the model, and no file where they differ."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_ext.hub.released import released
from hf_ext.restoration.export import compare_onnx, export_onnx
from hf_ext.semanir import SemanIRForImageRestoration
from tests.kit.command_line import run
from tests.semanir.test_whole_image_semanir import COLUMNAR, DEMOSAICKING, UNSHUFFLED, make_images, make_model

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

ONE_STAGE = {**COLUMNAR, "depths": [1], "num_heads": [2], "scale": 2}


@torch.no_grad()
def check_file(path, model) -> None:
    """Other sizes than the export has compared, in a program that knows the file alone."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (taken,), (given,) = session.get_inputs(), session.get_outputs()
    assert (taken.name, given.name) == ("pixel_values", "reconstruction")
    assert taken.shape == ["batch_size", model.config.num_channels, "height", "width"]
    unit = model.config.multiple_of
    for batch, height, width in ((1, 2 * unit, unit + 1), (3, 2 * unit + 3, 3 * unit - 1)):
        images = make_images(batch, model.config.num_channels, height, width)
        found = np.asarray(session.run(None, {"pixel_values": images.numpy()})[0])
        wanted = model(images).reconstruction.numpy()
        assert found.shape == wanted.shape
        # Where two keys are equally similar up to rounding, some pixels differ more than by rounding.
        assert np.median(np.abs(found - wanted)) < 2e-6 and np.abs(found - wanted).mean() < 1e-4
    told = session.get_modelmeta().custom_metadata_map
    taken, given = model.config.num_channels, model.config.num_channels_out
    expected = {"input_channels": taken, "output_channels": given, "scale": model.config.scale, "minimum": unit + 1}
    assert told == {name: str(value) for name, value in expected.items()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = make_model(**ONE_STAGE)
    path = tmp_path_factory.mktemp("export") / "model.onnx"
    with warnings.catch_warnings():
        # What the exporter warns users of in our code is an error of ours.
        warnings.simplefilter("error", UserWarning)
        return model, path, export_onnx(model, path)


def test_exported_file_takes_any_size_and_gives_the_numbers_of_the_model(exported):
    model, path, written = exported
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"]
    assert written.path == path and written.bytes == path.stat().st_size
    assert written.minimum == model.config.window_size + 1
    assert 0 < written.difference < 1e-3
    check_file(path, model)
    # That of another model is refused.
    other = make_model(**ONE_STAGE)
    for parameter in other.reconstruction.parameters():
        torch.nn.init.normal_(parameter)
    with pytest.raises(FloatingPointError):
        compare_onnx(path.read_bytes(), other)


def test_a_model_without_numbers_leaves_no_file(exported, monkeypatch, tmp_path):
    model = make_model(**ONE_STAGE)
    with torch.no_grad():
        next(iter(model.reconstruction.parameters())).fill_(torch.nan)
    # The file of the same model with numbers stands for its own, which takes ten seconds.
    proto = SimpleNamespace(SerializeToString=exported[1].read_bytes)
    program = SimpleNamespace(model=SimpleNamespace(metadata_props={}), model_proto=proto)
    monkeypatch.setattr(torch.onnx, "export", lambda *given, **options: program)
    monkeypatch.setattr("onnxscript.optimizer.optimize", lambda *given, **options: None)
    with pytest.raises(FloatingPointError):
        export_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_path_that_exists_and_a_model_that_restores_nothing_are_refused(tmp_path):
    path = tmp_path / "model.onnx"
    assert "a mrconv model, not SemanIR" in run("export", "spoken-digits", "--onnx", path, code=2).output
    path.write_text("mine")
    assert f"{path} exists" in run("export", "denoise-gray", "--onnx", path, code=2).output
    assert path.read_text() == "mine"
    for wrong in (path / "model.onnx", f"{tmp_path}/new.onnx/"):
        assert "a folder" in run("export", "denoise-gray", "--onnx", wrong, code=2).output


@pytest.mark.slow
@pytest.mark.parametrize("fields", [UNSHUFFLED, DEMOSAICKING], ids=["u-shaped", "mosaic"])
def test_half_precision_is_exported_in_float32_and_the_model_stays(fields, tmp_path):
    model = make_model(**fields).to(torch.bfloat16)
    export_onnx(model, tmp_path / "model.onnx")
    assert model.dtype == torch.bfloat16
    check_file(tmp_path / "model.onnx", model.float())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["denoise-color", "super-resolution-x2"])
def test_released_models_are_exported(name, tmp_path):
    path = tmp_path / "model.onnx"
    assert "onnxruntime and the model differ by at most" in run("export", name, "--onnx", path).output
    check_file(path, SemanIRForImageRestoration.from_pretrained(released(name), dtype=torch.float32).eval())
