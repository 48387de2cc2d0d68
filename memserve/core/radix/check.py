"""Whether the local index is sound: what has to hold among nodes, and between nodes and tiers.

For tests and audits: it walks over everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from memserve.core.radix.nodes import ABSENT, Node, Tree
from memserve.core.radix.tiers import Tier
from memserve.types import Namespace


def check(trees: Mapping[Namespace, Tree], tiers: Iterable[Tier], block_bytes: int) -> None:
    """Raises: AssertionError if nodes, or what the tiers know of them, contradict each other."""
    nodes: list[Node] = []
    for namespace, tree in trees.items():
        assert tree.namespace == namespace and tree.root.children, "a bare root"
        assert tree.root.parent is None and not tree.root.keys
        nodes += tree.root.descendants()
    for node in nodes:
        _check_shape(node, block_bytes)
        _check_counts(node)
    for tier in tiers:
        _check_tier(tier, nodes)


def _check_shape(node: Node, block_bytes: int) -> None:
    parent = node.parent
    assert parent is not None and parent.tree is node.tree and node.start == parent.end
    assert parent.children[bytes(node.label[:block_bytes])] is node
    assert len(node.label) == len(node.keys) * block_bytes > 0
    assert list(node.keys) == sorted(set(node.keys)), "keys do not rise"
    assert not parent.keys or parent.keys[-1] < node.keys[0], "keys do not rise"
    assert parent.parent is None or parent.touched_s >= node.touched_s
    for offset in range(len(node.keys)):
        assert any(share.places[offset] != ABSENT for share in node.shares), "a block is nowhere"


def _check_counts(node: Node) -> None:
    children = node.children.values()
    assert all(node.start < at <= node.end and num > 0 for at, num in node.references.items())
    referenced = [child for child in children if child.references or child.referenced_below]
    assert node.referenced_below == len(referenced)
    for index, share in enumerate(node.shares):
        assert len(share.places) == len(node.keys)
        assert share.num == len(share.places) - share.places.count(ABSENT)
        below = [child.shares[index] for child in children]
        assert share.below == sum(1 for s in below if s.num or s.below)


def _check_tier(tier: Tier, nodes: Sequence[Node]) -> None:
    known: dict[int, tuple[Node, int]] = {}
    for node in nodes:
        for depth, place in enumerate(tier.share(node).places, node.start):
            if place != ABSENT:
                assert place not in known, f"{tier.medium.value} {place} holds two blocks"
                known[place] = (node, depth)
    assert tier.num == len(known)
    for place, number in enumerate(tier.numbers):
        holder = tier.holder(place)
        assert holder is known.get(place, (None,))[0] and bool(number) == (holder is not None)
        assert holder is None or tier.depths[place] == known[place][1]
    queued = Counter(tier.queued())
    assert all(num == 1 for num in queued.values()), "a node is queued twice"
    assert len(queued) <= 2 * len(nodes) + 64, "entries of nodes that are gone pile up"
    for node in nodes:
        share = tier.share(node)
        assert share.is_queued == (node in queued)
        assert share.is_queued or not share.num or share.below, "a lost end"
