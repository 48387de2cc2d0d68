"""The prompt tree that guesses: it is told what requests have left behind, and forgets by age.

The paper's way (section 6): updated when responses return; instances evict on their own, so entries
expire. `prompt_tree.py` has the tree itself.

What a life holds of a node was told at one time, and is the whole node: an insert that ends within
a node splits it. Whoever holds a node was told of its ancestors no earlier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from memserve.core.prompt_tree import PromptTree
from memserve.core.tokens import Path, shared_blocks
from memserve.core.tree_parts import Holding, Life, Node
from memserve.types import InstanceId


class _Told(Holding):
    """A holding that was heard of."""

    __slots__ = ("told_at",)

    def __init__(self, life: Life, node: Node, num_blocks: int, told_at: float) -> None:
        super().__init__(life, node, num_blocks)
        self.told_at = told_at


class GuessingTree(PromptTree):
    """See `PromptTree`; filled by `learn`, emptied by `expire`."""

    def __init__(
        self, block_size: int, instances: Iterable[InstanceId], max_blocks: int, ttl_s: float
    ) -> None:
        super().__init__(block_size, instances, max_blocks)
        self._ttl_s = ttl_s
        self._by_age: OrderedDict[float, set[_Told]] = OrderedDict()
        """When → what was told then and not since, oldest first."""

    def learn(self, path: Path, num_blocks: int, instance: InstanceId, now: float) -> None:
        """The instance holds the first blocks of the path. `now` never runs backwards."""
        packed = path.packed[: num_blocks * self._block_bytes]
        if not packed:
            return
        life = self._life(instance)
        node = self._root(path.namespace)
        start = 0
        while start < len(packed):
            child = node.children.get(packed[start : start + self._block_bytes])
            if child is None:
                child = self._add(node, packed[start:], now)
            else:
                shared = shared_blocks(child.label, packed, start, self.block_size)
                if shared < self._size(child):
                    self._split(child, shared)
            self._tell(life, child, now)
            start += len(child.label)
            node = child
        node.used_at = now
        self._shrink()

    def expire(self, now: float) -> None:
        """Forget what was told too long ago. Time: what is forgotten."""
        oldest = now - self._ttl_s
        while self._by_age and (told_at := next(iter(self._by_age))) <= oldest:
            for holding in list(self._by_age[told_at]):
                self._remove(holding)
        self._shrink()

    def _tell(self, life: Life, node: Node, now: float) -> None:
        holding = node.holders.get(life)
        if holding is None:
            holding = _Told(life, node, self._size(node), now)
            node.holders[life] = holding
            life.holdings.add(holding)
            node.changed()
        else:
            assert isinstance(holding, _Told)
            self._forget_age(holding)
            holding.told_at = now
        self._by_age.setdefault(now, set()).add(holding)

    def _forget_age(self, holding: _Told) -> None:
        told_then = self._by_age[holding.told_at]
        told_then.discard(holding)
        if not told_then:
            del self._by_age[holding.told_at]

    def _remove(self, holding: Holding) -> None:
        assert isinstance(holding, _Told)
        self._forget_age(holding)
        super()._remove(holding)

    def _cut_holding(self, holding: Holding, num_blocks: int) -> None:
        holding.num_blocks = num_blocks

    def _split_holding(self, holding: Holding, at: int, lower: Node) -> None:
        assert isinstance(holding, _Told)
        part = _Told(holding.life, lower, holding.num_blocks - at, holding.told_at)
        holding.num_blocks = at
        lower.holders[holding.life] = part
        holding.life.holdings.add(part)
        self._by_age[part.told_at].add(part)

    def _may_join(self, upper: Node, lower: Node) -> bool:
        """Never: they may have been told at different times."""
        return False

    def check_integrity(self) -> None:
        super().check_integrity()
        assert list(self._by_age) == sorted(self._by_age)
        lives = [*self._lives.values(), *self._over]
        assert sum(map(len, self._by_age.values())) == sum(len(life.holdings) for life in lives)
        for told_at, told_then in self._by_age.items():
            for holding in told_then:
                node = holding.node
                assert holding.told_at == told_at and holding.num_blocks == self._size(node)
                above = node.parent.holders.get(holding.life) if node.parent else None
                assert not isinstance(above, _Told) or above.told_at >= told_at
