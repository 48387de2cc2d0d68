"""What a request's lifecycle is told, and what it asks for: the vocabulary of `lifecycle.py`.

`scheduler.py` makes a `RequestSpec` and a `Plan` of instances' `Seat`s, feeds inputs (the workers'
events and what happens on the client's side), and carries the actions out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from memserve.core.delivery import Delivery
from memserve.errors import InstanceLostError, MemServeError, RequestError
from memserve.messages import (
    Allocated,
    AnyCommand,
    Expired,
    Finished,
    Inserted,
    InsertFailed,
    Refused,
    Rejected,
    Sent,
    Started,
    TokenOutput,
    TransmitFailed,
)
from memserve.types import InstanceId, Namespace, RequestId


class Seat(msgspec.Struct, frozen=True):
    """One life of an instance."""

    instance: InstanceId
    epoch: int


class Fetch(msgspec.Struct, frozen=True):
    """Take the KV of the first tokens from another instance's history, before the prefill.

    Only the instance that computes the prompt fetches: what D lacks comes to it from there, in the
    one transfer that it needs anyway.
    """

    source: Seat
    num_tokens: int
    """Full blocks."""
    deadline_s: float
    """What has not come so long after P's reservation is computed instead."""


class Plan(msgspec.Struct, frozen=True):
    """Where a request runs. Without `decode` it runs whole on `first`."""

    first: Seat
    decode: Seat | None
    first_is_private: bool
    """The first instance keeps nothing for later requests."""
    decode_is_private: bool
    returns: bool
    """D gives the KV of generated tokens back."""
    fetch: Fetch | None = None
    """What `first` is to fetch; nothing, if it is private."""
    expected_tokens: int = 0
    """That will be generated, as far as one can tell: D keeps room for them."""

    @property
    def last(self) -> Seat:
        """Who runs the request to its end."""
        return self.decode or self.first

    def seat_on(self, instance: InstanceId) -> Seat | None:
        """Its seat in this plan, if it has one."""
        seats = (self.first, self.decode)
        return next((seat for seat in seats if seat and seat.instance == instance), None)

    def is_private(self, seat: Seat) -> bool:
        """Whether this one of its seats keeps nothing."""
        return self.first_is_private if seat == self.first else self.decode_is_private


class RequestSpec(msgspec.Struct, frozen=True):
    """What the lifecycle has to know of a request."""

    id: RequestId
    prompt_token_ids: list[int]
    request: bytes
    """vLLM's `EngineCoreRequest` without the prompt's tokens, opaque here."""
    max_tokens: int
    """Tokens to generate at most, at least 1 (the context's limit is already in it)."""
    resample: bool
    """D must sample the first token itself: grammars, penalties, `min_tokens` and seeds depend on
    the generated tokens, and D would take P's token for a part of the prompt."""
    namespace: Namespace
    client: str = ""
    """Whose turn it takes, when requests wait: the API key's name."""
    priority: int = 0
    """Lower goes first."""
    session: str = ""
    """What the client calls the conversation, if anything."""
    grammar_field: str | None = None
    """The field of the client's body that says what the output must follow, if one does."""


class Limits(msgspec.Struct, frozen=True):
    """Settings that are the same for all requests."""

    block_size: int
    max_attempts: int
    """How often a request is placed at most."""
    reservation_s: float
    room_wait_s: float = 300.0
    """A request's KV waits so long at P for room at D; D computes it then."""


# What `step` asks of the scheduler.


class Send(msgspec.Struct, frozen=True):
    """Send a command to an instance."""

    instance: InstanceId
    command: AnyCommand


class Deliver(msgspec.Struct, frozen=True):
    """Pass the output that is being processed on to the client."""

    delivery: Delivery


class Fail(msgspec.Struct, frozen=True):
    """End the client's stream with an error."""

    message: str
    field: str | None = None
    """Of the client's body, if what it says is at fault."""

    @property
    def error(self) -> MemServeError:
        """What the client is told."""
        if self.field is None:
            return InstanceLostError(self.message)
        return RequestError(f"{self.field}: {self.message}", self.field)


class PlaceAgain(msgspec.Struct, frozen=True):
    """Call `place` with a new plan, or `give_up`."""

    reason: str


class Learned(msgspec.Struct, frozen=True):
    """The instance holds the KV of the first `num_tokens` of the request's tokens."""

    instance: InstanceId
    num_tokens: int


class Note(msgspec.Struct, frozen=True):
    """A line for the request's timeline."""

    name: str
    instance: InstanceId | None = None
    detail: Mapping[str, str | int | float] = {}


class Ended(msgspec.Struct, frozen=True):
    """Nothing is held anywhere; no event matters any more."""


Action: TypeAlias = Send | Deliver | Fail | PlaceAgain | Learned | Note | Ended


# What comes in besides the workers' events.


class ClientCancelled(msgspec.Struct, frozen=True):
    """The client went away, or its time is over."""


class StopSeen(msgspec.Struct, frozen=True):
    """The front end found a stop string: the client's stream is complete."""


class InstanceLost(msgspec.Struct, frozen=True):
    """This life of the instance is over, and its process is gone."""

    seat: Seat


class InstanceSilent(msgspec.Struct, frozen=True):
    """Nothing has been heard of this life for long: it may hang. Others could take over."""

    seat: Seat


class Output(msgspec.Struct, frozen=True):
    """One `TokenOutput`, with where it came from."""

    instance: InstanceId
    output: TokenOutput


TransferEvent: TypeAlias = (
    Allocated | Refused | Expired | Sent | TransmitFailed | Inserted | InsertFailed
)
WorkerEvent: TypeAlias = Started | Finished | Rejected | TransferEvent
AnyInput: TypeAlias = (
    WorkerEvent | Output | ClientCancelled | StopSeen | InstanceLost | InstanceSilent
)
