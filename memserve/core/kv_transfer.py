"""The moves of KV that one request makes, as the hub drives them: allocate → transmit → commit.

At most one is open at a time::

    ASKED ──Allocated──▶ ORDERED ──Sent──▶ SENT ──Inserted──▶ over
      │ Refused             │ TransmitFailed  │ InsertFailed
      └────────▶ over, without KV ◀───────────┘

`Allocate` goes to the receiver, `Transmit` to the sender, `Commit` or `Cancel` to the receiver;
what an event means for the request is an `Outcome`. A move that was ordered, and is late or wanted
no more, is *abandoned*: the request goes on without it, but its reservation may not be freed while
the sender may be writing. So it is kept aside until the sender has answered, or is lost.

Collaborators: `lifecycle.py` decides what is moved when, and what follows an outcome; `told.py`
knows which tokens the receiver has been told. Everything here only returns what is to be sent. The
paper: section 4.2.
"""

from __future__ import annotations

import enum

import msgspec

from memserve.core.told import Told
from memserve.core.vocabulary import (
    Action,
    Limits,
    Note,
    Plan,
    RequestSpec,
    Seat,
    Send,
    TransferEvent,
)
from memserve.messages import (
    Allocate,
    Allocated,
    Cancel,
    Commit,
    Expired,
    History,
    Inserted,
    InsertFailed,
    Refused,
    Sent,
    Transmit,
    TransmitFailed,
)
from memserve.types import Direction, TransferId


class TransferState(enum.Enum):
    """See the module's picture."""

    ASKED = "asked"
    """`Allocate` is out; nobody may write."""
    ORDERED = "ordered"
    """`Transmit` is out; the sender may be writing."""
    SENT = "sent"
    """`Commit` is out."""


class Outcome(enum.Enum):
    """What an event of a transfer means for the request."""

    ARRIVED = "arrived"
    """The KV is at the receiver: what is sent there next finds it."""
    NOTHING = "nothing"
    """It has ended, and nothing came."""
    LATE = "late"
    """The receiver asks whether its reservation is still wanted."""
    OVER = "over"
    """It had arrived, and the receiver holds nothing for it any more."""


_INSERTED = {
    Direction.FETCH: "fetched",
    Direction.FORWARD: "inserted",
    Direction.BACK: "returned",
}
"""The timeline's word for a transfer whose KV has arrived."""


class Transfer(msgspec.Struct):
    """One move between two instances."""

    id: TransferId
    direction: Direction
    sender: Seat
    receiver: Seat
    history: History | None
    """What a sender is to find in its index; None: it is told of the request otherwise."""
    state: TransferState = TransferState.ASKED


