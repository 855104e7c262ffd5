"""Recipes for the user's data: commented YAML with sizes for the data and the machine."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ..errors import DataError
from ..hub.released import list_released
from .found import Survey

# A field of a recipe is a value, or a value and the lines of its comment. One that is None is left out.
Fields = dict[str, Any]


# Least side of a picture that a restorer is trained on, and its scores are defined for.
_SMALLEST = 16


def write_recipe(method: str, folder: Path, survey: Survey, gpu: bool) -> str:
    """A recipe for data, with sizes for a GPU or for two CPU cores; refuses data that the method cannot learn from."""
    kinds, make = _METHODS[method]
    if survey.kind not in kinds:
        raise DataError(f"{method} learns from {', '.join(kinds)}, but the data are {survey.kind}.")
    file, machine = shlex.quote(str(folder / f"{method}.yaml")), "a GPU" if gpu else "a CPU"
    # A class name may contain line breaks, and what YAML refuses even in a comment.
    told = ["".join(filter(str.isprintable, " ".join(line.split()))) for line in survey.lines]
    head = [
        *(f"{line[:1].upper()}{line[1:]}." for line in told),
        f"Written by `hf-ext init {method}`, for {machine}.",
        f"Check the data: hf-ext data check {file}",
        f"Train, or resume an interrupted training: hf-ext train {file}",
        f"List all fields: hf-ext train --help {file}. The command line also accepts them: --max_steps 100",
    ]
    fields = make(survey, gpu)
    start = {"method": (fields.pop("method"), *head), "output_dir": str(folder / "run"), "data": _data(survey)}
    return "\n".join(_write({**start, **fields})) + "\n"


def _write(fields: Fields, indent: str = "") -> list[str]:
    """The lines of fields, each below its comment; the sections of a recipe are blocks."""
    lines = []
    for name, field in fields.items():
        value, *comment = field if isinstance(field, tuple) else (field,)
        if value is None:
            continue
        section = isinstance(value, dict) and not indent
        lines += [f"{indent}# {line}" for line in comment]
        lines += [f"{name}:", *_write(value, "  ")] if section else [f"{indent}{name}: {flow(value)}"]
    return lines


def _data(survey: Survey) -> Fields:
    told = ["Number of processes that load data; 0 loads in the main process."]
    fields: Fields = {"train": survey.train}
    if survey.eval is not None:
        origin = "Examples held out by content" if "hold_out" in survey.eval else "Examples of another split"
        fields["eval"] = survey.eval, f"{origin}, for evaluation."
    else:
        other = {**survey.train, "split": "validation"}
        if survey.kind == "pairs":
            other = {"path": str(Path(survey.train["path"]).with_name("validation"))}
        advice = "No data for evaluation. Move some examples to a folder validation/ beside the others, and add:"
        told = [advice, f"eval: {flow(other)}", *told]
    if survey.broken:
        # Allow twice the share that was seen.
        share = float(f"{min(1.0, round(2 * survey.broken, 2) + 0.01):.2g}")
        fields["max_bad_examples"] = share, "Largest share of unreadable examples; they are left out."
    return {**fields, "num_workers": (2, *told)}


def _schedule(survey: Survey, steps: int, batch: int, rate: float, gpu: bool, warmup: int) -> Fields:
    told = ["More steps give better models; the learning rate decays to zero at the last step."]
    # One long file or text gives many different examples.
    if survey.learned > 1:
        batch = max(1, min(batch, survey.learned // 2))
        times = steps * batch / survey.learned
        told.insert(0, f"{times:,.{0 if times > 10 else 1}f} epochs.")
    return {
        "max_steps": (steps, *told),
        "per_device_train_batch_size": (batch, "Reduce this if memory runs out."),
        "learning_rate": rate,
        "warmup_steps": warmup,
        "mixed_precision": "bf16" if gpu else None,
        "logging_steps": 20,
        "eval_steps": max(1, steps // 5),
        "save_steps": max(1, steps // 5),
        "save_total_limit": 1,
        "report_to": "none",
    }


def _semanir(survey: Survey, gpu: bool) -> Fields:
    _refuse_deep(survey, survey.bits > 16)
    if _side(survey, 0.0) < _SMALLEST:
        raise DataError(f"{survey.train['path']} has sides of {survey.sides[0]} pixels: remove any below {_SMALLEST}.")
    if survey.kind == "pairs":
        task: Fields = {"degradation": ({"kind": "paired"}, f"Pairs: {survey.roles[0]}.")}
    else:
        told = (
            "Degradation to learn, applied to clean pictures. Others: {kind: jpeg, quality: [10, 90]}, or",
            "{kind: blur, sigma: [0.5, 3]}, a list of several, or pairs of pictures in lq/ and hq/.",
        )
        task = {
            "degradation": ({"kind": "gaussian_noise", "sigma": [0, 50]}, *told),
            "eval_degradation": {"kind": "gaussian_noise", "sigma": 25},
            "image_column": _column(survey, "image"),
        }
    # A multiple of 8, for the windows and the levels of a U-shaped model, no larger than most pictures.
    patch = max(16, min(128 if gpu else 64, _side(survey) // 8 * 8))
    task["patch_size"] = patch, f"Side of the training patches in pixels{_smallest(survey)}."
    channels = {"num_channels": 1} if survey.gray else {}
    small = {"preset": "u-shaped-small", **channels}
    fresh = gpu or survey.scale > 1 or not list_released()
    if survey.scale > 1:
        preset = {"preset": f"columnar-{'s' if gpu else 'tiny'}", "scale": survey.scale, **channels}
        model: Fields = {"model": (preset, f"Super-resolution by {survey.scale}.")}
    elif fresh:
        model = {"model": (small, "3.6 M parameters; u-shaped is the model of the paper, with 25.8 M.")}
    else:
        advice = "Starts from a released model. To train from scratch, replace init_from by:", f"model: {flow(small)}"
        model = {"init_from": (f"denoise-{'gray' if survey.gray else 'color'}", *advice)}
    average = 0.999 if gpu else None, "The saved weights are an exponential moving average."
    schedule = _schedule(survey, 100000 if gpu else 1000, 8 if gpu else 4, 2e-4 if fresh else 1e-4, gpu, 100)
    return {"method": "semanir", "task": task, **model, "ema_decay": average, **schedule}


def _mrconv(survey: Survey, gpu: bool) -> Fields:
    method, task = _INPUTS[survey.kind](survey, gpu)
    # A causal model must not look ahead. Short dilated kernels and a wider model learn more from small sets of series;
    # models of differences between steps do not stream.
    causal, series = method == "mrconv-lm", method == "mrconv-series"
    streams = [] if series else ["false gives a causal model, which also classifies streams."]
    width = 128 if gpu else 64 if series else 32
    model: Fields = {
        "hidden_size": (width, "Width and depth: larger models learn more and take longer."),
        "num_hidden_layers": 6 if gpu else 3,
        "kernel_type": "dilated" if series else "fourier",
        "kernel_size": (8 if series else 16, "Length of the shortest kernel; the longest covers the input."),
        "norm": "layer" if causal else "batch",
        "dropout": 0.1,
        "bidirectional": None if causal else (True, *streams),
    }
    if method == "mrconv-images":
        sizes = {"patch_size": 2, "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2]}
        model = {**({"preset": "tiny"} if gpu else sizes), "kernel_type": "fourier", "kernel_size": 16}
    steps = 20000 if gpu else 600 if series else 1000
    schedule = _schedule(survey, steps, 32 if gpu else 16, 4e-3, gpu, 50)
    return {"method": method, "task": task, "model": model, "weight_decay": 0.05, **schedule}


def _sounds(survey: Survey, gpu: bool) -> tuple[str, Fields]:
    _need_classes(survey)
    # On a CPU, telephone quality takes a tenth of the time.
    rate = survey.rate if gpu else min(survey.rate, 8000)
    lengths = [max(1, length * rate // survey.rate) for length in survey.lengths]
    length, cut = _fit(lengths, 1, 160_000 if gpu else 16_000)
    told = f"Sampling rate of the model in Hz; sounds of other rates are resampled (most have {survey.rate})."
    return "mrconv-audio", {
        "sampling_rate": (rate, told),
        "max_length": (length, f"Samples per sound. {cut}."),
        **_classes(survey),
        "audio_column": _column(survey, "audio"),
    }


def _texts(survey: Survey, gpu: bool) -> tuple[str, Fields]:
    column = {"text_column": _column(survey, "text")}
    if len(survey.classes) == 1:
        told = "a classifier needs two or more; without the column of the class they train a language model."
        raise DataError(f"the texts have only the class {survey.classes[0]}: {told}")
    if not survey.classes:
        size, _ = _fit(survey.lengths, 32, 1024 if gpu else 256)
        return "mrconv-lm", {"max_length": (size, "Bytes per training example."), **column}
    size, cut = _fit(survey.lengths, 16, 4096 if gpu else 512)
    told = f"Bytes per text, plus one for its class. {cut}."
    if len(survey.columns) > 1:
        column = {"text_column": survey.columns[0], "second_text_column": survey.columns[1]}
        return "mrconv-retrieval", {"max_length": (1 + size, told), **_classes(survey), **column}
    return "mrconv-text", {"max_length": (1 + size, told), **_classes(survey), **column}


def _series(survey: Survey, gpu: bool) -> tuple[str, Fields]:
    longest, cut = _fit(survey.lengths, 16, 16384 if gpu else 2048)
    fields: Fields = {
        "columns": (survey.columns, "Columns that the model reads as channels."),
        "num_channels": survey.channels,
        "max_length": (longest, f"Steps per series. {cut}."),
    }
    if survey.values:
        return "mrconv-regression", {**fields, "target_columns": (["label"], "Column of the value to predict.")}
    if survey.rows_have_labels:
        return "mrconv-positions", {**fields, **_classes(survey)}
    crop = "Training uses random windows, shorter by up to this share; set 0.0 if a class depends on an event's time."
    fields["deltas"] = True, "The model also gets the difference of each channel between steps."
    return "mrconv-series", {**fields, "crop": (0.4, crop), **_classes(survey)}


def _fit(lengths: list[int], least: int, most: int) -> tuple[int, str]:
    """The 95th percentile of lengths within limits, and a sentence with the number of inputs that are cut."""
    longest = max(least, min(most, int(np.ceil(np.quantile(lengths, 0.95)))))
    cut = sum(length > longest for length in lengths)
    told = f"{cut:,} of {len(lengths):,} sampled inputs are longer, and are cut" if cut else "No input is longer"
    return longest, told


def _classified_pictures(survey: Survey, gpu: bool) -> tuple[str, Fields]:
    _need_classes(survey)
    rest = {**_classes(survey), "image_column": _column(survey, "image")}
    if survey.square and survey.sides[0] <= 32:
        channels = 1 if survey.gray else 3
        told = "The pixels form a sequence; all pictures are squares of this side."
        units = {"mean": [0.5] * channels, "std": [0.25] * channels}
        return "mrconv-pixels", {"image_size": (survey.sides[0], told), **units, **rest}
    return "mrconv-images", {"image_size": (224 if gpu else 32, "Side of the model's input in pixels."), **rest}


def _dit(survey: Survey, gpu: bool) -> Fields:
    _refuse_deep(survey, survey.bits > 8)
    if not survey.classes and survey.captions is None:
        told = "sort them as pictures/train/cat/1.png, or add the caption of each, such as 1.txt for 1.png."
        raise DataError(f"the pictures have neither classes nor captions: {told}")
    side = max(8, min(64 if gpu else 32, _side(survey, 0.0) // 8 * 8))
    latents = "Above 64, train on latents: see hf-ext dit precompute, and the recipe disentangled_dit/imagenet_256."
    flip = "Probability of a horizontal flip; set 0.0 if left and right differ, as in letters."
    task: Fields = {
        "image_size": (side, f"Side of the generated pictures{_smallest(survey)}.", latents),
        "objective": "v_prediction",
        "noise_schedule": {"beta_schedule": "squaredcos_cap_v2"},
        "crops": ({"flip": 0.5}, flip),
        "image_column": _column(survey, "image"),
    }
    learned: Fields = {"num_classes": len(survey.classes)}
    if not survey.classes:
        learned = {"joint_attention_dim": 384}
        encoder = "Frozen text encoder with 384 values per token; downloaded from the Hub on first use."
        task |= {
            "text_encoder": ("sentence-transformers/all-MiniLM-L6-v2", encoder),
            "max_text_length": (32, "Longest caption in tokens; longer ones are cut."),
            "text_column": None if survey.captions == "text" else survey.captions,
        }
    preset = "Presets: tiny, S, B, L, XL. Half the patch size shows more detail and takes four times as long."
    model = {"preset": "S" if gpu else "tiny", "patch_size": 4 if side >= 32 else 2}
    model |= {**({"in_channels": 1} if survey.gray else {}), **learned}
    schedule = _schedule(survey, 100000 if gpu else 2000, 64 if gpu else 16, 1e-4 if gpu else 1e-3, gpu, 100)
    average = 0.9999 if gpu else 0.99
    return {"method": "disentangled-dit", "task": task, "model": (model, preset), "ema_decay": average, **schedule}


_INPUTS: dict[str, Callable[[Survey, bool], tuple[str, Fields]]]
_INPUTS = {"sounds": _sounds, "pictures": _classified_pictures, "texts": _texts, "series": _series}
# Kinds of data that a method learns from, and its recipe.
_METHODS: dict[str, tuple[tuple[str, ...], Callable[[Survey, bool], Fields]]] = {
    "semanir": (("pictures", "pairs"), _semanir),
    "mrconv": (tuple(_INPUTS), _mrconv),
    "dit": (("pictures",), _dit),
}


def _refuse_deep(survey: Survey, deep: bool) -> None:
    if deep:
        told = "Convert them first, in each folder: mkdir 8-bits && mogrify -depth 8 -path 8-bits *.*"
        raise DataError(f"{survey.train['path']} has pictures of more than 8 bits per channel. {told}")


def _need_classes(survey: Survey) -> None:
    if len(survey.classes) < 2:
        found = f"only the class {survey.classes[0]}" if survey.classes else "no classes"
        told = f"the {survey.kind} have {found}: put them into one folder per class, as {survey.kind}/train/first/1"
        raise DataError(f"{told}, or add a metadata.csv with the columns file_name and label{survey.advice}.")


def _classes(survey: Survey) -> Fields:
    # Long lists of class names are left to the data if it contains names, and omitted if they are plain numbers.
    numbers = [str(number) for number in range(len(survey.classes))]
    short = len(survey.classes) > 100 and (survey.named or survey.classes == numbers)
    return {"num_labels": len(survey.classes), "label_names": None if short else survey.classes}


def _column(survey: Survey, usual: str) -> str | None:
    return next((name for name in survey.columns[:1] if name != usual), None)


def _side(survey: Survey, share: float = 0.5) -> int:
    """The quantile of the pictures' shorter sides; 256, which limits nothing, if no picture was read."""
    return survey.sides[int(share * (len(survey.sides) - 1))] if survey.sides else 256


def _smallest(survey: Survey) -> str:
    return f"; the smallest side seen is {survey.sides[0]}" if survey.sides else ""


def flow(value: Any) -> str:
    """Writes a value as YAML in one line."""
    options: Any = {"default_flow_style": True, "allow_unicode": True, "sort_keys": False, "width": 1 << 30}
    text = str(yaml.safe_dump(value, **options)).removesuffix("...\n").strip()
    # Between single quotation marks a text keeps its line breaks.
    return text if len(text.splitlines()) == 1 else str(yaml.safe_dump(value, default_style='"', **options)).strip()
