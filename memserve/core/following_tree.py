"""The prompt tree that knows: it follows what every instance says of its own index.

Collaborators: an instance's changes (`memserve/changes.py`) come through `cache_follower.py`, which
sees that none is missing; `prompt_tree.py` has the tree itself.

Changes name blocks by keys. They rise along every prompt, since an index has a block only together
with those before it; so the keys of what a life holds of a node are a rising list. Where a key lies
is found through *runs*: stretches of consecutive keys within one holding. Most inserts make one
run, so a life's table of runs is far smaller than its index, and a split of a node moves runs, not
blocks.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from memserve.changes import AnyChange, Cleared, Evicted, Inserted, Swapped
from memserve.core.prompt_tree import PromptTree
from memserve.core.tokens import shared_blocks
from memserve.core.tree_parts import Holding, Life, Node
from memserve.errors import ProtocolError
from memserve.types import InstanceId, Medium

_HBM, _DRAM = 0, 1


class _Known(Holding):
    """A holding whose blocks' keys are known."""

    __slots__ = ("keys", "media", "num_below")

    def __init__(self, life: Life, node: Node, num_blocks: int = 0) -> None:
        super().__init__(life, node, num_blocks)
        self.keys = array("q")
        """[num_blocks], rising."""
        self.media: bytearray | None = None
        """[num_blocks] `_HBM` or `_DRAM`; None if all are in HBM."""
        self.num_below = 0
        """Nodes right below this one of which the life holds something."""

    def num_dram(self, num_blocks: int) -> int:
        return self.media.count(_DRAM, 0, num_blocks) if self.media is not None else 0


class _KeyedLife(Life):
    """What a life holds, by key. A run starts where a key does not follow the one before it."""

    __slots__ = ("_owners", "_starts", "is_partial")

    def __init__(self, instance: InstanceId, slot: int) -> None:
        super().__init__(instance, slot)
        self.is_partial = False
        """Whether the tree has forgotten something of it for want of room."""
        self._starts: list[int] = []
        """First keys of the runs, rising."""
        self._owners: list[_Known] = []
        """Of those runs."""

    def find(self, key: int) -> tuple[_Known, int] | None:
        """Where the block of this key is: the holding, and which of its blocks."""
        index = bisect_right(self._starts, key) - 1
        if index < 0:
            return None
        holding = self._owners[index]
        offset = bisect_left(holding.keys, key)
        if offset == len(holding.keys) or holding.keys[offset] != key:
            return None
        return holding, offset

    def run_start(self, key: int) -> int:
        """The first key of the run that a known key is in."""
        return self._starts[bisect_right(self._starts, key) - 1]

    def runs(self, first: int, last: int) -> Iterator[tuple[_Known, int, int]]:
        """Where the known ones of these keys are: holding, its first such block, behind the last.

        The table must not change meanwhile.
        """
        index = max(bisect_right(self._starts, first) - 1, 0)
        while index < len(self._starts) and self._starts[index] <= last:
            keys = self._owners[index].keys
            begin = bisect_left(keys, max(first, self._starts[index]))
            index += 1
            behind = last + 1
            if index < len(self._starts):
                behind = min(behind, self._starts[index])
            end = bisect_left(keys, behind)
            if begin < end:
                yield self._owners[index - 1], begin, end

    def start_run(self, key: int, owner: _Known) -> None:
        """A run begins with this key, or has another owner now."""
        starts = self._starts
        if not starts or starts[-1] < key:
            starts.append(key)
            self._owners.append(owner)
            return
        index = bisect_left(starts, key)
        if starts[index] == key:
            self._owners[index] = owner
        else:
            starts.insert(index, key)
            self._owners.insert(index, owner)

    def end_run(self, key: int) -> None:
        """The run that began with this key is no run of its own any more."""
        index = bisect_left(self._starts, key)
        assert self._starts[index] == key
        del self._starts[index], self._owners[index]

    def check_integrity(self) -> None:
        runs = {}
        for holding in self.holdings:
            assert isinstance(holding, _Known) and holding.num_blocks == len(holding.keys)
            assert holding.media is None or len(holding.media) == len(holding.keys)
            assert holding.media is None or _DRAM in holding.media
            assert list(holding.keys) == sorted(set(holding.keys))
            runs.update(dict.fromkeys(_run_starts(holding.keys, 0), holding))
            below = [child for child in holding.node.children.values() if self in child.holders]
            assert holding.num_below == len(below)
        assert self._starts == sorted(runs)
        assert all(
            runs[key] is owner for key, owner in zip(self._starts, self._owners, strict=True)
        )


def _run_starts(keys: array[int], first: int) -> list[int]:
    """Where runs begin in `keys[first:]`, as part of `keys`."""
    starts = []
    before = keys[first - 1] if first else None
    if before is None or keys[first] != before + 1:
        starts.append(keys[first])
    if keys[-1] - keys[first] != len(keys) - 1 - first:  # rising, so else they are consecutive
        starts += [key for before, key in itertools.pairwise(keys[first:]) if key != before + 1]
    return starts


