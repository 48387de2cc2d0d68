"""Moves KV blocks for one rank of an instance, in a thread of the rank's own process.

The rank's main thread runs vLLM's steps; this one does what the instance's driver asks for over a
pipe (`rank_messages.py`), so that copies neither wait for a step nor hold one up. It owns the
rank's links, and makes all calls on them; the same goes for its part of the DRAM tier.

Collaborators: `hosts.py` starts it when the rank has its KV cache; `kv_memory.py` has the openers,
`rank_dram.py` the tier.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec

from memserve.errors import StartError, TransferError
from memserve.workers.kv_memory import Openers
from memserve.workers.links.base import Completion, Link
from memserve.workers.rank_dram import RankDram
from memserve.workers.rank_messages import (
    CancelCopy,
    CancelSend,
    Closed,
    CloseLink,
    CopyBlocks,
    Ended,
    OpenDram,
    Opened,
    OpenLink,
    Order,
    SaveBlocks,
    SendBlocks,
    get_order,
    put,
)

_BUSY_WAIT_S = 0.0001
"""Between two looks at links under way: short beside a copy, long beside a look."""


class _OpenLink(msgspec.Struct):
    link: Link
    num_active: int = 0
    """Transfers that have not ended."""


class RankAgent:
    """Serves one driver. `serve` is the thread's whole life."""

    def __init__(self, connection: Connection, openers: Openers, dram: RankDram) -> None:
        """Takes over the connection. `openers`: as from `KvMemory.openers`."""
        self._connection = connection
        self._openers = openers
        self._dram = dram
        self._links: dict[int, _OpenLink] = {}

    def serve(self) -> None:
        """Until the driver closes its end; then all links are closed, and the tier is."""
        try:
            while True:
                is_active = self._dram.is_active
                is_active = is_active or any(known.num_active for known in self._links.values())
                if self._connection.poll(_BUSY_WAIT_S if is_active else None):
                    self._handle(get_order(self._connection))
                for number, known in self._links.items():
                    self._report(number, known)
                for report in self._dram.poll():
                    put(self._connection, report)
        except (EOFError, ConnectionError):
            pass
        finally:
            for known in self._links.values():
                known.link.close()
            self._dram.close()
            self._connection.close()

    def _handle(self, order: Order) -> None:
        match order:
            case OpenLink():
                self._open(order)
            case SendBlocks():
                self._send(order)
            case CancelSend():
                if (known := self._links.get(order.link)) is not None:
                    known.link.cancel(order.transfer_id)
            case CloseLink():
                if (known := self._links.pop(order.link, None)) is not None:
                    known.link.close(is_lost=order.is_lost)
                put(self._connection, Closed(order.link))
            case OpenDram() | CopyBlocks() | CancelCopy() | SaveBlocks():
                self._dram.handle(order)

    def _open(self, order: OpenLink) -> None:
        error = None
        try:
            self._links[order.link] = _OpenLink(self._openers[order.kind](order.peer))
        except (StartError, TransferError) as problem:
            error = str(problem)
        put(self._connection, Opened(order.link, error))

    def _send(self, order: SendBlocks) -> None:
        known = self._links.get(order.link)
        if known is None:
            failed = Completion(order.transfer_id, 0, 0.0, "the link is closed")
            put(self._connection, Ended(order.link, failed))
            return
        known.num_active += 1
        known.link.send(order.transfer_id, order.source_ids, order.target_ids)

    def _report(self, number: int, known: _OpenLink) -> None:
        for completion in known.link.poll():
            known.num_active -= 1
            put(self._connection, Ended(number, completion))
