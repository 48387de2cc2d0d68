"""A cluster without worker processes, for tests of the front end.

`FakeCluster` is the scheduler's and the workers' part: it drives a real `RequestLifecycle` for each
request, so that what the front end is told (`Delivery`) is what the lifecycle decides, and plays P
and D by a `Script`. One turn of the event loop is one engine step; a step's `EngineCoreOutputs`
carries the outputs of all requests, as a worker's does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from memserve.core.delivery import Delivery
from memserve.core.lifecycle import RequestLifecycle
from memserve.core.vocabulary import (
    Action,
    AnyInput,
    ClientCancelled,
    Deliver,
    Ended,
    Fail,
    Limits,
    Output,
    Plan,
    RequestSpec,
    Seat,
    Send,
    StopSeen,
)
from memserve.errors import MemServeError
from memserve.frontend.service import OutputSink
from memserve.messages import (
    Abort,
    Allocate,
    Allocated,
    AnyCommand,
    Commit,
    Decode,
    Finished,
    Inserted,
    PoolStats,
    Prefill,
    Sent,
    Started,
    TokenOutput,
    Transmit,
)
from memserve.status import AuditReport, Costs, Counters, Snapshot
from memserve.types import InstanceId, RequestId

P, D = Seat(InstanceId("P0"), 1), Seat(InstanceId("D0"), 1)
PATIENCE_S = 10.0
WRONG_TOKEN = 4242
"""What P samples when D has to sample the token itself."""
NO_STATS = PoolStats(64, 64, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@dataclass
class Script:
    """What the model makes of one request."""

    tokens: list[int]
    cached_tokens: int = 0
    """Of the prompt, on P. D always finds all of it."""
    pause_after: int | None = None
    """Generate so many tokens, and go on after `FakeCluster.resume`."""
    stuck_after: int | None = None
    """The grammar allows no token after so many."""


class Timeline(msgspec.Struct, frozen=True):
    id: RequestId
    state: str


@dataclass
class FakeRequest:
    lifecycle: RequestLifecycle
    script: Script
    request: EngineCoreRequest
    commands: list[AnyCommand] = field(default_factory=list)
    runs_on: Seat | None = None
    """Where it generates now."""
    first_on_runner: bool = True
    state: str = "running"

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling_params

    def sent(self, kind: type) -> list[AnyCommand]:
        return [command for command in self.commands if isinstance(command, kind)]


class Relay:
    """The scheduler that the front end is built with, once for the clusters of all tests."""

    def __init__(self) -> None:
        self.target: FakeCluster
        self.sink: OutputSink

    def attach(self, sink: OutputSink) -> None:
        self.sink = sink

    def submit(self, spec: RequestSpec) -> None:
        self.target.submit(spec)

    def cancel(self, request_id: RequestId) -> None:
        self.target.cancel(request_id)

    def stop(self, request_id: RequestId) -> None:
        self.target.stop(request_id)


class FakeCluster:
    """See the module. `is_split`: prefill on P and decode on D; otherwise whole on P."""

    def __init__(self, sink: OutputSink, *, is_split: bool = True) -> None:
        self.sink = sink
        self.is_split = is_split
        self.is_ready = True
        self.refusal: MemServeError | None = None
        self.capacity = 0
        """How many requests are taken in spite of `refusal`."""
        self.scripts: deque[Script] = deque()
        self.requests: list[FakeRequest] = []
        self._by_id: dict[RequestId, FakeRequest] = {}
        self._events: deque[tuple[FakeRequest, AnyInput]] = deque()
        self._is_pumping = False
        self._changed = asyncio.Event()
        self._encoder = MsgpackEncoder(size_threshold=1 << 62)
        self._decoder = MsgpackDecoder(EngineCoreRequest)

    # ── what the tests use ────────────────────────────────────────────────────────────────────

    def play(self, *scripts: Script) -> None:
        """What the next requests will generate, in the order of their submission."""
        self.scripts.extend(scripts)

    def resume(self, pause_after: int | None = None) -> None:
        for request in self.requests:
            request.script.pause_after = pause_after
        self._pump_soon()

    def fail(self, request: FakeRequest, error: MemServeError) -> None:
        """End the request as if its instances were lost for good."""
        self.sink.on_error(request.lifecycle.spec.id, error)
        self._step(request, ClientCancelled())
        request.state = "failed"

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def check_nothing_left(self) -> None:
        for request in self.requests:
            request.lifecycle.check_integrity()
            assert request.state != "running", request.lifecycle.spec.id
        assert not self._by_id, [request.lifecycle.phase for request in self._by_id.values()]

    # ── the scheduler's part ──────────────────────────────────────────────────────────────────

    def submit(self, spec: RequestSpec) -> None:
        if self.refusal is not None and len(self.requests) >= self.capacity:
            raise self.refusal
        request = self._decoder.decode(spec.request)
        assert request.prompt_token_ids == [] and request.request_id == spec.id
        limits = Limits(block_size=16, max_attempts=3, reservation_s=30.0)
        script = self.scripts.popleft() if self.scripts else Script([100, 200, 300])
        fake = FakeRequest(RequestLifecycle(spec, limits), script, request)
        self.requests.append(fake)
        self._by_id[spec.id] = fake
        plan = Plan(P, D if self.is_split else None, False, False, returns=self.is_split)
        self._carry_out(fake, fake.lifecycle.place(plan))

    def cancel(self, request_id: RequestId) -> None:
        if (request := self._by_id.get(request_id)) and not request.lifecycle.is_client_done:
            request.state = "cancelled"
            self._step(request, ClientCancelled())

    def stop(self, request_id: RequestId) -> None:
        if (request := self._by_id.get(request_id)) and not request.lifecycle.is_client_done:
            request.state = "stopped"
            self._step(request, StopSeen())

    def timeline(self, request_id: RequestId) -> Timeline | None:
        found = [r for r in self.requests if r.lifecycle.spec.id == request_id]
        return Timeline(request_id, found[0].state) if found else None

    def snapshot(self) -> Snapshot:
        counters = Counters(len(self.requests), 0, 0, 0, 0, 0, 0, 0, 0, 0)
        costs = Costs("built in", False, "built in", None, 1.0, 1.0)
        facts = ("smollm2", "1P1D-CC", "full", "cpu", self.is_ready, 1.0)
        return Snapshot(*facts, [], [], counters, costs)

    async def audit(self) -> list[AuditReport]:
        return [AuditReport(P.instance, NO_STATS, [], [])]

    def _step(self, request: FakeRequest, event: AnyInput) -> list[Action]:
        actions = request.lifecycle.step(event)
        self._carry_out(request, actions)
        return actions

    def _carry_out(self, request: FakeRequest, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                request.commands.append(action.command)
                self._obey(request, action.instance, action.command)
            elif isinstance(action, Fail):
                self.sink.on_error(request.lifecycle.spec.id, action.error)
                request.state = "failed"
            elif isinstance(action, Ended):
                del self._by_id[request.lifecycle.spec.id]
        self._pump_soon()

    # ── the workers' part ─────────────────────────────────────────────────────────────────────

    def _obey(self, request: FakeRequest, instance: InstanceId, command: AnyCommand) -> None:
        request_id = request.lifecycle.spec.id
        at = {"instance": instance, "epoch": 1}
        answer: AnyInput | None = None
        match command:
            case Prefill(attempt=attempt):
                cached = request.script.cached_tokens
                answer = Started(**at, request_id=request_id, attempt=attempt, cached_tokens=cached)
                request.runs_on, request.first_on_runner = P, True
            case Decode():
                request.runs_on, request.first_on_runner = D, True
            case Allocate(transfer_id=transfer_id):
                answer = Allocated(**at, transfer_id=transfer_id, hit_blocks=0, block_ids=[])
            case Transmit(transfer_id=id):
                answer = Sent(**at, transfer_id=id, num_blocks=0, size_bytes=0, seconds=0.0)
            case Commit(transfer_id=transfer_id):
                answer = Inserted(**at, transfer_id=transfer_id, num_tokens=0)
            case Abort(hold=hold):
                if request.runs_on is not None and request.runs_on.instance == instance:
                    request.runs_on = None
                if hold:
                    answer = self._finished(request, instance)
        if answer is not None:
            self._events.append((request, answer))

    def _finished(self, request: FakeRequest, instance: InstanceId) -> Finished:
        lifecycle = request.lifecycle
        held = len(lifecycle.token_ids) - 1
        return Finished(
            instance=instance,
            epoch=1,
            request_id=lifecycle.spec.id,
            attempt=lifecycle.attempt,
            held_tokens=held,
        )

    def _pump_soon(self) -> None:
        self._changed.set()
        if not self._is_pumping:
            self._is_pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Deliver the workers' answers of the last turn, then let each instance make a step."""
        self._is_pumping = False
        for _ in range(len(self._events)):
            request, event = self._events.popleft()
            self._step(request, event)
        for seat in (P, D):
            self._engine_step(seat)
        if self._events or any(self._can_run(request) for request in self._by_id.values()):
            self._pump_soon()
        self._changed.set()

    def _can_run(self, request: FakeRequest) -> bool:
        pause = request.script.pause_after
        is_paused = pause is not None and len(request.lifecycle.generated) >= pause
        return request.runs_on is not None and not is_paused

    def _engine_step(self, seat: Seat) -> None:
        running = [r for r in self._by_id.values() if r.runs_on == seat and self._can_run(r)]
        if not running:
            return
        outputs = [self._generate(request, seat) for request in running]
        (payload,) = self._encoder.encode(EngineCoreOutputs(outputs=outputs, timestamp=1.0))
        deliveries: dict[RequestId, Delivery] = {}
        finished = []
        for request, output in zip(running, outputs, strict=True):
            reason = None if output.finish_reason is None else str(output.finish_reason)
            if reason is not None:
                request.runs_on = None
                finished.append(request)
            told = TokenOutput(
                request.lifecycle.spec.id,
                request.lifecycle.attempt,
                output.new_token_ids,
                reason,
            )
            for action in self._step(request, Output(seat.instance, told)):
                if isinstance(action, Deliver):
                    deliveries[told.request_id] = action.delivery
                    if action.delivery.final:
                        request.state = "finished"
        self.sink.on_step(bytes(payload), deliveries)
        for request in finished:
            self._events.append((request, self._finished(request, seat.instance)))

    def _generate(self, request: FakeRequest, seat: Seat) -> EngineCoreOutput:
        lifecycle, params = request.lifecycle, request.params
        spec = lifecycle.spec
        is_first, request.first_on_runner = request.first_on_runner, False
        position = len(lifecycle.generated)
        is_handing_over = self.is_split and seat == P and spec.max_tokens > 1
        token = request.script.tokens[position]
        if is_handing_over and spec.resample:
            token = WRONG_TOKEN
        output = EngineCoreOutput(request_id=spec.id, new_token_ids=[token])
        is_eos = token == params._eos_token_id and not params.ignore_eos
        if is_eos or token in (params.stop_token_ids or ()):
            output.finish_reason = FinishReason.STOP
            output.stop_reason = None if is_eos else token
        elif is_handing_over or position + 1 >= spec.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        if position == request.script.stuck_after and params.structured_outputs is not None:
            output.new_token_ids, output.finish_reason = [], FinishReason.ERROR
        if params.logprobs is not None:
            output.new_logprobs = _logprobs(token, params.logprobs)
        if is_first:
            prompt = spec.prompt_token_ids
            cached = request.script.cached_tokens if seat == P else len(prompt)
            output.prefill_stats = PrefillStats(len(prompt), len(prompt) - cached, cached)
            if params.prompt_logprobs is not None and seat == P:
                output.new_prompt_logprobs_tensors = _prompt_logprobs(prompt, params)
        return output


def _logprobs(token: int, count: int) -> LogprobsLists:
    """The sampled token, then `count` others."""
    ids = np.array([[token, *range(1000, 1000 + count)]], dtype=np.int32)
    values = -0.5 - np.arange(count + 1, dtype=np.float32)[None, :]
    return LogprobsLists(ids, values, np.array([1], dtype=np.int32))


def _prompt_logprobs(prompt: list[int], params: SamplingParams) -> LogprobsTensors:
    """For all tokens but the first: the token, then `prompt_logprobs` others."""
    count = params.prompt_logprobs
    others = list(range(1000, 1000 + count))
    ids = torch.tensor([[token, *others] for token in prompt[1:]], dtype=torch.int32)
    ids = ids.reshape(len(prompt) - 1, count + 1)
    return LogprobsTensors(
        ids,
        torch.full(ids.shape, -0.25),
        torch.ones(len(prompt) - 1, dtype=torch.int32),
    )
