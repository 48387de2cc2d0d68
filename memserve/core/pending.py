"""Prompts that instances were given and have not computed yet: KV that will be there soon.

An index knows a prompt once its computing has begun. A request with the same beginning that comes
in the meantime need not be computed elsewhere: placed behind the first one, it finds the KV. Only
where the first one is still fetching it would not be behind it: that one is not in the queue yet.
Collaborators: `placing.py` adds what it places and asks; `accounting.py` removes what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from memserve.core.loads import Bools, Counts
from memserve.core.tokens import TOKEN_BYTES, Path, shared_blocks
from memserve.types import InstanceId, Namespace, RequestId

_Key: TypeAlias = tuple[Namespace, bytes]

_COMPARED = 32
"""Of the prompts that begin with the same block, so many are compared: the latest."""


class Coming(msgspec.Struct, frozen=True):
    """What a prompt will find."""

    tokens: Counts
    """[instances] Leading tokens that each will hold (full blocks)."""
    is_fetched: Bools
    """[instances] Whether that is still on its way from another instance."""


class _Entry(msgspec.Struct):
    slot: int
    path: Path
    is_fetched: bool


class Pending:
    """Of all instances, in the order of `instances`."""

    def __init__(self, instances: Sequence[InstanceId]) -> None:
        self._slots = {instance: slot for slot, instance in enumerate(instances)}
        self._keys: dict[RequestId, _Key] = {}
        self._paths: dict[_Key, dict[RequestId, _Entry]] = {}
        """Prompts of at least one block, by their first block."""

    def __len__(self) -> int:
        return len(self._keys)

    def add(
        self, request_id: RequestId, instance: InstanceId, path: Path, *, is_fetched: bool
    ) -> None:
        """The instance was given this prompt; what it was given before for the request is over.

        `is_fetched`: it fetches some of it first.
        """
        self.remove(request_id)
        if path.num_blocks:
            key = _key_of(path)
            self._keys[request_id] = key
            entry = _Entry(self._slots[instance], path, is_fetched)
            self._paths.setdefault(key, {})[request_id] = entry

    def fetched(self, request_id: RequestId) -> None:
        """Its fetch has ended, and it is in the queue. Unknown requests are ignored."""
        key = self._keys.get(request_id)
        if key is not None:
            self._paths[key][request_id].is_fetched = False

    def remove(self, request_id: RequestId) -> None:
        """The prompt is computed, or will not be. Unknown requests are ignored."""
        key = self._keys.pop(request_id, None)
        if key is not None:
            paths = self._paths[key]
            del paths[request_id]
            if not paths:
                del self._paths[key]

    def match(self, path: Path) -> Coming | None:
        """What the prompt will find where others that begin with it are before it; None: nothing.

        Does not mutate. Time: the prompts that begin with the same block, at memory speed.
        """
        paths = self._paths.get(_key_of(path)) if path.num_blocks else None
        if paths is None:
            return None
        tokens: Counts = np.zeros(len(self._slots), np.int64)
        is_fetched: Bools = np.zeros(len(self._slots), bool)
        block_size = path.block_size
        for entry in list(paths.values())[-_COMPARED:]:
            slot = entry.slot
            shared = shared_blocks(entry.path.packed, path.packed, 0, block_size) * block_size
            if shared > tokens[slot]:
                tokens[slot], is_fetched[slot] = shared, entry.is_fetched
            elif shared == tokens[slot]:
                is_fetched[slot] &= entry.is_fetched
        return Coming(tokens, is_fetched)


def _key_of(path: Path) -> _Key:
    return path.namespace, path.packed[: path.block_size * TOKEN_BYTES]
