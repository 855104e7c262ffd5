"""What a mixed batch takes beside its samples: labels, and the cache of a decoder."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertForSequenceClassification,
    DynamicCache,
    GPT2LMHeadModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_ext.emr import EMRModel, layers
from hf_ext.errors import UsageError
from tests.emr.test_mixed import BERT, DIFFERENT, GPT2, SAME, TASKS, make_family, text
from tests.kit.refusals import refused

T5 = T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
NUMBER = torch.Generator().manual_seed(1)
# `past_key_values` up to transformers 5.23, which warns of that name since then, and takes `cache`.
CACHE = fields(CausalLMOutputWithPast)[2].name
CLASSES = torch.tensor([0, 1, 1, 2, 0, 1])


def test_labels_for_one_task(tmp_path: Path):
    emr = make_family(tmp_path, BertForSequenceClassification, BERT, DIFFERENT)
    assert emr(**text(), labels=CLASSES, task_ids=["b"] * 6).loss.isfinite()
    with pytest.raises(ValueError, match="labels of samples of several tasks"):
        emr(**text(), labels=CLASSES, task_ids=TASKS)


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
