"""MergeConfig: what it takes, and everything that it refuses, with what to do."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hf_ext.merging.configuration import MergeConfig, load_config
from hf_ext.settings import SettingsError
from tests.kit.refusals import refused

BASE: dict[str, Any] = {"base": "org/base", "tasks": {"a": "org/a", "b": "runs/b"}}


def test_a_yaml_file_is_read_with_its_defaults_and_written_back_the_same(tmp_path):
    path = tmp_path / "merge.yaml"
    path.write_text(
        "base: org/base@v1\ntasks:\n  emotion: org/emotion\n  irony: runs/irony\n"
        "method: ties\nweight: 1\ndensity: 3e-1\nexclude: ['.*classifier.*']\nmemory: 0.5 gb\nworkers: 3\n"
    )
    config = MergeConfig.from_yaml(path)
    assert list(config.tasks) == ["emotion", "irony"]
    assert (config.arguments, config.with_masks) == ({"weight": 1.0, "density": 0.3}, False)
    assert (config.memory_bytes, config.shard_bytes) == (500_000_000, 5_000_000_000)
    path.write_text(yaml.safe_dump(config.to_dict()))
    assert MergeConfig.from_yaml(path) == config == MergeConfig.from_dict(config.to_dict()) == load_config(path)
    assert load_config(config) is config and load_config(config.to_dict()) == config


@pytest.mark.parametrize(
    ("options", "masks", "arguments"),
    [
        ({}, True, {"tie": "zero"}),
        ({"method": "elect", "tie": "negative"}, False, {"tie": "negative"}),
        ({"method": "task_arithmetic"}, False, {"weight": 0.3}),
        ({"method": "task_arithmetic", "weight": 0.5, "masks": True}, True, {"weight": 0.5}),
        ({"method": "task_arithmetic", "options": {"weight": 0.5}}, False, {"weight": 0.5}),
        ({"method": "given", "merged": "org/merged"}, True, {}),
        ({"method": "average", "weight": None}, False, {"weight": 1.0, "normalize": True}),
    ],
)
def test_masks_and_options_follow_from_the_method(options, masks, arguments):
    config = MergeConfig.from_dict(BASE | options)
    assert (config.with_masks, config.arguments) == (masks, arguments)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"weigth": 1}, "unknown key 'weigth'. Did you mean 'weight'"),
    "unknown method": ({"method": "emrr"}, "method must be one of 'emr', 'elect'"),
    "unknown rescale": ({"rescale": "l1"}, "Field 'rescale' expected one of"),
    "type": ({"include_base": "perhaps"}, "include_base"),
    "options that are none": ({"options": 5, "tie": "zero"}, "Field 'options' expected a dict, got int"),
    "an option that is a list": ({"options": {"density": [1]}}, "density does not go with method 'emr'"),
    "more memory than there are numbers": ({"memory": "9" * 400 + "GB"}, "memory must be a number and a unit"),
    "tasks as a list": ({"tasks": ["a"]}, "tasks"),
    "a name that is no text": ({"tasks": {1: "org/a"}}, "tasks"),
    "no tasks": ({"tasks": {}}, "tasks is empty"),
    "no base": ({"base": " "}, "base is empty"),
    "a task without a source": ({"tasks": {"a": ""}}, "task 'a' has no source"),
    "names that differ in capitals": ({"tasks": {"a": "x", "A": "y"}}, "differ only in upper and lower case"),
    "given without model": ({"method": "given"}, "needs `merged`"),
    "weight that is no number": ({"method": "ties", "weight": ["x"]}, "weight must be finite; got"),
    "infinite weight": ({"method": "ties", "weight": "inf"}, "weight must be finite"),
    "density of nothing": ({"method": "ties", "density": 0.0}, r"density must be in \(0, 1\]"),
    "drop of all": ({"drop": 1.0}, r"drop must be in \[0, 1\)"),
    "given without masks": ({"method": "given", "merged": "x", "masks": False}, "would copy `merged`"),
    "rescale without masks": ({"method": "ties", "rescale": "l2"}, "rescale does not go with method 'ties'"),
    "drop of deltas": ({"method": "onebit", "drop": 0.5}, "drop does not go with method 'onebit'"),
    "unknown option": ({"options": {"weigth": 1}}, "no method has it"),
    "emr without masks": ({"masks": False}, "masks: false does not go with method 'emr'"),
    "rescale of deltas": ({"method": "onebit", "rescale": "official"}, "each tensor has its own scale"),
    "expression": ({"exclude": ["("]}, "not a valid regular expression"),
    "size": ({"memory": "lots"}, "memory must be a number and a unit"),
    "little memory": ({"memory": "10KB"}, "memory must be at least 1MB"),
    "a device of another kind": ({"device": "tpu"}, "device must be cpu, cuda or cuda:N; got 'tpu'"),
    "a device for a method of the CPU": (
        {"method": "ties", "device": "cuda"},
        "device does not go with method 'ties'",
    ),
    "no workers": ({"workers": 0}, "workers must be a whole number of at least 1"),
    "seed": ({"seed": -1}, "seed must be 0 or more"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_with_what_is_allowed(case):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        MergeConfig.from_dict(BASE | options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: a\nbase: b\ntasks: {x: y}\n", "repeated key.*base"),
        ("base: a\n", "missing key.*tasks"),
        ("- base\n", "must hold `key: value` lines"),
        ("base: [a\n", "not usable YAML"),
        ("base: !!python/object/apply:os.getcwd []\ntasks: {x: y}\n", "not usable YAML"),
    ],
)
def test_bad_yaml_is_refused_with_the_name_of_the_file(tmp_path, text, message):
    path = tmp_path / "merge.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"(?s)merge.yaml.*{message}"):
        load_config(str(path))


def test_a_missing_file_and_other_types_are_refused():
    with refused(FileNotFoundError, "nowhere.yaml"):
        load_config(Path("nowhere.yaml"))
    with refused(TypeError, "MergeConfig", "YAML"):
        load_config(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["..", "a/b", "a\\b", "", "a\n", "x" * 65, "ä", "base", "merged", "C:"])
def test_names_that_are_no_folders_of_their_own_are_refused(name):
    with refused(SettingsError, "task", "name"):
        MergeConfig.from_dict(BASE | {"tasks": {name: "org/a"}})


@given(st.text(st.sampled_from(string.printable + "é中\x00"), max_size=70))
def test_every_name_that_is_taken_stays_in_its_folder(name):
    try:
        MergeConfig.from_dict(BASE | {"tasks": {name: "org/a"}})
    except ValueError:
        return
    folder = Path("/merged/tasks")
    assert Path(folder, name).parent == folder and Path(folder, name).resolve().parent == folder.resolve()
    assert 1 <= len(name) <= 64
