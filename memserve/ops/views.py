"""Where KV blocks lie, and which part of them is meant: what the operations on blocks copy between.

Collaborators: `blocks.py` copies between two views. Layouts have no names here: a view is made of
the numbers of a `Geometry`, or of contiguous staging memory.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from memserve.errors import TransferError
from memserve.types import Geometry


class PageOrder(enum.Enum):
    """What a page's outer dimension is. K and V of one head and token always lie together."""

    HEADS_FIRST = "HNC"
    """[heads, block_size, K|V]: a range of heads is one row."""
    TOKENS_FIRST = "NHC"
    """[block_size, heads, K|V]: a range of heads is one row per token."""


class Rows(msgspec.Struct, frozen=True):
    """The part of each page that is meant: row `r` starts `offset + r * stride` bytes into it."""

    count: int
    size_bytes: int
    stride: int
    offset: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all rows of one page."""
        return self.count * self.size_bytes


def head_rows(geometry: Geometry, first_head: int, num_heads: int, order: PageOrder) -> Rows:
    """The rows that hold heads `first_head` to `first_head + num_heads - 1` of this rank.

    Raises: TransferError for heads that the rank does not have.
    """
    if not (0 <= first_head < first_head + num_heads <= geometry.num_kv_heads):
        raise TransferError(
            f"{num_heads} heads from head {first_head} on are asked for; "
            f"rank {geometry.tp_rank} has heads 0 to {geometry.num_kv_heads - 1}"
        )
    per_head, rest = divmod(geometry.page_bytes, geometry.block_size * geometry.num_kv_heads)
    if rest or not per_head:
        raise TransferError(
            f"a page of {geometry.page_bytes} bytes cannot hold {geometry.block_size} tokens "
            f"of {geometry.num_kv_heads} heads"
        )
    if order is PageOrder.HEADS_FIRST:
        per_head *= geometry.block_size
        size = num_heads * per_head
        return Rows(count=1, size_bytes=size, stride=size, offset=first_head * per_head)
    return Rows(
        count=geometry.block_size,
        size_bytes=num_heads * per_head,
        stride=geometry.num_kv_heads * per_head,
        offset=first_head * per_head,
    )


class BlockView:
    """Rows of KV blocks in one buffer.

    Row `r` of layer `l` of block `b` starts at byte
    `layer_offsets[l] + b * block_stride + rows.offset + r * rows.stride` of `memory`.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        *,
        num_blocks: int,
        block_stride: int,
        layer_offsets: Sequence[int],
        rows: Rows,
    ) -> None:
        """`memory` is a contiguous tensor of any type and shape. Raises: TransferError."""
        if not memory.is_contiguous():
            raise TransferError("a view of blocks needs contiguous memory")
        self.memory = memory.reshape(-1).view(torch.uint8)
        """Shape `[bytes]`."""
        self.num_blocks = num_blocks
        self.block_stride = block_stride
        self.rows = rows
        self.row_offsets = np.array(layer_offsets, dtype=np.int64) + rows.offset
        """Where the first row of each layer of block 0 starts, shape `[num_layers]`."""
        self.base = self.memory.data_ptr()
        self.offsets_address = int(self.row_offsets.ctypes.data)
        """Of `row_offsets`, for native code."""
        self._require_inside()

    @classmethod
    def of(cls, geometry: Geometry, memory: torch.Tensor, rows: Rows | None = None) -> BlockView:
        """All blocks of a KV cache; `rows` is the part of each page, all of it by default."""
        size = geometry.page_bytes
        whole = Rows(count=1, size_bytes=size, stride=size)
        return cls(
            memory,
            num_blocks=geometry.num_blocks,
            block_stride=geometry.block_stride,
            layer_offsets=geometry.layer_offsets,
            rows=rows or whole,
        )

    def staging(self, memory: torch.Tensor, num_blocks: int, *, is_layer_first: bool) -> BlockView:
        """Contiguous memory for `num_blocks` of these blocks, `[blocks, layers, page]` or, layer
        first, `[layers, blocks, page]`. Raises: TransferError (too small)."""
        page = self.rows.total_bytes
        block_stride, layer_stride = page * self.num_layers, page
        if is_layer_first:
            block_stride, layer_stride = page, page * num_blocks
        return BlockView(
            memory,
            num_blocks=num_blocks,
            block_stride=block_stride,
            layer_offsets=[layer * layer_stride for layer in range(self.num_layers)],
            rows=Rows(self.rows.count, self.rows.size_bytes, self.rows.size_bytes),
        )

    @property
    def num_layers(self) -> int:
        return len(self.row_offsets)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block that the view shows."""
        return self.rows.total_bytes * self.num_layers

    @property
    def run_bytes(self) -> int:
        """Bytes of one block that lie together: all of it, a page's rows, or one row."""
        rows = self.rows
        if rows.count > 1 and rows.stride != rows.size_bytes:
            return rows.size_bytes
        is_whole = bool(np.all(np.diff(self.row_offsets) == rows.total_bytes))
        return self.block_bytes if is_whole else rows.total_bytes

    def layer(self, layer: int) -> torch.Tensor:
        """The rows of one layer, shape `[num_blocks, rows, row bytes]`; shares the memory."""
        return self.memory.as_strided(
            (self.num_blocks, self.rows.count, self.rows.size_bytes),
            (self.block_stride, self.rows.stride, 1),
            self.memory.storage_offset() + int(self.row_offsets[layer]),
        )

    def _require_inside(self) -> None:
        rows = self.rows
        counts = {
            "num_blocks": self.num_blocks,
            "layers": self.num_layers,
            "rows.count": rows.count,
            "rows.size_bytes": rows.size_bytes,
            "block_stride": self.block_stride,
        }
        for name, count in counts.items():
            if count < 1:
                raise TransferError(f"a view of blocks needs {name} of at least 1, not {count}")
        if rows.count > 1 and rows.stride < rows.size_bytes:
            raise TransferError(f"rows of {rows.size_bytes} bytes overlap at stride {rows.stride}")
        start = int(self.row_offsets.min())
        end = (
            int(self.row_offsets.max())
            + (self.num_blocks - 1) * self.block_stride
            + (rows.count - 1) * rows.stride
            + rows.size_bytes
        )
        if start < 0 or end > self.memory.numel():
            raise TransferError(
                f"the blocks cover bytes {start} to {end} of a buffer of {self.memory.numel()}"
            )
