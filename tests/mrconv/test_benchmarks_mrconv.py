"""The benchmarks beside other models: what they compare and count."""

import json
import sys

import pytest
import torch

from tests.kit.studies import EXAMPLES, module_loader

load = module_loader(EXAMPLES / "benchmarks")


@pytest.fixture
def run(load, monkeypatch, tmp_path):
    """A benchmark with words of its command line; its JSON and its table."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(name, *words, **replaced):
        module = load(name)
        for key, value in replaced.items():
            monkeypatch.setattr(module, key, value)
        monkeypatch.setattr(sys, "argv", [name, *words, "--output", str(tmp_path / "out" / "result.json")])
        module.main()
        folder = tmp_path / "out"
        return json.loads((folder / "result.json").read_text()), (folder / "result.md").read_text()

    yield call
    sys.modules.pop("peers", None)


def test_memory_is_what_a_call_holds_at_once(load, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    peak_bytes = load("mrconv_inference").peak_bytes

    def call():
        # Two of a megabyte at once, and after they are gone a third.
        torch.zeros(2**18) + 1
        return torch.zeros(2**18)

    torch.zeros(1)
    assert 2 * 2**20 <= peak_bytes(call) < 2.1 * 2**20


def test_times_and_memory_against_length(run):
    result, table = run("mrconv_inference", "--lengths", "64", "128", "--rounds", "1", "--width", "64")
    assert set(result["results"]["blocks"]) == {"64", "128"}
    for row in result["results"]["blocks"]["128"].values():
        assert row["seconds"] > 0 and row["bytes"] >= 4 * 64 * 128
    assert set(result["results"]["blocks"]["64"]) == {
        "MRConv merged", "MRConv branches", "S4D", "SDPA attention", "Mamba 2",
    }  # fmt: skip
    assert "| blocks, length | MRConv merged | MRConv branches | S4D |" in table


def test_pictures_a_second(run):
    presets = {"tiny": {"hidden_sizes": (8, 16, 16, 16), "depths": (1, 1, 1, 1)}}
    words = ["--presets", "tiny", "--image-size", "32", "--rounds", "1", "--batches", "1", "2"]
    result, table = run("mrconv_images", *words, PRESETS=presets)
    assert set(result["results"]["tiny"]["inference"]) == {"1", "2"}
    assert result["results"]["tiny"]["training"]["ConvNeXt"]["ratio"] == 1.0
    assert table.count("\n") == 5 and "| 82.1 | 1,306 |" in table


def test_merged_and_with_branches_are_one_model(load, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    images = load("mrconv_images")
    sizes = {"hidden_sizes": (8, 16, 16, 16), "depths": (1, 1, 1, 1)}
    monkeypatch.setattr(images, "PRESETS", {"tiny": sizes})
    models, pixels = images.make_models("tiny", 32), torch.randn(2, 3, 32, 32)
    logits = {name: model(pixel_values=pixels).logits for name, model in models.items()}
    torch.testing.assert_close(logits["MRConvNeXt merged"], logits["MRConvNeXt with branches"], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(logits["ConvNeXt"], logits["MRConvNeXt merged"], atol=1e-3)
