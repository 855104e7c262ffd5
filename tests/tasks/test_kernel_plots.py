"""Pictures of MRConv show what the model computes."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertModel

from hf_ext.errors import DataError, UsageError
from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification, MRConvNextConfig
from hf_ext.mrconv.modeling_mrconvnext import MRConvNextForImageClassification
from hf_ext.tasks.kernel_plots import branch_weights, contributions, load_model, plot_kernels
from hf_ext.tasks.sequences import draw_confusion
from tests.kit.command_line import run
from tests.kit.refusals import refused

BERT = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)


def tiny(**changes):
    torch.manual_seed(0)
    config = MRConvConfig(
        hidden_size=4, num_hidden_layers=2, kernel_size=4, max_position_embeddings=24, input_size=1, **changes
    )
    model = MRConvForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
        model.train()(input_values=torch.randn(3, 24, 1))
    return model.eval()


def test_weights_are_squares_of_alpha_by_depth_and_resolution():
    model = tiny()
    weights = branch_weights(model)
    assert weights.shape == (2, 4)
    alpha = model.model.layers[1].convolution.alpha
    np.testing.assert_allclose(weights[1], (alpha.detach() ** 2).sum(1).numpy() / 4, rtol=1e-6)
    with refused(DataError, "merged", "model"):
        branch_weights(model.reparameterize())


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("branch_norm", ["batch", "kernel", "none"])
def test_the_branches_that_are_drawn_add_up_to_the_merged_kernel(bidirectional, branch_norm):
    layer = tiny(bidirectional=bidirectional, branch_norm=branch_norm).model.layers[0].convolution
    with torch.no_grad():
        parts, (lags, merged) = contributions(layer, 2)
    total = dict.fromkeys(lags.tolist(), 0.0)
    for part_lags, values in parts:
        for lag, value in zip(part_lags.tolist(), values.tolist(), strict=True):
            total[lag] += value
    np.testing.assert_allclose(list(total.values()), merged, atol=1e-6)
    assert lags[0] == (-24 if bidirectional else 0) and lags[-1] == 23
    with torch.no_grad():
        kernel, ahead, _ = layer.merged()
    assert merged[lags == 0] == pytest.approx(float(kernel[2, 0]))
    if bidirectional:
        # The wing that looks ahead begins one position after the present.
        assert merged[lags == -1] == pytest.approx(float(ahead[2, 0]))


def test_a_picture_is_written_whole(tmp_path):
    model = tiny(bidirectional=True)
    model.save_pretrained(tmp_path / "model")
    path = plot_kernels(load_model(str(tmp_path / "model")), tmp_path / "kernels.png", channel=3)
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("L"))
    assert min(pixels.shape) > 500 and (pixels < 100).mean() > 0.002
    with refused(UsageError, "channel 4"):
        plot_kernels(model, tmp_path / "other.png", channel=4)
    with pytest.raises(ValueError, match="cannot stand|no kernel can stand"):
        plot_kernels(tiny(branch_norm="layer"), tmp_path / "other.png")
    BertModel(BERT).save_pretrained(tmp_path / "bert")
    with refused(DataError, "BertModel", "MRConv"):
        load_model(str(tmp_path / "bert"))
    assert "kernels.jpg" in run("mrconv", "plot", tmp_path / "model", tmp_path / "kernels.jpg", code=2).stderr
    assert [item.name for item in tmp_path.glob("*.png")] == ["kernels.png"]
    # An image network is drawn too; its second stage has a map of 4 positions, one branch.
    config = MRConvNextConfig(image_size=16, hidden_sizes=[4, 6], depths=[1, 1], kernel_size=4)
    network = MRConvNextForImageClassification(config)
    weights = branch_weights(network)
    assert np.isnan(weights).sum() == 2 and weights.shape == (2, 3)
    assert plot_kernels(network, tmp_path / "network.png").is_file()


def test_confusions_are_darker_where_there_are_more():
    confusion = np.diag([8, 8, 8])
    confusion[2, 0] = 8
    picture = np.asarray(draw_confusion(confusion, ["a", "b", "c"]).convert("L"), dtype=float)
    empty = np.asarray(draw_confusion(np.zeros((3, 3), dtype=int), []).convert("L"), dtype=float)
    assert picture.mean() < empty.mean() - 10
    assert draw_confusion(np.eye(50, dtype=int), []).size[0] > 500
