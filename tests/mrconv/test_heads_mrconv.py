"""MRConv's heads: masked tokens, classes of positions, regression; each loads through its Auto class."""

import copy
import json
import re

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError

from hf_ext.mrconv import (
    MRConvCache,
    MRConvConfig,
    MRConvForCausalLM,
    MRConvForMaskedLM,
    MRConvForSequenceClassification,
    MRConvForTokenClassification,
)
from hf_ext.mrconv.modeling_mrconv import delta_features
from tests.kit.models import LoraTesterMixin, TrainerTesterMixin, assert_same_answers
from tests.kit.refusals import refused
from tests.mrconv.mrconv_testing import (
    SIZES,
    TOKENS,
    MRConvTester,
    make_image_model,
    make_mask,
    make_model,
    make_signal,
    make_tokens,
)


class TestMaskedLM(MRConvTester, TrainerTesterMixin, LoraTesterMixin):
    model_class = MRConvForMaskedLM
    fields = {**TOKENS, "hidden_size": 8, "bidirectional": True, "norm": "layer"}
    lora_targets = ["pointwise"]

    def make_inputs(self):
        inputs = {"input_ids": make_tokens(4, 20)}
        labels = torch.full((4, 20), -100)
        labels[:, 5:9] = inputs["input_ids"][:, 5:9]
        inputs["input_ids"][:, 5:9] = 0
        return {**inputs, "attention_mask": make_mask(), "labels": labels}


# What is measured is far from zero mean and unit spread.
CHANNELS = {**SIZES, "hidden_size": 8, "input_size": 2, "input_mean": [300.0, -2.0], "input_std": [20.0, 0.1]}


def make_measurements(*shape: int) -> torch.Tensor:
    signal = make_signal(*shape, 2, dtype=torch.float32)
    return signal * torch.tensor(CHANNELS["input_std"]) + torch.tensor(CHANNELS["input_mean"])


class TestPositions(MRConvTester, TrainerTesterMixin, LoraTesterMixin):
    model_class = MRConvForTokenClassification
    fields = CHANNELS
    lora_targets = ["pointwise", "classifier"]

    def make_inputs(self):
        values, mask = make_measurements(4, 20), make_mask()
        labels = (values[..., 0] > 300).long().masked_fill(mask == 0, -100)
        return {"input_values": values, "attention_mask": mask, "labels": labels}


TARGETS = {"target_mean": [70.0, 0.0], "target_std": [3.0, 0.01]}


class TestRegression(MRConvTester, TrainerTesterMixin):
    """Of two targets, far from zero mean and unit spread."""

    model_class = MRConvForSequenceClassification
    fields = {**CHANNELS, "num_labels": 2, "problem_type": "regression", **TARGETS}
    # Of answers of about 70.
    bfloat16_tolerance = 0.5

    def make_inputs(self):
        values = make_measurements(4, 20)
        return {"input_values": values, "labels": torch.stack([70 + values[:, 3, 1], 0.01 * values[:, 5, 1]], 1)}


class TestDeltaFeatures(MRConvTester, LoraTesterMixin):
    """A classifier that takes the changes of its channels too."""

    model_class = MRConvForSequenceClassification
    fields = {**CHANNELS, "input_delta_std": [5.0, 0.02], "bidirectional": True}
    lora_targets = ["pointwise"]

    def make_inputs(self):
        labels = torch.arange(4) % 3
        return {"input_values": make_measurements(4, 20), "attention_mask": make_mask(), "labels": labels}


HEADS = {
    "regression": (TestRegression, {}),
    "positions": (TestPositions, {}),
    "positions, both ways": (TestPositions, {"bidirectional": True}),
    "masked": (TestMaskedLM, {}),
    "changes": (TestDeltaFeatures, {}),
    "norms of layers after blocks": (TestMaskedLM, {"prenorm": False}),
}
OF_POSITIONS = ("positions", "positions, both ways", "masked", "norms of layers after blocks")


