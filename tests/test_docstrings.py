"""Public names: the page of the API lists them, and each is documented with an example that runs."""

import doctest
import inspect
import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest
from transformers import PreTrainedConfig, PreTrainedModel

import hf_ext
from hf_ext import EMRModel
from hf_ext.training.methods import TASKS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
# An entry of the page, and the members of a class that it shows.
ENTRY = re.compile(r"^\.\. auto(?:class|function):: (\S+)(?:\n   :members: *(.*))?", re.MULTILINE)
TEXT = PAGE.read_text(encoding="utf-8")
# Full names of the page, with the members that it shows of each.
PUBLIC = {
    name if name.startswith("hf_ext.") else f"hf_ext.{name}": members.replace(",", " ").split()
    for name, members in ENTRY.findall(TEXT)
}
# torch traces the model, and onnxruntime runs what was written.
EXPORT = "hf_ext.restoration.export.export_onnx"
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == EXPORT else name for name in PUBLIC]


def find(name: str):
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def test_the_page_lists_all_public_names():
    assert re.findall(r"^\.\. currentmodule:: (\S+)", TEXT, re.MULTILINE) == ["hf_ext"]
    listed = {find(name) for name in PUBLIC}
    assert {getattr(hf_ext, name) for name in hf_ext.__all__} <= listed
    # A name that the package has itself is listed by it.
    named = {name.removeprefix("hf_ext.") for name in PUBLIC if name.count(".") == 1}
    assert named <= set(hf_ext.__all__)


def test_the_options_name_every_method_and_no_class():
    text = runpy.run_path(str(PAGE.with_name("options_reference.py")))["write_reference"]()
    assert not [name for name in TASKS if f'`"{name}"`' not in text]
    classes = [name.rpartition(".")[2] for name in PUBLIC if inspect.isclass(find(name))]
    classes += ["DataArguments", "DataSource", "ParameterRule", "SourcePart"]
    assert not [name for name in classes if f"`{name}`" in text]


def arguments_of(part) -> list[str]:
    """Arguments that a caller may give by name, but for those that a base class of a library documents."""
    if not inspect.isclass(part):
        found = inspect.signature(part).parameters
    elif issubclass(part, PreTrainedConfig):
        return list(inspect.get_annotations(part))
    elif "__init__" not in vars(part) or issubclass(part, PreTrainedModel | EMRModel):
        # A model takes its configuration; the other is made by `from_pretrained`.
        return []
    else:
        found = inspect.signature(part.__init__).parameters
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, item in found.items() if item.kind not in several and name != "self"]


@pytest.mark.parametrize("name", PUBLIC)
def test_each_argument_is_documented(name):
    missing, thing = [], find(name)
    # A function, or a class and the methods that the page lists with it.
    for part in filter(callable, [thing, *(getattr(thing, member) for member in PUBLIC[name])]):
        missing += [item for item in arguments_of(part) if not re.search(rf"\b{item}\b", part.__doc__ or "")]
    assert not missing, f"{name}: {missing}"


def examples_of(name: str) -> list[doctest.DocTest]:
    """Examples in the docstring of a function, or of a class and its own methods."""
    thing = find(name)
    own = [thing, *vars(thing).values()] if inspect.isclass(thing) else [thing]
    texts = [text for part in own if (text := getattr(getattr(part, "__func__", part), "__doc__", None))]
    read = doctest.DocTestParser()
    found = [read.get_doctest(text, {"__name__": "__main__"}, name, None, 0) for text in texts if ">>>" in text]
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", NAMES)
def test_each_public_name_has_an_example_that_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if name == EXPORT:
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    tests = examples_of(name)
    assert tests, f"{name} has no example: write one into its docstring"
    for test in tests:
        said: list[str] = []
        failed, _ = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
        assert not failed, "".join(said)
        assert any(example.want for example in test.examples), f"{name}: show a result"
