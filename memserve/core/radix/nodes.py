"""What the trees of the local index are made of: nodes, each one or more blocks without a branch.

A node keeps its own counts; what several nodes have to agree on is `forest.py`'s and `tiers.py`'s
to change.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from memserve.types import Medium, Namespace

ABSENT = -1
"""In arrays of places: not in this medium."""


class Tree:
    """The root of all prompts of a namespace."""

    __slots__ = ("is_published", "namespace", "root")

    def __init__(self, namespace: Namespace, *, is_published: bool) -> None:
        self.namespace = namespace
        self.is_published = is_published
        self.root = Node(self, None, 0, b"", array("q"), 0)


class Share:
    """What one medium holds of a node's blocks."""

    __slots__ = ("below", "is_queued", "num", "places")

    def __init__(self, places: array[int], num: int) -> None:
        self.places = places
        """One for each block of the node, ABSENT where the block is not in this medium."""
        self.num = num
        """Blocks of the node that are in this medium."""
        self.below = 0
        """Children that have something in this medium, in their own blocks or further below."""
        self.is_queued = False
        """Whether the tier's queue has an entry for the node."""


class Node:
    """One or more blocks without a branch between them. Depths count blocks from the root."""

    __slots__ = (
        "children",
        "keys",
        "label",
        "number",
        "parent",
        "referenced_below",
        "references",
        "shares",
        "start",
        "touched_s",
        "tree",
    )

    def __init__(
        self,
        tree: Tree,
        parent: Node | None,
        start: int,
        label: bytes,
        keys: array[int],
        number: int,
    ) -> None:
        """The blocks have no place yet."""
        self.tree = tree
        self.number = number
        """Later nodes have higher ones; roots have 0."""
        self.parent = parent
        """None for a root."""
        self.start = start
        """Blocks above this node."""
        self.label = bytearray(label)
        """The packed tokens of its blocks."""
        self.keys = keys
        """One for each block; they rise on the way down. None: a root, or it has left the tree."""
        self.shares = tuple(Share(array("i", [ABSENT]) * len(keys), 0) for _ in Medium)
        """By `Tier.index`."""
        self.children: dict[bytes, Node] = {}
        """By the first block of their labels."""
        self.references: dict[int, int] = {}
        """How many references end at a depth within this node."""
        self.referenced_below = 0
        """Children in which, or below which, a reference ends."""
        self.touched_s = 0.0
        """When one of its blocks was last used: never later than its parent."""

    @property
    def end(self) -> int:
        """Blocks down to the end of this node."""
        return self.start + len(self.keys)

    @property
    def num_referenced(self) -> int:
        """How many of its first blocks must not be evicted."""
        if self.referenced_below:
            return len(self.keys)
        return max(self.references, default=self.start) - self.start

    def lineage(self) -> list[Node]:
        """The nodes from the root's child down to this one; empty for a root."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def holding(self, depth: int) -> Node:
        """This node or the one above it whose blocks reach over `depth` (0 < depth <= end)."""
        node = self
        while depth <= node.start:
            assert node.parent is not None
            node = node.parent
        return node

    def extend(self, label: bytes, keys: array[int]) -> None:
        """More blocks at the end of a node without children; they have no place yet."""
        self.label += label
        self.keys.extend(keys)
        for share in self.shares:
            share.places.extend(array("i", [ABSENT]) * len(keys))

    def take_apart(self) -> None:
        """It has left the tree. Who still has it finds the way up, and keeps no more memory."""
        self.label = bytearray()
        self.keys = array("q")
        self.children = {}
        self.references = {}

    # ── references: their ends are counted where they are, and known to all nodes above ────────

    def acquire(self, depth: int) -> None:
        """One more reference ends at this depth of the node."""
        is_first = not self.references and not self.referenced_below
        self.references[depth] = self.references.get(depth, 0) + 1
        if is_first:
            self._tell_above(1)

    def release(self, depth: int) -> None:
        """One reference less. Raises: KeyError if none ends there."""
        self.references[depth] -= 1
        if not self.references[depth]:
            del self.references[depth]
            if not self.references and not self.referenced_below:
                self._tell_above(-1)

    def cut_references(self, depth: int) -> None:
        """The node ends at `depth` from now on, with nothing below: what was further down ends."""
        if not self.references and not self.referenced_below:
            return
        self.references = {at: num for at, num in self.references.items() if at <= depth}
        self.referenced_below = 0
        if not self.references:
            self._tell_above(-1)

    def split_references(self, upper: Node) -> None:
        """The first blocks of this node have become `upper`, its parent."""
        is_referenced = bool(self.references or self.referenced_below)
        upper.references = {at: num for at, num in self.references.items() if at <= self.start}
        self.references = {at: num for at, num in self.references.items() if at > self.start}
        if is_referenced:
            upper.referenced_below = int(bool(self.references or self.referenced_below))

    def _tell_above(self, change: int) -> None:
        """This node has become referenced (1) or is no longer (-1)."""
        node: Node = self
        while (parent := node.parent) is not None:
            parent.referenced_below += change
            if parent.references or parent.referenced_below != max(change, 0):
                break  # the parent was referenced before and is now
            node = parent

    def descendants(self) -> Iterator[Node]:
        """Every node below, parents first. The caller may take a yielded node apart."""
        todo = list(self.children.values())
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield node