@pytest.mark.parametrize("case", HEADS)
def test_neither_padding_nor_merging_changes_an_answer(case):
    tester, changes = HEADS[case]
    model = make_model(tester.model_class, **{**tester.fields, **changes}).double()
    name, values = next(iter(tester().make_inputs().items()))
    values = values.double() if values.is_floating_point() else values
    expected, length = model(**{name: values})[0], values.shape[1]
    for left, right in ((0, 4), (3, 2)):
        shape = (len(values), left + length + right, *values.shape[2:])
        padded = torch.full(shape, 7, dtype=values.dtype)
        padded[:, left : left + length] = values
        mask = torch.zeros(shape[:2], dtype=torch.int64)
        mask[:, left : left + length] = 1
        found = model(**{name: padded}, attention_mask=mask)[0]
        merged = copy.deepcopy(model).reparameterize()(**{name: padded}, attention_mask=mask)[0]
        for answers in (found, merged):
            answers = answers[:, left : left + length] if case in OF_POSITIONS else answers
            torch.testing.assert_close(answers, expected, atol=1e-9, rtol=1e-9)
    assert model.reparameterize() is model and model.config.reparameterized
    for _ in range(2):
        torch.testing.assert_close(model(**{name: values})[0], expected, atol=1e-9, rtol=1e-9)
        model.reparameterize()


@pytest.mark.parametrize("changes", [False, True])
def test_measurements_and_their_changes_are_normalised_by_the_configuration(changes):
    """The same weights without the options, given normalised numbers, and changes as channels of their own."""
    # `make_model` would move the units too.
    tester = TestDeltaFeatures if changes else TestPositions
    units = {"input_mean": None, "input_std": None, "input_delta_std": None, "input_size": 4 if changes else 2}
    model, plain = tester().make_model(), make_model(tester.model_class, **{**tester.fields, **units})
    plain.load_state_dict(model.state_dict())
    values = make_measurements(2, 20)
    normal = (values - torch.tensor(CHANNELS["input_mean"])) / torch.tensor(CHANNELS["input_std"])
    if changes:
        steps = F.pad(values.diff(dim=1), (0, 0, 1, 0))
        normal = torch.cat([normal, steps / torch.tensor(tester.fields["input_delta_std"])], -1)
    found, expected = model(input_values=values).logits, plain(input_values=normal).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    # A series of one step has no change.
    assert torch.isfinite(model(input_values=values[:, :1]).logits).all()
    # Nor does bfloat16 round what was measured.
    assert model.bfloat16().model.units.mean.dtype == torch.float32


TWO_CHANNELS = {**SIZES, "vocab_size": None, "input_size": 2, "input_mean": [3.0, 5.0], "input_std": [2.0, 4.0]}


@pytest.mark.parametrize("model_class", [MRConvForSequenceClassification, MRConvForTokenClassification])
def test_nothing_at_padding_reaches_a_gradient(model_class):
    torch.manual_seed(0)
    values, mask = torch.randn(2, 12, 2), torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    labels = torch.tensor([0, 2]) if model_class is MRConvForSequenceClassification else mask - 100 * (1 - mask)
    results = []
    for held in (0.0, float("nan"), float("inf")):
        model = make_model(model_class, **TWO_CHANNELS).train()
        values[1, 8:] = held
        loss = model(input_values=values, attention_mask=mask, labels=labels).loss
        loss.backward()
        results.append([loss, *(value.grad for value in model.parameters())])
    for found in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(found, results[0], strict=True))


def test_what_is_missing_is_the_mean_of_its_channel():
    model = make_model(**TWO_CHANNELS)
    values, observed = torch.randn(2, 12, 2), torch.ones(2, 12, 2)
    observed[0, 3:5, 0] = observed[1, 7, 1] = 0
    expected = model(input_values=torch.where(observed == 0, model.model.units.mean, values)).logits
    for held in (7.0, float("nan")):
        given = values.masked_fill(observed == 0, held)
        torch.testing.assert_close(model(input_values=given, observed_mask=observed).logits, expected)
    assert not torch.allclose(model(input_values=values).logits, expected)
    embeds = torch.randn(2, 12, SIZES["hidden_size"])
    for wrong in ({"input_values": values, "observed_mask": observed[..., :1]},
                  {"inputs_embeds": embeds, "observed_mask": observed}):  # fmt: skip
        with pytest.raises(ValueError):
            model(**wrong)
    for name in ("past_observed_mask", "padding_mask"):
        with refused(TypeError, name):
            model(input_values=values, **{name: torch.ones(2, 12)})


