"""The study of SemanIR on real images: denoising, and the number of keys.

python examples/semanir/study.py DATA WORK
DATA holds the folders bsds500 (train, test), set12 and bsd68. Each run and each measurement leaves a file in
WORK/results and is skipped where that is there: the same command goes on after a stop. At the end
examples/semanir/results/study.json, the curves, pictures and tables in README.md are written.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from measuring import EXAMPLES, RECIPE, draw_pictures, input_psnr, run_arguments, score, sweep, total_variation
from tables import blocks, draw_curve, draw_sweep

from hf_ext.files import write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import (
    count_parameters,
    count_seconds,
    keep,
    machine,
    prepare_process,
    read_metrics,
    train_run,
    write_blocks,
)

SEED = 0
# Steps of each run; candidates had equal seconds of one core.
CANDIDATE_STEPS, HEADLINE_STEPS, STEPS = (116, 238, 501), 8208, 313
COLUMNAR = {
    "model.architecture": "columnar",
    "model.embed_dim": 48,
    "model.depths": [3, 3],
    "model.num_heads": [3, 3],
    "model.refinement_depth": 0,
}
# Networks for the headline. The one that restores validation photographs best after the same seconds is trained.
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
# Pictures of Set12 to show: a house, a parrot, Barbara.
SHOWN = [1, 6, 8]


class Study:
    """Runs and measurements of the data sets in a folder, each in a file of WORK/results."""

    def __init__(self, data: Path, work: Path):
        self.data, self.work = data, work

    def keep(self, name: str, compute: Any) -> Any:
        """A result by its name."""
        return keep(self.work / "results" / f"{name}.json", compute)

    def source(self, name: str, split: str | None = None) -> dict[str, Any]:
        """A data set."""
        path = str(self.data / name)
        # A folder whose files are called test001 and so on is a test split, others are a training split.
        return {"path": path, "split": split or datasets.get_dataset_split_names(path)[0]}

    def values(self, test: dict[str, Any], training: str = "train+test", **changes: Any) -> dict[str, Any]:
        """Settings of a run: the 400 photographs, a test set, and what differs from the recipe."""
        train = {"path": str(self.data / "bsds500"), "split": training}
        return {"data": {"train": train, "eval": test}, "seed": SEED, **changes}

    def run(self, name: str, values: dict[str, Any], steps: int) -> dict[str, Any]:
        """A training of so many steps, its warm-up a twentieth of them."""
        values = {**values, "max_steps": steps, "warmup_steps": steps // 20}
        return dict(self.keep(f"run-{name}", lambda: train(self.work / "runs" / name, values)))

    def snapshot(self, name: str) -> Path:
        """The model that a run left."""
        return self.work / "runs" / name / "snapshot"


def train(run: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Trains a run or goes on with it; its budget, scores and losses, and PSNR on the way."""
    row = train_run(run, RECIPE, values)
    psnr = [[one["samples"], round(one["eval_psnr"], 3)] for one in read_metrics(run) if "eval_psnr" in one]
    numbers = {"parameters": count_parameters(run / "snapshot"), "seconds_per_step": row["seconds"] / row["steps"]}
    return {**row, "psnr": psnr, **numbers}


def choose(study: Study) -> dict[str, Any]:
    """Every candidate after the same seconds, on photographs that none of the tests holds; the best one's name."""
    rows = {}
    for index, (name, changes) in enumerate(CANDIDATES.items()):
        # Five of the 400 photographs are kept back here; the headline trains on all.
        values = study.values(study.source("bsds500", "test[:5]"), "train+test[5:]", **changes)
        rows[name] = study.run(f"candidate-{index}", values, CANDIDATE_STEPS[index])
    return {"rows": rows, "chosen": max(rows, key=lambda name: rows[name]["scores"]["psnr"])}


def sweep_keys(study: Study, values: dict[str, Any]) -> dict[str, Any]:
    """PSNR and time against k: the model trained with one k, and one whose k is drawn in each step."""
    tokens = run_arguments(values).model["window_size"] ** 2
    drawn = [tokens // 16, tokens // 8, tokens // 4, 3 * tokens // 8, tokens // 2]
    keys = [tokens // 16, tokens // 8, tokens // 4, tokens // 2, tokens]
    runs, curves = {}, {}
    for name, own in {"fixed": values, "random": {**values, "model.train_top_k": drawn}}.items():
        runs[name] = study.run(f"{name}-k", own, STEPS)
        curves[name] = study.keep(f"sweep-{name}", partial(sweep, study.snapshot(f"{name}-k"), own, keys))
    return {"tokens": tokens, "drawn": drawn, "runs": runs, "curves": curves}


def compute(study: Study) -> dict[str, Any]:
    """All claims."""
    candidates = choose(study)
    values = study.values(study.source("set12"), **CANDIDATES[candidates["chosen"]])
    tests = {name: study.source(name) for name in ("set12", "bsd68")}
    train = str(study.data / "bsds500")
    return {
        "candidates": candidates,
        "total_variation": study.keep("total-variation", partial(total_variation, values, train, tests)),
        # Set12 on the way and at the end, BSD68 at the end.
        "headline": {
            **study.run("headline", {**values, "eval_steps": -(-HEADLINE_STEPS // 4)}, HEADLINE_STEPS),
            "bsd68": study.keep("bsd68", partial(score, study.snapshot("headline"), values, tests["bsd68"])),
        },
        "sweep": sweep_keys(study, values),
        "input": study.keep("input", partial(input_psnr, values)),
    }


def main(data: Path, work: Path) -> None:
    """All runs, then the tables."""
    prepare_process()
    study, report = Study(data, work), EXAMPLES / "results"
    result = {
        "what": "One seed. The last weight average is scored; nothing was chosen on test images.",
        **machine("hf-ext", "torch", "transformers", "accelerate"),
        "seed": SEED,
        **compute(study),
    }
    result["seconds"] = count_seconds(work / "results")
    write_json(report / "study.json", result, 1)
    draw_curve(result, report / "curve.png")
    draw_sweep(result, report / "top_k.png")
    values = study.values(study.source("set12"), **CANDIDATES[result["candidates"]["chosen"]])
    draw_pictures(study.snapshot("headline"), values, result["total_variation"]["weight"], SHOWN, report / "set12.png")
    write_blocks(blocks(result), EXAMPLES / "README.md")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*(Path(word).resolve() for word in sys.argv[1:]))
