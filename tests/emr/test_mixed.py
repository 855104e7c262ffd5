"""One forward pass for samples of different tasks: what each task gives alone, and the model as it was."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DynamicCache,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_ext.emr import EMRModel, layers
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import UsageError
from hf_ext.merging import merge_checkpoints
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from tests.emr.emr_testing import perturb, tiny_adapter, tiny_bert
from tests.kit.models import assert_same_answers
from tests.kit.refusals import refused

TASKS = ["a", "b", "a", "c", "b", "a"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
BERT = BertConfig(vocab_size=30, max_position_embeddings=16, **SIZES)
GPT2 = GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3)
GPT2.pad_token_id = 0
DISTILBERT = DistilBertConfig(vocab_size=30, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=16)
VIT = ViTConfig(image_size=8, patch_size=4, **SIZES)
SWIN = SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4)
T5 = T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
SEMANIR = SemanIRConfig(embed_dim=8, depths=(2,), num_heads=(2,), window_size=4, top_k=6)
SAME, DIFFERENT = {"a": 3, "b": 3, "c": 3}, {"a": 2, "b": 5, "c": 3}


def make_family(folder: Path, model_class: type, config: Any, labels: dict[str, int], noise: float = 0.2) -> EMRModel:
    """Fine-tunes of one model, far enough apart that a wrong task's weights are noticed, and their merge."""
    torch.manual_seed(0)
    base = model_class(config)
    base.save_pretrained(folder / "base")
    tasks = {}
    for seed, (task, width) in enumerate(labels.items(), 1):
        own = copy.deepcopy(config)
        own.id2label = {index: f"{task}{index}" for index in range(width)}
        model = model_class(own)
        tensors = model.state_dict()
        shared = {n: value for n, value in base.state_dict().items() if value.shape == tensors[n].shape}
        model.load_state_dict(tensors | shared)
        perturb(model, seed, noise)
        model.save_pretrained(folder / task)
        tasks[task] = str(folder / task)
    merged = merge_checkpoints({"base": str(folder / "base"), "tasks": tasks}, folder / "merged", progress=False)
    return EMRModel.from_pretrained(merged.path, "a")


def text() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(6, 6, dtype=torch.long)
    mask[0, 4:] = mask[3, 3:] = 0
    return {"input_ids": torch.randint(4, 30, (6, 6), generator=generator), "attention_mask": mask}


def decoder_text() -> dict[str, torch.Tensor]:
    return text() | {"decoder_input_ids": text()["input_ids"].flip(1)}


def images(side: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(6, 3, side, side, generator=torch.Generator().manual_seed(0))}


@pytest.fixture
def bert(tmp_path: Path) -> EMRModel:
    return make_family(tmp_path, BertForSequenceClassification, BERT, DIFFERENT)


def snapshot(emr: EMRModel) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in emr.model.state_dict().items()}


def unchanged(emr: EMRModel, before: dict[str, torch.Tensor]) -> bool:
    after = emr.model.state_dict()
    patched = [name for name, module in emr.model.named_modules() if "forward" in vars(module)]
    return not patched and all(torch.equal(after[name], before[name]) for name in before)


def alone(emr: EMRModel, batch: dict[str, torch.Tensor], key: str, tasks: list[str] = TASKS) -> list[torch.Tensor]:
    """What each task gives for its own samples, in the order of the batch."""
    results: dict[int, torch.Tensor] = {}
    for task in set(tasks):
        rows = [row for row, name in enumerate(tasks) if name == task]
        with emr.task(task), torch.no_grad():
            results |= dict(zip(rows, emr.model(**{n: v[rows] for n, v in batch.items()})[key], strict=True))
    return [results[row] for row in range(len(tasks))]


FAMILIES = {
    "bert": (BertForSequenceClassification, BERT, DIFFERENT, text, "logits"),
    "bert-same": (BertForSequenceClassification, BERT, SAME, text, "logits"),
    "gpt2": (GPT2LMHeadModel, GPT2, SAME, text, "logits"),
    "gpt2-heads": (GPT2ForSequenceClassification, GPT2, DIFFERENT, text, "logits"),
    "t5": (T5ForConditionalGeneration, T5, SAME, decoder_text, "logits"),
    "distilbert": (DistilBertForSequenceClassification, DISTILBERT, DIFFERENT, text, "logits"),
    "vit": (ViTForImageClassification, VIT, DIFFERENT, lambda: images(8), "logits"),
    "swin": (SwinForImageClassification, SWIN, SAME, lambda: images(16), "logits"),
    "semanir": (SemanIRForImageRestoration, SEMANIR, SAME, lambda: images(12), "reconstruction"),
}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "swin"])
def test_one_forward_gives_what_each_task_gives_alone(family: str, tmp_path: Path, kernels: str):
    model_class, config, labels, make_batch, key = FAMILIES[family]
    emr, batch = make_family(tmp_path, model_class, config, labels), make_batch()
    before, expected = snapshot(emr), alone(emr, batch, key)
    passes = []
    hook = emr.model.register_forward_hook(lambda *_: passes.append(1))
    # A pass for each task would warn, which is an error here.
    emr(**batch, task_ids=TASKS)
    passes.clear()
    output = emr(**batch, task_ids=TASKS)
    hook.remove()
    assert len(passes) == 1
    assert isinstance(output[key], list) == (labels is DIFFERENT)
    for found, wanted in zip(output[key], expected, strict=True):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    # The tasks are far apart, so the comparison means something.
    other = alone(emr, batch, key, ["b" if name == "a" else "a" for name in TASKS])
    assert all(
        one.shape != two.shape or (one - two).abs().max() > 1e-2 for one, two in zip(other, expected, strict=True)
    )
    assert emr.current == "a"
    assert unchanged(emr, before)


