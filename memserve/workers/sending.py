"""The sending half of transfers: KV goes to a link in parts, each as soon as it is computed.

    transmit ─▶ sending ─┬─ part: pinned ─▶ computed ─▶ at the link ─▶ unpinned ─┐
                         ├─ …                                                    ├─▶ Sent or
                         └─ the rest, when its request has ended ────────────────┘   TransmitFailed

A request whose transfer is ordered while it runs may give parts early, if the style says so
(`early.py`); in every style its end gives the rest, which is mostly all of it. Each part is a
transfer of its own to the link, with a name and a pin of its own: blocks are pinned from the moment
at which they are chosen, since the request may be preempted or aborted at any time, until the link
reads them no more. After that they need no pin: they were computed, and were sent.

Nothing is said before all parts are quiet, and `Sent` counts their bytes. The first part that fails
ends the others. A part that the link does not know yet is dropped at once.

Collaborators: `transfer.py` owns it together with the receiving half and the table of peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from memserve.messages import AnyEvent, History, Sent, Transmit, TransmitFailed
from memserve.types import BlockId, Geometry, InstanceId, RequestId, TransferId
from memserve.workers.links.base import Completion, LayerLink, Link
from memserve.workers.mempool import MemPool


def source_owner(request_id: RequestId) -> str:
    """Name in the pool of what a request that has ended leaves pinned for its `Transmit`."""
    return f"source of {request_id}"


def sending_owner(part_id: TransferId) -> str:
    """Name in the pool of what a link may be reading."""
    return f"sending of {part_id}"


class Peer(msgspec.Struct):
    """One life of a peer."""

    epoch: int
    link: Link


class _Source(msgspec.Struct):
    block_ids: list[BlockId]
    is_ready: bool = False


class _Sending(msgspec.Struct):
    request_id: RequestId
    peer: InstanceId
    first_block: int
    target_ids: list[BlockId]
    num_chosen: int = 0
    """Of `target_ids`: those for which there was a part."""
    num_parts: int = 0
    num_open: int = 0
    """Parts whose end is not known."""
    is_whole: bool = False
    """No part will be added."""
    size_bytes: int = 0
    seconds: float = 0.0
    end_reason: str | None = None
    """Why it ends before it is whole."""

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.target_ids)


class _Part(msgspec.Struct):
    transfer_id: TransferId
    source_ids: list[BlockId]
    target_ids: list[BlockId]
    is_computed: Callable[[], bool] | None
    """What the link waits for; None: it may be reading."""
    num_sends: int = 1
    """Completions that are to come."""


class Sender:
    """Sources, and what is being sent of them. Called as `Transfers` describes it."""

    def __init__(
        self,
        mempool: MemPool,
        geometry: Geometry,
        peers: Mapping[InstanceId, Peer],
        instance: InstanceId,
        epoch: int,
        emit: Callable[[AnyEvent], None],
    ) -> None:
        """`peers` changes under it; `peer_lost` follows when one has left."""
        self._mempool = mempool
        self._geometry = geometry
        self._peers = peers
        self._instance = instance
        self._epoch = epoch
        self._emit = emit
        self._sources: dict[RequestId, _Source] = {}
        self._sending: dict[TransferId, _Sending] = {}
        self._parts: dict[TransferId, _Part] = {}
        self._waiting: dict[RequestId, TransferId] = {}
        """Sendings whose request has not ended."""

    # ── sources ───────────────────────────────────────────────────────────────────────────────

    def hold_source(
        self, request_id: RequestId, block_ids: Sequence[BlockId], num_tokens: int
    ) -> None:
        """See `Transfers.hold_source`."""
        if self._sources.pop(request_id, None) is not None:
            self._mempool.unpin(source_owner(request_id))
        full_ids = list(block_ids[: num_tokens // self._geometry.block_size])
        self._mempool.pin(source_owner(request_id), full_ids)
        self._sources[request_id] = _Source(full_ids)

    def source_ready(self, request_id: RequestId) -> None:
        """See `Transfers.source_ready`."""
        source = self._sources.get(request_id)
        if source is None:
            return
        source.is_ready = True
        if (transfer_id := self._waiting.pop(request_id, None)) is not None:
            self._send_rest(transfer_id)

    def drop_source(self, request_id: RequestId) -> None:
        """See `Transfers.drop_source`."""
        for transfer_id in [t for t, s in self._sending.items() if s.request_id == request_id]:
            self._stop(transfer_id, "the request was aborted")
        if self._sources.pop(request_id, None) is not None:
            self._mempool.unpin(source_owner(request_id))
        self.poll()

    # ── orders ────────────────────────────────────────────────────────────────────────────────

    def transmit(self, command: Transmit) -> None:
        """See `Transfers.transmit`."""
        transfer_id, request_id = command.transfer_id, command.request_id
        if request_id in self._waiting:
            self._fail(transfer_id, "the request waits for another transfer")
            return
        self._open(command)
        source = self._sources.get(request_id)
        if source is not None and source.is_ready:
            self._send_rest(transfer_id)
        else:
            self._waiting[request_id] = transfer_id

    def transmit_history(self, command: Transmit, history: History) -> None:
        """See `Transfers.transmit_history`."""
        sending = self._open(command)
        found = self._mempool.match(history.token_ids, history.namespace)
        sent = found[sending.first_block : sending.end_block]
        self._add_part(command.transfer_id, found, self._mempool.when_written(sent))
        self._close(command.transfer_id, sending, len(found), "are in the index")

    def cancel(self, transfer_id: TransferId) -> None:
        """Stop; TransmitFailed follows when that is done."""
        if transfer_id in self._sending:
            self._stop(transfer_id, "cancelled")
            self.poll()

    # ── while the request runs (`early.py`) ───────────────────────────────────────────────────

    def awaited(self) -> list[RequestId]:
        """Requests whose KV is to be sent and that have not ended."""
        return list(self._waiting)

    def computed(
        self,
        request_id: RequestId,
        block_ids: Sequence[BlockId],
        num_tokens: int,
        is_computed: Callable[[], bool],
    ) -> None:
        """The first `num_tokens` tokens of an awaited request have their KV once `is_computed`.

        `block_ids`: its block table now. What was not chosen of that before becomes a part.
        """
        end = num_tokens // self._geometry.block_size
        self._add_part(self._waiting[request_id], block_ids[:end], is_computed)

    def open_layers(
        self, request_id: RequestId, block_ids: Sequence[BlockId], num_tokens: int
    ) -> TransferId | None:
        """As `computed`, for a part whose layers follow one by one through `send_layer`.

        Returns the part's name; None: there is nothing new.
        """
        end = num_tokens // self._geometry.block_size
        part_id = self._add_part(self._waiting[request_id], block_ids[:end], None)
        if part_id is not None:
            self._parts[part_id].num_sends = self._geometry.num_layers
        return part_id

    def send_layer(self, part_id: TransferId, layer: int) -> None:
        """Each layer of an open part once, from inside the step that computes it."""
        part = self._parts[part_id]
        link = self._link_of(part)
        assert isinstance(link, LayerLink)  # checked when it was opened
        link.send_layer(part_id, layer, part.source_ids, part.target_ids)

    # ── progress ──────────────────────────────────────────────────────────────────────────────

    def poll(self) -> None:
        """Let the links go on; say what has ended."""
        for part_id, part in self._parts.items():
            if part.is_computed is not None and part.is_computed():
                part.is_computed = None
                self._link_of(part).send(part_id, part.source_ids, part.target_ids)
        for peer in self._peers.values():
            for completion in peer.link.poll():
                self._on_completion(completion)

    def peer_lost(self, peer: InstanceId, reason: str) -> None:
        """Its link is closed, and quiet."""
        for transfer_id in [t for t, s in self._sending.items() if s.peer == peer]:
            for part_id in self._parts_of(transfer_id):
                self._drop_part(part_id)
            self._stop(transfer_id, reason)

    def close(self) -> None:
        """All links are closed: drop everything that is held. Emits nothing."""
        for owner in [*map(source_owner, self._sources), *map(sending_owner, self._parts)]:
            self._mempool.free_all(owner)
        for table in (self._sources, self._sending, self._parts, self._waiting):
            table.clear()

    # ── accounting ────────────────────────────────────────────────────────────────────────────

    @property
    def is_active(self) -> bool:
        """Whether `poll` has something to do."""
        return bool(self._parts)

    @property
    def pinned_requests(self) -> set[RequestId]:
        """Requests whose KV is held, or being sent, here."""
        sending = {self._sending[part.transfer_id].request_id for part in self._parts.values()}
        return sending | self._sources.keys()

    def expected_holdings(self) -> dict[str, list[BlockId]]:
        """What each owner should hold in the pool."""
        return {
            **{source_owner(r): s.block_ids for r, s in self._sources.items()},
            **{sending_owner(p): part.source_ids for p, part in self._parts.items()},
        }

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _open(self, command: Transmit) -> _Sending:
        sending = _Sending(command.request_id, command.peer, command.first_block, command.block_ids)
        self._sending[command.transfer_id] = sending
        return sending

    def _add_part(
        self,
        transfer_id: TransferId,
        block_ids: Sequence[BlockId],
        is_computed: Callable[[], bool] | None,
    ) -> TransferId | None:
        """Choose and pin what the request's first blocks, `block_ids`, have beyond earlier parts.

        Returns the part's name; None: there is nothing new, or no way there.
        """
        sending = self._sending[transfer_id]
        begin = sending.first_block + sending.num_chosen
        source_ids = list(block_ids[begin : sending.end_block])
        if not source_ids:
            return None
        if sending.peer not in self._peers:
            self._stop(transfer_id, f"no link to {sending.peer}")
            return None
        part_id = TransferId(f"{transfer_id}+{sending.num_parts}")
        if not sending.num_parts:
            part_id = transfer_id  # mostly there is but one
        end = sending.num_chosen + len(source_ids)
        target_ids = sending.target_ids[sending.num_chosen : end]
        self._mempool.pin(sending_owner(part_id), source_ids)
        self._parts[part_id] = _Part(transfer_id, source_ids, target_ids, is_computed)
        sending.num_chosen = end
        sending.num_parts += 1
        sending.num_open += 1
        return part_id

    def _send_rest(self, transfer_id: TransferId) -> None:
        """The source is ready: all that was chosen is computed, and what is left follows."""
        sending = self._sending[transfer_id]
        source = self._sources.pop(sending.request_id)
        for part_id in self._parts_of(transfer_id):
            if self._parts[part_id].is_computed is not None:
                self._parts[part_id].is_computed = _yes
        self._add_part(transfer_id, source.block_ids, _yes)
        self._mempool.unpin(source_owner(sending.request_id))
        self._close(transfer_id, sending, len(source.block_ids), "full ones are held")

    def _close(
        self, transfer_id: TransferId, sending: _Sending, num_blocks: int, where: str
    ) -> None:
        """No further part: `num_blocks` is all that there is of the request."""
        if sending.end_reason is None:
            sending.is_whole = True
            if sending.end_block > num_blocks:
                text = f"blocks up to {sending.end_block} asked for, {num_blocks} {where}"
                self._stop(transfer_id, text)
            else:
                self._end_if_quiet(transfer_id)
        if transfer_id in self._sending:
            self.poll()

    def _stop(self, transfer_id: TransferId, reason: str) -> None:
        """Parts at the link stay held until their completions."""
        sending = self._sending[transfer_id]
        if sending.end_reason is None:
            sending.end_reason = reason
        if self._waiting.get(sending.request_id) == transfer_id:
            del self._waiting[sending.request_id]
        for part_id in self._parts_of(transfer_id):
            if self._parts[part_id].is_computed is not None:  # the link does not know it yet
                self._drop_part(part_id)
            else:
                self._link_of(self._parts[part_id]).cancel(part_id)
        self._end_if_quiet(transfer_id)

    def _on_completion(self, completion: Completion) -> None:
        part_id = completion.transfer_id
        part = self._parts[part_id]
        transfer_id = part.transfer_id
        sending = self._sending[transfer_id]
        sending.size_bytes += completion.size_bytes
        sending.seconds += completion.seconds
        part.num_sends -= 1
        if part.num_sends == 0:
            self._drop_part(part_id)
        if completion.error is not None and sending.end_reason is None:
            self._stop(transfer_id, completion.error)
        else:
            self._end_if_quiet(transfer_id)

    def _drop_part(self, part_id: TransferId) -> None:
        """No link reads it."""
        part = self._parts.pop(part_id)
        self._sending[part.transfer_id].num_open -= 1
        self._mempool.unpin(sending_owner(part_id))

    def _end_if_quiet(self, transfer_id: TransferId) -> None:
        sending = self._sending[transfer_id]
        if sending.num_open or not (sending.is_whole or sending.end_reason):
            return
        del self._sending[transfer_id]
        if sending.end_reason is not None:
            self._fail(transfer_id, sending.end_reason)
            return
        self._emit(
            Sent(
                instance=self._instance,
                epoch=self._epoch,
                transfer_id=transfer_id,
                num_blocks=len(sending.target_ids),
                size_bytes=sending.size_bytes,
                seconds=sending.seconds,
            )
        )

    def _fail(self, transfer_id: TransferId, reason: str) -> None:
        self._emit(
            TransmitFailed(
                instance=self._instance, epoch=self._epoch, transfer_id=transfer_id, reason=reason
            )
        )

    def _parts_of(self, transfer_id: TransferId) -> list[TransferId]:
        return [p for p, part in self._parts.items() if part.transfer_id == transfer_id]

    def _link_of(self, part: _Part) -> Link:
        return self._peers[self._sending[part.transfer_id].peer].link


def _yes() -> bool:
    return True
