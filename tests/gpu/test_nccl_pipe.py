"""The pipes of `cuda/nccl_pipe.cu` between two GPUs, both ends driven by one thread."""

from __future__ import annotations

import threading
import time
from array import array as array_of
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from memserve.errors import TransferError
from memserve.ops.blocks import library_for
from memserve.ops.nccl import NcclCommunicator, NcclFabric
from memserve.ops.nccl_pipe import CudaPipe, Pieces, PipeSpec
from memserve.ops.views import BlockView, PageOrder, head_rows
from memserve.types import Geometry
from tests.contract.link_rig import buffer_bytes, geometry

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 64
DEADLINE_S = 30.0


class Pair:
    """Two GPUs' KV memory, and a communicator between them."""

    def __init__(self, stack: ExitStack, shape: Geometry, *, is_split: bool) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("NCCL joins two GPUs, and there is one")
        self._stack = stack
        self.devices = [torch.device("cuda", index) for index in range(2)]
        self.memories = [
            torch.randint(0, 256, (buffer_bytes(shape),), dtype=torch.uint8, device=device)
            for device in self.devices
        ]
        fabric = NcclFabric()
        unique_id = fabric.new_id()
        self.communicators: list[NcclCommunicator] = []
        for rank, device in enumerate(self.devices):
            with torch.cuda.device(device):
                self.communicators.append(fabric.join(unique_id, rank))
        until(self._are_there, "both ranks")
        if is_split:
            self._split(shape)
        self.before = [memory.clone() for memory in self.memories]

    def _are_there(self) -> bool:
        return all(one.progress() for one in self.communicators)

    def _split(self, shape: Geometry) -> None:
        """As a link does: when something has passed through."""
        pipes = self._open([BlockView.of(shape, memory) for memory in self.memories])
        move(pipes, [[0], [0]], [1])
        for pipe, communicator in zip(pipes, self.communicators, strict=True):
            pipe.close()
            communicator.split()
        until(self._are_there, "both ranks, again")

    def pipes(self, views: list[BlockView], **options: int) -> list[CudaPipe]:
        """The sending and the receiving end."""
        pipes = self._open(views, **options)
        for pipe in pipes:
            self._stack.callback(pipe.close)
        return pipes

    def _open(self, views: list[BlockView], **options: int) -> list[CudaPipe]:
        pipes = []
        for rank, view in enumerate(views):
            spec = PipeSpec(
                view,
                is_sender=rank == 0,
                slot_blocks=options.get("slot_blocks", 3),
                pieces=Pieces(options.get("pieces", Pieces.STAGED)),
                max_ahead=options.get("max_ahead", 4),
            )
            device = self.devices[rank]
            with torch.cuda.device(device):
                library = library_for(device)
                pipes.append(CudaPipe(library, device, self.communicators[rank], spec))
        return pipes


@pytest.fixture(params=["joined", "split"])
def make_pair(request: pytest.FixtureRequest) -> Iterator[Callable[[Geometry], Pair]]:
    with ExitStack() as pipes, ExitStack() as communicators:

        def make(shape: Geometry) -> Pair:
            pair = Pair(pipes, shape, is_split=request.param == "split")
            for one in pair.communicators:
                communicators.callback(one.abort)
            return pair

        yield make
        communicators.close()  # before the pipes wait for what is queued


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what


def move(pipes: list[CudaPipe], ids: list[list[int]], sizes: list[int]) -> None:
    """One transfer, to its end."""
    ends = [pipe.put(array(own), sizes) for pipe, own in zip(pipes, ids, strict=True)]

    def are_through() -> bool:
        counts = [pipe.run() for pipe in pipes]
        return all(c.finished >= end for c, end in zip(counts, ends, strict=True))

    until(are_through, "the transfer")


def array(ids: list[int]) -> array_of[int]:
    return array_of("i", ids)


