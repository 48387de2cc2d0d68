"""Link between two byte arrays of one process, which fails on command. For tests.

It keeps the contract of every link and copies page by page, without the planning of pieces that the
real links share, so that the contract suite compares two independent ways to the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memserve.types import BlockId, Geometry, TransferId
from memserve.workers.links.base import Completion


class _Job(msgspec.Struct):
    transfer_id: TransferId
    pairs: list[tuple[BlockId, BlockId]]
    layers: Sequence[int]
    size_bytes: int = 0
    error: str | None = None


class FakeLink:
    """Copies blocks of `source` into `target`; both are as large as their geometries say."""

    def __init__(
        self,
        source: bytearray | memoryview,
        source_geometry: Geometry,
        target: bytearray | memoryview,
        target_geometry: Geometry,
    ) -> None:
        self._source = memoryview(source)
        self._source_geometry = source_geometry
        self._target = memoryview(target)
        self._target_geometry = target_geometry
        self._jobs: list[_Job] = []
        self._is_held = False
        self._next_error: str | None = None
        self._missing_bytes = 0
        self._dead: str | None = None
        self.is_closed = False
        self.is_lost = False

    @property
    def kind(self) -> str:
        return "fake"

    # ── what a test does to it ────────────────────────────────────────────────────────────────

    def hold(self) -> None:
        """Write only the first half of a transfer's blocks, until `release`; cancels wait too."""
        self._is_held = True

    def release(self) -> None:
        """Let the transfers go on that `hold` stopped."""
        self._is_held = False

    def fail_next(self, reason: str) -> None:
        """The next transfer sent fails, with its first half written."""
        self._next_error = reason

    def lose_bytes(self, num_bytes: int) -> None:
        """The next transfer that ends reports so many bytes fewer."""
        self._missing_bytes = num_bytes

    def die(self, reason: str = "the peer is gone") -> None:
        """Nothing is written any more; all transfers fail, now and later."""
        self._dead = reason

    # ── Link ──────────────────────────────────────────────────────────────────────────────────

    def send(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        layers = range(self._source_geometry.num_layers)
        self._begin(transfer_id, layers, source_ids, target_ids)

    def send_layer(
        self,
        transfer_id: TransferId,
        layer: int,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        self._begin(transfer_id, [layer], source_ids, target_ids)

    def _begin(
        self,
        transfer_id: TransferId,
        layers: Sequence[int],
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        error, self._next_error = self._next_error, None
        pairs = list(zip(source_ids, target_ids, strict=False))
        job = _Job(transfer_id, pairs, layers, error=error)
        if not self._are_valid(source_ids, target_ids):
            job.pairs, job.error = [], "no such blocks"
        self._jobs.append(job)
        if self._dead is None:
            self._copy(job, keep=len(job.pairs) // 2)

    def poll(self) -> list[Completion]:
        done: list[Completion] = []
        for job in list(self._jobs):
            if self._is_held and self._dead is None:
                continue
            job.error = job.error or self._dead
            if job.error is None:
                self._copy(job, keep=0)
            self._jobs.remove(job)
            size_bytes = job.size_bytes - self._missing_bytes
            self._missing_bytes = 0
            done.append(Completion(job.transfer_id, size_bytes, 0.0, job.error))
        return done

    def cancel(self, transfer_id: TransferId) -> None:
        for job in self._jobs:
            if job.transfer_id == transfer_id:
                job.error = "cancelled"

    def close(self, *, is_lost: bool = False) -> None:
        self._jobs.clear()
        self.is_closed = True
        self.is_lost = is_lost

    # ──────────────────────────────────────────────────────────────────────────────────────────

    def _are_valid(self, source_ids: Sequence[BlockId], target_ids: Sequence[BlockId]) -> bool:
        return (
            len(source_ids) == len(target_ids)
            and all(0 <= b < self._source_geometry.num_blocks for b in source_ids)
            and all(0 <= b < self._target_geometry.num_blocks for b in target_ids)
        )

    def _copy(self, job: _Job, keep: int) -> None:
        """Write the job's blocks, save the last `keep`."""
        source, target = self._source_geometry, self._target_geometry
        size = source.page_bytes
        while len(job.pairs) > keep:
            source_id, target_id = job.pairs.pop(0)
            for layer in job.layers:
                begin = source.layer_offsets[layer] + source_id * source.block_stride
                to = target.layer_offsets[layer] + target_id * target.block_stride
                self._target[to : to + size] = self._source[begin : begin + size]
                job.size_bytes += size
