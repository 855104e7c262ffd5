"""AdaMerging: the gradient of its entropy, what it learns, and the merge that it describes."""

from __future__ import annotations

import json

import datasets
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import BertForSequenceClassification, GPT2LMHeadModel

from hf_ext.errors import UsageError
from hf_ext.merging.adamerging import START, WeightedMerge, learn_weights
from hf_ext.merging.configuration import MergeConfig
from hf_ext.merging.merge import merge_checkpoints
from hf_ext.merging.plan import make_plan
from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification
from hf_ext.tasks.texts import byte_tokenizer
from hf_ext.training.task import Task
from tests.emr.emr_testing import family, tiny_bert, tiny_gpt2
from tests.kit.command_line import run
from tests.kit.refusals import refused


class Texts(Task):
    def build_model(self, config, init_from):
        return BertForSequenceClassification.from_pretrained(init_from)

    def training_sample(self, example, generator):
        return {"input_ids": torch.tensor(example["ids"]), "labels": torch.tensor(0)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    config = family(tmp_path_factory.mktemp("models"), tiny_bert, noise=0.2, num_labels=5)
    return config | {"exclude": ["classifier"]}


def parts():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 8, (40, 6), generator=generator).tolist()
    return {name: (Texts(), datasets.Dataset.from_dict({"ids": ids})) for name in "ab"}


def test_entropy_falls_and_the_merge_has_the_learned_weights(models, tmp_path):
    told = []
    found = learn_weights(
        models, parts(), steps=16, learning_rate=0.04, show=lambda step, entropy: told.append(entropy)
    )
    assert sum(told[-5:]) < sum(told[:5])
    weights = {entry["filter"]: entry["value"] for entry in found.options["weight"]["b"]}
    assert all(value != START for value in weights.values())
    merge_checkpoints(MergeConfig.from_dict(found.to_dict()), tmp_path / "out", progress=False)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    base, a, b = (load_file(f"{place}/model.safetensors") for place in (models["base"], *models["tasks"].values()))
    of_a = {entry["filter"]: entry["value"] for entry in found.options["weight"]["a"]}
    for name, weight in weights.items():
        expected = base[name] + of_a[name] * (a[f"bert.{name}"] - base[name])
        expected += weight * (b[f"bert.{name}"] - base[name])
        torch.testing.assert_close(merged[name], expected, rtol=1e-5, atol=1e-6)


def test_the_entropy_is_that_of_a_model_with_the_merged_weights(models):
    config = MergeConfig.from_dict({**models, "method": "task_arithmetic"})
    with make_plan(config) as plan:
        merge = WeightedMerge(plan, [Texts().build_model({}, source) for source in models["tasks"].values()])
    batch = {"input_ids": torch.tensor([[4, 5, 6], [6, 7, 4]])}
    entropy = 0.0
    for task, source in enumerate(models["tasks"].values()):
        model = Texts().build_model({}, source).eval()
        model.load_state_dict({**model.state_dict(), **{name: v.detach() for name, v in merge.merge(task).items()}})
        chances = torch.distributions.Categorical(logits=model(**batch).logits)
        entropy += float(chances.entropy().mean().detach())
    assert float(merge([batch, batch]).detach()) == pytest.approx(entropy, rel=1e-5)


def test_what_has_no_entropy_or_no_data_is_refused(models, tmp_path):
    with refused(UsageError, "tasks", "data"):
        learn_weights(models, {"a": parts()["a"]})

    class Language(Texts):
        def build_model(self, config, init_from):
            return GPT2LMHeadModel.from_pretrained(init_from)

    with refused(UsageError, "GPT2LMHeadModel"):
        learn_weights(family(tmp_path, tiny_gpt2, "t"), {"t": (Language(), parts()["a"][1])}, steps=1)


def test_the_command_learns_and_its_file_merges(tmp_path):
    size = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 5, "max_position_embeddings": 16, "num_labels": 3}
    tokenizer = byte_tokenizer(16)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = MRConvForSequenceClassification(
        MRConvConfig(**size, **special, vocab_size=len(tokenizer), kernel_norm="kernel")
    )
    for name in ("base", "a", "b"):
        model.save_pretrained(tmp_path / name)
        with torch.no_grad():
            for value in model.parameters():
                value += 0.1 * torch.randn(value.shape)
    texts = [bytes(row).decode() for row in np.random.default_rng(0).integers(97, 122, (20, 9), dtype=np.uint8)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text, "label": 0}) + "\n" for text in texts))
    data = {"eval": {"path": str(tmp_path / "texts.jsonl"), "split": "train"}}
    file = tmp_path / "texts.yaml"
    file.write_text(json.dumps({"method": "mrconv-text", "data": data, "task": {"max_length": 16, "num_labels": 3}}))
    merge = {"base": str(tmp_path / "base"), "tasks": {name: str(tmp_path / name) for name in "ab"}}
    (tmp_path / "merge.yaml").write_text(json.dumps(merge | {"exclude": ["classifier"]}))
    command = ["emr", "learn-weights", tmp_path / "merge.yaml", "--steps", "4", "--batch-size", "3"]
    command += [word for name in "ab" for word in ("--config", f"{name}={file}")]
    command += ["--out", tmp_path / "learned.yaml"]
    run(*command)
    learned = yaml.safe_load((tmp_path / "learned.yaml").read_text())
    assert learned["weight"]["a"] != learned["weight"]["b"]
    run("merge", tmp_path / "learned.yaml", tmp_path / "out")
    assert "remove it first" in run(*command, code=2).output
