"""The study of EMR-Merging on real models: ten fine-tunes of MiniLM and four SemanIR restorers, merged from a Hub.

python examples/emr/study.py TWEETEVAL BSDS500 WORK
Each step leaves its result in WORK/results and is skipped when it is there with the same settings, so an interrupted
study continues. At the end examples/emr/results/study.json, the pictures and the tables in README.md are written.
examples/emr/reproduce.sh sets what the study wants: one thread, and caches inside WORK.
"""

import functools
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from finetunes import BASE, EXAMPLES, copy_base, fine_tune
from measuring import Measurement
from restoring import study_restorers
from routing import SAMPLES, score_router
from safetensors.torch import load_file
from tables import blocks, draw_curve, draw_features
from tweets import SEED, TASKS, TEST_LIMIT, TRAIN_LIMIT, VALIDATION_LIMIT

from hf_ext import EMRModel, merge_checkpoints
from hf_ext.embedded_hub.server import EmbeddedHub
from hf_ext.hub.publish import push

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import Steps, machine, prepare_process, write_blocks  # noqa: E402  found through the line above

MODES = ("global", "official", "tensor", "l2", "tensor_l2", "none")
# Chosen on the validation tweets, which favours these methods: EMR has nothing to choose.
GRIDS: dict[str, list[dict[str, Any]]] = {
    "task_arithmetic": [{"method": "task_arithmetic", "weight": weight} for weight in (0.1, 0.2, 0.3, 0.4, 0.5)],
    "ties": [{"method": "ties", "weight": weight} for weight in (0.5, 0.75, 1.0, 1.5)],
    "dare_ties": [
        {"method": "ties", "drop": drop, "weight": weight, "seed": SEED}
        for drop in (0.1, 0.5)
        for weight in (0.5, 1.0)
    ],
}
FEATURES_OF, FEATURES = "emotion", 600


