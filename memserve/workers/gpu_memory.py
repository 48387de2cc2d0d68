"""GPU memory for a KV cache that the workers of this host can map (CUDA IPC).

`GpuBuffer` is the owner's side, `PeerGpuBuffer` the side of a peer that writes into it. The address
in between is text: it travels in `Ready.addresses` and `PeerJoined.addresses`.

A peer opens the buffer on its *own* GPU, whichever GPU the memory is on: copies then run on its own
copy engines at the speed of the link between the two. Two instances that share a GPU map each
other's memory in the same way. A mapping keeps the memory alive: when the owner's process dies, the
survivor may still write there, to no purpose and without harm, until it closes the mapping.

Collaborators: `kv_memory.py` gives vLLM's KV cache `GpuBuffer.tensor`; `links/ipc.py` writes into
`PeerGpuBuffer.tensor`; `ops/device_memory.py` is CUDA.
"""

from __future__ import annotations

import base64
import binascii

import msgspec
import torch

from memserve.errors import StartError, TransferError
from memserve.ops.device_memory import DeviceMemory

KIND = "ipc"
"""Key of the address in `Ready.addresses` and `PeerJoined.addresses`."""


class _Address(msgspec.Struct, frozen=True):
    handle: str
    """CUDA's IPC handle, base64."""
    size_bytes: int


class GpuBuffer:
    """One allocation, zeroed, exported for the peers."""

    def __init__(self, memory: DeviceMemory, size_bytes: int) -> None:
        """Raises: StartError (no room, or this GPU's memory cannot be shared)."""
        if size_bytes <= 0:
            raise StartError(f"a KV buffer needs at least one byte, not {size_bytes}")
        self.size_bytes = size_bytes
        self._memory = memory
        self._address: int | None = memory.allocate(size_bytes)
        try:
            handle = base64.b64encode(memory.export(self._address)).decode()
        except StartError:
            self.close()
            raise
        self.address = msgspec.json.encode(_Address(handle, size_bytes)).decode()
        """Where a peer finds it, for as long as this process lives."""
        self._tensor: torch.Tensor | None = memory.tensor(self._address, size_bytes)
        self._tensor.zero_()

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, int8, shape `[size_bytes]`. Raises: ValueError once closed."""
        if self._tensor is None:
            raise ValueError("the KV buffer is closed")
        return self._tensor

    def close(self) -> None:
        """Give the memory back. Nothing may use a tensor over it any more. Idempotent."""
        self._tensor = None
        address, self._address = self._address, None
        if address is not None:
            self._memory.free(address)


class PeerGpuBuffer:
    """A peer's buffer, mapped here."""

    def __init__(self, memory: DeviceMemory, address: str) -> None:
        """Map it. Raises: TransferError (no such address, its owner is gone, no way to its GPU)."""
        self._memory = memory
        where = _parse(address)
        self.size_bytes = where.size_bytes
        try:
            handle = base64.b64decode(where.handle, validate=True)
        except binascii.Error as error:
            raise TransferError(f"not the address of GPU memory: {error}") from error
        self._address: int | None = memory.open(handle)
        self._tensor: torch.Tensor | None = memory.tensor(self._address, self.size_bytes)

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, int8, shape `[size_bytes]`. Raises: ValueError once closed."""
        if self._tensor is None:
            raise ValueError("the peer's KV buffer is closed")
        return self._tensor

    def close(self) -> None:
        """End the mapping; no copy into it may be queued any more. Idempotent.

        Raises: TransferError, if CUDA does; the mapping is given up in any case.
        """
        self._tensor = None
        address, self._address = self._address, None
        if address is not None:
            self._memory.close(address)


def _parse(address: str) -> _Address:
    try:
        return msgspec.json.decode(address, type=_Address)
    except msgspec.MsgspecError as error:
        raise TransferError(f"not the address of GPU memory: {error}") from error
