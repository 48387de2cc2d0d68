"""vLLM's own core over a device that computes nothing, and is as late as a test wants it to be.

Scheduler, block pool and the order of calls are vLLM's, with asynchronous scheduling or without.
The device has a memory of blocks: each slot holds a number that follows from all tokens up to its
own (`extend`), and so does the next token. A step reads and writes when it ends, long after it was
scheduled; it raises if a slot that it reads holds anything but the KV of its request.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import Request

from memserve.types import TransferStyle
from memserve.workers.compat import Engine, make_config

if TYPE_CHECKING:
    from memserve.workers.engine_loop import EngineLoop

BLOCK = 4
NUM_BLOCKS = 40
MAX_TOKENS = 100
STEP_TOKENS = 24
DEADLINE_S = 20.0
_SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
Block = list[int | None]


def extend(before: int, token: int) -> int:
    """What a slot holds behind one that holds `before`; the first of a prompt is behind 0."""
    return (before * 31 + token + 7) % 1_000_003


def kv_of(tokens: Sequence[int]) -> list[int]:
    """What the slots of these tokens hold."""
    held, before = [], 0
    for token in tokens:
        before = extend(before, token)
        held.append(before)
    return held


def generate(tokens: Sequence[int], count: int) -> list[int]:
    """What the model says behind these tokens."""
    made: list[int] = []
    for _ in range(count):
        made.append(kv_of([*tokens, *made])[-1] % 1000)
    return made


class _Sequence(msgspec.Struct):
    """A request as the device knows it."""

    tokens: list[int]
    table: list[int]


class _Row(msgspec.Struct):
    """What a step computes of one request."""

    sequence: _Sequence
    table: list[int]
    begin: int
    end: int


class _Step(AsyncModelRunnerOutput):
    def __init__(self, rows: dict[str, _Row]) -> None:
        self.rows = rows
        self.has_ended = threading.Event()
        self.output = ModelRunnerOutput(
            req_ids=list(rows), req_id_to_index={name: i for i, name in enumerate(rows)}
        )

    def get_output(self) -> ModelRunnerOutput:
        assert self.has_ended.wait(DEADLINE_S)
        return self.output


class LateExecutor(Executor):
    """One rank. Without asynchronous scheduling it answers `execute_model` late, as ranks in
    processes of their own do on the CPU."""

    def _init_executor(self) -> None:
        self.memory: list[Block] = [[None] * BLOCK for _ in range(NUM_BLOCKS)]
        self.steps: deque[_Step] = deque()
        """Launched, and not ended."""
        self.num_sequences_run = 0
        self._sequences: dict[str, _Sequence] = {}
        self._last = _Step({})

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        answers: dict[str, list[Any]] = {
            "get_kv_cache_spec": [{"layer": _SPEC}],
            "get_supported_kv_cache_layouts": [["BLHNC", "LBHNC"]],
            "determine_available_memory": [NUM_BLOCKS * _SPEC.page_size_bytes],
            "compile_or_warm_up_model": [],
        }
        return answers.get(method, [None])

    def init_kv_output_aggregator(self, connector: Any) -> None:
        pass

    def check_health(self) -> None:
        pass

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    # ── launched by the core ──────────────────────────────────────────────────────────────────

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        assert non_block
        self._last = _Step(self._rows(scheduler_output))
        if self._last.rows:
            self.steps.append(self._last)
            if not self.scheduler_config.async_scheduling:
                return _Late(self._last)
        future: Future[Any] = Future()
        future.set_result(None if self._last.rows else self._last.output)
        return future

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        if non_block:
            return AsyncOutputFuture(self._last, single_value=True)
        assert self._last.has_ended.is_set()
        return self._last.output

    def _rows(self, launched: SchedulerOutput) -> dict[str, _Row]:
        for name in launched.finished_req_ids:
            self._sequences.pop(name, None)
        begins: dict[str, int] = {}
        for new in launched.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids or [])
            self._sequences[new.req_id] = _Sequence(tokens, list(new.block_ids[0]))
            begins[new.req_id] = new.num_computed_tokens
        cached = launched.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i]
            fresh = [] if blocks is None else list(blocks[0])
            if name in cached.resumed_req_ids:
                self._sequences[name] = _Sequence(list(cached.all_token_ids[name]), fresh)
            else:
                self._sequences[name].table += fresh
            begins[name] = cached.num_computed_tokens[i]
        return {
            name: _Row(
                self._sequences[name],
                list(self._sequences[name].table),
                begins[name],
                begins[name] + count,
            )
            for name, count in launched.num_scheduled_tokens.items()
        }

    # ── what a test does ──────────────────────────────────────────────────────────────────────

    def finish_step(self) -> None:
        """Let the oldest step that was launched read, write, and end."""
        step = self.steps.popleft()
        step.output.sampled_token_ids = [self._compute(row) for row in step.rows.values()]
        step.has_ended.set()

    def _compute(self, row: _Row) -> list[int]:
        held = kv_of(row.sequence.tokens[: row.end])
        for position in range(row.begin):
            found = self.memory[row.table[position // BLOCK]][position % BLOCK]
            assert found == held[position], f"position {position} is not this request's KV"
        for position in range(row.begin, row.end):
            self.memory[row.table[position // BLOCK]][position % BLOCK] = held[position]
        if row.end < len(row.sequence.tokens):
            return []
        row.sequence.tokens.append(held[-1] % 1000)
        self.num_sequences_run += 1
        return row.sequence.tokens[-1:]


class _Late(Future[Any]):
    """The answer of ranks that have computed, and will sample when they are asked to."""

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self._step = step

    def result(self, timeout: float | None = None) -> Any:
        self._step.get_output()


class Host:
    """A `connector.ConnectorHost` of an engine without KV caches of its own."""

    loop: EngineLoop | None = None

    def on_scheduled(self, request_id: str, cached_tokens: int) -> None:
        assert self.loop is not None
        self.loop.on_scheduled(request_id, cached_tokens)

    def on_step(self, num_scheduled: Mapping[str, int]) -> None:
        assert self.loop is not None
        self.loop.on_step(num_scheduled)

    def on_finished(self, request: Request, block_ids: list[int]) -> None:
        assert self.loop is not None
        self.loop.on_finished(request, block_ids)


def build(model: Path, host: Host, style: TransferStyle, *, is_async: bool) -> Engine:
    """vLLM's core over a `LateExecutor`, which is `device_of` it."""
    config = make_config(
        str(model),
        {
            "dtype": "float32",
            "max_model_len": MAX_TOKENS,
            "enforce_eager": True,
            "block_size": 16,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_num_seqs": 8,
        },
        engine_id="late",
        kv_bytes=NUM_BLOCKS * _SPEC.page_size_bytes,
        layout="block_first",
        host=host,  # type: ignore[arg-type]
        style=style,
        tp=1,
    )
    config.parallel_config.distributed_executor_backend = LateExecutor
    config.scheduler_config.async_scheduling = is_async
    return Engine(config)


def device_of(engine: Engine) -> LateExecutor:
    """For the test."""
    device = engine._core.model_executor
    assert isinstance(device, LateExecutor)
    return device
