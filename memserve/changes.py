"""What changes in an instance's index: the words in which it tells the scheduler's prompt trees.

Written by `core/radix`, carried by `messages.CacheChanged`, read by `core/following_tree.py`.

Every block of an index has a key: a number above 0 that the index gives out once in a life of its
instance, rising. An index is closed towards the root: a block is in it only together with all the
blocks before it. So `Evicted` names ends of prompts, never a block with others below it that stay.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from memserve.types import Medium, Namespace

KeyRange: TypeAlias = tuple[int, int]
"""First key, and how many keys from there on."""


class Inserted(msgspec.Struct, frozen=True, tag=True):
    """Blocks joined the index, one below the other, keyed `first_key`, `first_key` + 1, …"""

    namespace: Namespace
    parent: int | None
    """Key of the block before the first one; None at the beginning of a prompt."""
    first_key: int
    token_ids: bytes
    """Of these blocks alone: 32-bit integers in the machine's order (`core/tokens.py`)."""
    medium: Medium


class Evicted(msgspec.Struct, frozen=True, tag=True):
    """No medium holds these blocks any more."""

    keys: list[KeyRange]


class Swapped(msgspec.Struct, frozen=True, tag=True):
    """The fastest medium that holds these blocks is now another one."""

    keys: list[KeyRange]
    medium: Medium


class Cleared(msgspec.Struct, frozen=True, tag=True):
    """Everything left the index."""


AnyChange: TypeAlias = Inserted | Evicted | Swapped | Cleared
