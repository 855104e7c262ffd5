"""check_loads: what loads without hf_ext passes, what does not is refused, and foreign code is never run."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForPreTraining

from hf_ext.errors import DataError, NotPublished
from hf_ext.hub import load_check
from hf_ext.hub.load_check import check_loads, installed_room, shipped_files, verify_code
from hf_ext.hub.publish import push, stage
from tests.kit import warm_python
from tests.kit.command_line import run
from tests.kit.own_data import write_files
from tests.kit.refusals import refused

from .published import edit, save_bert, save_snapshot, tiny_adapter


@pytest.fixture
def staged(tmp_path) -> Path:
    return stage(save_snapshot(tmp_path / "snapshot"), tmp_path / "staged")


# Python runs a file of this name when it starts: it notes what the process is given, and ends it.
NOTE = """
import json, os, pathlib, sys
links = [
    (path.name, path.is_symlink(), str(path.resolve()))
    for path in pathlib.Path(os.environ["HF_HUB_CACHE"]).glob("models--*/snapshots/*/**/*")
    if not path.is_dir()
]
noted = {"environment": dict(os.environ), "cwd": os.getcwd(), "words": sys.orig_argv[3:], "links": links}
with open(os.environ["NOTES"], "a") as file:
    file.write(json.dumps(noted) + chr(10))
os._exit(0)
"""


@pytest.fixture
def notes(tmp_path, monkeypatch) -> Path:
    """What the processes of the check are given, one a line; they load nothing."""
    site = write_files(tmp_path / "site", {"sitecustomize.py": NOTE})
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes.jsonl"))
    return tmp_path / "notes.jsonl"


@pytest.mark.slow
def test_what_stage_writes_loads_without_hf_ext(staged, tmp_path, warm_checks):
    check_loads(staged)
    tiny_adapter().save_pretrained(tmp_path / "lora")
    check_loads(str(stage(tmp_path / "lora", tmp_path / "adapter")))
    check_loads(stage(save_bert(tmp_path / "bert"), tmp_path / "foreign"))


@pytest.mark.slow
@pytest.mark.parametrize("presence", ["absent", "installed"])
def test_hf_ext_is_imported_in_one_process_of_the_check_and_cannot_be_in_the_other(tmp_path, presence):
    probe = Path(load_check.__file__).with_name("load_probe.py").read_text()
    attempts = """
for module in ("hf_ext", "hf_ext_cli"):
    print(module in sys.modules)
    try:
        __import__(module)
    except ModuleNotFoundError as error:
        print(error)
