"""Fixtures of the tests of EMR-Merging."""

import pytest

from hf_ext.emr import ops_emr


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on the compiled kernels and on plain torch."""
    if request.param == "torch":
        monkeypatch.setattr(ops_emr, "compiled", lambda: None)
    elif ops_emr.compiled() is None:
        pytest.skip("numba is not installed, or not wanted")
    return request.param
