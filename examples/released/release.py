"""Makes released models of what their runs have reached: weights of 16 bits, scores on test sets, card, pictures.

python examples/released/release.py NAME... [--work WORK]
Each NAME is a run of train.py; where it did not run, the released model is measured anew. The folder
model_cards/released/NAME is replaced once everything is measured.
Scores are those of the released weights, not of the run's: what a card says is what its reader gets.
"""

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import skimage.data
import torch
from PIL import Image
from releases import CARD_LICENSES, RELEASES, Release
from runs import RECIPES, RELEASED, RESTORE_TASKS, RUNS, committed_weights, count_core_hours, read_report
from safetensors.torch import load_file, save_file

from hf_ext.data.bad_examples import read_example
from hf_ext.data.opening import open_source
from hf_ext.emr.artifact import hash_files
from hf_ext.emr.manifest import Manifest
from hf_ext.emr.weights import task_checkpoint
from hf_ext.files import read_json, whole_folder, write_json
from hf_ext.hub.cards import write_card
from hf_ext.merging import MergeConfig, merge_checkpoints
from hf_ext.metrics.images import Channel
from hf_ext.metrics.psnr import psnr
from hf_ext.mrconv import MRConvForAudioClassification
from hf_ext.semanir import SemanIRForImageRestoration
from hf_ext.semanir.modeling_semanir import bilinear_demosaick
from hf_ext.tasks.degradations import gaussian_noise, matlab_bicubic, mosaic
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.training import build_task, evaluate_checkpoint
from hf_ext.training.arguments import build
from hf_ext.training.evaluation import evaluate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import flags, read_arguments

# Megabytes of one released model; of the Disentangled DiT, and of a merge, which is a model and the masks of four.
LIMITS = {"cifar10": 8.0, "restore-tasks": 4.0}
LIMIT = 3.0
WORK = Path.home() / ".cache" / "hf_ext_released"


def halve(snapshot: Path, folder: Path) -> int:
    """
    Copies a snapshot into a folder that exists, its weights in half precision; the number of its weights. The
    configuration says float32, which is what loads.
    """
    count = 0
    for file in sorted(snapshot.rglob("*")):
        target = folder / file.relative_to(snapshot)
        if file.suffix == ".safetensors":
            target.parent.mkdir(parents=True, exist_ok=True)
            tensors = load_file(file)
            count += sum(tensor.numel() for tensor in tensors.values())
            half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
            broken = [name for name, tensor in half.items() if not torch.isfinite(tensor.float()).all()]
            if broken:
                raise ValueError(f"{file}: {broken[0]} does not fit into half precision")
            save_file(half, target, {"format": "pt"})
        elif file.suffix == ".json" and file.name not in ("eval.json", "training.json"):
            target.parent.mkdir(parents=True, exist_ok=True)
            content = json.loads(file.read_text(encoding="utf-8"))
            if "dtype" in content:
                content["dtype"] = "float32"
            target.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return count


def finish(folder: Path, release: Release, first: Path) -> None:
    """
    Means of a run's weights and those that it began with, and settings of its configuration.

    A run on other pictures gains what they teach and loses some of what it knew. Between its two ends, which lie in
    one valley of the loss, a mean keeps most of both (Wortsman et al., Robust fine-tuning of zero-shot models, 2022).
    """
    if release.share != 1:
        file = folder / "model.safetensors"
        before = load_file(first / file.name)
        mean = {name: torch.lerp(before[name], value, release.share) for name, value in load_file(file).items()}
        save_file(mean, file, {"format": "pt"})
    if release.settings:
        write_json(folder / "config.json", {**read_json(folder / "config.json"), **release.settings})


class LeavesItAsItIs(SemanIRTask):
    """The task of a restorer that does nothing, enlarges by bicubic or demosaicks by bilinear interpolation."""

    def restore(self, model: Any, degraded: np.ndarray, top_k: int | None = None) -> np.ndarray:
        if model.config.demosaicks:
            pixels = torch.from_numpy(degraded).permute(2, 0, 1)[None]
            return bilinear_demosaick(pixels)[0].permute(1, 2, 0).numpy().clip(0, 1)
        scale = model.config.scale
        return degraded if scale == 1 else np.clip(matlab_bicubic(degraded, scale), 0, 1)


def measure(name: str, folder: Path, release: Release) -> list[dict[str, Any]]:
    """Results of the released weights on every test set, with those of the degraded input as baselines."""
    results = []
    for title, overrides in release.tests.items():
        rows = evaluate_checkpoint(str(folder), RECIPES / f"{name}.yaml", flags(overrides))["results"]
        arguments = read_arguments(RECIPES / f"{name}.yaml", overrides)
        source = arguments.data_arguments.eval_sources[""]
        assert source is not None
        if arguments.method == "semanir":
            task = build(LeavesItAsItIs, arguments.task, "task")
            model = task.build_model({}, str(folder))
            scores = evaluate(task, model, open_source(source))
            rows = [{**row, "baselines": {release.baseline: scores[row["metric"]]}} for row in rows]
        # `datasets` calls the only split of a folder train.
        results += [{**row, "dataset": title, "split": "test"} for row in rows]
    return results