def test_a_regression_answers_in_the_units_of_its_targets():
    tester = TestRegression()
    model, inputs = tester.make_model(), tester.make_inputs()
    outputs = model(**inputs)
    mean, std = (torch.tensor(tester.fields[name]) for name in ("target_mean", "target_std"))
    torch.testing.assert_close(outputs.loss, ((outputs.logits - inputs["labels"]) / std).square().mean())
    fields = {**tester.fields, "target_mean": None, "target_std": None}
    plain = MRConvForSequenceClassification(MRConvConfig(**fields)).eval()
    plain.load_state_dict(model.state_dict())
    assert_same_answers(outputs.logits, plain(**inputs).logits * std + mean)
    # Values with units are no marks.
    model = make_model(**{**TWO_CHANNELS, "num_labels": 2, **TARGETS})
    answer = model(input_values=torch.randn(2, 9, 2), labels=torch.tensor([[70.0, 0.0], [73.0, 0.01]]))
    assert model.config.problem_type == "regression" and answer.loss > 0


VALUES, CLASSES, MARKS = "regression", "single_label_classification", "multi_label_classification"
# Problem type and number of outputs, rows, and shapes of labels that fit or are refused.
LABELS = [
    *((kind, 1, 3, [(3,), (3, 1), (1, 3)], [(1,), (1, 1), (), (3, 3), (2,)]) for kind in (None, VALUES)),
    (VALUES, 2, 2, [(2, 2)], [(2,), (2, 1), (1, 2), (1,), (), (2, 2, 1)]),
    (VALUES, 2, 1, [(1, 2), (2,)], [(1,), (1, 1), ()]),
    *((kind, 3, 2, [(2,), (2, 1)], [(1,), (), (2, 3), (3,)]) for kind in (None, CLASSES)),
    (MARKS, 3, 2, [(2, 3)], [(2,), (3,), (2, 1), (1, 3)]),
]
LOSSES = {VALUES: F.mse_loss, CLASSES: F.cross_entropy, MARKS: F.binary_cross_entropy_with_logits}


@pytest.mark.parametrize("of_images", [False, True])
@pytest.mark.parametrize(("kind", "outputs", "rows", "right", "wrong"), LABELS)
def test_labels_have_the_shape_and_type_of_their_problem(of_images, kind, outputs, rows, right, wrong):
    fields = {"num_labels": outputs, "problem_type": kind}
    model = make_image_model(**fields) if of_images else make_model(**{**TWO_CHANNELS, **fields})
    inputs = {"pixel_values": torch.randn(rows, 3, 16, 16)} if of_images else {"input_values": torch.randn(rows, 9, 2)}
    is_class = kind == CLASSES or (kind is None and outputs > 1)
    kinds = [torch.int64, torch.int32, torch.uint8, *[torch.float64, torch.float16, torch.bool] * (not is_class)]
    for dtype in kinds:
        for shape in wrong:
            model.config.problem_type = kind
            with pytest.raises(ValueError, match=re.escape(str(shape))):
                model(**inputs, labels=torch.ones(shape, dtype=dtype))
        for shape in right:
            labels = torch.ones(shape, dtype=dtype)
            found = model(**inputs, labels=labels)
            labels = labels.flatten().long() if is_class else labels.view(rows, outputs).to(found.loss.dtype)
            assert torch.equal(found.loss, LOSSES[model.config.problem_type](found.logits, labels))
    if is_class:
        with pytest.raises(ValueError, match="float32"):
            model(**inputs, labels=torch.ones(rows))


def test_a_batch_without_any_class_has_no_loss():
    model = make_model(MRConvForTokenClassification, **CHANNELS)
    labels, values = torch.full((2, 9), -100), make_measurements(2, 9)
    for options in ({}, {"num_items_in_batch": torch.tensor(0)}):
        loss = model(input_values=values, labels=labels, **options).loss
        loss.backward()
        assert loss == 0
    labels[0, 3] = 1
    outputs = model(input_values=values, labels=labels)
    torch.testing.assert_close(outputs.loss, F.cross_entropy(outputs.logits[0, 3], labels[0, 3]))


