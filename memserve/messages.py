"""Everything that crosses the control channel between the orchestrator and the workers.

Commands (hub → worker) are verbs; events (worker → hub) are in the past tense, and stand below
beside what they answer. Each is a frozen, tagged `msgspec.Struct`; nothing is pickled and no tensor
travels here. Both directions are ordered and reliable for the life of a worker (a Unix socket;
`frames.py`). The first frame of a worker is its `Greeting`.

Life of a split request, with context caching (`transfer` names the direction)::

    hub                         P                         D
     │ Prefill ────────────────▶│
     │◀──────────────── Started │
     │ Allocate(forward) ───────┼────────────────────────▶│
     │◀─────────────────────────┼──────────────── Allocated
     │ Transmit(forward) ──────▶│   (held by P until its prefill has ended)
     │◀───────────────── Tokens │   first token, goes to the client
     │◀─────────────────── Sent │ ══ KV blocks ══════════▶│
     │ Commit(forward), Decode ─┼────────────────────────▶│
     │◀─────────────────────────┼───────── Inserted, Tokens …
     │ Allocate(back) ─────────▶│
     │◀────────────── Allocated │
     │ Transmit(back) ──────────┼────────────────────────▶│
     │                          │◀══════════ KV blocks ══ │
     │◀─────────────────────────┼──────────────────── Sent
     │ Commit(back) ───────────▶│
     │◀─────────────── Inserted │

Where another instance S holds more of the prompt than P, P may fetch that (`Transmit.history`)::

    hub                         P                         S
     │ Allocate(fetch) ────────▶│
     │◀────────────── Allocated │
     │ Transmit(fetch) ─────────┼────────────────────────▶│   matches the tokens, pins them
     │                          │◀══════════ KV blocks ══ │
     │◀─────────────────────────┼──────────────────── Sent
     │ Commit(fetch), Prefill ─▶│
     │◀────── Inserted, Started │

Two fields carry vLLM's own structs as opaque bytes (`Prefill.request`, `Decode.request`:
`EngineCoreRequest`; `Tokens.payload`: `EngineCoreOutputs`), encoded and decoded with vLLM's msgpack
codec by `frontend/client.py` and `workers/` alone.

Every message carries the `epoch` of the instance's life that it belongs to. A worker is born with
its epoch and ignores commands of another; the hub ignores events of an earlier life.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec

from memserve import changes
from memserve.errors import ProtocolError
from memserve.types import BlockId, Geometry, InstanceId, Namespace, RequestId, TransferId

PROTOCOL_VERSION = 3
"""Raised whenever a message changes its meaning; compared in `Ready`."""


class Command(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of what the hub tells a worker."""

    epoch: int


