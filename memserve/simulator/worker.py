"""One simulated instance: answers the scheduler's commands as a worker does, at simulated times.

The pool, the index, reservations, pins and what is said about them are the worker's own code
(`workers/mempool.py`, `transfer.py`, `index_reports.py`, `records.py`); only the engine and the
wires are simulated. As in `workers/engine_loop.py`, one thread does everything:

    commands ─▶ links ─▶ one step (or several of decoding alone) ─▶ Tokens, CacheChanged, Finished

On a CPU a command waits for the end of the step that runs when it arrives. A step on a GPU is
launched long before it has been computed; from then on commands are served inside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from memserve.core.cost_model import CostModel
from memserve.core.vocabulary import Seat
from memserve.messages import (
    Abort,
    Allocate,
    AnyCommand,
    AnyEvent,
    Cancel,
    Commit,
    Decode,
    Finished,
    Heartbeat,
    LinkReady,
    PeerJoined,
    PoolStats,
    Prefill,
    Rejected,
    SendSnapshot,
    Started,
    Tokens,
    Transmit,
)
from memserve.simulator.clock import EventQueue
from memserve.simulator.engine import EngineLimits, Run, SimulatedEngine, Step
from memserve.simulator.link import SimulatedLink, Ways
from memserve.simulator.workload import Piece, tokens_of
from memserve.types import Geometry, InstanceId, Namespace, RequestId, TransferStyle
from memserve.workers.index_reports import IndexReports
from memserve.workers.mempool import MemPool
from memserve.workers.pools import PlainPool
from memserve.workers.records import Records
from memserve.workers.transfer import Transfers, private_namespace


class SimulatedRequest(msgspec.Struct, frozen=True):
    """What travels in `RequestSpec.request`, where vLLM's own request would be."""

    reply: Piece
    """What it will generate, from its first token on."""


class Hardware(msgspec.Struct, frozen=True):
    """What an instance is made of."""

    geometry: Geometry
    link: str
    """Kind of link between instances; the profile knows how fast it is."""
    limits: EngineLimits


