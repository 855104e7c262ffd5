"""Steps of the study: runs, what is measured of them, and the judge that measures; each in a file of results/steps."""

import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from measuring import SAMPLING, Judge, keep_judge, measure_classes, right_shares
from runs import CLASSIFIER, EXAMPLES, OURS, recipe, train
from safetensors import safe_open
from sets import folders, prepare

from hf_ext.training.arguments import read_yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from studies import Steps  # noqa: E402  found through the line above

# Generated images of each class, of a finished model.
MEASURED = 30
# Real test pictures that are kept apart from the judge's reference: as many as are generated.
OTHERS = 10 * MEASURED
# Points of a curve.
POINTS = 4
RESULTS = EXAMPLES / "results"


class NotMeasured(Exception):
    """A step is not there, and only tables are to be written."""


class Study(Steps):
    """
    Steps with their results in files.

    Args:
        data (`Path`, *optional*): Folder of the data sets; without it nothing is computed.
        work (`Path`): Data, runs and models.
        scale (`float`): Share of every budget; only with 1 results are kept in the repository.
    """

    # What makes a run; anything else where the steps are tried without training.
    train = staticmethod(train)

    def __init__(self, data: Path | None, work: Path, scale: float):
        super().__init__(work, scale, RESULTS / "steps" if scale == 1 else None)
        self.data, number = data, None if scale >= 0.1 else 60
        self.sets = folders(work, number)
        if data is not None:
            prepare(data, work, number)
        self.judge = cache(self._judge)
        # How each run is made, where its model is needed and not here.
        self.trained_by: dict[str, Callable[[], Any]] = {}
        self.judge_folder = RESULTS / "judge" if scale == 1 else work / "judge"

    def step(self, name: str, settings: dict[str, Any], compute: Callable[[], Any]) -> Any:
        """As in [`Steps`]; without data a step that is missing is an error."""
        if self.data is None and not self.is_done(name, settings):
            raise NotMeasured(name)
        return super().step(name, settings, compute)

    def measured_so_far(self, compute: Callable[[], Any]) -> list[Any]:
        """One result in a list; an empty one where it is not there and only tables are to be written."""
        try:
            return [compute()]
        except NotMeasured:
            return []

    def count(self, number: int) -> int:
        """Images to generate; one where the machinery is tried."""
        return number if self.scale >= 0.1 else 1

    def values(self, name: str, **changes: Any) -> dict[str, Any]:
        """Settings of a run: a set, 250 of its test pictures for the loss, and what differs from the recipe."""
        path = str(self.sets[name])
        test = "test[:250]" if self.scale >= 0.1 else "test[:4]"
        return {"data": {"train": {"path": path}, "eval": {"path": path, "split": test}}, "seed": 0, **changes}

    def run(
        self,
        name: str,
        values: dict[str, Any],
        steps: int | None,
        kind: str = OURS,
        before: Callable[[], Any] = lambda: None,
    ) -> dict[str, Any]:
        """A training of so many steps, or of those of its recipe; `before` makes what it starts from."""
        whole = steps or read_yaml(recipe(kind))["max_steps"]
        count = max(2, int(whole * self.scale))
        if steps is not None:
            values = {**values, "max_steps": count, "warmup_steps": count // 20}
        elif count != whole:
            values = {**values, "max_steps": count, "warmup_steps": 0}
        if "task.samples_per_class" in values:
            values["eval_steps"] = -(-count // POINTS)

        def compute() -> dict[str, Any]:
            before()
            row = self.train(self.work / "runs" / name, values, kind)
            told = {key: value for key, value in row.items() if key != "losses"}
            return {**told, "parameters": count_parameters(self.snapshot(name))}

        self.trained_by[name] = compute
        return self.step(f"run-{name}", {"recipe": read_yaml(recipe(kind)), "values": values, "kind": kind}, compute)

    def model(self, name: str) -> Path:
        """The model of a run, which is trained again where another machine trained it."""
        if not self.snapshot(name).is_dir():
            self.trained_by[name]()
        return self.snapshot(name)

    def measure(self, name: str, row: dict[str, Any], compute: Callable[[], Any], **settings: Any) -> Any:
        """What is measured of a finished run."""
        settings = {"run": row["arguments"], "judge": self.judged_by(), "sampling": SAMPLING, **settings}
        return self.step(f"measure-{name}", settings, compute)

    def judged_by(self) -> dict[str, Any]:
        """What the judge's measurements depend on."""
        told = self.step("judge", self.judge_settings(), lambda: make_judge(self))
        return {"accuracy": told["accuracy"], "others": OTHERS}

    def judge_settings(self) -> dict[str, Any]:
        """The recipe of the judge."""
        return {"recipe": read_yaml(recipe(CLASSIFIER))}

    def _judge(self, name: str, side: int | None = None, middle: int | None = None) -> Judge:
        others = OTHERS if self.scale >= 0.1 else 10
        return Judge(self.judge_folder, self.sets[name], others, side, middle)

    def classes(self, name: str, row: dict[str, Any], data: str, kind: str = OURS) -> dict[str, float]:
        """The images of a finished class model."""
        number = self.count(MEASURED)
        return self.measure(
            name,
            row,
            lambda: measure_classes(self.model(name), self.judge(data), number, kind),
            per_class=number,
        )


def count_parameters(snapshot: Path) -> int:
    """Numbers that a snapshot's files of weights hold."""
    count = 0
    for path in snapshot.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  no dictionary
    return count


def make_judge(study: Study) -> dict[str, Any]:
    """Trains the judge, keeps its weights in 16 bits, and measures those on all real test pictures."""
    # More test pictures than of other runs: it is long, and is looked at on its way.
    path = str(study.sets["32"])
    test = "test[:1000]" if study.scale >= 0.1 else "test[:4]"
    values = {"data": {"train": {"path": path}, "eval": {"path": path, "split": test}}, "seed": 0}
    row = study.run(CLASSIFIER, values, None, CLASSIFIER)
    keep_judge(study.model(CLASSIFIER), study.judge_folder)
    accuracy = right_shares(study.judge_folder, {side: study.sets[side] for side in ("32", "16")})
    return {**row, "accuracy": accuracy, "real": {side: study.judge(side).real() for side in ("32", "16")}}
