"""A worker as `messages.py` promises it, small enough to be read as the contract itself.

It keeps books instead of KV: which requests it knows, what is pinned, reserved, ordered, being
written. It generates the token `truth(request)[position]` at each position, so that a test can tell
whether a client's stream continues rightly after any retry. Where the contract leaves a choice (no
room, a failing link, two tokens in a step), it asks `Choices`.

It checks the hub as it goes: tokens that do not follow from what it was told before, a command of
another epoch, a write into blocks that are no longer reserved, are assertion errors at once.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping

from memserve.messages import (
    Abort,
    Allocate,
    Allocated,
    AnyCommand,
    AnyEvent,
    Cancel,
    Commit,
    Decode,
    Expired,
    Finished,
    Inserted,
    InsertFailed,
    PeerJoined,
    PeerLost,
    Prefill,
    Refused,
    Rejected,
    Sent,
    Started,
    TokenOutput,
    Tokens,
    Transmit,
    TransmitFailed,
)
from memserve.types import BlockId, InstanceId, RequestId, TransferId

BLOCK_SIZE = 4
BLOCK_BYTES = 100


class Choices:
    """A stream of decisions; when it has run out, every decision is the plain one (0)."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._next = 0

    def pick(self, count: int) -> int:
        """A number below `count`."""
        if self._next >= len(self._data):
            return 0
        self._next += 1
        return self._data[self._next - 1] % count

    def happens(self, one_in: int) -> bool:
        return self.pick(one_in) == one_in - 1


@dataclasses.dataclass
class Truth:
    """What the model generates for one request, wherever and how often it runs."""

    prompt: list[int]
    continuation: list[int]
    """Up to the token that ends it."""
    ends_with_stop: bool
    """The last token is a stop token; else the limit was reached."""

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.continuation


@dataclasses.dataclass
class _Run:
    """One `Prefill` or `Decode` in the engine."""

    attempt: int
    budget: int | None
    """Tokens to sample at most; None: until the end."""
    hold: bool
    is_private: bool
    has_prompt_output: bool = False
    is_started: bool = False


