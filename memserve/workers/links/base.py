"""What a link is: the way from this instance's KV blocks into one peer's.

Collaborators: `transfer.py` opens one link per peer, through `choice.py`; `sending.py` calls it,
with transfers in one part or in several, each of which is a transfer of its own to the link;
`shm.py` (CPU), `ipc.py` and `nccl.py` (GPUs of one host) and `fake.py` (tests) are links.
`tests/contract/test_links.py` holds what every link must do.

Links are one-sided: the sender writes, the receiver only counts what it is told. Where the wire is
two-sided (NCCL), the receiving end is a thread that nobody else knows. `send` and `poll` are apart
so that a link may work in the background, on a stream or a thread of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from memserve.core.head_split import split_heads
from memserve.errors import GeometryMismatchError, TransferError
from memserve.messages import PeerJoined
from memserve.types import BlockId, Geometry, Heads, InstanceId, TransferId

if TYPE_CHECKING:
    from memserve.ops.views import Rows


class Completion(msgspec.Struct, frozen=True):
    """One transfer has ended: the link neither reads nor writes any block for it any more."""

    transfer_id: TransferId
    size_bytes: int
    """Counted by what was written, not by what was asked for."""
    seconds: float
    """From `send` to the end."""
    error: str | None = None


class Link(Protocol):
    """One direction to one peer. Not thread-safe: one thread makes all calls."""

    @property
    def kind(self) -> str:
        """`shm`, …: as shown in the status."""
        ...

    def send(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        """Start writing own block `source_ids[i]` into the peer's block `target_ids[i]`, all `i`.

        At least one block; exactly one completion follows, also if anything is wrong.
        """
        ...

    def poll(self) -> list[Completion]:
        """Make progress for a bounded time; what has ended since the last call."""
        ...

    def cancel(self, transfer_id: TransferId) -> None:
        """End the transfer soon, with an error. Its completion says when that has happened."""
        ...

    def close(self, *, is_lost: bool = False) -> None:
        """Stop everything; on return the link touches no memory. No completions follow.

        `is_lost`: this life of the peer is over. On return, and from then on, nothing of it writes
        here either, by a two-sided link.
        """
        ...


@runtime_checkable
class LayerLink(Link, Protocol):
    """A link that can send a block's layers one by one, as they are computed."""

    def send_layer(
        self,
        transfer_id: TransferId,
        layer: int,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        """As `send`, for the pages of one layer, which are read as the work queued so far on the
        device leaves them.

        May be called once for each layer under the same id: each call has its own completion.
        """
        ...


class Rank(msgspec.Struct, frozen=True):
    """One rank of one life of an instance."""

    instance: InstanceId
    epoch: int
    rank: int


class RankPeer(msgspec.Struct, frozen=True):
    """One rank of a peer, as one rank of this instance writes to it: what a kind of link opens.

    The heads are those that both ranks have: `own_heads` of this rank's pages go into `peer_heads`
    of the peer's, of every block that is sent. None: all of them, the usual case of equal ranks.
    `heads.rows_of` says which rows of a page that is, on either side.
    """

    peer: InstanceId
    peer_epoch: int
    geometry: Geometry
    """Of that rank of the peer."""
    address: str
    """Where its memory is, in the words of the link's kind."""
    own_heads: Heads | None = None
    peer_heads: Heads | None = None


def rank_peer(kind: str, peer: PeerJoined, rank: int) -> RankPeer:
    """Rank `rank` of the peer, all heads. Raises: TransferError if it has no such memory."""
    addresses = peer.addresses.get(kind, ())
    if rank >= len(addresses):
        offered = ", ".join(sorted(peer.addresses)) or "none"
        raise TransferError(
            f"rank {rank} of {peer.peer} has no memory for a link of kind {kind};"
            f" {peer.peer} offers: {offered}"
        )
    geometry = msgspec.structs.replace(peer.geometry, tp_rank=rank)
    return RankPeer(peer.peer, peer.peer_epoch, geometry, addresses[rank])


class LinkOpener(Protocol):
    """Opens and warms up the link to a peer that has joined."""

    def __call__(self, peer: PeerJoined) -> Link:
        """Raises: TransferError (the peer's memory cannot be reached from here)."""
        ...


def require_compatible(
    own: Geometry, peer: Geometry, own_name: InstanceId, peer_name: InstanceId
) -> None:
    """Whether a block of one means the same on the other. Raises: GeometryMismatchError.

    The ranks may differ in number: `head_split` says which heads go where, and refuses what cannot
    be split.
    """
    here, there = _meaning(own), _meaning(peer)
    if own.num_kv_heads == 1 or peer.num_kv_heads == 1:
        del here["page_order"], there["page_order"]  # one head's page is the same in either
    differences = [
        f"{name} is {here[name]!r} on {own_name} and {there[name]!r} on {peer_name}"
        for name in here
        if here[name] != there[name]
    ]
    if not differences:
        try:
            split_heads(own.model_kv_heads, own.tp_size, peer.tp_size)
        except GeometryMismatchError as error:
            degrees = f"TP {own.tp_size} on {own_name}, TP {peer.tp_size} on {peer_name}"
            differences = [f"{error} ({degrees})"]
    if differences:
        raise GeometryMismatchError(
            f"{own_name} and {peer_name} cannot exchange KV blocks: {'; '.join(differences)}"
        )


def _meaning(geometry: Geometry) -> dict[str, object]:
    """What must be equal on both sides, by its name for people."""
    return {
        "model": geometry.model,
        "dtype": geometry.dtype,
        "block_size": geometry.block_size,
        "num_layers": geometry.num_layers,
        "KV heads of the model": geometry.model_kv_heads,
        "bytes of a head in a page": geometry.page_bytes / geometry.num_kv_heads,
        "page_order": geometry.page_order,
    }


def require_blocks(
    source_ids: Sequence[BlockId],
    num_sources: int,
    target_ids: Sequence[BlockId],
    num_targets: int,
) -> None:
    """Whether these blocks exist, of so many on either side, and pair up. Raises: TransferError."""
    if len(source_ids) != len(target_ids):
        raise TransferError(f"{len(source_ids)} blocks cannot fill {len(target_ids)} blocks")
    require_existing(source_ids, num_sources, "source")
    require_existing(target_ids, num_targets, "target")


def require_existing(block_ids: Sequence[int], num_blocks: int, side: str) -> None:
    """Whether that side, of so many blocks, has these. Raises: TransferError."""
    if len(block_ids) and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        unknown = next(block for block in block_ids if not 0 <= block < num_blocks)
        raise TransferError(f"the {side} has no block {unknown}, only 0 to {num_blocks - 1}")


Piece = tuple[int, int, int]
"""Byte offset at the source, byte offset at the target, length: contiguous on both sides."""


def plan_pieces(
    source: Geometry,
    target: Geometry,
    source_ids: Sequence[BlockId],
    target_ids: Sequence[BlockId],
    rows: tuple[Rows, Rows] | None = None,
    *,
    is_discrete: bool = False,
) -> list[Piece]:
    """The fewest contiguous pieces that make up these blocks; pure.

    Aggregated blocks give one piece per run of neighbouring blocks. If the pages of a block lie
    apart on either side, each of the L layers gives its own pieces. With `rows`, only that part of
    each page goes, on either side (`heads.rows_of`), row by row. `is_discrete`: every page is a
    piece of its own, however it lies. Raises: TransferError, as `require_blocks`.
    """
    require_blocks(source_ids, source.num_blocks, target_ids, target.num_blocks)
    runs = _runs(source_ids, target_ids)
    layers = list(zip(source.layer_offsets, target.layer_offsets, repeat(source.page_bytes)))
    if rows is not None:
        layers = _rows_of_layers(source, target, *rows)
    elif not is_discrete and source.has_whole_blocks and target.has_whole_blocks:
        layers = [(source.layer_offsets[0], target.layer_offsets[0], source.block_bytes)]
    pieces: list[Piece] = []
    for source_offset, target_offset, size in layers:
        if is_discrete or not source.block_stride == target.block_stride == size:
            runs = _single(runs)
        pieces += (
            (
                source_offset + first_source * source.block_stride,
                target_offset + first_target * target.block_stride,
                length * size,
            )
            for first_source, first_target, length in runs
        )
    return pieces


def _rows_of_layers(
    source: Geometry, target: Geometry, source_rows: Rows, target_rows: Rows
) -> list[Piece]:
    """Every row of block 0, as offsets and size."""
    return [
        (
            source_layer + source_rows.offset + row * source_rows.stride,
            target_layer + target_rows.offset + row * target_rows.stride,
            source_rows.size_bytes,
        )
        for source_layer, target_layer in zip(
            source.layer_offsets, target.layer_offsets, strict=True
        )
        for row in range(source_rows.count)
    ]


_Run = tuple[int, int, int]  # first source block, first target block, number of blocks


def _runs(source_ids: Sequence[int], target_ids: Sequence[int]) -> list[_Run]:
    """Pairs merged where both sides go on by one."""
    runs: list[_Run] = []
    first_source = first_target = length = 0
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        if length and source_id == first_source + length and target_id == first_target + length:
            length += 1
            continue
        if length:
            runs.append((first_source, first_target, length))
        first_source, first_target, length = source_id, target_id, 1
    if length:
        runs.append((first_source, first_target, length))
    return runs


def _single(runs: Sequence[_Run]) -> list[_Run]:
    """The same pairs, one by one."""
    return [
        (first_source + i, first_target + i, 1)
        for first_source, first_target, length in runs
        for i in range(length)
    ]
