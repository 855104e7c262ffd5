"""Batches of samples of different tasks: what each task gives alone, and the model as it was."""

import contextlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import GenerationConfig

from hf_ext.emr import EMRModel, layers
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import UsageError
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration
from tests.emr.emr_testing import perturb
from tests.emr.use_testing import alone, assert_rows, copied, merge, merge_berts
from tests.kit.models import assert_same_answers
from tests.kit.refusals import refused

TASKS = ["a", "b", "a", "c", "b", "a"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
BERT = transformers.BertConfig(vocab_size=30, max_position_embeddings=16, **SIZES)
ENDS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
GPT2 = transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, **ENDS)
HALVES = {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
SWIN = transformers.SwinConfig(image_size=16, patch_size=2, **HALVES)
T5_SIZES = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
T5 = transformers.T5Config(**T5_SIZES, decoder_start_token_id=0)
SEMANIR = SemanIRConfig(embed_dim=8, depths=(2,), num_heads=(2,), window_size=4, top_k=6)
SAME, DIFFERENT = {"a": 3, "b": 3, "c": 3}, {"a": 2, "b": 5, "c": 3}


def make_family(folder: Path, model_class: type, config: Any, labels: dict[str, int], noise: float = 0.2) -> EMRModel:
    """Fine-tunes of one model, far enough apart that a wrong task's weights are noticed, and their merge."""
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder / "base")
    for seed, (task, width) in enumerate(labels.items(), 1):
        names = {index: f"{task}{index}" for index in range(width)}
        model = model_class.from_pretrained(folder / "base", id2label=names, ignore_mismatched_sizes=True)
        perturb(model, seed, noise)
        model.save_pretrained(folder / task)
    tasks = {task: folder / task for task in labels}
    return EMRModel.from_pretrained(merge(folder / "base", tasks, folder / "merged"), "a")


def text() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(6, 6, dtype=torch.long)
    mask[0, 4:] = mask[3, 3:] = 0
    return {"input_ids": torch.randint(4, 30, (6, 6), generator=generator), "attention_mask": mask}


def images(side: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(6, 3, side, side, generator=torch.Generator().manual_seed(0))}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> EMRModel:
    return make_family(tmp_path_factory.mktemp("bert"), transformers.BertForSequenceClassification, BERT, DIFFERENT)


def unchanged(emr: EMRModel, before: dict[str, torch.Tensor]) -> bool:
    after = emr.model.state_dict()
    patched = [name for name, module in emr.model.named_modules() if "forward" in vars(module)]
    return not patched and all(torch.equal(after[name], before[name]) for name in before)


