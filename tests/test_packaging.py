"""Installations: the package list, the contents of wheel, sdist and editable installs, the public names."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import hf_ext
from hf_ext.extras import EXTRAS, check_installed, explain_missing, import_extra
from hf_ext_cli.training import list_recipes
from tests.kit import warm_python
from tests.kit.hub import run_python

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RELEASED = [path.parent.name for path in ROOT.glob("model_cards/released/*/training.json")]
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]


def folder_of(package: str) -> Path:
    """The folder of a package in the repository, by the longest mapped prefix of its name."""
    prefix = package
    while prefix not in FOLDERS:
        prefix = prefix.rpartition(".")[0]
    return ROOT / FOLDERS[prefix] / package.removeprefix(prefix).lstrip(".").replace(".", "/")


def files_of(package: str) -> set[str]:
    """Paths in the wheel that a package must have."""
    folder = folder_of(package)
    names = [path.name for pattern in ("*.py", "*.pyi") for path in folder.glob(pattern)]
    if package == "hf_ext.model_cards":
        released = [path for path in (folder / "released").rglob("*") if path.is_file()]
        names += [path.relative_to(folder).as_posix() for path in (*folder.glob("*.md"), *released)]
    return {f"{package.replace('.', '/')}/{name}" for name in names}


def test_the_package_list_equals_the_disk_and_public_names_are_few():
    # Sub-packages of `hf_ext` on disk are in the list under that name, but for the one that is installed as a sibling.
    on_disk = {"hf_ext.model_cards", "hf_ext_cli"}
    for name, folder in (("hf_ext", ROOT / "hf_ext"), ("hf_ext.pipelines", ROOT / "pipelines")):
        places = [path.parent.relative_to(folder).parts for path in folder.rglob("__init__.py")]
        on_disk |= {".".join((name, *parts)) for parts in places}
    assert sorted(PACKAGES) == sorted(on_disk - {"hf_ext.cli"})
    listed = {folder_of(package) for package in PACKAGES}
    files = [path for folder in ("hf_ext", "pipelines", "model_cards") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in files if path.parent not in listed] == []
    # Configuration, heads (seven of MRConv), and processors of every method, and what merges, stages and pushes.
    assert 1 <= len(hf_ext.__all__) <= 29 and hf_ext.__version__ == PROJECT["project"]["version"]


def test_torchvision_is_not_required():
    project = PROJECT["project"]
    requirements = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    assert not [item for item in requirements if item.startswith("torchvision")]
    assert "torchvision" not in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    importing = [path for package in PACKAGES for path in folder_of(package).glob("*.py")]
    assert [path for path in importing if "import torchvision" in path.read_text(encoding="utf-8")] == []


PUBLIC = [name for name in PACKAGES if "__all__" in (folder_of(name) / "__init__.py").read_text(encoding="utf-8")]


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_sorted_and_importable(package):
    module = importlib.import_module(package)
    # The order of ruff's RUF022: constants, then classes, then the rest.
    kinds = [(not name.isupper(), not name[:1].isupper(), name) for name in module.__all__]
    assert kinds == sorted(kinds) and len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        getattr(module, name)


def test_the_command_line_imports_neither_models_nor_libraries(tmp_path):
    # Help asks every command for its text, so every module of the command line is imported.
    program = """
import sys
from hf_ext_cli.main import main
try:
    main(["--help"])
except SystemExit as done:
    assert done.code == 0
