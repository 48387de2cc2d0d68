"""The engine loop over a scripted engine: pool, requests and transfers are real.

The engine keeps vLLM's order of hooks and frees, and generates what a test tells it. No process, no
model, no waiting: time is a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.request import Request, RequestStatus

from memserve.core.swap import SwapDecision, SwapLimits
from memserve.messages import (
    Allocate,
    AnyCommand,
    AnyEvent,
    Audit,
    Audited,
    CacheChanged,
    Decode,
    Heartbeat,
    PeerJoined,
    Prefill,
    Transmit,
)
from memserve.types import InstanceId, Namespace, RequestId, TransferId, TransferStyle
from memserve.workers.compat import Engine
from memserve.workers.engine_loop import EngineLoop
from memserve.workers.index_reports import IndexReports
from memserve.workers.links.fake import FakeLink
from memserve.workers.mempool import MemPool
from memserve.workers.swap_queue import NoSwaps, SwapQueue, Swaps
from memserve.workers.swapping import Swapper
from memserve.workers.transfer import Transfers
from tests.contract.link_rig import BLOCK_SIZE, buffer_bytes, geometry
from tests.contract.swap_rig import CheapSwaps, ManualQueues, make_tier
from tests.contract.transfer_rig import FakeClock, FakeSteps, make_hasher, make_pool, prompt
from tests.integration import worker_harness
from tests.integration.worker_harness import request_bytes

ID = RequestId("r")
NUM_BLOCKS = 24
CHUNKED = prompt(17)
WAKE_FD = 99


class ScriptedEngine:
    """What the loop uses of `compat.Engine`. Each step gives every running request one token, or
    computes the next chunk of its prompt."""

    max_model_len = 100

    def __init__(self, mempool: MemPool, pool: BlockPool, steps: FakeSteps) -> None:
        self._mempool = mempool
        self._steps = steps
        self._pool = pool
        self._hasher = make_hasher()
        self.loop: EngineLoop | None = None
        self.waiting: list[Request] = []
        self.running: dict[str, Request] = {}
        self.tables: dict[str, list[int]] = {}
        self.breaks_on_add: Exception | None = None
        self.added: list[EngineCoreRequest] = []
        self.num_steps = 0
        self.turns_inside = 0
        """How often the loop is asked to serve while a step waits."""
        self.is_waiting = False
        self.serve: Callable[[], None] = lambda: None
        self.steps_in_flight = 0
        """A step ends so many calls of `step` later, or when nothing runs any more."""
        self.chunk_tokens = 1000
        self.layers_told: Sequence[int] = ()
        """Of which the step tells while it computes."""
        self.before_each_wait: Callable[[], None] = lambda: None
        self.after_each_step: Callable[[], None] = lambda: None

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def is_starved(self) -> bool:
        return bool(self.waiting) and not self.running

    def running_blocks(self, request_id: str) -> tuple[list[int], int]:
        request = self.running.get(request_id)
        if request is None:
            return [], 0
        return list(self.tables[request_id]), request.num_computed_tokens

    def held_blocks(self) -> dict[str, list[int]]:
        return dict(self.tables)

    def fence(self) -> Callable[[], bool]:
        last = self._steps.num_launched
        return lambda: self._steps.num_ended >= last

    def serve_while_waiting(self, serve: Callable[[], None]) -> int:
        self.serve = serve
        return WAKE_FD

    def add(self, request: EngineCoreRequest) -> None:
        if self.breaks_on_add is not None:
            raise self.breaks_on_add
        self.added.append(request)
        key = self._hasher(request.prompt_token_ids or [], Namespace(request.cache_salt))
        key.request_id = request.request_id
        assert request.sampling_params is not None
        assert request.sampling_params.max_tokens is not None
        key.max_tokens = request.sampling_params.max_tokens
        self.waiting.append(key)

    def abort(self, request_id: str) -> None:
        is_known = any(r.request_id == request_id for r in [*self.waiting, *self.running.values()])
        assert not (is_known and self.is_waiting), "the engine is in the midst of a step"
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                request.status = RequestStatus.FINISHED_ABORTED
                self._finish(request)
                return
        if (running := self.running.pop(request_id, None)) is not None:
            running.status = RequestStatus.FINISHED_ABORTED
            self._finish(running)
            self._end_steps()

    def step(self) -> tuple[EngineCoreOutputs | None, bool]:
        assert self.loop is not None
        self.num_steps += 1
        with self._steps.scheduling():
            for request in list(self.waiting):
                self._schedule(request)
        outputs = []
        scheduled = {
            r.request_id: min(self.chunk_tokens, r.num_tokens - r.num_computed_tokens)
            for r in self.running.values()
        }
        self.loop.on_step(scheduled)
        for layer in self.layers_told:
            self.loop.on_layer(layer)
        self._wait()
        for request in [self.running[request_id] for request_id in scheduled]:
            request.num_computed_tokens += scheduled[request.request_id]
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.append_output_token_ids(500 + request.num_output_tokens)
            output = EngineCoreOutput(request.request_id, [request.output_token_ids[-1]])
            if request.num_output_tokens == request.max_tokens:
                output.finish_reason = FinishReason.LENGTH
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
                del self.running[request.request_id]
                self._finish(request)
            outputs.append(output)
        self._end_steps()
        self.after_each_step()
        return EngineCoreOutputs(outputs=outputs), bool(self.running or outputs)

    def _wait(self) -> None:
        self.is_waiting = True
        self.before_each_wait()
        for _ in range(self.turns_inside):
            self.serve()
        self.is_waiting = False

    def _end_steps(self) -> None:
        late = self.steps_in_flight if self.is_busy else 0
        self._steps.num_ended = max(self._steps.num_ended, self.num_steps - late)

    def _schedule(self, request: Request) -> None:
        assert self.loop is not None
        hits = [self._pool.get_cached_block(h, [0]) for h in request.block_hashes]
        most = (request.num_tokens - 1) // BLOCK_SIZE
        blocks = [found[0] for found in hits[:most] if found]
        need = -(-(request.num_tokens + request.max_tokens) // BLOCK_SIZE) - len(blocks)
        evictable = sum(block.ref_cnt == 0 for block in blocks)
        if need > self._pool.get_num_free_blocks() - evictable:
            return
        self._pool.touch(blocks)
        cached = len(blocks) * BLOCK_SIZE
        blocks = blocks + self._pool.get_new_blocks(need)
        self._pool.cache_full_blocks(
            request, blocks, cached // BLOCK_SIZE, len(request.block_hashes), BLOCK_SIZE, 0
        )
        request.num_computed_tokens = cached
        self.waiting.remove(request)
        self.running[request.request_id] = request
        self.tables[request.request_id] = [block.block_id for block in blocks]
        self.loop.on_scheduled(request.request_id, cached)

    def _finish(self, request: Request) -> None:
        assert self.loop is not None
        table = self.tables.get(request.request_id, [])
        self.loop.on_finished(request, list(table))
        self._pool.free_blocks(reversed([self._pool.blocks[b] for b in table]))
        self.tables.pop(request.request_id, None)


class ScriptedChannel:
    """Commands in, events out; waiting moves the clock on and ends the run when all is said."""

    def __init__(self, clock: FakeClock, engine: ScriptedEngine) -> None:
        self._clock = clock
        self._engine = engine
        self.wakes: list[int] = []
        self.commands: deque[AnyCommand | None] = deque()
        """None: for who looks then, there is nothing more."""
        self.events: list[AnyEvent] = []
        self.waits: list[float] = []
        self.waits_inside: list[float] = []
        """In the midst of a step."""
        self.is_idle_after = 1
        self.spins = 0
        self.loop: EngineLoop | None = None

    def send(self, event: AnyEvent) -> None:
        self.events.append(event)

    def receive(self) -> AnyCommand | None:
        return self.commands.popleft() if self.commands else None

    def wake_on(self, fd: int) -> None:
        self.wakes.append(fd)

    def wait(self, timeout_s: float) -> None:
        if self._engine.is_waiting:
            self.waits_inside.append(timeout_s)
            return
        self.waits.append(timeout_s)
        if self.commands:
            return
        if timeout_s <= 0.0:
            self.spins += 1
            if self.spins > 1000 and self.loop is not None:
                self.loop.stop()  # it waits for a copy that a test holds back
            return
        self._clock.now_s += timeout_s
        self.is_idle_after -= 1
        if self.is_idle_after < 0:
            assert self.loop is not None
            self.loop.stop()


class Bench:
    """One loop with everything around it; with `queues`, it has a DRAM tier that copies on them."""

    def __init__(
        self,
        queues: ManualQueues | None = None,
        style: TransferStyle = TransferStyle.REQUEST,
    ) -> None:
        self.clock = FakeClock()
        steps = FakeSteps()
        self.mempool, self.pool = make_pool(NUM_BLOCKS, clock=self.clock, steps=steps)
        self.engine = ScriptedEngine(self.mempool, self.pool, steps)
        self.channel = ScriptedChannel(self.clock, self.engine)
        shape = geometry("block_first", NUM_BLOCKS)
        size = buffer_bytes(shape)
        memory = bytearray(size)
        self.link = FakeLink(memory, shape, bytearray(size), shape)
        self.writes: list[str] = []
        """What was sent, in words, as the link was given it."""
        self._note_writes()
        reports = IndexReports(self.mempool, InstanceId("P0"), 1, self.channel.send)
        self.transfers = Transfers(
            self.mempool,
            shape,
            lambda peer: self.link,
            InstanceId("P0"),
            1,
            reports.send,
            style,
        )
        self.swaps: Swaps = NoSwaps()
        if queues is not None:
            limits = SwapLimits(margin_blocks=0, pinned_blocks=8)
            tier = make_tier(shape, memory, queues, self.clock)
            self.swapper = Swapper(self.mempool, tier, limits, self.clock, batch_blocks=4)
            decision = SwapDecision(CheapSwaps(), BLOCK_SIZE, shape.block_bytes)
            self.swaps = SwapQueue(self.mempool, self.swapper, decision, limits, self.clock)
        self.loop = EngineLoop(
            InstanceId("P0"),
            1,
            cast(Engine, self.engine),
            self.mempool,
            self.transfers,
            self.swaps,
            reports,
            self.channel,
            heartbeat_interval_s=1.0,
            clock=self.clock,
        )
        self.engine.loop = self.channel.loop = self.loop

    def _note_writes(self) -> None:
        send, send_layer = self.link.send, self.link.send_layer

        def noted(part: TransferId, sources: Sequence[Any], targets: Sequence[Any]) -> None:
            self.writes.append(f"{len(targets)} blocks in step {self.engine.num_steps}")
            send(part, sources, targets)

        def noted_layer(
            part: TransferId, layer: int, sources: Sequence[Any], targets: Sequence[Any]
        ) -> None:
            text = f"layer {layer} of {len(targets)} in step {self.engine.num_steps}"
            self.writes.append(text)
            send_layer(part, layer, sources, targets)

        self.link.send, self.link.send_layer = noted, noted_layer  # type: ignore[method-assign]

    def run(self, *commands: AnyCommand, idle_waits: int = 0) -> list[AnyEvent]:
        """Serve these until the worker is idle, and has waited so often.

        Without heartbeats, and without what is said of the index.
        """
        self.channel.commands.extend(commands)
        self.channel.is_idle_after = idle_waits
        self.channel.spins = 0
        self.channel.events.clear()
        self.loop._is_stopping = False
        self.loop.run()
        periodic = Heartbeat | CacheChanged
        return [event for event in self.channel.events if not isinstance(event, periodic)]

    def audit(self) -> Audited:
        audited = [e for e in self.run(Audit(epoch=1, audit_id=1)) if isinstance(e, Audited)]
        assert len(audited) == 1
        return audited[0]


def prefill(tokens: list[int], request: bytes | None = None, **changes: Any) -> Prefill:
    return worker_harness.prefill(ID, tokens, request or request_bytes(20), **changes)


def decode(tokens: list[int], request: bytes | None = None, **changes: Any) -> Decode:
    return worker_harness.decode(ID, tokens, request or request_bytes(3), **changes)


def allocate(tokens: list[int], **changes: Any) -> Allocate:
    return worker_harness.allocate(ID, tokens, **{"transfer_id": TransferId("t"), **changes})


def transmit(*block_ids: int) -> Transmit:
    return Transmit(
        epoch=1,
        transfer_id=TransferId("t"),
        request_id=ID,
        peer=InstanceId("D0"),
        first_block=0,
        block_ids=list(block_ids),  # type: ignore[arg-type]
    )


JOINED = PeerJoined(
    epoch=1,
    peer=InstanceId("D0"),
    peer_epoch=1,
    geometry=geometry("block_first", NUM_BLOCKS),
    addresses={},
)


def kinds(events: Sequence[AnyEvent]) -> list[type]:
    return [type(event) for event in events]


def only(events: Sequence[AnyEvent], kind: type) -> Any:
    (event,) = [event for event in events if isinstance(event, kind)]
    return event
