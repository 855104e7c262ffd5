"""The loss curve of a run as a picture."""

from typing import Any

from hf_ext.files import whole_file
from hf_ext.training.state import RunFolder


def plot_curves(run: RunFolder) -> None:
    """Draws `curves.png` from `metrics.jsonl`: the training loss, and one panel for each evaluation metric."""
    # Imported here: matplotlib takes half a second, and only the main process draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = run.read_metrics()
    names = ["loss", *sorted({name for row in rows for name in row if name.startswith("eval_")})]
    figure = Figure(figsize=(5 * len(names), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        points: list[dict[str, Any]] = [row for row in rows if name in row]
        steps, values = [row["step"] for row in points], [row[name] for row in points]
        axis.plot(steps, values, marker="" if name == "loss" else "o", color="tab:blue")
        axis.set(xlabel="step", title=name)
        axis.grid(alpha=0.3)
    with whole_file(run.path / "curves.png") as file:
        figure.savefig(file, format="png", dpi=110)
