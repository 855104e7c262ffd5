"""hf-ext as a program: help, exit codes, messages instead of tracebacks, lazy commands."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import httpx2
import pytest
import torch
from click.testing import CliRunner, Result
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    StrictDataclassFieldValidationError,
)
from safetensors import SafetensorError

from hf_ext.distributed import Ranks, scan_once
from hf_ext.errors import UsageError
from hf_ext.hub.card_rules import as_json
from hf_ext.training.methods import read_arguments
from hf_ext_cli.main import Commands, main
from hf_ext_cli.training import find_recipe, list_recipes
from tests.kit.command_line import run
from tests.kit.document_stage import draw_picture
from tests.kit.refusals import refused
from tests.kit.restorers import tiny_restorer

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("data", "hub", "emr", "dit")


def run_failing(error: BaseException) -> Result:

    class Failing(Commands):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
            return click.Command(cmd_name, callback=fail)

    def fail() -> None:
        raise error

    return CliRunner().invoke(Failing("hf-ext", params=main.params, callback=main.callback), ["fail"])


def all_commands() -> dict[str, click.Command]:
    context = click.Context(main)
    found = {name: main.get_command(context, name) for name in main.list_commands(context)}
    for name, group in list(found.items()):
        if isinstance(group, click.Group):
            found |= {f"{name} {inner}": group.get_command(context, inner) for inner in group.list_commands(context)}
    return found


@pytest.mark.parametrize("name", sorted(all_commands()))
def test_every_path_of_a_command_may_begin_with_the_home_of_the_user(name, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a.yaml").touch()
    command = all_commands()[name]
    for param in command.params:
        if isinstance(param.type, click.Path):
            place = "a" if param.type.dir_okay else "a.yaml"
            assert str(param.type.convert(f"~/{place}", param, None)) == str(tmp_path / place), param.name


def test_lists_models_and_results_of_the_home_of_the_user_are_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    tiny_restorer().save_pretrained(tmp_path / "model")
    draw_picture(0).save(tmp_path / "a.png")
    (tmp_path / "list").write_text("~/a.png\n")
    for number, words in enumerate(("~/a.png", "~/*.png", "@~/list")):
        run("restore", "~/model", words, f"--out=~/{number}.png")
        assert (tmp_path / f"{number}.png").exists()
        (tmp_path / f"{number}.png").unlink()
    run("recipes", "semanir/denoise_color", "--out=~/r.yaml")
    run("recipes", "semanir/denoise_color", "--out=~/r.yaml", code=2)
    assert (tmp_path / "r.yaml").is_file() and not (tmp_path / "~").exists()


@pytest.mark.parametrize("flag", ["-v", "--verbose", "-q", "--quiet", "--json", "-h", "--help"])
@pytest.mark.parametrize("command", ["train", "data check"])
def test_flags_of_a_command_may_stand_after_its_file(command, flag):
    given = [*command.split(), "semanir/denoise_color", "--data.train.path", "./x y", flag, "--data.eval", "null"]
    asked = flag in ("-h", "--help")
    told = run(*given, code=0 if asked else 2).output
    if flag == "--json" and command == "train":
        assert "json" in told
    else:
        assert "unexpected argument" not in told and ("Usage: " if asked else "no data at ./x y") in told
    assert ("Traceback" in told) == (flag in ("-v", "--verbose"))


@pytest.mark.parametrize("name", sorted(all_commands()))
def test_each_command_explains_itself_with_examples_that_are_valid(name, tmp_path, monkeypatch):
    """The words of each example parse: no option is misspelled, no argument is missing."""
    result, asked = run(*name.split(), "--help"), all_commands()[name]
    assert result.output.startswith(f"Usage: main {name} ")
    assert name in GROUPS or re.search(rf"Examples:\n.*hf-ext {name} ", result.output, re.DOTALL)
    for option in asked.params:
        assert not isinstance(option, click.Option) or option.help, f"{name} {option.name} has no help"
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/denoise/snapshot", "hub", "photos", "merged"):
        (tmp_path / folder).mkdir(parents=True)
    text = (asked.help or "").partition("Examples:")[2]
    examples = re.findall(r"^ *(?:\w+=\S+ )*hf-ext (.+)$", text, re.MULTILINE)
    assert examples or name in GROUPS
    files = ["photo.png", "dog.png", "token.txt", "a.yaml", "denoise.yaml", "individual.json"]
    for path in [*files, *re.findall(r"examples/\S+", " ".join(examples))]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    for example in examples:
        words = shlex.split(example)
        command: click.Command = main
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, example
            command = found
        command.make_context(command.name, words)


@pytest.mark.parametrize("words", [[], *([group] for group in GROUPS)], ids=str)
def test_a_group_without_a_command_shows_its_help(words):
    assert run(*words, code=2).output == run(*words, "--help").output


def test_the_files_that_help_names_exist():
    texts = " ".join(command.help or "" for command in [main, *all_commands().values()])
    named = set(re.findall(r"\bexamples/\S+\.yaml", texts))
    assert named and [path for path in sorted(named) if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "Missing argument 'FILE.yaml'"),
        (["train", "--max_steps", "3"], "No such option"),
        (["train", "nowhere.yaml"], "File 'nowhere.yaml' does not exist"),
        (["merge"], "Missing option --base and --task: give them, or a FILE.yaml"),
        (["merge", "--task", "a=b"], "Missing option --base: give them, or a FILE.yaml"),
        (["merge", "--base", "a", "--task", "b"], "Expected NAME=VALUE, for instance emotion=org/bert-emotion"),
        (["merge", "--base", "a", "--task", "b=c"], "Missing OUT: give it after FILE.yaml, or with --out"),
        (["merge", "--base", "a", "--task", "b=c", "--task", "b=d", "--out", "o"], "'--task': a name is given twice"),
        (["merge", "--method", "best"], "'best' is not one of 'emr'"),
        (["emr", "add", ".", "c"], "Expected NAME=VALUE"),
        (["restore", "model", "a.png", "--out", "o"], "a.png: it does not exist; give files, folders, patterns"),
        (["restore", "model", "a", "--out", "o", "--tile", "big"], "'big' is neither a number of pixels nor 'auto'"),
        (["restore", "model", ".", "--out", "o"], "no picture found in ."),
        (["restore", "model", ".", "--out", "-", "--compare"], "--compare needs a folder for its page"),
        (["evaluate", "--seed", "3", "--config", "a.yaml"], "MODEL must be the first argument"),
        (["hub", "serve"], "Missing option '--root'"),
        # What a variable of a shell left empty is not the default.
        (["hub", "serve", "--root", ""], "Invalid value for '--root': the path is empty"),
        (["export", "denoise-color", "--onnx", ""], "Invalid value for '--onnx': the path is empty"),
        (["push", "", "org/name"], "Invalid value for 'FOLDER': the path is empty"),
        (["push", ".", "org/name", "--branch", ""], "revision='' is no name for a branch"),
        (["card", ".", "--repo-id", ""], "--repo-id is empty"),
        (["restore", "denoise-color", "a.yaml", "--out", "o", "--device", ""], "cannot be used"),
        (["classify", "spoken-digits", "a.yaml", "--device", ""], "cannot be used"),
        (["info", "org/name@"], "org/name@ names no revision"),
        (["generate", "org/name@", "a"], "org/name@ names no revision"),
        (["emr", "export", "org/name@", "a", "o"], "org/name@ names no revision"),
        (["recipes", ""], "'' is neither a file nor a recipe"),
        (["card", "."], "config.json: it names no model_type"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").touch()
    result = run(*arguments, code=2)
    assert message in result.stderr and result.stdout == ""


ANSWER = httpx2.Response(404, request=httpx2.Request("GET", "http://x"))
UNKNOWN = RepositoryNotFoundError("404", response=ANSWER)
WIDTH = ValueError("the width is wrong")


def because_of(cause: Exception, error: Exception) -> Exception:
    """As `raise error from cause`."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ValueError("the value is wrong"), 2),
        (TypeError("the type is wrong"), 2),
        (because_of(WIDTH, StrictDataclassFieldValidationError("width", WIDTH)), 2),
        (FloatingPointError("the loss is nan"), 1),
        (MemoryError("too much"), 1),
        (ImportError("install x"), 1),
        (SafetensorError("Error while deserializing header: header too small"), 2),
        (SafetensorError("Error while serializing: I/O error: No space left on device"), 1),
        (OSError(28, "No space left on device"), 1),
        (ConnectionError("the connection was closed"), 1),
        (OSError("the folder has no config.json, says a library"), 2),
        (FileNotFoundError(2, "No such file", "weights"), 2),
        (PermissionError(13, "Permission denied", "weights"), 2),
        (LocalEntryNotFoundError("not in the cache"), 1),
        # A library says of an unknown repository what was given; a file that cannot be read is of this machine.
        (because_of(UNKNOWN, OSError("org/none is not a valid model identifier")), 2),
        (because_of(FileNotFoundError(2, "No such file", "photo.png"), OSError("example 3 cannot be read")), 1),
        (httpx2.ConnectError("connection refused"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_expected_error_is_a_message_with_its_exit_code(error, exit_code):
    result = run_failing(error)
    assert result.exit_code == exit_code
    text = error.__cause__ if isinstance(error, StrictDataclassFieldValidationError) else error
    text = "interrupted by SIGINT." if isinstance(error, KeyboardInterrupt) else text
    assert result.stderr == f"Error: {text}\n" and "Traceback" not in result.output


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyError("x"), ModuleNotFoundError("no x", name="x")])
def test_our_own_mistakes_keep_their_traceback(error):
    assert run_failing(error).exception is error


