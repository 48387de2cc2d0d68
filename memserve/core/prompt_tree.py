"""The scheduler's prompt tree: which instance holds the KV of how much of a prompt.

One tree serves all instances, so one walk answers for all of them. The paper: section 6. It has two
forms, by what they are told: `FollowingTree` (`following_tree.py`) follows the changes of every
instance's index and knows; `GuessingTree` (`guessing_tree.py`) is told what requests have left
behind, and forgets by age. This module has what they share: the tree, the walk, and the bound.

A radix tree over token ids at the granularity of KV blocks. A node's label is the tokens of one or
more blocks. Its holders are the lives of instances that hold some of its first blocks: an index is
closed towards its root, so what a life holds of a node is always a beginning, and a life that holds
anything of a node holds all of the node's ancestors::

    P0 holds A B C and A B D, P1 holds A B C, P2 holds A:

    root ── A B {P0: 2, P1: 2, P2: 1} ─┬─ C {P0: 1, P1: 1}
                                       └─ D {P0: 1}

What nobody holds is not in the tree. A life that has ended counts for nothing at once, and is
cleared away bit by bit (`tidy`), so that no loss keeps the event loop busy.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from memserve.core.tokens import TOKEN_BYTES, Path, shared_blocks
from memserve.core.tree_parts import Holding, Life, Match, Node, Root
from memserve.types import InstanceId, Namespace

_FEW = 16
"""Up to so many holders are counted one by one; more, as one array."""
_TIDY_PER_CALL = 64


class PromptTree:
    """Bounded by `max_blocks`: beyond it the ends of prompts go that were used longest ago."""

    def __init__(self, block_size: int, instances: Iterable[InstanceId], max_blocks: int) -> None:
        self.block_size = block_size
        self.instances = list(instances)
        """The order of the arrays in a `Match`."""
        self._slots = {instance: slot for slot, instance in enumerate(self.instances)}
        self._block_bytes = block_size * TOKEN_BYTES
        self._max_blocks = max_blocks
        self._roots: dict[Namespace, Root] = {}
        self._lives: dict[InstanceId, Life] = {}
        self._over: deque[Life] = deque()
        """Lives that have ended, whose holdings are still in the tree."""
        self._num_over = 0
        self._num_blocks = 0
        self._num_nodes = 0
        self._ends: list[tuple[float, int, Node]] = []
        """A heap of (used at, order of entry, leaf). An entry may be out of date: then its node is
        no leaf any more (it is skipped), or was used since (it is put where it belongs)."""
        self._entry_numbers = itertools.count()

    @property
    def num_blocks(self) -> int:
        """Blocks in the tree; one that several instances hold counts once."""
        return self._num_blocks

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    # ── what the scheduler asks ───────────────────────────────────────────────────────────────

    def match(self, path: Path) -> Match:
        """How much of a prompt's beginning each instance holds (full blocks). Does not mutate.

        Time: the prompt, and the holders of what it shares with the tree; not the tree.
        """
        blocks = np.zeros(len(self.instances), np.int64)
        dram = np.zeros(len(self.instances), np.int64)
        node: Node | None = self._roots.get(path.namespace)
        packed, block_bytes = path.packed, self._block_bytes
        start, end = 0, len(packed)
        last: Node | None = None
        while node is not None and start < end:
            node = node.children.get(packed[start : start + block_bytes])
            if node is None:
                break
            shared = shared_blocks(node.label, packed, start, self.block_size)
            self._count(node, start // block_bytes, shared, blocks, dram)
            last = node
            if shared * block_bytes < len(node.label):
                break
            start += len(node.label)
        blocks *= self.block_size
        dram *= self.block_size
        return Match(self._slots, blocks, dram, last)

    def use(self, match: Match, now: float) -> None:
        """A request is served from what was matched: it goes last when the tree is full."""
        if match.end is not None:
            match.end.used_at = now

    def _count(
        self,
        node: Node,
        above: int,
        shared: int,
        blocks: npt.NDArray[np.int64],
        dram: npt.NDArray[np.int64],
    ) -> None:
        """Add what is held of the node's first `shared` blocks; `above` blocks are before it."""
        if len(node.holders) > _FEW:
            counts = node.counts(len(blocks), self._num_over)
            blocks += np.minimum(counts, shared)
        else:
            for life, holding in node.holders.items():
                if not life.is_over:
                    blocks[life.slot] = above + min(holding.num_blocks, shared)
        if node.num_swapped:
            for life, holding in node.holders.items():
                if not life.is_over:
                    dram[life.slot] += holding.num_dram(min(holding.num_blocks, shared))

    # ── lives ─────────────────────────────────────────────────────────────────────────────────

    def drop(self, instance: InstanceId) -> None:
        """Forget everything of an instance. Time: O(1); `tidy` does the rest."""
        life = self._lives.pop(instance, None)
        if life is not None:
            life.is_over = True
            self._num_over += 1
            self._over.append(life)

    def tidy(self, max_holdings: int = _TIDY_PER_CALL) -> bool:
        """Clear away some of what ended lives held. Returns: whether something is left."""
        for _ in range(max_holdings):
            while self._over and not self._over[0].holdings:
                self._over.popleft()
            if not self._over:
                break
            self._remove(self._over[0].holdings.pop())
        self._renew_ends()
        return bool(self._over)

    def _life(self, instance: InstanceId) -> Life:
        """The present life. Raises: KeyError for an instance that is not the tree's."""
        life = self._lives.get(instance)
        if life is None:
            life = self._lives[instance] = self._new_life(instance, self._slots[instance])
        return life

    def _new_life(self, instance: InstanceId, slot: int) -> Life:
        return Life(instance, slot)

    def _remove(self, holding: Holding) -> None:
        """A life holds nothing of this node any more, nor of what is below."""
        node = holding.node
        del node.holders[holding.life]
        holding.life.holdings.discard(holding)
        node.changed()
        self._fit(node)

    # ── what the two forms do with holdings ───────────────────────────────────────────────────

    def _split_holding(self, holding: Holding, at: int, lower: Node) -> None:
        """Blocks `at`… of a holding (there are some) belong to a new node below."""
        raise NotImplementedError

    def _join_holdings(self, upper: Holding, lower: Holding) -> None:
        """A node takes up its only child: the holdings of both become the upper one."""
        raise NotImplementedError

    def _cut_holding(self, holding: Holding, num_blocks: int) -> None:
        """The tree forgets, for want of room, all but the first blocks (at least 1)."""
        raise NotImplementedError

    def _may_join(self, upper: Node, lower: Node) -> bool:
        """Whether the two could be one node."""
        return True

    # ── nodes ─────────────────────────────────────────────────────────────────────────────────

    def _root(self, namespace: Namespace) -> Node:
        """A new one is in the tree as soon as something is below it."""
        return self._roots.get(namespace) or Root(namespace)

    def _size(self, node: Node) -> int:
        """Blocks of the label."""
        return len(node.label) // self._block_bytes

    def _add(self, parent: Node, label: bytes | bytearray, now: float) -> Node:
        node = Node(label, parent, now)
        if isinstance(parent, Root):
            self._roots[parent.namespace] = parent
        parent.children[bytes(label[: self._block_bytes])] = node
        self._num_nodes += 1
        self._num_blocks += self._size(node)
        self._enter(node)
        return node

    def _extend(self, node: Node, packed: bytes | bytearray) -> None:
        """More blocks at the end of a leaf."""
        node.label += packed
        self._num_blocks += len(packed) // self._block_bytes

    def _split(self, node: Node, at: int) -> Node:
        """Keep the first `at` blocks, and put the others into a new node below; returns that.

        Time: the holders and the children.
        """
        lower = Node(node.label[at * self._block_bytes :], node, node.used_at)
        del node.label[at * self._block_bytes :]
        lower.children, node.children = node.children, {}
        for child in lower.children.values():
            child.parent = lower
        node.children[bytes(lower.label[: self._block_bytes])] = lower
        self._num_nodes += 1
        node.changed()
        for holding in list(node.holders.values()):
            if holding.num_blocks > at:
                self._split_holding(holding, at, lower)
        if not lower.children:
            self._enter(lower)
        return lower

    def _join(self, node: Node) -> None:
        """Take up the only child. Time: the child's holders and children."""
        (lower,) = node.children.values()
        node.label += lower.label
        node.children, lower.children = lower.children, {}
        for child in node.children.values():
            child.parent = node
        for life, holding in lower.holders.items():
            self._join_holdings(node.holders[life], holding)
            life.holdings.discard(holding)
        lower.holders.clear()
        lower.parent = None
        node.used_at = max(node.used_at, lower.used_at)
        node.changed()
        self._num_nodes -= 1
        if not node.children:
            self._enter(node)

    def _fit(self, node: Node) -> None:
        """Give up what nobody holds of a node, and of those above it; join what can be joined."""
        while node.parent is not None and not node.children:
            size = self._size(node)
            most = 0
            for holding in node.holders.values():
                if holding.num_blocks == size:
                    return
                most = max(most, holding.num_blocks)
            self._num_blocks -= size - most
            if most:
                del node.label[most * self._block_bytes :]
                return
            parent = node.parent
            del parent.children[bytes(node.label[: self._block_bytes])]
            node.parent = None
            self._num_nodes -= 1
            parent.used_at = max(parent.used_at, node.used_at)
            node = parent
            if not node.children and node.parent is not None:
                self._enter(node)
        self._fit_top(node)

    def _fit_top(self, node: Node) -> None:
        """A node that has lost a child."""
        if isinstance(node, Root):
            if not node.children:
                del self._roots[node.namespace]
        elif len(node.children) == 1:
            (lower,) = node.children.values()
            if lower.holders.keys() <= node.holders.keys() and self._may_join(node, lower):
                self._join(node)

    # ── the bound ─────────────────────────────────────────────────────────────────────────────

    def _enter(self, leaf: Node) -> None:
        if not leaf.is_entered:
            leaf.is_entered = True
            heapq.heappush(self._ends, (leaf.used_at, next(self._entry_numbers), leaf))

    def _renew_ends(self) -> None:
        """Rebuild the heap, once most of its entries mean nothing any more."""
        if len(self._ends) <= 2 * self._num_nodes + 64:
            return
        kept = []
        for entry in self._ends:
            node = entry[2]
            if node.parent is not None and not node.children:
                kept.append(entry)
            else:
                node.is_entered = False
        heapq.heapify(kept)
        self._ends = kept

    def _oldest_end(self) -> Node:
        """The leaf that was used longest ago; stays in the heap. There must be one."""
        while True:
            used_at, _, node = self._ends[0]
            if node.parent is None or node.children:
                heapq.heappop(self._ends)
                node.is_entered = False
            elif node.used_at != used_at:
                entry = (node.used_at, next(self._entry_numbers), node)
                heapq.heapreplace(self._ends, entry)
            else:
                return node

    def _shrink(self) -> None:
        """Keep to the bound. The end of every change."""
        while (excess := self._num_blocks - self._max_blocks) > 0:
            if self._over:
                self.tidy()
                continue
            node = self._oldest_end()
            keep = max(self._size(node) - excess, 0)
            for holding in list(node.holders.values()):
                if holding.num_blocks > keep and keep:
                    self._cut_holding(holding, keep)
                elif not keep:
                    self._cut_away(holding)
            if keep:
                node.changed()
                self._fit(node)
        self.tidy()

    def _cut_away(self, holding: Holding) -> None:
        """The tree forgets a holding for want of room."""
        self._remove(holding)

    # ── integrity ─────────────────────────────────────────────────────────────────────────────

    def walk(self, top: Node) -> Iterator[Node]:
        """Every node below `top`, parents first."""
        todo = list(top.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raises: AssertionError if the tree contradicts itself."""
        num_blocks = num_nodes = 0
        entered = {id(node) for _, _, node in self._ends}
        found: dict[Life, int] = dict.fromkeys([*self._lives.values(), *self._over], 0)
        for namespace, root in self._roots.items():
            assert root.namespace == namespace and root.children and not root.holders
            assert root.parent is None
            for node in self.walk(root):
                num_nodes += 1
                num_blocks += self._size(node)
                self._check_node(node)
                assert node.is_entered == (id(node) in entered)
                assert node.children or node.is_entered, "a lost end"
                for life in node.holders:
                    found[life] += 1
        assert num_blocks == self._num_blocks <= self._max_blocks
        assert num_nodes == self._num_nodes
        assert len(self._ends) <= 2 * self._num_nodes + 64, "stale ends pile up"
        assert all(count == len(life.holdings) for life, count in found.items())
        assert not any(life.is_over for life in self._lives.values())

    def _check_node(self, node: Node) -> None:
        size = self._size(node)
        assert size and len(node.label) == size * self._block_bytes
        assert node.parent is not None
        assert node.parent.children[bytes(node.label[: self._block_bytes])] is node
        assert node.children or node.holders, "nobody holds this end"
        is_topmost = isinstance(node.parent, Root)
        longest = 0
        num_swapped = 0
        for life, holding in node.holders.items():
            assert holding.life is life and holding.node is node and holding in life.holdings
            assert 0 < holding.num_blocks <= size
            longest = max(longest, holding.num_blocks)
            num_swapped += bool(holding.num_dram(holding.num_blocks))
            if not life.is_over and not is_topmost:
                above = node.parent.holders[life]
                assert above.num_blocks == self._size(node.parent), "held without what is before"
        assert node.children or longest == size, "blocks that nobody holds"
        assert num_swapped == node.num_swapped
        counts = node.counts(len(self.instances), self._num_over)
        for life, holding in node.holders.items():
            assert life.is_over or counts[life.slot] == holding.num_blocks
