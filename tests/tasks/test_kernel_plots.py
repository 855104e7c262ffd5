"""Pictures of MRConv show what the model computes."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from hf_ext.errors import DataError
from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification
from hf_ext.tasks.kernel_plots import load_model
from hf_ext.tasks.sequences import draw_confusion
from tests.kit.refusals import refused
from tests.kit.studies import EXAMPLES, module_loader

load = module_loader(EXAMPLES / "released")


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


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("branch_norm", ["batch", "kernel", "none"])
def test_the_branches_that_are_drawn_add_up_to_the_merged_kernel(load, bidirectional, branch_norm):
    layer = tiny(bidirectional=bidirectional, branch_norm=branch_norm).model.layers[0].convolution
    with torch.no_grad():
        parts, (lags, merged) = load("front").contributions(layer, 2)
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


def test_another_model_is_refused(tmp_path):
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    BertModel(config).save_pretrained(tmp_path)
    with refused(DataError, "BertModel", "MRConv"):
        load_model(str(tmp_path))


def test_confusions_are_darker_where_there_are_more():
    confusion = np.diag([8, 8, 8])
    confusion[2, 0] = 8
    picture = np.asarray(draw_confusion(confusion, ["a", "b", "c"]).convert("L"), dtype=float)
    empty = np.asarray(draw_confusion(np.zeros((3, 3), dtype=int), []).convert("L"), dtype=float)
    assert picture.mean() < empty.mean() - 10
    assert draw_confusion(np.eye(50, dtype=int), []).size[0] > 500
