"""The parts of the style contract (CONTRIBUTING.md) that a machine can check."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import requires
from pathlib import Path

import pytest

from hf_ext.hub.load_check import shipped_files

ROOT = Path(__file__).resolve().parents[1]
CODE = sorted(
    path for folder in ("hf_ext", "pipelines", "model_cards", "examples") for path in (ROOT / folder).rglob("*.py")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))

SHIPPED = sorted(
    [path for room in (ROOT / "hf_ext").iterdir() for path in shipped_files(room)]
    + [path for path in (ROOT / "pipelines").glob("*/*.py") if path.name.startswith(("pipeline", "transformer_"))]
)


def line_limit(path: Path) -> int:
    """500 lines, look for a seam from 400 on; a model 600; the self-contained file of three pipelines 1,050."""
    if path.is_relative_to(ROOT / "pipelines") and path.name.startswith(("pipeline", "transformer_")):
        return 1050
    # Who trusts a checkpoint reads few files about whole subjects; the gradients of one operator are one subject too.
    if path.parent in (ROOT / "hf_ext" / "mrconv", ROOT / "hf_ext" / "fast"):
        return 900
    return 600 if path.name.startswith("modeling_") else 500


def definitions(node: ast.AST) -> Iterator[ast.AST]:
    """A module, class or function and those within it: they stand in statements alone."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from definitions(child)


