"""One instance's half of every transfer: allocate → transmit → insert (the paper's section 4.2).

    receiver   Allocate ─▶ reservation ─┬─ Commit ─▶ inserted, pinned until its request is scheduled
                  │  ▲         │        └─ Cancel ─▶ freed
         no room  ▼  │ room    └─ deadline ─▶ quarantined: said, and kept, until Commit or Cancel
                waiting (who may), first come first served ─ patience ends ─▶ Refused

    sender     Transmit ─▶ waiting ──────┬─▶ sending ─▶ Sent or TransmitFailed, pins dropped
               hold_source ─▶ pinned ────┤
               source_ready              │
               Transmit of history ──────┘  matched, pinned, sent once all of it is computed

Each side's references in the pool have an owner named after the transfer or the request, and each
path ends in exactly one drop of it. A reservation is freed only on command: the hub knows when the
link is quiet, the receiver of a one-sided link does not. The sender never drops blocks that a link
still reads: a cancelled transfer keeps them until the link reports its end.

Collaborators: `commands.py` passes the hub's commands on and sends the events that come out,
`mempool.py` has the blocks, `sending.py` is the sender's half, `links/` the wires. All in the
engine's thread, between its steps or while it waits inside one, without locks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from memserve.core.tokens import Path
from memserve.errors import GeometryMismatchError, OutOfBlocksError, TransferError
from memserve.messages import (
    Allocate,
    Allocated,
    AnyEvent,
    Cancel,
    Commit,
    Expired,
    History,
    Inserted,
    InsertFailed,
    LinkReady,
    PeerJoined,
    Refused,
    Transmit,
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
from memserve.workers.links.base import LayerLink, Link, LinkOpener, require_compatible
from memserve.workers.mempool import PRIVATE_SALT, MemPool
from memserve.workers.room_queue import RoomQueue
from memserve.workers.sending import Peer, Sender


def private_namespace(request_id: RequestId, namespace: Namespace) -> Namespace:
    """Where a private request's KV is indexed instead, so that no other finds it."""
    salt = f"{PRIVATE_SALT}{request_id}\0{namespace.cache_salt or ''}"
    return Namespace(cache_salt=salt, lora_name=namespace.lora_name)


def reservation_owner(transfer_id: TransferId) -> str:
    """Name in the pool of what a receiver holds until `Commit` or `Cancel`."""
    return f"reservation of {transfer_id}"


def arrival_owner(request_id: RequestId) -> str:
    """Name in the pool of what is pinned from `Commit` until the request was scheduled."""
    return f"arrival for {request_id}"


class _Reservation(msgspec.Struct):
    request_id: RequestId
    path: Path
    is_private: bool
    hit_ids: list[BlockId]
    new_ids: list[BlockId]
    deadline_s: float


