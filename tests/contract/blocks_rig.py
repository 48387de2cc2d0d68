"""What the tests of `memserve.ops` share: pairs of KV caches and the plainest copy between them.

The expected bytes are computed from a geometry and rows with slices of numpy arrays, one row after
the other; nothing of `memserve.ops` but its arguments is used for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from memserve.ops.blocks import BlockOps
from memserve.ops.views import BlockView, PageOrder, Rows, head_rows
from memserve.types import Geometry

Bytes = npt.NDArray[np.uint8]
NUM_BLOCKS = 9


class Pool(msgspec.Struct, frozen=True):
    """A KV cache of one side, and the part of its pages that is copied."""

    geometry: Geometry
    rows: Rows
    size_bytes: int


class Case(msgspec.Struct, frozen=True):
    name: str
    source: Pool
    target: Pool

    @property
    def is_aligned(self) -> bool:
        """Whether every row starts and ends at a multiple of 16 bytes."""
        numbers = [
            number
            for pool in (self.source, self.target)
            for number in (
                pool.geometry.block_stride,
                *pool.geometry.layer_offsets,
                pool.rows.offset,
                pool.rows.stride,
                pool.rows.size_bytes,
            )
        ]
        return all(number % 16 == 0 for number in numbers)


def pool(
    layout: str,
    *,
    head_bytes: int,
    heads: int = 2,
    layers: int = 3,
    blocks: int = NUM_BLOCKS,
    block_size: int = 4,
    lead: int = 0,
    gap: int = 0,
    taken: tuple[int, int, PageOrder] | None = None,
) -> Pool:
    """`head_bytes`: K and V of one head and token. `lead` bytes before all, `gap` after each block.

    `taken`: first head, number of heads, order of the page; by default the whole page.
    """
    page = block_size * heads * head_bytes
    stride, step = layers * page + gap, page
    if layout == "layer_first":
        stride, step = page + gap, blocks * (page + gap)
    geometry = Geometry(
        model="tiny",
        dtype="uint8",
        block_size=block_size,
        num_blocks=blocks,
        num_kv_heads=heads,
        page_bytes=page,
        block_stride=stride,
        layer_offsets=tuple(lead + layer * step for layer in range(layers)),
    )
    rows = head_rows(geometry, *taken) if taken else Rows(1, page, page)
    size = geometry.layer_offsets[-1] + (blocks - 1) * stride + page
    return Pool(geometry, rows, size + gap)


def _same(name: str, source: str, target: str, **shape: int) -> Case:
    return Case(name, pool(source, **shape), pool(target, **shape))


def _heads(
    name: str, order: PageOrder, source: tuple[int, int], target: tuple[int, int], count: int
) -> Case:
    """`source` and `target`: heads of the rank, first head that is taken."""
    source_pool, target_pool = (
        pool("block_first", head_bytes=128, heads=heads, taken=(first, count, order))
        for heads, first in (source, target)
    )
    return Case(name, source_pool, target_pool)


CASES: tuple[Case, ...] = (
    _same("aggregated", "block_first", "block_first", head_bytes=256),
    _same("layer-first", "layer_first", "layer_first", head_bytes=256),
    _same("layer-first to block-first", "layer_first", "block_first", head_bytes=64),
    _same("block-first to layer-first", "block_first", "layer_first", head_bytes=64),
    _same("blocks apart", "block_first", "block_first", head_bytes=32, gap=48),
    _same("long pages", "layer_first", "block_first", head_bytes=9_000, lead=16),
    _same("long blocks", "block_first", "block_first", head_bytes=20_480),
    _same("odd sizes", "layer_first", "block_first", head_bytes=13, heads=3, lead=3),
    _same("pages of 4-byte words", "block_first", "layer_first", head_bytes=2_052, lead=4),
    _same("pages of 8-byte words", "layer_first", "layer_first", head_bytes=72, gap=8),
    _same("single bytes", "layer_first", "block_first", head_bytes=1, heads=1, block_size=1),
    _same("one layer", "layer_first", "layer_first", head_bytes=32, layers=1),
    _same("deep model", "layer_first", "block_first", head_bytes=16, layers=131),
    _same(
        "many blocks", "block_first", "block_first", head_bytes=4, blocks=3_400, layers=2, gap=16
    ),
    _heads("rank 1 of 2 to 1, by token", PageOrder.TOKENS_FIRST, (2, 0), (4, 2), 2),
    _heads("rank 1 of 2 to 1, by head", PageOrder.HEADS_FIRST, (2, 0), (4, 2), 2),
    _heads("1 to rank 2 of 3, by token", PageOrder.TOKENS_FIRST, (3, 2), (1, 0), 1),
    _heads("1 to rank 2 of 3, by head", PageOrder.HEADS_FIRST, (3, 2), (1, 0), 1),
    _heads("3 of 8 heads, by token", PageOrder.TOKENS_FIRST, (8, 4), (5, 1), 3),
)


def random_bytes(size: int, random: np.random.Generator) -> Bytes:
    return random.integers(0, 256, size, dtype=np.uint8)


def pick(of: Pool, count: int, random: np.random.Generator) -> list[int]:
    """Different blocks, in no order."""
    return [int(block) for block in random.permutation(of.geometry.num_blocks)[:count]]


def copied(
    case: Case, source: Bytes, target: Bytes, source_ids: Sequence[int], target_ids: Sequence[int]
) -> Bytes:
    """`target` as it must be after the copy."""
    after = target.copy()
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        for layer in range(case.source.geometry.num_layers):
            for row in range(case.source.rows.count):
                start = _start(case.source, source_id, layer, row)
                to = _start(case.target, target_id, layer, row)
                size = case.source.rows.size_bytes
                after[to : to + size] = source[start : start + size]
    return after


def packed(of: Pool, source: Bytes, ids: Sequence[int], *, is_layer_first: bool) -> Bytes:
    """The rows of these blocks one behind the other."""
    layers = range(of.geometry.num_layers)
    if is_layer_first:
        pages = [(block, layer) for layer in layers for block in ids]
    else:
        pages = [(block, layer) for block in ids for layer in layers]
    starts = [
        _start(of, block, layer, row) for block, layer in pages for row in range(of.rows.count)
    ]
    return np.concatenate([source[start : start + of.rows.size_bytes] for start in starts])


def _start(of: Pool, block: int, layer: int, row: int) -> int:
    page = of.geometry.layer_offsets[layer] + block * of.geometry.block_stride
    return page + of.rows.offset + row * of.rows.stride


Place = Callable[[Bytes], torch.Tensor]
"""Puts bytes into memory of some kind: the host's, a GPU's, pinned."""


def place_on(device: str) -> Place:
    return lambda content: torch.from_numpy(content.copy()).to(device)


def place_pinned(content: Bytes) -> torch.Tensor:
    return torch.from_numpy(content.copy()).pin_memory()


def check_copy(
    ops: BlockOps, case: Case, source_place: Place, target_place: Place, *, is_swap: bool = False
) -> None:
    """Fresh contents on both sides; every byte of the target is compared, copied or not."""
    random = np.random.default_rng()
    count = case.source.geometry.num_blocks - 2
    source_ids, target_ids = (pick(of, count, random) for of in (case.source, case.target))
    source_bytes = random_bytes(case.source.size_bytes, random)
    target_bytes = random_bytes(case.target.size_bytes, random)
    source, target = source_place(source_bytes), target_place(target_bytes)
    run = ops.swap_blocks if is_swap else ops.copy_blocks
    size = run(view(case.source, source), view(case.target, target), source_ids, target_ids)
    _synchronize(source, target)
    expected = copied(case, source_bytes, target_bytes, source_ids, target_ids)
    assert_equal(target, expected)
    assert_equal(source, source_bytes)
    page = case.source.rows.count * case.source.rows.size_bytes
    assert size == count * case.source.geometry.num_layers * page


def check_staging(ops: BlockOps, case: Case, place: Place, *, is_layer_first: bool) -> None:
    """Gather into poisoned staging memory that is too large, scatter into a poisoned pool."""
    random = np.random.default_rng()
    ids = pick(case.source, 5, random)
    source_bytes = random_bytes(case.source.size_bytes, random)
    expected = packed(case.source, source_bytes, ids, is_layer_first=is_layer_first)
    beyond = random_bytes(100, random)
    staging = place(np.concatenate([random_bytes(len(expected), random), beyond]))
    source = place(source_bytes)
    ops.gather_blocks(view(case.source, source), ids, staging, is_layer_first=is_layer_first)
    _synchronize(source, staging)
    assert_equal(staging, np.concatenate([expected, beyond]))

    target_ids = pick(case.target, 5, random)
    target_bytes = random_bytes(case.target.size_bytes, random)
    target = place(target_bytes)
    ops.scatter_blocks(
        staging, view(case.target, target), target_ids, is_layer_first=is_layer_first
    )
    _synchronize(staging, target)
    assert_equal(target, copied(case, source_bytes, target_bytes, ids, target_ids))


def view(of: Pool, memory: torch.Tensor) -> BlockView:
    return BlockView.of(of.geometry, memory, of.rows)


def assert_equal(memory: torch.Tensor, expected: Bytes) -> None:
    got = memory.cpu().numpy()
    wrong = np.flatnonzero(got != expected)
    assert not len(wrong), f"{len(wrong)} of {len(got)} bytes are wrong, the first is {wrong[0]}"


def _synchronize(*memories: torch.Tensor) -> None:
    for memory in memories:
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)
