"""The one thread that uses the model, and how requests that wait for it become batches."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

_LOGGER = logging.getLogger(__name__)


@dataclass
class Job:
    """One sample of a request."""

    task: Any  # its [`ServedTask`]
    run: Callable[[Any, Sequence[Job]], list[Any]]  # answers a batch of such jobs
    inputs: Any
    form: Any  # jobs of equal forms can be answered together
    answer: Future[Any] = field(default_factory=Future)
    left: threading.Event = field(default_factory=threading.Event)  # nobody waits for the answer any more

    def cancel(self) -> None:
        """Nobody waits: if the worker has not begun it will not, and if it has it may end."""
        self.left.set()
        self.answer.cancel()

    def check(self, *_: Any) -> None:
        """Ends what the worker does for nobody, from a callback of it."""
        if self.left.is_set():
            raise ValueError("the client has left")


class Worker:
    """
    Answers jobs in the order in which they come, as many together as wait and fit together.

    Args:
        emr ([`EMRModel`]): The model; only this thread uses it.
        max_batch (`int`): Jobs in a batch.
        wait (`float`): Seconds that the first job of a batch waits for others.
        max_waiting (`int`, *optional*, defaults to 1024): Jobs that may wait; more are refused.
    """

    def __init__(self, emr: Any, max_batch: int, wait: float, max_waiting: int = 1024) -> None:
        self._emr, self._max_batch, self._wait = emr, max_batch, wait
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._work, name="hf-ext serve", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Future[Any]:
        """Puts a job in the queue; `queue.Full` if too many wait."""
        self._jobs.put_nowait(job)
        return job.answer

    def close(self) -> None:
        """Answers what waits, and ends the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            jobs, last = self._collect(job)
            groups: dict[Any, list[Job]] = {}
            for job in jobs:
                groups.setdefault(job.form, []).append(job)
            for group in groups.values():
                self._answer(group)
            if last:
                return

    def _collect(self, first: Job) -> tuple[list[Job], bool]:
        """The first job and those that come until the batch is full or the time is over; whether they are the last."""
        jobs, end = [first], time.monotonic() + self._wait
        while len(jobs) < self._max_batch:
            try:
                job = self._jobs.get(timeout=max(end - time.monotonic(), 0))
            except queue.Empty:
                break
            if job is None:
                return jobs, True
            jobs.append(job)
        return jobs, False

    def _answer(self, jobs: list[Job]) -> None:
        """Answers jobs together; where that fails, one by one, so that none fails for what is wrong with another."""
        jobs = [job for job in jobs if job.answer.running() or job.answer.set_running_or_notify_cancel()]
        try:
            answers = list(zip(jobs, jobs[0].run(self._emr, jobs), strict=True)) if jobs else []
        except Exception as error:
            if len(jobs) > 1:
                for job in jobs:
                    self._answer([job])
                return
            if not isinstance(error, ValueError):
                _LOGGER.exception("a request for %s failed", jobs[0].task.name)
            jobs[0].answer.set_exception(error)
            return
        for job, answer in answers:
            job.answer.set_result(answer)
