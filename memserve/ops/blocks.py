"""Copies of KV blocks: between pools, to and from staging memory, between HBM and DRAM.

A `BlockView` (`views.py`) says where the rows of a pool's blocks lie; every operation is a copy
between two views, whatever their layouts:

    copy_blocks      scattered blocks → scattered blocks, of this GPU or of a peer mapped here
    gather_blocks    scattered blocks → contiguous staging memory
    scatter_blocks   contiguous staging memory → scattered blocks
    swap_blocks      HBM ⇄ pinned DRAM

Where two instances differ in tensor parallelism, each side's view takes the heads that both have
(`head_rows`), and the same four operations copy that slice.

`TorchBlockOps` is the reference and runs anywhere; `CudaBlockOps` queues kernels or copy engines
on a stream (`cuda/`, built by `build.py`). Both check their arguments here, on the host: the
kernels do not.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import torch

from memserve.errors import TransferError
from memserve.ops.build import BlockCopyLibrary, Copy, Side, open_library
from memserve.ops.views import BlockView

Ids: TypeAlias = "array[int]"
"""Of 32 bits each, as the kernels take them."""


class BlockOps(ABC):
    """The operations; what they are given is checked here, how they run is the subclass's matter.

    Each returns the number of bytes copied. On a GPU the copy is only queued: both buffers must
    live, and the source must not be written, until the stream has passed it. `stream` is the
    current stream by default; it belongs to the GPU that the blocks come from (for a swap, to the
    GPU). Raises: TransferError for anything that does not fit together, before anything is copied.
    """

    def copy_blocks(
        self,
        source: BlockView,
        target: BlockView,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> int:
        """Copy block `source_ids[i]` into block `target_ids[i]`, all `i`, in no order.

        The target may be memory of another GPU of this process, or another process's memory that
        is mapped here.
        """
        self._require_media(source, target, is_swap=False)
        return self._check_and_run(source, target, source_ids, target_ids, stream)

    def gather_blocks(
        self,
        source: BlockView,
        source_ids: Sequence[int],
        staging: torch.Tensor,
        *,
        is_layer_first: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> int:
        """Pack blocks into the front of `staging`, in the order given (see `BlockView.staging`)."""
        if not len(source_ids):
            return 0
        target = source.staging(staging, len(source_ids), is_layer_first=is_layer_first)
        return self.copy_blocks(source, target, source_ids, range(len(source_ids)), stream=stream)

    def scatter_blocks(
        self,
        staging: torch.Tensor,
        target: BlockView,
        target_ids: Sequence[int],
        *,
        is_layer_first: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> int:
        """Unpack the front of `staging` into blocks: the way back from `gather_blocks`."""
        if not len(target_ids):
            return 0
        source = target.staging(staging, len(target_ids), is_layer_first=is_layer_first)
        return self.copy_blocks(source, target, range(len(target_ids)), target_ids, stream=stream)

    def swap_blocks(
        self,
        source: BlockView,
        target: BlockView,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        *,
        stream: torch.cuda.Stream | None = None,
        spares_engine: bool = False,
    ) -> int:
        """`copy_blocks` between a GPU's memory and pinned host memory, either way.

        `spares_engine`: by the way that is least in the way of an engine's steps, not the fastest.
        """
        self._require_media(source, target, is_swap=True)
        return self._check_and_run(source, target, source_ids, target_ids, stream, spares_engine)

    def _check_and_run(
        self,
        source: BlockView,
        target: BlockView,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        stream: torch.cuda.Stream | None,
        spares_engine: bool = False,
    ) -> int:
        _require_same_rows(source, target)
        sources = _checked_ids(source_ids, source.num_blocks, "source")
        targets = _checked_ids(target_ids, target.num_blocks, "target")
        _require_pairs(source, target, sources, targets)
        if len(sources):
            self._run(source, target, sources, targets, stream, spares_engine)
        return len(sources) * source.block_bytes

    @abstractmethod
    def _require_media(self, source: BlockView, target: BlockView, *, is_swap: bool) -> None:
        """Whether this implementation can reach both memories."""

    @abstractmethod
    def _run(
        self,
        source: BlockView,
        target: BlockView,
        source_ids: Ids,
        target_ids: Ids,
        stream: torch.cuda.Stream | None,
        spares_engine: bool,
    ) -> None:
        """Copy at least one block; all arguments are good."""


class TorchBlockOps(BlockOps):
    """The reference: indexing in torch, a layer at a time, for memory of any kind."""

    def _require_media(self, source: BlockView, target: BlockView, *, is_swap: bool) -> None:
        pass

    @torch.inference_mode()
    def _run(
        self,
        source: BlockView,
        target: BlockView,
        source_ids: Ids,
        target_ids: Ids,
        stream: torch.cuda.Stream | None,
        spares_engine: bool,
    ) -> None:
        pairs = list(zip(source_ids, target_ids, strict=True))
        with torch.cuda.stream(stream):
            for layer in range(source.num_layers):
                blocks, places = source.layer(layer), target.layer(layer)
                # Not by one `index_copy_`, which is fifty times as slow for bytes on the CPU.
                for source_id, target_id in pairs:
                    places[target_id].copy_(blocks[source_id])


class Method(enum.IntEnum):
    """How `CudaBlockOps` copies: `MemserveMethod` of `cuda/block_copy.h`, which says more."""

    AUTO = 0
    VECTOR = 1
    BULK = 2
    COPIES = 3
    BATCH = 4


MAX_SMS = 12
"""Of an H200's 132, 10 fill NVLink."""
SWAP_SMS = 4
"""That many fill the host link."""
ENGINE_RUN_BYTES = 1 << 20
"""Copy engines pay for each contiguous run; from this size on they are the faster way from and to
DRAM. Outwards they also spare the engine: a kernel that writes to host memory holds up the end of
every other kernel. Inwards a kernel does: on a copy engine the small copies of the engine's next
step would wait behind these. `bench/swap_vs_tpot.py` shows both."""


