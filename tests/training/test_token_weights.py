"""A step on texts of uneven length is the same step, however its texts are split into passes and processes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_ext.training import build_task
from hf_ext.training.state import RunFolder
from tests.kit.own_data import write_files

from .launching import fork_two
from .tiny import make_arguments, run

TEXTS = ["a", "the second text is long, and the third " * 3, "no", "yes, perhaps", "x" * 90, "last but one, " * 4]


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "kernel_size": 4, "branch_norm": "none", "norm": "layer"}
STEP = {"max_steps": 1, "optim": "SGD", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
STEP |= {"max_grad_norm": 0.0, "weight_decay": 0.0, "ema_decay": 0.0}


def weights_and_loss(folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    weights = load_file(folder / "run" / "snapshot" / "model.safetensors")
    return weights, RunFolder(folder / "run").read_metrics()[0]["loss"]


@pytest.mark.parametrize(
    ("processes", "batch", "passes"),
    [(1, 3, 2), (1, 1, 6), *(pytest.param(2, *split, marks=pytest.mark.slow) for split in ((3, 1), (1, 3)))],
)
def test_the_split_of_a_step_changes_nothing(tmp_path, processes, batch, passes):
    train_here(tmp_path / "whole", 6, 1)
    if processes == 1:
        train_here(tmp_path / "split", batch, passes)
    else:
        fork_two("tests.training.test_token_weights", str(tmp_path / "split"), str(batch), str(passes))
    (whole, loss), (split, other) = weights_and_loss(tmp_path / "whole"), weights_and_loss(tmp_path / "split")
    assert other == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-6)


def train_here(folder: Path, batch: int, passes: int) -> None:
    """One step of plain gradient descent, without what depends on a batch."""
    write_files(folder, {"texts.jsonl": "\n".join(json.dumps({"text": text}) for text in TEXTS)})
    values = {"method": "mrconv-lm", "task": {"max_length": 128}, "model": SIZES, **STEP}
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": passes}
    arguments = make_arguments(folder / "run", folder / "texts.jsonl", **values, **sizes)
    run(build_task(arguments), arguments)


def main() -> None:
    folder, batch, passes = sys.argv[1:]
    train_here(Path(folder), int(batch), int(passes))
