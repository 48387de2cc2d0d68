"""What moves KV between HBM and DRAM while `swap_vs_tpot.py` watches the engine's steps.

`TierCopies` keeps the host link full by a tier of the bench's own over blocks of its own: index and
pool have no part in it. `SwapIns` asks the instance's own swapping for prompts that only DRAM has,
more of them than HBM has room for, so that as much has to go out. `plain_rates` is what both are
compared with: contiguous copies of pinned memory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from memserve.types import Geometry, Namespace, SlotId
from memserve.workers.copies import Pace
from memserve.workers.dram import DramTier
from memserve.workers.hosts import OwnKvHost

if TYPE_CHECKING:
    from memserve.workers.main import Worker

DIRECTIONS = {"out": ("out",), "in": ("in",), "both": ("out", "in")}
_OWNER = "bench"


class Mover(Protocol):
    """Called between two steps."""

    def turn(self) -> None: ...

    def stop(self) -> None:
        """Begin nothing more."""
        ...

    @property
    def is_active(self) -> bool:
        """Whether bytes are moving, or wait to."""
        ...


class TierCopies:
    """Copies of a batch of blocks each that follow one another, in the directions asked for."""

    def __init__(self, worker: Worker, geometry: Geometry, batch: int, num_batches: int) -> None:
        """Takes blocks from the instance's pool, for as many copies as there are batches."""
        self._mempool = worker.loop._mempool
        self._engine = worker.loop._engine
        block_ids = self._mempool.alloc_mem(num_batches * batch, _OWNER)
        self._batches = [block_ids[i : i + batch] for i in range(0, len(block_ids), batch)]
        self._outstanding = num_batches // 2
        """Copies of a direction that are begun or wait, so that the link never has none."""
        num_slots = (self._outstanding + 1) * batch
        self._tier = DramTier(worker._host.open_dram(num_slots * geometry.block_bytes))
        self._directions: Sequence[str] = ()
        self._slots: dict[str, list[SlotId]] = {}
        """Copy under way → the slots that are to be freed after it."""
        self._kept: list[SlotId] = []
        self._number = 0
        self.moved: Counter[str] = Counter()
        """Bytes, by direction."""

    def fill(self) -> Iterator[None]:
        """Have one batch in DRAM, for the copies that come in. Each `yield`: go on later."""
        self._kept = self._tier.copy_out("kept", self._batches[0])
        while self._tier.is_active:
            self._tier.poll()
            yield

    def begin(self, variant: str) -> TierCopies:
        """One of `DIRECTIONS`; anything else: copy nothing."""
        self._directions = DIRECTIONS.get(variant, ())
        return self

    def turn(self) -> None:
        for direction in self._directions:
            while sum(name.startswith(direction) for name in self._slots) < self._outstanding:
                self._start(direction)
        pace = Pace.BETWEEN_STEPS if self._engine.is_busy else Pace.FREE
        for end in self._tier.poll(pace):
            if end.error is not None:
                raise RuntimeError(end.error)
            self._tier.free(self._slots.pop(end.owner))
            self.moved[end.owner.split()[0]] += end.size_bytes

    def stop(self) -> None:
        self._directions = ()

    @property
    def is_active(self) -> bool:
        return self._tier.is_active

    def close(self) -> None:
        """Give blocks and memory back."""
        self._tier.close()
        self._mempool.free_all(_OWNER)

    def _start(self, direction: str) -> None:
        self._number += 1
        name = f"{direction} {self._number}"
        block_ids = self._batches[self._number % len(self._batches)]
        if direction == "out":
            self._slots[name] = self._tier.copy_out(name, block_ids)
        else:
            self._slots[name] = []
            self._tier.copy_in(name, self._kept, block_ids)


class SwapIns:
    """Prompts are brought in turn, one each so many steps, and let go at once."""

    def __init__(self, worker: Worker, prompts: Sequence[Sequence[int]], every: int) -> None:
        self._swaps = worker.loop._swaps
        self._mempool = worker.loop._mempool
        self._prompts = prompts
        self._every = every
        self._num_turns = self._num_asked = 0
        self._is_open = self._is_waiting = False
        self.lost_blocks = 0
        """That neither HBM nor DRAM had when they were asked for."""

    def begin(self) -> SwapIns:
        self._is_open = True
        return self

    def turn(self) -> None:
        self._num_turns += 1
        if self._is_open and not self._is_waiting and self._num_turns % self._every == 0:
            self._bring()

    def stop(self) -> None:
        self._is_open = False

    @property
    def is_active(self) -> bool:
        return self._is_waiting or self._swaps.is_active

    def _bring(self) -> None:
        tokens = self._prompts[self._num_asked % len(self._prompts)]
        self._num_asked += 1
        path = self._mempool.path(tokens)
        self.lost_blocks += path.num_blocks - self._mempool.find(path).num_blocks
        self._is_waiting = True
        name = f"bench {self._num_asked}"
        self._swaps.bring(name, tokens, Namespace(), self._arrived, keeps=False, is_prompt=False)

    def _arrived(self) -> None:
        self._is_waiting = False


def hbm_of(worker: Worker) -> torch.Tensor:
    """The instance's KV cache: bytes."""
    host = worker._host
    assert isinstance(host, OwnKvHost) and host.tensor is not None
    return host.tensor


def plain_rates(hbm: torch.Tensor, size_bytes: int, repeats: int = 4) -> dict[str, float]:
    """Bytes a second of contiguous copies, with nothing else to do; `both`: of each direction."""
    size_bytes = min(size_bytes, hbm.numel() // 2)
    near, far = hbm[:size_bytes].clone(), hbm[:size_bytes].clone()  # the engine's KV stays as it is
    host = [torch.empty(size_bytes, dtype=hbm.dtype, pin_memory=hbm.is_cuda) for _ in range(2)]
    streams = [torch.cuda.Stream(hbm.device) if hbm.is_cuda else None for _ in range(2)]

    def copy_s(*directions: str) -> float:
        began = time.perf_counter()
        for direction, stream in zip(directions, streams, strict=False):
            with torch.cuda.stream(stream):
                if direction == "out":
                    host[0].copy_(near, non_blocking=True)
                else:
                    far.copy_(host[1], non_blocking=True)
        if hbm.is_cuda:
            torch.cuda.synchronize(hbm.device)
        return time.perf_counter() - began

    with torch.inference_mode():
        return {
            name: size_bytes / min(copy_s(*directions) for _ in range(repeats))
            for name, directions in DIRECTIONS.items()
        }