BOTH = text() | {"decoder_input_ids": text()["input_ids"].flip(1)}
FAMILIES = {
    "bert": (transformers.BertForSequenceClassification, BERT, DIFFERENT, text(), "logits"),
    "gpt2": (transformers.GPT2LMHeadModel, GPT2, SAME, text(), "logits"),
    "gpt2-heads": (transformers.GPT2ForSequenceClassification, GPT2, DIFFERENT, text(), "logits"),
    "t5": (transformers.T5ForConditionalGeneration, T5, SAME, BOTH, "logits"),
    "swin": (transformers.SwinForImageClassification, SWIN, SAME, images(16), "logits"),
    "semanir": (SemanIRForImageRestoration, SEMANIR, SAME, images(12), "reconstruction"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_is_what_its_task_gives_alone(family: str, tmp_path: Path):
    model_class, config, labels, batch, key = FAMILIES[family]
    emr = make_family(tmp_path, model_class, config, labels)
    before, expected, passes = copied(emr.model), alone(emr, batch, TASKS, key), []
    # A pass for each task is told, which is an error here. The bias of Swin goes to windows, not to rows.
    with pytest.warns(UserWarning, match="each task gets its own") if family == "swin" else contextlib.nullcontext():
        emr(**batch, task_ids=TASKS)
    hook = emr.model.register_forward_hook(lambda *_: passes.append(1))
    output = emr(**batch, task_ids=TASKS)
    hook.remove()
    assert len(passes) == (3 if family == "swin" else 1)
    assert isinstance(output[key], list) == (labels is DIFFERENT) and not output[key][0].requires_grad
    assert_rows(output[key], expected)
    # The tasks are far apart, so the comparison means something.
    other = alone(emr, batch, ["b" if name == "a" else "a" for name in TASKS], key)
    assert all(
        one.shape != two.shape or (one - two).abs().max() > 1e-2 for one, two in zip(other, expected, strict=True)
    )
    with emr.task("b") as model:
        assert_same_answers(emr(**batch, task_ids=np.array(["b"] * 6))[key], model(**batch)[key])
    assert emr.current == "a" and unchanged(emr, before)


@pytest.mark.parametrize(
    ("length", "tasks", "others"),
    # Position ids [1, 6] and everything else whose length is that of the batch by chance is not taken for it.
    [(4, TASKS[::-1], {}), (3, ["c", "b"], {}), (6, TASKS, {"position_ids": torch.arange(6)[None]})],
)
def test_other_lengths_and_orders(length: int, tasks: list[str], others: dict[str, Any], bert: EMRModel):
    part = {name: value[: len(tasks), :length] for name, value in text().items()}
    assert_rows(bert(**part, **others, task_ids=tasks).logits, alone(bert, part, tasks))


def test_no_whole_weight_of_a_layer_is_restored(bert: EMRModel, monkeypatch: pytest.MonkeyPatch):
    bert(**text(), task_ids=TASKS)
    sizes, restore = [], TaskWeights.restore_into

    def watched(self: TaskWeights, task: str, name: str, out: torch.Tensor) -> None:
        sizes.append(out.numel())
        restore(self, task, name, out)

    monkeypatch.setattr(TaskWeights, "restore_into", watched)
    bert(**text(), task_ids=TASKS)
    # Heads are the tasks' own; the widest has 5 labels. The smallest layer has 16 × 16 weights.
    assert 0 < max(sizes) <= 5 * 16


def test_weights_edited_in_place_are_the_current_tasks(tmp_path: Path):
    bert = make_family(tmp_path, transformers.BertForSequenceClassification, BERT, DIFFERENT)
    batch, right = text(), alone(bert, text(), TASKS)
    with torch.no_grad():
        bert.model.bert.encoder.layer[0].output.dense.weight.mul_(3)
    expected = alone(bert, batch, ["a"] * 6)
    wanted = [expected[row] if task == "a" else right[row] for row, task in enumerate(TASKS)]
    assert_rows(bert(**batch, task_ids=TASKS).logits, wanted)
    assert (expected[0] - right[0]).abs().max() > 1e-3


def test_a_weight_that_is_used_without_its_module_is_noticed(tmp_path: Path):
    # However near the fine-tunes are to each other: all rows would get the current task's weight.
    bert = make_family(tmp_path, transformers.BertForSequenceClassification, BERT, SAME, 1e-4)
    dense = bert.model.bert.pooler.dense
    bert.model.bert.pooler.forward = lambda states: torch.tanh(F.linear(states[:, 0], dense.weight, dense.bias))
    expected = alone(bert, text(), TASKS)
    with pytest.warns(UserWarning):
        output = bert(**text(), task_ids=TASKS)
    assert_rows(output.logits, expected)


def test_experts_that_other_samples_send_other_numbers_of_tokens(tmp_path: Path):
    sizes = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 2, "expert_capacity": 64}
    config = transformers.SwitchTransformersConfig(**T5_SIZES, **sizes, num_decoder_layers=2, decoder_start_token_id=0)
    emr = make_family(tmp_path, transformers.SwitchTransformersForConditionalGeneration, config, SAME, 0.1)
    # The first two samples send two tokens to the first expert, also by the weights of `a`, which plans are made with;
    # the others send four together, but not two each.
    generator, rows, tasks = torch.Generator().manual_seed(0), [], [*"abbc"]

    def count(task: str, prompts: torch.Tensor) -> torch.Tensor:
        numbers: list[torch.Tensor] = []
        with emr.task(task) as model, torch.no_grad():
            router = next(module for name, module in model.encoder.named_modules() if name.endswith("router"))
            hook = router.register_forward_hook(lambda *given: numbers.append(given[2][0][..., 0].sum(1).flatten()))
            model.encoder(prompts)
            hook.remove()
        return numbers[0]

    for task, wanted in zip(tasks, (2, 2, 1, 3), strict=True):
        prompts = torch.randint(4, 30, (200, 5), generator=generator)
        fits = (count(task, prompts) == wanted) & (count("a", prompts) == wanted)
        rows.append(prompts[fits][:1])
    batch = {"input_ids": torch.cat(rows), "decoder_input_ids": torch.full((4, 1), 0)}
    with pytest.warns(UserWarning):
        # They take turns.
        mixed = emr(**batch, task_ids=tasks).logits
    assert_rows(mixed, alone(emr, batch, tasks))


def test_hidden_states_are_by_sample(bert: EMRModel):
    states = bert(**text(), output_hidden_states=True, task_ids=TASKS).hidden_states
    assert len(states) == 3
    for row, task in enumerate(TASKS):
        with bert.task(task) as model, torch.no_grad():
            wanted = model(**text(), output_hidden_states=True).hidden_states
        assert_rows([found[row] for found in states], [own[row] for own in wanted])


def test_the_model_is_as_before_after_an_error(bert: EMRModel, monkeypatch: pytest.MonkeyPatch):
    bert(**text(), task_ids=TASKS)
    before = copied(bert.model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layers.TaskLayers, "find_kind", lambda *_: None)
    handle = bert.model.bert.encoder.layer[1].output.dense.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        bert(**text(), task_ids=TASKS)
    handle.remove()
    assert bert.current == "a" and unchanged(bert, before)


def test_what_is_not_by_sample_is_left_out(tmp_path: Path):
    texts = {"vocab_size": 30, "max_position_embeddings": 16, "eos_token_id": 3} | SIZES
    seen = {"image_size": 8, "patch_size": 4} | SIZES
    config = transformers.CLIPConfig(text_config=texts, vision_config=seen, projection_dim=8)
    # The temperature of CLIP is the model's own, and what it computes is no sample's.
    emr, pictures = make_family(tmp_path, transformers.CLIPModel, config, SAME), images(8)
    four = {name: value[:4] for name, value in text().items()}
    before, expected = copied(emr.model), []
    for row, task in enumerate(TASKS):
        with emr.task(task), torch.no_grad():
            expected.append(emr.model(**four, pixel_values=pictures["pixel_values"][row : row + 1]))
    with pytest.warns(UserWarning, match=r"each task gets its own.*left out: \['logits_per_text', 'text_embeds"):
        output = emr(**four, **pictures, task_ids=TASKS)
    # Six pictures and four texts for all of them: a row for each picture.
    for row, wanted in enumerate(expected):
        assert_same_answers(output.image_embeds[row], wanted.image_embeds[0])
        assert_same_answers(output.logits_per_image[row], wanted.logits_per_image[0])
    # That is told once; a warning is an error here.
    emr(**four, **pictures, task_ids=TASKS)
    # As many texts as pictures are samples too, and a text of one task means nothing to the picture of another.
    with pytest.warns(UserWarning, match=r"left out: \['logits_per_image', 'logits_per_text'\]"):
        output = emr(**text(), **pictures, task_ids=TASKS)
    assert output.logits_per_image is None and output.text_embeds.shape == (6, 8)
    assert emr.current == "a" and unchanged(emr, before)


TEXTS = {"vocab_size": 30, "max_position_embeddings": 16, "eos_token_id": 3, "pad_token_id": 0} | SIZES
SEEN = {"image_size": 8, "patch_size": 4} | SIZES
PARTS = {"text_config": TEXTS, "vision_config": SEEN}
LLAMA = {"vocab_size": 30, "num_key_value_heads": 2} | SIZES
CONTRASTS: dict[str, tuple[type, Any]] = {
    "CLIP": (transformers.CLIPModel, transformers.CLIPConfig(**PARTS, projection_dim=8)),
    "SigLIP": (transformers.SiglipModel, transformers.SiglipConfig(**PARTS)),
    "two encoders": (
        transformers.VisionTextDualEncoderModel,
        transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
            transformers.ViTConfig(**SEEN), transformers.BertConfig(**TEXTS), projection_dim=8
        ),
    ),
}


