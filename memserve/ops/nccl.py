"""NCCL between two ranks, by its C library: communicators that can be given up.

Nothing here waits for the other rank, so that its death never holds a thread. What goes through a
communicator is `nccl_pipe.py`'s matter.

Collaborators: `workers/links/nccl_worker.py` drives one communicator per thread;
`workers/links/nccl_fake.py` is the same over sockets, for machines without a GPU. The library is
the one that torch has loaded already, so that there is one NCCL in a process. It is called directly
and not through vLLM's wrapper, which makes blocking communicators: those cannot be given up while
they are made.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from memserve.errors import StartError, TransferError
from memserve.ops.build import Nccl

ID_BYTES = 128
MAX_CTAS = 32
"""Multiprocessors that a transfer may take of the engine, and of its collectives (a power of two).
Both ends must say the same. With 16, long transfers take up to a twentieth longer:
`bench/fig11_transfer.py --sweep` compares."""

_SUCCESS, _IN_PROGRESS = 0, 7
_API_MAGIC = 0xCAFEBEEF
_UNDEFINED = -(2**31)
_CONFIG_VERSION = 21800
"""The oldest NCCL whose configuration has all that is set here; newer ones read it as such."""
_SONAME = "libnccl.so.2"
_REFUSED = {"NCCL_COMM_BLOCKING": "1", "NCCL_COMM_SPLIT_SHARE_RESOURCES": "0"}
"""They overrule what is asked for here: a dead peer would be waited for."""


class Communicator(Protocol):
    """Two ranks, of which this is one. No two threads call at once."""

    def progress(self) -> bool:
        """Whether both ranks are there, also after `split`. Raises: TransferError; `abort` it
        then."""
        ...

    def split(self) -> None:
        """Both ranks, when something has passed through: from then on launches need no thread of
        NCCL's. `progress` says when it is so; pipes of before are to be closed first. Raises:
        TransferError."""
        ...

    def abort(self) -> None:
        """Give up. What is on a stream ends soon, with any contents; no call may follow, nor one
        of a pipe through it but `close`."""
        ...


class Fabric(Protocol):
    """Where communicators come from."""

    def new_id(self) -> bytes:
        """Names a communicator to be; `ID_BYTES` long. Raises: TransferError."""
        ...

    def join(self, unique_id: bytes, rank: int) -> Communicator:
        """Be rank 0 or 1 of it; `progress` says when both are there. Raises: TransferError."""
        ...


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


class _Config(ctypes.Structure):
    """`ncclConfig_t` of `_CONFIG_VERSION`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
    )


def _config(max_ctas: int, *, is_blocking: bool) -> _Config:
    return _Config(
        size=ctypes.sizeof(_Config),
        magic=_API_MAGIC,
        version=_CONFIG_VERSION,
        blocking=is_blocking,
        cgaClusterSize=_UNDEFINED,
        minCTAs=_UNDEFINED,
        maxCTAs=max_ctas,
        netName=None,
        splitShare=1,
    )


class NcclFabric:
    """Communicators of the calling thread's current GPU."""

    def __init__(self, *, max_ctas: int = MAX_CTAS) -> None:
        """Raises: StartError (no NCCL on this machine, or settings that it cannot work with)."""
        for name, value in _REFUSED.items():
            if os.environ.get(name) == value:
                raise StartError(f"NCCL links cannot work with {name}={value}: unset it")
        self._functions = _open()
        self._max_ctas = max_ctas

    @property
    def version(self) -> int:
        """As NCCL counts: 22907 is 2.29.7."""
        version = ctypes.c_int()
        self._functions.ncclGetVersion(ctypes.byref(version))
        return version.value

    def new_id(self) -> bytes:
        unique_id = _UniqueId()
        code = self._functions.ncclGetUniqueId(ctypes.byref(unique_id))
        if code != _SUCCESS:
            raise TransferError(f"NCCL gives no id: {_text(self._functions, code)}")
        return bytes(unique_id)

    def join(self, unique_id: bytes, rank: int) -> NcclCommunicator:
        if len(unique_id) != ID_BYTES:
            raise TransferError(f"an id of {len(unique_id)} bytes, not {ID_BYTES}")
        communicator = ctypes.c_void_p()
        code = self._functions.ncclCommInitRankConfig(
            ctypes.byref(communicator),
            2,
            _UniqueId.from_buffer_copy(unique_id),
            rank,
            ctypes.byref(_config(self._max_ctas, is_blocking=False)),
        )
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise TransferError(f"NCCL makes no communicator: {_text(self._functions, code)}")
        at_once = _config(self._max_ctas, is_blocking=True)
        return NcclCommunicator(self._functions, communicator, at_once, rank=rank)


