"""Prompts of several tasks given to one `generate`: token for token what each task generates for its own."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    T5ForConditionalGeneration,
)

from hf_ext.emr import EMRModel
from tests.emr.test_mixed import GPT2, SAME, T5, make_family, snapshot, unchanged

TASKS = ["a", "b", "b", "c", "a"]
PROMPTS = torch.randint(4, 30, (5, 4), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(PROMPTS)
MASK[1, :2] = MASK[3, :1] = 0
MIXTRAL = MixtralConfig(
    vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, num_experts_per_tok=2, num_local_experts=4, max_position_embeddings=16,
)  # fmt: skip
FAMILIES: dict[str, Any] = {
    "gpt2": (GPT2LMHeadModel, GPT2),
    "t5": (T5ForConditionalGeneration, T5),
    "mixtral": (MixtralForCausalLM, MIXTRAL),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "best beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "top_k": 0},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "sampled twice": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "num_return_sequences": 2},
    "processed": {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
}


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], EMRModel]:
    """The merge of a family, made once."""
    return cache(lambda family: make_family(tmp_path_factory.mktemp(family), *FAMILIES[family], SAME))


@pytest.fixture
def gpt2(merged: Callable[[str], EMRModel]) -> EMRModel:
    return merged("gpt2")


def check(emr: EMRModel, found: torch.Tensor, options: dict[str, Any]) -> None:
    """Each task's rows are what it alone generates for them after the same seed."""
    count = len(found) // len(TASKS)
    for task in SAME:
        rows = torch.tensor([row for row, name in enumerate(TASKS) if name == task])
        with emr.task(task) as model:
            torch.manual_seed(7)
            alone = model.generate(PROMPTS[rows], attention_mask=MASK[rows], **options)
        own = found[(rows[:, None] * count + torch.arange(count)).view(-1)]
        assert own[:, : alone.shape[1]].tolist() == alone.tolist(), task
        assert (own[:, alone.shape[1] :] == options["pad_token_id"]).all()


@pytest.mark.parametrize(
    "family, way",
    [
        *product(("gpt2",), WAYS),
        *(("t5", "best beams"), ("mixtral", "greedy")),
        *(pytest.param("t5", way, marks=pytest.mark.slow) for way in WAYS if way != "best beams"),
    ],
)
def test_each_row_is_generated_by_its_task(family: str, way: str, merged: Callable[[str], EMRModel]):
    emr = merged(family)
    # An end that some rows reach: the first token of a row that is not padded, two steps on.
    plain = {"max_new_tokens": 6, "pad_token_id": 1, "eos_token_id": -1}
    with emr.task("b") as model:
        end = int(model.generate(PROMPTS[2:3], attention_mask=MASK[2:3], do_sample=False, **plain)[0, -4])
    options = {**plain, **WAYS[way], "eos_token_id": end}
    before = snapshot(emr)
    torch.manual_seed(7)
    found = emr.generate(PROMPTS, attention_mask=MASK, task_ids=TASKS, **options)
    state = torch.get_rng_state()
    assert unchanged(emr, before)
    check(emr, found, options)
    if way == "sampled":
        torch.set_rng_state(state)
        again = emr.generate(PROMPTS, attention_mask=MASK, task_ids=TASKS, **options)
        assert again.shape != found.shape or not torch.equal(again, found)


def test_what_cannot_be_put_together_is_refused(gpt2: EMRModel):
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": MASK}
    for task_ids in (TASKS[:2], ["a", "b", "c", "a", "x"], "abbca"):
        with pytest.raises(ValueError):
            gpt2.generate(PROMPTS, task_ids=task_ids, **options)
    with pytest.raises(ValueError):
        gpt2.generate(PROMPTS, task_ids=TASKS, return_dict_in_generate=True, **options)
    with pytest.raises(ValueError):
        gpt2.generate(PROMPTS, task_ids=TASKS, past_key_values=DynamicCache(config=gpt2.config), **options)
    one = gpt2.generate(PROMPTS, task_ids=["b"] * 5, return_dict_in_generate=True, output_logits=True, **options)
    assert one.sequences.shape == (5, 7) and len(one.logits) == 3


