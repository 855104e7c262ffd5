"""Extras: what a command says where the module of one is missing, and that each extra brings what it promises."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hf_ext.extras import EXTRAS, check_installed, explain_missing, import_extra
from hf_ext.mrconv import MRConvConfig, MRConvModel
from tests.kit.hub import run_python

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The distribution of each module whose name is another.
DISTRIBUTIONS = {"pillow_heif": "pillow-heif"}
# Modules of the extra `app`, which stays out of `all`: gradio wants an older Pillow.
APART = {"gradio"}
WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from hf_ext_cli.main import main; main()"


def names_of(requirements: list[str]) -> set[str]:
    return {Requirement(line).name for line in requirements}


@pytest.mark.parametrize(("module", "extra"), EXTRAS.items())
def test_the_extra_of_a_module_brings_it_and_the_plain_package_does_not(module, extra):
    extras = PROJECT["optional-dependencies"]
    name = DISTRIBUTIONS.get(module, module)
    assert name in names_of(extras[extra]) and name not in names_of(PROJECT["dependencies"])
    assert (extra in {part for line in extras["all"] for part in Requirement(line).extras}) == (module not in APART)


def test_what_is_installed_is_imported_and_what_is_missing_explained():
    check_installed(*(EXTRAS.keys() - APART))
    assert import_extra("matplotlib").__name__ == "matplotlib"
    assert explain_missing("matplotlib.figure") and explain_missing("os") is None and explain_missing(None) is None


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("starlette", ["hub", "serve", "--root", "hub"]),
        ("uvicorn", ["hub", "serve", "--root", "hub"]),
        ("gradio", ["app"]),
        pytest.param("tensorboard", ["train", "RUN"], marks=pytest.mark.slow),
        pytest.param("matplotlib", ["train", "RUN"], marks=pytest.mark.slow),
    ],
)
def test_a_command_without_its_extra_says_what_to_install(module, words, tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(
        "method: mrconv-text\noutput_dir: out\nmax_steps: 1\ndata: {train: {path: data.jsonl}}\n"
        "model: {hidden_size: 8, num_hidden_layers: 1}\n"
    )
    (tmp_path / "data.jsonl").write_text('{"text": "a", "label": 0}\n')
    MRConvModel(MRConvConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)).save_pretrained(tmp_path / "model")
    words = [{"RUN": str(run)}.get(word, word) for word in words]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, module, *words], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"needs {module}, which is not installed: pip install 'hf-ext[{EXTRAS[module]}]'" in done.stderr


@pytest.mark.slow
def test_pictures_are_drawn_where_a_notebook_names_a_backend_of_another_environment(tmp_path):
    program = """
    import os
    os.environ["MPLBACKEND"] = "module://backend_of_a_notebook.inline"
    from hf_ext.figures import new_figure, picture_of
    print(picture_of(new_figure(2, 1)).size)
    """
    assert "(200, 100)" in run_python(program, "http://127.0.0.1:9", tmp_path)


def test_the_lower_bounds_are_constraints_of_pip():
    """Requirements with which CI tries the oldest versions: each library once, at its bound."""
    script = ROOT / ".ci" / "oldest.py"
    done = subprocess.run([sys.executable, script, "torch"], capture_output=True, text=True, timeout=60)
    pinned = {Requirement(line).name: Requirement(line).specifier for line in done.stdout.splitlines()}
    wanted = [Requirement(line) for line in PROJECT["dependencies"] if not line.startswith("torch")]
    assert done.returncode == 0 and names_of(PROJECT["dependencies"]) - pinned.keys() == {"torch"}
    for requirement in wanted:
        (pin,) = pinned[requirement.name]
        assert pin.operator == "==" and f">={pin.version}" in str(requirement.specifier)