class Transfers:
    """Reservations, arrivals, sources and links of one instance."""

    def __init__(
        self,
        mempool: MemPool,
        geometry: Geometry,
        open_link: LinkOpener,
        instance: InstanceId,
        epoch: int,
        emit: Callable[[AnyEvent], None],
        style: TransferStyle,
    ) -> None:
        """`emit` takes the events in order, from inside the calls below. `style`: see `early.py`,
        which asks for it; LAYER needs links that can do it."""
        self._mempool = mempool
        self._geometry = geometry
        self._open_link = open_link
        self._instance = instance
        self._epoch = epoch
        self._emit = emit
        self.style = style
        self._reservations: dict[TransferId, _Reservation] = {}
        self._waiting = RoomQueue(mempool, self._reserve_and_spare)
        self._growth: dict[RequestId, int] = {}
        """Blocks that requests may still need which run, or will, on KV that came, or comes."""
        self._arrivals: dict[RequestId, Path | None] = {}
        """Committed for requests that have not been scheduled; the path only if it is private."""
        self._peers: dict[InstanceId, Peer] = {}
        self.sender = Sender(mempool, geometry, self._peers, instance, epoch, emit)
        """For `early.py`, which gives it parts of requests that still run."""

    # ── receiver ──────────────────────────────────────────────────────────────────────────────

    def allocate(self, command: Allocate, token_ids: Sequence[int]) -> None:
        """Reserve blocks for the KV of `token_ids`: all tokens, also those known before.

        Emits Allocated or Refused; later, if it may wait and there is no room.
        """
        transfer_id = command.transfer_id
        if transfer_id in self._reservations or transfer_id in self._waiting:
            self._refuse(transfer_id, "the transfer has a reservation already")
            return
        namespace = command.namespace
        if command.is_private:
            namespace = private_namespace(command.request_id, namespace)
        path = self._mempool.path(token_ids, namespace)
        if command.patience_s and path.num_blocks <= self._mempool.max_alloc:
            self._waiting.add(command, path)
        elif (problem := self._reserve(command, path)) is not None:
            self._refuse(transfer_id, problem)

    def _reserve_and_spare(self, command: Allocate, path: Path) -> str | None:
        """As `_reserve`, but leave room for what the requests are to generate that are here.

        If all went to the prompts of others, the engine would put running requests back, and their
        KV would be evicted, and computed again. Who is alone may have everything.
        """
        # Of what it generates, who runs has half before it, on average.
        growth = 1 + command.expected_tokens // (2 * self._mempool.block_size)
        spare_blocks = self.promised_blocks + growth if self._growth else 0
        problem = self._reserve(command, path, spare_blocks)
        if problem is None:
            self._growth[command.request_id] = growth
        return problem

    def _reserve(self, command: Allocate, path: Path, spare_blocks: int = 0) -> str | None:
        """Take the blocks, if so many are left then. Emits Allocated, or returns why not."""
        transfer_id = command.transfer_id
        hit_ids = self._mempool.match_path(path)
        owner = reservation_owner(transfer_id)
        # The hits first: what alloc_mem evicts must not be among them.
        self._mempool.pin(owner, hit_ids)
        missing = path.num_blocks - len(hit_ids)
        try:
            self._mempool.require_available(missing + spare_blocks)
            new_ids = self._mempool.alloc_mem(missing, owner, lease_s=command.deadline_s)
        except OutOfBlocksError as error:
            self._mempool.unpin(owner)
            return str(error)
        self._reservations[transfer_id] = _Reservation(
            request_id=command.request_id,
            path=path,
            is_private=command.is_private,
            hit_ids=hit_ids,
            new_ids=new_ids,
            deadline_s=command.deadline_s,
        )
        self._emit(
            Allocated(
                instance=self._instance,
                epoch=self._epoch,
                transfer_id=transfer_id,
                hit_blocks=len(hit_ids),
                block_ids=new_ids,
            )
        )
        return None

    def commit(self, command: Commit) -> None:
        """Insert the reserved blocks, if all their bytes were written.

        Emits Inserted or InsertFailed.
        """
        transfer_id = command.transfer_id
        reservation = self._reservations.pop(transfer_id, None)
        if reservation is None:
            self._fail_insert(transfer_id, "no such reservation")
            return
        owner = reservation_owner(transfer_id)
        self._mempool.end_lease(owner)
        block_bytes = self._geometry.block_bytes * self._geometry.tp_size
        promised = len(reservation.new_ids) * block_bytes
        if command.size_bytes != promised:
            self._mempool.free_all(owner)
            self._fail_insert(
                transfer_id, f"{command.size_bytes} bytes were written, {promised} promised"
            )
            return
        num_blocks = self._insert(owner, reservation, pin=command.pin)
        self._emit(
            Inserted(
                instance=self._instance,
                epoch=self._epoch,
                transfer_id=transfer_id,
                num_tokens=num_blocks * self._geometry.block_size,
            )
        )

    def expire(self) -> None:
        """Quarantine the reservations whose deadline has passed. Emits Expired for each.

        Who waited too long for room gets none. Emits Refused for each.
        """
        due = set(self._mempool.expired())
        for command in self._waiting.take_overdue():
            self._refuse(command.transfer_id, f"no room within {command.patience_s:g} s")
        for transfer_id, reservation in self._reservations.items():
            if (owner := reservation_owner(transfer_id)) not in due:
                continue
            self._mempool.quarantine(owner)
            self._mempool.renew(owner, reservation.deadline_s)
            self._emit(Expired(instance=self._instance, epoch=self._epoch, transfer_id=transfer_id))

    def next_deadline(self) -> float | None:
        """When to call `expire` next, by MemPool's clock; None: not at all."""
        return self._mempool.next_expiry()

    def scheduled(self, request_id: RequestId) -> None:
        """The request's own references hold its blocks now: drop what kept them for it."""
        self._arrivals.pop(request_id, None)
        self._mempool.unpin(arrival_owner(request_id))

    def relax(self) -> int:
        """Drop all pins on arrivals, when the engine starves; returns how many blocks that were.

        Their KV stays indexed while it can. Who waits for room gets none until `reserve_waiting`.
        """
        self._waiting.hold_back()
        return sum(self._mempool.unpin(arrival_owner(r)) for r in self._arrivals)

    def forget(self, request_id: RequestId) -> None:
        """The request does not run here (any more): drop its arrival, and what was private."""
        self._growth.pop(request_id, None)
        path = self._arrivals.pop(request_id, None)
        self._mempool.unpin(arrival_owner(request_id))
        if path is not None:
            self._mempool.delete_path(path)

    # ── sender ────────────────────────────────────────────────────────────────────────────────

    def hold_source(
        self, request_id: RequestId, block_ids: Sequence[BlockId], num_tokens: int
    ) -> None:
        """Pin the KV of a request that ends now, while it still has its blocks.

        `block_ids`: its block table; `num_tokens`: how many tokens' KV that holds. The pin ends
        with the request's `Transmit`, or by `drop_source`.
        """
        self.sender.hold_source(request_id, block_ids, num_tokens)

    def source_ready(self, request_id: RequestId) -> None:
        """The held request's `Finished` is out: from now on its blocks may be sent."""
        self.sender.source_ready(request_id)

    def transmit(self, command: Transmit) -> None:
        """Send, now or as soon as the source is ready. Ends in Sent or TransmitFailed."""
        self.sender.transmit(command)

    def transmit_history(self, command: Transmit, history: History) -> None:
        """Send what the index holds of these tokens. Ends in Sent or TransmitFailed.

        Nothing is read before all of it is written: the index also names what the present step
        computes. Nothing is remembered of the request; the blocks are pinned until the end.
        """
        self.sender.transmit_history(command, history)

    def drop_source(self, request_id: RequestId) -> None:
        """The request is forgotten: cancel its transfer and drop its pin. Unknown ones are fine."""
        self.sender.drop_source(request_id)

    def poll(self) -> None:
        """Let the links go on. Emits Sent and TransmitFailed for what has ended."""
        self.sender.poll()

    def reserve_waiting(self, *, engine_starves: bool) -> None:
        """Reserve for those that wait, as far as there is room. Emits Allocated.

        Once a step, for it matches a whole prompt. Nobody gets any while the engine starves.
        """
        self._waiting.serve(engine_starves=engine_starves)

    @property
    def num_layers(self) -> int:
        """Of a block."""
        return self._geometry.num_layers

    @property
    def is_active(self) -> bool:
        """Whether `poll` has something to do."""
        return self.sender.is_active

    # ── both ──────────────────────────────────────────────────────────────────────────────────

    def cancel(self, command: Cancel) -> None:
        """Receiver: free the reservation. Sender: stop; emits TransmitFailed when that is done."""
        transfer_id = command.transfer_id
        self._waiting.remove(transfer_id)
        if (reservation := self._reservations.pop(transfer_id, None)) is not None:
            self._free_reservation(transfer_id)
            self._growth.pop(reservation.request_id, None)
        self.sender.cancel(transfer_id)

    def peer_joined(self, command: PeerJoined) -> None:
        """Open the link to a peer, in place of one to an earlier life. Emits LinkReady."""
        if (former := self._peers.get(command.peer)) is not None:
            self.peer_lost(command.peer, former.epoch)
        kind, problem = "", None
        try:
            require_compatible(self._geometry, command.geometry, self._instance, command.peer)
            link = self._open_link(command)
            self._require_style(link)
        except (GeometryMismatchError, TransferError) as error:
            problem = str(error)
        else:
            kind = link.kind
            self._peers[command.peer] = Peer(command.peer_epoch, link)
        self._emit(
            LinkReady(
                instance=self._instance,
                epoch=self._epoch,
                peer=command.peer,
                peer_epoch=command.peer_epoch,
                kind=kind,
                error=problem,
            )
        )

    def peer_lost(self, peer: InstanceId, peer_epoch: int) -> None:
        """Close the link to this life of the peer. Emits TransmitFailed for what was for it."""
        known = self._peers.get(peer)
        if known is not None and known.epoch != peer_epoch:
            return
        if known is not None:
            del self._peers[peer]
            known.link.close(is_lost=True)
        self.sender.peer_lost(peer, f"{peer} was lost")

    def close(self) -> None:
        """Close all links, and drop everything that is held. Emits nothing."""
        for peer in self._peers.values():
            peer.link.close()
        for transfer_id in self._reservations:
            self._free_reservation(transfer_id)
        for request_id in self._arrivals:
            self._mempool.free_all(arrival_owner(request_id))
        self.sender.close()
        self._waiting.clear()
        for table in (self._peers, self._reservations, self._arrivals, self._growth):
            table.clear()

    # ── accounting ────────────────────────────────────────────────────────────────────────────

    @property
    def reserved_blocks(self) -> int:
        """Blocks that peers may write, and that are not committed."""
        return sum(len(r.new_ids) for r in self._reservations.values())

    @property
    def quarantined_blocks(self) -> int:
        """Of those: past their deadline."""
        is_quarantined = self._mempool.is_quarantined
        return sum(
            len(reservation.new_ids)
            for transfer_id, reservation in self._reservations.items()
            if is_quarantined(reservation_owner(transfer_id))
        )

    @property
    def promised_blocks(self) -> int:
        """Blocks that are left for what the requests here are to generate."""
        return sum(self._growth.values())

    @property
    def pinned_requests(self) -> int:
        """Requests whose KV is pinned without their running: arrivals, sources, being sent."""
        arrivals = {r for r in self._arrivals if self._mempool.holds(arrival_owner(r))}
        return len(arrivals | self.sender.pinned_requests)

    def check_integrity(self) -> list[str]:
        """Where these tables and the pool's owners disagree, as text. Does not mutate."""
        expected = {
            **{reservation_owner(t): r.hit_ids + r.new_ids for t, r in self._reservations.items()},
            **self.sender.expected_holdings(),
        }
        return [
            f"{owner} should hold {block_ids}, holds {held}"
            for owner, block_ids in expected.items()
            if (held := self._mempool.held(owner)) != block_ids
        ]

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _free_reservation(self, transfer_id: TransferId) -> None:
        """No link writes into it any more."""
        owner = reservation_owner(transfer_id)
        self._mempool.end_lease(owner)
        self._mempool.free_all(owner)

    def _insert(self, owner: str, reservation: _Reservation, *, pin: bool) -> int:
        """Make the reserved blocks historical; returns how many blocks of the request are."""
        if reservation.is_private and not pin:
            self._mempool.free_all(owner)  # nobody will ever look for it
            return 0
        block_ids = reservation.hit_ids + reservation.new_ids
        self._mempool.insert_path(reservation.path, block_ids, owner)
        if pin:
            request_id = reservation.request_id
            self._mempool.hand_over(owner, arrival_owner(request_id))
            self._arrivals[request_id] = reservation.path if reservation.is_private else None
        else:
            self._mempool.free_all(owner)
        return len(block_ids)

    def _require_style(self, link: Link) -> None:
        if self.style is TransferStyle.LAYER and not isinstance(link, LayerLink):
            link.close()
            raise TransferError(f"transfer.style is 'layer', which no {link.kind} link can do")

    def _refuse(self, transfer_id: TransferId, reason: str) -> None:
        self._emit(
            Refused(
                instance=self._instance, epoch=self._epoch, transfer_id=transfer_id, reason=reason
            )
        )

    def _fail_insert(self, transfer_id: TransferId, reason: str) -> None:
        self._emit(
            InsertFailed(
                instance=self._instance, epoch=self._epoch, transfer_id=transfer_id, reason=reason
            )
        )
