"""Merges by data: Fisher merging and RegMean against plain twins, weights that AdaMerging learns."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import yaml
from click.testing import Result
from safetensors.torch import load_file, save_file
from transformers import BertForSequenceClassification, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from hf_ext.errors import UsageError
from hf_ext.files import read_json
from hf_ext.merging import MergeConfig, make_plan, merge_checkpoints
from hf_ext.merging.measuring import START, WeightedMerge, learn_weights, measure, save_statistics
from hf_ext.merging.methods.registry import MethodError
from hf_ext.merging.publishing import hide_paths
from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification
from hf_ext.tasks.texts import byte_tokenizer
from hf_ext.training.task import Task
from tests.emr.emr_testing import family, maker, tiny_bert, tiny_gpt2, tiny_semanir
from tests.kit.command_line import run
from tests.kit.refusals import refused
from tests.kit.studies import write_photos
from tests.merging import reference_methods as twin
from tests.merging.merging import merge, run_method, siblings
from tests.merging.reference_methods import assert_close


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(5, 7), (6,), ()])
@pytest.mark.parametrize("floor", [1e-6, 0.1, 0.0])
def test_fisher_is_its_twin(shape, floor):
    base, models = draw(*shape), [draw(*shape, seed=seed) for seed in (1, 2, 3)]
    # as small as squared gradients are, and 0 everywhere in some elements
    known = [draw(*shape, seed=seed).square() * 1e-12 for seed in (4, 5, 6)]
    for values in known:
        values.view(-1)[:2] = 0
    options = {"weight": [1.0, 0.3, 2.0], "floor": floor}
    expected = twin.fisher(base, models, known, **options)
    assert_close(run_method("fisher", base, models, statistics=known, **options), expected)


def test_regmean_is_its_twin_in_both_layouts_and_averages_what_has_no_gram_and_inputs_that_are_never_used():
    base, models = draw(5, 8), [draw(5, 8, seed=seed) for seed in (1, 2)]
    # fewer examples than inputs
    grams = [rows.T @ rows for rows in (draw(4, 8, seed=3), draw(6, 8, seed=4))]
    turned = {"statistics": grams, "inputs_first": True}
    for alpha in (0.9, 0.0, 0.5):
        expected = twin.regmean(models, grams, alpha)
        assert_close(run_method("regmean", base, models, statistics=grams, alpha=alpha), expected)
        found = run_method("regmean", base.T, [model.T for model in models], **turned, alpha=alpha)
        assert_close(found, expected.T)
    average = sum(model.double() for model in models) / 2
    assert_close(run_method("regmean", base, models, alpha=0.9), average)
    inputs = torch.stack([draw(40, 8, seed=seed) for seed in (3, 4)])
    inputs[:, :, 2] = 0
    grams, used = list(inputs.mT @ inputs), [0, 1, *range(3, 8)]
    merged = run_method("regmean", base, models, statistics=grams, alpha=0.9)
    assert_close(merged[:, 2], average[:, 2])
    inner = [gram[used][:, used] for gram in grams]
    assert_close(merged[:, used], twin.regmean([model[:, used] for model in models], inner, 0.9))


@pytest.mark.parametrize(("method", "options"), [("fisher", {"weight": [1.0, 1.0]}), ("regmean", {"alpha": 0.9})])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_statistics_that_are_no_squares_are_refused(method, options, value):
    base, models = draw(4, 4), [draw(4, 4, seed=seed) for seed in (1, 2)]
    known = [torch.eye(4), torch.eye(4)]
    known[1][2, 2] = value
    with refused(MethodError, "w"):
        run_method(method, base, models, statistics=known, **options)


def test_squared_gradients_are_those_of_each_example(tmp_path):
    model = BertForSequenceClassification.from_pretrained(tiny_bert(tmp_path / "bert")).eval()
    samples = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids[0] % 2)} for ids in ([1, 4, 2], [5, 3, 2])]
    found, count = measure(Task(), model, samples, "fisher")
    assert count == 2
    weights = model.classifier.weight
    expected = torch.zeros_like(weights)
    for sample in samples:
        batch = {name: values[None] for name, values in sample.items()}
        expected += torch.autograd.grad(model(**batch).loss, weights)[0] ** 2 / 2
    torch.testing.assert_close(found["classifier.weight"], expected)
    assert found.keys() == {name for name, value in model.state_dict().items() if value.is_floating_point()}


def test_grams_are_of_what_reaches_a_layer_also_of_gpt2(tmp_path):
    model = GPT2LMHeadModel.from_pretrained(tiny_gpt2(tmp_path / "gpt2")).eval()
    samples = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([1, 4, 2], [5, 3, 2])]
    found, _ = measure(Task(), model, samples, "gram")
    batches = [{name: values[None] for name, values in sample.items()} for sample in samples]
    rows = torch.cat([model(**batch, output_hidden_states=True).hidden_states[0][0] for batch in batches])
    rows = model.transformer.h[0].ln_1(rows)
    torch.testing.assert_close(found["transformer.h.0.attn.c_attn.weight"], (rows.T @ rows / 2).detach())
    assert found["transformer.h.1.mlp.c_proj.weight"].shape == (64, 64)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two fine-tunes, and the YAML file of their training."""
    place = tmp_path_factory.mktemp("models")
    family(place, tiny_semanir, noise=0.3)
    source = {"path": str(write_photos(place / "photos", range(3), (16, 16, 3))), "split": "train"}
    task = {"degradation": {"kind": "gaussian_noise", "sigma": 25}, "patch_size": 16}
    (place / "denoise.yaml").write_text(json.dumps({"method": "semanir", "data": {"train": source}, "task": task}))
    return place


