"""The life of one request as a pure state machine: `step(event)` → actions.

Collaborators: `scheduler.py` places the request, feeds it the workers' events and carries the
actions out; `vocabulary.py` has the inputs and actions, `messages.py` the commands and a picture of
their order; `kv_transfer.py` keeps the request's moves of KV. The paper: section 5.

Phases of a request that prefills on P and decodes on D::

    UNPLACED ──place──▶ PREFILL ──first token──▶ HANDOFF ──KV sent, or given up──▶ DECODE
      ▲  │                ▲│                        │                                │
      │  └────▶ FETCH ────┘│                        │                                │
      └──── instance lost ─┴────────────────────────┴────────────────────────────────┤
                                                                                     ▼
                              ENDED ◀── link quiet ── DRAIN      RETURN ◀── D gives the KV back
                                ▲                       ▲           │
                                └───────────────────────┴───────────┘

FETCH is there only if the plan names a source that holds more of the prompt than P; however the
fetch ends, the prefill follows. A request that runs whole on one instance knows no HANDOFF, DECODE
and RETURN. RETURN and DRAIN come after the client has its last token (or has gone): they only give
back what is held.

Rules that every path obeys:
- the client's stream ends exactly once: by a final delivery, by `Fail`, or by its own cancel;
- a reservation ends by `Commit` after `Sent`, or by `Cancel` once the sender is known to be quiet:
  it answered, it is dead, or it was never told to send (nobody else waits for that: a transfer
  that is late or unwanted is abandoned, and only the request's end waits for its sender);
- whoever knows the request (its tokens, its pins) is told to forget it before the end; the source
  of a fetch never knows it, only the one transfer;
- events of other attempts, transfers or instances change nothing.
"""

from __future__ import annotations

import enum

import msgspec

from memserve.core.delivery import Delivery
from memserve.core.kv_transfer import Transfer, Transfers, TransferState
from memserve.core.vocabulary import (
    Action,
    AnyInput,
    ClientCancelled,
    Deliver,
    Ended,
    Fail,
    Fetch,
    InstanceLost,
    InstanceSilent,
    Learned,
    Limits,
    Note,
    Output,
    PlaceAgain,
    Plan,
    RequestSpec,
    Seat,
    Send,
    StopSeen,
)
from memserve.messages import (
    Abort,
    Allocated,
    Decode,
    Expired,
    Finished,
    Inserted,
    InsertFailed,
    Prefill,
    Refused,
    Rejected,
    Sent,
    Started,
    TokenOutput,
    TransmitFailed,
)
from memserve.types import Direction, InstanceId


class Phase(enum.Enum):
    """See the module's picture."""

    UNPLACED = "unplaced"
    FETCH = "fetch"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    DECODE = "decode"
    RETURN = "return"
    DRAIN = "drain"
    ENDED = "ended"


_INSERTED = {
    Direction.FETCH: "fetched",
    Direction.FORWARD: "inserted",
    Direction.BACK: "returned",
}
"""The timeline's word for a transfer whose KV has arrived."""

_TOKENS = Delivery(tokens=True, final=False, prompt=False)
_TOKENS_AND_PROMPT = Delivery(tokens=True, final=False, prompt=True)


