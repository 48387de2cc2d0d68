"""The CUDA operations: the cases of `tests/contract/blocks_rig.py` on GPUs, by every method.

With two GPUs that reach each other, the peer's memory is a target as well.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from memserve.errors import TransferError
from memserve.ops.blocks import CudaBlockOps, Method, TorchBlockOps, block_ops
from memserve.ops.build import BlockCopyLibrary, build_library
from memserve.ops.views import BlockView
from tests.contract.blocks_rig import (
    CASES,
    Case,
    Place,
    assert_equal,
    check_copy,
    check_staging,
    copied,
    pick,
    place_on,
    place_pinned,
    pool,
    random_bytes,
    view,
)

pytestmark = pytest.mark.gpu

SMALL = pool("block_first", head_bytes=64)
ON_GPU = place_on("cuda:0")
MAX_SMS = [1, 16, 1000]


def names(value: object) -> str | None:
    if isinstance(value, Case):
        return value.name
    return value.name.lower() if isinstance(value, Method) else None


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> BlockCopyLibrary:
    major, minor = torch.cuda.get_device_capability(0)
    folder: Path = tmp_path_factory.mktemp("cuda")
    return BlockCopyLibrary(build_library(f"sm_{major}{minor}", cache_dir=folder))


@pytest.fixture(params=["cuda:0", "cuda:1"], ids=["local", "peer"])
def target_place(request: pytest.FixtureRequest) -> Place:
    device = torch.device(request.param)
    if device.index and not (
        torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, device.index)
    ):
        pytest.skip("needs two GPUs that reach each other's memory")
    return place_on(request.param)


def make_ops(library: BlockCopyLibrary, method: Method, max_sms: int = 16) -> CudaBlockOps:
    return CudaBlockOps(
        library, max_sms=max_sms, swap_sms=max_sms, method=method, swap_method=method
    )


def skip_if_impossible(case: Case, method: Method) -> None:
    if method is not Method.BULK:
        return
    if not case.is_aligned:
        pytest.skip("the bulk kernel needs 16-byte alignment")
    if torch.cuda.get_device_capability(0) < (9, 0):
        pytest.skip("the bulk kernel needs Hopper or newer")


@pytest.mark.parametrize("method", Method, ids=names)
@pytest.mark.parametrize("case", CASES, ids=names)
def test_blocks_are_copied_and_nothing_else_is_touched(
    library: BlockCopyLibrary, target_place: Place, case: Case, method: Method
) -> None:
    skip_if_impossible(case, method)
    for max_sms in MAX_SMS:
        check_copy(make_ops(library, method, max_sms), case, ON_GPU, target_place)


@pytest.mark.parametrize("case", CASES, ids=names)
@pytest.mark.parametrize("is_layer_first", [False, True], ids=["block_first", "layer_first"])
def test_blocks_pass_through_staging_memory(
    library: BlockCopyLibrary, case: Case, is_layer_first: bool
) -> None:
    check_staging(make_ops(library, Method.AUTO), case, ON_GPU, is_layer_first=is_layer_first)


@pytest.mark.parametrize("method", Method, ids=names)
@pytest.mark.parametrize("case", CASES, ids=names)
def test_blocks_are_swapped_out_and_in(
    library: BlockCopyLibrary, case: Case, method: Method
) -> None:
    skip_if_impossible(case, method)
    ops = make_ops(library, method)
    check_copy(ops, case, ON_GPU, place_pinned, is_swap=True)
    check_copy(ops, case, place_pinned, ON_GPU, is_swap=True)


@pytest.mark.parametrize("case", CASES, ids=names)
def test_the_reference_gives_the_same_on_a_gpu(target_place: Place, case: Case) -> None:
    check_copy(TorchBlockOps(), case, ON_GPU, target_place)


def test_a_copy_waits_for_its_stream(library: BlockCopyLibrary) -> None:
    """The source is filled on the stream first; a copy on another stream would be too early."""
    random = np.random.default_rng()
    contents = random_bytes(SMALL.size_bytes, random)
    source_ids, target_ids = pick(SMALL, 6, random), pick(SMALL, 6, random)
    for method in (Method.VECTOR, Method.BULK, Method.COPIES, Method.BATCH):
        if method is Method.BULK and torch.cuda.get_device_capability(0) < (9, 0):
            continue
        stream = torch.cuda.Stream(0)
        source, target = (torch.zeros(SMALL.size_bytes, dtype=torch.uint8).cuda() for _ in "ab")
        filled = torch.from_numpy(contents).cuda()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            source.copy_(filled)
        make_ops(library, method).copy_blocks(
            view(SMALL, source), view(SMALL, target), source_ids, target_ids, stream=stream
        )
        stream.synchronize()
        nothing = np.zeros(SMALL.size_bytes, dtype=np.uint8)
        expected = copied(Case("", SMALL, SMALL), contents, nothing, source_ids, target_ids)
        assert_equal(target, expected)


def test_a_copy_is_captured_in_a_graph(library: BlockCopyLibrary) -> None:
    """Ids are part of the launch: a replay needs nothing that the capture's caller held."""
    source, target = (torch.zeros(SMALL.size_bytes, dtype=torch.uint8).cuda() for _ in range(2))
    views = view(SMALL, source), view(SMALL, target)
    ops = make_ops(library, Method.AUTO)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.copy_blocks(*views, [3, 1], [0, 4])
    source.random_(0, 256)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(views[1].layer(1)[[0, 4]], views[0].layer(1)[[3, 1]])
    assert not views[1].layer(1)[[1, 2, 3, 5]].any()


