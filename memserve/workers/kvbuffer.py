"""Memory for a KV cache that other processes of this host can map.

An anonymous file (memfd) holds it: it has no name in any file system, so nothing is left when its
last user dies, however it dies. A peer that has mapped it keeps a valid mapping after the owner's
death; the file can neither shrink nor grow, so no access through a mapping can fault.

Collaborators: `compat.py` puts vLLM's KV cache into `tensor`; `links/shm.py` maps the peers' ones.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memserve.errors import StartError, TransferError

if TYPE_CHECKING:
    import numpy.typing as npt

_NAME = "memserve-kv"
_LINK_PREFIX = f"/memfd:{_NAME}"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module of Python 3.11 does not name it


class KvBuffer:
    """One mapping of such a memory, with all its pages present.

    Pages are touched when the buffer is made or opened: a page fault costs more than copying the
    page, and a lack of memory shows at the start instead of in mid-transfer.
    """

    def __init__(self, fd: int, size_bytes: int, address: str) -> None:
        """Takes over the open file `fd`. Use `create` or `open`."""
        self._fd: int | None = fd
        self.size_bytes = size_bytes
        self.address = address
        """Where another process of the same user finds it, as long as this one keeps it open."""
        self._map = mmap.mmap(fd, size_bytes)
        try:
            populate(self._map)
        except OSError:
            self._map.close()
            raise
        self._array: npt.NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, size_bytes: int) -> KvBuffer:
        """A new buffer of zeros, owned by this process. Raises: StartError."""
        if size_bytes <= 0:
            raise StartError(f"a KV buffer needs at least one byte, not {size_bytes}")
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size_bytes, f"/proc/{os.getpid()}/fd/{fd}")
        except OSError as error:
            os.close(fd)
            raise StartError(
                f"no shared memory of {size_bytes >> 20} MiB for the KV cache: {error.strerror}"
            ) from error

    @classmethod
    def open(cls, address: str) -> KvBuffer:
        """Map the buffer of another process. Raises: TransferError if it is not there."""
        fd = None
        try:
            # The process id in the address may meanwhile belong to another process.
            if not os.readlink(address).startswith(_LINK_PREFIX):
                raise TransferError(f"{address} is not a KV buffer")
            fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
            return cls(fd, os.fstat(fd).st_size, address)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            raise TransferError(f"cannot map {address}: {error.strerror}") from error

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, shape `[size_bytes]`. Raises: ValueError once closed."""
        if self._array is None:
            raise ValueError("the KV buffer is closed")
        return self._array

    @property
    def tensor(self) -> torch.Tensor:
        """The same bytes, int8, shape `[size_bytes]`. Raises: ValueError once closed."""
        return torch.from_numpy(self.array.view(np.int8))

    def close(self) -> None:
        """Give the memory back, or leave that to the last tensor over it. Idempotent."""
        self._array = None
        with contextlib.suppress(BufferError):  # a tensor lives on; the mapping goes with it
            self._map.close()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> KvBuffer:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


def populate(mapping: mmap.mmap) -> None:
    """Make every page present and writable. Raises: OSError (no memory)."""
    with contextlib.suppress(OSError):  # the kernel may be built without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel older than that advice
            raise
        _touch(mapping)


def _touch(mapping: mmap.mmap) -> None:
    """Read one byte of every page: never a write, since the owner may be writing there."""
    np.frombuffer(mapping, dtype=np.uint8)[:: mmap.PAGESIZE].max()
