"""What a worker tells the hub about its index: `CacheChanged`, and `CacheSnapshot` when asked.

    engine loop, transfers ─ event ─▶ send ─▶ (CacheChanged, if it has to come first) ─▶ event
                                     flush ─▶ CacheChanged, at the end of each turn of the loop

Changes are collected over a turn of the loop. Those of a step leave after its `Tokens`, which a
client waits for, but before its `Finished`; those of a commit before its `Inserted`. So when the
hub hears that KV is there, its prompt trees know it, and the next turn of the conversation is
placed by what is true now.

Collaborators: `mempool.py` has the changes; all events of a worker go through `send`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memserve.changes import Inserted as IndexInserted
from memserve.messages import AnyEvent, CacheChanged, CacheSnapshot, Finished, Inserted
from memserve.types import InstanceId
from memserve.workers.mempool import MemPool

_PART_BYTES = 128 << 10  # the tokens of 2,048 blocks of 16: the hub must not be held up


class IndexReports:
    """The numbered reports of one life of an instance."""

    def __init__(
        self,
        mempool: MemPool,
        instance: InstanceId,
        epoch: int,
        send: Callable[[AnyEvent], None],
        *,
        part_bytes: int = _PART_BYTES,
    ) -> None:
        """`mempool` must record changes; `send` takes the events in order.

        `part_bytes`: of tokens in one part of a snapshot.
        """
        self._mempool = mempool
        self._instance = instance
        self._epoch = epoch
        self._send = send
        self._part_bytes = part_bytes
        self._sequence = 0

    def send(self, event: AnyEvent) -> None:
        """Pass an event on, behind the changes that whoever hears of it must know."""
        if isinstance(event, Finished | Inserted):
            self.flush()
        self._send(event)

    def flush(self) -> None:
        """Say what has changed since the last time, if anything has."""
        if changes := self._mempool.take_changes():
            self._sequence += 1
            self._send(
                CacheChanged(
                    instance=self._instance,
                    epoch=self._epoch,
                    sequence=self._sequence,
                    changes=changes,
                )
            )

    def send_snapshot(self) -> None:
        """Describe the whole index, as it is after the changes that are out then."""
        self.flush()
        parts = _parts(self._mempool.snapshot(), self._part_bytes)
        part = next(parts, [])
        while True:
            following = next(parts, None)
            self._send(
                CacheSnapshot(
                    instance=self._instance,
                    epoch=self._epoch,
                    sequence=self._sequence,
                    changes=part,
                    is_last=following is None,
                )
            )
            if following is None:
                return
            part = following


def _parts(changes: Iterator[IndexInserted], part_bytes: int) -> Iterator[list[IndexInserted]]:
    """Parts of up to so many bytes of tokens, or of one change that is larger."""
    part: list[IndexInserted] = []
    size = 0
    for change in changes:
        if part and size + len(change.token_ids) > part_bytes:
            yield part
            part, size = [], 0
        part.append(change)
        size += len(change.token_ids)
    if part:
        yield part