@pytest.mark.parametrize("name", CONTRASTS)
def test_what_compares_samples_is_left_out_for_tasks_of_any_size(name: str, tmp_path: Path):
    emr = make_family(tmp_path, *CONTRASTS[name], SAME)
    batch = {key: value[:4] for key, value in (text() | images(8)).items()}
    for order in (["a", "b", "b", "a"], ["b", "a", "a", "a"], ["a", "b", "c", "a"]):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = emr(**batch, task_ids=order)
        assert order[0] == "b" or any("left out: ['logits_per_image', 'logits_per_text']" in str(w) for w in told)
        assert found.logits_per_image is None and found.logits_per_text is None
        assert_rows(found.image_embeds, alone(emr, batch, order, "image_embeds"))
        emr._told.clear()
    # Texts that are as many as the samples of a task are no samples.
    batch |= {key: value[:2] for key, value in batch.items() if key != "pixel_values"}
    with pytest.warns(UserWarning, match="'text_embeds'"):
        found = emr(**batch, task_ids=["a", "b", "b", "a"])
    assert found.text_embeds is None and found.image_embeds.shape == (4, 8 if name != "SigLIP" else 16)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> EMRModel:
    seen, told = transformers.CLIPVisionConfig(**SEEN), transformers.LlamaConfig(**LLAMA)
    config = transformers.LlavaConfig(text_config=told, vision_config=seen, image_token_id=5, image_token_index=5)
    folder = tmp_path_factory.mktemp("llava")
    return make_family(folder, transformers.LlavaForConditionalGeneration, config, SAME)