heavy = {"hf_ext.mrconv", "hf_ext.semanir", "torch", "transformers", "diffusers", "datasets"}
heavy |= {"huggingface_hub", "numpy", "httpx2"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout


@pytest.mark.slow
def test_the_installed_modules_are_importable_outside_the_repository_and_trainings_without_diffusers(tmp_path):
    program = """
import sys
import hf_ext
import hf_ext.tasks.restoration, hf_ext.tasks.signals, hf_ext.training.loop
print(sorted({"diffusers", "evaluate", "matplotlib", "torchvision"} & set(sys.modules)))
import hf_ext.hub, hf_ext.model_cards, hf_ext.pipelines, hf_ext.training, hf_ext_cli.main
"""
    done = warm_python.run([sys.executable, "-c", program], env=os.environ, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "[]\n", done.stderr


def copy_or_touch(source: str, target: str) -> object:
    """Copies a file; of weights and pictures, which take seconds to pack, only the name."""
    is_large = source.endswith((".safetensors", ".png"))
    return Path(target).touch() if is_large else shutil.copy2(source, target)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> tuple[Path, Path]:
    """A wheel and an sdist, built from a copy without build isolation: nothing is downloaded, the tree stays clean."""
    source = tmp_path_factory.mktemp("source")
    for name in ("hf_ext", "pipelines", "model_cards"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored, copy_function=copy_or_touch)
    shutil.copytree(ROOT / "examples", source / "examples", ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    # The sdist, and the wheel from the sdist: what the sdist lacks, the wheel lacks too.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_has_every_module_the_templates_and_the_licence(distributions):
    with zipfile.ZipFile(distributions[0]) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
        scripts = archive.read(next(name for name in names if name.endswith(".dist-info/entry_points.txt"))).decode()
    recipes = {f"hf_ext/recipes/{path.parent.name}/{path.name}" for path in ROOT.glob("examples/*/*.yaml")}
    recipes = {name for name in recipes if not re.search("/accelerate/|/benchmarks/|/study", name)}
    assert {f"hf_ext/recipes/{recipe.name}.yaml" for recipe in list_recipes()} <= recipes
    others = {"hf_ext/py.typed", "hf_ext/app_digits.flac", "hf_ext/app_scene.png"}
    expected = set().union(*(files_of(package) for package in PACKAGES)) | others | recipes
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.startswith("hf_ext/model_cards/") and name.endswith(".md") for name in expected)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert f"License-Expression: {PROJECT['project']['license']}" in metadata
    assert len([name for name in names if "/licenses/model_cards/released/" in name]) == len(RELEASED)
    assert "hf-ext = hf_ext_cli.main:main" in scripts


def test_the_sdist_has_what_builds_the_wheel(distributions):
    with tarfile.open(distributions[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in folder_of(package).glob("*.py")}
    sources |= {str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*/*.yaml")}
    assert sources | {"pyproject.toml", "setup.py", "README.md", "LICENSE", "hf_ext/py.typed"} <= names


@pytest.mark.slow
def test_a_wheel_without_models_is_code_under_the_licence_of_the_code(distributions, tmp_path):
    # From the sdist that has them, so that nothing of them may come along.
    with tarfile.open(distributions[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    # An earlier build in the same folder had models, and a module that is gone.
    for stale in ("model_cards/released/x/model.safetensors", "gone.py"):
        (source / "build/lib/hf_ext" / stale).parent.mkdir(parents=True, exist_ok=True)
        (source / "build/lib/hf_ext" / stale).touch()
    wheels, sources = [], []
    for out in ("one", "two"):
        # Another machine has checked it out at another time.
        os.utime(source / "README.md", (1e9, 1e9 + len(wheels)))
        for path in (each for each in source.rglob("*") if each.is_file()):
            path.chmod(0o600 if wheels else 0o664)
        command = [sys.executable, "-m", "build", "-nsw", "--outdir", str(tmp_path / out), str(source)]
        variables = {"HF_EXT_WITHOUT_MODELS": "1", "SOURCE_DATE_EPOCH": "1700000000"}
        umask = {"umask": 0o077 if wheels else 0o022} if os.name == "posix" else {}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, **umask)
        assert done.returncode == 0, done.stdout + done.stderr
        wheels += (tmp_path / out).glob("*.whl")
        sources += (tmp_path / out).glob("*.tar.gz")
    with zipfile.ZipFile(wheels[0]) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    assert not [name for name in names if "/released/" in name and not name.startswith("hf_ext/recipes/")]
    assert "hf_ext/model_cards/semanir.md" in names and "hf_ext/gone.py" not in names
    assert "\nLicense-Expression: Apache-2.0\n" in metadata and metadata.count("License-File:") == 1
    assert wheels[0].stat().st_size < 2e6
    # Of one source and one time both are the same to the byte.
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    assert sources[0].read_bytes() == sources[1].read_bytes()
    with tarfile.open(sources[0]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        archive.extractall(tmp_path / "alone", filter="data")
    assert not [name for name in names if name.startswith("model_cards/released") or name.endswith(".safetensors")]
    assert "examples/released/cifar10.yaml" in names and "setup.py" in names
    (source,) = (tmp_path / "alone").iterdir()
    assert "\nLicense-Expression: Apache-2.0\n" in (source / "PKG-INFO").read_text(encoding="utf-8")
    # Sources without models say so by themselves.
    command[3:] = ["-nw", "--outdir", str(tmp_path / "three"), str(source)]
    variables.pop("HF_EXT_WITHOUT_MODELS")
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert next((tmp_path / "three").glob("*.whl")).read_bytes() == wheels[0].read_bytes()


def test_workflows_run_what_was_read():
    """A tag or a branch can be moved to other code, a commit cannot."""
    files = list((ROOT / ".github" / "workflows").glob("*.yml"))
    used = [line for path in files for line in re.findall(r"uses: .*", path.read_text(encoding="utf-8"))]
    assert len(used) >= 10
    assert [line for line in used if not re.fullmatch(r"uses: [\w./-]+@[0-9a-f]{40} # v[\d.]+", line)] == []
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^FROM (.*)", image, re.M) == ["${BASE}@${DIGEST}"]
    assert re.search(r"^ARG DIGEST=sha256:[0-9a-f]{64}$", image, re.M)


@pytest.mark.slow
def test_the_wheel_works_where_the_repository_is_not(distributions):
    command = [sys.executable, str(ROOT / "tests" / "smoke_wheel.py"), str(distributions[0])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# The distribution of each module whose name is another.
DISTRIBUTIONS = {"pillow_heif": "pillow-heif"}
# Modules of the extra `app`, which stays out of `all`: gradio wants an older Pillow.
APART = {"gradio"}
WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from hf_ext_cli.main import main; main()"


def names_of(requirements: list[str]) -> set[str]:
    return {Requirement(line).name for line in requirements}


@pytest.mark.parametrize(("module", "extra"), EXTRAS.items())
def test_the_extra_of_a_module_brings_it_and_the_plain_package_does_not(module, extra):
    extras = PROJECT["project"]["optional-dependencies"]
    name = DISTRIBUTIONS.get(module, module)
    assert name in names_of(extras[extra]) and name not in names_of(PROJECT["project"]["dependencies"])
    assert (extra in {part for line in extras["all"] for part in Requirement(line).extras}) == (module not in APART)


def test_what_is_installed_is_imported_and_what_is_missing_explained():
    check_installed(*(EXTRAS.keys() - APART))
    assert import_extra("matplotlib").__name__ == "matplotlib"
    assert explain_missing("matplotlib.figure") and explain_missing("os") is None and explain_missing(None) is None


SERVE, TRAIN = ["hub", "serve", "--root", "hub"], ["train", "run.yaml"]
LACKS = [("starlette", SERVE), ("uvicorn", SERVE), ("gradio", ["app"])]
LACKS += [pytest.param(name, TRAIN, marks=pytest.mark.slow) for name in ("tensorboard", "matplotlib")]


@pytest.mark.parametrize(("module", "words"), LACKS)
def test_a_command_without_its_extra_says_what_to_install(module, words, tmp_path):
    head = "method: mrconv-text\noutput_dir: out\nmax_steps: 1\ndata: {train: {path: data.jsonl}}\n"
    (tmp_path / "run.yaml").write_text(f"{head}model: {{hidden_size: 8, num_hidden_layers: 1}}\n")
    (tmp_path / "data.jsonl").write_text('{"text": "a", "label": 0}\n')
    command = [sys.executable, "-c", WITHOUT, module, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
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
    wanted = [Requirement(line) for line in PROJECT["project"]["dependencies"] if not line.startswith("torch")]
    assert done.returncode == 0 and names_of(PROJECT["project"]["dependencies"]) - pinned.keys() == {"torch"}
    for requirement in wanted:
        (pin,) = pinned[requirement.name]
        assert pin.operator == "==" and f">={pin.version}" in str(requirement.specifier)