class SimulatedWorker:
    """One instance, with an inbox and an outbox in simulated time."""

    def __init__(
        self,
        seat: Seat,
        hardware: Hardware,
        costs: CostModel,
        queue: EventQueue,
        emit: Callable[[AnyEvent], None],
        peers: Mapping[InstanceId, SimulatedWorker],
        slowdown: float = 1.0,
    ) -> None:
        """`emit` takes every event at the moment it is sent."""
        self.seat = seat
        self._me: dict[str, Any] = {"instance": seat.instance, "epoch": seat.epoch}
        """What every event says first."""
        self.ways = Ways()
        self._hardware = hardware
        self._costs = costs
        self._queue = queue
        self._peers = peers
        self._linked: set[InstanceId] = set()
        self.mempool = MemPool(
            PlainPool(hardware.geometry.num_blocks),
            hardware.geometry.block_size,
            clock=queue.now,
            records_changes=True,
        )
        self._reports = IndexReports(self.mempool, seat.instance, seat.epoch, emit)
        self._emit = self._reports.send
        self.transfers = Transfers(
            self.mempool,
            hardware.geometry,
            self._open_link,
            seat.instance,
            seat.epoch,
            self._emit_of_transfers,
            TransferStyle.REQUEST,
        )
        self.engine = SimulatedEngine(
            self.mempool, costs, hardware.limits, queue.now, self, slowdown
        )
        self._records = Records()
        self._ended: list[Run] = []
        self._inbox: deque[AnyCommand] = deque()
        self._step: Step | None = None
        self._is_starved = False
        """Its requests found no block when a step was planned last."""
        self._is_turn_due = False
        self._alarm: float | None = None
        """When it wakes up for a deadline."""

    # ── time ──────────────────────────────────────────────────────────────────────────────────

    def deliver(self, command: AnyCommand) -> None:
        """A command arrives now; it is served when the host is free."""
        self._inbox.append(command)
        self._wake()

    def _wake(self) -> None:
        """Something has happened: see to it as soon as the host is free."""
        step, now = self._step, self._queue.now()
        if step is not None and step.num_steps > 1 and step.cut(now):
            self._queue.at(step.end, partial(self._end_step, step, step.num_steps))
        served_at = now if step is None else step.served_at(now)
        if not self._is_turn_due and (step is None or served_at < step.end):
            self._is_turn_due = True
            self._queue.at(served_at, self._turn)

    def _turn(self) -> None:
        """Between two steps, or inside one whose host is free."""
        self._is_turn_due = False
        while self._inbox:
            self._serve(self._inbox.popleft())
        self.transfers.poll()
        if self._step is None:
            self._is_starved &= self.engine.is_busy
            self.transfers.reserve_waiting(engine_starves=self._is_starved)
        self.transfers.expire()
        if self._step is None:
            self._begin_step()
        self._reports.flush()
        deadline = self.transfers.next_deadline()
        if deadline is not None and (self._alarm is None or deadline < self._alarm):
            self._alarm = deadline
            self._queue.at(deadline, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._wake()

    def _begin_step(self) -> None:
        if not self.engine.is_busy or self.ways.copies_until > self._queue.now():
            return
        step = self.engine.plan()
        if step is None and self.transfers.relax():
            step = self.engine.plan()
        self._step = step
        self._is_starved = step is None
        if step is None:
            return
        self._queue.at(step.end, partial(self._end_step, step, step.num_steps))

    def _end_step(self, step: Step, num_steps: int) -> None:
        if step is not self._step or num_steps != step.num_steps:  # it was cut
            return
        self._step = None
        if outputs := self.engine.finish(step):
            self._emit(Tokens(**self._me, outputs=outputs, payload=b""))
        self._report_ended()
        self._turn()

    # ── commands ──────────────────────────────────────────────────────────────────────────────

    def _serve(self, command: AnyCommand) -> None:
        match command:
            case Prefill():
                if not command.known_tokens:
                    self._forget(command.request_id)
                self._start(command, None if command.whole else 1)
            case Decode():
                self._start(command, None)
            case Allocate():
                self._allocate(command)
            case Transmit():
                self._transmit(command)
            case Commit():
                self.transfers.commit(command)
            case Cancel():
                self.transfers.cancel(command)
            case Abort():
                self._abort(command)
            case SendSnapshot():
                self._reports.send_snapshot()
            case _:
                raise AssertionError(f"nobody sends this to a simulated worker: {command}")

    def _start(self, command: Prefill | Decode, most: int | None) -> None:
        """Put the request into the engine; `most`: tokens to generate here, of those left."""
        record = self._records.learn(command.request_id, command.known_tokens, command.token_ids)
        tokens = record.tokens[: command.known_tokens + len(command.token_ids)]
        request = msgspec.msgpack.decode(command.request, type=SimulatedRequest)
        reply = tokens_of(request.reply)[command.num_generated :]
        namespace = Namespace()
        if command.is_private:
            namespace = private_namespace(record.id, namespace)
        run = Run(
            id=record.id,
            attempt=command.attempt,
            tokens=tokens,
            reply=reply[:most],
            hold=command.hold,
            namespace=namespace,
            owner=f"run {record.id}/{command.attempt}",
        )
        if -(-(len(tokens) + len(reply)) // self.mempool.block_size) > self.mempool.num_blocks:
            self._reject(command, "the request is larger than the pool")
            return
        record.attempt = command.attempt
        record.hold = command.hold
        record.is_private = command.is_private
        record.held_tokens = 0
        self._records.enter_engine(record, run.owner)
        self.engine.add(run)

    def _reject(self, command: Prefill | Decode, message: str) -> None:
        self._emit(
            Rejected(
                **self._me, request_id=command.request_id, attempt=command.attempt, message=message
            )
        )

    def _allocate(self, command: Allocate) -> None:
        record = self._records.learn(command.request_id, command.known_tokens, command.token_ids)
        num_tokens = command.known_tokens + len(command.token_ids)
        self.transfers.allocate(command, record.tokens[:num_tokens])

    def _transmit(self, command: Transmit) -> None:
        self._link_to(command.peer)
        if command.history is not None:
            self.transfers.transmit_history(command, command.history)
        else:
            self.transfers.transmit(command)

    def _abort(self, command: Abort) -> None:
        assert not command.hold, "no simulated client looks for stop strings"
        self._forget(command.request_id)

    def _forget(self, request_id: RequestId) -> None:
        record = self._records.get(request_id)
        if record is None:
            return
        assert record.engine_id is None, "no simulated client goes away"
        self._records.forget(request_id)
        self.transfers.drop_source(request_id)
        self.transfers.forget(request_id)

    # ── the engine's hooks ────────────────────────────────────────────────────────────────────

    def on_scheduled(self, run: Run, cached_tokens: int) -> None:
        """Say it before the step runs: the scheduler allocates on D meanwhile."""
        self.transfers.scheduled(run.id)
        self._emit(
            Started(**self._me, request_id=run.id, attempt=run.attempt, cached_tokens=cached_tokens)
        )

    def on_finished(self, run: Run) -> None:
        """Pin what is to be sent, while the request still has its blocks."""
        record = self._records.get(run.id)
        assert record is not None
        if run.hold:
            record.held_tokens = run.num_computed
            self.transfers.hold_source(run.id, run.block_ids, run.num_computed)
        self._ended.append(run)

    def _report_ended(self) -> None:
        ended, self._ended = self._ended, []
        for run in ended:
            record = self._records.get(run.id)
            assert record is not None
            self._records.leave_engine(record)
            if record.is_private:
                self.mempool.delete(run.tokens, run.namespace)
            self._emit(
                Finished(
                    **self._me,
                    request_id=run.id,
                    attempt=run.attempt,
                    held_tokens=record.held_tokens,
                )
            )
            if run.hold:
                self.transfers.source_ready(run.id)

    # ── links ────────────────────────────────────────────────────────────────────────

    def _link_to(self, peer: InstanceId) -> None:
        """Links open when they are first needed: thousands of instances would have millions."""
        if peer in self._linked:
            return
        self._linked.add(peer)
        self.transfers.peer_joined(
            PeerJoined(
                epoch=self.seat.epoch,
                peer=peer,
                peer_epoch=self._peers[peer].seat.epoch,
                geometry=self._peers[peer]._hardware.geometry,
                addresses={},
            )
        )

    def _open_link(self, peer: PeerJoined) -> SimulatedLink:
        return SimulatedLink(
            self._hardware.link,
            self._hardware.geometry.block_bytes,
            self._costs.transfer_s,
            self.ways,
            self._peers[peer.peer].ways,
            self._queue,
            self._wake,
        )

    def _emit_of_transfers(self, event: AnyEvent) -> None:
        if not isinstance(event, LinkReady):
            self._emit(event)

    def beat(self) -> None:
        """Say how full the pool is."""
        counts = self.mempool.stats()
        stats = PoolStats(
            total_blocks=counts.total,
            free_blocks=counts.free,
            historical_blocks=counts.historical,
            active_blocks=counts.active,
            reserved_blocks=self.transfers.reserved_blocks,
            quarantined_blocks=self.transfers.quarantined_blocks,
            pinned_requests=self.transfers.pinned_requests,
            running_requests=self.engine.num_running,
            waiting_requests=self.engine.num_waiting,
            prefix_hit_tokens=0,
            prefix_query_tokens=0,
        )
        self._emit(Heartbeat(**self._me, stats=stats))

    # ── accounting ────────────────────────────────────────────────────────────────────────────

    def check_idle(self) -> list[str]:
        """What is still held or wrong, as text; empty after a load has ended."""
        held = [f"{record.id} is known" for record in self._records]
        if blocks := self.transfers.promised_blocks:
            held.append(f"{blocks} blocks are left for nobody")
        problems = self.mempool.check_integrity({}) + self.transfers.check_integrity()
        return [f"{self.seat.instance}: {x}" for x in held + self.mempool.holders() + problems]
