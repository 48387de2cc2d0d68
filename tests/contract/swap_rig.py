"""What the tests of the DRAM tier and of swapping share: copies that happen when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from memserve.core.swap import SwapLimits
from memserve.errors import TransferError
from memserve.ops.blocks import BlockOps, TorchBlockOps
from memserve.ops.views import BlockView
from memserve.types import Geometry, Medium
from memserve.workers.copies import BlockCopies
from memserve.workers.copy_queue import CopyQueue
from memserve.workers.dram import DramTier
from memserve.workers.hostmemory import HostMemory
from memserve.workers.swapping import Swapper
from tests.contract.link_rig import BLOCK_SIZE, NUM_BLOCKS, geometry
from tests.contract.transfer_rig import NO_NAMESPACE, Node, kv_of, prompt

TOTAL = NUM_BLOCKS - 1
"""One is vLLM's null block."""
A, B, C = (prompt(16, seed) for seed in (1, 2, 3))
"""Four blocks each."""
BLOCK_BYTES = geometry().block_bytes


class FaultyOps(TorchBlockOps):
    """Refuses every copy after so many good ones."""

    def __init__(self, num_good: int) -> None:
        self.num_good = num_good
        self.spared: list[bool] = []
        """Of each call: whether it was to spare the engine."""

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
        self.spared.append(spares_engine)
        self.num_good -= 1
        if self.num_good < 0:
            raise TransferError("the copy engine is on fire")
        return self.copy(source, target, source_ids, target_ids)

    def copy(
        self,
        source: BlockView,
        target: BlockView,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
    ) -> int:
        """A good one."""
        return super().swap_blocks(source, target, source_ids, target_ids)


class LateOps(FaultyOps):
    """Copies when told to, like a GPU: with the contents of that moment, not of the call's."""

    def __init__(self, num_good: int) -> None:
        super().__init__(num_good)
        self.last: Callable[[], int] = lambda: 0

    def copy(
        self,
        source: BlockView,
        target: BlockView,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
    ) -> int:
        now = super().copy
        self.last = lambda: now(source, target, source_ids, target_ids)
        return len(source_ids) * source.block_bytes


class ManualQueue:
    """A stream over `LateOps`: its copies happen, in order, when a test says so."""

    stream = None
    is_beside_engine = True

    def __init__(self, ops: LateOps) -> None:
        self._ops = ops
        self.pieces: deque[tuple[Callable[[], object], list[bool]]] = deque()
        self.num_follows = 0
        self.num_holds = 0

    def follow_engine(self) -> None:
        self.num_follows += 1

    def hold_engine(self) -> None:
        """What is written next comes after the copy."""
        self.num_holds += 1
        self._copy_last()

    def mark(self) -> Callable[[], bool]:
        is_done = [False]
        self.pieces.append((self._ops.last, is_done))
        self._ops.last = lambda: 0
        return lambda: is_done[0]

    def finish(self, count: int = 1) -> None:
        """Let the oldest pieces be copied."""
        for _ in range(min(count, len(self.pieces))):
            copy, is_done = self.pieces.popleft()
            copy()
            is_done[0] = True

    def wait(self) -> None:
        self.finish(len(self.pieces))
        self._copy_last()

    def _copy_last(self) -> None:
        copy, self._ops.last = self._ops.last, lambda: 0
        copy()


class ManualQueues:
    """Makes the queues of a tier, and its `ops`."""

    def __init__(self, num_good: int = 1 << 30) -> None:
        self.ops = LateOps(num_good)
        self.made: list[ManualQueue] = []

    def __call__(self, device: torch.device) -> ManualQueue:
        self.made.append(ManualQueue(self.ops))
        return self.made[-1]

    @property
    def into(self) -> ManualQueue:
        return self.made[0]

    @property
    def out(self) -> ManualQueue:
        return self.made[1]

    @property
    def urgent(self) -> ManualQueue:
        return self.made[2]


class CheapSwaps:
    """Costs by which DRAM is always faster than computing: a second a token, nothing a byte."""

    def exec_s(self, num_tokens: int, cached_tokens: int = 0) -> float:
        return float(num_tokens - cached_tokens)

    def swap_in_s(self, size_bytes: int) -> float:
        return 0.0


class DearSwaps(CheapSwaps):
    """Computing is always faster."""

    def swap_in_s(self, size_bytes: int) -> float:
        return 1e9


