"""A mistake of the user ends with 2 and one message, before anything is imported or written that need not be."""

import json
import subprocess
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from hf_ext.data.opening import SourceError, open_source
from hf_ext.errors import DataError
from hf_ext.mrconv import MRConvConfig, MRConvForSequenceClassification
from hf_ext.settings import SettingsError, build, parse_yaml, read_yaml
from hf_ext.training import DataSource, TrainingArguments
from hf_ext.training.arguments import apply_overrides, find_paths
from hf_ext.training.launch import main
from hf_ext.training.methods import TASKS, build_task, find_task, read_arguments
from hf_ext.training.models import add_adapter, build_model, initialize_from, refuse_lost_fields
from tests.kit.process_state import forget_accelerate
from tests.kit.refusals import refused

from . import tiny
from .launching import ROOT, environment
from .tiny import TinyConfig, TinyModel, TinyTask, fails, make_arguments, run, write_config, write_text_recipe

SEMANIR = {"architecture": "columnar", "embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 4, "top_k": 6}
TEXT = {"hidden_size": 8, "num_hidden_layers": 1, "kernel_size": 4}


# Of two methods; the number of heads must divide the width.
WRONG = {"num_heads": "[3]", "embed_dim": "big", "kernel_type": "furier", "hidden_size": "-4"}


@pytest.mark.parametrize(("field", "value"), WRONG.items())
def test_a_wrong_value_of_a_model_is_said_and_leaves_no_folder(tmp_path, capsys, images, field, value):
    semanir = write_config(tmp_path, images, method="semanir", model=SEMANIR)
    config = semanir if field in SEMANIR else write_text_recipe(tmp_path)
    said = "`num_heads[0]` is 3; it must divide the width 8" if field == "num_heads" else field
    found = fails(capsys, 2, config, f"--model.{field}", value)
    assert found.startswith("Error: bad value in section 'model': ") and said in found
    assert not (tmp_path / "run").exists()


def test_a_bug_of_ours_keeps_its_traceback(tmp_path, examples, monkeypatch):
    monkeypatch.setattr(TinyTask, "build_model", lambda *_: 1 / 0)
    forget_accelerate()
    with pytest.raises(ZeroDivisionError):
        main([write_config(tmp_path, examples)], tiny.make_task)


def run_python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command, paths = [sys.executable, *words], {**environment(), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=paths, capture_output=True, text=True)


# Torch is imported by the models, transformers takes longest.
CLI = ["-c", "from hf_ext_cli.main import main; main()"]
SLOW = {"torch", "transformers", "datasets", "accelerate", "diffusers"}


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (["-m", "hf_ext.training"], ["nothere.yaml"]),
        (["-m", "hf_ext.training"], ["config.yaml", "--max_step", "3"]),
        ([*CLI, "train"], ["config.yaml", "--max_step", "3"]),
        ([*CLI, "data", "check"], ["config.yaml", "--data.num_worker", "1"]),
        ([*CLI, "evaluate"], [".", "--config", "config.yaml", "--max_step", "3"]),
    ],
)
def test_a_mistyped_word_is_found_before_torch_is_imported(tmp_path, start, words):
    write_config(tmp_path, Path("x"))
    done = run_python(tmp_path, "-X", "importtime", *start, *words)
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert done.returncode == 2 and not SLOW & imported and "hf_ext.settings" in imported
    told = ("no configuration file at nothere.yaml", "Did you mean '")
    assert any(text in line for text in told for line in lines)


@pytest.mark.parametrize("method", TASKS)
@pytest.mark.parametrize("word", ["task.nonsense", "model.nonsense", "optim_args.beta"])
def test_a_mistyped_key_of_a_method_is_found_before_data_are_read(tmp_path, method, word):
    presets = ["--model.preset", "tiny"] if find_task(method).presets else []
    config = write_config(tmp_path, tmp_path / "absent", method=method)
    arguments = read_arguments(config, [*presets, f"--{word}", "1"])
    with refused(SettingsError, *word.split(".")):
        run(build_task(arguments), arguments)