class RequestLifecycle:
    """One request, from its first placement until nobody holds anything for it."""

    def __init__(self, spec: RequestSpec, limits: Limits) -> None:
        self.spec = spec
        self.phase = Phase.UNPLACED
        self.attempt = 0
        self.plan: Plan | None = None
        self.generated: list[int] = []
        self.cached_tokens: int | None = None
        """Prompt tokens that the first prefill found in a cache."""
        self.is_client_done = False
        self.is_prompt_computed = False
        """In the present attempt: its prefill has ended, or given the first token."""
        self.is_decode_cold = False
        """D got no KV, and computes the prompt itself at the moment."""
        self._limits = limits
        self._known: dict[Seat, int] = {}
        """Who has to forget the request, and how many of its tokens they were told."""
        self._transfers = Transfers(spec)
        self._prompt_attempt: int | None = None
        """The attempt that speaks of the prompt to the client; a later one would repeat it, and
        take generated tokens for a part of the prompt."""

    # ── what the scheduler calls ──────────────────────────────────────────────────────────────

    @property
    def token_ids(self) -> list[int]:
        """The prompt and what was generated so far (a new list)."""
        return self.spec.prompt_token_ids + self.generated

    @property
    def num_tokens(self) -> int:
        """How many those are; copies nothing."""
        return len(self.spec.prompt_token_ids) + len(self.generated)

    @property
    def remaining_tokens(self) -> int:
        return self.spec.max_tokens - len(self.generated)

    def place(self, plan: Plan) -> list[Action]:
        """Start (again) on these instances. Only while UNPLACED."""
        assert self.phase is Phase.UNPLACED, self.phase
        assert plan.decode is not None or not plan.returns, plan
        if plan.decode is not None and self.remaining_tokens == 1:
            plan = msgspec.structs.replace(plan, decode=None, returns=False)
        self.plan = plan
        self.attempt += 1
        self.is_prompt_computed = self.is_decode_cold = False
        return self._prefill(plan) if plan.fetch is None else self._fetch(plan, plan.fetch)

    def give_up(self, message: str) -> list[Action]:
        """No place was found. Only while UNPLACED."""
        assert self.phase is Phase.UNPLACED, self.phase
        return [*self._fail(message), *self._release_all(), *self._end_if_quiet()]

    def step(self, event: AnyInput) -> list[Action]:
        """Take one event; the actions are to be carried out in order.

        Mutates this lifecycle. Every event is valid in every phase; what does not concern the
        current attempt changes nothing.
        """
        if self.phase is Phase.ENDED:
            return []
        actions = self._dispatch(event)
        return [*actions, *self._end_if_quiet()]

    def more_tokens(self, instance: InstanceId, output: TokenOutput) -> Delivery | None:
        """The short way for most outputs: nothing but more tokens of who generates already.

        Mutates as `step` does, which would answer with this delivery alone; None: it has to.
        """
        plan = self.plan
        if plan is None or output.attempt != self.attempt or output.finish_reason is not None:
            return None
        if self.phase is Phase.DECODE and not self.is_decode_cold:
            runner, delivery = plan.decode, _TOKENS
        elif self.phase is Phase.PREFILL and plan.decode is None and self.is_prompt_computed:
            runner, delivery = plan.first, _TOKENS_AND_PROMPT
        else:
            return None
        if runner is None or runner.instance != instance:
            return None
        self.generated += output.token_ids
        says_prompt = delivery.prompt and self._prompt_attempt == self.attempt
        return delivery if says_prompt else _TOKENS

    def check_integrity(self) -> None:
        """Raises: AssertionError if the state contradicts itself."""
        if self.phase is Phase.ENDED:
            assert self.is_client_done
            assert not self._known and self._transfers.are_over
        if self.phase in (Phase.RETURN, Phase.DRAIN):
            assert self.is_client_done
        if self.phase in (Phase.FETCH, Phase.PREFILL, Phase.HANDOFF, Phase.DECODE):
            assert self.plan is not None and not self.is_client_done
        if self.phase is Phase.FETCH:
            transfer = self._transfers.open
            assert transfer is not None and transfer.direction is Direction.FETCH
        if self.phase in (Phase.HANDOFF, Phase.DECODE):
            assert self.plan is not None and self.plan.decode is not None
            assert self.plan.decode in self._known
        if self.phase is Phase.UNPLACED:
            assert self._transfers.open is None and not self._known
        assert len(self.generated) <= self.spec.max_tokens

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def _dispatch(self, event: AnyInput) -> list[Action]:
        match event:
            case Output():
                return self._on_output(event.instance, event.output)
            case Started() if event.attempt == self.attempt:
                return self._on_started(event)
            case Finished() if event.attempt == self.attempt:
                return self._on_finished(event)
            case Rejected() if event.attempt == self.attempt:
                return self._on_rejected(event)
            case ClientCancelled():
                return self._on_cancelled()
            case StopSeen():
                return self._on_stop_seen()
            case InstanceLost():
                return self._on_instance_lost(event.seat)
            case InstanceSilent():
                return self._on_instance_silent(event.seat)
            case Started() | Finished() | Rejected():
                return []
        transfer = self._transfers.open
        if transfer is not None and event.transfer_id == transfer.id:
            return self._on_transfer_event(transfer, event)
        if isinstance(event, Sent | TransmitFailed):
            return self._transfers.late_answer(event)
        return []

    def _on_started(self, event: Started) -> list[Action]:
        plan = self._running_plan()
        if plan is None:
            return []
        note = Note("started", event.instance, {"cached_tokens": event.cached_tokens})
        if event.instance != plan.first.instance or self.phase is not Phase.PREFILL:
            return [note]
        if self.cached_tokens is None:
            self.cached_tokens = event.cached_tokens
        if plan.decode is None or plan.decode in self._known:  # whole, or asked before
            return [note]
        return [note, *self._ask(Direction.FORWARD, plan.first, plan.decode, self.token_ids)]

    def _on_output(self, instance: InstanceId, output: TokenOutput) -> list[Action]:
        plan = self._running_plan()
        if plan is None or output.attempt != self.attempt:
            return []
        if output.finish_reason in ("error", "abort"):
            return [*self._fail(f"instance {instance} gave up the request"), *self._release_all()]
        if instance == plan.first.instance and self.phase is Phase.PREFILL:
            return self._on_prefill_output(plan, output)
        if (
            plan.decode is not None
            and instance == plan.decode.instance
            and self.phase is Phase.DECODE
        ):
            self.is_decode_cold = False
            return self._pass_on(plan.decode, output, says_prompt=False)
        return []

    def _on_prefill_output(self, plan: Plan, output: TokenOutput) -> list[Action]:
        if self._prompt_attempt is None:
            self._prompt_attempt = self.attempt
        says_prompt = self._prompt_attempt == self.attempt
        self.is_prompt_computed |= bool(output.token_ids) or output.finish_reason is not None
        if plan.decode is None:
            return self._pass_on(plan.first, output, says_prompt=says_prompt)
        if output.finish_reason is None:  # the prompt's logprobs, ahead of the first token
            return [Deliver(Delivery(tokens=False, final=False, prompt=says_prompt))]
        learned = self._learned(plan.first, self.num_tokens)
        if self.spec.resample:
            delivery = Delivery(tokens=False, final=False, prompt=says_prompt)
            return [Deliver(delivery), *learned, *self._hand_off(plan.decode)]
        self.generated += output.token_ids
        if output.finish_reason != "length":
            self.is_client_done = True
            delivery = Delivery(tokens=True, final=True, prompt=says_prompt)
            return [Deliver(delivery), *learned, *self._release_all()]
        delivery = Delivery(tokens=True, final=False, prompt=says_prompt)
        return [Deliver(delivery), *learned, *self._hand_off(plan.decode)]

    def _pass_on(self, seat: Seat, output: TokenOutput, *, says_prompt: bool) -> list[Action]:
        """An output of the instance that runs the request to its end."""
        assert self.plan is not None
        final = output.finish_reason is not None
        self.generated += output.token_ids
        deliver = Deliver(Delivery(tokens=True, final=final, prompt=says_prompt))
        if not final:
            return [deliver]
        self.is_client_done = True
        self.phase = Phase.DRAIN
        if self.plan.returns:  # what is held will be known from `Finished`
            return [deliver]
        # The last token was sampled, not computed: it has no KV.
        return [deliver, *self._learned(seat, self.num_tokens - 1)]

    def _on_finished(self, event: Finished) -> list[Action]:
        plan = self.plan
        if plan is None or self.phase is not Phase.DRAIN:
            return []
        runner = plan.decode or plan.first
        if event.instance != runner.instance or runner not in self._known:
            return []
        # After a stop string the engine may have run on: the client never saw those tokens.
        held_tokens = min(event.held_tokens, self.num_tokens)
        learned = self._learned(runner, held_tokens)
        if plan.decode is None:
            return [*learned, *self._release_all()]
        return [*learned, *self._give_back(plan.first, plan.decode, held_tokens)]

    def _on_rejected(self, event: Rejected) -> list[Action]:
        if self._seat_of(event.instance) not in self._known:
            return []
        return [*self._fail(event.message), *self._release_all()]

    def _on_cancelled(self) -> list[Action]:
        if self.is_client_done:
            return []
        self.is_client_done = True
        return self._release_all()

    def _on_stop_seen(self) -> list[Action]:
        if self.is_client_done:
            return []
        self.is_client_done = True
        runner = self._runner()
        if runner is None or self._is_private(runner):
            return [Note("stop string"), *self._release_all()]
        self.phase = Phase.DRAIN
        abort = Abort(epoch=runner.epoch, request_id=self.spec.id, hold=True)
        return [Note("stop string"), Send(runner.instance, abort)]

    def _on_instance_lost(self, seat: Seat) -> list[Action]:
        plan = self.plan
        self._known.pop(seat, None)
        transfer_actions = self._transfers.lost(seat)
        if self.is_client_done:
            is_concerned = plan is not None and seat in (plan.first, plan.decode)
            return [*transfer_actions, *(self._release_all() if is_concerned else [])]
        if plan is None:
            return transfer_actions
        if seat not in (plan.first, plan.decode):
            is_awaited = self.phase is Phase.FETCH and self._transfers.open is None
            return [*transfer_actions, *(self._prefill(plan) if is_awaited else [])]
        if seat == plan.first and self.phase is Phase.HANDOFF:
            assert plan.decode is not None
            return [*transfer_actions, *self._decode_cold(plan.decode)]
        if seat == plan.first and self.phase is Phase.DECODE:
            return transfer_actions
        return [*transfer_actions, *self._place_again(seat)]

    def _on_instance_silent(self, seat: Seat) -> list[Action]:
        """Who waits for it goes on without it, if anything is left to fall back on afterwards."""
        plan = self._running_plan()
        if plan is None:
            return []
        if self.phase is Phase.HANDOFF and seat == plan.first:
            assert plan.decode is not None
            if not self._transfers.is_sending:
                return []
            return [*self._transfers.give_up(), *self._decode_cold(plan.decode)]
        is_at_first = self.phase in (Phase.FETCH, Phase.PREFILL)
        if seat != (plan.first if is_at_first else plan.decode or plan.first):
            return []
        is_last = self.attempt >= self._limits.max_attempts - 1
        if is_last or (self.spec.resample and self.generated):
            return []
        return self._unplace(Note("silent", seat.instance), f"{seat.instance} is silent")

    def _place_again(self, lost: Seat) -> list[Action]:
        reason = f"instance {lost.instance} was lost"
        if self.attempt >= self._limits.max_attempts:
            return [*self._fail(f"{reason}, at attempt {self.attempt}"), *self._release_all()]
        if self.spec.resample and self.generated:
            return [*self._fail(f"{reason} in mid-generation"), *self._release_all()]
        return self._unplace(Note("lost", lost.instance), reason)

    def _unplace(self, note: Note, reason: str) -> list[Action]:
        actions = self._release_all()
        self.phase = Phase.UNPLACED
        self.plan = None
        return [*actions, note, PlaceAgain(reason)]

    # ── transfers ─────────────────────────────────────────────────────────────────────────────

    def _fetch(self, plan: Plan, fetch: Fetch) -> list[Action]:
        """P reserves blocks for what the source is to send."""
        assert not plan.first_is_private and fetch.source != plan.first, plan
        self.phase = Phase.FETCH
        source, num_tokens = fetch.source, fetch.num_tokens
        assert 0 < num_tokens <= self.num_tokens and not num_tokens % self._limits.block_size
        note = Note("fetching", source.instance, {"tokens": num_tokens})
        token_ids = self.token_ids[:num_tokens]
        ask = self._ask(Direction.FETCH, source, plan.first, token_ids, fetch.deadline_s)
        return [note, *ask]

    def _ask(
        self,
        direction: Direction,
        sender: Seat,
        receiver: Seat,
        token_ids: list[int],
        deadline_s: float | None = None,
    ) -> list[Action]:
        assert self.plan is not None
        known = min(self._known.get(receiver, 0), len(token_ids))
        self._known[receiver] = max(known, len(token_ids))
        ask = self._transfers.ask(
            direction,
            sender,
            receiver,
            self.attempt,
            known_tokens=known,
            token_ids=token_ids,
            is_private=direction is Direction.FORWARD and self.plan.decode_is_private,
            deadline_s=self._limits.reservation_s if deadline_s is None else deadline_s,
            # Only what D runs on is worth waiting for.
            patience_s=self._limits.room_wait_s if direction is Direction.FORWARD else 0.0,
            expected_tokens=self.plan.expected_tokens if direction is Direction.FORWARD else 0,
        )
        return [ask]

    def _on_transfer_event(
        self,
        transfer: Transfer,
        event: Allocated | Refused | Expired | Sent | TransmitFailed | Inserted | InsertFailed,
    ) -> list[Action]:
        state = transfer.state
        match event:
            case Allocated() if state is TransferState.ASKED:
                return self._on_allocated(transfer, event)
            case Refused() if state is TransferState.ASKED:
                self._transfers.close()
                note = Note("refused", event.instance, {"reason": event.reason})
                return [note, *self._without_transfer(transfer)]
            case Sent() if state is TransferState.ORDERED:
                return self._on_sent(transfer, event)
            case TransmitFailed() if state is TransferState.ORDERED:
                note = Note("transmit failed", event.instance, {"reason": event.reason})
                cancel = self._transfers.fail(transfer)
                return [note, *cancel, *self._without_transfer(transfer)]
            case Inserted() if state is TransferState.SENT:
                return self._on_inserted(transfer, event)
            case InsertFailed() if state is TransferState.SENT:
                self._transfers.close()
                note = Note("insert failed", event.instance, {"reason": event.reason})
                return [note, *self._after_insert(transfer)]
            case Expired() if state is TransferState.ORDERED:
                return self._on_expired(transfer)
        return []

    def _on_allocated(self, transfer: Transfer, event: Allocated) -> list[Action]:
        detail: dict[str, str | int | float] = {
            "hit_blocks": event.hit_blocks,
            "blocks": len(event.block_ids),
        }
        note = Note("allocated", event.instance, detail)
        if transfer.direction is Direction.FETCH and not event.block_ids:
            return [note, *self._commit(transfer, 0)]  # P holds all of it by now
        return [note, self._transfers.order(transfer, event)]

    def _on_sent(self, transfer: Transfer, event: Sent) -> list[Action]:
        detail: dict[str, str | int | float] = {
            "blocks": event.num_blocks,
            "bytes": event.size_bytes,
            "seconds": event.seconds,
        }
        note = Note("sent", event.instance, detail)
        return [note, *self._commit(transfer, event.size_bytes)]

    def _commit(self, transfer: Transfer, size_bytes: int) -> list[Action]:
        """The KV is at the receiver; the request goes on there."""
        send = self._transfers.commit(transfer, size_bytes)
        match transfer.direction:
            case Direction.FETCH:
                assert self.plan is not None
                return [send, *self._prefill(self.plan)]
            case Direction.FORWARD:
                return [send, *self._decode(transfer.receiver)]
            case Direction.BACK:
                return [send]

    def _on_inserted(self, transfer: Transfer, event: Inserted) -> list[Action]:
        self._transfers.close()
        note = Note(_INSERTED[transfer.direction], event.instance, {"tokens": event.num_tokens})
        learned = self._learned(transfer.receiver, min(event.num_tokens, self.num_tokens))
        return [note, *learned, *self._after_insert(transfer)]

    def _on_expired(self, transfer: Transfer) -> list[Action]:
        """The receiver asks whether its reservation is still wanted."""
        note = Note("reservation expired", transfer.receiver.instance)
        if self.phase is Phase.PREFILL:  # the prompt is still being computed: it is
            return [note]
        return [note, *self._transfers.give_up(), *self._without_transfer(transfer)]

    def _without_transfer(self, transfer: Transfer) -> list[Action]:
        """The transfer has ended without bringing anything."""
        if self.is_client_done:
            return self._release_all()
        if self.phase is Phase.FETCH:
            assert self.plan is not None
            return self._prefill(self.plan)
        return self._decode_cold(transfer.receiver) if self.phase is Phase.HANDOFF else []

    def _after_insert(self, transfer: Transfer) -> list[Action]:
        return self._release_all() if transfer.direction is Direction.BACK else []

    # ── prefill, decode, return, release ──────────────────────────────────────────────────────

    def _prefill(self, plan: Plan) -> list[Action]:
        """P computes what it does not hold of the prompt."""
        self.phase = Phase.PREFILL
        token_ids = self.token_ids
        known = self._known.get(plan.first, 0)
        self._known[plan.first] = len(token_ids)
        command = Prefill(
            epoch=plan.first.epoch,
            request_id=self.spec.id,
            attempt=self.attempt,
            request=self.spec.request,
            known_tokens=known,
            token_ids=token_ids[known:],
            whole=plan.decode is None,
            hold=plan.decode is not None,
            is_private=plan.first_is_private,
            resample=self.spec.resample and plan.decode is not None,
            num_generated=len(self.generated),
        )
        return [Send(plan.first.instance, command)]

    def _hand_off(self, decode: Seat) -> list[Action]:
        """P has finished; D starts when the KV is there, or at once if it will not come."""
        self.phase = Phase.HANDOFF
        return self._decode_cold(decode) if self._transfers.open is None else []

    def _decode_cold(self, decode: Seat) -> list[Action]:
        """D computes the prompt itself; P's pin has no more use."""
        assert self.plan is not None
        self.is_decode_cold = True
        return [*self._release(self.plan.first), *self._decode(decode)]

    def _decode(self, decode: Seat) -> list[Action]:
        plan = self.plan
        assert plan is not None
        self.phase = Phase.DECODE
        token_ids = self.token_ids
        known = min(self._known.get(decode, 0), len(token_ids))
        self._known[decode] = len(token_ids)
        command = Decode(
            epoch=decode.epoch,
            request_id=self.spec.id,
            attempt=self.attempt,
            request=self.spec.request,
            known_tokens=known,
            token_ids=token_ids[known:],
            num_generated=len(self.generated),
            hold=plan.returns,
            is_private=plan.decode_is_private,
        )
        return [Send(decode.instance, command)]

    def _give_back(self, first: Seat, decode: Seat, held_tokens: int) -> list[Action]:
        """The request has ended on D, whose KV of `held_tokens` tokens is pinned."""
        assert self.plan is not None
        block_size = self._limits.block_size
        full_tokens = held_tokens // block_size * block_size
        is_possible = self.plan.returns and first in self._known and self._transfers.open is None
        if not is_possible or full_tokens <= self._known[first]:  # P computed those itself
            return self._release_all()
        self.phase = Phase.RETURN
        return self._ask(Direction.BACK, decode, first, self.token_ids[:full_tokens])

    def _release(self, seat: Seat) -> list[Action]:
        if self._known.pop(seat, None) is None:
            return []
        return [Send(seat.instance, Abort(epoch=seat.epoch, request_id=self.spec.id))]

    def _release_all(self) -> list[Action]:
        """Everybody forgets the request; an open transfer ends as its state allows."""
        self.phase = Phase.DRAIN
        actions = self._transfers.give_up()
        for seat in list(self._known):
            actions += self._release(seat)
        return actions

    def _fail(self, message: str) -> list[Action]:
        if self.is_client_done:
            return []
        self.is_client_done = True
        return [Fail(message)]

    def _end_if_quiet(self) -> list[Action]:
        if not self.is_client_done or self._known or not self._transfers.are_over:
            return []
        self.phase = Phase.ENDED
        return [Ended()]

    # ── small helpers ─────────────────────────────────────────────────────────────────────────

    def _running_plan(self) -> Plan | None:
        """The plan, while the client waits for tokens."""
        return None if self.is_client_done else self.plan

    def _runner(self) -> Seat | None:
        """The instance that runs the request to its end, if it does so now."""
        if self.plan is None:
            return None
        if self.phase is Phase.DECODE:
            return self.plan.decode
        is_whole = self.phase is Phase.PREFILL and self.plan.decode is None
        return self.plan.first if is_whole else None

    def _seat_of(self, instance: InstanceId) -> Seat | None:
        """The seat of the plan on this instance."""
        if self.plan is None:
            return None
        seats = (self.plan.first, self.plan.decode)
        return next((seat for seat in seats if seat and seat.instance == instance), None)

    def _is_private(self, seat: Seat) -> bool:
        assert self.plan is not None
        is_first = seat == self.plan.first
        return self.plan.first_is_private if is_first else self.plan.decode_is_private

    def _learned(self, seat: Seat, num_tokens: int) -> list[Action]:
        """What the prompt tree may believe of this instance."""
        if self._is_private(seat) or num_tokens <= 0:
            return []
        return [Learned(seat.instance, num_tokens)]
