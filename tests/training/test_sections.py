"""What is read from the source of a method's classes is what the classes say when they are imported."""

import dataclasses
import inspect

import pytest
import torch

from hf_ext.settings import SettingsError, build, read_yaml
from hf_ext.training.launch import TASKS, find_task, read_arguments
from hf_ext.training.models import build_model
from hf_ext.training.optimizing import find_optimizer
from hf_ext.training.sections import check_optimizer, check_sections, read_class, read_options
from tests.kit.refusals import refused

from .launching import ROOT


def said(function, *arguments) -> str:
    with pytest.raises(ValueError) as error:
        function(*arguments)
    return str(error.value)


@pytest.mark.parametrize("method", TASKS)
@pytest.mark.parametrize("section", [{"hidden_sise": 3}, {"nonsense": 1}])
def test_a_wrong_key_is_said_early_in_the_words_of_the_classes(method, section):
    kind = find_task(method)
    early = said(check_sections, *TASKS[method], section, {})
    assert early == said(build, kind, section, "task")
    early = said(check_sections, *TASKS[method], {}, section)
    assert early == said(build_model, kind(), section, None)
    # The name itself is looked for in what all three sections allow.
    assert f"unknown key {next(iter(section))!r} in section 'model'" in early


@pytest.mark.parametrize(
    ("method", "task", "model"),
    [
        ("semanir", {"patch_size": "big"}, {"embed_dim": "big"}),
        ("semanir", {"gray_from": "green"}, {"depths": [1, "two"]}),
        ("mrconv-text", {"max_length": [1]}, {"norm": 3}),
        ("mrconv-images", {"label_names": "cat"}, {"hidden_sizes": 8}),
        ("disentangled-dit", {"mask_ratio": "big"}, None),
    ],
)
def test_a_wrong_type_is_said_early_in_the_words_of_the_classes(method, task, model):
    kind = find_task(method)
    assert said(check_sections, *TASKS[method], task, {}) == said(build, kind, task, "task")
    if model is not None:
        assert said(check_sections, *TASKS[method], {}, model) == said(build_model, kind(), model, None)


@pytest.mark.parametrize("method", TASKS)
def test_every_field_of_a_task_passes(method):
    task = find_task(method)()
    given = {item.name: getattr(task, item.name) for item in dataclasses.fields(task)}
    check_sections(*TASKS[method], given, {"preset": "tiny"} if task.presets else {})


def test_every_recipe_passes():
    recipes = [path for path in (ROOT / "examples").rglob("*.yaml") if read_yaml(path).get("method") in TASKS]
    assert len(recipes) > 10
    for path in recipes:
        read_arguments(path, [], output_dir="runs")


def test_arguments_of_every_optimizer_of_torch_are_found():
    names = said(find_optimizer, "?").partition("one of ")[2].partition(";")[0].split(", ")
    assert "AdamW" in names
    for name in names:
        (_, node), *_ = read_class("torch.optim", name)
        assert read_options(node) == list(inspect.signature(getattr(torch.optim, name)).parameters)
    with refused(SettingsError, "beta", "optim_args", "AdamW"):
        check_optimizer("AdamW", {"beta": 1})
    # An optimizer that does not exist is said later, with those that do.
    check_optimizer("Adamw", {"beta": 1})


def test_a_module_of_torch_is_no_optimizer():
    check_optimizer("lr_scheduler", {"a": 1})
