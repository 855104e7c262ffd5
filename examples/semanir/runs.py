"""Training runs of the study, each through `accelerate launch` on one thread and skipped where done."""

import sys
from pathlib import Path
from typing import Any

from hf_ext.training import TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import launch, read_arguments, read_metrics, summary  # noqa: E402  found through the line above

EXAMPLES = Path(__file__).resolve().parent
RECIPE = EXAMPLES / "study.yaml"


def run_arguments(values: dict[str, Any]) -> TrainingArguments:
    """What the recipe with these values says."""
    return read_arguments(RECIPE, values)


def train(run: Path, values: dict[str, Any], peer: str | None = None) -> dict[str, Any]:
    """Trains or continues a run; its budget, scores and losses. Of a finished one only snapshot and curves stay."""
    script = ["train.py"] if peer is None else ["peers.py", peer]
    launch(run, [EXAMPLES / script[0], *script[1:]], RECIPE, values)
    psnr = [[row["samples"], round(row["eval_psnr"], 3)] for row in read_metrics(run) if "eval_psnr" in row]
    return {**summary(run), "psnr": psnr}
