"""examples/benchmarks/semanir_sizes.py counts what the formulas of attention say."""

import json

import pytest
import torch

from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from tests.kit.studies import EXAMPLES, module_loader

load = module_loader(EXAMPLES / "benchmarks")


def test_operations_are_those_of_the_formulas(load):
    sizes = load("semanir_sizes")
    config = SemanIRConfig(
        architecture="columnar", embed_dim=16, depths=[2], num_heads=[2], window_size=8, top_k=16, shift_policy="none"
    )
    row = sizes.count(config)
    tokens, window = 256**2, 64
    # 4 N² C a window and layer; the dictionary of a stage half of a layer's, by one product.
    assert row["attention_masked"] == pytest.approx(2 * 4 * window * tokens * 16 / 1e9)
    assert row["attention_of_k_keys"] == pytest.approx(row["attention_masked"] / 4)
    assert row["dictionaries"] == pytest.approx(2 * window * tokens * 16 / 1e9)
    assert row["total_masked"] - row["total_of_k_keys"] == pytest.approx(0.75 * row["attention_masked"])


def test_committed_counts_are_those_of_the_recipes_and_releases(load):
    found = load("semanir_sizes").configurations()
    assert {"denoise_color", "super_resolution_x4", "released: denoise-color"} <= set(found)
    kept = json.loads((EXAMPLES / "benchmarks" / "results" / "semanir_sizes.json").read_text(encoding="utf-8"))
    # As the recipe's own comment says: its preset is the U.
    assert kept["models"]["denoise_color"]["parameters"] == pytest.approx(25.8e6, rel=0.01)
    for name, config in found.items():
        with torch.device("meta"):
            model = SemanIRForImageRestoration(config)
        assert kept["models"][name]["parameters"] == sum(value.numel() for value in model.parameters()), name
        assert kept["models"][name]["window"] == config.window_size
    assert set(kept["models"]) == set(found)