def make_tier(
    shape: Geometry,
    memory: bytearray,
    queues: ManualQueues,
    clock: Callable[[], float],
    num_slots: int = 32,
) -> DramTier:
    """Over `memory`; it copies when the queues say so."""
    copies = BlockCopies(
        shape,
        torch.frombuffer(memory, dtype=torch.uint8),
        HostMemory(num_slots * shape.block_bytes, pin=False),
        queues.ops,
        clock,
        piece_bytes=shape.block_bytes,
        make_queue=queues,
    )
    return DramTier(copies)


class SwapNode(Node):
    """An instance with a DRAM tier. By default its copies are complete within one poll."""

    def __init__(
        self,
        num_slots: int = 32,
        *,
        num_blocks: int = NUM_BLOCKS,
        layout: str = "block_first",
        limits: SwapLimits | None = None,
        ops: BlockOps | None = None,
        make_queue: Callable[[torch.device], CopyQueue] | None = None,
        batch_blocks: int = 4,
    ) -> None:
        super().__init__("PD0", num_blocks, layout)
        self.dram = HostMemory(num_slots * BLOCK_BYTES, pin=False)
        options = {} if make_queue is None else {"make_queue": make_queue}
        copies = BlockCopies(
            self.geometry,
            torch.frombuffer(self.memory, dtype=torch.uint8),
            self.dram,
            ops or TorchBlockOps(),
            self.clock,
            piece_bytes=BLOCK_BYTES,
            **options,
        )
        self.tier = DramTier(copies)
        self.limits = limits or SwapLimits(margin_blocks=0, pinned_blocks=num_blocks // 2)
        self.swapper = Swapper(
            self.mempool, self.tier, self.limits, self.clock, batch_blocks=batch_blocks
        )

    def remember(self, tokens: Sequence[int], request_id: str = "past") -> None:
        """Compute a prompt and end it: it is history now."""
        assert self.compute(request_id, tokens) is not None
        self.engine.finish(request_id)

    def swap(self) -> None:
        """Poll until nothing is under way."""
        for _ in range(1000):
            self.swapper.poll()
            if not self.tier.is_active:
                return
        raise AssertionError("the copies do not end")

    def forget_hbm(self) -> None:
        """Let the engine evict all history, as other requests would."""
        self.pool.free_blocks(self.pool.get_new_blocks(self.pool.get_num_free_blocks()))

    def where(self, tokens: Sequence[int]) -> str:
        """One letter for each known block: H, D, or B for both."""
        match = self.mempool.find(self.mempool.path(tokens))
        return "".join(
            "B" if hbm >= 0 and dram >= 0 else "H" if hbm >= 0 else "D"
            for hbm, dram in zip(match.hbm.tolist(), match.dram.tolist(), strict=True)
        )

    def check_all(self, *prompts: Sequence[int]) -> None:
        """As `check`; and the slots hold the right KV."""
        self.check(*prompts)
        assert self.swapper.check_integrity() == []
        for tokens in prompts:
            match = self.mempool.find(self.mempool.path(tokens, NO_NAMESPACE))
            for index, slot in enumerate(match.dram.tolist()):
                if slot >= 0:
                    start = slot * BLOCK_BYTES
                    contents = self.dram.tensor[start : start + BLOCK_BYTES].numpy().tobytes()
                    assert contents == kv_of(tokens[: (index + 1) * BLOCK_SIZE], 3)
        assert self.mempool.index.num_in(Medium.DRAM) == len(self.tier.held())


def manual(**options: object) -> tuple[SwapNode, ManualQueues]:
    """A node whose copies end when the test says so."""
    queues = ManualQueues()
    return SwapNode(ops=queues.ops, make_queue=queues, **options), queues  # type: ignore[arg-type]


def swapped_out(**options: object) -> SwapNode:
    """A (four blocks) in DRAM alone."""
    node = SwapNode(**options)  # type: ignore[arg-type]
    put_out(node)
    return node


def put_out(node: SwapNode, queues: ManualQueues | None = None) -> None:
    """A is in DRAM alone then."""
    node.remember(A)
    node.swapper.swap_out(4)
    node.swapper.poll()
    if queues is not None:
        queues.out.finish(4)
        node.swapper.poll()
    node.forget_hbm()
    assert node.where(A) == "DDDD"
