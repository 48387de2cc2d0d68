"""One rank's part of the DRAM tier: its own host memory, and the copies of its part of every block.

Two threads meet here. The rank's main thread runs the engine's steps, each of which brings what is
to be saved before it overwrites it, and says when a step is queued on the device (on the CPU: has
ended). The agent's thread makes all other copies, each behind the step that its order names: else
it could read a block that is still to be computed, or a slot that is still to be filled.

Collaborators: `rank_agent.py` passes the driver's orders on, `hosts.py` the steps; `copies.py`
copies; `rank_copies.py` is the driver's end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from memserve.errors import StartError, TransferError
from memserve.types import Geometry
from memserve.workers.copies import BlockCopies, CopyEnd, Pace, Saver
from memserve.workers.copy_queue import CopyQueue, CudaQueue, make_queue
from memserve.workers.hostmemory import HostMemory
from memserve.workers.rank_messages import (
    CancelCopy,
    Copied,
    CopyBlocks,
    DramOpened,
    DramOrder,
    DramReport,
    OpenDram,
    SaveBlocks,
    Saved,
    StepOrders,
)

if TYPE_CHECKING:
    from memserve.ops.blocks import BlockOps


class RankDram:
    """Empty until the driver orders it to be opened."""

    def __init__(
        self,
        geometry: Geometry,
        hbm: torch.Tensor,
        make_ops: Callable[[], BlockOps],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`hbm`: the rank's buffer. `make_ops`: operations on it, for one thread each."""
        self._geometry = geometry
        self._hbm = hbm
        self._make_ops = make_ops
        self._clock = clock
        self._copies: BlockCopies | None = None
        self._saver: Saver | None = None
        """Of the main thread."""
        self._agents_saver: Saver | None = None
        """On the same queue: a slot may be filled by a step, given up, and filled by an order."""
        self._held_back: deque[CopyBlocks | SaveBlocks] = deque()
        """Their steps have not come yet."""
        self._reports: list[DramReport] = []
        self._num_steps = 0
        self._step: torch.cuda.Event | None = None
        """On a GPU: when all steps so far will have ended."""

    # ── the main thread ───────────────────────────────────────────────────────────────────────

    def before_step(self, orders: StepOrders) -> None:
        """Save what the step overwrites.

        Raises: TransferError. The driver counts the slots as filled: the instance has to end.
        """
        assert self._saver is not None
        for saving in orders.savings:
            self._saver.save(saving.block_ids, saving.slot_ids, for_engine=True)

    def after_step(self, orders: StepOrders) -> None:
        """The step is queued on the device; on the CPU it has ended."""
        if self._hbm.is_cuda:
            step = torch.cuda.Event()
            step.record()
            self._step = step
        self._num_steps = orders.number  # last: the other thread looks at it first

    # ── the agent's thread ────────────────────────────────────────────────────────────────────

    def handle(self, order: DramOrder) -> None:
        """What comes of it, `poll` says."""
        match order:
            case OpenDram():
                self._reports.append(DramOpened(self._open(order.size_bytes)))
            case CopyBlocks() | SaveBlocks():
                self._held_back.append(order)
            case CancelCopy():
                self._cancel(order.owner)

    def poll(self) -> list[DramReport]:
        """Let the copies go on for a bounded time; what there is to say since the last call."""
        if (copies := self._copies) is not None:
            while self._held_back and self._held_back[0].after_step <= self._num_steps:
                self._begin(copies, self._held_back.popleft())
            self._reports += map(Copied, copies.poll(self._pace()))
        reports, self._reports = self._reports, []
        return reports

    def _pace(self) -> Pace:
        """Whether a step is under way; when it ends, this thread does not know."""
        step = self._step
        return Pace.FREE if step is None or step.query() else Pace.INSIDE_STEP

    @property
    def is_active(self) -> bool:
        """Whether `poll` has something to do soon, though no order comes."""
        return bool(self._held_back) or (self._copies is not None and self._copies.is_active)

    def close(self) -> None:
        """Wait until nothing is in flight, and give the memory back. No step may follow."""
        if self._agents_saver is not None:
            self._agents_saver.wait()
        if self._copies is not None:
            self._copies.close()

    def _open(self, size_bytes: int) -> str | None:
        try:
            memory = HostMemory(size_bytes, pin=self._hbm.is_cuda)
            copies = BlockCopies(
                self._geometry,
                self._hbm,
                memory,
                self._make_ops(),
                self._clock,
                make_queue=self._queue_behind_steps,
            )
        except StartError as error:
            return str(error)
        queue = make_queue(self._hbm.device)
        self._agents_saver = Saver(copies.places, self._make_ops(), queue)
        self._saver = Saver(copies.places, self._make_ops(), queue)
        self._copies = copies
        return None

    def _begin(self, copies: BlockCopies, order: CopyBlocks | SaveBlocks) -> None:
        if isinstance(order, SaveBlocks):
            assert self._agents_saver is not None
            error = None
            try:
                self._agents_saver.save(order.block_ids, order.slot_ids, for_engine=False)
            except TransferError as problem:
                error = str(problem)
            self._reports.append(Saved(error))
        elif order.is_inwards:
            copies.copy_in(order.owner, order.slot_ids, order.block_ids)
        else:
            copies.copy_out(order.owner, order.block_ids, order.slot_ids)

    def _cancel(self, owner: str) -> None:
        for order in self._held_back:
            if isinstance(order, CopyBlocks) and order.owner == owner:
                self._held_back.remove(order)
                self._reports.append(Copied(CopyEnd(owner, 0, 0.0, "cancelled")))
                return
        if self._copies is not None:
            self._copies.cancel(owner)

    def _queue_behind_steps(self, device: torch.device) -> CopyQueue:
        return _BehindSteps(device, self) if device.type == "cuda" else make_queue(device)

    def follow_steps(self, stream: torch.cuda.Stream) -> None:
        """Let what comes next on the stream run behind the steps that are queued."""
        if (step := self._step) is not None:
            stream.wait_event(step)


class _BehindSteps(CudaQueue):
    """A stream of the agent's, to which the engine's is another thread's."""

    def __init__(self, device: torch.device, dram: RankDram) -> None:
        super().__init__(device)
        self._dram = dram

    def follow_engine(self) -> None:
        self._dram.follow_steps(self.stream)
