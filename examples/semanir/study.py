"""The study of SemanIR on real images: denoising, other blocks, the number of keys, mixed training.

python examples/semanir/study.py DATA WORK
DATA holds the folders bsds500 (train, test), set12 and bsd68. Each step leaves its result in WORK/results and is
skipped when it is there with the same settings, so an interrupted study continues. At the end
examples/semanir/results/study.json, the curves, pictures and tables in README.md are written.
SEMANIR_BUDGET_SCALE=0.003 makes every run that much shorter, to try the machinery; its results stay in WORK/report.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from measuring import draw_pictures, input_psnr, score, sweep, total_variation
from peers import make_task
from runs import EXAMPLES, run_arguments, train
from tables import blocks, draw_curves, draw_sweep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import Steps, machine, measure_speed, prepare_process, write_blocks  # noqa: E402  found through the line above

SEED = 0
# Seconds of one core for each run. The samples of a comparison are what SemanIR does in its seconds; a peer that would
# need more than the longest gets what it does in that.
CANDIDATE_SECONDS, HEADLINE_SECONDS = 150, 1800
DENOISING_SECONDS, LONGEST_SECONDS = 100, 160
NOISE, JPEG = {"kind": "gaussian_noise", "sigma": 25}, {"kind": "jpeg", "quality": 10}
COLUMNAR = {
    "model.architecture": "columnar",
    "model.embed_dim": 48,
    "model.depths": [3, 3],
    "model.num_heads": [3, 3],
    "model.refinement_depth": 0,
}
# Networks for the headline. The one that restores validation photographs best after CANDIDATE_SECONDS is trained.
CANDIDATES: dict[str, dict[str, Any]] = {
    # Three levels of windows of 8: patches of 48 would be padded to 64. At 1e-3 the U learns nothing for 130 steps.
    "U, width 32": {"task.patch_size": 64, "learning_rate": 3.0e-4},
    "columnar, width 48, 2 x 3 layers": COLUMNAR,
    "columnar, width 32, 2 x 2 layers": {
        **COLUMNAR,
        "model.embed_dim": 32,
        "model.depths": [2, 2],
        "model.num_heads": [2, 2],
        "learning_rate": 2.0e-3,
    },
}
MODELS = ("semanir", "dense", "swin2sr")
# Pictures of Set12 to show: a house, a parrot, Barbara.
SHOWN = [1, 6, 8]


class Study(Steps):
    """
    Steps with their results in files.

    Args:
        data (`Path`): Folder of the data sets.
        work (`Path`): Everything but the final tables is written here.
        scale (`float`): Share of every budget.
    """

    def __init__(self, data: Path, work: Path, scale: float):
        super().__init__(work, scale)
        self.data = data

    def source(self, name: str, split: str | None = None) -> dict[str, Any]:
        """A data set; two images of it where the machinery is tried."""
        path = str(self.data / name)
        if split is None:
            # A folder whose files are called test001 and so on is a test split, others are a training split.
            split = datasets.get_dataset_split_names(path)[0]
        return {"path": path, "split": split if self.scale >= 0.1 else f"{split.partition('[')[0]}[:2]"}

    def values(self, test: dict[str, Any], training: str = "train+test", **changes: Any) -> dict[str, Any]:
        """Settings of a run: the 400 photographs, a test set, and what differs from the recipe."""
        train = {"path": str(self.data / "bsds500"), "split": training}
        return {"data": {"train": train, "eval": test}, "seed": SEED, **changes}

    def speed(self, name: str, values: dict[str, Any], peer: str | None = None) -> dict[str, Any]:
        """Seconds of a training step on this machine, and the parameters."""

        def compute() -> dict[str, Any]:
            arguments = run_arguments(values)
            return measure_speed(make_task(arguments, peer), arguments, 15 if self.scale >= 0.1 else 3)

        return self.step(f"speed-{name}", {"values": values, "peer": peer}, compute)

    def run(self, name: str, values: dict[str, Any], steps: int, peer: str | None = None) -> dict[str, Any]:
        """A training of so many steps, its warm-up a twentieth of them."""
        values = {**values, "max_steps": steps, "warmup_steps": steps // 20}
        settings = {"values": values, "peer": peer}
        return self.step(f"run-{name}", settings, lambda: train(self.work / "runs" / name, values, peer))


def choose(study: Study) -> dict[str, Any]:
    """Every candidate after the same seconds, on photographs that none of the tests holds; the best one's name."""
    rows = {}
    for index, (name, changes) in enumerate(CANDIDATES.items()):
        # Five of the 400 photographs are kept back here; the headline trains on all.
        values = study.values(study.source("bsds500", "test[:5]"), "train+test[5:]", **changes)
        speed = study.speed(f"candidate-{index}", values)
        row = study.run(f"candidate-{index}", values, study.steps(CANDIDATE_SECONDS, speed))
        rows[name] = {**row, **speed}
    return {"rows": rows, "chosen": max(rows, key=lambda name: rows[name]["scores"]["psnr"])}


