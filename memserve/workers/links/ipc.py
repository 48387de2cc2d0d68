"""Link to an instance on a GPU of this host: its HBM is mapped here and written by copy engines.

One-sided. `send` queues all copies of a transfer at once on streams of the link's own, beside the
engine's compute stream, and `poll` asks events whether they are done; nothing here waits for the
GPU but `close`.

When the source is complete. KV is sent after the engine has processed the outputs of the step that
wrote it: when the request has ended here, or part by part (`early.py`). Those outputs reach the
host through an event behind the step's last kernel, so all KV of that step and of earlier ones is
in memory by then, also with asynchronous scheduling: the step that is in flight meanwhile writes to
no full block of the request (`compat.complete_tokens` leaves its tokens out), and vLLM frees blocks
that it may write only when it has ended. So the copies wait for no event of the compute stream;
they would wait for the next requests' prefill. Only `send_layer`, which is called from inside a
step, waits for what the engine has queued by then.

When the target is complete. The events of the copies lie behind the peer's memory having been
written. `Sent` is said after that, and the receiver launches kernels that read the blocks after it
has heard so: it needs no fence of its own.

Collaborators: `gpu_memory.py` has both buffers, `ops/blocks.py` the copies; the paper: section 4.2.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch

from memserve.errors import TransferError
from memserve.ops.blocks import BlockOps, CudaBlockOps, Method
from memserve.ops.build import BlockCopyLibrary
from memserve.ops.device_memory import DeviceMemory
from memserve.ops.views import BlockView, Rows
from memserve.types import BlockId, Geometry, TransferId, TransferStyle
from memserve.workers.gpu_memory import KIND, GpuBuffer, PeerGpuBuffer
from memserve.workers.links.base import Completion, RankPeer, require_blocks
from memserve.workers.links.heads import rows_of

logger = logging.getLogger(__name__)

NUM_STREAMS = 2
"""Two streams keep two copy engines busy: one alone leaves a tenth of NVLink unused."""
SPLIT_BYTES = 128 << 20
"""Shorter transfers use one stream: a second call takes the host longer than it gains."""
ENGINE_RUN_BYTES = 128 << 10
"""Copy engines pay for each contiguous run; pieces shorter than this are a kernel's work."""
_WARM_BLOCK = 0
"""vLLM's null block: it stands in for blocks that are not needed, and nobody reads it."""