class NcclCommunicator:
    """See `Communicator`.

    It is made as a non-blocking one, which can be given up at any time. A blocking one is split off
    it later, which uses the same connections: to launch on it waits for nobody any more, and takes
    no thread of NCCL's.
    """

    def __init__(
        self,
        functions: ctypes.CDLL,
        communicator: ctypes.c_void_p,
        at_once: _Config,
        *,
        rank: int,
    ) -> None:
        """`at_once`: of the one to be split off."""
        self._functions = functions
        self._communicator: ctypes.c_void_p | None = communicator
        self._split = ctypes.c_void_p()
        """Null until NCCL has made it."""
        self._at_once = at_once
        self._rank = rank

    def progress(self) -> bool:
        state = ctypes.c_int()
        code = self._functions.ncclCommGetAsyncError(self._open(), ctypes.byref(state))
        self._require(code)
        self._require(state.value)
        return state.value == _SUCCESS

    def split(self) -> None:
        code = self._functions.ncclCommSplit(
            self._open(), 0, self._rank, ctypes.byref(self._split), ctypes.byref(self._at_once)
        )
        self._require(code)

    @property
    def handle(self) -> int:
        """`ncclComm_t`. Raises: TransferError (aborted)."""
        communicator = self._open()
        return self._split.value or communicator.value or 0

    @property
    def peer(self) -> int:
        """The other rank."""
        return 1 - self._rank

    @property
    def addresses(self) -> Nccl:
        """Of the functions by which a pipe uses it."""
        functions = self._functions
        return Nccl(
            *(
                ctypes.cast(function, ctypes.c_void_p).value
                for function in (
                    functions.ncclCommGetAsyncError,
                    functions.ncclGroupStart,
                    functions.ncclGroupEnd,
                    functions.ncclSend,
                    functions.ncclRecv,
                )
            )
        )

    def error(self, code: int) -> TransferError:
        """What NCCL's code means."""
        return TransferError(f"NCCL failed: {_text(self._functions, code)}")

    def abort(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:  # their results tell nothing: it is over in any case
            self._functions.ncclCommAbort(communicator)  # what is being split off ends with it
            if self._split.value:
                self._functions.ncclCommAbort(self._split)

    def _open(self) -> ctypes.c_void_p:
        if self._communicator is None:
            raise TransferError("the communicator was aborted")
        return self._communicator

    def _require(self, code: int) -> None:
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise self.error(code)


def _text(functions: Any, code: int) -> str:
    text: bytes = functions.ncclGetErrorString(code)
    return text.decode()


def library_paths() -> Iterator[str]:
    """Where NCCL may be: loaded already or on the loader's path, then in its Python package."""
    yield _SONAME
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return
    for folder in (found.submodule_search_locations if found else None) or ():
        yield str(Path(folder, "lib", _SONAME))


def _open() -> ctypes.CDLL:
    problems = []
    for path in library_paths():
        try:
            return _declare(ctypes.CDLL(path))
        except (OSError, AttributeError) as error:
            problems.append(str(error))
    raise StartError(f"no NCCL on this machine: {'; '.join(problems)}")


def _declare(functions: ctypes.CDLL) -> ctypes.CDLL:
    """Argument types: without them ctypes would cut pointers to 32 bits. And what pipes call."""
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    arguments: dict[str, tuple[Any, ...]] = {
        "ncclGetVersion": (ctypes.POINTER(integer),),
        "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
        "ncclCommInitRankConfig": (
            ctypes.POINTER(pointer),
            integer,
            _UniqueId,
            integer,
            ctypes.POINTER(_Config),
        ),
        "ncclCommSplit": (
            pointer,
            integer,
            integer,
            ctypes.POINTER(pointer),
            ctypes.POINTER(_Config),
        ),
        "ncclCommGetAsyncError": (pointer, ctypes.POINTER(integer)),
        "ncclCommAbort": (pointer,),
    }
    for name in ("ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv"):
        getattr(functions, name)
    for name, kinds in arguments.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = kinds, integer
    functions.ncclGetErrorString.argtypes = (integer,)
    functions.ncclGetErrorString.restype = ctypes.c_char_p
    return functions