def test_positions_stream_as_the_full_forward():
    model = make_model(MRConvForTokenClassification, **CHANNELS).double()
    values = make_measurements(2, 30).double()
    expected, cache, found = model(input_values=values).logits, MRConvCache(model.config), []
    with torch.no_grad():
        for begin, stop in ((0, 9), (9, 10), (10, 30)):
            found.append(model(input_values=values[:, begin:stop], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-9, rtol=1e-9)


def test_heads_refuse_configurations_that_they_cannot_be():
    for model_class, fields, words in (
        (MRConvForMaskedLM, TOKENS, "`bidirectional` is False"),
        (MRConvForMaskedLM, {**SIZES, "bidirectional": True}, "`vocab_size` is None"),
        (MRConvForCausalLM, {**TOKENS, "bidirectional": True}, "bidirectional=False"),
        (MRConvForCausalLM, SIZES, "vocab_size"),
    ):
        with refused(ValueError, words):
            make_model(model_class, **fields)


@pytest.mark.parametrize("pad", [-1, 11, 25])
def test_a_padding_token_outside_of_the_vocabulary_is_none_of_it(pad):
    """-1 would be the last token, which then learns nothing."""
    model = make_model(MRConvForSequenceClassification, **{**TOKENS, "pad_token_id": pad})
    model(torch.full((1, 4), 10)).logits.sum().backward()
    assert model.model.embedding.weight.grad[-1].any()


def changes_one_by_one(values, mask, observed):
    """The change of each number from the one before, if both are there."""
    found = torch.zeros_like(values)
    there = (observed != 0) & (mask[..., None] != 0)
    for row, position, channel in torch.cartesian_prod(*(torch.arange(size) for size in values.shape)).tolist():
        if position and there[row, position, channel] and there[row, position - 1, channel]:
            found[row, position, channel] = values[row, position, channel] - values[row, position - 1, channel]
    return found


@pytest.mark.parametrize("held", [0.0, 1e6, float("nan")])
def test_changes_are_those_between_numbers_that_are_there(held):
    mask, observed = torch.ones(4, 9, dtype=torch.int64), torch.ones(4, 9, 2)
    whole = torch.ones(4, 9), torch.ones(4, 9, 2)
    mask[1, 6:] = mask[2, :3] = observed[0, 4, 0] = observed[3, 0, 1] = observed[3, 5:8, 0] = 0
    values = torch.randn(4, 9, 2, requires_grad=True)
    given = values.masked_fill((observed == 0) | (mask[..., None] == 0), held)
    found, expected = delta_features(given, mask, observed), changes_one_by_one(values, mask, observed)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    grads = [torch.autograd.grad((each * weights).sum(), values, retain_graph=True)[0] for each in (found, expected)]
    if held == held:
        torch.testing.assert_close(*grads)
    torch.testing.assert_close(delta_features(values, None, None), changes_one_by_one(values, *whole))


def test_masks_that_do_not_fit_and_streams_and_packed_rows_of_changes_are_refused():
    fields = TestDeltaFeatures.fields
    model = make_model(MRConvForTokenClassification, **fields)
    for shape in ((2, 7), (2, 9), (1, 8), (8,), (2, 1, 1, 8)):
        with refused(ValueError, "attention_mask", shape, (2, 8)):
            model(input_values=make_measurements(2, 8).double(), attention_mask=torch.ones(shape))
    model = make_model(MRConvForTokenClassification, **{**fields, "bidirectional": False})
    for options in ({"cache": MRConvCache(model.config)}, {"position_ids": torch.arange(8)[None] % 4}):
        with pytest.raises(ValueError):
            model(input_values=make_measurements(1, 8), **options)
    # Nor are spreads taken that fit no input.
    for wrong in ([1.0], [1.0, 0.0], "1"):
        with pytest.raises(StrictDataclassError):
            MRConvConfig(**{**fields, "input_delta_std": wrong})


# What streams and packs stays where no head can use it: files beside the weights, and lines in all at most.
MOST_LINES = {MRConvForSequenceClassification: 1900, MRConvForCausalLM: 2680}


@pytest.mark.parametrize("model_class", MOST_LINES)
def test_what_streams_and_packs_travels_with_heads_of_positions_alone(model_class, tmp_path):
    make_model(model_class, **TOKENS).save_pretrained(tmp_path)
    files = {path.stem: len(path.read_text().splitlines()) for path in tmp_path.glob("*.py")}
    roles, streams = "configuration kernels modeling modeling_layers ops", model_class is MRConvForCausalLM
    roles += " modeling_positions packing streaming" * streams
    assert files.keys() == {f"{role}_mrconv" for role in roles.split()}
    assert sum(files.values()) <= MOST_LINES[model_class]
    # The configuration names no code that is not there.
    named = json.loads((tmp_path / "config.json").read_text())["auto_map"].values()
    assert {name.partition(".")[0] for name in named} <= files.keys() and len(named) == (9 if streams else 6)