class RequestTransfers:
    """Of one request: the open one, and those that were abandoned."""

    def __init__(self, spec: RequestSpec, limits: Limits, told: Told) -> None:
        self._spec = spec
        self._limits = limits
        self._told = told
        self.open: Transfer | None = None
        self._abandoned: dict[TransferId, Transfer] = {}
        """Whose sender was told to stop, and has not answered; of any attempt."""

    @property
    def are_over(self) -> bool:
        """Whether nobody writes, or may, for this request."""
        return self.open is None and not self._abandoned

    @property
    def is_sending(self) -> bool:
        """Whether the open transfer's sender is the one who has to answer."""
        return self.open is not None and self.open.state is TransferState.ORDERED

    def is_asked(self, seat: Seat) -> bool:
        """Whether it has to answer as the open transfer's receiver, before anything is sent."""
        if self.open is None or self.open.state is not TransferState.ASKED:
            return False
        return self.open.receiver == seat

    # ── the plain course ──────────────────────────────────────────────────────────────────────

    def fetch(self, plan: Plan, attempt: int, token_ids: list[int]) -> Send:
        """P is to reserve blocks for what another instance's history holds of these tokens."""
        assert plan.fetch is not None
        source, deadline_s = plan.fetch.source, plan.fetch.deadline_s
        history = History(self._spec.namespace, token_ids)
        return self._ask(
            Direction.FETCH, source, plan.first, attempt, token_ids, deadline_s, history=history
        )

    def forward(self, plan: Plan, attempt: int, token_ids: list[int]) -> Send:
        """D is to reserve blocks for the KV that P computes. It may wait for room: it decodes."""
        assert plan.decode is not None
        return self._ask(
            Direction.FORWARD,
            plan.first,
            plan.decode,
            attempt,
            token_ids,
            self._limits.reservation_s,
            is_private=plan.decode_is_private,
            patience_s=self._limits.room_wait_s,
            expected_tokens=plan.expected_tokens,
        )

    def back(self, plan: Plan, attempt: int, token_ids: list[int]) -> Send:
        """P is to reserve blocks for what it lacks of the KV that D holds of these tokens."""
        deadline_s = self._limits.reservation_s
        return self._ask(Direction.BACK, plan.last, plan.first, attempt, token_ids, deadline_s)

    def _ask(
        self,
        direction: Direction,
        sender: Seat,
        receiver: Seat,
        attempt: int,
        token_ids: list[int],
        deadline_s: float,
        *,
        history: History | None = None,
        is_private: bool = False,
        patience_s: float = 0.0,
        expected_tokens: int = 0,
    ) -> Send:
        assert self.open is None
        id = TransferId(f"{self._spec.id}/{direction.value}/{attempt}")
        self.open = Transfer(id, direction, sender, receiver, history)
        known_tokens = self._told.tell(receiver, len(token_ids))
        command = Allocate(
            epoch=receiver.epoch,
            transfer_id=id,
            request_id=self._spec.id,
            known_tokens=known_tokens,
            token_ids=token_ids[known_tokens:],
            namespace=self._spec.namespace,
            is_private=is_private,
            deadline_s=deadline_s,
            patience_s=patience_s,
            expected_tokens=expected_tokens,
        )
        return Send(receiver.instance, command)

    def step(self, event: TransferEvent) -> tuple[list[Action], Outcome | None]:
        """Take an event of a transfer. Those that fit neither its state nor an abandoned one change
        nothing."""
        transfer = self.open
        if transfer is None or event.transfer_id != transfer.id:
            return self._late_answer(event), None
        match event:
            case Allocated() if transfer.state is TransferState.ASKED:
                return self._on_allocated(transfer, event)
            case Refused() if transfer.state is TransferState.ASKED:
                self.open = None
                return [_reason("refused", event)], Outcome.NOTHING
            case Sent() if transfer.state is TransferState.ORDERED:
                note = Note("sent", event.instance, _sizes(event))
                return [note, self._commit(transfer, event.size_bytes)], Outcome.ARRIVED
            case TransmitFailed() if transfer.state is TransferState.ORDERED:
                self.open = None
                cancel = _cancel(transfer, transfer.receiver)
                return [_reason("transmit failed", event), cancel], Outcome.NOTHING
            case Expired() if transfer.state is TransferState.ORDERED:
                return [Note("reservation expired", transfer.receiver.instance)], Outcome.LATE
            case Inserted() if transfer.state is TransferState.SENT:
                self.open = None
                detail = {"tokens": event.num_tokens}
                return [Note(_INSERTED[transfer.direction], event.instance, detail)], Outcome.OVER
            case InsertFailed() if transfer.state is TransferState.SENT:
                self.open = None
                return [_reason("insert failed", event)], Outcome.OVER
        return [], None

    def _on_allocated(
        self, transfer: Transfer, event: Allocated
    ) -> tuple[list[Action], Outcome | None]:
        detail = {"hit_blocks": event.hit_blocks, "blocks": len(event.block_ids)}
        note = Note("allocated", event.instance, detail)
        if transfer.direction is Direction.FETCH and not event.block_ids:  # P holds all by now
            return [note, self._commit(transfer, 0)], Outcome.ARRIVED
        return [note, self._order(transfer, event)], None

    def _order(self, transfer: Transfer, event: Allocated) -> Send:
        """The reservation stands: the sender may write into it."""
        transfer.state = TransferState.ORDERED
        command = Transmit(
            epoch=transfer.sender.epoch,
            transfer_id=transfer.id,
            request_id=self._spec.id,
            peer=transfer.receiver.instance,
            first_block=event.hit_blocks,
            block_ids=event.block_ids,
            history=transfer.history,
        )
        return Send(transfer.sender.instance, command)

    def _commit(self, transfer: Transfer, size_bytes: int) -> Send:
        transfer.state = TransferState.SENT
        command = Commit(
            epoch=transfer.receiver.epoch,
            transfer_id=transfer.id,
            size_bytes=size_bytes,
            pin=transfer.direction is not Direction.BACK,
        )
        return Send(transfer.receiver.instance, command)

    # ── the other ways to end ─────────────────────────────────────────────────────────────────

    def give_up(self) -> list[Action]:
        """Go on without the open transfer, if there is one, as its state allows."""
        transfer, self.open = self.open, None
        if transfer is None or transfer.state is TransferState.SENT:
            return []  # the receiver inserts, and history needs no owner
        if transfer.state is TransferState.ASKED:
            return [_cancel(transfer, transfer.receiver)]
        self._abandoned[transfer.id] = transfer
        # A sender that knows the request is told to forget it, which is next, and stops by that.
        return [_cancel(transfer, transfer.sender)] if transfer.history is not None else []

    def lost(self, seat: Seat) -> list[Action]:
        """This life is over: nobody writes for it, or by it, any more."""
        actions: list[Action] = []
        for transfer in list(self._abandoned.values()):
            if seat in (transfer.sender, transfer.receiver):
                del self._abandoned[transfer.id]
                if seat == transfer.sender:  # else the sender has its order to stop
                    actions.append(_cancel(transfer, transfer.receiver))
        if self.open is not None and seat in (self.open.sender, self.open.receiver):
            actions += self._open_lost(self.open, seat)
        return actions

    def _open_lost(self, transfer: Transfer, seat: Seat) -> list[Action]:
        is_sender = seat == transfer.sender
        has_sent = transfer.state is TransferState.SENT
        if has_sent and is_sender:
            return []  # the bytes are there; the receiver inserts them
        self.open = None
        if has_sent:
            return []  # the sender has answered, and may itself be dead since
        return [_cancel(transfer, transfer.receiver if is_sender else transfer.sender)]

    def _late_answer(self, event: TransferEvent) -> list[Action]:
        """Of the sender of an abandoned transfer, perhaps: its reservation can be freed."""
        if not isinstance(event, Sent | TransmitFailed):
            return []
        transfer = self._abandoned.pop(event.transfer_id, None)
        if transfer is None:
            return []
        note = Note("abandoned transfer ended", event.instance)
        return [note, _cancel(transfer, transfer.receiver)]


def _reason(name: str, event: Refused | TransmitFailed | InsertFailed) -> Note:
    return Note(name, event.instance, {"reason": event.reason})


def _sizes(event: Sent) -> dict[str, int | float]:
    return {"blocks": event.num_blocks, "bytes": event.size_bytes, "seconds": event.seconds}


def _cancel(transfer: Transfer, seat: Seat) -> Send:
    return Send(seat.instance, Cancel(epoch=seat.epoch, transfer_id=transfer.id))
