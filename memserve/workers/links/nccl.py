"""Link by NCCL: two-sided messages behind the one-sided `Link`.

    NcclLink ─▶ Sender thread ══ communicator ══▶ Receiver thread ─▶ blocks     (per pair of ranks
                     └───────── Unix socket ─────────┘  accepted by NcclEndpoint  and per direction)

Each rank has an endpoint, which accepts connections of peers and gives each a thread, a
communicator and streams of its own. The receiving engine has no part in it: what it allocated is
named by the sender's announcement, as for a one-sided link. A peer's `NcclLink` is one direction;
when it is closed because the peer was lost, the other ends with it, and cannot be made again.

Collaborators: `nccl_sender.py` and `nccl_receiver.py` are the threads, `nccl_wire.py` has what they
say to each other; `choice.py` opens links. The paper: section 4.3 (one thread per communicator).
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from memserve.errors import StartError, TransferError
from memserve.ops.views import BlockView, PageOrder, head_rows
from memserve.types import BlockId, Geometry, Heads, InstanceId, TransferId
from memserve.workers.links.base import Completion, Rank, RankPeer, require_blocks
from memserve.workers.links.nccl_receiver import Receiver
from memserve.workers.links.nccl_sender import Job, Sender
from memserve.workers.links.nccl_wire import Hello, Wake
from memserve.workers.links.nccl_worker import Machinery

logger = logging.getLogger(__name__)

KIND = "nccl"
"""Key of the endpoint's address in `Ready.addresses` and `PeerJoined.addresses`."""
_BACKLOG = 64
_ACCEPT_AGAIN_S = 0.1
"""After a failure: descriptors may be free again."""


class _Address(msgspec.Struct, frozen=True):
    socket: str
    gpu: str
    """Which GPU it is: NCCL joins no two ranks on one."""


