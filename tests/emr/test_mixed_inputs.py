"""What a mixed batch takes beside its samples: labels, and the cache of a decoder."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertForSequenceClassification,
    BertForTokenClassification,
    DynamicCache,
    GPT2LMHeadModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    Wav2Vec2ForCTC,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_ext.emr import EMRModel, layers, mixed
from hf_ext.emr.losses import count_targets
from hf_ext.emr.units import NotByRows
from hf_ext.errors import UsageError
from tests.emr.test_mixed import BERT, DIFFERENT, GPT2, SAME, TASKS, make_family, text
from tests.kit.refusals import refused

T5 = T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
NUMBER = torch.Generator().manual_seed(1)
# `past_key_values` up to transformers 5.23, which warns of that name since then, and takes `cache`.
CACHE = fields(CausalLMOutputWithPast)[2].name
CLASSES = torch.tensor([0, 1, 1, 2, 0, 1])
TOKEN_CLASSES = torch.randint(0, 2, (6, 6), generator=NUMBER)
TOKEN_CLASSES[0, 4:] = TOKEN_CLASSES[3, 3:] = -100
WORDS = torch.randint(4, 30, (6, 6), generator=NUMBER)
# The first tokens of a causal model's labels are what nothing predicts, so they do not count.
WORDS[1, :4] = WORDS[4, 2:] = -100
LABELS: dict[str, Any] = {
    "sequence": (BertForSequenceClassification, BERT, SAME, CLASSES),
    "sequence-heads": (BertForSequenceClassification, BERT, DIFFERENT, CLASSES),
    "regression-and-classes": (BertForSequenceClassification, BERT, {"a": 1, "b": 3, "c": 4}, CLASSES.float()),
    "many-labels": (BertForSequenceClassification, BERT, SAME, torch.rand(6, 3, generator=NUMBER).round()),
    "tokens-heads": (BertForTokenClassification, BERT, DIFFERENT, TOKEN_CLASSES),
    "causal": (GPT2LMHeadModel, GPT2, SAME, WORDS),
    "encoder-decoder": (T5ForConditionalGeneration, T5, SAME, WORDS),
}


def targets(labels: torch.Tensor, causal: bool) -> int:
    return len(labels) if labels.is_floating_point() else int((labels[:, 1:] if causal else labels).ne(-100).sum())


def refuse(*_: Any, **__: Any) -> Any:
    raise NotByRows("not today")


@pytest.mark.parametrize("kind", LABELS)
def test_the_loss_is_the_mean_over_all_targets(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model_class, config, heads, labels = LABELS[kind]
    emr, batch, total, count = make_family(tmp_path, model_class, config, heads), text(), 0.0, 0
    for task in heads:
        rows = [row for row, name in enumerate(TASKS) if name == task]
        own = labels[rows]
        if kind == "regression-and-classes" and heads[task] > 1:
            own = own.long()
        resident = EMRModel.from_pretrained(emr.weights.folder, task).model
        with torch.no_grad():
            loss = resident(**{name: value[rows] for name, value in batch.items()}, labels=own).loss
        number = targets(labels[rows], kind == "causal")
        total, count = total + float(loss) * number, count + number
    differ = len(set(heads.values())) > 1
    # Heads that differ take turns where a loss is asked for.
    with pytest.warns(UserWarning) if differ else contextlib.nullcontext():
        output = emr(**batch, labels=labels, task_ids=TASKS)
    assert next(iter(output)) == "loss" and isinstance(output.logits, list) == differ
    assert float(output.loss) == pytest.approx(total / count, rel=1e-5)
    without = emr(**batch, task_ids=TASKS) if kind != "encoder-decoder" else output
    assert "loss" not in without or kind == "encoder-decoder"
    for one, two in zip(output.logits, without.logits, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)

    # One task after the other it is the same.
    monkeypatch.setattr(mixed.Mixer, "_run_together", refuse)
    with pytest.warns(UserWarning, match="not today"):
        assert float(emr(**batch, labels=labels, task_ids=TASKS).loss) == pytest.approx(total / count, rel=1e-5)


def test_a_task_without_a_target_does_not_count(tmp_path: Path):
    emr = make_family(tmp_path, BertForTokenClassification, BERT, DIFFERENT)
    labels = TOKEN_CLASSES.clone()
    labels[[1, 4]] = -100  # all of b
    rest = [row for row, task in enumerate(TASKS) if task != "b"]
    with pytest.warns(UserWarning):
        fewer = emr(
            **{n: v[rest] for n, v in text().items()}, labels=labels[rest], task_ids=[TASKS[row] for row in rest]
        )
    assert float(emr(**text(), labels=labels, task_ids=TASKS).loss) == pytest.approx(float(fewer.loss), rel=1e-5)
    assert emr(**text(), labels=torch.full_like(labels, -100), task_ids=TASKS).loss.isnan()


def test_the_label_that_is_ignored_is_the_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 8}
    emr = make_family(tmp_path, SegformerForSemanticSegmentation, SegformerConfig(**sizes), SAME)
    monkeypatch.setattr(mixed.Mixer, "_run_together", refuse)
    pictures = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(0, 3, (6, 32, 32), generator=torch.Generator().manual_seed(1))
    labels[0, 4:], labels[3, :, 9:] = 255, 255
    total = 0.0
    for task in SAME:
        rows = [row for row, name in enumerate(TASKS) if name == task]
        with emr.task(task) as model, torch.no_grad():
            loss = model(pictures[rows], labels=labels[rows]).loss
            total += float(loss) * int((labels[rows] != 255).sum())
    with pytest.warns(UserWarning, match="not today"):
        found = emr(pixel_values=pictures, labels=labels, task_ids=TASKS).loss
    assert float(found) == pytest.approx(total / int((labels != 255).sum()), rel=1e-5)


def test_a_loss_that_is_no_mean_is_refused_in_turns():
    model = Wav2Vec2ForCTC.__new__(Wav2Vec2ForCTC)
    with refused(UsageError, "Wav2Vec2ForCTC"):
        count_targets(model, WORDS)


def test_labels_for_one_task(tmp_path: Path):
    emr = make_family(tmp_path, BertForSequenceClassification, BERT, DIFFERENT)
    assert emr(**text(), labels=CLASSES, task_ids=["b"] * 6).loss.isfinite()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> EMRModel:
    return make_family(tmp_path_factory.mktemp("gpt2"), GPT2LMHeadModel, GPT2, SAME)


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> EMRModel:
    return make_family(tmp_path_factory.mktemp("t5"), T5ForConditionalGeneration, T5, SAME)


def steps(run: Any, tokens: torch.Tensor, key: str, **given: torch.Tensor) -> list[torch.Tensor]:
    """Logits of two tokens, then one at a time, then two more, as a decoder with a cache gives them."""
    found, cache = [], None
    for start, stop in ((0, 2), (2, 3), (3, 4), (4, 5), (5, 7)):
        mask = given if key == "decoder_input_ids" else {"attention_mask": given["attention_mask"][:, :stop]}
        output = run(**{key: tokens[:, start:stop], CACHE: cache}, **mask, use_cache=True)
        cache = output[CACHE]
        assert cache.get_seq_length() == stop
        found.append(output.logits)
    return found


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_cache_of_several_tasks(family: str, request: pytest.FixtureRequest):
    emr, key = request.getfixturevalue(family), "input_ids" if family == "gpt2" else "decoder_input_ids"
    tokens = torch.randint(4, 30, (6, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(6, 7, dtype=torch.long)
    mask[2, :1] = mask[5, :2] = 0
    given = {"attention_mask": mask}
    if family == "t5":
        given = {"input_ids": torch.randint(4, 30, (6, 7)), "attention_mask": mask}
    # Each task by itself would warn, which is an error here.
    found = steps(lambda **batch: emr(**batch, task_ids=TASKS), tokens, key, **given)
    for task in SAME:
        rows = [row for row, name in enumerate(TASKS) if name == task]
        with emr.task(task) as model, torch.no_grad():
            alone = steps(model, tokens[rows], key, **{name: value[rows] for name, value in given.items()})
        for one, two in zip(found, alone, strict=True):
            torch.testing.assert_close(one[rows], two, atol=1e-5, rtol=0)


def test_a_cache_that_cannot_be_divided_is_refused(gpt2: EMRModel):
    tokens = text()["input_ids"]
    cache = StaticCache(gpt2.config, max_cache_len=8)
    with refused(UsageError, "past_key_values", "StaticLayer"):
        gpt2(input_ids=tokens, past_key_values=cache, task_ids=TASKS)


def test_a_cache_is_as_before_after_an_error(gpt2: EMRModel, monkeypatch: pytest.MonkeyPatch):
    tokens, cache = text()["input_ids"], DynamicCache(config=gpt2.config)
    gpt2(input_ids=tokens[:, :3], task_ids=TASKS, **{CACHE: cache})
    expected = gpt2(input_ids=tokens[:, 3:4], task_ids=TASKS, **{CACHE: copy.deepcopy(cache)}).logits
    find_kind = layers.TaskLayers.find_kind

    def fail(self: Any, forward: Any, x: Any) -> Any:
        if forward.__self__ is gpt2.model.lm_head:
            raise KeyboardInterrupt
        return find_kind(self, forward, x)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(layers.TaskLayers, "find_kind", fail)
        gpt2(input_ids=tokens[:, 3:4], task_ids=TASKS, **{CACHE: cache})
    assert cache.get_seq_length() == 3
    found = gpt2(input_ids=tokens[:, 3:4], task_ids=TASKS, **{CACHE: cache}).logits
    torch.testing.assert_close(found, expected)
