"""Two pools of one host without a cluster around them: what the hub does for workers, over a pipe.

    RemotePool (sender)                                SharedPool (receiver)
      PeerJoined: who I am and where my memory is ──▶
                                                  ◀──  PeerJoined
      Allocate: tokens                            ──▶  hits pinned, blocks reserved with a lease
                                                  ◀──  Allocated or Refused
      ═══ KV blocks, written into shared memory ═══▶
      Commit: bytes                               ──▶  counted, inserted
                                                  ◀──  Inserted or InsertFailed

The messages are those of the control channel, and the receiver's half of a transfer is the one that
workers run (`transfer.py`), with its deadlines and its quarantine. Closing the pipe is the sender's
word that it writes no more: the kernel gives it for a sender that dies.

Collaborators: `mempool.py` calls a `RemotePool` by the protocol `pools.Peer`; `kvbuffer.py` has the
memory. `docs/mempool.md` shows the use. No vLLM.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TypeVar

from memserve.errors import MemServeError, OutOfBlocksError, ProtocolError, TransferError
from memserve.messages import (
    Allocate,
    Allocated,
    AnyCommand,
    AnyEvent,
    Cancel,
    Commit,
    Inserted,
    InsertFailed,
    PeerJoined,
    Refused,
    decode_command,
    decode_event,
    encode,
)
from memserve.types import (
    BlockId,
    Geometry,
    InstanceId,
    Namespace,
    RequestId,
    TransferId,
    TransferStyle,
)
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.links.base import Link, rank_peer, require_compatible
from memserve.workers.links.shm import KIND, open_shm
from memserve.workers.mempool import MemPool
from memserve.workers.transfer import Transfers

_EventT = TypeVar("_EventT", bound=AnyEvent)
_EPOCH = 0  # there is no hub that could start anybody again


def block_first_geometry(
    num_blocks: int,
    block_size: int,
    num_layers: int,
    page_bytes: int,
    *,
    model: str = "",
    dtype: str = "float32",
    num_kv_heads: int = 1,
) -> Geometry:
    """Aggregated blocks: a tensor `[num_blocks, num_layers, …]` with `page_bytes` for each layer.

    What names the KV's meaning (`model`, `dtype`, `num_kv_heads`) is only compared between peers.
    """
    return Geometry(
        model=model,
        dtype=dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        page_bytes=page_bytes,
        block_stride=num_layers * page_bytes,
        layer_offsets=tuple(layer * page_bytes for layer in range(num_layers)),
    )


class SharedPool:
    """A pool that one peer may write into. The pool's own thread has to call `serve`."""

    def __init__(
        self,
        mempool: MemPool,
        buffer: KvBuffer,
        geometry: Geometry,
        connection: Connection,
        name: str = "shared",
    ) -> None:
        """Takes over the connection; the buffer stays its owner's."""
        self._connection = connection
        self._hello = _hello(name, buffer, geometry)
        self._transfers = Transfers(
            mempool,
            geometry,
            _no_link,
            InstanceId(name),
            _EPOCH,
            self._answer,
            TransferStyle.REQUEST,
        )

    def serve(self, patience_s: float) -> bool:
        """Serve what the peer asks for, waiting for it for at most so long.

        Returns whether the peer is still there. Once it is gone, its reservations are free again,
        and what it has inserted stays. Raises: ProtocolError for what is no message of a peer.
        """
        self._transfers.expire()
        try:
            while self._connection.poll(patience_s):
                self._handle(decode_command(self._connection.recv_bytes()))
                patience_s = 0.0
        except (EOFError, OSError):
            self.close()
            return False
        return True

    def close(self) -> None:
        """End the connection. The peer must not be writing."""
        self._transfers.close()
        self._connection.close()

    def _handle(self, command: AnyCommand) -> None:
        match command:
            case PeerJoined():
                self._connection.send_bytes(encode(self._hello))
            case Allocate():
                self._transfers.allocate(command, command.token_ids)
            case Commit():
                self._transfers.commit(command)
            case Cancel():
                self._transfers.cancel(command)
            case _:
                raise ProtocolError(f"a peer may not send {type(command).__name__}")

    def _answer(self, event: AnyEvent) -> None:
        if isinstance(event, Allocated | Refused | Inserted | InsertFailed):
            self._connection.send_bytes(encode(event))


