"""The outputs of the engine's steps: which are to come, and what is done while one is awaited.

    execute_model ─▶ step n launched ─▶ … ─▶ result() ─┬─ there already ──────────────▶ step n ended
    (sample_tokens)                                    └─ a thread waits for it,
                                                          this one serves until it is there

vLLM launches a step through its executor, gets a future, and comes back for the result when it can
go no further without it. On a GPU that takes most of a step's time, and until then the engine's
thread has nothing to do. So the executor's futures are wrapped, and whoever asks one for its result
serves the worker meanwhile. Where the model has computed when the executor's call returns (one rank
on the CPU), there is nothing to wait for, and nothing is served.

The scheduler's call is wrapped as well: what it publishes is written by the step that it composes.

The thread knows nothing but `Future.result`: neither CUDA's events nor the queues of vLLM's ranks
can be waited for together with a socket. It runs only while the other one serves.

Collaborators: `compat.py` has the executor; `engine_loop.py` serves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol


class StepExecutor(Protocol):
    """What is wrapped of vLLM's executor. With `non_block` both return a future."""

    execute_model: Callable[..., Any]
    sample_tokens: Callable[..., Any]


class StepScheduler(Protocol):
    """What is wrapped of vLLM's scheduler."""

    schedule: Callable[..., Any]


class StepOutputs:
    """The steps of one executor, which are launched and end in the same order. Not thread-safe."""

    def __init__(self, executor: StepExecutor, scheduler: StepScheduler) -> None:
        """From now on the executor's futures are this one's."""
        self._composed: int | None = None
        self._num_launched = 0
        self._num_ended = 0
        self._serve: Callable[[], None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._arrived_fd = -1
        executor.execute_model = self._launching(executor.execute_model)
        executor.sample_tokens = self._sampling(executor.sample_tokens)
        scheduler.schedule = self._composing(scheduler.schedule)

    def serve_while_waiting(self, serve: Callable[[], None]) -> int:
        """Call `serve` over and over while an output is awaited.

        Returns a file descriptor that becomes readable when the output is there: `serve` may sleep
        for as long as it likes, if it wakes up for that.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="step output")
        self._arrived_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._serve = serve
        return self._arrived_fd

    @property
    def composed(self) -> int | None:
        """Number of the step that is being scheduled, from 1 on; None outside of that."""
        return self._composed

    @property
    def num_ended(self) -> int:
        """The steps up to this number have ended."""
        return self._num_ended

    def fence(self) -> Callable[[], bool]:
        """Whether all that is launched at this moment has ended."""
        last = self._num_launched
        return lambda: self._num_ended >= last

    def close(self) -> None:
        """Nothing is awaited any more."""
        self._serve = None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
            os.close(self._arrived_fd)

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _launching(self, execute_model: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, non_block: bool = False, **kwargs: Any) -> Any:
            self._num_launched += 1
            output = execute_model(*args, non_block=non_block, **kwargs)
            if not non_block:
                self._num_ended = self._num_launched
                return output
            return _Output(self, output, self._num_launched)

        return launch

    def _composing(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """What it schedules is launched next."""

        def compose(*args: Any, **kwargs: Any) -> Any:
            self._composed = self._num_launched + 1
            try:
                return schedule(*args, **kwargs)
            finally:
                self._composed = None

        return compose

    def _sampling(self, sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
        """Its tokens are of the step that was launched last."""

        def sample(*args: Any, non_block: bool = False, **kwargs: Any) -> Any:
            output = sample_tokens(*args, non_block=non_block, **kwargs)
            return _Output(self, output, self._num_launched) if non_block else output

        return sample

    def take(self, future: Future[Any], number: int) -> Any:
        """The output of step `number`, which has ended then. Raises: what broke the step."""
        if self._serve is None or self._thread is None or future.done():
            output = future.result()
        else:
            output = self._wait(future, self._serve, self._thread)
        self._num_ended = max(self._num_ended, number)
        return output

    def _wait(
        self, future: Future[Any], serve: Callable[[], None], thread: ThreadPoolExecutor
    ) -> Any:
        arrival = thread.submit(future.result)
        arrival.add_done_callback(lambda _: os.eventfd_write(self._arrived_fd, 1))
        while not arrival.done():
            serve()
        os.eventfd_read(self._arrived_fd)  # is about to be written, if it was not
        return arrival.result()


class _Output:
    """In place of an executor's future: what vLLM's core asks of one."""

    def __init__(self, outputs: StepOutputs, future: Future[Any], number: int) -> None:
        self._outputs = outputs
        self._future = future
        self._number = number

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> Any:
        return self._outputs.take(self._future, self._number)
