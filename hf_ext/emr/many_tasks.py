"""An [`EMRModel`] as its parts use it: a type that they can name without importing the class that imports them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .building import Place
from .weights import TaskWeights


class ManyTasks(Protocol):
    """One model and the weights of several tasks; [`EMRModel`] documents each name."""

    current: str | None
    weights: TaskWeights

    @property
    def model(self) -> Any: ...
    @property
    def tasks(self) -> list[str]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def places(self) -> Mapping[str, Place]: ...
    def task(self, name: str) -> AbstractContextManager[Any]: ...
    def set_task(self, task: str) -> ManyTasks: ...
    def fits(self, task: str) -> bool: ...
    def generation_config(self, task: str) -> dict[str, Any]: ...
