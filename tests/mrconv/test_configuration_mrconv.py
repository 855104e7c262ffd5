"""MRConvConfig: saving, refusing, and the lengths of the branches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ext.mrconv import MRConvConfig
from hf_ext.mrconv.configuration_mrconv import branch_lengths, changed_lengths
from tests.kit.models import ConfigTesterMixin
from tests.kit.refusals import refused


class TestMRConvConfig(ConfigTesterMixin):
    config_class = MRConvConfig
    config_changes = {
        "vocab_size": 20,
        "input_size": 3,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "kernel_type": "sparse",
        "kernel_size": 8,
        "max_position_embeddings": 64,
        "num_branches": 2,
        "num_modes": 5,
        "bidirectional": True,
        "branch_norm": "kernel",
        "norm": "layer",
        "prenorm": False,
        "dropout": 0.1,
        "tied_dropout": False,
        "norm_eps": 1e-3,
        "sync_batch_norm": False,
        "sampling_rate": 8000,
        "rate_factor": 2.0,
        "reparameterized": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "input_mean": [1.0, 2.0, 3.0],
        "input_std": [1.0, 0.5, 0.1],
        "target_mean": [1.0, -1.0],
        "target_std": [2.0, 3.0],
        "input_columns": ["x", "y", "z"],
    }
    bad_configs = [
        ({"hidden_size": "256"}, "expected int"),
        ({"kernel_type": "wavelet"}, "allowed: 'dilated', 'fourier', 'sparse', 'fourier_sparse', 'implicit'"),
        ({"branch_norm": "instance"}, "allowed: 'batch', 'layer', 'kernel', 'none'"),
        ({"norm": "rms"}, "allowed: 'batch', 'layer'"),
        ({"vocab_size": 0}, "`vocab_size` is 0"),
        ({"kernel_size": 0}, "`kernel_size` is 0"),
        ({"max_position_embeddings": -1}, "`max_position_embeddings` is -1"),
        ({"dropout": 1.0}, "at least 0 and below 1"),
        ({"norm_eps": 0.0}, "`norm_eps` is 0.0"),
        ({"rate_factor": float("nan")}, "must be positive"),
        ({"rate_factor": 3.0}, "must divide the length of every kernel"),
        ({"num_branches": 8}, "have 7 resolutions, give 1 to 7"),
        ({"num_modes": 10}, "a kernel of 16 samples has 1 to 9 modes"),
        ({"reparameterized": True, "branch_norm": "layer"}, "cannot be merged"),
        ({"input_mean": [0.0]}, "`input_mean` is [0.0] and `input_std` None; give both, 1 numbers each"),
        ({"input_size": 2, "input_mean": [0.0], "input_std": [1.0]}, "give both, 2 numbers each"),
        ({"target_mean": [0.0, 0.0], "target_std": [1.0, 0.0]}, "spreads over 0"),
    ]


@pytest.mark.parametrize(
    ("arguments", "branches"),
    [
        ((16, 63), [(1, 16), (2, 32), (4, 63)]),
        ((16, 5), [(1, 5)]),
        ((16, 64, 2), [(2, 32), (4, 64)]),
        ((16, 64, 1), [(4, 64)]),
    ],
)
def test_resolutions_double_and_the_last_is_cropped(arguments, branches):
    assert branch_lengths(*arguments) == branches


@given(st.integers(1, 300), st.integers(1, 5000))
def test_resolutions_of_any_size(kernel_size, length):
    branches = branch_lengths(kernel_size, length)
    assert branches[-1][1] == length
    for index, (dilation, taps) in enumerate(branches[:-1]):
        assert (dilation, taps) == (2**index, kernel_size * 2**index)
        assert taps < length
    assert branches[-1][0] == 2 ** (len(branches) - 1)


def test_lengths_at_another_rate_are_whole_or_refused():
    branches = branch_lengths(16, 64)
    assert changed_lengths(branches, 1.0) == [16, 32, 64]
    assert changed_lengths(branches, 4) == [4, 8, 16]
    assert changed_lengths(branches, 0.5) == [32, 64, 128]
    assert [MRConvConfig(rate_factor=rate).longest_input for rate in (1.0, 2.0, 0.5)] == [1024, 512, 2048]
    for factor in (3, 32.0):
        with refused(ValueError, "samples", "whole"):
            changed_lengths(branches, factor)
