"""The study of MRConv on real data: spoken digits, sequential CIFAR-10, ListOps, ablations, a language model.

python examples/mrconv/study.py FSDD CIFAR10 WORK
Each step leaves its result in WORK/results and is skipped when it is there with the same settings, so an interrupted
study continues. At the end examples/mrconv/results/study.json, the curves and the tables in README.md are written.
MRCONV_BUDGET_SCALE=0.01 makes every run a hundredth as long, to try the machinery; its results stay in WORK/report.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from measuring import compare_generation, decimated, merged_times
from peers import PEERS, equal_kernel_size, equal_sizes, make_task, trained_parameters, use_peer
from runs import EXAMPLES, LISTOPS, prepare, run_arguments, train
from tables import blocks, draw_curves

from hf_ext.training import build_task

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import Steps, machine, measure_speed, prepare_process, write_blocks  # noqa: E402  found through the line above

SEED = 0
# Seconds of one core. A comparison gives every model the same seconds, and once the same samples: as many as the
# Fourier MRConv does in these seconds, or what fits into the longest.
HEADLINE_SECONDS, UNSEEN_SECONDS, LM_SECONDS = 1500, 420, 240
COMPARISON_SECONDS, LONGEST_SECONDS, ABLATION_SECONDS = 75, 270, 50
# A kernel whose budget has as many steps as the first's, within this share, is trained once for both.
ABOUT_AS_FAST = 0.25
KERNELS = ("fourier", "dilated", "sparse", "fourier_sparse", "implicit")
MODELS = (*KERNELS, *PEERS)
SMALL = {"model.hidden_size": 48, "model.num_hidden_layers": 3}
SHORT = {"eval_steps": 1000000, "save_steps": 200, "save_total_limit": 1, "report_to": "none", "logging_steps": 5}


class Comparison(NamedTuple):
    """One data set of the comparisons: its recipe, data, and how many test examples are scored."""

    recipe: str
    data: str
    test: int
    batch: int
    values: dict[str, Any]


COMPARISONS = {
    # The first quarter of a second, which holds most of a digit: whole recordings leave too few steps to compare.
    "digits": Comparison("fsdd", "fsdd", 300, 8, {"model.kernel_size": 32, "task.max_length": 2048}),
    "scifar-grey": Comparison("image", "cifar10", 500, 16, {"model.kernel_size": 32, "model.dropout": 0.0}),
    "scifar-colour": Comparison("scifar", "cifar10", 500, 16, {"model.kernel_size": 32, "model.dropout": 0.0}),
    "listops": Comparison("listops", "listops", 500, 8, {"model.bidirectional": True, "model.prenorm": True}),
}
# On grey sequential CIFAR-10, each against the first.
ABLATIONS: dict[str, dict[str, Any]] = {
    "multi-resolution, Fourier, l0 = 32, batch norm, depth 3": {},
    "single resolution": {"model.num_branches": 1},
    **{f"kernel {kernel}": {"model.kernel_type": kernel} for kernel in KERNELS[1:]},
    "l0 = 4": {"model.kernel_size": 4},
    "l0 = 128": {"model.kernel_size": 128},
    "branches layer-normalised": {"model.branch_norm": "layer"},
    "kernels normalised, no statistics": {"model.branch_norm": "kernel"},
    "blocks layer-normalised": {"model.norm": "layer"},
    "depth 1": {"model.num_hidden_layers": 1},
    "depth 6": {"model.num_hidden_layers": 6},
}


class Study(Steps):
    """
    Steps with their results in files.

    Args:
        work (`Path`): Everything but the final tables is written here.
        data (`dict[str, Path]`): Folders of the data.
        scale (`float`): Share of every budget.
    """

    def __init__(self, work: Path, data: dict[str, Path], scale: float):
        super().__init__(work, scale)
        self.data = data

    def sources(self, data: str, test: int) -> dict[str, Any]:
        """The `data` section: all training examples and the first test examples."""
        folder, test = str(self.data[data]), max(8, int(min(1.0, 10 * self.scale) * test))
        return {"data": {"train": {"path": folder}, "eval": {"path": folder, "split": f"test[:{test}]"}}}

    def speed(self, name: str, recipe: str, values: dict[str, Any], peer: str | None = None) -> dict[str, Any]:
        """Seconds of a training step on this machine, and the parameters."""

        def compute() -> dict[str, Any]:
            arguments = run_arguments(recipe, values)
            return measure_speed(make_task(arguments, peer), arguments, 7 if self.scale >= 0.1 else 3)

        return self.step(f"speed-{name}", {"recipe": recipe, "values": values, "peer": peer}, compute)

    def run(
        self, name: str, recipe: str, values: dict[str, Any], steps: int, peer: str | None = None
    ) -> dict[str, Any]:
        """A training of so many steps, its warm-up a tenth of them."""
        values = {**SHORT, **values, "seed": SEED, "max_steps": steps, "warmup_steps": steps // 10}
        settings = {"recipe": recipe, "values": values, "peer": peer}
        return self.step(f"run-{name}", settings, lambda: train(recipe, self.work / "runs" / name, values, peer))


def comparison_values(study: Study, name: str, model: str) -> tuple[dict[str, Any], str | None]:
    """Settings of a model in a comparison, as many parameters as the Fourier MRConv; its name if it is a peer."""
    entry = COMPARISONS[name]
    # Peers share the task's fields, not the model's.
    task_values = {name: value for name, value in entry.values.items() if name.startswith("task.")}
    common = {**study.sources(entry.data, entry.test), **task_values, "per_device_train_batch_size": entry.batch}
    values = {**common, **SMALL, **entry.values, "model.kernel_type": "fourier", "learning_rate": 0.004}
    if model == "fourier":
        return values, None
    arguments = run_arguments(entry.recipe, values)
    task = build_task(arguments)
    parameters = trained_parameters(task.build_model(arguments.model, None))
    if model in KERNELS:
        size = equal_kernel_size(task, {**arguments.model, "kernel_type": model}, parameters)
        return {**values, "model.kernel_type": model, "model.kernel_size": size}, None
    use_peer(task, model)
    section = equal_sizes(task, model, parameters, SMALL["model.num_hidden_layers"])
    # 0.004 suits MRConv; attention and Mamba 2 are usually trained at a quarter of that.
    return {**common, "model": section, "learning_rate": 0.001}, model


def compare(study: Study, name: str) -> dict[str, Any]:
    """Every model for the same seconds and for the same samples; once where a kernel is about as fast as the first."""
    entry, rows = COMPARISONS[name], {}
    settings = {model: comparison_values(study, name, model) for model in MODELS}
    speeds = {model: study.speed(f"{name}-{model}", entry.recipe, *settings[model]) for model in MODELS}
    same = study.steps(COMPARISON_SECONDS, speeds["fourier"])
    for model in MODELS:
        values, peer = settings[model]
        timed = study.steps(COMPARISON_SECONDS, speeds[model])
        counted = min(same, study.steps(LONGEST_SECONDS, speeds[model]))
        if peer is None and abs(timed / counted - 1) < ABOUT_AS_FAST:
            timed = counted
        row = {
            "parameters": speeds[model]["parameters"],
            "time": study.run(f"{name}-{model}-time", entry.recipe, values, timed, peer),
        }
        # A budget of as many steps is the same run.
        row["samples"] = row["time"]
        if counted != timed:
            row["samples"] = study.run(f"{name}-{model}-samples", entry.recipe, values, counted, peer)
        if name == "digits" and peer is None:
            row["decimated"] = study.step(
                f"decimated-{model}",
                {"steps": timed, "values": values},
                functools.partial(decimated, study.snapshot(f"digits-{model}-time"), values),
            )
        rows[model] = row
    return rows


def ablate(study: Study) -> dict[str, Any]:
    """Parts of MRConv changed one at a time, for the samples that the first does in its budget."""
    values, _ = comparison_values(study, "scifar-grey", "fourier")
    speed = study.speed("ablation", "image", values)
    steps = study.steps(ABLATION_SECONDS, speed)
    rows = {}
    for index, (label, change) in enumerate(ABLATIONS.items()):
        changed = {**values, **change}
        parameters = study.speed(f"ablation-{index}", "image", changed)["parameters"]
        rows[label] = {**study.run(f"ablation-{index}", "image", changed, steps), "parameters": parameters}
    return rows


def headline(study: Study) -> dict[str, Any]:
    """Spoken digits: both splits at 8 kHz, the same models at 4 kHz, and merged."""
    result = {}
    for name, seconds, test in (("fsdd", HEADLINE_SECONDS, 300), ("unseen", UNSEEN_SECONDS, 500)):
        values = study.sources(name, test)
        speed = study.speed(name, "fsdd", values)
        row = study.run(name, "fsdd", values, study.steps(seconds, speed))
        settings = {"steps": row["steps"], "values": values}
        arguments = study.snapshot(name), values
        row["parameters"] = speed["parameters"]
        row["decimated"] = study.step(f"decimated-{name}", settings, functools.partial(decimated, *arguments))
        row["merged"] = study.step(f"merged-{name}", settings, functools.partial(merged_times, *arguments))
        result[name] = row
    return result


def language_model(study: Study) -> dict[str, Any]:
    """Bytes of documentation: bits per byte, and texts made in three ways that must agree."""
    values = study.sources("text", 200)
    speed = study.speed("lm", "lm", values)
    row = study.run("lm", "lm", values, study.steps(LM_SECONDS, speed))
    snapshot = study.snapshot("lm")
    made = study.step("generation", {"steps": row["steps"]}, lambda: compare_generation(snapshot))
    return {**row, "parameters": speed["parameters"], "generation": made}


def main(fsdd: Path, cifar10: Path, work: Path) -> None:
    """All steps, then the tables."""
    prepare_process()
    scale = float(os.environ.get("MRCONV_BUDGET_SCALE", "1"))
    study = Study(work, prepare(fsdd, cifar10, work), scale)
    result = {
        "what": "Accuracy on test examples; one seed. The last state is scored, nothing was chosen on test data.",
        **machine("hf-ext", "torch", "transformers", "accelerate"),
        "seed": SEED,
        "listops": LISTOPS,
        "headline": headline(study),
        "comparisons": {name: compare(study, name) for name in COMPARISONS},
        "ablation": ablate(study),
        "language_model": language_model(study),
    }
    result["seconds"] = study.seconds()
    report = study.write_report(result, EXAMPLES / "results")
    draw_curves(result, report / "curves.png")
    if scale == 1:
        write_blocks(blocks(result), EXAMPLES / "README.md")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*(Path(word).resolve() for word in sys.argv[1:]))
