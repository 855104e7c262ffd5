"""Pictures are drawn wherever a command is started from."""

import pytest

from tests.kit.hub import run_python


@pytest.mark.slow
def test_a_notebook_of_another_environment_names_a_backend_that_is_not_here(tmp_path):
    told = run_python(
        """
        import os
        os.environ["MPLBACKEND"] = "module://backend_of_a_notebook.inline"
        from hf_ext.figures import new_figure, picture_of
        print(picture_of(new_figure(2, 1)).size)
        """,
        "http://127.0.0.1:9",
        tmp_path,
    )
    assert "(200, 100)" in told
