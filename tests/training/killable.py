"""A run that tests kill."""

import time
from pathlib import Path

from hf_ext.training import train

from .tiny import TinyTask, make_arguments


class SlowTask(TinyTask):
    """Steps that last long enough to be hit."""

    def loss(self, model, batch, step):
        time.sleep(0.002)
        return super().loss(model, batch, step)


def main(output: str, data: str, steps: str) -> None:
    sources = {"train": {"path": data}, "eval": {"path": data}}
    arguments = make_arguments(
        Path(output), sources, max_steps=int(steps), save_steps=2, eval_steps=3, gradient_accumulation_steps=1
    )
    train(SlowTask(), arguments)