class Event(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of what a worker tells the hub."""

    instance: InstanceId
    epoch: int


# ── a request ─────────────────────────────────────────────────────────────────────────────────


class Prefill(Command, frozen=True):
    """Compute the prompt and sample one token; the KV stays pinned for a `Transmit` if `hold`.

    `whole`: run the request to its end here (colocated, or a request of one token).
    `is_private`: the KV must serve this request alone (no context caching on this instance).
    `resample`: the sampled token is dropped, since D has to sample it itself.
    """

    request_id: RequestId
    attempt: int
    """Which placement of the request this is; echoed in `Started`, `TokenOutput`, `Finished`."""
    request: bytes
    """vLLM's `EngineCoreRequest` without the prompt's tokens."""
    known_tokens: int
    """As in `Allocate`; 0 but for a prompt whose KV was to be fetched."""
    token_ids: list[int]
    whole: bool
    hold: bool
    is_private: bool
    resample: bool = False
    num_generated: int = 0
    """How many of the last prompt tokens were generated in an earlier attempt (see `Decode`)."""


class Decode(Command, frozen=True):
    """Generate, with the prompt and the tokens generated elsewhere as the prompt.

    `known_tokens` as in `Allocate`, followed by `token_ids`. The last `num_generated` tokens of the
    result were generated before (on P, or in an earlier attempt): they count against the token
    limits of the request.
    """

    request_id: RequestId
    attempt: int
    request: bytes
    known_tokens: int
    token_ids: list[int]
    num_generated: int
    hold: bool
    """Keep the KV pinned at the end, for a `Transmit` back to P."""
    is_private: bool


class Started(Event, frozen=True):
    """The engine scheduled the request for the first time: its prefill runs now."""

    request_id: RequestId
    attempt: int
    cached_tokens: int
    """Prompt tokens found in the cache."""


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step made for one request; the details are in `Tokens.payload`."""

    request_id: RequestId
    attempt: int
    token_ids: list[int]
    finish_reason: str | None
    """vLLM's: stop, length, abort, error, repetition."""


class Tokens(Event, frozen=True):
    """The outputs of one engine step."""

    outputs: list[TokenOutput]
    payload: bytes
    """vLLM's `EngineCoreOutputs` of the same step, same order."""


class Finished(Event, frozen=True):
    """A `Prefill` or `Decode` has ended here. Follows the `Tokens` with its finish reason.

    `held_tokens`: how many tokens' KV stays pinned (0 if `hold` was not asked for).
    """

    request_id: RequestId
    attempt: int
    held_tokens: int


class Rejected(Event, frozen=True):
    """The engine could not take the request (a fault, or a request the front end let through).

    What was known and pinned of it here stays until `Abort`.
    """

    request_id: RequestId
    attempt: int
    message: str


class Abort(Command, frozen=True):
    """Forget the request: stop running it, cancel its `Transmit`, drop its pins and its tokens.

    With `hold` it only ends here as if it had finished (a stop string was seen): its KV stays
    pinned, and `Finished` answers. Unknown requests are ignored (but answered if `hold`).
    Reservations are not touched: they end by `Commit` or `Cancel`.
    """

    request_id: RequestId
    hold: bool = False


# ── one move of KV: allocate → transmit → commit ──────────────────────────────────────────────


class Allocate(Command, frozen=True):
    """Match the tokens, pin what is there, and reserve blocks for the full blocks that are missing.

    The tokens are those the worker already knows of this request (`known_tokens` of them; all of
    an earlier `Prefill` or `Allocate`, or none), followed by `token_ids`.
    """

    transfer_id: TransferId
    request_id: RequestId
    known_tokens: int
    token_ids: list[int]
    namespace: Namespace
    is_private: bool
    deadline_s: float
    """Seconds from the reservation until the worker reports `Expired`."""
    patience_s: float = 0.0
    """Where there is no room, wait for it so long before it is `Refused`."""
    expected_tokens: int = 0
    """That the request will probably generate here: those that may wait leave room for them."""


class Allocated(Event, frozen=True):
    """Blocks are reserved; the sender may write them from now on."""

    transfer_id: TransferId
    hit_blocks: int
    """Full blocks that this worker had already."""
    block_ids: list[BlockId]
    """For the full blocks after those."""


class Refused(Event, frozen=True):
    """No room for the reservation; no block is held. The tokens stay known until `Abort`."""

    transfer_id: TransferId
    reason: str


class Expired(Event, frozen=True):
    """The reservation's deadline passed. Its blocks are quarantined until `Cancel` or `Commit`.

    Said again after each further `deadline_s`, until one of them comes.
    """

    transfer_id: TransferId


class History(msgspec.Struct, frozen=True):
    """Tokens (full blocks) whose KV an instance is believed to hold in its index."""

    namespace: Namespace
    token_ids: list[int]


class Transmit(Command, frozen=True):
    """Write the request's blocks from index `first_block` on into the peer's `block_ids`.

    Done as soon as the request's KV is complete and pinned here, or in parts, as they get complete
    (`types.TransferStyle`); the pin ends with it.
    Always answered: by `Sent`, or by `TransmitFailed` (also when it is cancelled).
    """

    transfer_id: TransferId
    request_id: RequestId
    peer: InstanceId
    first_block: int
    block_ids: list[BlockId]
    history: History | None = None
    """Send what the index holds of these tokens, or fail; the request need not be known here, and
    does not become so."""


class Sent(Event, frozen=True):
    """All bytes are in the peer's memory, and the link is quiet."""

    transfer_id: TransferId
    num_blocks: int
    size_bytes: int
    seconds: float


class TransmitFailed(Event, frozen=True):
    """Nothing more will be written for this transfer. What was written is worthless."""

    transfer_id: TransferId
    reason: str


class Commit(Command, frozen=True):
    """The sender is done: check the byte count, insert the reserved blocks into the index."""

    transfer_id: TransferId
    size_bytes: int
    pin: bool
    """Keep the blocks pinned until this worker's `Decode` of the request was scheduled."""


class Inserted(Event, frozen=True):
    """The blocks are in the index. `num_tokens`: what the prompt tree may now believe."""

    transfer_id: TransferId
    num_tokens: int


class InsertFailed(Event, frozen=True):
    """The bytes did not match what was promised, or the reservation is unknown; it is freed."""

    transfer_id: TransferId
    reason: str


class Cancel(Command, frozen=True):
    """To the receiver: free the reservation, the link is quiet. To the sender: stop sending.

    A sender answers a cancelled `Transmit` with `TransmitFailed`, unless it answered before.
    Unknown transfers are ignored.
    """

    transfer_id: TransferId


# ── an instance: its start, its health, its links ─────────────────────────────────────────────


class Greeting(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Opens a worker's connection: which life of which instance speaks. Events follow."""

    instance: InstanceId
    epoch: int


class PoolStats(msgspec.Struct, frozen=True):
    """An instance's pool and queue at one moment. Blocks: free + historical + active = total."""

    total_blocks: int
    free_blocks: int
    """Hold nothing."""
    historical_blocks: int
    """Hold indexed KV that no request uses; can be evicted."""
    active_blocks: int
    """In use by running requests, pins, reservations."""
    reserved_blocks: int
    """Of the active ones: reserved for a transfer that has not been committed."""
    quarantined_blocks: int
    """Of the reserved ones: past their deadline, waiting for the link to be quiet."""
    pinned_requests: int
    running_requests: int
    waiting_requests: int
    prefix_hit_tokens: int
    """Prompt tokens served from the cache since the start."""
    prefix_query_tokens: int
    """Prompt tokens asked for since the start."""
    dram_blocks: int = 0
    """Slots of the DRAM tier, of a block each with its parts on all ranks; 0: there is none."""
    dram_used_blocks: int = 0
    swapped_out_blocks: int = 0
    """HBM → DRAM, since the start."""
    swapped_in_blocks: int = 0
    """DRAM → HBM, since the start."""
    steps: int = 0
    """Of the engine in which the model ran, since the start."""
    step_s: float = 0.0
    """Seconds inside the engine's steps."""
    turn_s: float = 0.0
    """Seconds of the loop's turns that had a step, with all that is done besides."""


class Ready(Event, frozen=True):
    """The worker is up and its engine can serve."""

    protocol: int
    geometry: Geometry
    addresses: dict[str, tuple[str, ...]]
    """Both as in `PeerJoined`."""
    max_model_len: int
    stats: PoolStats
    startup_s: dict[str, float]
    """Where the time went, by phase."""


class StartFailed(Event, frozen=True):
    """The engine could not be built; the process ends after this."""

    message: str


class Heartbeat(Event, frozen=True):
    """Sent at an interval, and when the engine falls idle."""

    stats: PoolStats


class StopAsked(Event, frozen=True):
    """Somebody has sent SIGTERM to the worker, who ends by a `Stop` only."""


class PeerJoined(Command, frozen=True):
    """Open (and warm) a link to this peer; answered by `LinkReady`."""

    peer: InstanceId
    peer_epoch: int
    geometry: Geometry
    """Of its rank 0; the others' differ in `tp_rank` alone."""
    addresses: dict[str, tuple[str, ...]]
    """Link kind → where the memory of each of the peer's ranks is."""


class LinkReady(Event, frozen=True):
    """The link to the peer is open, or cannot be (`error`)."""

    peer: InstanceId
    peer_epoch: int
    kind: str
    error: str | None = None


class PeerLost(Command, frozen=True):
    """The peer's process is gone: close the link, fail what was being sent to it."""

    peer: InstanceId
    peer_epoch: int


class Stop(Command, frozen=True):
    """End the process now, in order."""


# ── its index and its pool ────────────────────────────────────────────────────────────────────


class CacheChanged(Event, frozen=True):
    """What one step changed in the index, in order.

    `sequence` counts these events from 1 in each life of the instance: a gap means that some were
    lost, and asks for a `SendSnapshot`.
    """

    sequence: int
    changes: list[changes.AnyChange]


class SendSnapshot(Command, frozen=True):
    """Describe the whole index; answered by `CacheSnapshot`s."""


class CacheSnapshot(Event, frozen=True):
    """A part of the whole index, as it is after the `CacheChanged` of this sequence number.

    Parents come before their children. The parts follow each other without anything between them.
    """

    sequence: int
    changes: list[changes.Inserted]
    is_last: bool


class ResetCache(Command, frozen=True):
    """Drop all historical KV that nobody holds."""


class Audit(Command, frozen=True):
    """Check the pool's accounting; answered by `Audited`."""

    audit_id: int


class Audited(Event, frozen=True):
    """The pool's accounting. `problems` is empty when every block has exactly one owner."""

    audit_id: int
    stats: PoolStats
    problems: list[str]
    holders: list[str]
    """Who holds what now: requests, pins, reservations. Empty on an idle worker."""


# ── all of them, as bytes ─────────────────────────────────────────────────────────────────────

AnyCommand: TypeAlias = (
    Prefill
    | Decode
    | Abort
    | Allocate
    | Transmit
    | Commit
    | Cancel
    | PeerJoined
    | PeerLost
    | Stop
    | SendSnapshot
    | ResetCache
    | Audit
)
AnyEvent: TypeAlias = (
    Started
    | Tokens
    | Finished
    | Rejected
    | Allocated
    | Refused
    | Expired
    | Sent
    | TransmitFailed
    | Inserted
    | InsertFailed
    | Ready
    | StartFailed
    | Heartbeat
    | StopAsked
    | LinkReady
    | CacheChanged
    | CacheSnapshot
    | Audited
)

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_greetings: msgspec.msgpack.Decoder[Greeting] = msgspec.msgpack.Decoder(Greeting)
_commands: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)
_events: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)


def encode(message: AnyCommand | AnyEvent | Greeting) -> bytes:
    """One message → the body of one frame."""
    return _encoder.encode(message)


def decode_greeting(frame: bytes | bytearray) -> Greeting:
    """Raises: ProtocolError."""
    return _decode(_greetings, frame, "a greeting")


def decode_command(frame: bytes | bytearray) -> AnyCommand:
    """Raises: ProtocolError."""
    return _decode(_commands, frame, "a command")


def decode_event(frame: bytes | bytearray) -> AnyEvent:
    """Raises: ProtocolError."""
    return _decode(_events, frame, "an event")


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes | bytearray, what: str) -> _T:
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not {what}: {error}") from error
