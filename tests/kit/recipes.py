"""Recipes of `examples/`, cut down to a few steps on a few examples."""

from collections.abc import Sequence
from pathlib import Path

from hf_ext.training import TrainingArguments
from hf_ext.training.arguments import apply_overrides, build, read_yaml


def read_recipe(recipe: Path, flags: Sequence[str] = ()) -> TrainingArguments:
    return build(TrainingArguments, apply_overrides(read_yaml(recipe), list(flags)))


def read_short(recipe: Path, output: Path, data: Path, *flags: str, batch: int = 2) -> TrainingArguments:
    """A run of two steps on `data`, which are measured too."""
    words = [f"--output_dir={output}", f"--data={{train: {{path: {data}}}, eval: {{path: {data}}}}}"]
    words += ["--max_steps=2", f"--per_device_train_batch_size={batch}", "--mixed_precision='no'", "--report_to=none"]
    return read_recipe(recipe, [*words, *flags])
