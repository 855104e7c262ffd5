"""A run in one or two processes whose noise depends on the pictures alone: `python -m … DATA OUT BATCH TASK`."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from hf_ext.tasks import diffusion

from .diffusion_testing import MODEL, make_arguments, run

STEPS = 4


class Watched(diffusion.DisentangledDiTTask):
    """Keeps the network that it trains."""

    def loss(self, model, batch, step):
        self.network = model
        return super().loss(model, batch, step)


def train_on(data: Path, out: Path, batch: int, task: dict[str, Any], passes: int = 1) -> str:
    """Trains on all that is random by rank made a function of each picture; a digest of the network's weights."""
    plain = diffusion.noisy_samples

    def noisy_samples(scheduler, clean, noise, places):
        noise = (clean.flip(-1) * 1e3).sin() * 2**0.5
        return plain(scheduler, clean, noise, clean.mean((1, 2, 3)).mul(1e3).sin().abs() * 0.99)

    diffusion.noisy_samples = noisy_samples
    try:
        changes = {"max_steps": STEPS, "per_device_train_batch_size": batch, "gradient_accumulation_steps": passes}
        model = {**MODEL, "condition_dropout": 0.0, "control_dropout": 0.0}
        arguments = make_arguments(out, data, task=task, model=model, learning_rate=1e-3, **changes)
        watched, _ = run(arguments, Watched)
    finally:
        diffusion.noisy_samples = plain
    weights = torch.cat([value.detach().flatten() for value in watched.network.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def main() -> None:
    data, out, batch, task = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    digest = train_on(data, out, batch, task)
    state = PartialState()
    out.with_name(f"{out.name}-{state.process_index}-of-{state.num_processes}").write_text(digest)


if __name__ == "__main__":
    main()
