"""Checkpoints of earlier versions, whose Fourier kernels are pairs of real and imaginary parts, load as they were."""

import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_ext.mrconv import (
    MRConvForCausalLM,
    MRConvForSequenceClassification,
    MRConvModel,
    MRConvNextConfig,
    MRConvNextForImageClassification,
)
from hf_ext.tasks.texts import ListOpsTask
from tests import warm_python
from tests.mrconv.mrconv_testing import SIZES, TOKENS, earlier_state, make_model, make_tokens, shake


def write_earlier(model, folder, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """The folder as an earlier version saved it; returns the state."""
    model.save_pretrained(folder)
    names = set(load_file(folder / "model.safetensors"))
    state = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in earlier_state(model).items()
    }
    save_file(
        {name: value for name, value in state.items() if name in names}, folder / "model.safetensors", {"format": "pt"}
    )
    return state


CASES = {
    "fourier": {},
    "both wings": {"bidirectional": True, "kernel_size": 8, "max_position_embeddings": 64},
    "sum": {"kernel_type": "fourier_sparse", "kernel_size": 8, "max_position_embeddings": 40},
    "dilated": {"kernel_type": "dilated"},
}


@pytest.mark.parametrize("case", CASES)
def test_earlier_checkpoints_are_the_same_models(case, tmp_path):
    model = make_model(**{**TOKENS, **CASES[case]})
    tokens = make_tokens(2, 20)
    state = write_earlier(model, tmp_path / "earlier")
    assert any(value.ndim == 4 for value in state.values()) is (case != "dilated")
    loaded, report = MRConvForSequenceClassification.from_pretrained(tmp_path / "earlier", output_loading_info=True)
    assert not any(report.values()), report
    wanted = model.state_dict()
    assert all(value.equal(wanted[name]) for name, value in loaded.state_dict().items())
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, atol=1e-6, rtol=1e-6)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    # The body alone, and by PyTorch itself.
    body = MRConvModel.from_pretrained(tmp_path / "earlier")
    assert all(value.equal(wanted[f"model.{name}"]) for name, value in body.state_dict().items())
    other = make_model(**{**TOKENS, **CASES[case]})
    for parameter in other.parameters():
        parameter.data.zero_()
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert all(value.equal(wanted[name]) for name, value in other.state_dict().items())
    assert all(value.ndim == 4 for name, value in state.items() if name.endswith("fourier.weight"))


def test_what_is_loaded_is_saved_in_the_present_form(tmp_path):
    model = make_model(**TOKENS, kernel_type="fourier_sparse")
    write_earlier(model, tmp_path / "earlier")
    loaded = MRConvForSequenceClassification.from_pretrained(tmp_path / "earlier")
    loaded.save_pretrained(tmp_path / "now")
    saved = load_file(tmp_path / "now" / "model.safetensors")
    wanted = model.state_dict()
    assert saved.keys() == wanted.keys()
    assert all(value.equal(wanted[name]) for name, value in saved.items())
    again, report = MRConvForSequenceClassification.from_pretrained(tmp_path / "now", output_loading_info=True)
    assert not any(report.values()), report
    # Merged, trained, in half precision.
    halved = MRConvForSequenceClassification.from_pretrained(tmp_path / "earlier", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in halved.parameters()} == {torch.bfloat16}
    tokens = make_tokens(2, 20)
    expected = again(tokens).logits
    torch.testing.assert_close(halved(tokens).logits.float(), expected, atol=0.05, rtol=0)
    torch.testing.assert_close(loaded.reparameterize()(tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_language_and_image_models_of_earlier_versions(tmp_path):
    language = make_model(MRConvForCausalLM, **TOKENS)
    write_earlier(language, tmp_path / "language")
    loaded = MRConvForCausalLM.from_pretrained(tmp_path / "language")
    tokens = make_tokens(1, 9)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(tokens, **options), language.generate(tokens, **options))
    torch.manual_seed(0)
    images = MRConvNextForImageClassification(MRConvNextConfig(image_size=16, hidden_sizes=[8, 16], depths=[1, 1]))
    shake(images)
    write_earlier(images.eval(), tmp_path / "images")
    again, report = MRConvNextForImageClassification.from_pretrained(tmp_path / "images", output_loading_info=True)
    assert not any(report.values()), report
    pixels = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(again(pixels).logits, images(pixels).logits, atol=1e-6, rtol=1e-6)


def test_sizes_that_are_not_those_of_the_model_are_refused(tmp_path):
    write_earlier(make_model(**TOKENS), tmp_path / "earlier")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        MRConvForSequenceClassification.from_pretrained(tmp_path / "earlier", num_modes=2)


def test_training_starts_from_an_earlier_checkpoint(tmp_path):
    task = ListOpsTask(max_length=37)
    fields = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "kernel_size")}
    for kernel_type in ("fourier", "fourier_sparse"):
        model = task.build_model({**fields, "kernel_type": kernel_type}, None)
        shake(model)
        write_earlier(model, tmp_path / kernel_type)
        started = task.build_model({}, str(tmp_path / kernel_type))
        wanted = model.state_dict()
        assert all(value.equal(wanted[name]) for name, value in started.state_dict().items())
        assert {parameter.requires_grad for parameter in started.parameters()} == {True}


# Runs where hf_ext cannot be imported. Arguments: folder, where to write.
LOAD_ABSENT = """
import sys
sys.modules["hf_ext"] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
save_file({name: value.contiguous() for name, value in model.state_dict().items()}, sys.argv[2])
"""


def test_the_code_in_a_folder_reads_earlier_weights(tmp_path):
    model = make_model(**TOKENS)
    write_earlier(model, tmp_path / "earlier")
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    command = [sys.executable, "-c", LOAD_ABSENT, str(tmp_path / "earlier"), str(tmp_path / "out.safetensors")]
    done = warm_python.run(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    found, wanted = load_file(tmp_path / "out.safetensors"), model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(value.equal(wanted[name]) for name, value in found.items())
