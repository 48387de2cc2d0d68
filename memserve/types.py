"""Names shared by every part of MemServe: ids, enums, and the geometry of a KV cache.

Imports nothing of the project. Ids are `NewType`s, so that a request id cannot be passed where an
instance id is meant.
"""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

RequestId = NewType("RequestId", str)
"""Minted once by the front end, unique for the life of the cluster."""

InstanceId = NewType("InstanceId", str)
"""`P0`, `D1`, `PD0`: the role and a number, the same over all lives of the instance."""

TransferId = NewType("TransferId", str)
"""Minted by the lifecycle: the request id and the direction (see `Direction`)."""

BlockId = NewType("BlockId", int)
"""Index of a KV block in an instance's pool."""

SlotId = NewType("SlotId", int)
"""Index of a KV block's place in an instance's host memory."""


COPYING_LINKS = frozenset({"shm"})
"""Kinds of links that copy in the thread of the sender's engine, a portion between two steps. On a
CPU, whose engine serves between two steps alone."""

COPIED_PORTION_BYTES = 32 << 20
"""3 ms at the 10 GB/s of one core; a decode step takes ten times as long."""


class Role(enum.Enum):
    """What an instance does for a request."""

    PREFILL = "P"
    DECODE = "D"
    COLOCATED = "PD"


class Caching(enum.Enum):
    """The paper's four milestones of context caching under disaggregation (section 5)."""

    NONE = "none"
    """PD-Basic: nothing is kept between requests."""
    PREFILL = "prefill"
    """PD-Caching-1: P keeps the prompts it computed."""
    DECODE = "decode"
    """PD-Caching-2: D keeps them too, with what it generated; only what D lacks is sent."""
    FULL = "full"
    """PD-Caching-3: D also gives the KV of generated tokens back to P."""

    @property
    def prefill_keeps(self) -> bool:
        return self is not Caching.NONE

    @property
    def decode_keeps(self) -> bool:
        return self in (Caching.DECODE, Caching.FULL)

    @property
    def decode_returns(self) -> bool:
        return self is Caching.FULL

    @property
    def fetches(self) -> bool:
        """P takes from other instances what it lacks. Not at `decode`: D's KV would come back to P
        that way, and what the level is compared for is that it does not."""
        return self in (Caching.PREFILL, Caching.FULL)


class Medium(enum.Enum):
    """Where a KV block's data is."""

    HBM = "hbm"
    """The engine's own KV memory (on CPU: ordinary memory, in the same place)."""
    DRAM = "dram"
    """Host memory beside it: has to be swapped in before a request can use it."""


class Namespace(msgspec.Struct, frozen=True, array_like=True):
    """Who may share KV: only requests of equal namespaces find each other's blocks."""

    cache_salt: str | None = None
    lora_name: str | None = None


class Lora(msgspec.Struct, frozen=True):
    """A LoRA adapter that is served as a model of its own name."""

    name: str
    number: int
    """From 1 on; the same in all processes."""
    path: str
    """Its folder, absolute: a part of vLLM's block hashes, so the same everywhere, too."""
    rank: int


class Direction(enum.Enum):
    """Which way a request's KV travels."""

    FETCH = "fetch"
    """Another instance → P: history that P lacks, before the prefill."""
    FORWARD = "forward"
    """P → D: the prompt's KV."""
    BACK = "back"
    """D → P: the prompt's and the generated tokens' KV, when the request has ended."""


class TransferStyle(enum.Enum):
    """When a prompt's KV is sent, and in what pieces (the paper's section 4.2)."""

    REQUEST = "request"
    """When its request has ended, in as few pieces as its blocks allow."""
    DISCRETE = "discrete"
    """The same moment, but each layer's page of each block is a copy of its own."""
    CHUNK = "chunk"
    """Full blocks after each step of the prefill that computed some; the rest as REQUEST."""
    LAYER = "layer"
    """Each layer of the blocks that a step completes as soon as the step has computed it."""


class InstanceState(enum.Enum):
    """Membership, as the cluster manager sees it."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    FAILED = "failed"
    """Lost, and not started again: it died too often."""


class Heads(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring KV heads of one rank, which counts its own from 0."""

    first: int
    count: int


class Geometry(msgspec.Struct, frozen=True):
    """How one rank's KV cache lies in one contiguous buffer.

    Page `l` of block `b` (K and V of layer `l`, `page_bytes` long) starts at byte
    `layer_offsets[l] + b * block_stride`. In a block-first layout the pages of a block touch each
    other: an aggregated block, which travels as one piece.
    """

    model: str
    dtype: str
    block_size: int
    """Tokens in a block."""
    num_blocks: int
    num_kv_heads: int
    """Heads on this rank."""
    page_bytes: int
    block_stride: int
    layer_offsets: tuple[int, ...]
    page_order: str = "HNC"
    """What is outermost in a page: `HNC` heads, `NHC` tokens (see `ops/views.PageOrder`)."""
    tp_rank: int = 0
    tp_size: int = 1
    total_kv_heads: int | None = None
    """Heads of the whole model; None: those of all ranks. Fewer than that where ranks outnumber
    heads: then several ranks hold a copy of the same one."""

    @property
    def model_kv_heads(self) -> int:
        """Heads of the whole model."""
        return self.total_kv_heads or self.num_kv_heads * self.tp_size

    @property
    def num_layers(self) -> int:
        return len(self.layer_offsets)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of this rank."""
        return self.page_bytes * self.num_layers

    def only(self, layer: int) -> Geometry:
        """The same blocks with nothing but the pages of this layer."""
        return msgspec.structs.replace(self, layer_offsets=(self.layer_offsets[layer],))

    @property
    def has_whole_blocks(self) -> bool:
        """Whether the pages of a block touch each other (blocks may still lie apart)."""
        first = self.layer_offsets[0]
        return all(
            offset == first + layer * self.page_bytes
            for layer, offset in enumerate(self.layer_offsets)
        )

    @property
    def is_aggregated(self) -> bool:
        """Whether blocks are whole and touch each other, too: one copy moves neighbours."""
        return self.has_whole_blocks and self.block_stride == self.block_bytes