class CudaBlockOps(BlockOps):
    """Kernels and copy engines, by the library of `cuda/`. One thread makes all calls."""

    def __init__(
        self,
        library: BlockCopyLibrary,
        *,
        max_sms: int = MAX_SMS,
        swap_sms: int = SWAP_SMS,
        method: Method = Method.AUTO,
        swap_method: Method = Method.AUTO,
    ) -> None:
        """`max_sms`, `swap_sms`: how many multiprocessors a kernel may take, at least 1."""
        if min(max_sms, swap_sms) < 1:
            raise TransferError(
                f"max_sms is {max_sms} and swap_sms {swap_sms}; a copy needs at least 1"
            )
        self._library = library
        self._max_sms = max_sms
        self._swap_sms = swap_sms
        self._method = method
        self._swap_method = swap_method
        self._reachable: set[tuple[int, int]] = set()
        self._counters: dict[tuple[int, int], torch.Tensor] = {}

    def _require_media(self, source: BlockView, target: BlockView, *, is_swap: bool) -> None:
        sides = {"source": source, "target": target}
        on_host = [name for name, view in sides.items() if not view.memory.is_cuda]
        if not is_swap and on_host:
            raise TransferError(f"the {on_host[0]}'s blocks are in host memory: swap them instead")
        if is_swap and len(on_host) != 1:
            raise TransferError("a swap is between a GPU's memory and host memory")
        if is_swap and not sides[on_host[0]].memory.is_pinned():
            raise TransferError(f"the {on_host[0]}'s host memory is not pinned")

    def _run(
        self,
        source: BlockView,
        target: BlockView,
        source_ids: Ids,
        target_ids: Ids,
        stream: torch.cuda.Stream | None,
        spares_engine: bool,
    ) -> None:
        is_swap = source.memory.is_cuda != target.memory.is_cuda
        gpu = source.memory.device if source.memory.is_cuda else target.memory.device
        stream = stream or torch.cuda.current_stream(gpu)
        if stream.device_index != gpu.index:
            raise TransferError(f"the stream is one of GPU {stream.device_index}, not {gpu.index}")
        if not is_swap:
            self._reach(gpu.index, target.memory.device.index)
        copy = Copy(
            source=_side(source, source_ids),
            target=_side(target, target_ids),
            row_bytes=source.rows.size_bytes,
            num_rows=source.rows.count,
            num_layers=source.num_layers,
            num_blocks=len(source_ids),
            counter=self._counter(stream),
        )
        method = self._method
        if is_swap:
            method = self._swap_method_for(source, target, spares_engine)
        max_sms = self._swap_sms if is_swap else self._max_sms
        self._library.copy_blocks(copy, method, max_sms, gpu.index, stream.cuda_stream)

    def _swap_method_for(self, source: BlockView, target: BlockView, spares_engine: bool) -> Method:
        if self._swap_method is not Method.AUTO:
            return self._swap_method
        is_long = min(source.run_bytes, target.run_bytes) >= ENGINE_RUN_BYTES
        is_inwards = target.memory.is_cuda
        return Method.AUTO if not is_long or (is_inwards and spares_engine) else Method.BATCH

    def _counter(self, stream: torch.cuda.Stream) -> int | None:
        """The address of the stream's counter: its kernels follow each other and can share one."""
        key = (stream.device_index, stream.cuda_stream)
        if key not in self._counters:
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    return None  # what is allocated now belongs to the graph
                self._counters[key] = torch.zeros(1, dtype=torch.int32, device=stream.device)
        return int(self._counters[key].data_ptr())

    def _reach(self, device: int, peer: int) -> None:
        """A kernel that touches a peer's memory without leave would break the CUDA context."""
        if device != peer and (device, peer) not in self._reachable:
            self._library.enable_peer_access(device, peer)
            self._reachable.add((device, peer))