class FollowingTree(PromptTree):
    """See `PromptTree`; filled by `apply`."""

    def apply(self, instance: InstanceId, changes: Iterable[AnyChange], now: float) -> None:
        """Take over, in order, what changed in an instance's index.

        Raises: ProtocolError if that contradicts what was said before: what the tree believes of
        the instance is then worth nothing (`drop` it, and ask for a snapshot).
        """
        for change in changes:
            match change:
                case Inserted():
                    self._insert(self._keyed(instance), change, now)
                case Evicted():
                    life = self._keyed(instance)
                    for first, count in sorted(change.keys, reverse=True):  # ends first
                        self._evict(life, first, first + count - 1)
                case Swapped():
                    medium = _DRAM if change.medium is Medium.DRAM else _HBM
                    for first, count in change.keys:
                        self._swap(self._keyed(instance), first, first + count - 1, medium)
                case Cleared():
                    self.drop(instance)
        self._shrink()

    def index_of(self, instance: InstanceId) -> dict[int, tuple[int | None, bytes, Medium]]:
        """Key → (key of the block before, tokens, medium): everything the tree knows of one.

        For audits and tests. Time: what the instance holds.
        """
        index: dict[int, tuple[int | None, bytes, Medium]] = {}
        life = self._lives.get(instance)
        for holding in life.holdings if life is not None else ():
            assert isinstance(holding, _Known)
            parent = holding.node.parent
            assert parent is not None
            above = parent.holders.get(holding.life)
            before = above.keys[-1] if isinstance(above, _Known) else None
            size = self._block_bytes
            for offset, key in enumerate(holding.keys):
                tokens = bytes(holding.node.label[offset * size : (offset + 1) * size])
                in_dram = holding.media is not None and holding.media[offset] == _DRAM
                index[key] = (before, tokens, Medium.DRAM if in_dram else Medium.HBM)
                before = key
        return index

    def is_partial(self, instance: InstanceId) -> bool:
        """Whether the tree had no room for everything that the instance holds."""
        life = self._lives.get(instance)
        return isinstance(life, _KeyedLife) and life.is_partial

    def check_integrity(self) -> None:
        super().check_integrity()
        for life in self._lives.values():
            assert isinstance(life, _KeyedLife)
            life.check_integrity()

    # ── changes ───────────────────────────────────────────────────────────────────────────────

    def _keyed(self, instance: InstanceId) -> _KeyedLife:
        life = self._life(instance)
        assert isinstance(life, _KeyedLife)
        return life

    def _new_life(self, instance: InstanceId, slot: int) -> Life:
        return _KeyedLife(instance, slot)

    def _insert(self, life: _KeyedLife, change: Inserted, now: float) -> None:
        packed, key = change.token_ids, change.first_key
        if not packed or len(packed) % self._block_bytes:
            raise ProtocolError(f"{len(packed)} bytes of tokens are not whole blocks")
        if key <= (change.parent or 0) or life.find(key) is not None:
            raise ProtocolError(f"key {key}, below {change.parent}, is in use or too small")
        holding: _Known | None
        node: Node
        if change.parent is None:
            holding, offset = None, 0
            node = self._root(change.namespace)
        else:
            found = life.find(change.parent)
            if found is None:
                return self._skip(life, f"insert below the unknown block {change.parent}")
            holding, offset = found[0], found[1] + 1
            node = holding.node
        in_dram = change.medium is Medium.DRAM
        start = 0
        while True:
            if holding is not None:
                taken = self._take(holding, offset, packed, start, key, in_dram)
                key, offset, start = key + taken, offset + taken, start + taken * self._block_bytes
            if start == len(packed):
                node.used_at = now
                return None
            if offset < self._size(node):  # the prompt goes another way here
                self._split(node, offset)
            child = node.children.get(packed[start : start + self._block_bytes])
            if child is None and holding is not None and not node.children:
                self._extend(node, packed[start:])
                continue
            if child is None:
                child = self._add(node, packed[start:], now)
            holding = self._begin(life, child, holding)
            node, offset = child, 0

    def _take(
        self, holding: _Known, offset: int, packed: bytes, start: int, key: int, in_dram: bool
    ) -> int:
        """The holding grows by what the rest of its label shares with the tokens; returns that."""
        node = holding.node
        if offset == self._size(node):
            return 0
        rest = node.label[offset * self._block_bytes :] if offset else node.label
        taken = shared_blocks(rest, packed, start, self.block_size)
        if not taken:
            return 0
        if holding.num_blocks != offset or (holding.keys and holding.keys[-1] >= key):
            raise ProtocolError(f"block {key} is held already, or not in its place")
        if not holding.keys or holding.keys[-1] != key - 1:
            self._start_run(holding, key)
        holding.keys.extend(range(key, key + taken))
        holding.num_blocks += taken
        self._set_media(holding, offset, offset + taken, _DRAM if in_dram else _HBM)
        node.changed()
        return taken

    def _start_run(self, holding: _Known, key: int) -> None:
        life = holding.life
        assert isinstance(life, _KeyedLife)
        life.start_run(key, holding)

    def _begin(self, life: _KeyedLife, node: Node, above: _Known | None) -> _Known:
        """The life holds something of the node, from now on."""
        if life in node.holders:
            raise ProtocolError("a block is inserted that is held already")
        holding = _Known(life, node)
        node.holders[life] = holding
        life.holdings.add(holding)
        if above is not None:
            above.num_below += 1
        return holding

    def _evict(self, life: _KeyedLife, first: int, last: int) -> None:
        """Run by run, from the end."""
        while last >= first:
            found = life.find(last)
            if found is None:
                self._skip(life, f"eviction of the unknown block {last}")
                last -= 1
                continue
            holding, offset = found
            if offset != holding.num_blocks - 1 or holding.num_below:
                raise ProtocolError(f"block {last} is evicted, but not what is below it")
            begin = max(first, life.run_start(last))
            self._truncate(holding, offset - (last - begin))
            self._settle(holding)
            last = begin - 1

    def _swap(self, life: _KeyedLife, first: int, last: int, medium: int) -> None:
        num_known = 0
        for holding, begin, end in life.runs(first, last):
            self._set_media(holding, begin, end, medium)
            num_known += end - begin
        if num_known != last - first + 1:
            self._skip(life, f"swap of blocks {first} to {last}, of which {num_known} are known")

    def _skip(self, life: _KeyedLife, what: str) -> None:
        """An unknown block: no wonder, if the tree has forgotten some; else something is wrong."""
        if not life.is_partial:
            raise ProtocolError(what)

    # ── holdings ──────────────────────────────────────────────────────────────────────────────

    def _set_media(self, holding: _Known, begin: int, end: int, medium: int) -> None:
        """Where blocks are; also of blocks that have just been added at the end."""
        had_any = holding.media is not None
        if holding.media is None:
            if medium == _HBM:
                return
            holding.media = bytearray(holding.num_blocks)
        holding.media[begin:end] = bytes([medium]) * (end - begin)
        if _DRAM not in holding.media:
            holding.media = None
        holding.node.num_swapped += (holding.media is not None) - had_any

    def _truncate(self, holding: _Known, num_blocks: int) -> None:
        """Keep the first blocks. The node is not looked after (`_settle`)."""
        life = holding.life
        assert isinstance(life, _KeyedLife)
        if not life.is_over and num_blocks < len(holding.keys):
            for start in _run_starts(holding.keys, num_blocks):
                life.end_run(start)
        del holding.keys[num_blocks:]
        holding.num_blocks = num_blocks
        if holding.media is not None:
            del holding.media[num_blocks:]
            if _DRAM not in holding.media:
                holding.media = None
                holding.node.num_swapped -= 1
        holding.node.changed()

    def _settle(self, holding: _Known) -> None:
        """After `_truncate`: the node holds no more than somebody needs."""
        if holding.num_blocks:
            self._fit(holding.node)
            return
        parent = holding.node.parent
        above = parent.holders.get(holding.life) if parent is not None else None
        if isinstance(above, _Known):
            above.num_below -= 1
        super()._remove(holding)

    def _remove(self, holding: Holding) -> None:
        assert isinstance(holding, _Known)
        self._truncate(holding, 0)
        self._settle(holding)

    def _cut_holding(self, holding: Holding, num_blocks: int) -> None:
        assert isinstance(holding, _Known) and isinstance(holding.life, _KeyedLife)
        holding.life.is_partial = True
        self._truncate(holding, num_blocks)

    def _cut_away(self, holding: Holding) -> None:
        assert isinstance(holding.life, _KeyedLife)
        holding.life.is_partial = True
        self._remove(holding)

    def _split_holding(self, holding: Holding, at: int, lower: Node) -> None:
        assert isinstance(holding, _Known) and isinstance(holding.life, _KeyedLife)
        life, node = holding.life, holding.node
        part = _Known(life, lower, holding.num_blocks - at)
        part.keys = holding.keys[at:]
        if not life.is_over:
            for start in _run_starts(part.keys, 0):
                life.start_run(start, part)
        del holding.keys[at:]
        holding.num_blocks = at
        part.num_below, holding.num_below = holding.num_below, 1
        if holding.media is not None:
            upper, rest = holding.media[:at], holding.media[at:]
            holding.media = upper if _DRAM in upper else None
            part.media = rest if _DRAM in rest else None
            node.num_swapped += (holding.media is not None) - 1
            lower.num_swapped += part.media is not None
        lower.holders[life] = part
        life.holdings.add(part)

    def _join_holdings(self, upper: Holding, lower: Holding) -> None:
        assert isinstance(upper, _Known) and isinstance(lower, _Known)
        life = upper.life
        assert isinstance(life, _KeyedLife)
        if not life.is_over:
            for start in _run_starts(lower.keys, 0):
                life.start_run(start, upper)
            if lower.keys[0] == upper.keys[-1] + 1:
                life.end_run(lower.keys[0])
        if upper.media is not None or lower.media is not None:
            upper.node.num_swapped += upper.media is None
            media = upper.media if upper.media is not None else bytearray(upper.num_blocks)
            upper.media = media + (lower.media or bytearray(lower.num_blocks))
        upper.keys += lower.keys
        upper.num_blocks += lower.num_blocks
        upper.num_below = lower.num_below
