"""A test that hangs is ended by a limit of its own, and slow tests have a longer one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SLOW_LIMIT

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import time
import pytest

def test_that_hangs():
    while True:
        time.sleep(0.1)

@pytest.mark.slow
def test_that_takes_longer():
    time.sleep(2)

@pytest.mark.slow
@pytest.mark.timeout(1)
def test_with_a_limit_of_its_own():
    time.sleep(30)
"""


@pytest.mark.slow
def test_hanging_tests_are_ended(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_collection_modifyitems\n")
    (tmp_path / "test_them.py").write_text(TESTS)
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-m", "slow or not slow", "-rA"]
    command = [sys.executable, "-m", "pytest", *options, "-o", "timeout=1", "-n", "0", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "1 passed" in done.stdout and "2 failed" in done.stdout, done.stdout + done.stderr
    assert "PASSED" in done.stdout and "test_that_takes_longer" in done.stdout.split("PASSED", 1)[1].splitlines()[0]
    assert done.stdout.count("Timeout (>1.0s)") >= 2


def test_the_limits_are_set(pytestconfig: pytest.Config):
    assert float(pytestconfig.getini("timeout")) == 300 < SLOW_LIMIT
    # The last resort comes after both.
    assert float(pytestconfig.getini("faulthandler_timeout")) > SLOW_LIMIT
    assert pytestconfig.getini("faulthandler_exit_on_timeout")