def test_the_installed_program_ends_with_the_exit_code_and_one_message(tmp_path):
    # A command that builds no model starts in half the time.
    command = [Path(sys.executable).with_name("hf-ext"), "emr", "export", tmp_path, "task", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"Error: {tmp_path}/emr.json: no such file; .*\n", done.stderr)


def test_json_has_null_for_what_is_not_finite():
    value = {"a": float("inf"), "b": [float("nan"), 1.5, (2, "x")], "c": None}
    assert json.dumps(as_json(value), allow_nan=False) == '{"a": null, "b": [null, 1.5, [2, "x"]], "c": null}'


def test_the_list_says_what_each_recipe_is_for():
    found = json.loads(run("recipes", "--json").stdout)
    assert len(found) > 40
    assert all(row["name"] and row["method"] and len(row["what"]) > 15 and row["data"] for row in found)
    assert all(not row["what"].endswith(".") for row in found)
    names = [row["name"] for row in found]
    assert {"semanir/denoise_color", "mrconv/sensors", "disentangled_dit/cifar10", "emr/merge"} < {*names}
    # What only a script in examples/ trains is no recipe of `hf-ext train`.
    assert not [name for name in names if "study" in name or name == "emr/finetune"]
    lines = run("recipes").stdout.splitlines()
    assert lines[0].split() == ["name", "method", "what"] and len(lines) == 1 + len(found)


