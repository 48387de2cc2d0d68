"""The scheduler's books: load per instance, traffic per link, totals.

Load is charged by where a request is, not by events: `Members.charge` makes the books agree with
the request's lifecycle, so no path through it can leave a charge behind.
"""

from __future__ import annotations

from collections.abc import KeysView, Mapping

import msgspec

from memserve.core.lifecycle import Phase, RequestLifecycle
from memserve.core.policy import InstanceView
from memserve.core.vocabulary import Seat
from memserve.messages import Sent, Transmit, TransmitFailed
from memserve.status import Counters, LinkStatus
from memserve.types import InstanceId, RequestId, Role, TransferId


class Member(msgspec.Struct):
    """A ready instance, with the load that the scheduler has put on it."""

    seat: Seat
    role: Role
    queued_tokens: int = 0
    """Prompt tokens placed here and not yet computed."""
    running_requests: int = 0
    running_tokens: int = 0


class _Charge(msgspec.Struct, frozen=True):
    """The load of one request on one instance."""

    seat: Seat
    queued_tokens: int
    running_tokens: int


class Members:
    """The ready instances and what each has to do."""

    def __init__(self) -> None:
        self._members: dict[InstanceId, Member] = {}
        self._charges: dict[RequestId, tuple[_Charge, ...]] = {}

    @property
    def instances(self) -> KeysView[InstanceId]:
        return self._members.keys()

    def __contains__(self, seat: Seat) -> bool:
        member = self._members.get(seat.instance)
        return member is not None and member.seat == seat

    def get(self, instance: InstanceId) -> Member | None:
        return self._members.get(instance)

    def seat(self, instance: InstanceId) -> Seat:
        """The present life of a ready instance. Raises: KeyError."""
        return self._members[instance].seat

    def add(self, seat: Seat, role: Role) -> None:
        self._members[seat.instance] = Member(seat, role)

    def remove(self, seat: Seat) -> bool:
        """Whether this life was a member."""
        if seat not in self:
            return False
        del self._members[seat.instance]
        return True

    def views(self, matches: Mapping[InstanceId, int]) -> list[InstanceView]:
        """What the policy sees; `matches`: instance → cached tokens of the prompt."""
        return [
            InstanceView(
                instance=member.seat.instance,
                role=member.role,
                queued_tokens=member.queued_tokens,
                running_requests=member.running_requests,
                running_tokens=member.running_tokens,
                cached_tokens=matches.get(member.seat.instance, 0),
            )
            for member in self._members.values()
        ]

    def charge(self, lifecycle: RequestLifecycle, missing_tokens: int) -> None:
        """Make the books agree with where the request is now.

        `missing_tokens`: prompt tokens that its first instance has to compute.
        """
        before = self._charges.pop(lifecycle.spec.id, ())
        now = _charges(lifecycle, missing_tokens)
        if now:
            self._charges[lifecycle.spec.id] = now
        if now == before:
            return
        for sign, charges in ((-1, before), (1, now)):
            for charge in charges:
                if charge.seat in self:
                    member = self._members[charge.seat.instance]
                    member.queued_tokens += sign * charge.queued_tokens
                    member.running_tokens += sign * charge.running_tokens
                    member.running_requests += sign


def _charges(lifecycle: RequestLifecycle, missing_tokens: int) -> tuple[_Charge, ...]:
    plan = lifecycle.plan
    if plan is None or lifecycle.is_client_done:
        return ()
    num_prompt = len(lifecycle.spec.prompt_token_ids)
    is_prefilling = lifecycle.phase is Phase.PREFILL
    queued = missing_tokens if is_prefilling and not lifecycle.generated else 0
    if plan.decode is None:
        return (_Charge(plan.first, queued, num_prompt),)
    decode = _Charge(plan.decode, 0, num_prompt)
    return (_Charge(plan.first, queued, num_prompt), decode) if is_prefilling else (decode,)


class _LinkTotals(msgspec.Struct):
    transfers: int = 0
    failures: int = 0
    blocks: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


class Traffic:
    """What every link has carried."""

    def __init__(self) -> None:
        self._links: dict[tuple[InstanceId, InstanceId], _LinkTotals] = {}
        self._open: dict[TransferId, tuple[InstanceId, _LinkTotals]] = {}

    def ordered(self, source: InstanceId, command: Transmit) -> None:
        """A `Transmit` went out to `source`."""
        link = self._links.setdefault((source, command.peer), _LinkTotals())
        link.transfers += 1
        self._open[command.transfer_id] = (source, link)

    def answered(self, event: Sent | TransmitFailed) -> None:
        """Its answer came."""
        if event.transfer_id not in self._open:
            return
        _, link = self._open.pop(event.transfer_id)
        if isinstance(event, TransmitFailed):
            link.failures += 1
            return
        link.blocks += event.num_blocks
        link.size_bytes += event.size_bytes
        link.seconds += event.seconds

    def lost(self, source: InstanceId) -> None:
        """This sender will not answer any more."""
        for transfer_id, (sender, link) in list(self._open.items()):
            if sender == source:
                del self._open[transfer_id]
                link.failures += 1

    def statuses(self, kinds: Mapping[tuple[InstanceId, InstanceId], str]) -> list[LinkStatus]:
        """The links in `kinds` ((source, target) → kind)."""
        return [
            LinkStatus(
                source=source,
                target=target,
                kind=kind,
                **msgspec.structs.asdict(self._links.get((source, target), _LinkTotals())),
            )
            for (source, target), kind in sorted(kinds.items())
        ]


class Totals(msgspec.Struct):
    """Counts since the start."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    replaced: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def snapshot(self, *, running: int, waiting: int) -> Counters:
        return Counters(running=running, waiting=waiting, **msgspec.structs.asdict(self))
