"""Where copies between HBM and DRAM run: streams beside the engine's on a GPU, at once on the CPU.

Collaborators: `dram.py` queues copies and asks what has become of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class CopyQueue(Protocol):
    """Copies that run one after the other."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """None on the CPU."""
        ...

    @property
    def is_beside_engine(self) -> bool:
        """Whether copies go on while the engine computes, or a call waits for them."""
        ...

    def follow_engine(self) -> None:
        """Let what comes next run behind all that the engine has queued so far."""
        ...

    def hold_engine(self) -> None:
        """Let what the engine queues next run behind all that was queued here so far."""
        ...

    def mark(self) -> Callable[[], bool]:
        """A question to ask later: whether all that was queued until now is done."""
        ...

    def wait(self) -> None:
        """Return when everything is done."""
        ...


class HostQueue:
    """On the CPU a copy is done when its call returns."""

    stream = None
    is_beside_engine = False

    def follow_engine(self) -> None:
        pass

    def hold_engine(self) -> None:
        pass

    def mark(self) -> Callable[[], bool]:
        return lambda: True

    def wait(self) -> None:
        pass


class CudaQueue:
    """A stream of its own on the engine's GPU."""

    is_beside_engine = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)

    def follow_engine(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def hold_engine(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self.stream)

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record(self.stream)
        is_done: Callable[[], bool] = event.query
        return is_done

    def wait(self) -> None:
        self.stream.synchronize()


def make_queue(device: torch.device) -> CopyQueue:
    """A queue for one direction between host memory and this device."""
    return CudaQueue(device) if device.type == "cuda" else HostQueue()