@pytest.mark.parametrize(
    "counts", [(1, 1, 1, 1), (2, 0, 0, 2), (0, 1, 1, 2), (2, 2, 2, 2), (1, 1, 0, 1), (0, 0, 0, 0)]
)
def test_pictures_go_to_their_samples_or_are_refused(counts: tuple[int, ...], llava: EMRModel):
    # four patches a picture
    ids = torch.randint(6, 30, (4, 12), generator=torch.Generator().manual_seed(0))
    for row, count in enumerate(counts):
        ids[row, 1 : 1 + 4 * count] = 5
    batch, order = {"input_ids": ids}, [*"abba"]
    if sum(counts):
        batch["pixel_values"] = images(8)["pixel_values"].repeat(2, 1, 1, 1)[: sum(counts)]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    if counts in ((1, 1, 1, 1), (0, 0, 0, 0)):
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            assert_rows(llava(**batch, task_ids=order).logits, alone(llava, batch, order))
        found = llava.generate(**batch, task_ids=order, **options)
        for row, task in enumerate(order):
            with llava.task(task) as model:
                assert found[row].tolist() == model.generate(**batch, **options)[row].tolist()
        return
    for call in (llava, lambda **given: llava.generate(**given, **options)):
        with refused(UsageError, "pixel_values", "one task at a time"):
            call(**batch, task_ids=order)
    llava(**batch, task_ids=["a"] * 4)


def test_patches_of_pictures_are_refused_and_positions_are_whole(tmp_path: Path):
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    seen = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    text_config, kind = LLAMA | {"rope_parameters": rope}, transformers.Qwen2VLForConditionalGeneration
    config = transformers.Qwen2VLConfig(text_config=text_config, vision_config=seen, image_token_id=5)
    emr, ids = make_family(tmp_path, kind, config, SAME), torch.randint(6, 30, (3, 6))
    positions = torch.arange(6).expand(3, 3, 6) * torch.tensor([1, 2, 3])[:, None, None]
    batch, order = {"input_ids": ids, "position_ids": positions}, [*"aba"]
    found = emr(**batch, task_ids=order).logits
    for row, task in enumerate(order):
        with emr.task(task) as model, torch.no_grad():
            assert_same_answers(found[row], model(**batch).logits[row])
    ids[:, 1:5] = 5
    grids = torch.tensor([[1, 4, 4]] * 3)
    with refused(UsageError, "pixel_values [48, 96]", "one task at a time"):
        emr(input_ids=ids, pixel_values=torch.rand(48, 96), image_grid_thw=grids, task_ids=order)


def test_arguments_that_do_not_fit_are_named(bert: EMRModel, gpt2: EMRModel):
    for call in (bert, lambda **given: gpt2.generate(given.pop("input_ids"), **given, max_new_tokens=2)):
        with refused(UsageError, "Divided by samples: ", "given whole: token_type_ids [5, 6]", "one task at a time"):
            call(**text(), token_type_ids=torch.zeros(5, 6, dtype=torch.long), task_ids=TASKS)


