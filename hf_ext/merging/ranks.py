"""One merge done by several processes of `accelerate launch`, on one machine or many that share a disk."""

from __future__ import annotations

import atexit
import os
from typing import Any

import numpy as np


class Ranks:
    """The processes of this launch; a plain run is one process."""

    def __init__(self) -> None:
        self.index, self.count, self.local_count = 0, 1, 1
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            # nothing here needs a GPU, and processes that do not find one each would not find each other
            state = PartialState(cpu=True)
            # a process that ends with the group's threads alive is now and then aborted by them
            atexit.register(state.destroy_process_group)
            self.index, self.count = state.process_index, state.num_processes
            self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def gather(self, value: Any) -> list[Any]:
        """Collects a value of every process; all have to call it."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        found: list[Any] = gather_object([value])
        return found

    def sum(self, counts: np.ndarray) -> np.ndarray:
        """Adds up integers of every process."""
        return np.sum(self.gather(counts), axis=0)

    def agree(self, failure: BaseException | None) -> None:
        """Waits for all processes, and fails everywhere if one did."""
        told = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for index, text in enumerate(told):
            if text is not None:
                raise ValueError(f"process {index} of {self.count} failed: {text}")
