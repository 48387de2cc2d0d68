"""What `PromptTree` is made of: nodes, the lives that hold them, and what a walk finds.

These know nothing of each other's rules; `prompt_tree.py` and its two forms keep them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from memserve.types import InstanceId, Namespace


class Life:
    """One life of an instance, as the tree knows it."""

    __slots__ = ("holdings", "instance", "is_over", "slot")

    def __init__(self, instance: InstanceId, slot: int) -> None:
        self.instance = instance
        self.slot = slot
        """Its place in the arrays of a `Match`."""
        self.is_over = False
        self.holdings: set[Holding] = set()


class Holding:
    """The first `num_blocks` blocks of a node, in one life's cache."""

    __slots__ = ("life", "node", "num_blocks")

    def __init__(self, life: Life, node: Node, num_blocks: int = 0) -> None:
        self.life = life
        self.node = node
        self.num_blocks = num_blocks

    def num_dram(self, num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks are in DRAM alone."""
        return 0


class Node:
    """Blocks that prompts have in common. `parent` is None for a root, and once cut off."""

    __slots__ = (
        "_counts",
        "_counts_version",
        "children",
        "holders",
        "is_entered",
        "label",
        "num_swapped",
        "parent",
        "used_at",
    )

    def __init__(self, label: bytes | bytearray, parent: Node | None, used_at: float) -> None:
        self.label = bytearray(label)
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        """By the first block of their labels."""
        self.holders: dict[Life, Holding] = {}
        self.used_at = used_at
        self.num_swapped = 0
        """Holdings with blocks in DRAM alone."""
        self.is_entered = False
        """Whether the heap of ends has an entry for this node."""
        self._counts: npt.NDArray[np.int64] | None = None
        self._counts_version = 0

    def changed(self) -> None:
        """To be called when what the holders hold has changed."""
        self._counts = None

    def counts(self, num_slots: int, version: int) -> npt.NDArray[np.int64]:
        """[num_slots] held blocks; kept until the node changes or a life ends (`version`)."""
        if self._counts is None or self._counts_version != version:
            counts = np.zeros(num_slots, np.int64)
            living = [holding for life, holding in self.holders.items() if not life.is_over]
            counts[[holding.life.slot for holding in living]] = [
                holding.num_blocks for holding in living
            ]
            self._counts, self._counts_version = counts, version
        return self._counts


class Root(Node):
    """The beginning of all prompts of a namespace; its label is empty."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(b"", None, 0.0)
        self.namespace = namespace


class Match:
    """What every instance holds of one prompt's beginning, as it was when asked."""

    __slots__ = ("_slots", "cached_tokens", "dram_tokens", "end")

    def __init__(
        self,
        slots: Mapping[InstanceId, int],
        cached_tokens: npt.NDArray[np.int64],
        dram_tokens: npt.NDArray[np.int64],
        end: Node | None,
    ) -> None:
        self._slots = slots
        self.cached_tokens = cached_tokens
        """[instances of the tree, in its order]: leading tokens, in any medium."""
        self.dram_tokens = dram_tokens
        """[instances]: how many of those are in DRAM alone."""
        self.end = end
        """The last node that shares something with the prompt."""

    def cached(self, instance: InstanceId) -> int:
        """Leading tokens that the instance holds; 0 for one that the tree does not know."""
        slot = self._slots.get(instance)
        return 0 if slot is None else int(self.cached_tokens[slot])

    def in_dram(self, instance: InstanceId) -> int:
        """How many of those are in DRAM alone."""
        slot = self._slots.get(instance)
        return 0 if slot is None else int(self.dram_tokens[slot])

    def as_dict(self) -> dict[InstanceId, int]:
        """Instance → cached tokens, without those that hold nothing."""
        return {
            instance: int(self.cached_tokens[slot])
            for instance, slot in self._slots.items()
            if self.cached_tokens[slot]
        }
