"""SemanIRConfig: saving, refusing, and the published sizes of the presets."""

import pytest
import torch

from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from hf_ext.semanir.configuration_semanir import PRESETS
from tests.kit.models import ConfigTesterMixin


class TestSemanIRConfig(ConfigTesterMixin):
    config_class = SemanIRConfig
    config_changes = {
        "num_channels": 1,
        "num_channels_out": 2,
        "architecture": "u-shaped",
        "embed_dim": 8,
        "depths": [2, 3],
        "num_heads": [2, 4],
        "refinement_depth": 1,
        "downsampling": "unshuffle",
        "reduce_top_skip": False,
        "mlp_ratio": 1.5,
        "window_size": 4,
        "top_k": 5,
        "train_top_k": [2, 8],
        "similarity": "cosine",
        "include_self": False,
        "shift_policy": "stage",
        "scale": 3,
        "upsampler": "direct",
        "reconstruction_loss": "charbonnier",
        "initializer_range": 0.1,
    }
    bad_configs = [
        ({"embed_dim": "180"}, "expected int"),
        ({"architecture": "pyramid"}, "allowed: 'columnar', 'u-shaped'"),
        ({"similarity": "euclidean"}, "allowed: 'dot', 'cosine'"),
        ({"scale": 5}, "allowed: 1, 2, 3, 4"),
        ({"window_size": -8}, "`window_size` is -8"),
        ({"train_top_k": [0, 64]}, "each value must be at least 1"),
        ({"mlp_ratio": 0.0}, "must be positive"),
        ({"depths": []}, "`depths` has 0 values"),
        ({"depths": [6, 6]}, "`num_heads` 6"),
        ({"depths": [6], "num_heads": [7]}, "must divide the width 180"),
        ({"refinement_depth": 2}, "columnar model has no refinement stage"),
        ({"refinement_depth": -1}, "must be 0 or more"),
        ({"architecture": "u-shaped", "depths": [6], "num_heads": [6]}, "at least two levels"),
        ({"architecture": "u-shaped", "embed_dim": 9, "depths": [1, 1], "num_heads": [3, 3]}, "even width"),
        ({"image_mean": [0.5]}, "`image_mean` has 1 values"),
        ({"image_mean": [0.4, 0.4, 0.4], "num_channels_out": 1}, "as many output as input channels"),
        ({"interpolated_base": True}, "`interpolated_base` needs a `scale` above 1"),
        (
            {"interpolated_base": True, "scale": 2, "num_channels": 4, "num_channels_out": 3},
            "`interpolated_base` needs",
        ),
    ]


def test_descriptor_says_what_images_the_model_takes():
    assert SemanIRConfig(top_k=24).top_k_range == (24, 24)
    assert SemanIRConfig(top_k=24, train_top_k=[64, 8, 32]).top_k_range == (8, 64)
    denoiser = SemanIRConfig(**PRESETS["u-shaped-small"], num_channels=1).descriptor
    assert denoiser == ("Restoration", 1, 1, 1, 1, 32, "internal", 64, True, True)
    enlarging = SemanIRConfig(**PRESETS["columnar-s"], scale=4).descriptor
    assert (enlarging.purpose, enlarging.scale, enlarging.multiple_of) == ("SR", 4, 32)
    demosaicking = SemanIRConfig(num_channels=4, num_channels_out=3, scale=2)
    assert demosaicking.demosaicks and demosaicking.descriptor.purpose == "Restoration"
    assert not SemanIRConfig(num_channels=4, num_channels_out=3).demosaicks


def test_auto_map_names_every_head_and_no_repository():
    config = SemanIRConfig(auto_map={"AutoConfig": "org/name--configuration_semanir.SemanIRConfig"})
    assert config.to_dict()["auto_map"] == {
        "AutoConfig": "configuration_semanir.SemanIRConfig",
        "AutoModel": "modeling_semanir.SemanIRModel",
        "AutoModelForImageToImage": "modeling_semanir.SemanIRForImageRestoration",
    }
    config.auto_map["AutoModel"] = "other.Model"
    assert SemanIRConfig().auto_map["AutoModel"] == "modeling_semanir.SemanIRModel"


@pytest.mark.parametrize(
    ("preset", "scale", "millions"),
    [
        # Published counts of S and B for x2, x3 and x4, and of the denoiser (25.82).
        ("columnar-s", 2, 11.87),
        ("columnar-s", 3, 12.05),
        ("columnar-s", 4, 12.02),
        ("columnar-b", 2, 19.90),
        ("columnar-b", 3, 20.08),
        ("columnar-b", 4, 20.04),
        ("u-shaped", 1, 25.82),
        # The small layouts of our own.
        ("u-shaped-small", 1, 3.59),
        ("columnar-tiny", 2, 0.53),
        ("columnar-tiny", 3, 0.72),
        ("columnar-tiny", 4, 0.68),
        ("columnar-half", 1, 0.208),
    ],
)
def test_parameter_counts_are_the_published_ones(preset, scale, millions):
    with torch.device("meta"):
        model = SemanIRForImageRestoration(SemanIRConfig(**PRESETS[preset], scale=scale))
    # The published figures are cut or rounded to two decimals.
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.006)
