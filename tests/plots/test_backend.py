"""Pictures are drawn wherever a command is started from."""

from tests.hub_testing import run_python


def test_a_notebook_of_another_environment_names_a_backend_that_is_not_here(tmp_path):
    told = run_python(
        """
        import os
        os.environ["MPLBACKEND"] = "module://backend_of_a_notebook.inline"
        import hf_ext.plots.curves
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        print("drawn")
        """,
        "http://127.0.0.1:9",
        tmp_path,
    )
    assert "drawn" in told