@dataclasses.dataclass
class _Record:
    """What is kept of one request."""

    told: list[int] = dataclasses.field(default_factory=list)
    """The tokens that the hub has sent."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """Those, and what was generated here."""
    attempt: int = 0
    run: _Run | None = None
    pinned_tokens: int | None = None
    is_commit_pinned: bool = False


@dataclasses.dataclass
class _Reservation:
    request_id: RequestId
    tokens: list[int]
    hit_blocks: int
    block_ids: list[BlockId]
    is_private: bool
    written_blocks: int | None = None
    """None: nothing yet; set when the sender has written all it was told to."""
    is_expired: bool = False


@dataclasses.dataclass
class _Order:
    """A `Transmit` that has not been answered."""

    command: Transmit
    record: _Record
    """Whose pin ends with it. The request may be forgotten, and known anew, before that."""
    is_writing: bool = False
    target: WorkerModel | None = None
    """The life of the peer whose memory is mapped here."""


class WorkerModel:
    """One life of an instance. `inbox` and `outbox` are its two directions of the channel."""

    def __init__(
        self,
        instance: InstanceId,
        epoch: int,
        truths: Mapping[RequestId, Truth],
        choices: Choices,
        lives: Mapping[tuple[InstanceId, int], WorkerModel],
    ) -> None:
        self.instance = instance
        self.epoch = epoch
        self.is_alive = True
        self.inbox: deque[AnyCommand] = deque()
        self.outbox: deque[AnyEvent] = deque()
        self.history: set[tuple[int, ...]] = set()
        """Every prefix of full blocks that can be reused."""
        self.faults_left = 0
        """Refusals, failures and rejections that may still happen here."""
        self._truths = truths
        self._choices = choices
        self._lives = lives
        self._links: dict[InstanceId, WorkerModel] = {}
        self._records: dict[RequestId, _Record] = {}
        self._reservations: dict[TransferId, _Reservation] = {}
        self._orders: dict[TransferId, _Order] = {}
        self._next_block = 0

    # ── what a harness may do ─────────────────────────────────────────────────────────────────

    def die(self) -> None:
        """The process is gone: nothing is written any more, nothing is held."""
        self.is_alive = False

    def serve(self) -> None:
        """Carry out the next command."""
        command = self.inbox.popleft()
        assert command.epoch == self.epoch, (self.instance, command)
        handlers: dict[type[AnyCommand], Callable[..., None]] = {
            Prefill: self._on_prefill,
            Allocate: self._on_allocate,
            Transmit: self._on_transmit,
            Commit: self._on_commit,
            Cancel: self._on_cancel,
            Decode: self._on_decode,
            Abort: self._on_abort,
            PeerJoined: self._on_peer_joined,
            PeerLost: self._on_peer_lost,
        }
        handlers[type(command)](command)

    def progress(self) -> list[Callable[[], None]]:
        """What the engine and the links could do next."""
        todo: list[Callable[[], None]] = []
        for request_id, record in self._records.items():
            if record.run is not None:
                todo.append(lambda i=request_id: self._step(i))
        for transfer_id, order in self._orders.items():
            if order.is_writing:
                todo.append(lambda i=transfer_id: self._end_write(i))
        return todo

    def expirable(self) -> list[TransferId]:
        return list(self._reservations)

    def expire(self, transfer_id: TransferId) -> None:
        """The reservation's deadline passes (again): quarantine, not free."""
        self._reservations[transfer_id].is_expired = True
        self._emit(Expired, transfer_id=transfer_id)

    def holders(self) -> list[str]:
        """Everything that is held for somebody; empty on an idle worker."""
        return [
            *(f"request {request_id}" for request_id in self._records),
            *(f"reservation {transfer_id}" for transfer_id in self._reservations),
            *(f"order {transfer_id}" for transfer_id in self._orders),
        ]

    # ── the engine ────────────────────────────────────────────────────────────────────────────

    def _on_prefill(self, command: Prefill) -> None:
        record = self._known(command.request_id, command.known_tokens)
        self._tell(command.request_id, record, command.token_ids, command.num_generated)
        budget = None if command.whole else 1
        self._enqueue(command, record, budget)

    def _on_decode(self, command: Decode) -> None:
        record = self._known(command.request_id, command.known_tokens)
        self._tell(command.request_id, record, command.token_ids, command.num_generated)
        self._enqueue(command, record, None)

    def _enqueue(self, command: Prefill | Decode, record: _Record, budget: int | None) -> None:
        assert record.run is None and record.pinned_tokens is None
        record.attempt = command.attempt
        if self._fault(6):
            if self._choices.happens(2):  # whether it forgets by itself is left open
                del self._records[command.request_id]
            self._emit(
                Rejected,
                request_id=command.request_id,
                attempt=command.attempt,
                message="out of luck",
            )
            return
        record.run = _Run(command.attempt, budget, command.hold, command.is_private)

    def _known(self, request_id: RequestId, known_tokens: int) -> _Record:
        record = self._records.setdefault(request_id, _Record())
        assert known_tokens == len(record.told), (self.instance, known_tokens, record.told)
        return record

    def _tell(
        self,
        request_id: RequestId,
        record: _Record,
        token_ids: list[int],
        num_generated: int | None = None,
    ) -> None:
        truth = self._truths[request_id]
        record.told = [*record.told, *token_ids]
        record.tokens = list(record.told)
        assert record.told == truth.sequence[: len(record.told)]
        if num_generated is not None:
            assert len(record.told) - num_generated == len(truth.prompt)

    def _step(self, request_id: RequestId) -> None:
        """One thing that the engine does for a running request."""
        record = self._records[request_id]
        run = record.run
        assert run is not None
        if not run.is_started:
            run.is_started = True
            record.is_commit_pinned = False
            self._emit(Started, request_id=request_id, attempt=run.attempt, cached_tokens=0)
            return
        if not run.has_prompt_output and self._choices.happens(8):
            run.has_prompt_output = True
            self._emit_output(request_id, run, [], None)
            return
        run.has_prompt_output = True
        if self._fault(12):
            self._emit_output(request_id, run, [], "error")
            self._finish(request_id, record)
            return
        self._generate(request_id, record, run)

    def _generate(self, request_id: RequestId, record: _Record, run: _Run) -> None:
        truth = self._truths[request_id]
        start = len(record.tokens)
        assert start < len(truth.sequence), "asked for more than the request may have"
        count = 1 if run.budget == 1 else 1 + self._choices.pick(2)
        record.tokens = truth.sequence[: start + count]
        self._remember(record.tokens[:-1], run.is_private)  # the last one is not computed
        reason = None
        if len(record.tokens) == len(truth.sequence):
            reason = "stop" if truth.ends_with_stop else "length"
        elif run.budget == 1:
            reason = "length"
        self._emit_output(request_id, run, record.tokens[start:], reason)
        if reason is not None:
            self._finish(request_id, record)

    def _finish(self, request_id: RequestId, record: _Record) -> None:
        run = record.run
        assert run is not None
        held_tokens = 0
        if run.hold:
            is_computed = run.has_prompt_output and len(record.tokens) > len(record.told)
            held_tokens = len(record.tokens) - 1 if is_computed else 0
            record.pinned_tokens = held_tokens
        record.run = None
        self._emit(Finished, request_id=request_id, attempt=record.attempt, held_tokens=held_tokens)
        for transfer_id, order in list(self._orders.items()):
            if order.record is record:
                assert run.hold, "ordered to send what it had not to hold"
                self._begin_write(transfer_id, order)

    def _emit_output(
        self, request_id: RequestId, run: _Run, token_ids: list[int], reason: str | None
    ) -> None:
        output = TokenOutput(request_id, run.attempt, token_ids, reason)
        self._emit(Tokens, outputs=[output], payload=b"")

    def _on_abort(self, command: Abort) -> None:
        record = self._records.get(command.request_id)
        if command.hold:
            self._end_early(command.request_id, record)
            return
        if record is None:
            return
        del self._records[command.request_id]
        for transfer_id, order in list(self._orders.items()):
            if order.record is record and not order.is_writing:
                self._fail_order(transfer_id, "aborted")

    def _end_early(self, request_id: RequestId, record: _Record | None) -> None:
        if record is None:
            self._emit(Finished, request_id=request_id, attempt=0, held_tokens=0)
        elif record.run is None:
            held_tokens = record.pinned_tokens or 0
            self._emit(
                Finished, request_id=request_id, attempt=record.attempt, held_tokens=held_tokens
            )
        else:
            record.run.hold = True
            if self._choices.happens(2):
                self._emit_output(request_id, record.run, [], "abort")
            self._finish(request_id, record)

    # ── the receiver's half of a transfer ─────────────────────────────────────────────────────

    def _on_allocate(self, command: Allocate) -> None:
        record = self._known(command.request_id, command.known_tokens)
        self._tell(command.request_id, record, command.token_ids)
        if self._fault(4):
            self._emit(Refused, transfer_id=command.transfer_id, reason="no room")
            return
        num_blocks = len(record.told) // BLOCK_SIZE
        hit_blocks = 0
        if not command.is_private:
            while (
                hit_blocks < num_blocks
                and tuple(record.told[: (hit_blocks + 1) * BLOCK_SIZE]) in self.history
            ):
                hit_blocks += 1
        block_ids = [BlockId(self._next_block + i) for i in range(num_blocks - hit_blocks)]
        self._next_block += len(block_ids)
        self._reservations[command.transfer_id] = _Reservation(
            command.request_id, list(record.told), hit_blocks, block_ids, command.is_private
        )
        self._emit(
            Allocated,
            transfer_id=command.transfer_id,
            hit_blocks=hit_blocks,
            block_ids=block_ids,
        )

    def _on_commit(self, command: Commit) -> None:
        reservation = self._reservations.pop(command.transfer_id, None)
        if reservation is None:
            self._emit(InsertFailed, transfer_id=command.transfer_id, reason="unknown")
            return
        written = reservation.written_blocks or 0
        assert written == len(reservation.block_ids), "committed too early"
        if command.size_bytes != len(reservation.block_ids) * BLOCK_BYTES:
            self._emit(InsertFailed, transfer_id=command.transfer_id, reason="bytes are missing")
            return
        self._remember(reservation.tokens, reservation.is_private)
        if command.pin:
            self._records[reservation.request_id].is_commit_pinned = True
        num_tokens = len(reservation.tokens) // BLOCK_SIZE * BLOCK_SIZE
        self._emit(Inserted, transfer_id=command.transfer_id, num_tokens=num_tokens)

    def _on_cancel(self, command: Cancel) -> None:
        self._reservations.pop(command.transfer_id, None)
        order = self._orders.get(command.transfer_id)
        if order is None:
            return
        if not order.is_writing or self._choices.happens(2):
            self._fail_order(command.transfer_id, "cancelled")

    # ── the sender's half ─────────────────────────────────────────────────────────────────────

    def _on_transmit(self, command: Transmit) -> None:
        assert command.transfer_id not in self._orders
        if command.history is not None:
            self._send_history(command, command.history.token_ids)
            return
        record = self._records.get(command.request_id)
        order = _Order(command, record or _Record())
        self._orders[command.transfer_id] = order
        if record is None:
            self._fail_order(command.transfer_id, "unknown request")
        elif record.run is None:
            assert record.pinned_tokens is not None, "ordered to send what it had not to hold"
            self._begin_write(command.transfer_id, order)

    def _send_history(self, command: Transmit, tokens: list[int]) -> None:
        """It is pinned now, or was evicted; the request stays unknown."""
        assert tokens == self._truths[command.request_id].sequence[: len(tokens)]
        assert len(tokens) == (command.first_block + len(command.block_ids)) * BLOCK_SIZE
        is_held = tuple(tokens) in self.history
        self._orders[command.transfer_id] = _Order(
            command, _Record(pinned_tokens=len(tokens) if is_held else None)
        )
        self._begin_write(command.transfer_id, self._orders[command.transfer_id])

    def _begin_write(self, transfer_id: TransferId, order: _Order) -> None:
        last_block = order.command.first_block + len(order.command.block_ids)
        order.target = self._links.get(order.command.peer)
        is_held = last_block * BLOCK_SIZE <= (order.record.pinned_tokens or 0)
        if not is_held or order.target is None or self._fault(4):
            self._fail_order(transfer_id, "the KV or the link is not here")
            return
        order.is_writing = True
        self._check_target(transfer_id, order)

    def _end_write(self, transfer_id: TransferId) -> None:
        order = self._orders[transfer_id]
        self._check_target(transfer_id, order)
        if self._fault(8):
            self._fail_order(transfer_id, "the link broke")
            return
        assert order.target is not None
        num_blocks = len(order.command.block_ids)
        if order.target.is_alive:
            order.target._reservations[transfer_id].written_blocks = num_blocks
        size_bytes = num_blocks * BLOCK_BYTES - self._fault(8)  # a byte may get lost
        self._drop_order(transfer_id)
        self._emit(
            Sent,
            transfer_id=transfer_id,
            num_blocks=num_blocks,
            size_bytes=size_bytes,
            seconds=0.001,
        )

    def _check_target(self, transfer_id: TransferId, order: _Order) -> None:
        """The blocks that are being written are reserved for this transfer, or of a dead life."""
        if order.target is None or not order.target.is_alive:
            return
        reservation = order.target._reservations.get(transfer_id)
        assert reservation is not None, f"{transfer_id} writes into freed blocks"
        assert reservation.block_ids == order.command.block_ids
        assert reservation.hit_blocks == order.command.first_block

    def _fail_order(self, transfer_id: TransferId, reason: str) -> None:
        self._drop_order(transfer_id)
        self._emit(TransmitFailed, transfer_id=transfer_id, reason=reason)

    def _drop_order(self, transfer_id: TransferId) -> None:
        """The order is answered, and the pin ends with it."""
        self._orders.pop(transfer_id).record.pinned_tokens = None

    def _on_peer_joined(self, command: PeerJoined) -> None:
        self._links[command.peer] = self._lives[command.peer, command.peer_epoch]

    def _on_peer_lost(self, command: PeerLost) -> None:
        self._links.pop(command.peer, None)
        for transfer_id, order in list(self._orders.items()):
            if order.command.peer == command.peer:
                self._fail_order(transfer_id, "the peer is gone")

    # ── small helpers ─────────────────────────────────────────────────────────────────────────

    def _remember(self, computed: list[int], is_private: bool) -> None:
        if not is_private:
            for end in range(BLOCK_SIZE, len(computed) + 1, BLOCK_SIZE):
                self.history.add(tuple(computed[:end]))

    def _fault(self, one_in: int) -> bool:
        if self.faults_left == 0 or not self._choices.happens(one_in):
            return False
        self.faults_left -= 1
        return True

    def _emit(self, kind: Callable[..., AnyEvent], **fields: object) -> None:
        self.outbox.append(kind(instance=self.instance, epoch=self.epoch, **fields))
