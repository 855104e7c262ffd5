"""What belongs to a model beside its weights, in the root, in the tasks and in what is exported of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_ext import EMRModel
from hf_ext.emr.artifact import verify_artifact
from hf_ext.emr.weights import TaskWeights
from hf_ext.errors import DataError
from hf_ext.files import read_json, write_json
from hf_ext.merging import add_task, make_plan, merge_checkpoints
from hf_ext.merging.companions import find_companions
from tests.emr.emr_testing import family, push_folder, tiny_bert, tiny_gpt2, write_code, write_weights
from tests.kit.refusals import refused
from tests.merging.merging import merge

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "./2_Dense/", "type": "sentence_transformers.models.Dense"},
]


TANH = "torch.nn.modules.activation.Tanh"
WRITTEN = {
    "modules.json": MODULES,
    "config_sentence_transformers.json": {"similarity_fn_name": "cosine"},
    "sentence_bert_config.json": {"max_seq_length": 16},
    "1_Pooling/config.json": {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True},
    "2_Dense/config.json": {"in_features": 16, "out_features": 4, "bias": True, "activation_function": TANH},
}
# What makes up such a model, but for the settings of its first two modules.
UNIT = {"modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}


def add_sentence_modules(folder: Path, seed: int = 0) -> Path:
    """What sentence-transformers writes beside a transformer."""
    for name, value in WRITTEN.items():
        write_json(folder / name, value)
    generator = torch.Generator().manual_seed(seed)
    tensors = {"linear.weight": torch.randn(4, 16, generator=generator), "linear.bias": torch.zeros(4)}
    write_weights(folder / "2_Dense", tensors)
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"the same %d" % seed)
    return folder


def sentence_bert(folder: Path, seed: int = 0, *, base: Path | None = None) -> Path:
    """A transformer with its modules, of which the dense one is its own."""
    return add_sentence_modules(tiny_bert(folder, seed, base=base, task_head=False), seed)


def export(folder: Path, task: str, out: Path) -> Path:
    return TaskWeights(folder).export(task, out)


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("modules_cache")
@pytest.mark.parametrize("method", ["emr", "average"])
def test_code_that_comes_with_a_model_travels(tmp_path, method):
    config = family(tmp_path, write_code) | {"method": method}
    merged = merge(config, tmp_path / "merged")
    places = [merged] if method == "average" else [merged, export(merged, "a", tmp_path / "exported")]
    for place in places:
        model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
        assert type(model).__name__ == "OwnModel" and model.layer.weight.shape == (8, 8)
    (tmp_path / "a" / "own_model.py").unlink()
    with make_plan(config) as plan:
        assert [text for text in plan.warnings if "'a'" in text and "own_model.py is not there" in text]


def test_modules_of_sentence_transformers_travel_and_those_of_a_task_are_its_own(tmp_path):
    config = family(tmp_path, sentence_bert)
    add_sentence_modules(Path(config["tasks"]["a"]))
    merged = merge(config, tmp_path / "merged")
    assert names(merged) >= UNIT and "2_Dense/model.safetensors" in names(merged / "tasks" / "b")
    assert not UNIT & names(merged / "tasks" / "a")
    assert verify_artifact(merged).wrong == []
    for task, source in config["tasks"].items():
        exported = export(merged, task, tmp_path / f"exported-{task}")
        assert names(exported) >= UNIT
        found, expected = (load_file(Path(place, "2_Dense", "model.safetensors")) for place in (exported, source))
        assert all(found[name].equal(expected[name]) for name in expected)


def test_modules_that_all_have_are_merged_by_themselves(tmp_path):
    config = family(tmp_path, sentence_bert) | {"method": "average"}
    tasks = config["tasks"]
    # its library reads one file, however many the model has
    one = merge(config | {"max_shard_size": "200B"}, tmp_path / "one")
    found, *parts = (load_file(Path(place, "2_Dense", "model.safetensors")) for place in (one, *tasks.values()))
    for name, value in found.items():
        torch.testing.assert_close(value, (parts[0][name] + parts[1][name]) / 2)
    assert names(one) >= UNIT
    assert not [name for name in names(one) if name.startswith("2_Dense") and name.endswith((".md", ".png"))]
    with make_plan(config) as plan:
        assert any("2_Dense" in text for text in plan.warnings)
    # An equal module is copied; one that a task lacks, or that has other sizes, is refused before anything is read.
    merge(config | {"tasks": {"a": str(add_sentence_modules(Path(tasks["a"])))}}, tmp_path / "same")
    (Path(tasks["b"]) / "2_Dense" / "model.safetensors").unlink()
    write_json(Path(tasks["b"]) / "modules.json", MODULES[:2])
    add_sentence_modules(Path(tasks["a"]), seed=3)
    with refused(DataError, "2_Dense", "'a'"):
        make_plan(config)
    add_sentence_modules(Path(tasks["b"]), seed=2)
    write_weights(Path(tasks["b"]) / "2_Dense", {"linear.weight": torch.zeros(2, 16), "linear.bias": torch.zeros(2)})
    with refused(DataError, "linear.bias", "2_Dense"):
        make_plan(config)


@pytest.mark.slow
def test_sentence_transformers_loads_what_was_merged_and_exported(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    merged = merge(family(tmp_path, sentence_bert), tmp_path / "merged")
    for place in (merged, export(merged, "a", tmp_path / "exported")):
        model = library.SentenceTransformer(str(place), device="cpu")
        assert [type(module).__name__ for module in model] == ["Transformer", "Pooling", "Dense"]
        assert model.encode(["a b"]).shape == (1, 4)


def test_one_model_ends_and_is_spoken_to_as_all_its_tasks_are(tmp_path):
    config = family(tmp_path, tiny_gpt2) | {"method": "average"}
    tasks = {name: Path(folder) for name, folder in config["tasks"].items()}
    write_json(tmp_path / "base" / "generation_config.json", {"eos_token_id": 2})
    for folder in tasks.values():
        write_json(folder / "generation_config.json", {"eos_token_id": [2, 5]})
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    merged = merge(config, tmp_path / "merged")
    assert read_json(merged / "generation_config.json") == {"eos_token_id": [2, 5]}
    assert (merged / "chat_template.jinja").read_text() == "{{ messages }}"
    (tasks["b"] / "chat_template.jinja").write_text("other")
    (tasks["b"] / "generation_config.json").unlink()
    with make_plan(config) as plan:
        told = [text for text in plan.warnings if "chat_template.jinja" in text]
        assert len(told) == 2 and any("generation_config.json" in text for text in plan.warnings)
        assert "chat_template.jinja" not in plan.companions
    with make_plan(config | {"method": "emr"}) as plan:
        assert not any("chat_template.jinja" in text for text in plan.warnings)


# A file, what base and tasks have at the earlier place of a template or of ends, a newer file of the base, what comes.
@pytest.mark.parametrize(
    ("name", "base", "a", "b", "newer", "expected"),
    [
        ("tokenizer_config.json", {}, {"chat_template": "x"}, {"chat_template": "x"}, None, {"chat_template": "x"}),
        (
            "tokenizer_config.json",
            {"chat_template": "y"},
            *[{"chat_template": ["x"]}] * 2,
            True,
            {"chat_template": ["x"]},
        ),
        ("tokenizer_config.json", {"chat_template": "y"}, {"chat_template": "x"}, {}, True, {"chat_template": "y"}),
        ("tokenizer_config.json", {"chat_template": "y"}, {}, {}, True, {"chat_template": "y"}),
        ("tokenizer_config.json", {}, {"chat_template": "x"}, {"chat_template": "z"}, None, {"chat_template": None}),
        ("config.json", {"eos_token_id": 2}, *[{"eos_token_id": [2, 5]}] * 2, True, {"eos_token_id": [2, 5]}),
        ("config.json", {"eos_token_id": 2}, *[{"eos_token_id": 3, "pad_token_id": 1}] * 2, None, {"pad_token_id": 1}),
        ("config.json", {"eos_token_id": 2}, {"eos_token_id": 3}, {"eos_token_id": 4}, True, {"eos_token_id": 2}),
        ("config.json", {"model_name": "x"}, *[{"model_name": "y"}] * 2, True, {"model_name": "x"}),
    ],
)
def test_templates_and_ends_at_their_earlier_place_travel_too(tmp_path, name, base, a, b, newer, expected):
    config = family(tmp_path, tiny_gpt2) | {"method": "average"}
    place = {"config.json": "generation_config.json", "tokenizer_config.json": "chat_template.jinja"}[name]
    for folder, told in (("base", base), ("a", a), ("b", b)):
        (tmp_path / folder / place).unlink(missing_ok=True)
        plain = {key: value for key, value in read_json(tmp_path / folder / name).items() if key not in expected}
        write_json(tmp_path / folder / name, plain | told)
    if newer:
        write_json(tmp_path / "base" / place, {"eos_token_id": 7})
    with make_plan(config) as plan:
        travels = expected.items() <= a.items()
        assert any(f"{name}: " in text and next(iter(expected)) in text for text in plan.warnings) == travels
    merged = merge(config, tmp_path / "merged")
    found = read_json(merged / name)
    assert {key: found.get(key) for key in expected} == expected
    # a template of the base goes; its generation settings stay, with the ends of the tasks
    stays = bool(newer) and (name == "config.json" or not travels)
    assert (merged / place).is_file() == stays
    if stays and travels:
        assert expected.items() <= read_json(merged / place).items()
    # a task of masks has its own
    exported = export(merge(config | {"method": "emr"}, tmp_path / "emr"), "a", tmp_path / "exported")
    own = read_json(exported / name)
    assert {key: own.get(key) for key in expected} == {key: a.get(key) for key in expected}


def test_generation_settings_that_tasks_have_go_before_the_ends_of_their_configurations(tmp_path):
    config = family(tmp_path, tiny_gpt2) | {"method": "average"}
    for folder, end, ends in (("base", 2, [2]), ("a", 7, [7, 8]), ("b", 7, [7, 8])):
        write_json(
            tmp_path / folder / "config.json", read_json(tmp_path / folder / "config.json") | {"eos_token_id": end}
        )
        write_json(tmp_path / folder / "generation_config.json", {"eos_token_id": ends})
    found = merge(config, tmp_path / "merged")
    assert read_json(found / "config.json")["eos_token_id"] == 7
    assert read_json(found / "generation_config.json")["eos_token_id"] == [7, 8]


def test_a_task_gets_nothing_of_the_base_that_would_speak_for_it(tmp_path):
    config = family(tmp_path, tiny_gpt2)
    base, a, b = (tmp_path / name for name in ("base", "a", "b"))
    (base / "chat_template.jinja").write_text("the base's")
    vocabulary = json.loads((a / "tokenizer.json").read_text())["model"]["vocab"]
    (a / "vocab.txt").write_text("\n".join(vocabulary))
    (a / "tokenizer.json").unlink()
    (a / "generation_config.json").unlink()
    # one without a tokenizer, which uses the base's
    (b / "tokenizer.json").unlink()
    merged = merge(config, tmp_path / "merged")
    assert names(export(merged, "a", tmp_path / "export-a")) == names(a)
    assert names(export(merged, "b", tmp_path / "export-b")) == names(b) | {"tokenizer.json", "chat_template.jinja"}
    add_task(merged, "c", str(a), frozen=True)
    assert names(export(merged, "c", tmp_path / "export-c")) == names(a)
    assert EMRModel.from_pretrained(merged, "c").generation_config("c") == {}


def test_weights_states_logs_secrets_and_other_models_stay(tmp_path):
    folder = tiny_bert(tmp_path / "model")
    kept = {
        *("normalizer.json", "own.tiktoken", "LICENSE", "additional_chat_templates/tool.jinja", "pack/code.py"),
        *("bpe_simple_vocab_16e6.txt.gz", "selected_tags.csv", "labels.tsv", "vocab.jsonl", "mel_filters.npz"),
        *("tokenization_secret.py", "modeling_credentials_free.py", "api_keyboard.py", "logs/helper.py"),
        *("tasks/prompts.json", "base/extra.json", "tokenizer.key", "token"),
    }
    silent = {"pytorch_model.bin", "tf_model.h5", "model.onnx", "README.md", "report.json", ".gitattributes"}
    own = {"optimizer.pt", "norm_stats.pt", "lang.pkl", "speaker.wav", "picture.png", ".env", "trainer_state.json"}
    left = {
        **{name: name for name in (*own, "events.out.tfevents.1", "run.log", "key.pem", "notes.txt")},
        **{"checkpoint-5/config.json": "checkpoint-5/", "onnx/config.json": "onnx/", "wandb/x.txt": "wandb/"},
        **{"original/params.json": "original/", "shown/a.png": "shown/*.png", "shown/b.png": "shown/*.png"},
        **{"other/config.json": "other/", "other/model.safetensors": "other/"},
    }
    for name in (*kept, *silent, *left):
        write_json(folder / name, {})
    (folder / "notes.txt").write_text("my token is hf_" + "aB" * 17)
    before = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    found = find_companions(folder)
    assert set(found.files) == kept | before and not found.modules
    assert sorted(text.split(" (")[0] for text in found.left_out) == sorted(set(left.values()))
    alone = {"normalizer.json", "additional_chat_templates/tool.jinja"}
    assert set(find_companions(folder, alone=True).files) == before | alone


@pytest.mark.parametrize(
    "name", ["config.json", "code.py", "modules.json", "1_Pooling/config.json", "1_Pooling", "picture.png", "extra"]
)
@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_link_out_of_the_folder_is_refused_or_said(tmp_path, name, target):
    folder = add_sentence_modules(tiny_bert(tmp_path / "model"))
    path, aside = folder / name, tmp_path / "elsewhere"
    if path.exists():
        path.rename(aside)
    elif target == "elsewhere":
        aside.touch()
    path.symlink_to(aside if target == "elsewhere" else tmp_path / "nowhere")
    if name in ("picture.png", "extra"):
        assert find_companions(folder).left_out == (f"{name} (a link)",)
    elif (name, target) != ("modules.json", "nowhere"):
        with refused(DataError, name, "link"):
            find_companions(folder)


def test_modules_of_the_tasks_travel_whole_or_not_at_all(tmp_path):
    config = family(tmp_path, tiny_bert, task_head=False) | {"method": "average"}
    for folder in config["tasks"].values():
        add_sentence_modules(Path(folder))
    with make_plan(config) as plan:
        assert set(plan.companions) >= UNIT
    write_json(tmp_path / "b" / "1_Pooling" / "config.json", {"word_embedding_dimension": 16})
    with make_plan(config) as plan:
        assert not UNIT & set(plan.companions) and "sentence_bert_config.json" in plan.companions
        for title in ("'a'", "'b'"):
            (told,) = [text for text in plan.warnings if title in text and "modules.json" in text]
            assert all(name in told for name in UNIT) and told.endswith("has none")


@pytest.mark.slow
def test_they_travel_over_a_hub(tmp_path, hub, hub_cache):
    family(tmp_path, sentence_bert, "a")
    for name in ("base", "a"):
        for own in ("normalizer.json", "logs/helper.py", "tags.csv"):
            write_json(tmp_path / name / own, {})
        push_folder(hub.url, f"org/{name}", tmp_path / name)
    config = {"base": "org/base", "tasks": {"a": "org/a"}}
    merged = merge_checkpoints(config, tmp_path / "merged", progress=False, token=False, endpoint=hub.url).path
    own = {"normalizer.json", "logs/helper.py", "tags.csv", "modules.json", "2_Dense/model.safetensors"}
    weights = TaskWeights(merged, token=False, endpoint=hub.url)
    assert own <= names(merged) and own <= names(weights.export("a", tmp_path / "exported"))