def test_garbage_is_looked_for_again_after_the_imports_of_a_new_process(tmp_path):
    program = """
import gc, sys
import hf_ext_cli
from hf_ext.system import import_undisturbed
for module in ("torch", "torch.nn"):
    frozen = gc.get_freeze_count()
    try:
        with import_undisturbed():
            print(gc.isenabled())
            sys.modules[module] = None
            raise ValueError
    except ValueError:
        print(gc.isenabled(), gc.get_freeze_count() > frozen)
"""
    done = run_python(tmp_path, "-c", program)
    # The second time it is a program that has torch, and maybe garbage, already.
    assert done.stdout.split() == ["False", "True", "True", "True", "True", "False"], done.stderr


def test_no_is_a_precision_and_a_section_says_its_error_once():
    def build_with(*flags: str) -> TrainingArguments:
        values = {"method": "tiny", "output_dir": "x", "data": {"train": {"path": "x"}}}
        return build(TrainingArguments, apply_overrides(values, list(flags)))

    assert build_with("--mixed_precision", "no").mixed_precision == "no"
    for wrong in ("yes", "on", "bf32"):
        with refused(SettingsError, "mixed_precision"):
            build_with("--mixed_precision", wrong)
    with pytest.raises(SettingsError) as error:
        build_with("--data.train.paht", "y")
    assert str(error.value).count("data.train") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb:\n  c: 1\n\n  c: 2\n", "repeated key 'c' in line 5"),
        ("[" * 1000, "nested too deeply"),
        ("a: &a {b: *a}", "recursive"),
        ("!!timestamp x", "does not fit its tag"),
        ("? [a]\n: b", "unhashable"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("x" * 200_001, "at most 200,000"),
        ("a: 1\nb: 010", "line 2: YAML reads '010' in base 8"),
        ("a: 1:30.5", "base 60"),
        ("a:\n\tb: 1", "line 2, column 1: "),
        ("a: 1\n---\nb: 1", "line 2, .* another document"),
        ("a: 1\nb: \x07", r"line 2: the character '\\x07'"),
    ],
)
def test_yaml_that_cannot_be_used_is_refused_in_words(text, said):
    with pytest.raises(SettingsError, match=said):
        parse_yaml(text)
    with refused(SettingsError, "YAML"):
        build(TrainingArguments, apply_overrides({"method": "tiny", "output_dir": "x"}, ["--seed", text]))


@pytest.mark.parametrize("flags", [["--max_steps="], ["--max_steps", ""], ["--data.train.path= "], ["--peft="]])
def test_a_flag_without_its_value_is_not_the_default(flags):
    with refused(SettingsError, flags[0].partition("=")[0]):
        apply_overrides({"max_steps": 5}, flags)


@pytest.mark.parametrize(
    ("values", "flags", "expected"),
    [
        # null takes a key out.
        ({"model": {"classes": 10, "depth": 2}}, ["--model.classes", "null"], {"model": {"depth": 2}}),
        ({"data": {"eval": {"path": "x"}}}, ["--data.eval", "null", "--task.new=~"], {"data": {}, "task": {}}),
        # Names of the file stay, those of fields are written with underscores.
        ({"tasks": {"sun-3": {"path": "old"}}}, ["--tasks.sun-3.path", "x"], {"tasks": {"sun-3": {"path": "x"}}}),
        ({}, ["--max-steps", "3", "--task.patch-size=8"], {"max_steps": 3, "task": {"patch_size": 8}}),
        # A text is not cut.
        *(({}, [f"--name={word}"], {"name": word}) for word in ("photos #1", "*.png", "@home", "&x", "a:b", "C:\\x")),
        ({}, ["--x", "'a # b'", "--y", "[1] # one"], {"x": "a # b", "y": [1]}),
        # Days are names, and years may be.
        *(({}, ["--run_name", day], {"run_name": day}) for day in ("2026-05-01", "2026-05-01 10:00:00")),
        ({"eval": {2024: {}}}, ["--eval.2024.path", "x"], {"eval": {2024: {"path": "x"}}}),
    ],
)
def test_flags_change_what_a_file_says(values, flags, expected):
    before = json.dumps(values)
    assert apply_overrides(values, flags) == expected and json.dumps(values) == before


@pytest.mark.parametrize("number", ["1e-8", "1E-8", "+1.e-8", ".1e-7", "'1e-8'", "0.00000001"])
def test_a_number_in_a_section_of_free_keys_is_one(number):
    flags = [f"--optim_args.eps={number}", f"--model.widths=[{number}, 1e, e1, x1e1]"]
    arguments = build(TrainingArguments, apply_overrides({"method": "tiny", "output_dir": "1e-8"}, flags))
    assert arguments.optim_args == {"eps": 1e-8} and arguments.model == {"widths": [1e-8, "1e", "e1", "x1e1"]}
    assert arguments.output_dir == "1e-8"


