"""Fixtures of the tests of EMR-Merging."""

from collections.abc import Iterator

import pytest

from hf_ext.emr import arithmetic
from hf_ext.emr.arithmetic import compiled_kernels


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test on the compiled kernels and on plain torch."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setenv("HF_EXT_NO_NUMBA", "1")
            compiled_kernels.cache_clear()
            assert arithmetic.find_kernels("cpu").run_block is arithmetic.run_block
        elif arithmetic.find_kernels("cpu").run_files is None:
            pytest.skip("numba is not installed, or not wanted")
        yield request.param
    compiled_kernels.cache_clear()