def test_models_of_different_classes_run_in_turn(tmp_path: Path):
    merged = merge_berts(tmp_path, a={}, b={"hidden_act": "relu"})
    emr, batch, order = EMRModel.from_pretrained(merged), text(), ["a", "b"] * 3
    expected = alone(emr, batch, order)
    with pytest.warns(UserWarning, match="cannot be put into the model"):
        assert_rows(emr(**batch, task_ids=order).logits, expected)
    assert emr.current == "a"


def test_labels_caches_and_outputs_with_names_are_of_one_task(bert: EMRModel, gpt2: EMRModel):
    labels = torch.tensor([0, 1, 1, 2, 0, 1])
    assert bert(**text(), labels=labels, task_ids=["b"] * 6).loss.isfinite()
    for name, value in (("labels", labels), ("past_key_values", transformers.DynamicCache())):
        with refused(UsageError, name):
            bert(**text(), **{name: value}, task_ids=TASKS)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": MASK}
    cache = transformers.DynamicCache(config=gpt2.config)
    for other in ({"return_dict_in_generate": True}, {"past_key_values": cache}):
        with pytest.raises(ValueError):
            gpt2.generate(PROMPTS, task_ids=PROMPTED, **other, **options)
    one = gpt2.generate(PROMPTS, task_ids=["b"] * 5, return_dict_in_generate=True, output_logits=True, **options)
    assert one.sequences.shape == (5, 7) and len(one.logits) == 3


@pytest.mark.parametrize(
    ("task_ids", "named"),
    [(["a", "b"], "2 tasks"), ([], "[]"), (["a"] * 5 + ["d"], "'d'"), ("aaaaaa", "'aaaaaa'"), ({"a"}, "{'a'}")],
)
def test_task_ids_that_do_not_fit(task_ids: Any, named: str, bert: EMRModel, gpt2: EMRModel):
    for call in (bert, lambda **given: gpt2.generate(given.pop("input_ids"), **given)):
        with refused(UsageError, "task_ids", named):
            call(**text(), task_ids=task_ids)


# Generation: token for token what each task generates for its own prompts.

PROMPTED = ["a", "b", "b", "c", "a"]
PROMPTS = torch.randint(4, 30, (5, 4), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(PROMPTS)
MASK[1, :2] = MASK[3, :1] = 0
WAYS: dict[str, dict[str, Any]] = {
    "processed": {"do_sample": False, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    "best beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled": {"do_sample": True, "top_k": 0},
    "sampled twice": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "num_return_sequences": 2},
}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> EMRModel:
    return make_family(tmp_path_factory.mktemp("gpt2"), transformers.GPT2LMHeadModel, GPT2, SAME)


def generate(emr: EMRModel, *, as_settings: bool = False, **options: Any) -> torch.Tensor:
    """What is generated for the prompts; each task's rows are what it alone generates for them after the same seed."""
    given = {"generation_config": GenerationConfig(**options)} if as_settings else options
    torch.manual_seed(7)
    found: torch.Tensor = emr.generate(PROMPTS, attention_mask=MASK, task_ids=PROMPTED, **given)
    count, state = len(found) // len(PROMPTED), torch.get_rng_state()
    for task in SAME:
        rows = torch.tensor([row for row, name in enumerate(PROMPTED) if name == task])
        with emr.task(task) as model:
            torch.manual_seed(7)
            alone = model.generate(PROMPTS[rows], attention_mask=MASK[rows], **options)
        own = found[(rows[:, None] * count + torch.arange(count)).view(-1)]
        assert own[:, : alone.shape[1]].tolist() == alone.tolist(), task
        assert (own[:, alone.shape[1] :] == options["pad_token_id"]).all()
    torch.set_rng_state(state)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_each_row_is_generated_by_its_task(way: str, gpt2: EMRModel):
    # An end that some rows reach: the first token of a row that is not padded, two steps on.
    plain = {"max_new_tokens": 6, "pad_token_id": 1, "eos_token_id": -1}
    with gpt2.task("b") as model:
        end = int(model.generate(PROMPTS[2:3], attention_mask=MASK[2:3], do_sample=False, **plain)[0, -4])
    options = {**plain, **WAYS[way], "eos_token_id": end}
    before = copied(gpt2.model)
    found = generate(gpt2, **options)
    assert unchanged(gpt2, before)
    if way == "sampled":
        again = gpt2.generate(PROMPTS, attention_mask=MASK, task_ids=PROMPTED, **options)
        assert again.shape != found.shape or not torch.equal(again, found)


def test_what_samples_share_is_whole_although_it_is_as_long_as_the_batch(gpt2: EMRModel, tmp_path: Path):
    plain = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
    free = generate(gpt2, **plain, eos_token_id=-1)
    ends = torch.tensor([*free[:, 5].tolist()])
    assert generate(gpt2, **plain, eos_token_id=ends).tolist() != free.tolist()
    sizes = {f"{part}_{key}": 2 for part in ("encoder", "decoder") for key in ("layers", "attention_heads", "ffn_dim")}
    more = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20, "decoder_start_token_id": 1}
    nothing = {"suppress_tokens": None, "begin_suppress_tokens": None}
    config = transformers.WhisperConfig(vocab_size=30, d_model=16, **sizes, **more, **nothing, **ENDS)
    emr = make_family(tmp_path, transformers.WhisperForConditionalGeneration, config, SAME)
    given = {"input_features": torch.rand(3, 8, 40), "prompt_ids": torch.tensor([4, 5, 6]), "max_new_tokens": 3}
    found, order = emr.generate(**given, task_ids=[*"abc"]), [*"abc"]
    for row, task in enumerate(order):
        with emr.task(task) as model:
            wanted = model.generate(**given | {"input_features": given["input_features"][row : row + 1]})[0]
        assert found[row, : len(wanted)].tolist() == wanted.tolist()