class NcclLink:
    """See `Link`; one rank of a peer."""

    def __init__(
        self, endpoint: NcclEndpoint, sender: Sender, view: BlockView, peer: RankPeer
    ) -> None:
        """Takes over the sender, which is open."""
        self._endpoint = endpoint
        self._sender = sender
        self._view = view
        self._peer = peer
        self._clock = endpoint.machinery.clock
        self._jobs: dict[TransferId, Job] = {}
        self._refused: list[Completion] = []
        self._is_closed = False

    @property
    def kind(self) -> str:
        return KIND

    def send(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        try:
            job = self._job(transfer_id, source_ids, target_ids)
        except TransferError as error:
            self._refused.append(Completion(transfer_id, 0, 0.0, str(error)))
            return
        self._jobs[transfer_id] = job
        self._sender.put(job)

    def poll(self) -> list[Completion]:
        """Whatever the peer has said to be complete."""
        done, self._refused = self._refused, []
        if not self._is_closed:
            done += self._sender.take()
        for completion in done:
            self._jobs.pop(completion.transfer_id, None)
        return done

    def cancel(self, transfer_id: TransferId) -> None:
        """What was announced cannot be recalled: it ends by itself, within milliseconds."""
        if (job := self._jobs.get(transfer_id)) is not None:
            job.error = "cancelled"

    def close(self, *, is_lost: bool = False) -> None:
        self._is_closed = True
        self._jobs.clear()
        self._refused.clear()
        self._sender.close()
        if is_lost:
            self._endpoint.drop(self._peer.peer, self._peer.peer_epoch)

    def _job(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> Job:
        """Raises: TransferError for all that the receiver's end would trip over."""
        if self._is_closed:
            raise TransferError("the link is closed")
        num_targets = self._peer.geometry.num_blocks
        require_blocks(source_ids, self._view.num_blocks, target_ids, num_targets)
        if len(set(target_ids)) != len(target_ids):
            raise TransferError("a target block is named twice")
        return Job(transfer_id, array("i", source_ids), array("i", target_ids), self._clock())


class NcclEndpoint:
    """One rank's part in all NCCL links. The engine's thread calls; peers' threads are inside."""

    def __init__(
        self,
        own: Rank,
        memory: torch.Tensor,
        geometry: Geometry,
        machinery: Machinery,
        *,
        folder: Path,
        gpu: str,
    ) -> None:
        """Accept from now on. `memory` is this rank's KV cache, `gpu` names the GPU that it is on;
        `folder` is where the socket will be. Raises: StartError."""
        self.machinery = machinery
        self._own = own
        self._memory = memory
        self._geometry = geometry
        self._gpu = gpu
        self._path = folder / f"nccl-{own.instance}-{own.epoch}-{own.rank}.sock"
        self._listener = _listen(self._path)
        self.address = msgspec.json.encode(_Address(str(self._path), gpu)).decode()
        """Where peers find it."""
        self._lock = threading.Lock()
        self._receivers: set[Receiver] = set()
        self._over: dict[InstanceId, int] = {}
        """Peer → its latest life that is known to be over."""
        self._is_closing = False
        self._wake = Wake()
        self._thread = threading.Thread(target=self._accept, name="nccl accept", daemon=True)
        self._thread.start()

    def open(self, peer: RankPeer) -> NcclLink:
        """The way to one rank of a peer, warm. Raises: TransferError."""
        where = _parse(peer.address)
        if where.gpu == self._gpu:
            pair = f"{self._own.instance} and {peer.peer}"
            raise TransferError(f"NCCL cannot join {pair}: both are on GPU {where.gpu}")
        view = self._view(peer.own_heads)
        sender = Sender(self._own, view, peer, where.socket, self.machinery)
        try:
            sender.open()
        except TransferError:
            sender.close()
            raise
        return NcclLink(self, sender, view, peer)

    def drop(self, peer: InstanceId, peer_epoch: int) -> None:
        """This life of the peer, and those before it, are over: end all that they write here, and
        let none of them begin again. On return their blocks may be given to others."""
        with self._lock:
            self._over[peer] = max(peer_epoch, self._over.get(peer, peer_epoch))
            lost = [
                receiver
                for receiver in self._receivers
                if (hello := receiver.hello) is not None
                and hello.instance == peer
                and hello.epoch <= peer_epoch
            ]
        self._end(lost)

    def close(self) -> None:
        """End all threads and remove the socket. Links must be closed before. Idempotent."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()
        with self._lock:
            everybody = list(self._receivers)
        self._end(everybody)
        self._wake.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    # ── peers' connections ────────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while True:
            poller.poll()
            if self._is_closing:
                return
            try:
                sock, _ = self._listener.accept()
            except OSError as error:  # it went away again, or there are no descriptors left
                logger.warning("a peer could not be accepted: %s", error)
                self._wake.wait(_ACCEPT_AGAIN_S)  # it is in the queue still, and wakes the poller
                continue
            receiver = Receiver(sock, self.machinery, self._view, self._admit)
            with self._lock:
                ended = [one for one in self._receivers if one.has_ended]
                self._receivers.add(receiver)
            receiver.start()
            self._end(ended)

    def _admit(self, receiver: Receiver, hello: Hello) -> None:
        """In the receiver's thread. The latest connection of a rank replaces those before it."""
        own = self._own
        if (hello.peer, hello.peer_epoch) != (own.instance, own.epoch):
            raise TransferError(
                f"{hello.instance} looks for epoch {hello.peer_epoch} of {hello.peer},"
                f" and found epoch {own.epoch} of {own.instance}"
            )
        with self._lock:
            if hello.epoch <= self._over.get(hello.instance, -1):
                raise TransferError(f"epoch {hello.epoch} of {hello.instance} is over")
            former = [
                (one, known.epoch)
                for one in self._receivers
                if one is not receiver
                and (known := one.hello) is not None
                and (known.instance, known.rank) == (hello.instance, hello.rank)
            ]
            if any(epoch > hello.epoch for _, epoch in former):
                raise TransferError(f"a later life of {hello.instance} is connected")
            receiver.hello = hello
        self._end([one for one, _ in former])

    def _end(self, receivers: Sequence[Receiver]) -> None:
        for receiver in receivers:
            receiver.ask_to_close()
        for receiver in receivers:
            receiver.close()
        with self._lock:
            self._receivers.difference_update(receivers)

    def _view(self, heads: Heads | None) -> BlockView:
        geometry = self._geometry
        if heads is None:
            return BlockView.of(geometry, self._memory)
        order = PageOrder(geometry.page_order)
        rows = head_rows(geometry, heads.first, heads.count, order)
        return BlockView.of(geometry, self._memory, rows)


def _listen(path: Path) -> socket.socket:
    """Raises: StartError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {path}: {error}") from error
    listener.setblocking(False)
    return listener


def _parse(address: str) -> _Address:
    try:
        return msgspec.json.decode(address, type=_Address)
    except msgspec.MsgspecError as error:
        raise TransferError(f"not the address of an NCCL endpoint: {error}") from error