WORDS = ["2024", "1.50", "1e5", "yes", "NO", "007", "12:30", "2026-05-01", "-1", "0x1F", ".inf"]


@pytest.mark.parametrize("word", [*WORDS, "a: b", "[draft] 1", "{x"])
@pytest.mark.parametrize("option", ["run_name", "output_dir", "data.train.name", "task.text_column"])
def test_an_option_of_text_takes_any_word(tmp_path, word, option):
    file, (section, _, name) = tmp_path / "config.yaml", option.rpartition(".")
    kept = "method: mrconv-text\ndata: {train: {path: 2023}}\n" + ("output_dir: out\n" if name != "output_dir" else "")
    file.write_text(kept)
    found = [read_arguments(file, [f"--{option}", word])]
    if word in WORDS and not section.startswith("data"):
        file.write_text(f"{kept}{f'{section}: {{{name}: {word}}}' if section else f'{name}: {word}'}")
        found.append(read_arguments(file, []))
    for arguments in found:
        source = arguments.data_arguments.require_train_source()
        values = {"data.train": source, "task": build_task(arguments), "": arguments}[section]
        assert getattr(values, name) == word and source.path == "2023" == find_paths(arguments.data)[0]


def test_words_in_lists_and_numbers_for_fractions(tmp_path):
    config = write_config(tmp_path, tmp_path, method="mrconv-pixels")
    flags = ["--task.label_names", "[NO, 1e5, 010, null]", "--task.num_labels=4", "--data.train.path"]
    flags += ["[1, {path: 2}]", "--task.mean=[0, 1, 1]", "--task.std", "[1, 1e0, 2.5]"]
    arguments = read_arguments(config, flags)
    task, parts = build_task(arguments), arguments.data_arguments.train_source.parts
    assert task.label_names == ["NO", "1e5", "010", "null"] and (task.mean, task.std) == ([0, 1, 1], [1, 1, 2.5])
    assert find_paths(arguments.data) == ["1", "2"] == [part.path for part in parts]


@pytest.mark.parametrize(
    "flags",
    [["--run_name"], ["--output_dir", "--max_steps", "3"], ["--max_steps=010"], ["--task.max_length", "1:30"],
     ["--model.hidden_size=010"], ["--data.train=[a"], ["--task.label_names", "[a"], ["--learning_rate=010"]],
)  # fmt: skip
def test_a_word_is_no_number_and_a_flag_without_a_value_no_word(tmp_path, flags):
    config = write_text_recipe(tmp_path)
    with refused(SettingsError, flags[0].strip("-").rpartition(".")[2].partition("=")[0]):
        arguments = read_arguments(config, flags)
        build_model(build_task(arguments), arguments.model, None)


def test_missing_data_name_the_flag_and_the_inner_cause(tmp_path):
    with refused(SourceError, "/nowhere", "--data.eval.path", "--data.eval"):
        open_source(DataSource("./nowhere"), "data.eval")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with refused(SourceError, "--data.train.path", "--data.train.split") as error:
        open_source(DataSource(str(tmp_path / "broken.jsonl")), "data.train")
    causes, found = [], error.value.__cause__
    while found is not None:
        causes.append(str(found).rstrip("."))
        found = found.__cause__
    assert len(causes) > 1 and all(cause in str(error.value) for cause in causes)


def test_a_warm_up_beyond_the_end_is_said(tmp_path, examples, capsys):
    for kind, said in (
        ("cosine", "warmup_steps is 2000, max_steps 1: the learning rate rises to 5e-06 and never reaches 0.01"),
        ("constant", "lr_scheduler_type constant does not use warmup_steps 2000"),
    ):
        changes = {"max_steps": 1, "warmup_steps": 2000, "lr_scheduler_type": kind}
        run(TinyTask(), make_arguments(tmp_path / kind, examples, **changes))
        assert f"warning: {said}" in capsys.readouterr().err


