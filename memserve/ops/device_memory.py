"""GPU memory that other processes of this host can map (CUDA IPC), by the library of `cuda/`.

`DeviceMemory` is what `workers/gpu_memory.py` needs; `CudaDeviceMemory` is the real one. The
library is called directly, and not torch's own sharing of tensors: that leaves files in /dev/shm
when a process is killed, and does not let its user end a mapping.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Protocol

import torch

from memserve.errors import StartError, TransferError
from memserve.ops.build import build_library

HANDLE_BYTES = 64


class DeviceMemory(Protocol):
    """Allocations of one GPU, and mappings on it. Addresses are those of this process."""

    def allocate(self, size_bytes: int) -> int:
        """Raises: StartError."""
        ...

    def free(self, address: int) -> None:
        """Raises: TransferError."""
        ...

    def export(self, address: int) -> bytes:
        """The handle by which another process opens the allocation. Raises: StartError."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's allocation. Raises: TransferError."""
        ...

    def close(self, address: int) -> None:
        """End what `open` began. Raises: TransferError."""
        ...

    def tensor(self, address: int, size_bytes: int) -> torch.Tensor:
        """Bytes at an address, int8, shape `[size_bytes]`; the memory stays its owner's."""
        ...


class CudaDeviceMemory:
    """The memory of `device`, a GPU that this process sees."""

    def __init__(self, device: torch.device) -> None:
        """Raises: StartError (the library cannot be built)."""
        major, minor = torch.cuda.get_device_capability(device)
        self._device = device
        self._index = device.index or 0
        self._functions = _open(build_library(f"sm_{major}{minor}"))

    def allocate(self, size_bytes: int) -> int:
        torch.cuda.empty_cache()  # what torch holds without using it may be what is missing
        address = ctypes.c_uint64()
        code = self._functions.memserve_allocate(self._index, size_bytes, ctypes.byref(address))
        if code:
            size_mb = size_bytes >> 20
            raise StartError(f"no {size_mb} MiB on {self._device} for the KV: {self._text(code)}")
        return address.value

    def free(self, address: int) -> None:
        self._require(
            self._functions.memserve_free(self._index, address), "cannot free the KV cache"
        )

    def export(self, address: int) -> bytes:
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        code = self._functions.memserve_ipc_export(self._index, address, handle)
        if code:
            raise StartError(f"the KV on {self._device} cannot be shared: {self._text(code)}")
        return handle.raw

    def open(self, handle: bytes) -> int:
        if len(handle) != HANDLE_BYTES:
            raise TransferError(f"a handle of {len(handle)} bytes, not {HANDLE_BYTES}")
        address = ctypes.c_uint64()
        self._require(
            self._functions.memserve_ipc_open(self._index, handle, ctypes.byref(address)),
            f"cannot map the peer's KV on {self._device}",
        )
        return address.value

    def close(self, address: int) -> None:
        self._require(
            self._functions.memserve_ipc_close(self._index, address), "cannot unmap the peer's KV"
        )

    def tensor(self, address: int, size_bytes: int) -> torch.Tensor:
        # Said to be on this device also if the memory is a peer's: copies to it are then queued
        # here, and no context is made on the other GPU.
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, size_bytes)
        return torch.empty(0, dtype=torch.int8, device=self._device).set_(storage)

    def _require(self, code: int, problem: str) -> None:
        if code:
            raise TransferError(f"{problem}: {self._text(code)}")

    def _text(self, code: int) -> str:
        name = self._functions.memserve_error_name(code).decode()
        text = self._functions.memserve_error_text(code).decode()
        return f"{text} ({name})"


def _open(path: Path) -> ctypes.CDLL:
    """Raises: StartError if the file is no such library."""
    address, handle = ctypes.POINTER(ctypes.c_uint64), ctypes.c_char_p
    device = ctypes.c_int
    arguments = {
        "memserve_allocate": (device, ctypes.c_int64, address),
        "memserve_free": (device, ctypes.c_uint64),
        "memserve_ipc_export": (device, ctypes.c_uint64, handle),
        "memserve_ipc_open": (device, handle, address),
        "memserve_ipc_close": (device, ctypes.c_uint64),
    }
    try:
        functions = ctypes.CDLL(str(path))
        for name, kinds in arguments.items():
            function = getattr(functions, name)
            function.argtypes, function.restype = kinds, ctypes.c_int
        for name in ("memserve_error_name", "memserve_error_text"):
            function = getattr(functions, name)
            function.argtypes, function.restype = (ctypes.c_int,), ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise StartError(f"{path} is no library of MemServe's: {error}") from error
    return functions
