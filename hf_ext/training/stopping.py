"""Early saves and ends of a run: by signals and by the clock."""

import math
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch

from ..distributed import Ranks
from ..errors import UsageError
from .loader_processes import SIGNALS

# Exit code of a process that was stopped and has saved its state: EX_TEMPFAIL, "try again", of BSD.
EXIT_CODE = 75
# Messages between processes; the largest one counts, and a signal adds its number to these.
_GO_ON, _SAVE, EVALUATE, END, _DEADLINE = 0, 1, 2, 3, 4
# Words of callbacks for them.
_WORDS = {None: _GO_ON, "save": _SAVE, "evaluate": EVALUATE, "end": END}


class RunStopped(KeyboardInterrupt):
    """A run ended before its last step, and goes on with the same command. The message is empty but in one process."""

    exit_code = EXIT_CODE


class EvaluationStopped(Exception):
    """An evaluation ended before its last batch, for the answer that it has; a run that goes on scores the rest."""


class Stopping:
    """Decision to save or to end, asked after every step; all processes get the same answer after the same step."""

    # A signal may reach one process only, and clocks differ. So each process starts a reduction of what it knows,
    # which runs while the next step is computed, and reads the one that it started a step before: nobody waits, and no
    # device is asked. The answer is one step old. Within the context a signal is noted; a second Ctrl-C interrupts.

    def __init__(self, ranks: Ranks, save_minutes: float, deadline_minutes: float):
        self.ranks = ranks
        self.save_minutes = save_minutes
        self.deadline_minutes = deadline_minutes
        # `save_minutes` are counted from the latter.
        self.began = self.saved = time.monotonic()
        self._wish = self._asked = _GO_ON
        self._question: tuple[torch.Tensor, Any] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> "Stopping":
        # Python delivers signals to the main thread, and lets no other one handle them.
        if threading.current_thread() is threading.main_thread():
            # What `nohup` and a shell's background have switched off stays off.
            numbers = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._wish > _DEADLINE:
            raise KeyboardInterrupt
        self._wish = number + _DEADLINE

    def take(self, word: Any) -> None:
        """Takes what a callback returned for the next answer."""
        if not isinstance(word, str | None) or word not in _WORDS:
            raise UsageError(f"a callback returned {word!r}; allowed: None, 'save', 'evaluate', 'end'.")
        self._asked = max(self._asked, _WORDS[word])

    def _wish_now(self) -> int:
        """The decision of this process; the answer of a callback counts once."""
        asked, self._asked, wish, now = self._asked, _GO_ON, self._wish, time.monotonic()
        if wish == _GO_ON and self.deadline_minutes and now - self.began >= 60 * self.deadline_minutes:
            wish = _DEADLINE
        elif wish == _GO_ON and self.save_minutes and now - self.saved >= 60 * self.save_minutes:
            wish = _SAVE
        return max(asked, wish)

    def ask(self) -> int:
        """The decision of all processes after this step: 0 continue, 1 save, more as named above."""
        if self.ranks.count == 1:
            return self._wish_now()
        answer = _GO_ON
        if self._question is not None:
            wish, reduction = self._question
            reduction.wait()
            answer = int(wish)
        if answer == _SAVE:
            # It is saved now: nobody asks for it again in the next question, which is begun before.
            self.saved = time.monotonic()
        wish = torch.tensor(self._wish_now())
        most = torch.distributed.ReduceOp.MAX
        self._question = wish, torch.distributed.all_reduce(wish, most, group=self.ranks.group, async_op=True)
        return answer

    def interrupt_evaluation(self) -> None:
        """Ends an evaluation between two batches, in all processes, where the run is to end."""
        answer = self.ask()
        if answer >= _DEADLINE:
            raise EvaluationStopped(answer)
        if answer == _SAVE:
            # Asked again after the evaluation.
            self.saved = -math.inf
        elif answer:
            self._asked = max(self._asked, answer)

    def end(self, answer: int, step: int, max_steps: int) -> None:
        """Ends the run, whose state has been saved, by a [`RunStopped`] if the answer says so."""
        if answer < _DEADLINE:
            return
        if self._question is not None:
            self._question[1].wait()
        self.ranks.part()
        why = f"deadline_minutes: {self.deadline_minutes:g} minutes have passed"
        if answer > _DEADLINE:
            why = signal.Signals(answer - _DEADLINE).name
        saved = f"{why}: step {step} of {max_steps} is saved, and the same command resumes from it."
        raise RunStopped(saved if self.ranks.index == 0 else "")
