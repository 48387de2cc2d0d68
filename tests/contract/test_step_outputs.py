"""Waiting for a step's output over vLLM's own futures, with a device that a test drives by hand."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from vllm.v1.executor.multiproc_executor import FutureWrapper
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from memserve.workers.step_outputs import StepOutputs

DEADLINE_S = 20.0


class Answer:
    """What the device computes: there when a test says so. Asking for it blocks."""

    def __init__(self) -> None:
        self._is_there = threading.Event()
        self._error: Exception | None = None
        self.output: Any = ModelRunnerOutput(req_ids=[], req_id_to_index={})

    def arrive(self, error: Exception | None = None) -> None:
        self._error = error
        self._is_there.set()

    def get(self) -> Any:
        assert self._is_there.wait(DEADLINE_S)
        if self._error is not None:
            raise self._error
        return self.output


class AsyncAnswer(AsyncModelRunnerOutput):
    """As a GPU's model runner returns it."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def get_output(self) -> ModelRunnerOutput:
        output: ModelRunnerOutput = self._answer.get()
        return output


class FakeExecutor:
    """Futures as vLLM's executors make them: `one rank`, where the device works behind the call;
    `ranks`, which answer in order, launches too; `at once`, where the call computes."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._queue: deque[FutureWrapper] = deque()
        self.answers: list[Answer] = []
        """Of each step."""

    def execute_model(self, *, non_block: bool = False) -> Any:
        self.answers.append(Answer())
        if self._kind == "ranks":
            return FutureWrapper(self._queue, lambda: None)
        return self._done(None)

    def sample_tokens(self, *, non_block: bool = False) -> Any:
        answer = self.answers[-1]
        if not non_block:
            return answer.output
        if self._kind == "ranks":
            return FutureWrapper(self._queue, answer.get)
        if self._kind == "one rank":
            return AsyncOutputFuture(AsyncAnswer(answer), single_value=True)
        return self._done(answer.output)

    @staticmethod
    def _done(output: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(output)
        return future


class FakeScheduler:
    """Notes for which step it is asked."""

    def __init__(self) -> None:
        self.outputs: StepOutputs | None = None
        self.asked: list[int | None] = []

    def schedule(self, *, fails: bool = False) -> str:
        assert self.outputs is not None
        self.asked.append(self.outputs.composed)
        if fails:
            raise RuntimeError("no schedule")
        return "scheduled"


class Rig:
    """An executor, and steps of it as vLLM's core makes them."""

    def __init__(self, kind: str) -> None:
        self.executor = FakeExecutor(kind)
        self.scheduler = FakeScheduler()
        self.outputs = StepOutputs(self.executor, self.scheduler)
        self.scheduler.outputs = self.outputs
        self.turns: list[str] = []
        """What each turn of serving saw."""
        self.fd = self.outputs.serve_while_waiting(self._serve)
        self.in_turn: dict[int, Answer] = {}
        """Turn → what arrives in it."""

    def _serve(self) -> None:
        if (answer := self.in_turn.get(len(self.turns))) is not None:
            answer.arrive()
            assert self.is_awake(DEADLINE_S), "nothing would have woken this turn up"
        self.turns.append("awake" if self.is_awake() else "asleep")

    def is_awake(self, timeout_s: float = 0.0) -> bool:
        return bool(select.select([self.fd], [], [], timeout_s)[0])

    def launch(self) -> tuple[Any, Answer]:
        self.executor.execute_model(non_block=True)
        return self.executor.sample_tokens(non_block=True), self.executor.answers[-1]


@pytest.fixture(params=["one rank", "ranks"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    for answer in made.executor.answers:
        answer.arrive()
    made.outputs.close()


def test_the_wait_is_spent_serving_until_the_output_is_there(rig: Rig) -> None:
    future, answer = rig.launch()
    rig.in_turn[2] = answer
    assert future.result() is answer.output
    assert rig.turns[:3] == ["asleep", "asleep", "awake"]
    assert set(rig.turns[3:]) <= {"awake"}
    assert not rig.is_awake(), "nothing is left to wake others up for"
    assert future.result() is answer.output


def test_a_step_has_ended_when_its_output_was_taken(rig: Rig) -> None:
    assert rig.outputs.fence()(), "nothing was launched"
    (first, answer), before = rig.launch(), rig.outputs.fence()
    (second, later), both = rig.launch(), rig.outputs.fence()
    rig.in_turn = {0: answer}
    assert [before(), both()] == [False, False]
    first.result()
    assert [before(), both()] == [True, False]
    later.arrive()
    second.result()
    assert [before(), both()] == [True, True]


def test_a_step_has_its_number_while_it_is_scheduled(rig: Rig) -> None:
    assert rig.outputs.composed is None
    assert rig.scheduler.schedule() == "scheduled"
    _, answer = rig.launch()
    rig.scheduler.schedule()
    with pytest.raises(RuntimeError, match="no schedule"):
        rig.scheduler.schedule(fails=True)
    assert rig.scheduler.asked == [1, 2, 2]
    assert rig.outputs.composed is None
    answer.arrive()


def test_what_breaks_a_step_is_raised_where_vllm_asks(rig: Rig) -> None:
    future, answer = rig.launch()
    answer.arrive(RuntimeError("device lost"))
    with pytest.raises(RuntimeError, match="device lost"):
        future.result()
    assert not rig.is_awake()


def test_what_breaks_the_worker_ends_the_wait(rig: Rig) -> None:
    def broken() -> None:
        raise ValueError("a bug")

    rig.outputs.close()
    rig.outputs.serve_while_waiting(broken)
    future, answer = rig.launch()
    with pytest.raises(ValueError, match="a bug"):
        future.result()
    answer.arrive()


def test_what_is_computed_by_the_call_is_not_waited_for() -> None:
    rig = Rig("at once")
    future, answer = rig.launch()
    assert future.result() is answer.output
    assert rig.turns == [] and rig.outputs.fence()()
    assert rig.executor.sample_tokens() is answer.output, "without a future there is none"
    rig.outputs.close()


def test_nothing_is_left_behind() -> None:
    before = {thread.ident for thread in threading.enumerate()}
    rig = Rig("one rank")
    future, answer = rig.launch()
    rig.in_turn[0] = answer
    future.result()
    rig.outputs.close()
    assert {thread.ident for thread in threading.enumerate()} == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(rig.fd)