def cut(count: int, size: int) -> list[int]:
    return [size] * (count // size) + ([count % size] if count % size else [])


def draw(count: int, seed: int) -> list[list[int]]:
    """Blocks of both sides."""
    chance = torch.Generator().manual_seed(seed)
    return [torch.randperm(NUM_BLOCKS, generator=chance)[:count].tolist() for _ in range(2)]


@pytest.mark.parametrize("pieces", list(Pieces))
@pytest.mark.parametrize("layout", ["block_first", "layer_first", "padded"])
def test_scattered_blocks_arrive_and_no_other_changes(
    make_pair: Callable[[Geometry], Pair], pieces: Pieces, layout: str
) -> None:
    shape = geometry(layout, NUM_BLOCKS)
    if pieces is Pieces.BLOCKS and not shape.has_whole_blocks:
        return  # refused: see below
    pair = make_pair(shape)
    views = [BlockView.of(shape, memory) for memory in pair.memories]
    expected = pair.before[1].clone()
    whole = BlockView.of(shape, expected)
    pipes = pair.pipes(views, pieces=pieces)
    for seed in range(5):  # many more chunks than staging buffers, and than may be ahead
        sources, targets = draw(40, seed)
        move(pipes, [sources, targets], cut(40, 3))
        for layer in range(shape.num_layers):
            sent = views[0].layer(layer)[sources].to(pair.devices[1])
            whole.layer(layer)[targets] = sent
        assert torch.equal(pair.memories[1], expected)
    assert torch.equal(pair.memories[0], pair.before[0])


@pytest.mark.parametrize("order", list(PageOrder))
def test_a_slice_of_the_heads_goes_into_the_same_heads(
    make_pair: Callable[[Geometry], Pair], order: PageOrder
) -> None:
    shape = geometry(num_blocks=NUM_BLOCKS, num_kv_heads=4)
    pair = make_pair(shape)
    rows = head_rows(shape, 1, 2, order)
    views = [BlockView.of(shape, memory, rows) for memory in pair.memories]
    sources, targets = draw(20, seed=1)
    move(pair.pipes(views), [sources, targets], cut(20, 3))
    expected = pair.before[1].clone()
    for layer in range(shape.num_layers):
        sent = views[0].layer(layer)[sources].to(pair.devices[1])
        BlockView.of(shape, expected, rows).layer(layer)[targets] = sent
    assert torch.equal(pair.memories[1], expected)


def test_pieces_that_do_not_lie_in_one_run_are_refused(
    make_pair: Callable[[Geometry], Pair],
) -> None:
    shape = geometry(num_blocks=NUM_BLOCKS, num_kv_heads=4)
    pair = make_pair(shape)
    rows = head_rows(shape, 1, 2, PageOrder.TOKENS_FIRST)
    views = [BlockView.of(shape, memory, rows) for memory in pair.memories]
    with pytest.raises(TransferError, match="pages whose heads lie apart are no pieces"):
        pair.pipes(views, pieces=Pieces.PAGES)
    apart = geometry("layer_first", NUM_BLOCKS)
    views = [BlockView.of(apart, memory) for memory in pair.memories]
    with pytest.raises(TransferError, match="blocks whose pages lie apart are no pieces"):
        pair.pipes(views, pieces=Pieces.BLOCKS)


def test_what_does_not_fit_is_refused_and_the_pipe_goes_on(
    make_pair: Callable[[Geometry], Pair],
) -> None:
    shape = geometry(num_blocks=NUM_BLOCKS)
    pair = make_pair(shape)
    views = [BlockView.of(shape, memory) for memory in pair.memories]
    pipes = pair.pipes(views)
    with pytest.raises(TransferError, match="cannot queue 1 chunks"):
        pipes[0].put(array([1, 2, 3, 4]), [4])  # a slot has three
    with pytest.raises(TransferError, match=r"2 blocks are no chunks of \[1\]"):
        pipes[0].put(array([1, 2]), [1])
    move(pipes, [[5], [6]], [1])
    sent, arrived = (view.layer(0)[block] for view, block in zip(views, (5, 6), strict=True))
    assert torch.equal(sent.cpu(), arrived.cpu())


def test_a_pipe_can_be_closed_while_the_other_end_never_comes(
    make_pair: Callable[[Geometry], Pair],
) -> None:
    shape = geometry(num_blocks=NUM_BLOCKS)
    pair = make_pair(shape)
    views = [BlockView.of(shape, memory) for memory in pair.memories]
    pipes = pair.pipes(views, slot_blocks=60)
    move(pipes, [[5], [6]], [1])
    end = pipes[1].put(array(list(range(60))), [60])  # nobody sends
    until(lambda: pipes[1].run().launched >= end, "the receive should be posted")
    assert pipes[1].run(end).finished < end


def test_a_transfer_that_was_begun_goes_on_in_another_thread(
    make_pair: Callable[[Geometry], Pair],
) -> None:
    shape = geometry(num_blocks=NUM_BLOCKS)
    pair = make_pair(shape)
    views = [BlockView.of(shape, memory) for memory in pair.memories]
    sender, receiver = pipes = pair.pipes(views)
    sources, targets = draw(20, seed=2)
    ends = [
        pipe.put(array(ids), cut(20, 3))
        for pipe, ids in zip(pipes, (sources, targets), strict=True)
    ]

    def begin() -> None:
        with torch.cuda.device(pair.devices[0]):
            sender.begin()

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "nothing in there waits for the receiver"

    def is_through() -> bool:
        sender.run()
        return receiver.run().finished >= ends[1]

    until(is_through, "the transfer")
    sent, arrived = (
        view.layer(1)[ids].cpu() for view, ids in zip(views, (sources, targets), strict=True)
    )
    assert torch.equal(sent, arrived)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_splits_alone_can_be_given_up(rank: int) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, geometry(num_blocks=NUM_BLOCKS), is_split=False)
        pair.communicators[rank].split()
        assert not pair.communicators[rank].progress()
        for one in pair.communicators:
            thread = threading.Thread(target=one.abort)
            thread.start()
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