@pytest.fixture(scope="module")
def measured(models: Path) -> Path:
    for name, sigma in (("a", "5"), ("b", "50")):
        for kind in ("fisher", "gram"):
            out = models / f"{name}.{kind}.safetensors"
            told = run(
                *("emr", "statistics", models / name, "--config", models / "denoise.yaml", "--kind", kind),
                *("--out", out, "--examples", "2", "--json", "--task.degradation.sigma", sigma),
            )
            assert json.loads(told.stdout)["examples"] == 2
    return models


def merge_by(models: Path, method: str, kind: str, out: Path, *options: str, code: int = 0) -> Result:
    given = [word for name in "ab" for word in ("--task", f"{name}={models / name}")]
    given += [word for name in "ab" for word in ("--statistics", f"{name}={models / f'{name}.{kind}.safetensors'}")]
    return run("merge", "--base", models / "base", *given, "--method", method, "--out", out, *options, code=code)


def merge_and_read(measured: Path, method: str, kind: str, out: Path, *options: str):
    """The merged weights, those of the base and of the tasks, and their statistics."""
    merge_by(measured, method, kind, out, *options)
    folders = (out, *(measured / name for name in ("base", "a", "b")))
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    return *weights, [load_file(measured / f"{name}.{kind}.safetensors") for name in "ab"]


def test_a_fisher_merge_from_the_data_to_the_model(measured, tmp_path):
    found, base, a, b, known = merge_and_read(measured, "fisher", "fisher", tmp_path / "out")
    assert known[0].keys() >= found.keys()
    assert any(bool(values.any()) for values in known[0].values())
    for name in found:
        if base[name].is_floating_point() and base[name].numel() < 300:
            expected = twin.fisher(base[name], [a[name], b[name]], [k[name] for k in known], [1.0, 1.0], 1e-6)
            assert_close(found[name], expected)


def test_a_regmean_merge_from_the_data_to_the_model(measured, tmp_path):
    found, base, a, b, known = merge_and_read(measured, "regmean", "gram", tmp_path / "out", "--alpha", "0.5")
    assert len(found.keys() & known[0].keys()) > 3
    for name in found:
        if name not in known[0]:
            assert_close(found[name], (a[name].double() + b[name].double()) / 2)
            continue
        used = (known[0][name] + known[1][name]).diagonal() > 0
        grams = [k[name][used][:, used] for k in known]
        assert_close(found[name][:, used], twin.regmean([a[name][:, used], b[name][:, used]], grams, 0.5))
    assert read_json(tmp_path / "out" / "report.json")["method"]["statistics"].keys() == {"a", "b"}


def test_a_merge_of_gpt2_solves_by_its_layout(tmp_path):
    config, name = family(tmp_path, tiny_gpt2), "transformer.h.0.attn.c_proj.weight"
    grams, files = [rows.T @ rows for rows in (draw(20, 16, seed=seed) for seed in (1, 2))], {}
    for task, gram in zip("ab", grams, strict=True):
        files[task] = str(tmp_path / f"{task}.safetensors")
        save_file({name: gram}, files[task], {"kind": "gram", "inputs_first": json.dumps([name])})
    out = merge(config, tmp_path / "out", method="regmean", statistics=files)
    merged, *weights = (
        load_file(place / "model.safetensors")[name].T for place in (out, tmp_path / "a", tmp_path / "b")
    )
    assert_close(merged, twin.regmean(weights, grams, 0.9))


