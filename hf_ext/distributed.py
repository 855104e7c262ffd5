"""Work shared by the processes of `accelerate launch`, on one machine or several with a common disk."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

# Longest wait for the slowest process: in words, unlike exchanges of tensors, for which a training sets its own.
_PATIENCE = timedelta(days=7)
# What hides the bars of a library that is imported already; the others read their setting then.
_BARS = {
    "datasets": "disable_progress_bars",
    "huggingface_hub.utils": "disable_progress_bars",
    "transformers.utils.logging": "disable_progress_bar",
}

Value = TypeVar("Value")
Given = ParamSpec("Given")


# The processes' own group and the one for words.
_groups: list[Any] = []


class LostProcessError(ConnectionError):
    """Another process ended, was killed or did not respond in time."""


class FailedElsewhereError(ValueError):
    """Another process failed and reports the error itself."""


class Ranks:
    """
    The processes of this launch, or of a running training's [`~accelerate.Accelerator`]; a plain run is one process.
    What one of them calls here, all call.
    """

    def __init__(self, accelerator: Accelerator | PartialState | None = None) -> None:
        self.index, self.count, self.local_index = 0, 1, 0
        self.group: Any = None
        self.local_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # Both come from a launcher; a container of a cluster may have the number alone, and nobody to wait for.
        launched = "LOCAL_RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if accelerator is not None or launched:
            state = accelerator or _join_processes()
            self.index, self.count = state.process_index, state.num_processes
            self.local_index = state.local_process_index
        if self.count > 1:
            import torch

            # Words travel by gloo, beside the tensors of a training, and wait as long as the slowest process takes; in
            # one group for each group that the processes form.
            world = torch.distributed.group.WORLD
            if not _groups or _groups[0] is not world:
                _groups[:] = [world, torch.distributed.new_group(timeout=_PATIENCE, backend="gloo")]
            self.group = _groups[1]

    def share(self, items: list[Value]) -> list[Value]:
        """The share of this process in a list that all processes have."""
        return items[self.index :: self.count]

    def own_device(self, device: str | None = None) -> str:
        """The device of this process: its own GPU if there is one, unless another device is named."""
        import torch

        if device not in (None, "cuda") or not torch.cuda.is_available():
            return "cpu" if device is None else device
        if self.count > 1:
            # From now on `cuda` means this one, for Triton's kernels too. More processes than GPUs share them.
            torch.cuda.set_device(self.local_index % torch.cuda.device_count())
        return "cuda"

    def gather(self, value: Value) -> list[Value]:
        """Collects a value of every process."""
        if self.count == 1:
            return [value]
        import torch

        found: list[Any] = [None] * self.count
        with _explain_lost_process():
            torch.distributed.all_gather_object(found, value, group=self.group)
        return found

    def of_first(self, value: Value) -> Value:
        """The value of the first process; those of the others are ignored."""
        if self.count == 1:
            return value
        import torch

        # Not gathered: the first process goes on at once.
        found = [value]
        with _explain_lost_process():
            torch.distributed.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def ask_first(self, function: Callable[[], Value]) -> Value:
        """Calls a function in the first process alone, and gives all processes its result."""
        found: Any = None
        with self.together():
            if self.index == 0:
                found = function()
        given: Value = self.of_first(found)
        return given

    @contextlib.contextmanager
    def share_scans(self) -> Iterator[None]:
        """A block in which all processes call the same functions under [`scan_once`]."""
        _scanning.append(self)
        try:
            yield
        finally:
            _scanning.pop()

    def part(self) -> None:
        """Lets the groups last until this process exits, where they are ended: it may begin another run."""
        if self.count > 1:
            atexit.register(leave_groups)

    def wait(self) -> None:
        """Waits until all processes are here. One that fails on its way ends, and its launcher ends the others."""
        self.gather(None)

    def agree(self, failure: BaseException | None) -> None:
        """Waits for all processes, and fails everywhere if one did."""
        told = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for index, text in enumerate(told):
            if text is not None:
                raise FailedElsewhereError(f"process {index} of {self.count} failed: {text}")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A step of all processes, which fails everywhere when it fails in one."""
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.agree(failure)

    @contextlib.contextmanager
    def first_before_others(self) -> Iterator[None]:
        """A step that the first process runs before the others, for instance a download; an error of it fails all."""
        # The first one's own `together` is answered here by the others, and theirs by it below.
        if self.index > 0:
            self.agree(None)
        with self.together():
            yield
        if self.index == 0:
            self.agree(None)


# The processes whose scans are shared now.
_scanning: list[Ranks] = []


def scan_once(function: Callable[Given, Value]) -> Callable[Given, Value]:
    """Decorates what reads much data: where all processes of a training call it, the first one does for all."""

    @functools.wraps(function)
    def scan(*values: Given.args, **options: Given.kwargs) -> Value:
        find = functools.partial(function, *values, **options)
        if not _scanning:
            return find()
        # What the first process calls meanwhile, it calls alone.
        held, _scanning[:] = [*_scanning], []
        try:
            return held[-1].ask_first(find)
        finally:
            _scanning[:] = held

    return scan


def require_device(device: str | None) -> str:
    """The name of a device, the GPU or else the CPU if none is given; a UsageError where it computes nothing."""
    import torch

    from .errors import UsageError

    device = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {device} cannot be used: {error}") from error
    return device


def _join_processes() -> PartialState:
    """Makes the processes of a launch find each other, once."""
    if os.environ.get("RANK", "0") != "0":
        # Of all processes one shows the bars of libraries, such as those of weights that are loaded.
        os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        for name in _BARS.keys() & sys.modules.keys():
            getattr(sys.modules[name], _BARS[name])()
    from accelerate import PartialState

    atexit.register(leave_groups)
    # They exchange words, not tensors, by gloo: none needs a GPU for it, and who waits does not compute.
    return PartialState(cpu=True, timeout=_PATIENCE)


def leave_groups() -> None:
    """Ends the groups of this process, at its exit; nothing may be waiting in them."""
    # A process that ends with a group's threads alive is now and then aborted by them (exit code -6 after its work is
    # done), and whoever holds a group keeps them alive: our list, and what has not been collected yet.
    import torch

    _groups.clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()


@contextlib.contextmanager
def _explain_lost_process() -> Iterator[None]:
    """Explains the error that gloo raises where another process was killed."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ == "OutOfMemoryError":
            raise
        reason = str(error).partition("\n")[0]
        raise LostProcessError(f"another process of this launch ended ({reason}). Run the command again.") from error