def test_the_default_operations_are_those_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ops = block_ops(torch.device("cuda:0"))
    check_copy(ops, CASES[0], ON_GPU, ON_GPU)
    check_copy(ops, CASES[0], ON_GPU, place_pinned, is_swap=True)


def small_view(place: Place) -> BlockView:
    return view(SMALL, place(np.zeros(SMALL.size_bytes, dtype=np.uint8)))


def test_memory_of_the_wrong_kind_is_refused(library: BlockCopyLibrary) -> None:
    ops = make_ops(library, Method.AUTO)
    gpu, pinned, pageable = (small_view(place) for place in (ON_GPU, place_pinned, place_on("cpu")))
    with pytest.raises(TransferError, match="the target's blocks are in host memory"):
        ops.copy_blocks(gpu, pinned, [0], [1])
    with pytest.raises(TransferError, match="between a GPU's memory and host memory"):
        ops.swap_blocks(gpu, small_view(ON_GPU), [0], [1])
    with pytest.raises(TransferError, match="the source's host memory is not pinned"):
        ops.swap_blocks(pageable, gpu, [0], [1])


def test_the_bulk_kernel_refuses_what_is_not_aligned(library: BlockCopyLibrary) -> None:
    odd = next(case for case in CASES if not case.is_aligned)
    with pytest.raises(TransferError, match="cannot copy 7 blocks on GPU 0: invalid argument"):
        check_copy(make_ops(library, Method.BULK), odd, ON_GPU, ON_GPU)


def test_a_stream_of_another_gpu_is_refused(library: BlockCopyLibrary) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ops = make_ops(library, Method.AUTO)
    with pytest.raises(TransferError, match="the stream is one of GPU 1, not 0"):
        ops.copy_blocks(
            small_view(ON_GPU), small_view(ON_GPU), [0], [1], stream=torch.cuda.Stream(1)
        )


def test_the_current_gpu_stays_the_current_one(library: BlockCopyLibrary) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(1):
        check_copy(make_ops(library, Method.AUTO), CASES[0], ON_GPU, ON_GPU)
        assert torch.zeros(1, device="cuda").device.index == 1


def test_copies_on_two_streams_do_not_disturb_each_other(library: BlockCopyLibrary) -> None:
    """Each stream has its own counter; many launches run at once and one after the other."""
    large = pool("block_first", head_bytes=16_384, blocks=64)
    ops = make_ops(library, Method.AUTO, 8)
    source = torch.randint(0, 256, (large.size_bytes,), dtype=torch.uint8, device="cuda:0")
    targets = [torch.zeros_like(source) for _ in range(2)]
    streams = [torch.cuda.Stream(0) for _ in targets]
    torch.cuda.synchronize()
    for first in range(0, 64, 4):
        ids = list(range(first, first + 4))
        for target, stream in zip(targets, streams, strict=True):
            ops.copy_blocks(view(large, source), view(large, target), ids, ids, stream=stream)
    torch.cuda.synchronize()
    assert all(torch.equal(source, target) for target in targets)