@pytest.fixture
def differing(gpt2: EMRModel, tmp_path: Path) -> EMRModel:
    """The same merge, whose task c generates fewer tokens and pads otherwise."""
    folder = tmp_path / "merged"
    shutil.copytree(gpt2.weights.folder, folder)
    shutil.copytree(gpt2.weights.folder.parent / "base", tmp_path / "base")
    for place, longest, padding in ((folder, 4, 5), (folder / "tasks" / "c", 2, 6)):
        settings = {"max_new_tokens": longest, "pad_token_id": padding, "eos_token_id": 3}
        (place / "generation_config.json").write_text(json.dumps(settings))
    return EMRModel.from_pretrained(folder, "a")


def test_tasks_with_other_settings_take_turns(differing: EMRModel, monkeypatch: pytest.MonkeyPatch):
    for task, longest in (("a", 4), ("c", 2), ("b", 4)):
        assert differing.set_task(task).model.generation_config.max_new_tokens == longest
    found = generate(differing, do_sample=True, pad_token_id=0)
    assert found.shape == (5, 8) and (found[3, 6:] == 0).all()
    differing.model.generation_config.max_new_tokens = 5
    assert differing.set_task("a").model.generation_config.max_new_tokens == 5, "what a user set stays"
    # A task without settings goes by its configuration.
    read = EMRModel.generation_config
    monkeypatch.setattr(EMRModel, "generation_config", lambda emr, task: {} if task == "c" else read(emr, task))
    found = differing.set_task("c").model.generation_config
    assert (found.eos_token_id, found.bos_token_id) == (GPT2.eos_token_id, GPT2.bos_token_id)


def test_a_model_that_draws_by_its_own_settings_draws_for_each_task(gpt2: EMRModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpt2.model, "generation_config", GenerationConfig(do_sample=True, top_k=0))
    generate(gpt2, as_settings=True, max_new_tokens=4, pad_token_id=0)


def test_rows_in_turn_are_padded_as_their_generate_pads_and_have_their_own_numbers(differing: EMRModel):
    """And what was set before is there again."""
    options: dict[str, Any] = {"do_sample": False, "attention_mask": MASK, "task_ids": PROMPTED}
    differing.model.generation_config.max_new_tokens = 6
    found = differing.generate(PROMPTS, **options)
    assert differing.model.generation_config.max_new_tokens == 6
    assert (found[3, 6:] == 6).all() and found.shape[1] == 10
    given = GenerationConfig(pad_token_id=9, eos_token_id=3, max_new_tokens=4)
    allowed = {"prefix_allowed_tokens_fn": lambda row, _: [20 + row]}
    found = differing.generate(PROMPTS, generation_config=given, **options, **allowed)
    assert found[:, 4:].tolist() == [[20 + row] * 4 for row in range(5)]
    given.max_new_tokens = None
    assert (differing.generate(PROMPTS, generation_config=given, **options)[3, 6:] == 9).all()
