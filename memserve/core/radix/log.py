"""What changed in the local index since its owner last asked, in the words of `changes.py`.

Written by `forest.py`. Neighbouring keys are joined to ranges as they come, also over several
calls: an engine evicts block by block, and one range is all that the scheduler's trees need to
hear.
"""

from __future__ import annotations

from array import array

from memserve.changes import AnyChange, Cleared, Evicted, Inserted, KeyRange, Swapped
from memserve.types import Medium, Namespace


class ChangeLog:
    """Changes in the order in which they happened."""

    def __init__(self) -> None:
        self._changes: list[AnyChange] = []

    def take(self) -> list[AnyChange]:
        """All changes since the last call; the log is empty then."""
        taken, self._changes = self._changes, []
        return taken

    def inserted(
        self,
        namespace: Namespace,
        parent: int | None,
        first_key: int,
        token_ids: bytes,
        medium: Medium,
    ) -> None:
        """New blocks, one below the other."""
        self._changes.append(Inserted(namespace, parent, first_key, token_ids, medium))

    def evicted(self, keys: array[int]) -> None:
        """These blocks left; `keys` rise."""
        last = self._changes[-1] if self._changes else None
        if not isinstance(last, Evicted):
            last = Evicted([])
            self._changes.append(last)
        _extend(last.keys, keys)

    def swapped(self, keys: array[int], medium: Medium) -> None:
        """This medium is now the fastest one that holds these blocks; `keys` rise."""
        last = self._changes[-1] if self._changes else None
        if not isinstance(last, Swapped) or last.medium is not medium:
            last = Swapped([], medium)
            self._changes.append(last)
        _extend(last.keys, keys)

    def cleared(self) -> None:
        """Everything left: what was said before does not matter any more."""
        self._changes = [Cleared()]


def _extend(ranges: list[KeyRange], keys: array[int]) -> None:
    """Add rising keys to ranges that are not yet taken."""
    if keys[-1] - keys[0] == len(keys) - 1:
        _join(ranges, keys[0], len(keys))
    else:
        for key in keys:
            _join(ranges, key, 1)


def _join(ranges: list[KeyRange], first: int, count: int) -> None:
    if ranges:
        last_first, last_count = ranges[-1]
        if last_first + last_count == first:
            ranges[-1] = (last_first, last_count + count)
            return
        if first + count == last_first:
            ranges[-1] = (first, count + last_count)
            return
    ranges.append((first, count))
