"""Fixtures of the tests of EMR-Merging."""

import pytest

from hf_ext.emr import arithmetic


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on the compiled kernels and on plain torch."""
    if request.param == "torch":
        monkeypatch.delitem(arithmetic.KERNELS, "cpu")
    elif arithmetic.find_kernels("cpu").run_files is None:
        pytest.skip("numba is not installed, or not wanted")
    return request.param