def block_ops(device: torch.device) -> BlockOps:
    """The operations for blocks in the memory of `device`. Raises: StartError (see `build.py`)."""
    if device.type != "cuda":
        return TorchBlockOps()
    return CudaBlockOps(library_for(device))


def library_for(device: torch.device) -> BlockCopyLibrary:
    """The kernels for a GPU, built if need be. Asks the compiler for its version: call it once.

    Raises: StartError.
    """
    major, minor = torch.cuda.get_device_capability(device)
    return open_library(f"sm_{major}{minor}")


def _side(view: BlockView, block_ids: Ids) -> Side:
    return Side(
        base=view.base,
        block_stride=view.block_stride,
        row_stride=view.rows.stride,
        layer_offsets=view.offsets_address,
        block_ids=block_ids.buffer_info()[0],
    )


def _require_same_rows(source: BlockView, target: BlockView) -> None:
    for name, own, other in (
        ("layers", source.num_layers, target.num_layers),
        ("rows in a page", source.rows.count, target.rows.count),
        ("bytes in a row", source.rows.size_bytes, target.rows.size_bytes),
    ):
        if own != other:
            raise TransferError(f"the source has {own} {name}, the target {other}")


def _checked_ids(block_ids: Sequence[int], num_blocks: int, side: str) -> Ids:
    """As an array, if there are such blocks. Raises: TransferError."""
    # Without numpy: for the few blocks of most copies its calls are the greater part of the time.
    if len(block_ids) and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        bad = next(block for block in block_ids if not 0 <= block < num_blocks)
        raise TransferError(f"the {side} has no block {bad}, only 0 to {num_blocks - 1}")
    return array("i", block_ids)


def _require_pairs(source: BlockView, target: BlockView, sources: Ids, targets: Ids) -> None:
    """One target for each source, each written once, and nothing both read and written."""
    if len(sources) != len(targets):
        raise TransferError(f"{len(sources)} blocks cannot fill {len(targets)} blocks")
    seen = set(targets)
    if len(seen) != len(targets):
        twice = next(block for block in targets if targets.count(block) > 1)
        raise TransferError(f"target block {twice} is named twice")
    if source.base == target.base:
        both = seen.intersection(sources)
        if both:
            raise TransferError(f"block {min(both)} of one buffer is to be read and written")