@pytest.mark.parametrize("family", ["gpt2", "vit"])
def test_a_batch_of_one_task_is_that_tasks_model(family: str, tmp_path: Path):
    model_class, config, labels, make_batch, key = FAMILIES[family]
    emr, batch = make_family(tmp_path, model_class, config, labels), make_batch()
    before = snapshot(emr)
    for task in labels:
        found = emr(**batch, task_ids=[task] * 6)[key]
        with emr.task(task) as model:
            assert_same_answers(found, model(**batch)[key])
    assert unchanged(emr, before)


def test_other_lengths_and_orders(bert: EMRModel):
    batch = text()
    for length, tasks in ((6, TASKS), (4, TASKS[::-1]), (3, ["c", "b"]), (2, ["b", "c"])):
        part = {name: value[: len(tasks), :length] for name, value in batch.items()}
        output = bert(**part, task_ids=tasks)
        for found, wanted in zip(output.logits, alone(bert, part, "logits", tasks), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_as_many_samples_as_tokens(bert: EMRModel):
    # Position ids [1, 6] and everything else whose length is that of the batch by chance must not be taken for it.
    batch = text() | {"position_ids": torch.arange(6)[None]}
    positions = {name: value for name, value in batch.items() if name != "position_ids"}
    for found, wanted in zip(bert(**batch, task_ids=TASKS).logits, alone(bert, positions, "logits"), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.fixture
def restored(bert: EMRModel, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is restored from now on, after the first mixed batch."""
    bert(**text(), task_ids=TASKS)
    found: list[torch.Tensor] = []
    restore = TaskWeights.restore_into
    monkeypatch.setattr(
        TaskWeights, "restore_into", lambda self, *given: found.append(given[2]) or restore(self, *given)
    )
    return found


def test_one_modules_weights_at_a_time(bert: EMRModel, restored: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers.TaskLayers, "find_kind", lambda *_: None)
    bert(**text(), task_ids=TASKS)
    # Each tensor has a place in memory that is used again: together they take no more than a few modules.
    places = {value.data_ptr(): value.nbytes for value in restored if value.ndim > 1}
    modules = [sum(p.nbytes for p in m.parameters(recurse=False)) for m in bert.model.modules()]
    assert 0 < sum(places.values()) <= 3 * max(modules) < sum(value.nbytes for value in restored)


def test_no_whole_weight_of_a_layer_is_restored(bert: EMRModel, restored: list[torch.Tensor]):
    bert(**text(), task_ids=TASKS)
    # Heads are the tasks' own; the widest has 5 labels. The smallest layer has 16 × 16 weights.
    assert 0 < max(value.numel() for value in restored) <= 5 * 16


def test_weights_edited_in_place_are_the_current_tasks(bert: EMRModel):
    batch, right = text(), alone(bert, text(), "logits")
    with torch.no_grad():
        bert.model.bert.encoder.layer[0].output.dense.weight.mul_(3)
    expected = alone(bert, batch, "logits", ["a"] * 6)
    found = bert(**batch, task_ids=TASKS).logits
    for row, task in enumerate(TASKS):
        wanted = expected[row] if task == "a" else right[row]
        torch.testing.assert_close(found[row], wanted, atol=1e-5, rtol=0)
    assert (expected[0] - right[0]).abs().max() > 1e-3


def test_the_model_is_as_before_after_an_error(bert: EMRModel, monkeypatch: pytest.MonkeyPatch):
    bert(**text(), task_ids=TASKS)
    before = snapshot(bert)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layers.TaskLayers, "find_kind", lambda *_: None)
    bert.model.bert.encoder.layer[1].output.dense.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        bert(**text(), task_ids=TASKS)
    assert bert.current == "a"
    assert unchanged(bert, before)


def test_a_model_whose_bias_goes_to_windows_takes_turns(tmp_path: Path):
    model_class, config, labels, make_batch, key = FAMILIES["swin"]
    emr, batch = make_family(tmp_path, model_class, config, labels), make_batch()
    expected = alone(emr, batch, key)
    with pytest.warns(UserWarning):
        output = emr(**batch, task_ids=TASKS)
    for found, wanted in zip(output[key], expected, strict=True):
        assert_same_answers(found, wanted)


def test_what_cannot_pass_in_one_forward_warns_once(tmp_path: Path):
    text_config = {"vocab_size": 30, "max_position_embeddings": 16, "eos_token_id": 3} | SIZES
    config = CLIPConfig(
        text_config=text_config, vision_config={"image_size": 8, "patch_size": 4} | SIZES, projection_dim=8
    )
    # The temperature of CLIP is the model's own, and what it computes is no sample's.
    emr, pictures = make_family(tmp_path, CLIPModel, config, SAME), images(8)
    four = {name: value[:4] for name, value in text().items()}
    before, expected = snapshot(emr), []
    for row, task in enumerate(TASKS):
        with emr.task(task), torch.no_grad():
            expected.append(emr.model(**four, pixel_values=pictures["pixel_values"][row : row + 1]))
    with pytest.warns(UserWarning, match=r"each task gets its own.*left out: \['text_embeds"):
        output = emr(**four, **pictures, task_ids=TASKS)
    # Six pictures and four texts for all of them: a row for each picture, and a column of the transposed logits.
    for row, wanted in enumerate(expected):
        assert_same_answers(output.image_embeds[row], wanted.image_embeds[0])
        assert_same_answers(output.logits_per_image[row], wanted.logits_per_image[0])
        assert_same_answers(output.logits_per_text[:, row], wanted.logits_per_text[:, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emr(**four, **pictures, task_ids=TASKS)
    # As many texts as pictures are samples too, and a text of one task means nothing to the picture of another.
    with refused(UsageError, "logits_per_image", "logits_per_text", "CLIPModel"):
        emr(**text(), **pictures, task_ids=TASKS)
    assert emr.current == "a"
    assert unchanged(emr, before)


def test_models_of_different_classes_run_in_turn(tmp_path: Path):
    base = tiny_bert(tmp_path / "base")
    tasks = {
        "a": tiny_bert(tmp_path / "a", 1, base=base),
        "b": tiny_bert(tmp_path / "b", 2, base=base, hidden_act="relu"),
    }
    config = {"base": str(base), "tasks": {name: str(path) for name, path in tasks.items()}}
    merged = merge_checkpoints(config, tmp_path / "merged", progress=False).path
    path = merged / "tasks" / "b" / "config.json"
    path.write_text(path.read_text().replace('"hidden_act": "gelu"', '"hidden_act": "relu"'))
    emr, batch, order = EMRModel.from_pretrained(merged), text(), ["a", "b"] * 3
    expected = alone(emr, batch, "logits", order)
    with pytest.warns(UserWarning, match="in more than its labels"):
        output = emr(**batch, task_ids=order)
    for found, wanted in zip(output.logits, expected, strict=True):
        assert_same_answers(found, wanted)
    assert emr.current == "a"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_of_several_tasks(tmp_path: Path):
    base = tiny_bert(tmp_path / "base")
    tasks = {name: str(tiny_adapter(tmp_path / name, base, seed, kind="ia3")) for seed, name in enumerate("abc", 1)}
    config = {"base": str(base), "tasks": tasks, "adapters": "adapter"}
    emr = EMRModel.from_pretrained(merge_checkpoints(config, tmp_path / "merged", progress=False).path)
    expected = alone(emr, text(), "last_hidden_state")
    output = emr(**text(), task_ids=TASKS)
    torch.testing.assert_close(output.last_hidden_state, torch.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("noise", [0.2, 1e-4])
def test_a_weight_that_is_used_without_its_module_is_noticed(noise: float, tmp_path: Path):
    # However near the fine-tunes are to each other: all rows would get the current task's weight.
    bert = make_family(tmp_path, BertForSequenceClassification, BERT, SAME, noise)
    dense = bert.model.bert.pooler.dense
    bert.model.bert.pooler.forward = lambda states: torch.tanh(F.linear(states[:, 0], dense.weight, dense.bias))
    expected = alone(bert, text(), "logits")
    with pytest.warns(UserWarning):
        output = bert(**text(), task_ids=TASKS)
    for found, wanted in zip(output.logits, expected, strict=True):
        assert_same_answers(found, wanted)


def test_labels_and_caches_are_of_one_task(bert: EMRModel):
    labels = torch.tensor([0, 1, 1, 2, 0, 1])
    assert bert(**text(), labels=labels, task_ids=["b"] * 6).loss.isfinite()
    with refused(UsageError, "labels"):
        bert(**text(), labels=labels, task_ids=TASKS)
    with refused(UsageError, "past_key_values"):
        bert(**text(), past_key_values=DynamicCache(), task_ids=TASKS)


@pytest.mark.parametrize(
    ("task_ids", "named"),
    [(["a", "b"], "2 tasks"), ([], "[]"), (["a"] * 5 + ["d"], "'d'"), ("aaaaaa", "'aaaaaa'")],
)
def test_task_ids_that_do_not_fit(task_ids: Any, named: str, bert: EMRModel):
    with refused(UsageError, "task_ids", named):
        bert(**text(), task_ids=task_ids)
