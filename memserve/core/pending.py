"""Prompts that instances were given and have not computed yet: KV that will be there soon.

An index knows a prompt once its computing has begun. A request with the same beginning that comes
in the meantime need not be computed elsewhere: placed behind the first one, it finds the KV.
Collaborators: `placing.py` adds what it places and asks; `accounting.py` removes what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from memserve.core.loads import Counts
from memserve.core.tokens import TOKEN_BYTES, Path, shared_blocks
from memserve.types import InstanceId, Namespace, RequestId

_Key: TypeAlias = tuple[Namespace, bytes]

_COMPARED = 32
"""Of the prompts that begin with the same block, so many are compared: the latest."""


class Pending:
    """Of all instances, in the order of `instances`."""

    def __init__(self, instances: Sequence[InstanceId]) -> None:
        self._slots = {instance: slot for slot, instance in enumerate(instances)}
        self._keys: dict[RequestId, _Key] = {}
        self._paths: dict[_Key, dict[RequestId, tuple[int, Path]]] = {}
        """Prompts of at least one block, by their first block."""

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, request_id: RequestId, instance: InstanceId, path: Path) -> None:
        """The instance was given this prompt; what it was given before for the request is over."""
        self.remove(request_id)
        if path.num_blocks:
            key = _key_of(path)
            self._keys[request_id] = key
            self._paths.setdefault(key, {})[request_id] = self._slots[instance], path

    def remove(self, request_id: RequestId) -> None:
        """The prompt is computed, or will not be. Unknown requests are ignored."""
        key = self._keys.pop(request_id, None)
        if key is not None:
            paths = self._paths[key]
            del paths[request_id]
            if not paths:
                del self._paths[key]

    def match(self, path: Path) -> Counts | None:
        """[instances] Leading tokens that each will hold (full blocks); None: none does.

        Does not mutate. Time: the prompts that begin with the same block, at memory speed.
        """
        paths = self._paths.get(_key_of(path)) if path.num_blocks else None
        if paths is None:
            return None
        tokens: Counts = np.zeros(len(self._slots), np.int64)
        block_size = path.block_size
        for slot, other in list(paths.values())[-_COMPARED:]:
            shared = shared_blocks(other.packed, path.packed, 0, block_size) * block_size
            if shared > tokens[slot]:
                tokens[slot] = shared
        return tokens


def _key_of(path: Path) -> _Key:
    return path.namespace, path.packed[: path.block_size * TOKEN_BYTES]