class Event(Protocol):
    """A point in a stream's queue."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class _Job(msgspec.Struct):
    transfer_id: TransferId
    started_s: float
    size_bytes: int = 0
    events: list[Event] = []
    error: str | None = None


class IpcLink:
    """Copies blocks of `source` into `target`; several transfers may be under way."""

    def __init__(
        self,
        source: torch.Tensor,
        source_geometry: Geometry,
        target: PeerGpuBuffer,
        target_geometry: Geometry,
        *,
        ops: BlockOps,
        streams: Sequence[torch.cuda.Stream],
        rows: tuple[Rows, Rows] | None = None,
        compute_stream: Callable[[], torch.cuda.Stream] = torch.cuda.current_stream,
        is_discrete: bool = False,
        split_bytes: int = SPLIT_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Takes over `target`, not `source`. `rows`: the part of each page that goes; None: all.

        `compute_stream`: the engine's, for `send_layer`. `is_discrete`: `ops` gets the layers one
        by one. Raises: TransferError if a geometry exceeds its buffer (the caller keeps `target`
        then).
        """
        own_rows, peer_rows = rows or (None, None)
        self._source = BlockView.of(source_geometry, source, own_rows)
        self._view: BlockView | None = BlockView.of(target_geometry, target.tensor, peer_rows)
        self._source_layers = _layers(source_geometry, source, own_rows)
        self._target_layers = _layers(target_geometry, target.tensor, peer_rows)
        self._compute_stream = compute_stream
        self._is_discrete = is_discrete
        self._split_bytes = split_bytes
        self._target = target
        self._ops = ops
        self._streams = list(streams)
        self._clock = clock
        self._jobs: deque[_Job] = deque()

    @property
    def kind(self) -> str:
        return KIND

    def warm_up(self) -> float:
        """Copy one block on each stream, and wait; returns how many seconds that took.

        The first copy to a peer maps its memory, which takes up to a quarter of a second.
        """
        started_s = self._clock()
        block = [_WARM_BLOCK]
        for stream in self._streams:
            self._ops.copy_blocks(self._source, self._open_view(), block, block, stream=stream)
            stream.record_event().synchronize()
        return self._clock() - started_s

    def send(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        job = _Job(transfer_id, self._clock())
        self._jobs.append(job)
        try:
            self._queue(job, source_ids, target_ids)
        except TransferError as error:
            job.error = str(error)

    def send_layer(
        self,
        transfer_id: TransferId,
        layer: int,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        """Behind what the engine has queued so far: the layer's kernels write the KV."""
        job = _Job(transfer_id, self._clock())
        self._jobs.append(job)
        stream = self._streams[layer % len(self._streams)]
        try:
            self._require_blocks(source_ids, target_ids)
            stream.wait_stream(self._compute_stream())
            views = [(self._source_layers[layer], self._target_layers[layer])]
            self._copy(job, views, source_ids, target_ids, stream)
        except TransferError as error:
            job.error = str(error)

    def poll(self) -> list[Completion]:
        """Whatever the GPU has finished, in any order."""
        done = [job for job in self._jobs if all(event.query() for event in job.events)]
        for job in done:
            self._jobs.remove(job)
        return [self._completion(job) for job in done]

    def cancel(self, transfer_id: TransferId) -> None:
        """What is queued cannot be recalled: it ends by itself, within milliseconds."""
        for job in self._jobs:
            if job.transfer_id == transfer_id:
                job.error = "cancelled"

    def close(self, *, is_lost: bool = False) -> None:
        """Waits for the copies under way. A GPU that hangs keeps this waiting until the cluster
        manager ends the worker, which sends no heartbeat meanwhile."""
        jobs, self._jobs = self._jobs, deque()
        for job in jobs:
            for event in job.events:
                event.synchronize()
        self._view = None
        self._target_layers = []
        try:
            self._target.close()
        except TransferError as error:  # its owner is gone, and there is nothing left to end
            logger.warning("%s", error)

    def _queue(
        self, job: _Job, source_ids: Sequence[BlockId], target_ids: Sequence[BlockId]
    ) -> None:
        """Divide the blocks among the streams, each a run of neighbours in the request; a few of
        them stay together."""
        self._require_blocks(source_ids, target_ids)
        views = [(self._source, self._open_view())]
        if self._is_discrete:
            views = list(zip(self._source_layers, self._target_layers, strict=True))
        is_short = len(source_ids) * self._source.block_bytes < self._split_bytes
        step = -(-len(source_ids) // (1 if is_short else len(self._streams)))
        for part, stream in enumerate(self._streams):
            chosen = slice(part * step, (part + 1) * step)
            if not source_ids[chosen]:
                break
            self._copy(job, views, source_ids[chosen], target_ids[chosen], stream)

    def _copy(
        self,
        job: _Job,
        views: Sequence[tuple[BlockView, BlockView]],
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
        stream: torch.cuda.Stream,
    ) -> None:
        try:
            for source, target in views:
                job.size_bytes += self._ops.copy_blocks(
                    source, target, source_ids, target_ids, stream=stream
                )
        finally:  # a part may have been queued before a fault
            job.events.append(stream.record_event())

    def _require_blocks(self, source_ids: Sequence[BlockId], target_ids: Sequence[BlockId]) -> None:
        """All of them, before any part is queued."""
        num_targets = self._open_view().num_blocks
        require_blocks(source_ids, self._source.num_blocks, target_ids, num_targets)

    def _open_view(self) -> BlockView:
        if self._view is None:
            raise TransferError("the link is closed")
        return self._view

    def _completion(self, job: _Job) -> Completion:
        seconds = self._clock() - job.started_s
        return Completion(job.transfer_id, job.size_bytes, seconds, job.error)


def open_ipc(
    source: GpuBuffer,
    source_geometry: Geometry,
    peer: RankPeer,
    memory: DeviceMemory,
    device: torch.device,
    library: BlockCopyLibrary,
    style: TransferStyle,
) -> IpcLink:
    """Map the peer's buffer on `device`, this instance's GPU, and warm the way up.

    Raises: TransferError (no such memory, no way there).
    """
    rows = rows_of(source_geometry, peer)
    target = PeerGpuBuffer(memory, peer.address)
    try:
        link = IpcLink(
            source.tensor,
            source_geometry,
            target,
            peer.geometry,
            ops=ipc_ops(library, source_geometry, peer.geometry, rows, style),
            rows=rows,
            streams=[torch.cuda.Stream(device) for _ in range(NUM_STREAMS)],
            compute_stream=lambda: torch.cuda.current_stream(device),
            is_discrete=style is TransferStyle.DISCRETE,
        )
        seconds = link.warm_up()
    except TransferError:
        target.close()
        raise
    logger.info("the way to %s was warm after %.3f s", peer.peer, seconds)
    return link


def ipc_ops(
    library: BlockCopyLibrary,
    source: Geometry,
    target: Geometry,
    rows: tuple[Rows, Rows] | None,
    style: TransferStyle,
) -> BlockOps:
    """Copy engines where blocks are long enough in one piece: they leave the SMs to the engine."""
    is_whole = source.has_whole_blocks and target.has_whole_blocks
    run_bytes = source.page_bytes
    if is_whole and style is not TransferStyle.LAYER:
        run_bytes = source.block_bytes
    if rows is not None:
        run_bytes = rows[0].size_bytes
    method = Method.BATCH if run_bytes >= ENGINE_RUN_BYTES else Method.AUTO
    if style is TransferStyle.DISCRETE:
        method = Method.COPIES
    return CudaBlockOps(library, method=method)


def _layers(geometry: Geometry, memory: torch.Tensor, rows: Rows | None) -> list[BlockView]:
    """A view of each layer alone."""
    layers = range(geometry.num_layers)
    return [BlockView.of(geometry.only(layer), memory, rows) for layer in layers]
