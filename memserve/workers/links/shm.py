"""Link to an instance on the same host: its KV buffer is mapped here and written by plain copies.

The copies run in the caller's thread, a bounded number of bytes per `poll`, so that a long prompt's
KV does not hold the engine's next step up. A mapping outlives the peer's process: writing to a dead
peer is harmless and pointless.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from memserve.errors import TransferError
from memserve.ops.views import Rows
from memserve.types import COPIED_PORTION_BYTES, BlockId, Geometry, TransferId
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.links.base import Completion, Piece, RankPeer, plan_pieces
from memserve.workers.links.heads import rows_of

KIND = "shm"
"""Key of the buffer's address in `Ready.addresses` and `PeerJoined.addresses`."""


class _Job(msgspec.Struct):
    transfer_id: TransferId
    pieces: deque[Piece]
    started_s: float
    size_bytes: int = 0
    error: str | None = None


class ShmLink:
    """Copies blocks of `source` into `target`, one transfer after the other."""

    def __init__(
        self,
        source: KvBuffer,
        source_geometry: Geometry,
        target: KvBuffer,
        target_geometry: Geometry,
        *,
        rows: tuple[Rows, Rows] | None = None,
        is_discrete: bool = False,
        poll_bytes: int = COPIED_PORTION_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Takes over `target`, not `source`. `rows`: the part of each page that goes; None: all.
        `is_discrete`: each page is a copy of its own.

        Raises: TransferError if a geometry exceeds its buffer (the caller keeps `target` then).
        """
        _require_inside(source_geometry, source)
        _require_inside(target_geometry, target)
        self._source = source
        self._source_geometry = source_geometry
        self._target = target
        self._target_geometry = target_geometry
        self._is_discrete = is_discrete
        self._rows = rows
        self._poll_bytes = poll_bytes
        self._clock = clock
        self._jobs: deque[_Job] = deque()

    @property
    def kind(self) -> str:
        return KIND

    def send(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        self._queue(transfer_id, source_ids, target_ids, layer=None)

    def send_layer(
        self,
        transfer_id: TransferId,
        layer: int,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        """Copies here and now: this is called as soon as the layer is computed."""
        job = self._queue(transfer_id, source_ids, target_ids, layer)
        if job.error is None:
            self._copy(job, budget=sys.maxsize)

    def poll(self) -> list[Completion]:
        """Copies at most `poll_bytes`, the oldest transfer first."""
        done: list[Completion] = []
        budget = self._poll_bytes
        while self._jobs:
            job = self._jobs[0]
            if job.error is None:
                budget -= self._copy(job, budget)
            if job.pieces:
                break  # out of budget
            self._jobs.popleft()
            seconds = self._clock() - job.started_s
            done.append(Completion(job.transfer_id, job.size_bytes, seconds, job.error))
        return done

    def cancel(self, transfer_id: TransferId) -> None:
        for job in self._jobs:
            if job.transfer_id == transfer_id:
                job.pieces.clear()
                job.error = "cancelled"

    def close(self, *, is_lost: bool = False) -> None:
        self._jobs.clear()
        self._target.close()

    def _queue(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
        layer: int | None,
    ) -> _Job:
        job = _Job(transfer_id, deque(), self._clock())
        source, target = self._source_geometry, self._target_geometry
        if layer is not None:
            source, target = source.only(layer), target.only(layer)
        try:
            job.pieces.extend(
                plan_pieces(
                    source,
                    target,
                    source_ids,
                    target_ids,
                    self._rows,
                    is_discrete=self._is_discrete,
                )
            )
        except TransferError as error:
            job.error = str(error)
        self._jobs.append(job)
        return job

    def _copy(self, job: _Job, budget: int) -> int:
        """Copy pieces until the budget is used up; returns the number of bytes written."""
        source, target = self._source.array, self._target.array
        written = 0
        while job.pieces and written < budget:
            source_offset, target_offset, length = job.pieces.popleft()
            size = min(length, budget - written)
            target[target_offset : target_offset + size] = source[
                source_offset : source_offset + size
            ]
            written += size
            if size < length:
                job.pieces.appendleft((source_offset + size, target_offset + size, length - size))
        job.size_bytes += written
        return written


def open_shm(
    source: KvBuffer, source_geometry: Geometry, peer: RankPeer, *, is_discrete: bool = False
) -> ShmLink:
    """Map the peer's buffer. Raises: TransferError."""
    rows = rows_of(source_geometry, peer)
    target = KvBuffer.open(peer.address)
    try:
        return ShmLink(
            source, source_geometry, target, peer.geometry, rows=rows, is_discrete=is_discrete
        )
    except TransferError:
        target.close()
        raise


def _require_inside(geometry: Geometry, buffer: KvBuffer) -> None:
    last = (geometry.num_blocks - 1) * geometry.block_stride + geometry.page_bytes
    need = max(geometry.layer_offsets) + last
    if need > buffer.size_bytes or min(geometry.layer_offsets) < 0:
        raise TransferError(
            f"the geometry covers {need} bytes, but {buffer.address} has {buffer.size_bytes}"
        )