class Columns(Task):
    """Models of a class on examples that are a column of theirs, each of label 0."""

    def __init__(self, model_class, column):
        self.model_class, self.column = model_class, column

    def build_model(self, config, init_from):
        return self.model_class.from_pretrained(init_from)

    def training_sample(self, example, generator):
        return {self.column: torch.tensor(example[self.column]), "labels": torch.tensor(0)}


# transformers calls the tensors of a loaded ViT otherwise than its checkpoint does.
def test_a_model_whose_tensors_were_renamed_on_loading(tmp_path):
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    settings = ViTConfig(**size, image_size=4, patch_size=2, num_labels=3)
    config = family(tmp_path, maker(lambda: ViTForImageClassification(settings)), noise=0.3)
    names = load_file(tmp_path / "a" / "model.safetensors").keys()
    assert not names <= ViTForImageClassification(settings).state_dict().keys()
    pixels = Columns(ViTForImageClassification, "pixel_values")
    data = datasets.Dataset.from_dict({"pixel_values": draw(6, 3, 4, 4).tolist()})
    for kind, method in (("fisher", "fisher"), ("gram", "regmean")):
        files = {name: str(tmp_path / f"{name}.{kind}.safetensors") for name in "ab"}
        for name, file in files.items():
            save_statistics(pixels, str(tmp_path / name), data, kind, Path(file))
            assert load_file(file).keys() <= names
        merge(config, tmp_path / kind, method=method, statistics=files)
    learned = learn_weights({**config, "exclude": ["classifier"]}, dict.fromkeys("ab", (pixels, data)), steps=2)
    weights = {entry["filter"]: entry["value"] for entry in learned.options["weight"]["a"]}
    assert weights.keys() == {name for name in names if not name.startswith("classifier")}
    # no answer depends on the bias of the keys
    assert sum(value != 0.3 for value in weights.values()) > len(weights) - 3


def test_statistics_that_do_not_fit_are_refused_in_words(measured, tmp_path):
    for name in "ab":
        known = load_file(measured / f"{name}.fisher.safetensors")
        first = next(iter(known))
        shaped = known | {first: torch.zeros(1)}
        del known[first]
        for change, values in (("missing", known), ("shape", shaped)):
            save_file(values, measured / f"{name}.{change}.safetensors", {"kind": "fisher"})
    for method, kind, words, told in (
        ("regmean", "fisher", (), "hold kind 'fisher', method 'regmean' needs 'gram'"),
        ("average", "fisher", (), "statistics does not go with method 'average'"),
        ("fisher", "fisher", ("--statistics", "c=x"), "of each task, a, b; got those of a, b, c"),
        ("fisher", "missing", (), "is missing"),
        ("fisher", "shape", (), "is [1]"),
    ):
        assert told in merge_by(measured, method, kind, tmp_path / "out", *words, code=2).stderr
    assert not (tmp_path / "out").exists()
    for inner in ("3", "[" * 100_000):
        for name in "ab":
            grams, known = load_file(measured / f"{name}.gram.safetensors"), {"kind": "gram", "inputs_first": inner}
            save_file(grams, measured / f"{name}.inner.safetensors", known)
        assert "is no list of names" in merge_by(measured, "regmean", "inner", tmp_path / "out", code=2).stderr


def test_an_artifact_knows_its_statistics_and_asks_for_those_of_a_new_task(measured, tmp_path):
    merge_by(measured, "regmean", "gram", tmp_path / "out", "--masks")
    refused = run("emr", "add", tmp_path / "out", f"c={measured / 'a'}", code=2)
    assert "needs `statistics` of each task, a, b, c; got those of a, b" in refused.stderr
    run("emr", "add", tmp_path / "out", f"c={measured / 'a'}", "--frozen")
    hide_paths(tmp_path / "out")
    manifest = (tmp_path / "out" / "emr.json").read_text()
    assert str(measured) not in manifest
    assert json.loads(manifest)["method"]["statistics"] == {t: f"{t}.gram.safetensors" for t in "ab"}