def headline(study: Study, network: dict[str, Any]) -> dict[str, Any]:
    """Grey denoising: Set12 on the way and at the end, BSD68 at the end."""
    values = study.values(study.source("set12"), **network)
    speed = study.speed("headline", values)
    steps = study.steps(HEADLINE_SECONDS, speed)
    row = study.run("headline", {**values, "eval_steps": -(-steps // 4)}, steps)
    snapshot, test = study.snapshot("headline"), study.source("bsd68")
    bsd68 = study.step("bsd68", {"steps": steps, "values": values}, partial(score, snapshot, values, test))
    return {**row, **speed, "bsd68": bsd68}


def block_values(values: dict[str, Any], model: str) -> tuple[dict[str, Any], str | None]:
    """Settings of a model beside SemanIR; the name of a peer."""
    if model != "dense":
        return values, None if model == "semanir" else model
    window = run_arguments(values).model["window_size"]
    return {**values, "model.top_k": window**2}, None


def compare(study: Study, name: str, values: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The same network with three kinds of blocks: for the same seconds and for the same samples."""
    settings = {model: block_values(values, model) for model in MODELS}
    speeds = {model: study.speed(f"{name}-{model}", *settings[model]) for model in MODELS}
    same, rows = study.steps(seconds, speeds["semanir"]), {}
    for model in MODELS:
        timed = study.steps(seconds, speeds[model])
        counted = min(same, study.steps(LONGEST_SECONDS, speeds[model]))
        row = {
            **speeds[model],
            "time": study.run(f"{name}-{model}-time", settings[model][0], timed, settings[model][1]),
        }
        # A budget of as many steps is the same run.
        row["samples"] = row["time"]
        if counted != timed:
            row["samples"] = study.run(f"{name}-{model}-samples", settings[model][0], counted, settings[model][1])
        rows[model] = row
    return rows


def sweep_keys(study: Study, values: dict[str, Any]) -> dict[str, Any]:
    """PSNR and time against k: the model trained with one k, and one whose k is drawn in each step."""
    tokens = run_arguments(values).model["window_size"] ** 2
    drawn = [tokens // 16, tokens // 8, tokens // 4, 3 * tokens // 8, tokens // 2]
    keys = [tokens // 16, tokens // 8, tokens // 4, tokens // 2, tokens]
    random_values = {**values, "model.train_top_k": drawn}
    steps = study.steps(DENOISING_SECONDS, study.speed("denoising-semanir", values))
    random_run = study.run("random-k", random_values, steps)
    curves = {}
    for name, run, own in (("fixed", "denoising-semanir-time", values), ("random", "random-k", random_values)):
        settings = {"steps": steps, "values": own, "keys": keys}
        curves[name] = study.step(f"sweep-{name}", settings, partial(sweep, study.snapshot(run), own, keys))
    return {"tokens": tokens, "drawn": drawn, "run": random_run, "curves": curves}


def mix(study: Study, values: dict[str, Any], noise: dict[str, Any]) -> dict[str, Any]:
    """One model for noise and JPEG, in the time of one model and of two, beside a model for each."""
    tasks = {"task.eval_degradation": [NOISE, JPEG]}
    jpeg, mixed = {**values, "task.degradation": JPEG}, {**values, "task.degradation": [NOISE, JPEG], **tasks}
    speed = study.speed("mixed", mixed)
    short, long = (study.steps(share * DENOISING_SECONDS, speed) for share in (1, 2))
    return {
        "noise": noise,
        "jpeg": study.run("jpeg", jpeg, study.steps(DENOISING_SECONDS, study.speed("jpeg", jpeg))),
        "both": study.run("mixed", mixed, short),
        "both, twice the time": study.run("mixed-long", mixed, long),
    }


def compute(study: Study) -> dict[str, Any]:
    """All steps."""
    candidates = choose(study)
    network = CANDIDATES[candidates["chosen"]]
    denoising = study.values(study.source("set12"), **network)
    tests = {name: study.source(name) for name in ("set12", "bsd68")}
    train = str(study.data / "bsds500")
    settings = {"tests": tests}
    result = {
        "candidates": candidates,
        "total_variation": study.step("total-variation", settings, partial(total_variation, denoising, train, tests)),
        "headline": headline(study, network),
        "denoising": compare(study, "denoising", denoising, DENOISING_SECONDS),
    }
    result["sweep"] = sweep_keys(study, denoising)
    result["mixed"] = mix(study, denoising, result["denoising"]["semanir"]["time"])
    inputs = {"noise": denoising, "jpeg": {**denoising, "task.degradation": JPEG}}
    return {**result, "inputs": study.step("inputs", inputs, partial(input_psnr, inputs))}


def main(data: Path, work: Path) -> None:
    """All steps, then the tables."""
    prepare_process()
    scale = float(os.environ.get("SEMANIR_BUDGET_SCALE", "1"))
    study = Study(data, work, scale)
    result = {
        "what": "One seed. The last weight average is scored; nothing was chosen on test images.",
        **machine("hf-ext", "torch", "transformers", "accelerate"),
        "seed": SEED,
        **compute(study),
    }
    result["seconds"] = study.seconds()
    report = study.write_report(result, EXAMPLES / "results")
    draw_curves(result, report / "curves.png")
    draw_sweep(result, report / "top_k.png")
    values = study.values(study.source("set12"), **CANDIDATES[result["candidates"]["chosen"]])
    weight = result["total_variation"]["weight"]
    draw_pictures(study.snapshot("headline"), values, weight, SHOWN if scale == 1 else [0], report / "set12.png")
    if scale == 1:
        write_blocks(blocks(result), EXAMPLES / "README.md")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(Path(word).resolve() for word in sys.argv[1:]))