@pytest.mark.parametrize("recipe", [one for one in list_recipes() if one.method != "emr"], ids=lambda one: one.name)
def test_each_recipe_is_one_that_can_be_trained(recipe):
    assert read_arguments(recipe.path, []).method == recipe.method


def test_a_recipe_is_printed_or_copied(tmp_path):
    text = find_recipe("mrconv/sensors").read_text()
    assert run("recipes", "mrconv/sensors").stdout == text
    out = tmp_path / "mine.yaml"
    assert run("recipes", "mrconv/sensors", "--out", out).stdout == f"{out}\n" and out.read_text() == text
    assert "exists; give a new file" in run("recipes", "mrconv/sensors", "--out", out, code=2).stderr
    assert "--out copies one recipe" in run("recipes", "--out", tmp_path / "b.yaml", code=2).stderr
    assert not (tmp_path / "b.yaml").exists()


def test_commands_take_a_recipe_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for seed in range(2):
        draw_picture(seed).save(tmp_path / "photos" / f"{seed}.png")
    said = run(
        "data", "check", "--json", "semanir/denoise_color", "--data.train.path", "photos", "--task.patch_size", 16
    )
    assert json.loads(said.stdout)[0]["bad"] == []
    # A file of that name comes first.
    (tmp_path / "semanir").mkdir()
    (tmp_path / "semanir" / "denoise_color").write_text("method: nothing\n")
    assert "unknown method 'nothing'" in run("data", "check", "semanir/denoise_color", code=2).stderr


def test_the_recipe_that_was_meant_is_named():
    for words, said in (
        (("train", "semanir/denoise_colour"), "Did you mean 'semanir/denoise_color'?"),
        (("train", "sensor"), "Did you mean 'mrconv/sensors'?"),
        (("train", "emr/merge"), "describes a merge, not a training: run `hf-ext merge FILE.yaml OUT`"),
        (("recipes", "zzz"), "`hf-ext recipes` lists them"),
    ):
        assert said in run(*words, code=2).stderr
    with refused(UsageError, "recipe", "hf-ext recipes"):
        find_recipe("examples")


def test_processes_of_a_machine_share_its_gpus(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    ranks = Ranks()
    assert ranks.own_device() == "cuda" and not chosen
    ranks.count, ranks.local_index = 4, 3
    assert ranks.own_device("cpu") == "cpu" and ranks.own_device("cuda:0") == "cuda:0" and not chosen
    assert ranks.own_device() == ranks.own_device("cuda") == "cuda"
    assert chosen == [1, 1]
    # Nobody launched this number of processes: none is waited for.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    ranks = Ranks()
    assert (ranks.index, ranks.count, ranks.gather("value")) == (0, 1, ["value"])


def test_a_scan_within_a_scan_is_of_its_process_alone():
    ranks, asked = Ranks(), []
    ranks.ask_first = lambda find: asked.append(find) or find()
    inner = scan_once(lambda: 1)
    outer = scan_once(lambda: 1 + inner())
    with ranks.share_scans():
        assert (outer(), inner(), len(asked)) == (2, 1, 2)