TEXTS = Columns(BertForSequenceClassification, "input_ids")


@pytest.fixture(scope="module")
def berts(tmp_path_factory):
    config = family(tmp_path_factory.mktemp("berts"), tiny_bert, noise=0.2, num_labels=5)
    return config | {"exclude": ["classifier"]}


def parts():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 8, (40, 6), generator=generator).tolist()
    return {name: (TEXTS, datasets.Dataset.from_dict({"input_ids": ids})) for name in "ab"}


def test_entropy_falls_and_the_merge_has_the_learned_weights(berts, tmp_path):
    told = []
    how = {"steps": 16, "learning_rate": 0.04, "show": lambda step, entropy: told.append(entropy)}
    found = learn_weights(berts, parts(), **how)
    assert sum(told[-5:]) < sum(told[:5])
    of_a, of_b = ({one["filter"]: one["value"] for one in found.options["weight"][task]} for task in "ab")
    assert all(value != START for value in of_b.values())
    out = merge_checkpoints(MergeConfig.from_dict(found.to_dict()), tmp_path / "out", progress=False).path
    folders = (out, berts["base"], *berts["tasks"].values())
    merged, base, a, b = (load_file(f"{place}/model.safetensors") for place in folders)
    for name, weight in of_b.items():
        expected = base[name] + of_a[name] * (a[f"bert.{name}"] - base[name])
        expected += weight * (b[f"bert.{name}"] - base[name])
        torch.testing.assert_close(merged[name], expected, rtol=1e-5, atol=1e-6)


def test_the_entropy_is_that_of_a_model_with_the_merged_weights(berts):
    config = MergeConfig.from_dict({**berts, "method": "task_arithmetic"})
    with make_plan(config) as plan:
        weighted = WeightedMerge(plan, [TEXTS.build_model({}, source) for source in berts["tasks"].values()])
    batch = {"input_ids": torch.tensor([[4, 5, 6], [6, 7, 4]])}
    entropy = 0.0
    for task, source in enumerate(berts["tasks"].values()):
        model = TEXTS.build_model({}, source).eval()
        model.load_state_dict(model.state_dict() | {name: v.detach() for name, v in weighted.merge(task).items()})
        chances = torch.distributions.Categorical(logits=model(**batch).logits)
        entropy += float(chances.entropy().mean().detach())
    assert float(weighted([batch, batch]).detach()) == pytest.approx(entropy, rel=1e-5)


def test_what_has_no_entropy_or_no_data_is_refused(berts, tmp_path):
    with refused(UsageError, "tasks", "data"):
        learn_weights(berts, {"a": parts()["a"]})
    # what goes with the method of the file alone does not count
    masked = berts | {"rescale": "l2", "include_base": True}
    for data in (parts()["b"][1].to_iterable_dataset(), parts()["b"][1].select([])):
        with refused(UsageError, "'b'", "stream"):
            learn_weights(masked, parts() | {"b": (TEXTS, data)})
    with refused(UsageError, "steps"):
        learn_weights(masked, parts(), steps=2.0)

    with refused(UsageError, "GPT2LMHeadModel"):
        language = Columns(GPT2LMHeadModel, "input_ids")
        learn_weights(family(tmp_path, tiny_gpt2, "t"), {"t": (language, parts()["a"][1])}, steps=1)


def test_the_command_learns_and_its_file_merges(tmp_path):
    size = {"hidden_size": 4, "num_hidden_layers": 1, "kernel_size": 5, "max_position_embeddings": 16, "num_labels": 3}
    tokenizer = byte_tokenizer(16)
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    settings = MRConvConfig(**size, **special, vocab_size=len(tokenizer), kernel_norm="kernel")
    model = MRConvForSequenceClassification(settings)
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
    (tmp_path / "merge.yaml").write_text(json.dumps(siblings(tmp_path, "a", "b", exclude=["classifier"])))
    command = ["emr", "learn-weights", tmp_path / "merge.yaml", "--steps", "4", "--batch-size", "3"]
    command += [word for name in "ab" for word in ("--config", f"{name}={file}")]
    command += ["--out", tmp_path / "learned.yaml"]
    run(*command)
    learned = yaml.safe_load((tmp_path / "learned.yaml").read_text())
    assert learned["weight"]["a"] != learned["weight"]["b"]
    run("merge", tmp_path / "learned.yaml", tmp_path / "out")
    assert "remove it first" in run(*command, code=2).output
