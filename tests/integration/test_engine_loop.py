"""The engine loop over a scripted engine, and what the engine is asked to run for a command.

The pool, its requests and the transfers are real; the engine keeps vLLM's order of hooks and frees,
and generates what a test tells it. No process, no model, no waiting: time is a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.request import Request, RequestStatus

from memserve.changes import Evicted
from memserve.core.swap import SwapDecision, SwapLimits
from memserve.core.tokens import pack
from memserve.errors import RequestError
from memserve.messages import (
    Abort,
    Allocate,
    Allocated,
    AnyCommand,
    AnyEvent,
    Audit,
    Audited,
    CacheChanged,
    CacheSnapshot,
    Cancel,
    Commit,
    Decode,
    Expired,
    Finished,
    Heartbeat,
    History,
    Inserted,
    InsertFailed,
    PeerJoined,
    PeerLost,
    Prefill,
    Refused,
    Rejected,
    ResetCache,
    SendSnapshot,
    Sent,
    Started,
    Stop,
    Tokens,
    Transmit,
    TransmitFailed,
)
from memserve.types import InstanceId, Namespace, RequestId, TransferId, TransferStyle
from memserve.workers.compat import Engine, EngineCodec, complete_tokens
from memserve.workers.engine_loop import EngineLoop
from memserve.workers.index_reports import IndexReports
from memserve.workers.links.fake import FakeLink
from memserve.workers.mempool import MemPool
from memserve.workers.requests import decode_request, prefill_request
from memserve.workers.swap_queue import NoSwaps, SwapQueue, Swaps
from memserve.workers.swapping import Swapper
from memserve.workers.transfer import Transfers, private_namespace
from tests.contract.link_rig import BLOCK_SIZE, buffer_bytes, geometry
from tests.contract.swap_rig import CheapSwaps, ManualQueues, make_tier
from tests.contract.transfer_rig import FakeClock, make_hasher, make_pool, prompt
from tests.integration.worker_harness import request_bytes

ID = RequestId("r")
NUM_BLOCKS = 24
WAKE_FD = 99


class ScriptedEngine:
    """What the loop uses of `compat.Engine`. Each step gives every running request one token, or
    computes the next chunk of its prompt."""

    max_model_len = 100

    def __init__(self, mempool: MemPool, pool: BlockPool) -> None:
        self._mempool = mempool
        self._pool = pool
        self._hasher = make_hasher()
        self.loop: EngineLoop | None = None
        self.waiting: list[Request] = []
        self.running: dict[str, Request] = {}
        self.tables: dict[str, list[int]] = {}
        self.breaks_on_add: Exception | None = None
        self.added: list[EngineCoreRequest] = []
        self.num_steps = 0
        self.num_ended = 0
        self.turns_inside = 0
        """How often the loop is asked to serve while a step waits."""
        self.is_waiting = False
        self.serve: Callable[[], None] = lambda: None
        self.steps_in_flight = 0
        """As the fence sees it: a step ends so many calls of `step` later."""
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
        last_step = self.num_steps + self.steps_in_flight
        return lambda: self.num_ended >= last_step or not self.is_busy

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

    def step(self) -> tuple[EngineCoreOutputs | None, bool]:
        assert self.loop is not None
        self.num_steps += 1
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
        self.after_each_step()
        return EngineCoreOutputs(outputs=outputs), bool(self.running or outputs)

    def _wait(self) -> None:
        self.is_waiting = True
        self.before_each_wait()
        for _ in range(self.turns_inside):
            self.serve()
        self.is_waiting = False
        self.num_ended = self.num_steps

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
        self.mempool, self.pool = make_pool(NUM_BLOCKS, clock=self.clock)
        self.engine = ScriptedEngine(self.mempool, self.pool)
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


@pytest.fixture(params=[0, 3], ids=["between steps", "inside steps"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """An engine that never waits, as on the CPU, and one that waits in each step, as on a GPU."""
    made = Bench()
    made.engine.turns_inside = request.param
    return made


def prefill(tokens: list[int], **changes: Any) -> Prefill:
    fields: dict[str, Any] = {
        "epoch": 1,
        "request_id": ID,
        "attempt": 1,
        "request": request_bytes(20),
        "known_tokens": 0,
        "token_ids": tokens,
        "whole": False,
        "hold": True,
        "is_private": False,
    }
    return Prefill(**{**fields, **changes})


def decode(tokens: list[int], **changes: Any) -> Decode:
    fields: dict[str, Any] = {
        "epoch": 1,
        "request_id": ID,
        "attempt": 1,
        "request": request_bytes(3),
        "known_tokens": 0,
        "token_ids": tokens,
        "num_generated": 1,
        "hold": False,
        "is_private": False,
    }
    return Decode(**{**fields, **changes})


def allocate(tokens: list[int], **changes: Any) -> Allocate:
    fields: dict[str, Any] = {
        "epoch": 1,
        "transfer_id": TransferId("t"),
        "request_id": ID,
        "known_tokens": 0,
        "token_ids": tokens,
        "namespace": Namespace(),
        "is_private": False,
        "deadline_s": 30.0,
    }
    return Allocate(**{**fields, **changes})


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


# ── the loop ──────────────────────────────────────────────────────────────────────────────────


def test_prefill_is_told_in_order_and_held_until_forgotten(bench: Bench) -> None:
    tokens = prompt(10)
    events = bench.run(prefill(tokens, attempt=7))
    assert kinds(events) == [Started, Tokens, Finished]
    assert only(events, Started).attempt == 7
    (output,) = only(events, Tokens).outputs
    assert (output.request_id, output.attempt, output.finish_reason) == (ID, 7, "length")
    assert only(events, Finished).held_tokens == 10
    assert bench.audit().stats.active_blocks == 2  # the full ones; the third was never to be sent
    bench.run(Abort(epoch=1, request_id=ID))
    audited = bench.audit()
    assert (audited.holders, audited.problems) == ([], [])


@pytest.mark.parametrize("transmit_first", [True, False])
def test_sent_follows_finished(bench: Bench, transmit_first: bool) -> None:
    bench.run(JOINED)
    commands = [prefill(prompt(8)), transmit(5, 6)]
    if transmit_first:
        events = bench.run(*commands)
        assert kinds(events) == [Started, Tokens, Finished, Sent]
    else:
        events = [*bench.run(commands[0]), *bench.run(commands[1])]
        assert kinds(events) == [Started, Tokens, Finished, Sent]
    assert only(events, Sent).num_blocks == 2
    assert bench.audit().stats.active_blocks == 0


CHUNKED = prompt(17)


@pytest.mark.parametrize(
    ("style", "steps_in_flight", "writes"),
    [
        ("request", 0, ["4 blocks in step 3"]),
        ("discrete", 0, ["4 blocks in step 3"]),
        ("chunk", 0, ["1 blocks in step 1", "2 blocks in step 2", "1 blocks in step 3"]),
        ("chunk", 1, ["1 blocks in step 2", "2 blocks in step 3", "1 blocks in step 3"]),
        ("chunk", 9, ["1 blocks in step 3", "2 blocks in step 3", "1 blocks in step 3"]),
        (
            "layer",
            0,
            [
                f"layer {n} of {b} in step {s}"
                for s, b in ((1, 1), (2, 2), (3, 1))
                for n in (2, 0, 1)
            ],
        ),
    ],
)
def test_what_is_sent_in_which_step(style: str, steps_in_flight: int, writes: list[str]) -> None:
    """A prompt of three steps; `layer` also sends what the hooks do not tell of, here layer 1."""
    bench = Bench(style=TransferStyle(style))
    bench.engine.chunk_tokens, bench.engine.layers_told = 6, (2, 0)
    bench.engine.steps_in_flight = steps_in_flight
    bench.run(JOINED)
    events = bench.run(prefill(CHUNKED), transmit(5, 6, 7, 8))
    assert kinds(events) == [Started, Tokens, Finished, Sent]
    sent = only(events, Sent)
    assert (sent.num_blocks, sent.size_bytes) == (4, 4 * geometry().block_bytes)
    assert bench.writes == writes
    assert bench.audit().stats.active_blocks == 0


@pytest.mark.parametrize("style", ["chunk", "layer"])
def test_parts_of_a_request_that_is_aborted_in_its_prefill(style: str) -> None:
    bench = Bench(style=TransferStyle(style))
    bench.engine.chunk_tokens = 6
    bench.run(JOINED)

    def after_step() -> None:
        if bench.engine.num_steps == 2:
            bench.channel.commands.append(Abort(epoch=1, request_id=ID))

    bench.engine.after_each_step = after_step
    events = bench.run(prefill(CHUNKED), transmit(5, 6, 7, 8))
    assert kinds(events) == [Started, TransmitFailed]
    assert len(bench.writes) > 0 and not bench.transfers.is_active
    audited = bench.audit()
    assert (audited.holders, audited.problems) == ([], [])


def test_abort_fails_the_transmit_that_waits(bench: Bench) -> None:
    bench.run(JOINED)
    events = bench.run(
        prefill(prompt(8)), transmit(5, 6), Abort(epoch=1, request_id=ID), transmit(5, 6)
    )
    assert kinds(events) == [TransmitFailed, TransmitFailed]  # also the one that came too late
    assert bench.audit().holders == []


def test_several_requests_share_one_message_per_step(bench: Bench) -> None:
    names = [RequestId(f"r{i}") for i in range(3)]
    events = bench.run(*(prefill(prompt(6, seed=i), request_id=n) for i, n in enumerate(names)))
    assert [o.request_id for o in only(events, Tokens).outputs] == names
    assert kinds(events) == [Started] * 3 + [Tokens] + [Finished] * 3


def test_attempts_do_not_meet_in_the_engine(bench: Bench) -> None:
    bench.run(prefill(prompt(6), attempt=1), prefill(prompt(6), attempt=2))
    assert [request.request_id for request in bench.engine.added] == ["r/1", "r/2"]
    bench.run(Abort(epoch=1, request_id=ID))
    assert bench.audit().holders == []


def test_known_tokens_are_not_sent_again(bench: Bench) -> None:
    tokens = prompt(9)
    events = bench.run(allocate(tokens))
    assert len(only(events, Allocated).block_ids) == 2
    size = 2 * geometry().block_bytes
    commit = Commit(epoch=1, transfer_id=TransferId("t"), size_bytes=size, pin=True)
    events = bench.run(commit, decode([77], known_tokens=9))
    assert only(events, Inserted).num_tokens == 8
    assert bench.engine.added[0].prompt_token_ids == [*tokens, 77]
    assert only(events, Started).cached_tokens == 8
    assert len([e for e in events if isinstance(e, Tokens)]) == 2  # of 3 tokens, P made one
    bench.run(Abort(epoch=1, request_id=ID))
    assert bench.audit().holders == []


def test_prefill_goes_on_from_what_was_fetched(bench: Bench) -> None:
    tokens = prompt(10)
    bench.run(allocate(tokens[:8]))
    size = 2 * geometry().block_bytes
    commit = Commit(epoch=1, transfer_id=TransferId("t"), size_bytes=size, pin=True)
    events = bench.run(commit, prefill(tokens[8:], known_tokens=8))
    assert kinds(events)[:2] == [Inserted, Started]
    assert only(events, Started).cached_tokens == 8
    assert bench.engine.added[0].prompt_token_ids == tokens
    bench.run(Abort(epoch=1, request_id=ID))
    assert bench.audit().holders == []


@pytest.mark.parametrize("steps_in_flight", [0, 2])
def test_history_is_sent_for_an_unknown_request_after_the_steps_in_flight(
    bench: Bench, steps_in_flight: int
) -> None:
    bench.run(JOINED, prefill(prompt(8)))
    bench.run(Abort(epoch=1, request_id=ID))
    bench.engine.steps_in_flight = steps_in_flight
    busy = prefill(prompt(9, seed=1), whole=True, request_id=RequestId("busy"))
    history = msgspec.structs.replace(transmit(5, 6), history=History(Namespace(), prompt(8)))
    events = bench.run(busy, history)
    assert only(events, Sent).num_blocks == 2
    assert kinds(events)[: kinds(events).index(Sent)].count(Tokens) == steps_in_flight
    bench.run(Abort(epoch=1, request_id=RequestId("busy")))
    assert bench.audit().holders == []


def test_unknown_tokens_are_a_refusal_and_the_loop_lives_on(bench: Bench) -> None:
    events = bench.run(allocate([], known_tokens=4), decode([1], known_tokens=4))
    assert "4 tokens are said to be known here, 0 are" in events[0].reason  # type: ignore[union-attr]
    assert isinstance(events[1], Rejected)
    assert bench.audit().holders == []


@pytest.mark.parametrize("error", [ValueError("no such adapter"), AssertionError(), KeyError("x")])
def test_request_that_breaks_on_its_way_in_is_rejected(bench: Bench, error: Exception) -> None:
    bench.engine.breaks_on_add = error
    rejected = only(bench.run(prefill(prompt(6), attempt=3)), Rejected)
    assert rejected.attempt == 3
    assert rejected.message in (str(error), type(error).__name__)
    bench.engine.breaks_on_add = None
    events = bench.run(Abort(epoch=1, request_id=ID), prefill(prompt(6), attempt=4))
    assert Finished in kinds(events)


def test_decode_of_a_running_request_is_rejected_and_does_not_touch_it(bench: Bench) -> None:
    events = bench.run(decode(prompt(6), attempt=1), decode(prompt(6), attempt=2))
    assert only(events, Rejected).attempt == 2
    assert only(events, Finished).attempt == 1


def test_private_kv_is_no_history(bench: Bench) -> None:
    events = bench.run(prefill(prompt(12), is_private=True))
    assert only(events, Finished).held_tokens == 12
    stats = bench.audit().stats
    assert (stats.active_blocks, stats.historical_blocks) == (3, 0)  # pinned, and not indexed
    assert bench.engine.added[0].cache_salt == private_namespace(ID, Namespace()).cache_salt
    bench.run(Abort(epoch=1, request_id=ID))
    stats = bench.audit().stats
    assert stats.free_blocks == stats.total_blocks


def test_abort_with_hold_ends_a_running_request_as_if_it_had_finished(bench: Bench) -> None:
    tokens = prompt(9)
    bench.channel.commands.extend([decode(tokens, request=request_bytes(30), num_generated=0)])
    bench.channel.is_idle_after = 0
    steps = 0
    step = bench.engine.step

    def step_and_stop() -> tuple[EngineCoreOutputs | None, bool]:
        nonlocal steps
        steps += 1
        if steps == 5:
            bench.channel.commands.append(Abort(epoch=1, request_id=ID, hold=True))
        return step()

    bench.engine.step = step_and_stop  # type: ignore[method-assign]
    bench.loop.run()
    finished = only(bench.channel.events, Finished)
    assert finished.held_tokens == 9 + 5 - 1
    again = only(bench.run(Abort(epoch=1, request_id=ID, hold=True)), Finished)
    assert again == finished
    bench.run(Abort(epoch=1, request_id=ID))
    assert bench.audit().holders == []


def test_abort_with_hold_is_answered_whatever_is_known(bench: Bench) -> None:
    assert only(bench.run(Abort(epoch=1, request_id=ID, hold=True)), Finished).held_tokens == 0
    bench.run(allocate(prompt(5)))
    assert only(bench.run(Abort(epoch=1, request_id=ID, hold=True)), Finished).held_tokens == 0


def test_commands_of_another_epoch_are_ignored(bench: Bench) -> None:
    assert bench.run(prefill(prompt(6), epoch=2), Stop(epoch=2), Stop(epoch=0)) == []
    assert bench.audit().holders == []


def test_stop_leaves_later_commands_alone(bench: Bench) -> None:
    assert bench.run(Stop(epoch=1), prefill(prompt(6))) == []
    assert len(bench.channel.commands) == 1


def test_starving_engine_gets_the_soft_pins_and_does_not_spin(bench: Bench) -> None:
    half = NUM_BLOCKS // 2 * BLOCK_SIZE
    size = NUM_BLOCKS // 2 * geometry().block_bytes
    commit = Commit(epoch=1, transfer_id=TransferId("t"), size_bytes=size, pin=True)
    bench.run(allocate(prompt(half)), commit)
    big = prefill(prompt(60, seed=1), request_id=RequestId("big"))
    events = bench.run(big)
    assert Finished in kinds(events)
    # Held for a transmit, though, blocks stay: the engine waits without using the processor.
    bench.channel.waits.clear()
    events = bench.run(prefill(prompt(60, seed=2), request_id=RequestId("too much")), idle_waits=9)
    assert events == []
    assert bench.channel.waits[-5:] == [0.005] * 5
    bench.run(Abort(epoch=1, request_id=RequestId("big")), Abort(epoch=1, request_id=ID))
    bench.run(Abort(epoch=1, request_id=RequestId("too much")))
    assert bench.audit().holders == []


def test_idle_worker_wakes_for_heartbeats_and_deadlines_only(bench: Bench) -> None:
    bench.run(idle_waits=5)
    assert bench.channel.waits[-5:] == [1.0] * 5
    bench.channel.waits.clear()
    events = bench.run(allocate(prompt(8), deadline_s=2.5), idle_waits=4)
    assert kinds(events) == [Allocated, Expired]
    assert pytest.approx(0.5) in bench.channel.waits  # what is left of 2.5 after two heartbeats
    assert bench.audit().stats.quarantined_blocks == 2


def test_heartbeat_follows_when_the_engine_falls_idle(bench: Bench) -> None:
    bench.run()
    before = bench.clock.now_s
    bench.run(prefill(prompt(6)))
    assert isinstance(bench.channel.events[4], Heartbeat), kinds(bench.channel.events)
    assert bench.channel.events[4].stats.running_requests == 0
    assert bench.clock.now_s - before <= 1.0
    stats = bench.channel.events[4].stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (6, 0)


def test_the_status_says_how_long_steps_and_turns_take(bench: Bench) -> None:
    step, poll = bench.engine.step, bench.loop._transfers.poll
    bench.engine.turns_inside = 0

    def slow_step() -> tuple[EngineCoreOutputs | None, bool]:
        bench.clock.now_s += 0.25
        return step()

    def slow_poll() -> None:
        bench.clock.now_s += 0.125
        poll()

    bench.engine.step, bench.loop._transfers.poll = slow_step, slow_poll  # type: ignore[method-assign]
    bench.run(prefill(prompt(6)))
    stats, ran = bench.audit().stats, bench.engine.num_steps
    assert stats.steps == ran > 0
    assert stats.step_s == 0.25 * ran and stats.turn_s == 0.375 * ran


def test_the_index_is_reported_before_the_end_of_a_request_and_on_demand(bench: Bench) -> None:
    bench.run(prefill(prompt(BLOCK_SIZE + 2), hold=False))
    assert kinds([e for e in bench.channel.events if not isinstance(e, Heartbeat)]) == [
        Started,
        Tokens,
        CacheChanged,
        Finished,
    ]
    assert bench.audit().problems == []
    (snapshot,) = bench.run(SendSnapshot(epoch=1))
    assert isinstance(snapshot, CacheSnapshot)
    assert (snapshot.sequence, snapshot.is_last) == (1, True)
    assert [c.token_ids for c in snapshot.changes] == [pack(prompt(BLOCK_SIZE))]
    bench.run(ResetCache(epoch=1))
    (changed,) = [e for e in bench.channel.events if isinstance(e, CacheChanged)]
    assert changed.sequence == 2
    assert [type(change) for change in changed.changes] == [Evicted]


def test_engine_that_breaks_ends_the_loop(bench: Bench) -> None:
    def broken() -> tuple[EngineCoreOutputs | None, bool]:
        raise RuntimeError("device lost")

    bench.engine.step = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="device lost"):
        bench.run(prefill(prompt(6)))


# ── inside a step ─────────────────────────────────────────────────────────────────────────────


def deliver_inside(bench: Bench, *commands: AnyCommand, step: int = 1) -> None:
    """These arrive while the engine waits in this step, counted from now; it has time for all."""
    bench.engine.turns_inside = len(commands) + 2
    number = bench.engine.num_steps + step

    def deliver() -> None:
        if bench.engine.num_steps == number:
            bench.channel.commands.extend(commands)

    bench.engine.before_each_wait = deliver


BUSY = RequestId("busy")


def busy(num_tokens: int = 4) -> Prefill:
    """A request of several steps."""
    request = request_bytes(num_tokens)
    return prefill(prompt(9, seed=1), whole=True, hold=False, request_id=BUSY, request=request)


def commit(num_blocks: int) -> Commit:
    size_bytes = num_blocks * geometry().block_bytes
    return Commit(epoch=1, transfer_id=TransferId("t"), size_bytes=size_bytes, pin=True)


def abort(request_id: RequestId = ID) -> Abort:
    return Abort(epoch=1, request_id=request_id)


def test_what_arrives_inside_a_step_is_served_there_and_runs_in_the_next_one() -> None:
    bench = Bench()
    deliver_inside(bench, allocate(prompt(9)), commit(2), decode([77], known_tokens=9))
    events = bench.run(busy())
    assert kinds(events)[:6] == [Started, Allocated, Inserted, Tokens, Started, Tokens]
    assert [o.request_id for o in events[5].outputs] == [BUSY, ID]  # type: ignore[union-attr]
    assert bench.channel.wakes == [WAKE_FD]
    bench.run(abort(), abort(BUSY))
    assert bench.audit().problems == [] and bench.audit().holders == []


def test_a_source_is_sent_inside_a_step_of_others() -> None:
    bench = Bench()
    bench.run(JOINED, prefill(prompt(8)))
    deliver_inside(bench, transmit(5, 6))
    assert kinds(bench.run(busy()))[:3] == [Started, Sent, Tokens]


def test_history_that_the_step_computes_is_sent_after_it() -> None:
    """The pool has indexed it when the step was scheduled."""
    bench = Bench()
    bench.run(JOINED)
    computed = History(Namespace(), prompt(9, seed=1))
    deliver_inside(bench, msgspec.structs.replace(transmit(5, 6), history=computed))
    assert kinds(bench.run(busy()))[:3] == [Started, Tokens, Sent]


@pytest.mark.parametrize("again", [abort(BUSY), busy()], ids=["abort", "place again"])
def test_who_runs_is_taken_out_between_steps_and_nothing_overtakes_that(again: AnyCommand) -> None:
    bench = Bench()
    deliver_inside(bench, allocate(prompt(4)), again, allocate(prompt(8), transfer_id="t2"))
    bench.channel.waits_inside.clear()
    events = bench.run(busy())
    answers = [e for e in events if isinstance(e, Allocated | Tokens)]
    assert [type(e) for e in answers[:3]] == [Allocated, Tokens, Allocated]
    assert answers[0].transfer_id == "t" and answers[2].transfer_id == "t2"  # type: ignore[union-attr]
    # Two turns found something to do; what is held back is not looked at again and again.
    assert [wait for wait in bench.channel.waits_inside[:5] if wait == 0.0] == []
    assert bench.channel.waits_inside[:5] == [0.005] * 5
    bench.run(abort(BUSY), abort())
    assert bench.audit().problems == []


def test_who_does_not_run_is_forgotten_inside_a_step() -> None:
    bench = Bench()
    bench.run(prefill(prompt(8)))  # it has ended, and is held
    free: list[int] = []
    deliver_inside(bench, abort(), Audit(epoch=1, audit_id=2))
    events = bench.run(busy())
    free = [e.stats.pinned_requests for e in events if isinstance(e, Audited)]
    assert kinds(events)[:3] == [Started, Audited, Tokens] and free == [0]


def test_what_is_held_back_in_the_last_step_is_served_at_once() -> None:
    bench = Bench()
    deliver_inside(bench, abort(BUSY), allocate(prompt(8)))
    bench.channel.waits.clear()
    assert kinds(bench.run(busy(1))) == [Started, Tokens, Finished, Allocated]
    assert bench.channel.waits[-2] == 0.0, "and only then it slept"


@pytest.mark.parametrize("ending", ["stop", "signal"])
def test_nothing_is_served_after_the_order_to_stop(ending: str) -> None:
    bench = Bench()
    deliver_inside(bench, Stop(epoch=1), allocate(prompt(8)))
    if ending == "signal":
        deliver_inside(bench, allocate(prompt(8)))
        deliver = bench.engine.before_each_wait
        bench.engine.before_each_wait = lambda: (deliver(), bench.loop.stop())[0]
    assert kinds(bench.run(busy())) == [Started, Tokens]


def test_a_step_that_hangs_does_not_look_alive() -> None:
    bench = Bench()
    deliver_inside(bench, allocate(prompt(8)))
    deliver = bench.engine.before_each_wait

    def hang() -> None:
        deliver()
        bench.clock.now_s += 100.0

    bench.engine.before_each_wait = hang
    bench.run(busy(1))
    seen = [type(e) for e in bench.channel.events if isinstance(e, Allocated | Tokens | Heartbeat)]
    assert seen[:3] == [Allocated, Tokens, Heartbeat]


def test_layers_of_the_step_are_all_at_the_link_before_its_peer_can_be_lost() -> None:
    bench = Bench(style=TransferStyle.LAYER)
    bench.engine.chunk_tokens, bench.engine.layers_told = 6, (2, 0)
    bench.run(JOINED)
    deliver_inside(bench, PeerLost(epoch=1, peer=InstanceId("D0"), peer_epoch=1), step=2)
    events = bench.run(prefill(CHUNKED), transmit(5, 6, 7, 8))
    assert kinds(events) == [Started, TransmitFailed, Tokens, Finished]
    assert bench.writes[-1] == "layer 1 of 2 in step 2"
    bench.run(abort())
    assert bench.audit().holders == []


def life(number: int, kind: str) -> list[AnyCommand]:
    """The commands of one request; its KV comes, goes, or is returned."""
    name, tokens = RequestId(f"r{number}"), prompt(9, seed=number % 3)
    coming, going = TransferId(f"in {number}"), TransferId(f"out {number}")
    size = {"size_bytes": 2 * geometry().block_bytes}
    send = msgspec.structs.replace(transmit(5, 6), request_id=name, transfer_id=going)
    take = allocate(tokens, request_id=name, transfer_id=coming)
    done = msgspec.structs.replace(commit(2), transfer_id=coming, **size)
    run = decode([77], known_tokens=9, request_id=name, hold=kind == "returned")
    forget = abort(name)
    lives: dict[str, list[AnyCommand]] = {
        "sent": [prefill(tokens, request_id=name), send, forget],
        "sent late": [prefill(tokens, request_id=name), abort(BUSY), send, forget],
        "history": [msgspec.structs.replace(send, history=History(Namespace(), tokens))],
        "received": [take, done, run, forget],
        "returned": [take, done, run, send, forget],
        "cancelled": [take, Cancel(epoch=1, transfer_id=coming), forget],
        "twice": [
            prefill(tokens, request_id=name),
            prefill(tokens, request_id=name, attempt=2),
            forget,
        ],
        "reset": [ResetCache(epoch=1), SendSnapshot(epoch=1)],
    }
    return lives[kind]


KINDS = ("sent", "sent late", "history", "received", "returned", "cancelled", "twice", "reset")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_commands_may_arrive_at_any_moment(data: st.DataObject) -> None:
    """Every order gets its answer, once; in the end nobody holds anything. The engine itself
    refuses to abort a request inside a step."""
    bench = Bench(style=data.draw(st.sampled_from(TransferStyle)))
    bench.engine.turns_inside = data.draw(st.integers(0, 4), "turns inside")
    bench.engine.steps_in_flight = data.draw(st.integers(0, 1), "steps in flight")
    bench.engine.chunk_tokens = data.draw(st.sampled_from([3, 1000]), "chunk")
    bench.run(JOINED)
    kinds_of = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), "lives")
    lives = [deque(life(number, kind)) for number, kind in enumerate(kinds_of)]
    said: list[AnyCommand] = []
    bench.channel.commands.append(busy(30))
    while waiting := [one for one in lives if one]:
        said.append(data.draw(st.sampled_from(waiting)).popleft())
        looks = data.draw(st.integers(0, 2), "empty looks")
        bench.channel.commands.extend([said[-1], *[None] * looks])
    events = bench.run(abort(BUSY))
    events += bench.run(*(abort(RequestId(f"r{number}")) for number in range(len(lives))))
    asked = {
        (Allocated, Refused): [c.transfer_id for c in said if isinstance(c, Allocate)],
        (Inserted, InsertFailed): [c.transfer_id for c in said if isinstance(c, Commit)],
        (Sent, TransmitFailed): [c.transfer_id for c in said if isinstance(c, Transmit)],
    }
    for answers, transfers in asked.items():
        answered = [e.transfer_id for e in events if isinstance(e, answers)]
        assert sorted(answered) == sorted(transfers), answers
    audited = bench.audit()
    assert (audited.problems, audited.holders) == ([], [])


# ── what the engine is asked to run ───────────────────────────────────────────────────────────


def front_end_request(**params: Any) -> EngineCoreRequest:
    """As it arrives: through vLLM's codec, which runs the parameters' own checks again."""
    return EngineCodec().decode_request(request_bytes(**{"max_tokens": 20, **params}))


def params_of(request: EngineCoreRequest) -> SamplingParams:
    assert request.sampling_params is not None
    return request.sampling_params


def test_prefill_samples_one_token_whatever_the_client_asked() -> None:
    """39: limits of the client do not reach P."""
    request = front_end_request(
        min_tokens=5, logprobs=2, prompt_logprobs=1, stop_token_ids=[9], logit_bias={3: 1.0}
    )
    params = params_of(prefill_request(request, prefill([1, 2]), [1, 2], "r/1", "salt"))
    assert (params.max_tokens, params.min_tokens, params.n) == (1, 0, 1)
    assert (params.logprobs, params.prompt_logprobs) == (2, 1)  # 37, 38: they come from P
    assert params.skip_reading_prefix_cache
    assert params.stop_token_ids == [9]  # 41: a stop token as the very first token
    assert params.logit_bias == {3: 1.0}
    assert (request.request_id, request.cache_salt) == ("r/1", "salt")
    assert request.prompt_token_ids == [1, 2]


def test_prefill_whose_token_is_dropped_has_no_grammar() -> None:
    grammar = StructuredOutputsParams(json={"type": "object"})
    request = front_end_request(structured_outputs=grammar, logprobs=2, prompt_logprobs=0)
    params = params_of(prefill_request(request, prefill([1], resample=True), [1], "r/1", None))
    assert params.structured_outputs is None
    assert params.logprobs is None
    assert params.prompt_logprobs == 0


def test_whole_request_keeps_its_limits_less_what_was_generated() -> None:
    command = prefill([1, 2, 3], whole=True, num_generated=2)
    request = front_end_request(min_tokens=3, prompt_logprobs=1)
    params = params_of(prefill_request(request, command, command.token_ids, "r/2", None))
    assert (params.max_tokens, params.min_tokens) == (18, 1)
    assert params.prompt_logprobs is None  # the client has them from the first attempt
    assert not params.skip_reading_prefix_cache

    request = front_end_request(min_tokens=3, prompt_logprobs=1)
    params = params_of(prefill_request(request, prefill([1], whole=True), [1], "r/1", None))
    assert (params.max_tokens, params.min_tokens, params.prompt_logprobs) == (20, 3, 1)


def test_decode_reads_the_cache_and_counts_what_was_generated() -> None:
    request = front_end_request(min_tokens=2, prompt_logprobs=1, logprobs=4)
    params = params_of(decode_request(request, decode([], num_generated=3), [1, 2], "r/1", None))
    assert (params.max_tokens, params.min_tokens) == (17, 0)
    assert params.prompt_logprobs is None
    assert params.skip_reading_prefix_cache is False
    assert params.logprobs == 4


def test_client_cannot_speak_to_vllm_s_own_transfers() -> None:
    extra = {"kv_transfer_params": {"do_remote_prefill": True}, "mine": 1}
    request = front_end_request(extra_args=extra)
    params = params_of(prefill_request(request, prefill([1]), [1], "r/1", None))
    assert params.extra_args == {"mine": 1}


@pytest.mark.parametrize("num_generated", [20, 21])
def test_nothing_left_to_generate_is_an_error(num_generated: int) -> None:
    with pytest.raises(RequestError, match="of 20 allowed"):
        decode_request(
            front_end_request(), decode([], num_generated=num_generated), [1], "r/1", None
        )


def test_request_that_generates_nothing_is_an_error() -> None:
    request = front_end_request()
    request.sampling_params = None
    with pytest.raises(RequestError, match="generates nothing"):
        prefill_request(request, prefill([1]), [1], "r/1", None)


@pytest.mark.parametrize(
    ("computed", "in_flight", "complete"),
    [(0, 0, 0), (9, 0, 9), (10, 1, 9), (10, 0, 9), (7, 7, 0), (0, 4, 0)],
)
def test_kv_of_steps_in_flight_is_not_complete(
    computed: int, in_flight: int, complete: int
) -> None:
    request = make_hasher()(prompt(8), Namespace())
    request.append_output_token_ids([1, 2])
    request.num_computed_tokens = computed
    request.num_in_flight_tokens = in_flight
    assert complete_tokens(request) == complete