# peft still asks for the name that transformers deprecates.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_not_put_on_what_the_base_does_not_have(tmp_path, caplog):
    base, section = str(tmp_path / "base"), {"peft_type": "LORA", "r": 2, "target_modules": ["enter"]}
    TinyModel(TinyConfig(batch_norm=False)).save_pretrained(base)
    refusing, model = (TinyModel(TinyConfig(batch_norm=True)) for _ in range(2))
    for each in (refusing, model):
        assert set(initialize_from(each, base)) >= {"norm.weight", "norm.bias"}
    assert "tensors are new" in caplog.text
    with refused(DataError, "5 tensors", "norm.weight"):
        add_adapter(refusing, section, base)
    adapted = add_adapter(model, {**section, "modules_to_save": ["norm"]}, base)
    assert any(parameter.requires_grad and "norm" in name for name, parameter in adapted.named_parameters())


def test_fields_of_the_training_alone_go_with_an_adapter(tmp_path):
    def check(**section) -> None:
        model = MRConvForSequenceClassification(MRConvConfig(**{**sizes, **section}))
        refuse_lost_fields(model, section, str(tmp_path / "base"))

    sizes = {**TEXT, "vocab_size": 20, "max_position_embeddings": 16, "num_labels": 3}
    MRConvForSequenceClassification(MRConvConfig(**sizes)).save_pretrained(tmp_path / "base")
    check(dropout=0.3, tied_dropout=False, sync_batch_norm=False, initializer_range=0.1, **TEXT)
    with refused(DataError, "norm_eps", "1e-05", "0.001"):
        check(prenorm=False, norm_eps=1e-3, dropout=0.3)
    # What a task has taken from its data.
    measured = MRConvForSequenceClassification(MRConvConfig(**sizes))
    measured.config.target_mean = [2.0]
    with refused(DataError, "target_mean", "[2.0"):
        refuse_lost_fields(measured, {}, str(tmp_path / "base"))
    # Weights alone, from which a task of one's own may start, say nothing.
    (tmp_path / "base" / "config.json").unlink()
    check(norm_eps=1e-3)
    refuse_lost_fields(torch.nn.Linear(2, 2), {"norm_eps": 1e-3}, str(tmp_path / "base"))


def test_a_head_for_other_classes_starts_anew(tmp_path):
    def make(classes: int, width: int = 8) -> BertForSequenceClassification:
        sizes = {"vocab_size": 11, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        return BertForSequenceClassification(BertConfig(**sizes, hidden_size=width, num_labels=classes))

    make(2).save_pretrained(tmp_path / "base")
    assert initialize_from(make(5), str(tmp_path / "base")) == ["classifier.weight", "classifier.bias"]
    with refused(DataError, "sizes"):
        initialize_from(make(2, 4), str(tmp_path / "base"))


@pytest.mark.parametrize("key", ["a", "report_to", "data", "task", "optim_args"])
def test_aliases_that_repeat_a_list_a_billion_times_cost_nothing(key, tmp_path):
    levels = ["l0: &l0 [x, y]", *(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10))]
    (tmp_path / "bomb.yaml").write_text("\n".join(["method: tiny", "output_dir: x", *levels, f"{key}: *l9"]))
    started = time.process_time()
    with pytest.raises(SettingsError):
        read_arguments(tmp_path / "bomb.yaml", [])
    assert time.process_time() - started < 5


@pytest.mark.parametrize("value", ["[1, 2]", "{a: 1}"])
@pytest.mark.parametrize("name", ["run_name", "optim", "tracker_project"])
def test_a_list_is_no_text_in_a_file_or_a_flag(tmp_path, name, value):
    (tmp_path / "a.yaml").write_text(f"method: semanir\noutput_dir: run\n{name}: {value}\n")
    (tmp_path / "b.yaml").write_text("method: semanir\noutput_dir: run\n")
    for file, flags in (("a.yaml", []), ("b.yaml", [f"--{name}", value])):
        with refused(SettingsError, name):
            build(TrainingArguments, apply_overrides(read_yaml(tmp_path / file), flags))
    quoted = apply_overrides(read_yaml(tmp_path / "b.yaml"), [f"--{name}", f"'{value}'"])
    assert getattr(build(TrainingArguments, quoted), name) == value


def test_an_adapter_is_no_checkpoint_to_begin_with(tmp_path):
    model = peft.get_peft_model(TinyModel(TinyConfig()), peft.LoraConfig(target_modules=["enter"]))
    model.base_model.model.save_pretrained(base := tmp_path / "base")
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path)
    with refused(DataError, "adapter", str(base), "merge_and_unload"):
        initialize_from(TinyModel(TinyConfig()), str(tmp_path))
