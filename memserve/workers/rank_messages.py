"""What an instance's driver and its ranks say to each other, over one pipe for each rank.

    driver (engine loop)                       rank r (agent thread)
        │◀── Joined or Failed ────────────────── │   the engine is being built
        │ OpenLink(link, peer's rank) ─────────▶ │
        │◀─────────────────────────────── Opened │
        │ SendBlocks(link, transfer, blocks) ──▶ │   ══ heads ══▶ peer's rank
        │ CancelSend(link, transfer) ──────────▶ │
        │◀──────────────── Ended(link, transfer) │   exactly once for each SendBlocks
        │ CloseLink(link, is_lost) ────────────▶ │
        │◀─────────────────────────────── Closed │   no memory is touched for it any more
        │ OpenDram(bytes) ─────────────────────▶ │
        │◀─────────────────────────── DramOpened │
        │ CopyBlocks(owner, blocks, slots) ────▶ │   ══ part of each block ══▶ own host memory
        │ CancelCopy(owner) ───────────────────▶ │
        │◀───────────────────────── Copied(owner)│   exactly once for each CopyBlocks
        │ SaveBlocks(blocks, slots) ───────────▶ │
        │◀──────────────────────────────── Saved │

Copies must not overtake the engine, whose work goes to the ranks by another way, vLLM's own. So the
driver numbers the engine's steps (`StepOrders`, which travels with the step), and an order to copy
names the last step that was begun before it.

Collaborators: `rank_group.py` is the driver's end, `rank_agent.py` the rank's. The pipe exists
before vLLM forks the ranks; its closing is each side's word that it is gone.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import TypeAlias

import msgspec

from memserve.types import BlockId, Geometry, SlotId, TransferId
from memserve.workers.copies import CopyEnd
from memserve.workers.links.base import Completion, RankPeer


class OpenLink(msgspec.Struct, frozen=True, tag=True):
    """Open and warm up a link to one rank of a peer."""

    link: int
    """The driver's number for it, never used twice."""
    kind: str
    peer: RankPeer


class SendBlocks(msgspec.Struct, frozen=True, tag=True):
    """`Link.send`."""

    link: int
    transfer_id: TransferId
    source_ids: list[BlockId]
    target_ids: list[BlockId]


class CancelSend(msgspec.Struct, frozen=True, tag=True):
    """`Link.cancel`."""

    link: int
    transfer_id: TransferId


class CloseLink(msgspec.Struct, frozen=True, tag=True):
    """`Link.close`; unknown links are closed already."""

    link: int
    is_lost: bool


class OpenDram(msgspec.Struct, frozen=True, tag=True):
    """Make host memory for the rank's part of the DRAM tier. Once."""

    size_bytes: int


class CopyBlocks(msgspec.Struct, frozen=True, tag=True):
    """`Copies.copy_in` or `copy_out`, after a step."""

    owner: str
    is_inwards: bool
    block_ids: list[BlockId]
    slot_ids: list[SlotId]
    after_step: int


class CancelCopy(msgspec.Struct, frozen=True, tag=True):
    """`Copies.cancel`."""

    owner: str


class SaveBlocks(msgspec.Struct, frozen=True, tag=True):
    """`Copies.save`, after a step, for somebody who waits for the answer."""

    block_ids: list[BlockId]
    slot_ids: list[SlotId]
    after_step: int


class Saving(msgspec.Struct, frozen=True):
    """Blocks that the step which brings this is about to overwrite."""

    block_ids: list[BlockId]
    slot_ids: list[SlotId]


class StepOrders(msgspec.Struct, frozen=True):
    """What a step brings to each rank, if there is a DRAM tier."""

    number: int
    """From 1 on."""
    savings: list[Saving]
    """To be copied before the step computes, in this order."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The rank has its KV cache."""

    pid: int
    geometry: Geometry
    addresses: dict[str, str]
    """Kind of link → where peers find the buffer."""
    asked_for_memory_at: float
    """When vLLM came to allocate the KV cache, by the monotonic clock of this machine."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank cannot have its KV cache; vLLM ends it, and says less about it."""

    message: str


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Answer to `OpenLink`."""

    link: int
    error: str | None


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A transfer has ended on this rank."""

    link: int
    completion: Completion


class Closed(msgspec.Struct, frozen=True, tag=True):
    """Answer to `CloseLink`."""

    link: int


class DramOpened(msgspec.Struct, frozen=True, tag=True):
    """Answer to `OpenDram`."""

    error: str | None


class Copied(msgspec.Struct, frozen=True, tag=True):
    """A copy has ended on this rank."""

    end: CopyEnd


class Saved(msgspec.Struct, frozen=True, tag=True):
    """Answer to `SaveBlocks`."""

    error: str | None


DramOrder: TypeAlias = OpenDram | CopyBlocks | CancelCopy | SaveBlocks
DramReport: TypeAlias = DramOpened | Copied | Saved
Order: TypeAlias = OpenLink | SendBlocks | CancelSend | CloseLink | DramOrder
Report: TypeAlias = Joined | Failed | Opened | Ended | Closed | DramReport

_encoder = msgspec.msgpack.Encoder()
_order_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def put(connection: Connection, message: Order | Report) -> None:
    """Raises: OSError if the other end is gone."""
    connection.send_bytes(_encoder.encode(message))


def get_order(connection: Connection) -> Order:
    """The next one; waits for it. Raises: EOFError or OSError if the driver is gone."""
    return _order_decoder.decode(connection.recv_bytes())


def get_report(connection: Connection) -> Report:
    """The next one; waits for it. Raises: EOFError or OSError if the rank is gone."""
    return _report_decoder.decode(connection.recv_bytes())
