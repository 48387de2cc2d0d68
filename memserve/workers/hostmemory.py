"""Host memory for the DRAM tier: anonymous, so that it is gone with its process, however that ends.

Collaborators: `copies.py` keeps blocks in it; `hosts.py` or, for several ranks, each rank's
`rank_dram.py` makes it.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import psutil
import torch

from memserve.errors import StartError
from memserve.workers.kvbuffer import populate

_KEY = "mempool.dram_gb"
_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")


class HostMemory:
    """Private to this process; pinned if a GPU is to read and write it."""

    def __init__(self, size_bytes: int, *, pin: bool, available_bytes: int | None = None) -> None:
        """`available_bytes`: what the machine can give; None: ask it.

        Asked first, since Linux promises any amount and ends the process that uses it.
        Raises: StartError, which names the configuration's key.
        """
        require_available(size_bytes, available_bytes)
        self.size_bytes = size_bytes
        try:
            memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            populate(memory)
        except (OSError, OverflowError) as error:
            raise StartError(f"{_KEY}: {size_bytes} bytes cannot be had: {error}") from error
        self.tensor = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
        """Shape `[size_bytes]`, uint8, zeros."""
        self._is_pinned = False
        if pin:
            self._pin()

    def close(self) -> None:
        """Undo the pinning; the pages go with the last tensor over them. Idempotent."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._is_pinned = False
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def _pin(self) -> None:
        # Not torch's own pinned memory: its allocator rounds the size up to a power of two.
        address = self.tensor.data_ptr()
        status = torch.cuda.cudart().cudaHostRegister(address, self.size_bytes, 0)
        if int(status) != 0:
            raise StartError(
                f"{_KEY}: {self.size_bytes / _GIB:.2f} GiB of host memory cannot be pinned: CUDA"
                f" error {int(status)}"
            )
        self._is_pinned = True


def require_available(size_bytes: int, available_bytes: int | None = None) -> None:
    """Raises: StartError if the machine cannot give so much. `available_bytes`: see above."""
    available = memory_available() if available_bytes is None else available_bytes
    if size_bytes > available:
        raise StartError(
            f"{_KEY}: {size_bytes / _GIB:.2f} GiB of host memory asked for,"
            f" {available / _GIB:.2f} GiB are available"
        )


def memory_available(cgroup: Path = _CGROUP) -> int:
    """Bytes that a new user of this machine, or of this container, can have."""
    available: int = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        lines = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:  # no container, or one that does not limit memory
        return available
    if limit.isdigit():
        stat = dict(line.split() for line in lines)
        cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        available = min(available, max(0, int(limit) - used + cached))
    return available