def draw(name: str, folder: Path, release: Release) -> Image.Image:
    """Degraded, restored and clean middle parts at 100 %; of sounds, who is taken for whom."""
    overrides = next(iter(release.tests.values()))
    arguments = read_arguments(RECIPES / f"{name}.yaml", overrides)
    task: Any = build_task(arguments)
    model = task.build_model({}, str(folder)).eval()
    source = arguments.data_arguments.eval_sources[""]
    assert source is not None
    data = open_source(source)
    if arguments.method == "mrconv-audio":
        # The picture is that of an evaluation.
        evaluate(task, model, data)
    return task.sample_picture(model, [read_example(data, place) for place in release.shown_examples])


def summarize(release: Release, results: list[dict[str, Any]]) -> str:
    """The scores of the table, a phrase for each data set and metric: values, and those of the input in brackets."""
    parts: dict[str, list[str]] = {}
    for row in results:
        if row["metric"] in release.shown:
            metric, _, condition = row["name"].partition("), ")
            beside = row.get("baselines", {}).get(release.baseline)
            number = f"{100 * row['value']:.1f} %" if row["metric"] == "accuracy" else f"{row['value']:.2f}"
            value = number + ("" if beside is None else f" ({release.baseline} {beside:.2f})")
            title = f"{row['dataset']}, {metric}{')' if condition else ''}"
            parts.setdefault(title, []).append(f"{condition} {value}".strip())
    return "; ".join(f"{title}: {', '.join(values)}" for title, values in parts.items())


def restore_cat(folder: Path, task: str | None = None) -> float:
    """
    PSNR of scikit-image's cat with noise of 25, in grey for a grey model, shrunk for one that enlarges, a mosaic for
    one that demosaicks: a test measures it without any data.
    """
    with task_checkpoint(str(folder), task) as checkpoint:
        model = SemanIRForImageRestoration.from_pretrained(checkpoint).eval()
    photo = Image.fromarray(skimage.data.chelsea()[:128, 200:328])
    mode, channel = ("RGB", "rgb") if model.config.num_channels_out == 3 else ("L", "gray")
    clean = np.asarray(photo.convert(mode)).reshape(128, 128, -1)
    if model.config.demosaicks:
        degraded = mosaic(clean).astype(np.float32) / 255
    elif model.config.scale > 1:
        degraded = matlab_bicubic(clean, 1 / model.config.scale).astype(np.float32) / 255
    else:
        degraded = gaussian_noise(clean, 25.0, np.random.default_rng(0))
    with torch.no_grad():
        pixels = torch.from_numpy(degraded).permute(2, 0, 1)[None]
        restored = model(pixel_values=pixels).reconstruction[0].permute(1, 2, 0).numpy()
    return psnr(255 * restored, clean, channel=cast(Channel, channel), data_range=255)


def hear_tones(folder: Path) -> list[float]:
    """Logits of a model of sounds for three tones that grow: a test asks it again without any data."""
    model = MRConvForAudioClassification.from_pretrained(folder).eval()
    time = torch.arange(4000) / 8000
    sound = sum(torch.sin(2 * torch.pi * pitch * time) for pitch in (200, 700, 2400)) * time
    with torch.no_grad():
        logits: list[float] = model(input_values=sound[None]).logits[0].tolist()
    return logits


def check_size(name: str, folder: Path) -> None:
    """A wheel holds all released models: none may be large."""
    size = sum(file.stat().st_size for file in folder.rglob("*.safetensors")) / 1e6
    if size > LIMITS.get(name, LIMIT):
        raise ValueError(f"{name} is {size:.2f} MB; at most {LIMITS.get(name, LIMIT)} MB are released")


def tell(release: Release, scores: str) -> dict[str, Any]:
    """Fields that `hf-ext models` and the card show."""
    fields = ("task", "caption", "data", "license")
    told = {field: getattr(release, field) for field in fields}
    return {**told, "card_license": CARD_LICENSES[release.license], "scores": scores}


def make(name: str, work: Path) -> Path:
    """Measures and writes one released model."""
    if name == "restore-tasks":
        return make_merge(work)
    release = RELEASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        folder.mkdir()
        run = work / "runs" / name / "snapshot"
        snapshot = run if run.is_dir() else RELEASED / name
        parameters = halve(snapshot, folder)
        if run.is_dir() and (first := RUNS[name]):
            finish(folder, release, committed_weights(first))
        check_size(name, folder)
        if name == "cifar10":
            # With modules of another folder, which nothing else here needs.
            import drawing

            results, scores = drawing.judge_pictures(folder, work / "data" / "cifar10")
            check: dict[str, Any] = {"means": [round(value, 3) for value in drawing.draw_again(folder)]}
            picture = drawing.draw(folder)
            drawing.draw_controls(folder).save(folder / "controls.png", optimize=True)
        else:
            results = measure(name, folder, release)
            scores, picture = summarize(release, results), draw(name, folder, release)
            if name == "spoken-digits":
                check = {"logits": [round(value, 3) for value in hear_tones(folder)]}
            else:
                check = {"psnr": round(restore_cat(folder), 3)}
        training = read_json(snapshot / "training.json")
        before = training.get("released", {})
        hours = before["core_hours"] if before else round(count_core_hours(work, name), 2)
        machine = training["hardware"].rpartition(" on ")[2]
        numbers = {"parameters": parameters, "steps": training["steps"], "core_hours": hours}
        numbers |= {} if machine.startswith("CPU") else {"machine": f"one {machine}"}
        training |= {"released": {**tell(release, scores), **numbers}, "check": check}
        return write_release(folder, training, results, picture)