def test_tasks_with_other_settings_take_turns(gpt2: EMRModel, tmp_path: Path):
    folder = tmp_path / "merged"
    shutil.copytree(gpt2.weights.folder, folder)
    shutil.copytree(gpt2.weights.folder.parent / "base", tmp_path / "base")
    own = json.loads((folder / "generation_config.json").read_text())
    for place, longest in ((folder, 4), (folder / "tasks" / "c", 2)):
        (place / "generation_config.json").write_text(json.dumps(own | {"max_new_tokens": longest}))
    emr = EMRModel.from_pretrained(folder, "a")
    for task, longest in (("a", 4), ("c", 2), ("b", 4)):
        assert emr.set_task(task).model.generation_config.max_new_tokens == longest
    options: dict[str, Any] = {"do_sample": True, "pad_token_id": 0}
    torch.manual_seed(7)
    found = emr.generate(PROMPTS, attention_mask=MASK, task_ids=TASKS, **options)
    assert found.shape == (5, 8) and (found[3, 6:] == 0).all()
    check(emr, found, options)
    emr.model.generation_config.max_new_tokens = 5
    assert emr.set_task("a").model.generation_config.max_new_tokens == 5, "what a user set stays"


def test_threads_generate_for_their_tasks(gpt2: EMRModel):
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    right, wrong = {}, []
    for task in SAME:
        with gpt2.task(task) as model:
            right[task] = model.generate(PROMPTS, attention_mask=MASK, **options).tolist()
    assert right["a"] != right["b"] != right["c"]

    def work(first: int) -> None:
        for turn in range(3):
            names = [list(SAME)[(first + turn + row) % 3] for row in range(5)]
            found = gpt2.generate(PROMPTS, attention_mask=MASK, task_ids=names, **options).tolist()
            wrong.extend(row for row, name in enumerate(names) if found[row] != right[name][row])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_model_that_draws_by_its_own_settings_draws_for_each_task(gpt2: EMRModel):
    options: dict[str, Any] = {"max_new_tokens": 4, "pad_token_id": 0}
    before = gpt2.model.generation_config
    gpt2.model.generation_config = GenerationConfig(do_sample=True, top_k=0)
    try:
        torch.manual_seed(7)
        given = GenerationConfig(**options)
        found = gpt2.generate(PROMPTS, attention_mask=MASK, task_ids=TASKS, generation_config=given)
        check(gpt2, found, options)
    finally:
        gpt2.model.generation_config = before


@pytest.fixture
def differing(gpt2: EMRModel, tmp_path: Path) -> EMRModel:
    """A merge whose task c has no settings of generation, and the others some."""
    folder = tmp_path / "merged"
    shutil.copytree(gpt2.weights.folder, folder)
    shutil.copytree(gpt2.weights.folder.parent / "base", tmp_path / "base")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "pad_token_id": 5}))
    (folder / "tasks" / "c" / "generation_config.json").write_text(json.dumps({"eos_token_id": 3, "pad_token_id": 6}))
    return EMRModel.from_pretrained(folder, "a")


def test_a_task_without_settings_of_generation_goes_by_its_configuration(
    differing: EMRModel, monkeypatch: pytest.MonkeyPatch
):
    read = EMRModel.generation_config
    monkeypatch.setattr(EMRModel, "generation_config", lambda emr, task: {} if task == "c" else read(emr, task))
    assert differing.set_task("c").model.generation_config.eos_token_id == GPT2.eos_token_id
    assert differing.model.generation_config.bos_token_id == GPT2.bos_token_id


def test_rows_in_turn_are_padded_as_their_generate_pads(differing: EMRModel):
    """And what was set before is there again."""
    differing.model.generation_config.max_new_tokens = 6
    options: dict[str, Any] = {"do_sample": False, "attention_mask": MASK, "task_ids": TASKS}
    short = {"max_new_tokens": 2}
    with differing.task("c") as model:
        model.generation_config.update(**short)
    assert differing.model.generation_config.max_new_tokens == 6
    found = differing.generate(PROMPTS, **options)
    assert differing.model.generation_config.max_new_tokens == 6
    assert (found[3, 6:] == 6).all() and found.shape[1] == 10
    given = GenerationConfig(pad_token_id=9, eos_token_id=3)
    assert (differing.generate(PROMPTS, generation_config=given, **options)[3, 6:] == 9).all()


def test_rows_in_turn_have_their_own_numbers(differing: EMRModel):
    options: dict[str, Any] = {"do_sample": False, "attention_mask": MASK, "max_new_tokens": 2, "pad_token_id": 0}
    allowed = {"prefix_allowed_tokens_fn": lambda row, _: [20 + row]}
    found = differing.generate(PROMPTS, task_ids=TASKS, **options, **allowed)
    assert found[:, -1].tolist() == [20, 21, 22, 23, 24]