class RemotePool:
    """A peer's pool, as this side can fill it. A context manager: it closes link and connection.

    Every wait for the peer ends after `timeout_s`, with TransferError.
    """

    def __init__(
        self,
        connection: Connection,
        buffer: KvBuffer,
        geometry: Geometry,
        name: str = "remote",
        *,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes over the connection, whose other end is served by a `SharedPool`.

        Raises: TransferError (no answer, no memory to map), GeometryMismatchError.
        """
        self._connection = connection
        self._name = name
        self._timeout_s = timeout_s
        self._clock = clock
        self._numbers = itertools.count(1)
        self._block_size = geometry.block_size
        try:
            self._link: Link = self._open(_hello(name, buffer, geometry), buffer)
        except MemServeError:
            connection.close()
            raise

    def write(self, source_ids: Sequence[BlockId], target_ids: Sequence[BlockId]) -> int:
        """See `pools.Peer`."""
        return self._write(TransferId(self._new_id()), source_ids, target_ids)

    def write_with_insert(
        self, token_ids: Sequence[int], block_ids: Sequence[BlockId], namespace: Namespace
    ) -> int:
        """See `pools.Peer`."""
        if len(block_ids) != len(token_ids) // self._block_size:
            raise ValueError(
                f"{len(block_ids)} blocks for {len(token_ids)} tokens in blocks of"
                f" {self._block_size}"
            )
        allocated = self._allocate(token_ids, namespace)
        transfer_id = allocated.transfer_id
        try:
            size_bytes = self._write(
                transfer_id, block_ids[allocated.hit_blocks :], allocated.block_ids
            )
        except TransferError:
            self._send(Cancel(epoch=_EPOCH, transfer_id=transfer_id))
            raise
        self._send(Commit(epoch=_EPOCH, transfer_id=transfer_id, size_bytes=size_bytes, pin=False))
        self._expect(Inserted)
        return len(allocated.block_ids)

    def close(self) -> None:
        """Stop writing, then say so."""
        self._link.close()
        self._connection.close()

    def __enter__(self) -> RemotePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _open(self, hello: PeerJoined, buffer: KvBuffer) -> Link:
        self._send(hello)
        peer = decode_command(self._receive())
        if not isinstance(peer, PeerJoined):
            raise ProtocolError(f"a peer answered {type(peer).__name__}, not PeerJoined")
        require_compatible(hello.geometry, peer.geometry, hello.peer, peer.peer)
        return open_shm(buffer, hello.geometry, rank_peer(KIND, peer, 0))

    def _allocate(self, token_ids: Sequence[int], namespace: Namespace) -> Allocated:
        request_id = RequestId(self._new_id())
        self._send(
            Allocate(
                epoch=_EPOCH,
                transfer_id=TransferId(request_id),
                request_id=request_id,
                known_tokens=0,
                token_ids=list(token_ids),
                namespace=namespace,
                is_private=False,
                deadline_s=self._timeout_s,
            )
        )
        return self._expect(Allocated)

    def _write(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> int:
        if not source_ids and not target_ids:
            return 0
        deadline = self._clock() + self._timeout_s
        self._link.send(transfer_id, source_ids, target_ids)
        while not (done := self._link.poll()):
            if self._clock() > deadline:
                self._link.cancel(transfer_id)
        (completion,) = done
        if completion.error is not None:
            raise TransferError(f"{self._name} → peer: {completion.error}")
        return completion.size_bytes

    def _expect(self, kind: type[_EventT]) -> _EventT:
        event = decode_event(self._receive())
        if isinstance(event, kind):
            return event
        if isinstance(event, Refused):
            raise OutOfBlocksError(f"the peer of {self._name}: {event.reason}")
        reason = event.reason if isinstance(event, InsertFailed) else f"answered {event}"
        raise TransferError(f"the peer of {self._name}: {reason}")

    def _send(self, command: AnyCommand) -> None:
        try:
            self._connection.send_bytes(encode(command))
        except OSError as error:
            raise TransferError(f"the peer of {self._name} is gone") from error

    def _receive(self) -> bytes:
        try:
            if self._connection.poll(self._timeout_s):
                return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise TransferError(f"the peer of {self._name} is gone") from error
        self._connection.close()  # a late answer must not be taken for the next one
        raise TransferError(f"no answer from the peer of {self._name} in {self._timeout_s} s")

    def _new_id(self) -> str:
        return f"{self._name}/{next(self._numbers)}"


def _hello(name: str, buffer: KvBuffer, geometry: Geometry) -> PeerJoined:
    return PeerJoined(
        epoch=_EPOCH,
        peer=InstanceId(name),
        peer_epoch=_EPOCH,
        geometry=geometry,
        addresses={KIND: (buffer.address,)},
    )


def _no_link(peer: PeerJoined) -> Link:
    raise TransferError(f"this pool only receives; it opens no link to {peer.peer}")