"""
    tiny_adapter().save_pretrained(tmp_path / "adapter")
    files = {path.name: path for path in (tmp_path / "adapter").iterdir()}
    load_check.fill_cache(tmp_path / "hub", "org/adapter", "0" * 40, files)
    command = [sys.executable, "-c", probe + attempts, presence, "org/adapter"]
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    result = warm_python.run(command, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    reason = "a checkpoint must load where hf_ext is not installed"
    expected = {"absent": ["False", f"hf_ext: {reason}", "False", f"hf_ext_cli: {reason}"], "installed": ["True"]}
    assert result.stdout.splitlines()[-4:][: len(expected[presence])] == expected[presence]


def test_the_check_has_no_network_no_token_and_a_cache_of_its_own(staged, notes, monkeypatch):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, "hf_secret")
    monkeypatch.setenv("HF_HUB_CACHE", "cache-of-the-user")
    check_loads(staged, repo_id="me/model")
    processes = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [process["words"] for process in processes] == [["absent", "me/model"], ["installed", "me/model"]]
    for process in processes:
        environment, home = process["environment"], process["cwd"]
        assert environment["HF_HUB_OFFLINE"] == "1" and "hf_secret" not in environment.values()
        assert all(environment[name].startswith(home) for name in ("HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE"))
        assert {name for name, _, _ in process["links"]} >= {"config.json", "model.safetensors"}
        blobs = f"{environment['HF_HUB_CACHE']}/models--me--model/blobs/"
        assert all(is_link and target.startswith(blobs) for _, is_link, target in process["links"])


def test_a_folder_that_does_not_load_is_refused_with_what_the_process_said(staged, warm_checks):
    weights = load_file(staged / "model.safetensors")
    del weights["model.extractor.weight"]
    save_file(weights | {"stranger": torch.zeros(1)}, staged / "model.safetensors", metadata={"format": "pt"})
    with refused(NotPublished, "model.extractor.weight"):
        check_loads(staged)
    edit(staged / "config.json", window_size=0)
    with refused(NotPublished, "hf_ext", "window_size"):
        check_loads(staged)


def test_weights_of_other_heads_may_lie_beside_those_of_a_model_of_transformers(tmp_path, warm_checks):
    config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertForPreTraining(config).save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "README.md").write_text("# Mine\n")
    edit(tmp_path / "bert" / "config.json", architectures=["BertForMaskedLM"])
    check_loads(tmp_path / "bert")
    # what is missing would be made anew, at random
    edit(tmp_path / "bert" / "config.json", architectures=["BertForQuestionAnswering"])
    with refused(NotPublished, "missing_keys", "qa_outputs"):
        check_loads(tmp_path / "bert")


# Configurations of models that neither transformers nor diffusers loads.
STRANGERS = [{"n": 3}, {"architectures": ["BertModel", "BertModel"]}, {"_class_name": "NoSuchNet"}]
STRANGERS += [{"model_type": "bert", "architectures": [7]}]


@pytest.mark.parametrize("config", STRANGERS, ids=str)
def test_a_model_of_another_library_is_refused_in_words_and_goes_up_unchecked(
    tmp_path, hub, api, bert, config, warm_checks
):
    (bert / "config.json").write_text(json.dumps(config))
    (bert / "README.md").write_text("---\nlicense: mit\nlibrary_name: timm\n---\n# Mine\n")
    assert "no problems found" in run("card", bert, "--check").output
    with refused(NotPublished, str(bert), "config.json", "--no-check") as caught:
        push(bert, "org/model", endpoint=hub.url, token=False)
    assert "Traceback" not in str(caught.value) and "hf-ext-" not in str(caught.value)
    push(bert, "org/model", endpoint=hub.url, token=False, check=False)
    assert "model.safetensors" in api.list_repo_files("org/model")


def test_a_process_that_hangs_is_ended(staged):
    with refused(DataError, "hf_ext", "0.2 s"):
        check_loads(staged, seconds=0.2)


def test_what_stands_in_the_room_travels_and_nothing_else(staged):
    room = Path(installed_room("semanir").__file__).parent
    assert {path.name for path in staged.rglob("*.py")} == {path.name for path in shipped_files(room)}
    assert {path.name for path in room.glob("*.py")} - {path.name for path in shipped_files(room)} == {"__init__.py"}


def name_code(file: str, reference: str):
    """A change that has a configuration name other code."""
    return lambda staged: edit(
        staged / file, auto_map=json.loads((staged / file).read_text())["auto_map"] | {"AutoModel": reference}
    )


def write_code(name: str, source: str = "semanir/ops_semanir.py", added: str = "# changed\n"):
    """A change that puts a file of the package, changed or not, under another name."""
    text = (Path(load_check.__file__).parents[1] / source).read_text() + added
    return lambda staged: write_files(staged, {name: text})


CHANGES = {
    **{name: (write_code(name), "hf_ext") for name in ("modeling_semanir.py", "evil.py", "sub/ops_semanir.py")},
    "of another room": (write_code("degradations.py", "tasks/degradations.py", ""), "degradations.py"),
    "missing": (lambda staged: (staged / "ops_semanir.py").unlink(), "ops_semanir.py"),
    "of another repository": (name_code("config.json", "org/repo--modeling_semanir.SemanIRModel"), "auto_map"),
    "of Python": (name_code("preprocessor_config.json", "os.system"), "auto_map"),
    "no class": (name_code("config.json", "modeling_semanir"), "auto_map"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_code_that_is_not_the_installed_one_is_never_run(staged, notes, case):
    change, fact = CHANGES[case]
    change(staged)
    with refused(DataError, fact):
        check_loads(staged)
    assert not notes.exists()


def test_an_adapter_or_a_transformers_model_ships_no_code(notes, bert):
    verify_code(bert)
    (bert / "modeling_semanir.py").write_text("")
    with refused(DataError, "hf_ext"):
        check_loads(bert)
    assert not notes.exists()