def length_to_read(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """
    Lines without the docstring. Of `__call__` the body alone: the signature of a diffusers pipeline is one line an
    option, whose number is limited below, and its loop stands in it as in all of diffusers' pipelines.
    """
    first = function.body[0]
    docstring = first if ast.get_docstring(function, clean=False) is not None else None
    documented = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
    start = first.lineno if function.name == "__call__" else function.lineno
    return (function.end_lineno or 0) - start + 1 - documented


def options(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    return [item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs) if item.arg != "self"]


def is_configuration(node: ast.ClassDef) -> bool:
    """A dataclass, or a configuration of transformers, whose annotated fields are its options."""
    marks = [ast.unparse(part) for part in (*node.decorator_list, *node.bases)]
    return any(mark.startswith("dataclass") or mark == "PreTrainedConfig" for mark in marks)


_QUESTION = re.compile(r"(What|Whether|Who|Whom|Whose|Where|How|Which|When|Why)\b")


@cache
def offences(path: Path) -> tuple[list[str], list[str]]:
    """Parts of a file that are too long or have too many options, and docstrings that begin with a question."""
    name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    sizes, questions = [], []
    if len(text.splitlines()) > line_limit(path):
        sizes.append(f"{name} is longer than {line_limit(path)} lines: split it by role")
    for node in definitions(ast.parse(text)):
        if _QUESTION.match(ast.get_docstring(node) or ""):
            questions.append(f"{name}: {getattr(node, 'name', 'module')}")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if length_to_read(node) > 60:
                sizes.append(f"{name}: {node.name} is longer than 60 lines")
            # A command of the command line takes its options as parameters, as does the call of a diffusers pipeline.
            limit = {"__init__": 20, "__call__": 30}.get(node.name, 25)
            if len(options(node)) > limit:
                sizes.append(f"{name}: {node.name} takes more than {limit} options")
        if isinstance(node, ast.ClassDef) and is_configuration(node):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            # The keys of a run's file, which issue after issue asks for by name; everything else is a section. And of
            # a model with seven heads, as flat as transformers' own.
            limit = {"TrainingArguments": 43, "MRConvConfig": 30}.get(node.name, 25)
            if len(fields) > limit:
                sizes.append(f"{name}: {node.name} has more than {limit} fields")
    return sizes, questions


def test_modules_and_functions_are_short_and_options_few():
    offenders = [line for path in (*CODE, *TESTS) for line in offences(path)[0]]
    assert not offenders, "\n".join(offenders)


def test_docstrings_begin_with_a_noun_or_a_verb():
    own = (path for path in CODE if path.relative_to(ROOT).parts[0] in ("hf_ext", "pipelines", "examples"))
    offenders = [line for path in own for line in offences(path)[1]]
    assert not offenders, "begin with a noun or a verb, name the thing:\n" + "\n".join(offenders)


def offences_of_imports(path: Path, allowed: set[str]) -> Iterator[str]:
    """Imports of a shipped file beyond its siblings and installed libraries."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    # What is optional may be imported inside a `try`.
    optional = {inner for node in ast.walk(tree) if isinstance(node, ast.Try) for inner in ast.walk(node)}
    siblings = []
    for node in ast.walk(tree):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            siblings.append(node.module)
            if node.level > 1 or not node.module or "." in node.module:
                yield f"{where}: only `from .sibling import x`"
            elif path.with_name(f"{node.module}.py") not in SHIPPED:
                yield f"{where}: .{node.module} is no shipped sibling"
        elif isinstance(node, ast.ImportFrom | ast.Import) and node not in optional:
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [item.name for item in node.names]
            unknown = {module.split(".")[0] for module in modules} - allowed
            if unknown:
                yield f"{where}: {sorted(unknown)} are no dependencies"
    # The loaders find siblings by this expression, in comments and docstrings too: it must find the same ones.
    if sorted(re.findall(r"^\s*from\s+\.(\S+)\s+import", text, re.MULTILINE)) != sorted(siblings):
        yield f"{path.relative_to(ROOT)}: the loaders' expression finds other siblings than Python"


def test_shipped_files_import_only_siblings_and_installed_libraries():
    required = [item for item in requires("hf-ext") or [] if "extra ==" not in item]
    distributions = {re.split(r"[^\w-]", item)[0].lower().replace("-", "_") for item in required}
    # The module of Pillow has another name.
    allowed = distributions | {"PIL"} | set(sys.stdlib_module_names)
    offenders = [line for path in SHIPPED for line in offences_of_imports(path, allowed)]
    assert SHIPPED and not offenders, "\n".join(offenders)


# Files and lines that somebody must trust who loads a checkpoint's code.
WHAT_TRAVELS = {"semanir": (5, 1670), "mrconv": (12, 3345), "disentangled_dit": (2, 1690)}


def test_little_code_travels():
    offenders = []
    for room, (most_files, most_lines) in WHAT_TRAVELS.items():
        files = [path for path in SHIPPED if path.parent.name == room]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        if not files or len(files) > most_files or lines > most_lines:
            offenders.append(f"{len(files)} files of {lines} lines travel from {room}")
    assert not offenders, offenders


def public_functions(module) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(value)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def test_each_fast_operation_has_a_reference_of_the_same_name_and_signature():
    """A pipeline has none: its reference is a whole network, compared in the tests of that pipeline."""
    offenders, modules = [], sorted((ROOT / "hf_ext").glob("*/ops*.py"))
    for path in modules:
        room = path.parent.name
        expected = public_functions(importlib.import_module(f"tests.{room}.reference_ops"))
        operations = importlib.import_module(f"hf_ext.{room}.{path.stem}")
        # An operation may be written in a sibling and offered here.
        found = {item: inspect.signature(getattr(operations, item)) for item in expected}
        if not expected or not public_functions(operations).keys() <= expected.keys() or found != expected:
            offenders.append(str(path))
    assert modules and not offenders, offenders


def project_files() -> list[Path]:
    """Files that git tracks, or would if they were added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    # A file that is tracked but deleted in the working tree is listed too.
    return [path for path in paths if path.is_file()]


# Written so that they do not find themselves.
FORBIDDEN = {
    "a path of somebody's machine": r"(?<![\w./~-])/(?:wor[k]|hom[e]|roo[t]|User[s]|op[t])/",
    "a package index": r"pyp[i]\.org|pythonhoste[d]|download\.pytorc[h]|--(?:extra-)?inde[x]-url|--find-link[s]",
}


def test_no_file_names_a_machine_or_an_index():
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            # Pictures and the like.
            continue
        for what, pattern in FORBIDDEN.items():
            found += [f"{path.relative_to(ROOT)}: {what}: {match[0]}" for match in re.finditer(pattern, text)]
    assert not found, "\n".join(found)
