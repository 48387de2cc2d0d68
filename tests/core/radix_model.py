"""A naive index, and a pair that does everything to it and to the real one and compares the two.

The naive one is a dict from a whole prefix to where its last block lies. It knows nothing of nodes,
queues or logs; what it cannot say (which of several blocks is evicted first) is left to examples in
`test_radix.py`, and only the rules of it are checked here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memserve.changes import AnyChange, Cleared, Evicted, Inserted, Swapped
from memserve.core.radix import ABSENT, Cursor, Locations, Match, RadixIndex
from memserve.core.tokens import Path, pack
from memserve.types import BlockId, Medium, Namespace, SlotId

Key = tuple[Namespace, tuple[int, ...]]
"""A block: its namespace, and all tokens from the beginning of the prompt to its end."""

PRIVATE = Namespace(cache_salt="private")
"""Its changes are not published."""


@dataclasses.dataclass
class Block:
    """A known block."""

    places: dict[Medium, int]
    used_s: float = 0.0

    @property
    def fastest(self) -> Medium:
        return Medium.HBM if Medium.HBM in self.places else Medium.DRAM


@dataclasses.dataclass
class Held:
    """A cursor of the real index, and the block that it is behind."""

    key: Key
    block: Block
    cursor: Cursor


class NaiveIndex:
    """The rules, without any cleverness."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[Key, Block] = {}

    def key(self, namespace: Namespace, tokens: Sequence[int], depth: int) -> Key:
        return (namespace, tuple(tokens[: depth * self.block_size]))

    def known(self, namespace: Namespace, tokens: Sequence[int]) -> list[Block]:
        found: list[Block] = []
        while len(found) < len(tokens) // self.block_size:
            block = self.blocks.get(self.key(namespace, tokens, len(found) + 1))
            if block is None:
                break
            found.append(block)
        return found

    def at(self, medium: Medium, place: int) -> Key | None:
        return next((k for k, b in self.blocks.items() if b.places.get(medium) == place), None)

    def below(self, top: Key) -> list[Key]:
        """This block and all below it."""
        namespace, tokens = top
        return [k for k in self.blocks if k[0] == namespace and k[1][: len(tokens)] == tokens]

    def insert(
        self, namespace: Namespace, tokens: Sequence[int], places: Sequence[int], first: int,
        medium: Medium,
    ) -> list[tuple[int, int]]:  # fmt: skip
        duplicates = []
        for depth, place in enumerate(places, first):
            key = self.key(namespace, tokens, depth + 1)
            held = self.blocks.setdefault(key, Block({})).places
            if held.setdefault(medium, place) != place:
                duplicates.append((depth, held[medium]))
        return duplicates

    def remove(self, top: Key) -> list[tuple[Medium, int]]:
        gone = [self.blocks.pop(key) for key in self.below(top)]
        return [place for block in gone for place in block.places.items()]

    def drop(self, places: Sequence[int], medium: Medium) -> list[tuple[Medium, int]]:
        bare: list[Key] = []
        for place in places:
            if (key := self.at(medium, place)) is not None:
                del self.blocks[key].places[medium]
                if not self.blocks[key].places:
                    bare.append(key)
        return [place for key in bare for place in self.remove(key)]


