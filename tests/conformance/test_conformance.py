"""transformers' own test suite against our classes (slow: it downloads the suite; `make conformance`)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .download import transformers_tests

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.parametrize("method", ["semanir"])
def test_our_classes_pass_the_tests_of_transformers(method):
    tree = transformers_tests()
    target = tree / "tests" / "models" / method / f"test_{method}.py"
    target.parent.mkdir(exist_ok=True)
    (target.parent / "__init__.py").touch()
    shutil.copyfile(HERE / f"suite_{method}.py", target)
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", str(target)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    # All of it skipped would be a success for pytest.
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 100, done.stdout[-2000:]
