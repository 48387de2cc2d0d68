"""The life of one request as a pure state machine: `step(event)` → actions.

Collaborators: `scheduler.py` places the request, feeds it the workers' events and carries the
actions out; `vocabulary.py` has the inputs and actions, `messages.py` the commands and a picture of
their order; `kv_transfer.py` keeps the request's moves of KV, `told.py` what has been said to whom.
The paper: section 5.

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
from memserve.core.kv_transfer import Outcome, RequestTransfers, Transfer
from memserve.core.told import Told
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
    StopSeen,
    TransferEvent,
)
from memserve.messages import (
    Finished,
    Inserted,
    Rejected,
    Started,
    TokenOutput,
)
from memserve.types import Direction, InstanceId


class Phase(enum.Enum):
    """What the request waits for; see the module's picture."""

    UNPLACED = "unplaced"
    """The scheduler: `place` or `give_up`."""
    FETCH = "fetch"
    """KV from another instance's history at P."""
    PREFILL = "prefill"
    """P's first token; P's last one, if the request runs whole there."""
    HANDOFF = "handoff"
    """P's KV at D."""
    DECODE = "decode"
    """D's last token."""
    RETURN = "return"
    """D's KV at P."""
    DRAIN = "drain"
    """Answers of those who were told to stop, or to forget it."""
    ENDED = "ended"


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
        self._told = Told(spec)
        self._transfers = RequestTransfers(spec, limits, self._told)
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
        return [*self._fail(message), *self._end_if_quiet()]

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
        if plan.decode is None:
            runner = plan.first
            generates = self.phase is Phase.PREFILL and self.is_prompt_computed
        else:
            runner = plan.decode
            generates = self.phase is Phase.DECODE and not self.is_decode_cold
        if not generates or runner.instance != instance:
            return None
        self.generated += output.token_ids
        says_prompt = plan.decode is None and self._prompt_attempt == self.attempt
        return _TOKENS_AND_PROMPT if says_prompt else _TOKENS

    def check_integrity(self) -> None:
        """Raises: AssertionError if the state contradicts itself."""
        if self.phase is Phase.ENDED:
            assert self.is_client_done
            assert not self._told and self._transfers.are_over
        if self.phase in (Phase.RETURN, Phase.DRAIN):
            assert self.is_client_done
        if self.phase in (Phase.FETCH, Phase.PREFILL, Phase.HANDOFF, Phase.DECODE):
            assert self.plan is not None and not self.is_client_done
        if self.phase is Phase.FETCH:
            transfer = self._transfers.open
            assert transfer is not None and transfer.direction is Direction.FETCH
        if self.phase in (Phase.HANDOFF, Phase.DECODE):
            assert self.plan is not None and self.plan.decode is not None
            assert self.plan.decode in self._told
        if self.phase is Phase.UNPLACED:
            assert self._transfers.open is None and not self._told
        assert len(self.generated) <= self.spec.max_tokens

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def _dispatch(self, event: AnyInput) -> list[Action]:
        match event:
            case Started() | Finished() | Rejected() if event.attempt != self.attempt:
                return []
            case Started():
                return self._on_started(event)
            case Output():
                return self._on_output(event.instance, event.output)
            case Finished():
                return self._on_finished(event)
            case StopSeen():
                return self._on_stop_seen()
            case ClientCancelled():
                return self._on_cancelled()
            case Rejected():
                return self._on_rejected(event)
            case InstanceLost():
                return self._on_instance_lost(event.seat)
            case InstanceSilent():
                return self._on_instance_silent(event.seat)
        return self._on_transfer_event(event)

    # ── to the first token, on P ──────────────────────────────────────────────────────────────

    def _fetch(self, plan: Plan, fetch: Fetch) -> list[Action]:
        """P reserves blocks for what the source is to send."""
        assert not plan.first_is_private and fetch.source != plan.first, plan
        self.phase = Phase.FETCH
        source, num_tokens = fetch.source, fetch.num_tokens
        assert 0 < num_tokens <= self.num_tokens and not num_tokens % self._limits.block_size
        note = Note("fetching", source.instance, {"tokens": num_tokens})
        token_ids = self.token_ids[:num_tokens]
        return [note, self._transfers.fetch(plan, self.attempt, token_ids)]

    def _prefill(self, plan: Plan) -> list[Action]:
        """P computes what it does not hold of the prompt."""
        self.phase = Phase.PREFILL
        return [self._told.prefill(plan, self.attempt, self.generated)]

    def _on_started(self, event: Started) -> list[Action]:
        """P computes now: the time to have D reserve blocks."""
        plan = self._running_plan()
        if plan is None:
            return []
        note = Note("started", event.instance, {"cached_tokens": event.cached_tokens})
        if event.instance != plan.first.instance or self.phase is not Phase.PREFILL:
            return [note]
        if self.cached_tokens is None:
            self.cached_tokens = event.cached_tokens
        if plan.decode is None or plan.decode in self._told:  # whole, or asked before
            return [note]
        return [note, self._transfers.forward(plan, self.attempt, self.token_ids)]

    def _on_output(self, instance: InstanceId, output: TokenOutput) -> list[Action]:
        plan = self._running_plan()
        if plan is None or output.attempt != self.attempt:
            return []
        if output.finish_reason in ("error", "abort"):
            return self._given_up(instance, output)
        if self.phase is Phase.PREFILL and instance == plan.first.instance:
            return self._on_prefill_output(plan, output)
        if self.phase is Phase.DECODE and instance == plan.last.instance:
            self.is_decode_cold = False
            return self._pass_on(plan, output, says_prompt=False)
        return []

    def _on_prefill_output(self, plan: Plan, output: TokenOutput) -> list[Action]:
        if self._prompt_attempt is None:
            self._prompt_attempt = self.attempt
        says_prompt = self._prompt_attempt == self.attempt
        self.is_prompt_computed |= bool(output.token_ids) or output.finish_reason is not None
        if plan.decode is None:
            return self._pass_on(plan, output, says_prompt=says_prompt)
        if output.finish_reason is None:  # the prompt's logprobs, ahead of the first token
            return [Deliver(Delivery(tokens=False, final=False, prompt=says_prompt))]
        learned = self._learned(plan, plan.first, self.num_tokens)
        final = not self.spec.resample and output.finish_reason != "length"
        delivery = Delivery(tokens=not self.spec.resample, final=final, prompt=says_prompt)
        if not self.spec.resample:
            self.generated += output.token_ids
        if final:
            self.is_client_done = True
            return [Deliver(delivery), *learned, *self._release_all()]
        return [Deliver(delivery), *learned, *self._hand_off()]

    # ── to the last token, on D ───────────────────────────────────────────────────────────────

    def _hand_off(self) -> list[Action]:
        """P has finished; D starts when the KV is there, or at once if it will not come."""
        self.phase = Phase.HANDOFF
        return self._decode_cold() if self._transfers.open is None else []

    def _decode_cold(self) -> list[Action]:
        """D computes the prompt itself; P's pin has no more use."""
        assert self.plan is not None
        self.is_decode_cold = True
        return [*self._told.forget(self.plan.first), *self._decode()]

    def _decode(self) -> list[Action]:
        assert self.plan is not None
        self.phase = Phase.DECODE
        return [self._told.decode(self.plan, self.attempt, self.generated)]

    def _pass_on(self, plan: Plan, output: TokenOutput, *, says_prompt: bool) -> list[Action]:
        """An output of the instance that runs the request to its end."""
        final = output.finish_reason is not None
        self.generated += output.token_ids
        deliver = Deliver(Delivery(tokens=True, final=final, prompt=says_prompt))
        if not final:
            return [deliver]
        self.is_client_done = True
        self.phase = Phase.DRAIN
        if plan.returns:  # what is held will be known from `Finished`
            return [deliver]
        # The last token was sampled, not computed: it has no KV.
        return [deliver, *self._learned(plan, plan.last, self.num_tokens - 1)]

    # ── after the last token ──────────────────────────────────────────────────────────────────

    def _on_stop_seen(self) -> list[Action]:
        if self.is_client_done:
            return []
        self.is_client_done = True
        note, runner = Note("stop string"), self._runner()
        if self.plan is None or runner is None or self.plan.is_private(runner):
            return [note, *self._release_all()]
        self.phase = Phase.DRAIN
        return [note, self._told.stop(runner)]

    def _on_finished(self, event: Finished) -> list[Action]:
        """What the run has left is pinned where it ended."""
        plan = self.plan
        if plan is None or self.phase is not Phase.DRAIN:
            return []
        if event.instance != plan.last.instance or plan.last not in self._told:
            return []
        # After a stop string the engine may have run on: the client never saw those tokens.
        held_tokens = min(event.held_tokens, self.num_tokens)
        return [*self._learned(plan, plan.last, held_tokens), *self._give_back(plan, held_tokens)]

    def _give_back(self, plan: Plan, held_tokens: int) -> list[Action]:
        """P gets D's KV of so many tokens, if it lacks any of that; then everybody forgets it."""
        block_size = self._limits.block_size
        full_tokens = held_tokens // block_size * block_size
        is_new = full_tokens > self._told.num_tokens(plan.first)  # P computed those itself
        is_possible = plan.first in self._told and self._transfers.open is None
        if not (plan.returns and is_possible and is_new):
            return self._release_all()
        self.phase = Phase.RETURN
        return [self._transfers.back(plan, self.attempt, self.token_ids[:full_tokens])]

    def _release_all(self) -> list[Action]:
        """Everybody forgets the request; an open transfer ends as its state allows."""
        self.phase = Phase.DRAIN
        return [*self._transfers.give_up(), *self._told.forget_all()]

    def _end_if_quiet(self) -> list[Action]:
        if not self.is_client_done or self._told or not self._transfers.are_over:
            return []
        self.phase = Phase.ENDED
        return [Ended()]

    # ── transfers ─────────────────────────────────────────────────────────────────────────────

    def _on_transfer_event(self, event: TransferEvent) -> list[Action]:
        transfer = self._transfers.open
        actions, outcome = self._transfers.step(event)
        if transfer is None or outcome is None:
            return actions
        match outcome:
            case Outcome.ARRIVED:
                return [*actions, *self._with_transfer(transfer)]
            case Outcome.NOTHING:
                return [*actions, *self._without_transfer()]
            case Outcome.LATE if self.phase is Phase.PREFILL:  # the prompt is being computed
                return actions
            case Outcome.LATE:
                return [*actions, *self._transfers.give_up(), *self._without_transfer()]
            case Outcome.OVER:
                return [*actions, *self._after_transfer(transfer, event)]

    def _with_transfer(self, transfer: Transfer) -> list[Action]:
        """The KV is at the receiver; the request goes on there."""
        assert self.plan is not None
        match transfer.direction:
            case Direction.FETCH:
                return self._prefill(self.plan)
            case Direction.FORWARD:
                return self._decode()
            case Direction.BACK:
                return []

    def _without_transfer(self) -> list[Action]:
        """It has ended without bringing anything."""
        if self.is_client_done:
            return self._release_all()
        assert self.plan is not None
        match self.phase:
            case Phase.FETCH:
                return self._prefill(self.plan)
            case Phase.HANDOFF:
                return self._decode_cold()
        return []

    def _after_transfer(self, transfer: Transfer, event: TransferEvent) -> list[Action]:
        """What came is history at the receiver, if it could be inserted."""
        learned: list[Action] = []
        if isinstance(event, Inserted):
            assert self.plan is not None
            num_tokens = min(event.num_tokens, self.num_tokens)
            learned = self._learned(self.plan, transfer.receiver, num_tokens)
        return [*learned, *(self._release_all() if transfer.direction is Direction.BACK else [])]

    # ── what goes wrong ───────────────────────────────────────────────────────────────────────

    def _on_cancelled(self) -> list[Action]:
        if self.is_client_done:
            return []
        self.is_client_done = True
        return self._release_all()

    def _on_rejected(self, event: Rejected) -> list[Action]:
        if self.plan is None or self.plan.seat_on(event.instance) not in self._told:
            return []
        return self._fail(event.message)

    def _on_instance_lost(self, seat: Seat) -> list[Action]:
        self._told.lost(seat)
        return [*self._transfers.lost(seat), *self._go_on_without(seat)]

    def _go_on_without(self, seat: Seat) -> list[Action]:
        plan = self.plan
        if plan is None:
            return []
        has_part = seat in (plan.first, plan.decode)
        if self.is_client_done:
            return self._release_all() if has_part else []
        match self.phase:
            case Phase.FETCH if not has_part and self._transfers.open is None:  # it was the source
                return self._prefill(plan)
            case Phase.HANDOFF if seat == plan.first:
                return self._decode_cold()
            case Phase.DECODE if seat == plan.first:
                return []
        return self._place_again(seat) if has_part else []

    def _place_again(self, lost: Seat) -> list[Action]:
        reason = f"instance {lost.instance} was lost"
        if self.attempt >= self._limits.max_attempts:
            return self._fail(f"{reason}, at attempt {self.attempt}")
        if self.spec.resample and self.generated:
            return self._fail(f"{reason} in mid-generation")
        return self._unplace(Note("lost", lost.instance), reason)

    def _on_instance_silent(self, seat: Seat) -> list[Action]:
        """Who waits for it goes on without it, if anything is left to fall back on afterwards."""
        if self.phase is Phase.RETURN and self._transfers.is_asked(seat):
            return self._release_all()  # for others wait for the memory that this holds on D
        plan = self._running_plan()
        if plan is None:
            return []
        if self.phase is Phase.HANDOFF and seat == plan.first:
            if not self._transfers.is_sending:
                return []
            return [*self._transfers.give_up(), *self._decode_cold()]
        is_at_first = self.phase in (Phase.FETCH, Phase.PREFILL)
        if seat != (plan.first if is_at_first else plan.last):
            return []
        is_last = self.attempt >= self._limits.max_attempts - 1
        if is_last or (self.spec.resample and self.generated):
            return []
        return self._unplace(Note("silent", seat.instance), f"{seat.instance} is silent")

    def _unplace(self, note: Note, reason: str) -> list[Action]:
        actions = self._release_all()
        self.phase = Phase.UNPLACED
        self.plan = None
        return [*actions, note, PlaceAgain(reason)]

    def _given_up(self, instance: InstanceId, output: TokenOutput) -> list[Action]:
        """The engine says `error` where no token fits a grammar, or where it does not compile."""
        if output.finish_reason == "error" and self.spec.grammar_field is not None:
            after = f" after {len(self.generated)} tokens" if self.generated else ""
            return self._fail(f"nothing fits it{after}", self.spec.grammar_field)
        return self._fail(f"instance {instance} gave up the request")

    def _fail(self, message: str, field: str | None = None) -> list[Action]:
        """The client gets an error, if it still waits; everybody forgets the request."""
        told_client: list[Action] = [] if self.is_client_done else [Fail(message, field)]
        self.is_client_done = True
        return [*told_client, *self._release_all()]

    # ── small helpers ─────────────────────────────────────────────────────────────────────────

    def _running_plan(self) -> Plan | None:
        """The plan, while the client waits for tokens."""
        return None if self.is_client_done else self.plan

    def _runner(self) -> Seat | None:
        """The instance that runs the request to its end, if it does so now."""
        plan = self.plan
        if plan is None or self.phase is not (Phase.DECODE if plan.decode else Phase.PREFILL):
            return None
        return plan.last

    def _learned(self, plan: Plan, seat: Seat, num_tokens: int) -> list[Action]:
        """What the prompt tree may believe of this instance."""
        if plan.is_private(seat) or num_tokens <= 0:
            return []
        return [Learned(seat.instance, num_tokens)]