class Mirror:
    """What a reader of the changes knows: key → (parent's key, all tokens, medium)."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = len(pack([0])) * block_size
        self.blocks: dict[int, tuple[Namespace, int | None, bytes, Medium]] = {}
        self.highest_key = 0

    def apply(self, change: AnyChange, *, is_snapshot: bool = False) -> None:
        match change:
            case Inserted(namespace, parent, first_key, token_ids, medium):
                assert parent is None or parent in self.blocks, "a child before its parent"
                assert is_snapshot or first_key > self.highest_key, "a key was used again"
                size = self._block_bytes
                assert token_ids and len(token_ids) % size == 0
                above = b"" if parent is None else self.blocks[parent][2]
                for key in range(first_key, first_key + len(token_ids) // size):
                    at = (key - first_key) * size
                    above += token_ids[at : at + size]
                    self.blocks[key] = (namespace, parent, above, medium)
                    parent = self.highest_key = key
            case Evicted(keys):
                for first, count in keys:
                    for key in range(first, first + count):
                        del self.blocks[key]
                parents = {parent for _, parent, _, _ in self.blocks.values()} - {None}
                assert parents <= self.blocks.keys(), "a block without its parent"
            case Swapped(keys, medium):
                for first, count in keys:
                    for key in range(first, first + count):
                        namespace, parent, tokens, old = self.blocks[key]
                        assert old is not medium, "nothing was swapped"
                        self.blocks[key] = (namespace, parent, tokens, medium)
            case Cleared():
                self.blocks.clear()


class Pair:
    """Each method does one thing to both indexes and fails if they do not answer alike."""

    def __init__(self, block_size: int, num_places: int) -> None:
        self.block_size = block_size
        self.num_places = num_places
        """In each medium."""
        self.now_s = 0.0
        self.real = RadixIndex(block_size, lambda: self.now_s, lambda ns: ns != PRIVATE)
        self.naive = NaiveIndex(block_size)
        self.mirror = Mirror(block_size)
        self.cursors: list[Held] = []
        self.references: list[Held] = []

    # ── what can be done ──────────────────────────────────────────────────────────────────────

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> None:
        self._check_match(self.real.match(self._path(namespace, tokens)), namespace, tokens)

    def insert(
        self, namespace: Namespace, tokens: Sequence[int], first: int, num: int, medium: Medium
    ) -> None:
        """With places that are free, as far as there are; where none is needed, with the old ones
        or with others in turn."""
        path = self._path(namespace, tokens)
        known = self.naive.known(namespace, tokens)
        free = self._free(medium)
        first = min(first, path.num_blocks)
        places: list[int] = []
        for depth in range(first, min(first + num, path.num_blocks)):
            old = known[depth].places.get(medium) if depth < len(known) else None
            if old is not None and (depth % 2 or not free):
                places.append(old)
            elif free:
                places.append(free.pop())
            else:
                break
        if first > len(known) and places:
            self._raises(LookupError, lambda: self.real.insert(path, places, first, medium))
            return
        done = self.real.insert(path, places, first, medium)
        assert done.duplicates == self.naive.insert(namespace, tokens, places, first, medium)
        if places:
            self._use(namespace, tokens, first + len(places))
            assert done.end is not None
            self._hold(self.cursors, namespace, tokens, first + len(places), done.end)

    def insert_wrongly(self, namespace: Namespace, tokens: Sequence[int], medium: Medium) -> None:
        """Into a place that holds another block."""
        path = self._path(namespace, tokens)
        known = self.naive.known(namespace, tokens)
        last = self.naive.key(namespace, tokens, path.num_blocks)
        used = [b.places[medium] for k, b in self.naive.blocks.items()
                if medium in b.places and k != last]  # fmt: skip
        if used and path.num_blocks and len(known) >= path.num_blocks - 1:
            first = path.num_blocks - 1
            self._raises(ValueError, lambda: self.real.insert(path, used[:1], first, medium))

    def append(self, which: int, tokens: Sequence[int], medium: Medium) -> None:
        """Whole blocks with these tokens behind one of the cursors."""
        if not self.cursors:
            return
        held = self.cursors[which % len(self.cursors)]
        namespace, above = held.key
        num = min(len(tokens) // self.block_size, len(self._free(medium)))
        packed = pack(tokens[: num * self.block_size])
        places = self._free(medium)[:num]
        if self.naive.blocks.get(held.key) is not held.block:
            self._raises(LookupError, lambda: self.real.append(held.cursor, packed, places, medium))
            self.cursors.remove(held)
            return
        prompt = [*above, *tokens]
        first = len(above) // self.block_size
        done = self.real.append(held.cursor, packed, places, medium)
        assert done.duplicates == self.naive.insert(namespace, prompt, places, first, medium)
        assert done.end is not None
        if num:
            self._use(namespace, prompt, first + num)
        self._hold(self.cursors, namespace, prompt, first + num, done.end)

    def copy(self, sources: Sequence[int], source: Medium, target: Medium) -> None:
        targets = self._free(target)[: len(sources)]
        sources = list(dict.fromkeys(sources))[: len(targets)]
        targets = targets[: len(sources)]
        refused = self.real.copied(source, sources, target, targets)
        expected = []
        for old, new in zip(sources, targets, strict=True):
            key = self.naive.at(source, old)
            if key is None or target in self.naive.blocks[key].places:
                expected.append(new)
            else:
                self.naive.blocks[key].places[target] = new
        assert refused == expected

    def drop(self, places: Sequence[int], medium: Medium) -> None:
        self._same(self.real.drop(places, medium), self.naive.drop(places, medium))

    def delete(self, namespace: Namespace, tokens: Sequence[int], first: int) -> None:
        freed = self.real.delete(self._path(namespace, tokens), first)
        is_known = len(self.naive.known(namespace, tokens)) > first
        key = self.naive.key(namespace, tokens, first + 1)
        self._same(freed, self.naive.remove(key) if is_known else [])

    def evict(self, num_blocks: int, medium: Medium, idle_s: float) -> None:
        places = self.real.oldest(num_blocks, medium, idle_s)
        assert places == self.real.oldest(num_blocks, medium, idle_s), "a look-up has mutated"
        self._check_order(places, num_blocks, medium, idle_s)
        below = self.naive.drop(places, medium)
        named = [(medium, place) for place in places]
        self._same(self.real.evict(num_blocks, medium, idle_s), [*named, *below])

    def touch(self, namespace: Namespace, tokens: Sequence[int], num_blocks: int | None) -> None:
        self.real.touch(self._path(namespace, tokens), num_blocks)
        known = len(self.naive.known(namespace, tokens))
        self._use(namespace, tokens, known if num_blocks is None else min(known, num_blocks))

    def acquire(self, namespace: Namespace, tokens: Sequence[int], num_blocks: int) -> None:
        path = self._path(namespace, tokens)
        if 0 < num_blocks <= len(self.naive.known(namespace, tokens)):
            cursor = self.real.acquire(path, num_blocks)
            self._hold(self.references, namespace, tokens, num_blocks, cursor)
        else:
            self._raises(LookupError, lambda: self.real.acquire(path, num_blocks))

    def release(self, which: int) -> None:
        if self.references:
            self.real.release(self.references.pop(which % len(self.references)).cursor)

    def clear(self) -> None:
        freed = self.real.clear()
        blocks, self.naive.blocks = self.naive.blocks, {}
        self._same(freed, [place for block in blocks.values() for place in block.places.items()])

    # ── what must always hold ─────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Everything that is known is known to both, and to a reader of the changes."""
        self.real.check_integrity()
        blocks = self.naive.blocks
        assert self.real.num_blocks == len(blocks)
        for medium in Medium:
            held = {b.places[medium] for b in blocks.values() if medium in b.places}
            assert self.real.num_in(medium) == len(held)
            for place in range(self.num_places):
                assert self.real.contains(place, medium) == (place in held)
        for block in blocks.values():
            hbm, dram = block.places.get(Medium.HBM), block.places.get(Medium.DRAM)
            assert hbm is None or self.real.slot_of(BlockId(hbm)) == dram
            assert dram is None or self.real.block_of(SlotId(dram)) == hbm
        self._check_changes()

    def _check_changes(self) -> None:
        for change in self.real.take_changes():
            self.mirror.apply(change)
        published = {
            (ns, pack(tokens)): block.fastest
            for (ns, tokens), block in self.naive.blocks.items()
            if ns != PRIVATE
        }
        told = {(ns, tokens): medium for ns, _, tokens, medium in self.mirror.blocks.values()}
        assert told == published
        rebuilt = Mirror(self.block_size)
        for part in self.real.snapshot():
            rebuilt.apply(part, is_snapshot=True)
        assert rebuilt.blocks == self.mirror.blocks

    def _check_match(self, match: Match, namespace: Namespace, tokens: Sequence[int]) -> None:
        known = self.naive.known(namespace, tokens)
        assert match.num_blocks == len(known)
        assert match.hbm.tolist() == [b.places.get(Medium.HBM, ABSENT) for b in known]
        assert match.dram.tolist() == [b.places.get(Medium.DRAM, ABSENT) for b in known]
        prefix = [*match.hbm.tolist(), ABSENT]
        assert match.hbm_prefix() == prefix[: prefix.index(ABSENT)]
        if match.end is None:
            assert not known
        else:
            self._hold(self.cursors, namespace, tokens, len(known), match.end)

    def _check_order(
        self, places: Sequence[int], num_blocks: int, medium: Medium, idle_s: float
    ) -> None:
        """Each candidate is unreferenced and has nothing below it that is not named before."""
        protected: set[Key] = set()
        for held in self.references:
            if self.naive.blocks.get(held.key) is held.block:
                namespace, tokens = held.key
                sizes = range(self.block_size, len(tokens) + 1, self.block_size)
                protected.update((namespace, tokens[:size]) for size in sizes)
        held_here = {k for k, b in self.naive.blocks.items() if medium in b.places}
        if not idle_s:
            assert len(places) == min(num_blocks, len(held_here - protected))
        for place in places:
            key = self.naive.at(medium, place)
            assert key in held_here and key not in protected
            assert self.naive.blocks[key].used_s <= self.now_s - idle_s
            held_here.remove(key)
            assert held_here.isdisjoint(self.naive.below(key)), "not an end"

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _path(self, namespace: Namespace, tokens: Sequence[int]) -> Path:
        return Path(tokens, self.block_size, namespace)

    def _free(self, medium: Medium) -> list[int]:
        used = {b.places.get(medium) for b in self.naive.blocks.values()}
        return [place for place in range(self.num_places) if place not in used]

    def _use(self, namespace: Namespace, tokens: Sequence[int], depth: int) -> None:
        for block in self.naive.known(namespace, tokens)[:depth]:
            block.used_s = self.now_s

    def _hold(
        self, where: list[Held], namespace: Namespace, tokens: Sequence[int], depth: int,
        cursor: Cursor,
    ) -> None:  # fmt: skip
        key = self.naive.key(namespace, tokens, depth)
        where.append(Held(key, self.naive.blocks[key], cursor))
        if len(where) > 8:
            self.real.release(where[0].cursor) if where is self.references else None
            del where[0]

    def _same(self, freed: Locations, expected: list[tuple[Medium, int]]) -> None:
        got = [(Medium.HBM, place) for place in freed.hbm]
        got += [(Medium.DRAM, place) for place in freed.dram]
        assert sorted(got, key=str) == sorted(expected, key=str)

    def _raises(self, error: type[Exception], call: object) -> None:
        assert callable(call)
        try:
            call()
        except error:
            return
        raise AssertionError(f"no {error.__name__}")