class Study(Steps):
    """
    Steps with their results in files, on one embedded Hub.

    Args:
        work (`Path`): Everything but the final tables is written here.
        url (`str`): The Hub's address.
    """

    def __init__(self, work: Path, url: str):
        super().__init__(work)
        self.url, self.base = url, copy_base(work)
        self.measurement = Measurement(work, self.base)
        self.commits: dict[str, str] = {}

    def publish(self, name: str, folder: Path) -> None:
        """Pushes a checkpoint, unless exactly these weights were pushed before."""
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        repository = f"study/{name}"
        self.commits[name] = self.step(
            f"push-{name}", {"sha256": digest}, lambda: push(folder, repository, endpoint=self.url).oid
        )

    def config(self, base: str, tasks: list[str], **changes: Any) -> dict[str, Any]:
        """What to merge: repositories at their commits."""
        sources = {task: f"study/{task}@{self.commits[task]}" for task in tasks}
        return {"base": f"study/{base}@{self.commits[base]}", "tasks": sources, **changes}

    def merge(self, name: str, config: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        """Merges from the Hub; the folder, and what it cost."""
        out = self.work / "merged" / name
        started = time.perf_counter()
        merge_checkpoints(config, out, endpoint=self.url, overwrite=True, progress=False)
        seconds = time.perf_counter() - started
        size = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
        return out, {"config": config, "seconds": round(seconds, 2), "bytes": size}

    def tweets(self, tasks: list[str], **changes: Any) -> dict[str, Any]:
        """Configuration of a merge of tweet classifiers."""
        return self.config(BASE, tasks, **changes)

    def score_all(self, tasks: list[str], model_of: Callable[[str], Any], part: str = "test") -> dict[str, Any]:
        """Macro F1 of each task with its mean."""
        scores = {task: round(self.measurement.score(model_of(task), task, part), 4) for task in tasks}
        return {"scores": scores, "mean": round(float(np.mean(list(scores.values()))), 4)}

    def single(self, name: str, tasks: list[str], part: str = "test", **changes: Any) -> dict[str, Any]:
        """A merge into one encoder, scored with each task's own head."""
        config = self.tweets(tasks, **changes)

        def compute() -> dict[str, Any]:
            out, cost = self.merge(name, config)
            encoder = read_weights(out)
            row = self.score_all(tasks, lambda task: self.measurement.with_encoder(task, encoder), part)
            shutil.rmtree(out)
            return {**row, **cost}

        return self.step(name, {"config": config, "part": part}, compute)

    def masked(self, name: str, tasks: list[str], modes: tuple[str, ...] = ("global",), **changes: Any) -> Any:
        """A merge with masks, scored as each task's model, for each way to rescale."""
        config = self.tweets(tasks, **changes)
        rows = {}
        for mode in modes:
            compute = functools.partial(self._score_masked, name, config, mode)
            rows[mode] = self.step(f"{name}-{mode}", {"config": config, "rescale": mode}, compute)
        # Only the merge of all tasks is looked at again.
        if name != "emr":
            shutil.rmtree(self.work / "merged" / name, ignore_errors=True)
        return rows

    def _score_masked(self, name: str, config: dict[str, Any], mode: str) -> dict[str, Any]:
        out, cost = self.artifact(name, config)
        merged = EMRModel.from_pretrained(out, task=next(iter(config["tasks"])), rescale=mode, endpoint=self.url)

        def model_of(task: str) -> Any:
            merged.set_task(task)
            return merged.model

        return {**self.score_all(list(config["tasks"]), model_of), **cost}

    def artifact(self, name: str, config: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
        """The merged folder, made once for a configuration, and what it cost."""
        out, note = self.work / "merged" / name, self.work / "merged" / f"{name}.json"
        if note.is_file() and (out / "emr.json").is_file():
            cost = json.loads(note.read_text(encoding="utf-8"))
            if cost["config"] == config:
                return out, cost
        out, cost = self.merge(name, config)
        note.write_text(json.dumps(cost), encoding="utf-8")
        return out, cost


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the weights in a folder's root."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def tune(study: Study, method: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The setting of a baseline with the best mean on the validation tweets, and the whole grid."""
    tried = []
    for index, setting in enumerate(GRIDS[method]):
        row = study.single(f"grid-{method}-{index}", list(TASKS), "validation", **setting)
        tried.append({**setting, "mean": row["mean"]})
    best = max(range(len(tried)), key=lambda index: tried[index]["mean"])
    return GRIDS[method][best], tried


def elect_and_rescale(study: Study, config: dict[str, Any]) -> dict[str, Any]:
    """The ablation that has no masks: W0 + λ_t τ_uni with λ_t = Σ|τ_t| / Σ|τ_uni|."""
    base, unified = load_file(study.base / "model.safetensors"), read_weights(study.artifact("emr", config)[0])
    names = [name for name in unified if unified[name].is_floating_point()]
    total = sum((unified[name] - base[name]).abs().sum(dtype=torch.float64) for name in names)

    def model_of(task: str) -> Any:
        own = study.measurement.individual(task).base_model.state_dict()
        scale = sum((own[name] - base[name]).abs().sum(dtype=torch.float64) for name in names) / total
        return study.measurement.with_encoder(
            task, {name: base[name] + float(scale) * (unified[name] - base[name]) for name in names}
        )

    return study.score_all(list(config["tasks"]), model_of)


def feature_steps(study: Study, config: dict[str, Any]) -> dict[str, Any]:
    """t-SNE of one task's features: individual, and after each step of the merge."""
    from sklearn.manifold import TSNE

    out, _ = study.artifact("emr", config)
    examples = study.measurement.examples(FEATURES_OF)
    chosen = np.sort(np.random.default_rng(SEED).permutation(len(examples.labels))[:FEATURES])

    def restored(mode: str) -> Any:
        return EMRModel.from_pretrained(out, task=FEATURES_OF, rescale=mode, endpoint=study.url).model

    models = {
        "individual": lambda: study.measurement.individual(FEATURES_OF),
        "elect": lambda: study.measurement.with_encoder(FEATURES_OF, read_weights(out)),
        "elect, mask": lambda: restored("none"),
        "elect, mask, rescale": lambda: restored("global"),
    }
    places = {}
    for name, build in models.items():
        features = examples.features(build())[chosen]
        points = TSNE(perplexity=30, init="pca", random_state=SEED).fit_transform(features)
        places[name] = np.round(points, 2).tolist()
    return {"task": FEATURES_OF, "labels": examples.labels[chosen].tolist(), "places": places}


def merge_times(study: Study, rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds of each merge from the Hub once more, one after the other, when nothing else of the study runs."""

    def compute() -> dict[str, float]:
        seconds = {}
        for name, row in rows.items():
            out, cost = study.merge(f"time-{name}", row["config"])
            seconds[name] = cost["seconds"]
            shutil.rmtree(out)
        return seconds

    return study.step("times", {name: row["config"] for name, row in rows.items()}, compute)


def study_curve(study: Study, best: str) -> dict[str, Any]:
    """Means over the first n tasks, merged alone, for n = 2 … 10."""
    names, curve = list(TASKS), {}
    for count in range(2, len(names) + 1):
        tasks = names[:count]
        emr = study.masked("emr" if count == len(names) else f"emr-first-{count}", tasks, ("global", best))
        average = study.single(f"average-first-{count}", tasks, method="average")
        curve[str(count)] = {
            "global": emr["global"]["mean"],
            best: emr[best]["mean"],
            "average": average["mean"],
            "bytes": emr["global"]["bytes"],
            "seconds": emr["global"]["seconds"],
        }
    return curve


def study_tweets(study: Study) -> dict[str, Any]:
    """Every table of the ten classifiers."""
    tasks = list(TASKS)
    study.publish(BASE, study.base)
    for task in tasks:
        study.publish(task, study.snapshot(task))
    individual = study.step(
        "individual",
        {"commits": [study.commits[task] for task in tasks]},
        lambda: study.score_all(tasks, study.measurement.individual),
    )
    emr = study.masked("emr", tasks, MODES)
    best = max(MODES, key=lambda mode: emr[mode]["mean"])
    singles = {"average": study.single("average", tasks, method="average")}
    chosen, grids = {}, {}
    for method in GRIDS:
        chosen[method], grids[method] = tune(study, method)
        singles[method] = study.single(f"best-{method}", tasks, **chosen[method])
    singles["elect"] = study.single("elect", tasks, method="elect")
    config = study.tweets(tasks)
    rescaled = study.step("elect-rescale", {"config": config}, lambda: elect_and_rescale(study, config))
    after = {
        method: study.masked(f"masked-{method}", tasks, masks=True, **setting)["global"]
        for method, setting in {"average": {"method": "average"}, **chosen}.items()
        if method != "dare_ties"
    }
    router = study.step(
        "router",
        {"config": config, "samples": SAMPLES},
        lambda: score_router(study.measurement, study.artifact("emr", config)[0], tasks, study.url),
    )
    features = study.step("features", {"config": config, "count": FEATURES}, lambda: feature_steps(study, config))
    draw_features(features, EXAMPLES / "results" / "features.png")
    curve = study_curve(study, best)
    individual_means = {
        str(count): float(np.mean([individual["scores"][task] for task in tasks[:count]]))
        for count in range(2, len(tasks) + 1)
    }
    draw_curve(curve, individual_means, EXAMPLES / "results" / "curve.png")
    return {
        "individual": individual,
        "single": singles,
        "emr": emr,
        "merge_seconds": merge_times(study, {**singles, "emr": emr["global"]}),
        "ablation": {"elect_rescale": rescaled},
        "mask_and_rescale_after": after,
        "router": router,
        "validation_grids": grids,
        "curve": {"individual": individual_means, "merged": curve},
        "checkpoint_bytes": {task: weight_bytes(study.snapshot(task)) for task in tasks},
        "base_bytes": weight_bytes(study.base),
    }


def weight_bytes(folder: Path) -> int:
    """Size of a checkpoint's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def training_runs(snapshots: Mapping[str, Path]) -> dict[str, Any]:
    """The budget of each training."""
    runs = {}
    for name, snapshot in snapshots.items():
        report = json.loads((snapshot / "training.json").read_text(encoding="utf-8"))
        kept = {key: report[key] for key in ("steps", "samples", "seconds", "hardware", "commit", "versions")}
        arguments = report["arguments"]
        kept |= {key: arguments[key] for key in ("seed", "learning_rate", "mixed_precision")}
        evaluation = json.loads((snapshot / "eval.json").read_text(encoding="utf-8"))["results"]
        runs[name] = {**kept, "validation": {row["metric"]: round(row["value"], 4) for row in evaluation}}
    return runs


def main(tweeteval: Path, bsds: Path, work: Path) -> None:
    """All steps, then the tables."""
    prepare_process()
    snapshots = {task: fine_tune(task, tweeteval, work) for task in TASKS}
    with EmbeddedHub(work / "hub") as hub:
        print(f"Hub: {hub.url}", flush=True)
        study = Study(work, hub.url)
        tweets = study_tweets(study)
        restorers, more = study_restorers(study, bsds)
    runs = training_runs({**snapshots, **more})
    result = {
        "what": "Macro F1 on TweetEval's test tweets; PSNR (RGB, dB) of restorers. All merges are made from a Hub.",
        **machine("hf-ext", "torch", "transformers", "accelerate", "scikit-learn"),
        "seed": SEED,
        "limits": {"train": TRAIN_LIMIT, "validation": VALIDATION_LIMIT, "test": TEST_LIMIT},
        "seconds": {
            "training": round(sum(run["seconds"] for run in runs.values())),
            "merging_and_scoring": study.seconds(),
        },
        "runs": runs,
        "tweets": tweets,
        "restorers": restorers,
    }
    study.write_report(result, EXAMPLES / "results")
    write_blocks(blocks(result), EXAMPLES / "README.md")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*(Path(word).resolve() for word in sys.argv[1:]))
