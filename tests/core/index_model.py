"""An instance's index as `memserve/changes.py` promises it, small enough to be read at once.

Every known prefix is spelt out, with the key of its last block and where that block is. It writes
the changes that the scheduler's tree follows.
"""

from __future__ import annotations

from memserve.changes import AnyChange, Cleared, Evicted, Inserted, Swapped
from memserve.core.tokens import pack
from memserve.types import Medium, Namespace

BLOCK_SIZE = 2

Prefix = tuple[Namespace, tuple[int, ...]]


class IndexModel:
    """What one life of an instance holds. Call `take_changes` after any number of calls."""

    def __init__(self) -> None:
        self.blocks: dict[Prefix, tuple[int, Medium]] = {}
        self.changes: list[AnyChange] = []
        self._next_key = 1

    def insert(self, namespace: Namespace, tokens: list[int], medium: Medium) -> None:
        """All full blocks of the prompt are held afterwards."""
        full = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
        known = self.held(namespace, tokens)
        new = list(range(known + BLOCK_SIZE, full + 1, BLOCK_SIZE))
        if not new:
            return
        above = self.blocks.get((namespace, tuple(tokens[:known])))
        self.changes.append(
            Inserted(
                namespace=namespace,
                parent=above[0] if above else None,
                first_key=self._next_key,
                token_ids=pack(tokens[known:full]),
                medium=medium,
            )
        )
        for end in new:
            self.blocks[namespace, tuple(tokens[:end])] = (self._next_key, medium)
            self._next_key += 1

    def skip_keys(self, count: int) -> None:
        """Keys that were given to blocks that nobody is told of."""
        self._next_key += count

    def evict(self, namespace: Namespace, tokens: list[int], *, split: bool) -> None:
        """The block that ends here, and all below it; in ranges, or (`split`) key by key."""
        gone = [
            prefix
            for prefix in self.blocks
            if prefix[0] == namespace and prefix[1][: len(tokens)] == tuple(tokens)
        ]
        keys = sorted(self.blocks.pop(prefix)[0] for prefix in gone)
        if keys:
            self.changes.append(Evicted([(k, 1) for k in keys] if split else ranges(keys)))

    def swap(self, namespace: Namespace, tokens: list[int], medium: Medium) -> None:
        """All blocks of this prompt from the middle on."""
        keys = []
        for end in range(len(tokens) // 2, len(tokens) + 1):
            prefix = (namespace, tuple(tokens[:end]))
            if prefix in self.blocks and self.blocks[prefix][1] is not medium:
                keys.append(self.blocks[prefix][0])
                self.blocks[prefix] = (keys[-1], medium)
        if keys:
            self.changes.append(Swapped(ranges(keys), medium))

    def clear(self) -> None:
        self.blocks.clear()
        self.changes.append(Cleared())

    def take_changes(self) -> list[AnyChange]:
        taken, self.changes = self.changes, []
        return taken

    def held(self, namespace: Namespace, tokens: list[int]) -> int:
        """Leading tokens."""
        end = 0
        while (namespace, tuple(tokens[: end + BLOCK_SIZE])) in self.blocks:
            if end + BLOCK_SIZE > len(tokens):
                break
            end += BLOCK_SIZE
        return end

    def in_dram(self, namespace: Namespace, tokens: list[int]) -> int:
        """How many of those are in DRAM alone."""
        ends = range(BLOCK_SIZE, self.held(namespace, tokens) + 1, BLOCK_SIZE)
        media = [self.blocks[namespace, tuple(tokens[:end])][1] for end in ends]
        return media.count(Medium.DRAM) * BLOCK_SIZE

    def index(self) -> dict[int, tuple[int | None, bytes, Medium]]:
        """As `FollowingTree.index_of` gives it."""
        index = {}
        for (namespace, tokens), (key, medium) in self.blocks.items():
            above = self.blocks.get((namespace, tokens[:-BLOCK_SIZE]))
            last = pack(list(tokens[-BLOCK_SIZE:]))
            index[key] = (above[0] if above else None, last, medium)
        return index

    def snapshot(self, per_part: int) -> list[list[Inserted]]:
        """Block by block, parents first, otherwise in no order of keys."""
        parts: list[list[Inserted]] = [[]]
        for namespace, tokens in sorted(self.blocks, key=lambda p: (len(p[1]), p[1], repr(p[0]))):
            key, medium = self.blocks[namespace, tokens]
            above = self.blocks.get((namespace, tokens[:-BLOCK_SIZE]))
            if len(parts[-1]) == per_part:
                parts.append([])
            parts[-1].append(
                Inserted(
                    namespace=namespace,
                    parent=above[0] if above else None,
                    first_key=key,
                    token_ids=pack(list(tokens[-BLOCK_SIZE:])),
                    medium=medium,
                )
            )
        return parts


def ranges(keys: list[int]) -> list[tuple[int, int]]:
    """Rising keys as ranges."""
    found: list[tuple[int, int]] = []
    for key in keys:
        if found and sum(found[-1]) == key:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((key, 1))
    return found
