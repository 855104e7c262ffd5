"""Locking of the one model of an [`EMRModel`] between threads.

One set of weights can be of one task at a time. A re-entrant lock guards its use: a `with em.task(name)` block or a
call of the object itself holds it, and other threads wait. Two things a lock cannot do:

- `set_task` chooses for longer than a block. Were two threads to choose, each would go on with the other's weights. So
  the choice belongs to the first thread that makes it, for as long as that thread lives; others are refused. Where
  none has chosen, it belongs to the last thread that called the plain model: it relies on the task that it found.
- `em.model(x)` is a plain call of a plain model, which takes no lock. Hooks on the model notice it: before the forward
  they wait until no other thread holds the lock, and after it they compare a number that grows with every change of
  weights in place. If it grew, the output is of mixed weights, and an error takes its place. A lock that is taken in
  one hook and given back in the other would be simpler, but an interrupted forward would never give it back.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


class Turns:
    """The lock of one [`EMRModel`], the thread that chooses its task, and the watch over forwards without a lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._coroutine: asyncio.Task[Any] | None = None
        self._chooser: threading.Thread | None = None
        self._changes = 0
        self._seen = threading.local()
        self._watched: weakref.ref[torch.nn.Module] | None = None
        self._half_changed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._caller: threading.Thread | None = None

    @contextmanager
    def hold(self) -> Iterator[bool]:
        """Keeps all other threads from the model inside a `with` block; they wait."""
        with self._lock:
            coroutine = None
            with suppress(RuntimeError):
                coroutine = asyncio.current_task()
            if self._depth and coroutine is not self._coroutine:
                raise RuntimeError(
                    "another coroutine of this thread is inside `with em.task(...)` and waits for something: do not "
                    "await inside that block, or run the block in a thread (asyncio.to_thread)"
                )
            outer, self._coroutine = self._coroutine, coroutine
            self._depth += 1
            try:
                yield self._depth > 1
            finally:
                self._depth -= 1
                self._coroutine = outer

    def choose(self) -> None:
        """Reserves the choice of the task outside of `with` blocks for this thread."""
        here = threading.current_thread()
        other, did = self._chooser, "set_task was called"
        if other is None or not other.is_alive():
            other, did = self._caller, "the model was called"
        if other is not None and other is not here and other.is_alive():
            raise RuntimeError(
                f"{did} in thread {other.name!r}, so set_task cannot be called in {here.name!r} too: each would run "
                "with the other's weights. Use `with em.task(name) as model:` or task_ids=[...], which wait for each "
                "other, or create one EMRModel per thread"
            )
        self._chooser = here

    def note_change(self) -> None:
        """Tells that weights are about to change in place; for whoever holds the lock."""
        self._changes += 1

    @contextmanager
    def change(self, model: torch.nn.Module) -> Iterator[None]:
        """While the weights of a model change in place. Where the block fails, plain calls of the model fail too."""
        self.note_change()
        self._half_changed.add(model)
        yield
        self._half_changed.discard(model)

    def watch(self, model: torch.nn.Module) -> None:
        """Lets plain calls of a model, which take no lock, fail where another thread changed its weights meanwhile."""
        self._watched = weakref.ref(model)
        model.register_forward_pre_hook(_Hook(self._begin), prepend=True)
        model.register_forward_hook(_Hook(self._end))

    def _begin(self, model: torch.nn.Module) -> None:
        with self._lock:
            if model in self._half_changed:
                raise RuntimeError(
                    "a switch of tasks failed, so the weights belong to no task: call set_task of the EMRModel, and "
                    "read its `model` again"
                )
            # Nobody holds the lock: a plain call, which relies on the task that it finds.
            if self._depth == 0:
                self._caller = threading.current_thread()
            # A model that was replaced by another one is changed by nobody.
            current = self._watched is not None and self._watched() is model
            self._seen.changes = self._changes if current else None

    def _end(self, model: torch.nn.Module) -> None:
        if getattr(self._seen, "changes", None) not in (None, self._changes):
            raise RuntimeError(
                "another thread switched the task while the model ran, so its output is of no task: use `with "
                "em.task(name) as model:` or call the EMRModel itself, which wait for each other, or create one "
                "EMRModel per thread"
            )


class _Hook:
    """A hook that stays behind when its model is copied or pickled: the copy belongs to nobody else."""

    def __init__(self, run: Callable[[torch.nn.Module], None] | None = None) -> None:
        self._run = run

    def __call__(self, model: torch.nn.Module, *_: Any) -> None:
        # Compiled code cannot take a lock, so what is compiled or exported is not watched.
        if not torch.compiler.is_compiling() and self._run is not None:
            self._run(model)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return (_Hook, ())
