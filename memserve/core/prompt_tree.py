"""The scheduler's prompt tree: which instance holds the KV of how much of a prompt.

A hint, not the truth: instances evict on their own, so entries expire (the paper, section 6). One
tree serves one kind of instance; `scheduler.py` owns the trees, inserts what the lifecycles learn,
and drops an instance whose life is over.

A radix tree over token ids at the granularity of KV blocks. A node's label is the tokens of one or
more blocks, packed as 32-bit integers; all of them are held by the same instances, told at the same
times. An insert splits a node where that would not hold any more::

    insert A B C by P0        insert A B D by P1
    root ── A B C {P0}        root ── A B {P0, P1} ─┬─ C {P0}
                                                    └─ D {P1}

Whoever holds a node holds its ancestors, told no earlier. Requests with different namespaces (cache
salts) share nothing.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from memserve.types import InstanceId, Namespace

_TOKEN = "i"
_TOKEN_BYTES = array(_TOKEN).itemsize


class _Node:
    __slots__ = ("children", "holders", "label", "last_told", "parent")

    def __init__(self, label: bytes, parent: _Node | None) -> None:
        self.label = label
        self.parent = parent
        """None for a root, and for what was cut off."""
        self.children: dict[bytes, _Node] = {}
        """By the first block of their labels."""
        self.holders: dict[InstanceId, float] = {}
        """When each was last told to hold these blocks."""
        self.last_told = 0.0


class PromptTree:
    """Bounded by `max_blocks`: beyond it the blocks go that were told longest ago, ends first."""

    def __init__(self, block_size: int, max_blocks: int, ttl_s: float) -> None:
        self._block_size = block_size
        self._block_bytes = block_size * _TOKEN_BYTES
        self._max_blocks = max_blocks
        self._ttl_s = ttl_s
        self._roots: dict[Namespace | None, _Node] = {}
        self._num_blocks = 0
        self._num_nodes = 0
        self._ends: list[tuple[float, int, Namespace | None, _Node]] = []
        """A heap of (last told, order of entry, namespace, leaf). An entry is stale, and skipped,
        once its node is no leaf any more or was told again."""
        self._entry_numbers = itertools.count()

    @property
    def num_blocks(self) -> int:
        """Blocks in the tree; one that several instances hold counts once."""
        return self._num_blocks

    def match(
        self, tokens: Sequence[int], now: float, namespace: Namespace | None = None
    ) -> dict[InstanceId, int]:
        """How many of the first tokens each instance is believed to hold (full blocks).

        Instances that hold nothing are not in the result. Does not mutate. Time: the tokens, and
        the holders along one path.
        """
        found: dict[InstanceId, int] = {}
        node = self._roots.get(namespace)
        if node is None:
            return found
        key = self._pack(tokens)
        oldest = now - self._ttl_s
        start = 0
        while child := node.children.get(key[start : start + self._block_bytes]):
            shared = self._shared_bytes(child.label, key, start)
            num_tokens = (start + shared) // _TOKEN_BYTES
            for instance, told in child.holders.items():
                if told > oldest:
                    found[instance] = num_tokens
            if shared < len(child.label):
                break
            start += shared
            node = child
        return found

    def insert(
        self,
        tokens: Sequence[int],
        instance: InstanceId,
        now: float,
        namespace: Namespace | None = None,
    ) -> None:
        """The instance holds the KV of these tokens' full blocks. `now` never runs backwards."""
        key = self._pack(tokens)
        if not key:
            return
        node = self._roots.setdefault(namespace, _Node(b"", None))
        start = 0
        while start < len(key):
            first_block = key[start : start + self._block_bytes]
            child = node.children.get(first_block)
            if child is None:
                child = self._add(node, key[start:])
            else:
                shared = self._shared_bytes(child.label, key, start)
                if shared < len(child.label):
                    child = self._split(child, shared)
            child.holders[instance] = child.last_told = now
            start += len(child.label)
            node = child
        if not node.children:
            self._enter(node, namespace)
        self._shrink()
        self._tidy_ends()

    def drop(self, instance: InstanceId) -> None:
        """Forget everything of an instance. Time: the whole tree; lives end seldom."""
        for namespace, root in list(self._roots.items()):
            for node in list(self._walk(root)):
                if node.holders.pop(instance, None) is None:
                    continue
                if node.holders:
                    node.last_told = max(node.holders.values())
                else:  # nor has anybody what is below
                    self._cut(node, namespace)
            self._drop_root_if_bare(namespace, root)
        self._renew_ends()

    def evict(self, now: float) -> None:
        """Remove what has expired. Time: what is removed."""
        oldest = now - self._ttl_s
        while (end := self._oldest_end()) is not None:
            told, _, namespace, node = end
            if told > oldest:
                break
            self._cut(node, namespace)
        self._tidy_ends()

    def check_integrity(self) -> None:
        """Raises: AssertionError if the tree contradicts itself."""
        num_blocks = num_nodes = 0
        live_ends = {(told, id(node)) for told, _, _, node in self._ends}
        for root in self._roots.values():
            assert root.children and not root.holders and root.parent is None
            for node in self._walk(root):
                num_nodes += 1
                num_blocks += len(node.label) // self._block_bytes
                self._check_node(node, is_top=node.parent is root)
                assert node.children or (node.last_told, id(node)) in live_ends, "a lost end"
        assert num_blocks == self._num_blocks <= self._max_blocks
        assert num_nodes == self._num_nodes
        assert len(self._ends) <= 2 * self._num_nodes + 64, "stale ends pile up"

    # ── nodes ─────────────────────────────────────────────────────────────────────────────────

    def _add(self, parent: _Node, label: bytes) -> _Node:
        node = _Node(label, parent)
        parent.children[label[: self._block_bytes]] = node
        self._num_nodes += 1
        self._num_blocks += len(label) // self._block_bytes
        return node

    def _split(self, node: _Node, at: int) -> _Node:
        """Put a new parent above the node for the first `at` bytes of its label; returns that."""
        assert node.parent is not None
        upper = _Node(node.label[:at], node.parent)
        upper.holders = dict(node.holders)
        upper.last_told = node.last_told
        node.parent.children[upper.label[: self._block_bytes]] = upper
        node.label = node.label[at:]
        node.parent = upper
        upper.children[node.label[: self._block_bytes]] = node
        self._num_nodes += 1
        return upper

    def _cut(self, node: _Node, namespace: Namespace | None) -> None:
        """Remove a node and all below it; a parent that becomes an end is entered as one."""
        parent = node.parent
        if parent is None:  # was below something that is cut already
            return
        del parent.children[node.label[: self._block_bytes]]
        for gone in [node, *self._walk(node)]:
            gone.parent = None
            self._num_nodes -= 1
            self._num_blocks -= len(gone.label) // self._block_bytes
        if parent.children:
            return
        if parent.parent is None:
            self._drop_root_if_bare(namespace, parent)
        else:
            self._enter(parent, namespace)

    def _drop_root_if_bare(self, namespace: Namespace | None, root: _Node) -> None:
        if not root.children and self._roots.get(namespace) is root:
            del self._roots[namespace]

    def _walk(self, top: _Node) -> Iterator[_Node]:
        """Every node below `top`, parents first."""
        todo = list(top.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    # ── the bound ─────────────────────────────────────────────────────────────────────────────

    def _enter(self, node: _Node, namespace: Namespace | None) -> None:
        entry = (node.last_told, next(self._entry_numbers), namespace, node)
        heapq.heappush(self._ends, entry)

    def _tidy_ends(self) -> None:
        if len(self._ends) > 2 * self._num_nodes + 64:
            self._renew_ends()

    def _renew_ends(self) -> None:
        """Rebuild the heap without stale entries."""
        self._ends = [
            (node.last_told, next(self._entry_numbers), namespace, node)
            for namespace, root in self._roots.items()
            for node in self._walk(root)
            if not node.children
        ]
        heapq.heapify(self._ends)

    def _oldest_end(self) -> tuple[float, int, Namespace | None, _Node] | None:
        """The leaf that was told longest ago; stays in the heap."""
        while self._ends:
            told, _, _, node = self._ends[0]
            if node.parent is not None and not node.children and node.last_told == told:
                return self._ends[0]
            heapq.heappop(self._ends)
        return None

    def _shrink(self) -> None:
        while (excess := self._num_blocks - self._max_blocks) > 0:
            end = self._oldest_end()
            assert end is not None
            _, _, namespace, node = end
            if len(node.label) > excess * self._block_bytes:
                node.label = node.label[: -excess * self._block_bytes]
                self._num_blocks -= excess
            else:
                self._cut(node, namespace)

    # ── small helpers ─────────────────────────────────────────────────────────────────────────

    def _pack(self, tokens: Sequence[int]) -> bytes:
        """The full blocks."""
        full = len(tokens) // self._block_size * self._block_size
        return array(_TOKEN, tokens[:full]).tobytes()

    def _shared_bytes(self, label: bytes, key: bytes, start: int) -> int:
        """Length of the common beginning of `label` and `key[start:]`, in whole blocks."""
        rest = key[start : start + len(label)]
        if rest == label:
            return len(label)
        ours = np.frombuffer(label[: len(rest)], dtype=np.int32)
        theirs = np.frombuffer(rest, dtype=np.int32)
        differs = ours != theirs
        tokens = int(differs.argmax()) if differs.any() else len(differs)
        return tokens // self._block_size * self._block_bytes

    def _check_node(self, node: _Node, *, is_top: bool) -> None:
        assert node.label and len(node.label) % self._block_bytes == 0
        assert node.holders and node.last_told == max(node.holders.values())
        assert node.parent is not None
        assert node.parent.children[node.label[: self._block_bytes]] is node
        if not is_top:
            above = node.parent.holders
            assert all(above[instance] >= told for instance, told in node.holders.items())
