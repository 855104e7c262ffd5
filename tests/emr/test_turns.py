"""One EMRModel and several threads: right answers, or an error in words, and never another task's answer."""

import asyncio
import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_ext.emr import EMRModel
from tests.emr.emr_testing import tiny_bert
from tests.emr.use_testing import merge_family
from tests.kit.refusals import refused

TASKS = ("a", "b", "c")
TOKENS = torch.tensor([[2, 5, 6, 3], [2, 9, 8, 3]])
WAIT = 30.0


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge_family(tmp_path_factory.mktemp("turns"), tiny_bert, "abc", noise=0.3)


@pytest.fixture
def emr(merged: Path) -> Iterator[EMRModel]:
    """The threads of these tests change places as often as the interpreter lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield EMRModel.from_pretrained(merged, "a")
    sys.setswitchinterval(interval)


@pytest.fixture
def right(emr: EMRModel) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {task: by_context(emr, task) for task in TASKS}


def is_of(output: torch.Tensor, task: str, right: dict[str, torch.Tensor]) -> bool:
    return torch.allclose(output, right[task], atol=1e-4)


def run_in_threads(*functions: Callable[[], None]) -> list[BaseException]:
    """Runs them at once; what they raised."""
    barrier = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        with torch.no_grad():
            barrier.wait(WAIT)
            function()

    with ThreadPoolExecutor(len(functions)) as pool:
        done = [pool.submit(run, function) for function in functions]
        return [error for future in done if (error := future.exception(4 * WAIT)) is not None]


def by_context(emr: EMRModel, task: str) -> torch.Tensor:
    with emr.task(task) as model:
        return model(TOKENS).logits


def by_context_and_call(emr: EMRModel, task: str) -> torch.Tensor:
    with emr.task(task):
        return emr(TOKENS).logits


def in_a_mixed_batch(emr: EMRModel, task: str) -> torch.Tensor:
    other = TASKS[TASKS.index(task) - 1]
    return emr(input_ids=TOKENS.repeat(2, 1), task_ids=[task, task, other, other]).logits[:2]


def by_one_name(emr: EMRModel, task: str) -> torch.Tensor:
    return emr(input_ids=TOKENS, task_ids=[task, task]).logits


@pytest.mark.parametrize("ask", [by_context, by_context_and_call, by_one_name, in_a_mixed_batch])
def test_threads_that_ask_for_tasks_get_theirs(emr: EMRModel, right: Any, ask: Any):
    assert not torch.allclose(right["a"], right["b"], atol=1e-2)

    def work(first: int) -> None:
        for turn in range(8):
            task = TASKS[(first + turn) % len(TASKS)]
            assert is_of(ask(emr, task), task, right)

    assert run_in_threads(*(lambda first=first: work(first) for first in range(4))) == []
    assert emr.current == "a" and is_of(emr.model(TOKENS).logits, "a", right)


def test_a_thread_waits_for_the_block_of_another(emr: EMRModel, right: Any):
    inside, order, before = threading.Event(), [], emr.model

    def hold() -> None:
        with emr.task("b") as model:
            inside.set()
            order.append("b begins")
            # The others have all the time to come in between.
            threading.Event().wait(0.3)
            assert is_of(model(TOKENS).logits, "b", right)
            order.append("b ends")

    # No lock is taken here by hand: reading `model` waits, and so does a call of it.
    for task, ask in (
        ("c", lambda: by_one_name(emr, "c")),
        ("a", lambda: emr.model(TOKENS).logits),
        ("a", lambda: before(TOKENS).logits),
    ):

        def use(task: str = task, ask: Callable[[], torch.Tensor] = ask) -> None:
            inside.wait(WAIT)
            assert is_of(ask(), task, right)
            order.append(task)

        order.clear(), inside.clear()
        assert run_in_threads(hold, use) == []
        assert order == ["b begins", "b ends", task]


def test_set_task_belongs_to_one_thread(emr: EMRModel, right: Any):
    refused = []

    def work(task: str) -> None:
        for _ in range(15):
            try:
                assert is_of(emr.set_task(task).model(TOKENS).logits, task, right)
                assert is_of(emr(TOKENS).logits, task, right)
            except RuntimeError as error:
                refused.append(str(error))

    assert run_in_threads(*(lambda task=task: work(task) for task in TASKS)) == []
    assert len(refused) >= 15
    assert all("with em.task(name) as model" in text for text in refused)
    # Those threads have ended, so that this one may choose; not even the task that is there may be chosen by another.
    assert is_of(emr.set_task("b").model(TOKENS).logits, "b", right)
    (error,) = run_in_threads(lambda: emr.set_task("b"))
    assert "so set_task cannot be called in" in str(error)

    def switch_inside() -> None:
        # In a block of its own a thread may switch as it likes.
        with emr.task("a"):
            assert is_of(emr.set_task("c").model(TOKENS).logits, "c", right)

    assert run_in_threads(switch_inside) == [] and emr.current == "b"


def test_a_switch_in_the_middle_of_a_plain_call_is_told(emr: EMRModel):
    reached, switched = threading.Event(), threading.Event()

    def pause(*_: object) -> None:
        if threading.current_thread() is caller:
            reached.set()
            assert switched.wait(WAIT)

    def switch() -> None:
        assert reached.wait(WAIT)
        by_context(emr, "b")
        switched.set()

    handle = emr.model.bert.encoder.layer[1].register_forward_pre_hook(pause)
    caller = threading.current_thread()
    other = threading.Thread(target=switch, daemon=True)
    other.start()
    with torch.no_grad(), refused(RuntimeError, "switched", "thread"):
        emr.model(TOKENS)
    other.join(WAIT)
    handle.remove()
    assert emr(TOKENS).logits.shape == (2, 2)


def test_coroutines_of_one_thread(emr: EMRModel, right: Any):
    async def wait_inside() -> None:
        with emr.task("b") as model:
            await asyncio.sleep(0.05)
            with torch.no_grad():
                assert is_of(model(TOKENS).logits, "b", right)

    async def ask() -> None:
        await asyncio.sleep(0.01)
        with refused(RuntimeError, "coroutine", "thread"), emr.task("c"):
            pass

    async def both() -> None:
        await asyncio.gather(wait_inside(), ask())

    asyncio.run(both())
    assert emr.current == "a"


def test_a_copy_of_the_model_belongs_to_nobody(emr: EMRModel, right: Any):
    copies = [copy.deepcopy(emr.model), pickle.loads(pickle.dumps(emr.model))]
    with emr.task("b"), torch.no_grad():
        assert all(is_of(model(TOKENS).logits, "a", right) for model in copies)


@pytest.mark.slow
def test_a_compiled_model_is_whole(emr: EMRModel, right: Any):
    compiled = torch.compile(emr.model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert is_of(compiled(TOKENS).logits, "a", right)
        emr.set_task("b")
        assert is_of(compiled(TOKENS).logits, "b", right)


def test_who_calls_the_plain_model_relies_on_the_task_that_it_finds(emr: EMRModel, right: Any):
    emr = EMRModel.from_pretrained(emr.weights.folder, "a")
    assert is_of(emr.model(TOKENS).logits, "a", right)
    # Nobody has called set_task; yet the thread that called the model goes on with task a.
    (error,) = run_in_threads(lambda: emr.set_task("b"))
    assert "the model was called in thread" in str(error)
    assert is_of(emr.model(TOKENS).logits, "a", right)
    assert is_of(emr.set_task("b").model(TOKENS).logits, "b", right)
