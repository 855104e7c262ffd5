"""Fixtures of the tests of EMR-Merging."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hf_ext.emr import ops
from hf_ext.fast.emr_operators import compiled_kernels


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test on the compiled kernels and on plain torch."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setenv("HF_EXT_NO_NUMBA", "1")
            compiled_kernels.cache_clear()
            assert ops.find_kernels("cpu").run_block is ops.run_block
        elif ops.find_kernels("cpu").run_files is None:
            pytest.skip("numba is not installed, or not wanted")
        yield request.param
    compiled_kernels.cache_clear()


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The script examples/emr/serve.py; its tests ask for fastapi first."""
    spec = importlib.util.spec_from_file_location("emr_serve_example", Path("examples/emr/serve.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
