"""The reference of `memserve.ops` against copies of slices in numpy, and what all of it refuses."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from memserve.errors import TransferError
from memserve.ops.blocks import BlockOps, CudaBlockOps, TorchBlockOps, block_ops
from memserve.ops.build import BlockCopyLibrary
from memserve.ops.views import BlockView, PageOrder, Rows, head_rows
from tests.contract.blocks_rig import (
    CASES,
    Case,
    Pool,
    assert_equal,
    check_copy,
    check_staging,
    place_on,
    pool,
    view,
)

ON_CPU = place_on("cpu")
SMALL = pool("block_first", head_bytes=8)


@pytest.fixture
def ops() -> BlockOps:
    return TorchBlockOps()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_are_copied_and_nothing_else_is_touched(ops: BlockOps, case: Case) -> None:
    check_copy(ops, case, ON_CPU, ON_CPU)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("is_layer_first", [False, True], ids=["block_first", "layer_first"])
def test_blocks_pass_through_staging_memory(
    ops: BlockOps, case: Case, is_layer_first: bool
) -> None:
    check_staging(ops, case, ON_CPU, is_layer_first=is_layer_first)


def test_every_case_of_the_rig_is_needed() -> None:
    """Aligned and unaligned, one row and many, whole blocks and pages apart are all in it."""
    assert {case.is_aligned for case in CASES} == {True, False}
    assert {case.source.rows.count > 1 for case in CASES} == {True, False}
    assert {case.source.geometry.is_aggregated for case in CASES} == {True, False}


def test_no_blocks_are_no_error(ops: BlockOps) -> None:
    source, target, staging = (torch.zeros(SMALL.size_bytes, dtype=torch.uint8) for _ in range(3))
    assert ops.copy_blocks(view(SMALL, source), view(SMALL, target), [], []) == 0
    assert ops.gather_blocks(view(SMALL, source), [], staging) == 0
    assert ops.scatter_blocks(staging, view(SMALL, target), []) == 0


def test_blocks_move_within_one_buffer(ops: BlockOps) -> None:
    memory = torch.arange(SMALL.size_bytes, dtype=torch.int32).to(torch.uint8)
    before = memory.numpy().copy()
    own = view(SMALL, memory)
    block = SMALL.geometry.block_bytes
    assert ops.copy_blocks(own, own, [0, 1], [5, 4]) == 2 * block
    before[5 * block : 6 * block] = before[:block]
    before[4 * block : 5 * block] = before[block : 2 * block]
    assert_equal(memory, before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_a_view_takes_memory_of_any_type_and_shape(ops: BlockOps, dtype: torch.dtype) -> None:
    bytes_each = torch.empty(0, dtype=dtype).element_size()
    shape = (SMALL.size_bytes // bytes_each // 4, 4)
    source, target = (torch.zeros(SMALL.size_bytes, dtype=torch.uint8) for _ in range(2))
    source.random_(0, 256)
    source_view = view(SMALL, source.view(dtype).reshape(shape))
    ops.copy_blocks(source_view, view(SMALL, target), range(9), range(9))
    assert torch.equal(source, target)


def test_a_view_of_a_part_of_a_tensor_stays_within_it(ops: BlockOps) -> None:
    whole = torch.zeros(SMALL.size_bytes + 64, dtype=torch.uint8)
    source = torch.randint(0, 256, (SMALL.size_bytes,), dtype=torch.uint8)
    ops.copy_blocks(view(SMALL, source), view(SMALL, whole[32:-32]), range(9), range(9))
    assert torch.equal(whole[32:-32], source)
    assert not whole[:32].any()
    assert not whole[-32:].any()


def test_the_reference_serves_memory_that_is_not_on_a_gpu() -> None:
    assert isinstance(block_ops(torch.device("cpu")), TorchBlockOps)


@pytest.mark.parametrize(
    ("of", "run_bytes"),
    [
        (pool("block_first", head_bytes=8), 3 * 64),
        (pool("block_first", head_bytes=8, gap=8), 3 * 64),
        (pool("layer_first", head_bytes=8), 64),
        (pool("layer_first", head_bytes=8, layers=1), 64),
        (pool("block_first", head_bytes=8, taken=(0, 2, PageOrder.TOKENS_FIRST)), 3 * 64),
        (pool("block_first", head_bytes=8, taken=(0, 1, PageOrder.TOKENS_FIRST)), 8),
        (pool("block_first", head_bytes=8, taken=(0, 1, PageOrder.HEADS_FIRST)), 32),
    ],
)
def test_a_view_knows_what_lies_together(of: Pool, run_bytes: int) -> None:
    assert make_view(of).run_bytes == run_bytes


# ── heads ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", PageOrder)
def test_head_rows_are_the_heads_of_the_page(order: PageOrder) -> None:
    """Each byte of a page says which head it belongs to."""
    of = pool("block_first", head_bytes=6, heads=5, block_size=4, layers=1, blocks=1).geometry
    by_token = np.arange(5, dtype=np.uint8).repeat(6).reshape(1, 5, 6).repeat(4, axis=0)
    page = by_token if order is PageOrder.TOKENS_FIRST else by_token.transpose(1, 0, 2)
    memory = torch.from_numpy(np.ascontiguousarray(page))
    shown = BlockView.of(of, memory, head_rows(of, 1, 3, order)).layer(0)
    assert sorted(shown.flatten().tolist()) == sorted([1, 2, 3] * 4 * 6)


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (0, 3), (2, 1), (1, -1)])
def test_heads_that_a_rank_does_not_have_are_refused(first: int, count: int) -> None:
    with pytest.raises(TransferError, match="rank 0 has heads 0 to 1"):
        head_rows(SMALL.geometry, first, count, PageOrder.HEADS_FIRST)


def test_pages_that_are_not_made_of_heads_are_refused() -> None:
    broken = pool("block_first", head_bytes=1, heads=1, block_size=7).geometry
    changed = msgspec.structs.replace(broken, num_kv_heads=2)
    with pytest.raises(TransferError, match="7 bytes cannot hold 7 tokens of 2 heads"):
        head_rows(changed, 0, 1, PageOrder.HEADS_FIRST)


# ── refusals ──────────────────────────────────────────────────────────────────────────────────


def make_view(of: Pool = SMALL, **changes: object) -> BlockView:
    fields = {
        "num_blocks": of.geometry.num_blocks,
        "block_stride": of.geometry.block_stride,
        "layer_offsets": of.geometry.layer_offsets,
        "rows": of.rows,
    }
    memory = torch.zeros(of.size_bytes, dtype=torch.uint8)
    return BlockView(memory, **(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks of at least 1, not 0"),
        ({"num_blocks": 10}, "bytes 0 to 1920 of a buffer of 1728"),
        ({"layer_offsets": ()}, "layers of at least 1"),
        ({"layer_offsets": (-64, 0)}, "bytes -64 to"),
        ({"layer_offsets": (0, 64, 129)}, "to 1729 of a buffer of 1728"),
        ({"block_stride": 0}, "block_stride of at least 1"),
        ({"rows": Rows(0, 64, 64)}, "rows.count of at least 1"),
        ({"rows": Rows(1, 0, 64)}, "rows.size_bytes of at least 1"),
        ({"rows": Rows(2, 32, 31)}, "rows of 32 bytes overlap at stride 31"),
        ({"rows": Rows(1, 64, 64, offset=1)}, "to 1729 of a buffer of 1728"),
    ],
)
def test_a_view_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TransferError, match=message):
        make_view(**changes)


def test_a_view_needs_contiguous_memory() -> None:
    with pytest.raises(TransferError, match="contiguous"):
        BlockView.of(SMALL.geometry, torch.zeros(SMALL.size_bytes, 2, dtype=torch.uint8)[:, 0])


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "message"),
    [
        ([0, 1], [0], "2 blocks cannot fill 1 blocks"),
        ([0, 9], [0, 1], "the source has no block 9, only 0 to 8"),
        ([-1, 0], [0, 1], "the source has no block -1"),
        ([0, 1], [3, 1 << 40], "the target has no block 1099511627776"),
        ([0, 1, 2], [3, 4, 3], "target block 3 is named twice"),
    ],
)
def test_blocks_that_do_not_pair_up_are_refused(
    ops: BlockOps, source_ids: list[int], target_ids: list[int], message: str
) -> None:
    source, target = make_view(), make_view()
    with pytest.raises(TransferError, match=message):
        ops.copy_blocks(source, target, source_ids, target_ids)
    with pytest.raises(TransferError, match=message):
        ops.swap_blocks(source, target, source_ids, target_ids)


def test_a_block_of_one_buffer_is_not_read_and_written(ops: BlockOps) -> None:
    own = make_view()
    with pytest.raises(TransferError, match="block 2 of one buffer"):
        ops.copy_blocks(own, own, [1, 2], [2, 3])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (pool("block_first", head_bytes=8, layers=4), "the source has 3 layers, the target 4"),
        (pool("block_first", head_bytes=16), "64 bytes in a row, the target 128"),
        (
            pool("block_first", head_bytes=8, taken=(0, 1, PageOrder.TOKENS_FIRST)),
            "1 rows in a page, the target 4",
        ),
    ],
)
def test_views_of_unlike_pages_are_refused(ops: BlockOps, other: Pool, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        ops.copy_blocks(make_view(), make_view(other), [0], [0])


def test_staging_memory_that_is_too_small_is_refused(ops: BlockOps) -> None:
    staging = torch.zeros(2 * SMALL.geometry.block_bytes - 1, dtype=torch.uint8)
    with pytest.raises(TransferError, match="bytes 0 to 384 of a buffer of 383"):
        ops.gather_blocks(make_view(), [1, 2], staging)
    with pytest.raises(TransferError, match="bytes 0 to 384 of a buffer of 383"):
        ops.scatter_blocks(staging, make_view(), [1, 2])


class NoLibrary(BlockCopyLibrary):
    """Nothing may be asked of the library where there is no GPU."""

    def __init__(self) -> None:
        pass


def on_the_host(run: Callable[..., int]) -> str:
    with pytest.raises(TransferError) as caught:
        run(make_view(), make_view(), [0], [1])
    return str(caught.value)


def test_the_cuda_operations_refuse_host_memory() -> None:
    ops = CudaBlockOps(NoLibrary())
    assert on_the_host(ops.copy_blocks) == (
        "the source's blocks are in host memory: swap them instead"
    )
    assert on_the_host(ops.swap_blocks) == "a swap is between a GPU's memory and host memory"


def test_a_copy_needs_a_multiprocessor() -> None:
    with pytest.raises(TransferError, match="max_sms is 0 and swap_sms 4; a copy needs at least 1"):
        CudaBlockOps(NoLibrary(), max_sms=0)
