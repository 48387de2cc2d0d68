"""What the cluster manager and the zygote say to each other, and what a worker has to know.

Collaborators: `cluster.py` at one end of a socket pair, `zygote.py` at the other. The body of
each frame (`frames.py`) is msgpack. This module imports neither torch nor vllm, for the
orchestrator imports it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, TypeAlias, TypeVar

import msgspec

from memserve.core.cost_model import BUILT_IN, Profile
from memserve.errors import ProtocolError
from memserve.frames import HEADER_BYTES, body_size, pack
from memserve.types import InstanceId, Lora, Role, TransferStyle


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a worker is born with."""

    instance: InstanceId
    epoch: int
    role: Role
    hub_address: str
    """The path of the hub's socket."""
    run_dir: str
    """Private to the user; temporary files go there, and vanish with it."""
    log_path: str
    """Becomes the worker's standard output and error."""
    log_level: str = "info"
    model: str
    """A folder, or a name that vLLM can fetch."""
    engine: dict[str, Any] = {}
    """Further fields of vLLM's `EngineArgs`."""
    loras: list[Lora] = []
    kv_bytes: int | None
    """Size of the KV cache, of all ranks together; None: what vLLM finds free."""
    layout: str = "auto"
    """auto, block_first or layer_first."""
    dram_bytes: int = 0
    """Host memory for KV blocks, of all ranks together; 0: none."""
    profile: Profile = BUILT_IN
    """What computing costs on this device: whether swapping in is faster."""
    reserve_blocks: int = 1
    """Blocks that stay free when a peer asks for some."""
    heartbeat_interval_s: float = 1.0
    num_threads: int = 1
    """Of torch's operators on the CPU."""
    device: str = "cpu"
    """cpu or cuda."""
    visible_gpus: tuple[str, ...] = ()
    """The GPUs as CUDA_VISIBLE_DEVICES names them: the worker's own first, then its peers'."""
    tp: int = 1
    """Ranks, each a process of its own if there are several; on GPUs, each with one."""
    gpu_locks: tuple[str, ...] = ()
    """Files that instances which share GPUs lock while they measure them; none: not needed."""
    link: str = "auto"
    """The kind of link to use, or auto."""
    style: TransferStyle = TransferStyle.REQUEST


class CalibrationJob(msgspec.Struct, frozen=True, kw_only=True):
    """What `calibrate.py` is to measure. JSON, in a file."""

    name: str
    """The model's name in the profile."""
    model: str
    """As in `WorkerSpec`; so are the fields that follow."""
    engine: dict[str, Any] = {}
    kv_bytes: int | None
    layout: str = "auto"
    num_threads: int = 1
    log_level: str = "warning"
    device: str
    """The device's name in the profile."""
    dtype: str
    """As configured; `auto` is the model's own."""
    created: str
    reduce_ranks: int = 0
    """GPUs to measure all-reduces over; 0: there are not enough, or nothing of the kind."""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Start a worker."""

    spec: WorkerSpec


class Imported(msgspec.Struct, frozen=True, tag=True):
    """The zygote has the engine's modules in memory."""

    seconds: float


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The worker's process exists."""

    instance: InstanceId
    epoch: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """The worker is gone: its process, which has this pid, and all that it left. Said once."""

    instance: InstanceId
    epoch: int
    pid: int
    status: int
    """Exit code, or the negative number of the signal that ended it."""


AnyNotice: TypeAlias = Imported | Forked | Exited

_Message = TypeVar("_Message")

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Fork] = msgspec.msgpack.Decoder(Fork)
_notice_decoder: msgspec.msgpack.Decoder[AnyNotice] = msgspec.msgpack.Decoder(AnyNotice)


def encode_frame(message: Fork | AnyNotice) -> bytes:
    """Header and body."""
    return pack(_encoder.encode(message))


# ── the orchestrator's end: asyncio ───────────────────────────────────────────────────────────


def write_request(writer: asyncio.StreamWriter, request: Fork) -> None:
    """Queue one request."""
    writer.write(encode_frame(request))


async def read_notice(reader: asyncio.StreamReader) -> AnyNotice:
    """The next notice. Raises: EOFError if the zygote is gone, ProtocolError."""
    header = await reader.readexactly(HEADER_BYTES)
    body = await reader.readexactly(body_size(header))
    return _decode(_notice_decoder, body)


# ── the zygote's end, and tests: blocking sockets ─────────────────────────────────────────────


def send_frame(sock: socket.socket, message: Fork | AnyNotice) -> None:
    """Write one message. Raises: OSError if the other end is gone."""
    sock.sendall(encode_frame(message))


def receive_request(sock: socket.socket) -> Fork:
    """Block for the next request. Raises: EOFError if the other end is gone, ProtocolError."""
    return _decode(_request_decoder, _receive_body(sock))


def receive_notice(sock: socket.socket) -> AnyNotice:
    """Block for the next notice, within the socket's time-out.

    Raises: EOFError if the other end is gone, TimeoutError, ProtocolError.
    """
    return _decode(_notice_decoder, _receive_body(sock))


def _receive_body(sock: socket.socket) -> bytes:
    return _receive_exactly(sock, body_size(_receive_exactly(sock, HEADER_BYTES)))


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            piece = sock.recv(size - len(data))
        except ConnectionError:  # it died with unread data in its buffer
            piece = b""
        if not piece:
            raise EOFError("the other end of the socket pair is closed")
        data += piece
    return bytes(data)


def _decode(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a message of the zygote's channel: {error}") from error
