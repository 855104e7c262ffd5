"""Few steps: a model learns to do in one step what it did in ten, with guidance.

accelerate launch examples/disentangled_dit/distill.py examples/disentangled_dit/distill.yaml [--field value]
python examples/disentangled_dit/distill.py score TEACHER STUDENT --data CIFAR10 [--per-class N] [--out FILE.json]
The second measures class models of CIFAR-10: pictures of few and of many steps, by the judge in results/.
"""

import argparse
import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from hf_ext.errors import UsageError, run_script
from hf_ext.files import write_json
from hf_ext.hub.released import find_model
from hf_ext.tasks.diffusion import DisentangledDiTTask
from hf_ext.training import TrainingArguments, main
from hf_ext.training.arguments import build

JUDGE = Path(__file__).resolve().parent / "results" / "judge"
# Steps and guidance of the rows: those of the study, and as few as the student takes.
ROWS = {
    "teacher, 20 steps, guidance 2": ("teacher", 20, 2.0),
    "teacher, 4 steps, guidance 2": ("teacher", 4, 2.0),
    "teacher, 4 steps, no guidance": ("teacher", 4, 1.0),
    "student, 4 steps, no guidance": ("student", 4, 1.0),
}


@strict
@dataclass
class DistillTask(DisentangledDiTTask):
    """
    Multistep consistency distillation (arXiv 2403.06807) of the model of `init_from`, which is the teacher too.

    The steps of the student divide the schedule into parts. From a noisy picture the teacher takes one of its own,
    shorter steps, with guidance; from there the student goes on to the end of the part. Both in one step is what the
    student learns, so that what it knows of the end of a part moves to its beginning. It is then sampled with `steps`
    steps of DDIM and `guidance_scale=1`, a network call each.

    Args:
        steps (`int`, defaults to 4): Steps of the student; they divide `teacher_steps`.
        teacher_steps (`int`, defaults to 40): Steps of the teacher; they divide the timesteps of the schedule.
        guidance (`float`, defaults to 2.0): Guidance of the teacher.
    """

    steps: int = 4
    teacher_steps: int = 40
    guidance: float = 2.0

    def validate_steps(self) -> None:
        if min(self.steps, self.teacher_steps) < 1 or self.teacher_steps % self.steps:
            raise ValueError(f"steps is {self.steps}: it must divide teacher_steps, {self.teacher_steps}, above 0.")
        if not abs(self.guidance) < float("inf"):
            raise ValueError(f"guidance is {self.guidance}: a finite number is needed.")
        if self.objective != "v_prediction":
            raise ValueError(f"objective is {self.objective}: only v_prediction is distilled.")

    def build_model(self, config: dict[str, Any], init_from: str | None) -> nn.Module:
        """The student, and a copy of it that stays as it is."""
        if init_from is None:
            raise UsageError("there is no teacher: set init_from to the model that is distilled.")
        model = super().build_model(config, init_from)
        if (count := self.scheduler.config.num_train_timesteps) % self.teacher_steps:
            raise UsageError(f"task.teacher_steps is {self.teacher_steps}: it must divide the {count} timesteps.")
        self.teacher = copy.deepcopy(model).eval().requires_grad_(False)
        return model

    def angle(self, timesteps: Tensor) -> Tensor:
        """Angle [B, 1, 1, 1] of noisy samples `cos(angle) x + sin(angle) e`; 0, no noise, at timestep -1."""
        signal = self.scheduler.alphas_cumprod.to(timesteps.device)[timesteps.clamp(min=0)]
        return torch.where(timesteps < 0, 1.0, signal).sqrt().clamp(max=1).acos()[:, None, None, None]

    def move(self, samples: Tensor, velocity: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """One step of DDIM between two timesteps [B], as the pipeline takes it: the clean picture is clipped."""
        start, end = self.angle(start), self.angle(end)
        clean = start.cos() * samples - start.sin() * velocity
        noise = start.sin() * samples + start.cos() * velocity
        if self.scheduler.config.clip_sample:
            clean = clean.clamp(-self.scheduler.config.clip_sample_range, self.scheduler.config.clip_sample_range)
        return end.cos() * clean + end.sin() * noise

    @torch.no_grad()
    def target(self, model: nn.Module, noisy: Tensor, place: Tensor, batch: dict[str, Any]) -> Tensor:
        """
        Velocity with which one step leads from the noisy samples to the end of their part.

        A step of DDIM from angle s to angle e is a rotation, `x_e = cos(s - e) x_s - sin(s - e) v`, which is solved
        for v. Where the teacher's step ends the part, v is the teacher's own.
        """
        size, ratio = self.scheduler.config.num_train_timesteps // self.teacher_steps, self.teacher_steps // self.steps
        start, middle = (place + 1) * size - 1, place * size - 1
        end = place // ratio * ratio * size - 1
        nothing = torch.zeros(len(noisy), dtype=torch.bool, device=noisy.device)
        self.teacher.to(noisy.device)
        given, absent = (
            self.teacher(noisy, start, **self._conditions(batch, dropped, dropped)).sample.float()
            for dropped in (nothing, ~nothing)
        )
        reached = self.move(noisy, absent + self.guidance * (given - absent), start, middle)
        # At timestep -1 nothing is predicted.
        velocity = model(reached, middle.clamp(min=0), **self._conditions(batch, nothing, nothing)).sample.float()
        last = (middle == end)[:, None, None, None]
        reached = torch.where(last, reached, self.move(reached, velocity, middle, end))
        turned = self.angle(start) - self.angle(end)
        return (turned.cos() * noisy - reached) / turned.sin()

    def loss(self, model: nn.Module, batch: dict[str, Any], step: int) -> Tensor:
        """Mean squared error of the student's velocity."""
        clean = self._clean(batch, self.posterior)
        place = torch.randint(self.teacher_steps, (len(clean),), device=clean.device)
        start = (place + 1) * (self.scheduler.config.num_train_timesteps // self.teacher_steps) - 1
        angle = self.angle(start)
        noisy = angle.cos() * clean + angle.sin() * torch.randn_like(clean)
        target = self.target(model, noisy, place, batch)
        nothing = torch.zeros(len(clean), dtype=torch.bool, device=clean.device)
        prediction = model(noisy, start, **self._conditions(batch, nothing, nothing)).sample.float()
        return (prediction - target).square().mean()


def make_task(arguments: TrainingArguments) -> DistillTask:
    """The task of a run."""
    return build(DistillTask, arguments.task, "task")


def score(words: list[str]) -> None:
    """Measures both models with few steps, and the teacher with many."""
    from measuring import Judge, measure_classes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=find_model, help="folder, or name of a released model")
    parser.add_argument("student", type=find_model)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--judge", type=Path, default=JUDGE)
    parser.add_argument("--per-class", type=int, default=100)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    judge = Judge(asked.judge, asked.data, 0)
    rows = {}
    for name, (model, steps, guidance) in ROWS.items():
        sampling = {"num_inference_steps": steps, "guidance_scale": guidance}
        measured = measure_classes(Path(getattr(asked, model)), judge, asked.per_class, **sampling)
        rows[name] = {"network_calls": steps * (1 if guidance == 1 else 2), **measured}
        print(name, rows[name], flush=True)
    if asked.out is not None:
        write_json(asked.out, rows)


if __name__ == "__main__":
    run_script(lambda: score(sys.argv[2:]) if sys.argv[1:2] == ["score"] else main(sys.argv[1:], make_task))
