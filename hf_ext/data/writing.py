"""Recipes for the user's data: commented YAML with sizes for the data and the machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import yaml
from PIL import Image

from ..data.broken import is_broken_picture, open_bytes
from ..data.found import Survey
from ..data.opening import open_source
from ..data.source import DataSource
from ..errors import DataError
from ..hub.released import list_released

# Examples of data for a recipe without --data; `hf-ext data check` lists what is missing.
PLACEHOLDERS = {
    "semanir": Survey("pictures", {"path": "./YOUR-PHOTOS"}, None, 1000, "photographs of your own"),
    "mrconv": Survey(
        "sounds", {"path": "./YOUR-SOUNDS"}, None, 1000, "a folder of sounds for each class",
        classes=["first", "second"], rate=16000, lengths=[16000],
    ),
    "dit": Survey(
        "pictures", {"path": "./YOUR-PICTURES"}, None, 1000, "a folder of pictures for each class",
        classes=["first", "second"],
    ),
}  # fmt: skip


def write_recipe(method: str, folder: Path, survey: Survey, gpu: bool) -> str:
    """
    Writes a recipe for data.

    Args:
        method (`str`): `"semanir"`, `"mrconv"` or `"dit"`.
        folder (`Path`): Folder of the recipe and of its run.
        survey (`Survey`): Findings about the data.
        gpu (`bool`): Choose sizes for a GPU instead of two CPU cores.

    Raises:
        ValueError: If the method cannot learn from such data.
    """
    file, machine = shlex.quote(str(folder / f"{method}.yaml")), "a GPU" if gpu else "a CPU"
    # Join lines: a class name may contain line breaks.
    told = [" ".join(line.split()) for line in survey.lines]
    head = [
        *(f"# {line[:1].upper()}{line[1:]}." for line in told),
        f"# Written by `hf-ext init {method}`, for {machine}.",
        f"# Check the data: hf-ext data check {file}",
        f"# Train, or resume an interrupted training: hf-ext train {file}",
        f"# List all fields: hf-ext train --help {file}. The command line also accepts them: --max_steps 100",
    ]
    body = {"semanir": _semanir, "mrconv": _mrconv, "dit": _dit}[method](survey, gpu)
    return (
        "\n".join([*head, *body.pop(0), f"output_dir: {_text(str(folder / 'run'))}", *_data(survey), *sum(body, [])])
        + "\n"
    )


def _data(survey: Survey) -> list[str]:
    lines = ["data:", f"  train: {flow(survey.train)}"]
    if survey.eval is None:
        other = {**survey.train, "split": "validation"}
        if survey.kind == "pairs":
            other = {"path": str(Path(survey.train["path"]).with_name("validation"))}
        lines += [
            "  # No data for evaluation. Move some examples to a folder validation/ beside the others, and add:",
            f"  # eval: {flow(other)}",
        ]
    else:
        told = "Examples held out by content" if "hold_out" in survey.eval else "Examples of another split"
        lines += [f"  # {told}, for evaluation.", f"  eval: {flow(survey.eval)}"]
    if survey.broken:
        # Allow twice the share that was seen.
        share = min(1.0, round(2 * survey.broken, 2) + 0.01)
        lines += [
            "  # Largest share of unreadable examples; they are left out.",
            f"  max_bad_examples: {share:.2g}",
        ]
    return [*lines, "  # Number of processes that load data; 0 loads in the main process.", "  num_workers: 2"]


def _schedule(survey: Survey, steps: int, batch: int, rate: str, gpu: bool, warmup: int) -> list[str]:
    # One long file or text gives many different examples.
    batch = max(1, min(batch, survey.learned // 2)) if survey.learned > 1 else batch
    every, times = max(1, steps // 5), steps * batch / survey.learned
    told = [f"# {times:,.{0 if times > 10 else 1}f} epochs."] if survey.learned > 1 else []
    return [
        *told,
        "# More steps give better models; the learning rate decays to zero at the last step.",
        f"max_steps: {steps}",
        "# Reduce this if memory runs out.",
        f"per_device_train_batch_size: {batch}",
        f"learning_rate: {rate}",
        f"warmup_steps: {warmup}",
        *(["mixed_precision: bf16"] if gpu else []),
        "logging_steps: 20",
        f"eval_steps: {every}",
        f"save_steps: {every}",
        "save_total_limit: 1",
        "report_to: none",
    ]


def _semanir(survey: Survey, gpu: bool) -> list[list[str]]:
    if survey.kind not in ("pictures", "pairs"):
        raise ValueError(f"SemanIR restores pictures, but the data are {survey.kind}: give a folder of pictures.")
    _refuse_deep(survey, survey.boundless)
    pairs = survey.kind == "pairs"
    # A multiple of 8, for the windows and the levels of a U-shaped model, no larger than most pictures.
    patch = max(16, min(128 if gpu else 64, _side(survey) // 8 * 8))
    if pairs:
        task = [f"  # Pairs: {survey.roles[0]}.", "  degradation: {kind: paired}"]
    else:
        task = [
            "  # Degradation to learn, applied to clean pictures. Others: {kind: jpeg, quality: [10, 90]}, or",
            "  # {kind: blur, sigma: [0.5, 3]}, a list of several, or pairs of pictures in lq/ and hq/.",
            "  degradation: {kind: gaussian_noise, sigma: [0, 50]}",
            "  eval_degradation: {kind: gaussian_noise, sigma: 25}",
        ]
    column = [] if pairs or survey.columns in ([], ["image"]) else [f"  image_column: {_text(survey.columns[0])}"]
    task += [
        f"  # Side of the training patches in pixels{_smallest(survey)}.",
        f"  patch_size: {patch}",
    ]
    channels = ", num_channels: 1" if survey.gray else ""
    fresh = gpu or survey.scale > 1 or not list_released()
    if survey.scale > 1:
        model = [
            f"# Super-resolution by {survey.scale}.",
            f"model: {{preset: columnar-{'s' if gpu else 'tiny'}, scale: {survey.scale}{channels}}}",
        ]
    elif fresh:
        model = [
            "# 3.6 M parameters; u-shaped is the model of the paper, with 25.8 M.",
            f"model: {{preset: u-shaped-small{channels}}}",
        ]
    else:
        released = f"denoise-{'gray' if survey.gray else 'color'}"
        model = [
            "# Starts from a released model. To train from scratch, replace init_from by:",
            f"# model: {{preset: u-shaped-small{channels}}}",
            f"init_from: {released}",
        ]
    schedule = _schedule(survey, 100000 if gpu else 1000, 8 if gpu else 4, "2.0e-4" if fresh else "1.0e-4", gpu, 100)
    return [
        ["method: semanir"],
        ["task:", *task, *column],
        model,
        ["# The saved weights are an exponential moving average.", "ema_decay: 0.999"] if gpu else [],
        schedule,
    ]


def _mrconv(survey: Survey, gpu: bool) -> list[list[str]]:
    make: dict[str, Callable[[Survey, bool], tuple[str, list[str]]]] = {
        "sounds": _sounds, "texts": _texts, "series": _series, "pictures": _classified_pictures,
    }  # fmt: skip
    if survey.kind not in make:
        raise ValueError(f"MRConv learns from sounds, pictures, texts and series, but the data are {survey.kind}.")
    method, task = make[survey.kind](survey, gpu)
    # A causal model must not look ahead.
    causal = method == "mrconv-lm"
    if method == "mrconv-images":
        model = (
            ["model: {preset: tiny, kernel_type: fourier, kernel_size: 16}"]
            if gpu
            else [
                "# For a GPU: model: {preset: tiny, kernel_type: fourier, kernel_size: 16}",
                "model:",
                "  patch_size: 2",
                "  hidden_sizes: [32, 64, 128]",
                "  depths: [2, 2, 2]",
                "  kernel_type: fourier",
                "  kernel_size: 16",
            ]
        )
    else:
        # Short dilated kernels and a wider model learn more from small sets of series.
        series = method == "mrconv-series"
        model = [
            "model:",
            "  # Width and depth: larger models learn more and take longer.",
            f"  hidden_size: {128 if gpu else 64 if series else 32}",
            f"  num_hidden_layers: {6 if gpu else 3}",
            f"  kernel_type: {'dilated' if series else 'fourier'}",
            "  # Length of the shortest kernel; the longest covers the input.",
            f"  kernel_size: {8 if series else 16}",
            f"  norm: {'layer' if causal else 'batch'}",
            "  dropout: 0.1",
            *(
                []
                if causal
                else [
                    # Models of differences between steps do not stream.
                    *([] if series else ["  # false gives a causal model, which also classifies streams."]),
                    "  bidirectional: true",
                ]
            ),
        ]
    steps = 20000 if gpu else 600 if method == "mrconv-series" else 1000
    schedule = _schedule(survey, steps, 32 if gpu else 16, "4.0e-3", gpu, 50)
    return [[f"method: {method}"], ["task:", *task], model, ["weight_decay: 0.05"], schedule]


def _sounds(survey: Survey, gpu: bool) -> tuple[str, list[str]]:
    _need_classes(survey, "sounds")
    # On a CPU, telephone quality takes a tenth of the time.
    rate = survey.rate if gpu else min(survey.rate, 8000)
    shortened = [max(1, length * rate // survey.rate) for length in survey.lengths]
    length = Survey("", {}, None, 0, "", lengths=shortened).longest(160_000 if gpu else 16_000)
    return "mrconv-audio", [
        f"  # Sampling rate of the model in Hz; sounds of other rates are resampled (most have {survey.rate}).",
        f"  sampling_rate: {rate}",
        f"  # Samples per sound. {_cut(shortened, length)}.",
        f"  max_length: {length}",
        *_classes(survey),
        *_column(survey, "audio"),
    ]


def _texts(survey: Survey, gpu: bool) -> tuple[str, list[str]]:
    column = _column(survey, "text")
    if len(survey.classes) < 2:
        size = max(32, survey.longest(1024 if gpu else 256))
        return "mrconv-lm", ["  # Bytes per training example.", f"  max_length: {size}", *column]
    size = 1 + max(16, survey.longest(4096 if gpu else 512))
    return "mrconv-text", [
        f"  # Bytes per text, plus one for its class. {_cut(survey.lengths, size - 1)}.",
        f"  max_length: {size}",
        *_classes(survey),
        *column,
    ]


def _series(survey: Survey, gpu: bool) -> tuple[str, list[str]]:
    longest = max(16, survey.longest(16384 if gpu else 2048))
    lines = [
        "  # Columns that the model reads as channels.",
        f"  columns: {flow(survey.columns)}",
        *([] if survey.channels is None else [f"  num_channels: {survey.channels}"]),
        f"  # Steps per series. {_cut(survey.lengths, longest)}.",
        f"  max_length: {longest}",
    ]
    if survey.values:
        return "mrconv-regression", [*lines, "  # Column of the value to predict.", "  target_columns: [label]"]
    if survey.rows_have_labels:
        return "mrconv-positions", [*lines, *_classes(survey)]
    lines += [
        "  # The model also gets the difference of each channel between steps.",
        "  deltas: true",
        "  # Training uses random windows of a series, shorter by up to this share; set 0.0 if a class depends on",
        "  # the time of an event.",
        "  crop: 0.4",
    ]
    return "mrconv-series", [*lines, *_classes(survey)]


def _cut(lengths: list[int], longest: int) -> str:
    """Sentence with the number of inputs that are cut."""
    cut = sum(length > longest for length in lengths)
    return f"{cut:,} of {len(lengths):,} sampled inputs are longer, and are cut" if cut else "No input is longer"


def _classified_pictures(survey: Survey, gpu: bool) -> tuple[str, list[str]]:
    _need_classes(survey, "pictures")
    side = survey.sides[0]
    column = _column(survey, "image", "image_column")
    if survey.equal and side <= 32 and _is_square(survey):
        channels = 1 if survey.gray else 3
        return "mrconv-pixels", [
            "  # The pixels form a sequence; all pictures are squares of this side.",
            f"  image_size: {side}",
            f"  mean: {flow([0.5] * channels)}",
            f"  std: {flow([0.25] * channels)}",
            *_classes(survey),
            *column,
        ]
    return "mrconv-images", [
        "  # Side of the model's input in pixels.",
        f"  image_size: {224 if gpu else 32}",
        *_classes(survey),
        *column,
    ]


def _is_square(survey: Survey) -> bool:
    """True if the first picture that can be read is a square; only asked where all have one size."""
    column = survey.columns[0] if survey.columns else "image"
    data: Any = open_source(DataSource(**{**survey.train, "hold_out": 0.0}))
    for row in data.select_columns([column]).cast_column(column, datasets.Image(decode=False)):
        if not is_broken_picture(row[column]):
            with Image.open(open_bytes(row[column])) as picture:
                return picture.size[0] == picture.size[1]
    return False


def _dit(survey: Survey, gpu: bool) -> list[list[str]]:
    if survey.kind != "pictures":
        raise ValueError(
            f"a Disentangled DiT generates pictures, but the data are {survey.kind}: give a folder of pictures."
        )
    _refuse_deep(survey, survey.deep)
    if not survey.classes and survey.captions is None:
        raise ValueError(
            "the pictures have neither classes nor captions: put them into one folder per class, as in "
            "pictures/train/cat/1.png, or add a caption file for each, such as 1.txt for 1.png."
        )
    side = max(8, min(64 if gpu else 32, _side(survey, 0.0) // 8 * 8))
    channels = ", in_channels: 1" if survey.gray else ""
    task = [
        f"  # Side of the generated pictures{_smallest(survey)}.",
        "  # Above 64, train on latents: see hf-ext dit precompute, and the recipe disentangled_dit/imagenet_256.",
        f"  image_size: {side}",
        "  objective: v_prediction",
        "  noise_schedule: {beta_schedule: squaredcos_cap_v2}",
        "  # Probability of a horizontal flip; set 0.0 if left and right differ, as in letters.",
        "  crops: {flip: 0.5}",
        *_column(survey, "image", "image_column"),
    ]
    patch, preset = 4 if side >= 32 else 2, "S" if gpu else "tiny"
    learned = f"num_classes: {len(survey.classes)}"
    if not survey.classes:
        learned = "joint_attention_dim: 384"
        task += [
            "  # Frozen text encoder with 384 values per token; downloaded from the Hub on first use.",
            "  text_encoder: sentence-transformers/all-MiniLM-L6-v2",
            "  # Longest caption in tokens; longer ones are cut.",
            "  max_text_length: 32",
            *([] if survey.captions == "text" else [f"  text_column: {_text(str(survey.captions))}"]),
        ]
    model = [
        "# Presets: tiny, S, B, L, XL. Half the patch size shows more detail and takes four times as long.",
        f"model: {{preset: {preset}, patch_size: {patch}{channels}, {learned}}}",
    ]
    schedule = _schedule(survey, 100000 if gpu else 2000, 64 if gpu else 16, "1.0e-4" if gpu else "1.0e-3", gpu, 100)
    return [["method: disentangled-dit"], ["task:", *task], model, [f"ema_decay: {0.9999 if gpu else 0.99}"], schedule]


def _refuse_deep(survey: Survey, deep: bool) -> None:
    if deep:
        raise DataError(
            f"{survey.train['path']} contains pictures with more than 8 bits per channel, which this training does "
            "not read. Convert them first, in each folder: mkdir 8-bits && mogrify -depth 8 -path 8-bits *.*"
        )


def _need_classes(survey: Survey, what: str) -> None:
    if len(survey.classes) < 2:
        found = f"only the class {survey.classes[0]}" if survey.classes else "no classes"
        raise ValueError(
            f"the {what} have {found}: put them into one folder per class, as in {what}/train/first/1, or add a "
            "metadata.csv with the columns file_name and label."
        )


def _classes(survey: Survey) -> list[str]:
    # Long lists of class names are left to the data if it contains names, and omitted if they are plain numbers.
    numbers = [str(number) for number in range(len(survey.classes))]
    short = len(survey.classes) > 100 and (survey.named or survey.classes == numbers)
    names = [] if short else [f"  label_names: {flow(survey.classes)}"]
    return [f"  num_labels: {len(survey.classes)}", *names]


def _column(survey: Survey, usual: str, option: str | None = None) -> list[str]:
    """The option that names a column, if it does not have its default name."""
    found = survey.columns[0] if survey.columns else usual
    return [] if found == usual else [f"  {option or usual + '_column'}: {_text(found)}"]


def _side(survey: Survey, share: float = 0.5) -> int:
    """The quantile of the pictures' shorter sides; 256, which limits nothing, if no picture was read."""
    return survey.sides[int(share * (len(survey.sides) - 1))] if survey.sides else 256


def _smallest(survey: Survey) -> str:
    return f"; the smallest side seen is {survey.sides[0]}" if survey.sides else ""


def flow(value: Any) -> str:
    """Writes a mapping or list as YAML in one line."""
    if isinstance(value, dict):
        items = (
            f"{_text(str(key))}: {_text(item) if isinstance(item, str) else flow(item)}" for key, item in value.items()
        )
        return "{" + ", ".join(items) + "}"
    return json.dumps(value, ensure_ascii=False)


def _text(value: str) -> str:
    """Writes a text as YAML: without quotes if it is read back as itself, unlike `null` and `1.5`."""
    bare = value.isascii() and value.replace("_", "").replace("/", "").isalpha() and yaml.safe_load(value) == value
    return value if bare else json.dumps(value, ensure_ascii=False)