def write_release(folder: Path, training: dict[str, Any], results: list[dict[str, Any]], picture: Image.Image) -> Path:
    """Card, scores and picture; the folder takes its place in the package."""
    write_json(folder / "training.json", training)
    write_json(folder / "eval.json", {"results": results, "revision": None})
    picture.save(folder / "before_after.png", optimize=True)
    if (terms := RELEASED / folder.name / "LICENSE").is_file():
        shutil.copy(terms, folder)
    write_card(folder, repo_id=folder.name)
    if (folder / "emr.json").is_file():
        dataclasses.replace(Manifest.read(folder), files=hash_files(folder)).write(folder)
    with whole_folder(RELEASED / folder.name) as place:
        shutil.copytree(folder, place, dirs_exist_ok=True)
    return RELEASED / folder.name


def make_merge(work: Path) -> Path:
    """Merges the fine-tunes of restore-tasks, and measures each task of the merge, its fine-tune and its input."""
    name, release = "restore-tasks", RELEASES["restore-tasks"]
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        # Beside the merge, as it lies in the package: the merge finds its base there.
        shutil.copytree(RELEASED / "denoise-color", place / "denoise-color")
        for task in RESTORE_TASKS:
            (place / "fine-tunes" / task).mkdir(parents=True)
            halve(work / "runs" / f"{name}-{task}" / "snapshot", place / "fine-tunes" / task)
        folder = place / name
        with contextlib.chdir(place):
            tasks = {task: f"fine-tunes/{task}" for task in RESTORE_TASKS}
            # Signs of each difference, a scale for each tensor: what OneBit trained. EMR with one merged model was
            # measured first, of fine-tunes by AdamW: 22.33, 26.04, 26.48 and 28.57 dB, where these have 25.70, 26.57,
            # 28.61 and 28.62. The tasks are unlike. Later ones by AdamW lost 0.1, 0.1, 1.2 and 0.3 dB by their signs.
            merge_checkpoints(MergeConfig(base="denoise-color", tasks=tasks, method="onebit"), name, progress=False)
        # The package has this code already.
        (folder / "emr_loader.py").unlink()
        check_size(name, folder)
        results, scores, pictures = [], [], []
        for task, overrides in release.tests.items():
            one = dataclasses.replace(release, tests={task: overrides})
            of_tuned = {row["metric"]: row for row in measure(name, place / "fine-tunes" / task, one)}
            recipe, words = RECIPES / f"{name}.yaml", flags(overrides)
            of_merge = evaluate_checkpoint(str(folder), recipe, words, merged_task=task)["results"]
            told = {"dataset": f"20 photographs of BSDS500's test set, {task}", "split": "test"}
            beside = {
                metric: {"fine-tune": row["value"], "input": row["baselines"]["input"]}
                for metric, row in of_tuned.items()
            }
            results += [{**row, **told, "baselines": beside[row["metric"]]} for row in of_merge]
            value = next(row["value"] for row in of_merge if row["metric"] == "psnr")
            scores.append(
                "{} {:.2f} (fine-tune {fine-tune:.2f}, input {input:.2f})".format(task, value, **beside["psnr"])
            )
            with task_checkpoint(str(folder), task) as checkpoint:
                pictures.append(draw(name, Path(checkpoint), one))
        runs = [f"{name}-{task}" for task in RESTORE_TASKS]
        base = json.loads((place / "denoise-color" / "training.json").read_text(encoding="utf-8"))["released"]
        # The base's hours are behind each of them, and count once.
        hours = base["core_hours"] + sum(read_report(work, run)["seconds"] / 3600 for run in runs)
        training = read_report(work, runs[0])
        training["released"] = {
            **tell(release, f"20 photographs of BSDS500's test set, PSNR (RGB, dB): {', '.join(scores)}"),
            "parameters": base["parameters"],
            "steps": sum(read_report(work, run)["steps"] for run in runs),
            "core_hours": round(hours, 2),
        }
        training["check"] = {"psnr": round(restore_cat(folder, "noise"), 3), "task": "noise"}
        # Rows of the same photograph: of one size.
        stacked = Image.fromarray(np.concatenate([np.asarray(picture.convert("RGB")) for picture in pictures]))
        return write_release(folder, training, results, stacked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=sorted(RELEASES))
    parser.add_argument("--work", type=lambda word: Path(word).resolve(), default=WORK)
    options = parser.parse_args()
    torch.set_num_threads(1)
    np.seterr(all="raise", under="ignore")
    with contextlib.chdir(options.work):
        for name in options.names:
            print(make(name, options.work))


if __name__ == "__main__":
    main()
