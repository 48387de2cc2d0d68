"""Token ids as the radix trees compare them: packed, 32 bits each, in whole KV blocks.

Packing costs more than a look-up in a tree, so a prompt is packed once and its bytes are passed on.
Used by `radix.py` (an instance's index) and `prompt_tree.py` (the scheduler's trees).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

_TYPE = "i"
TOKEN_BYTES = array(_TYPE).itemsize


def pack(token_ids: Sequence[int]) -> bytes:
    """4 bytes a token. Raises: OverflowError for ids that are not 32-bit integers."""
    return array(_TYPE, token_ids).tobytes()


def unpack(packed: bytes) -> list[int]:
    """The token ids again."""
    return array(_TYPE, packed).tolist()


def shared_blocks(label: bytes, packed: bytes, start: int, block_size: int) -> int:
    """How many whole blocks `label` and `packed[start:]` have in common at their beginnings.

    `start` is in bytes. Time: the common length, at memory speed.
    """
    rest = packed[start : start + len(label)]
    block_bytes = block_size * TOKEN_BYTES
    if rest == label:
        return len(label) // block_bytes
    size = len(rest) // TOKEN_BYTES * TOKEN_BYTES
    ours = np.frombuffer(label, dtype=np.int32, count=size // TOKEN_BYTES)
    theirs = np.frombuffer(rest, dtype=np.int32, count=size // TOKEN_BYTES)
    differs = ours != theirs
    tokens = int(differs.argmax()) if differs.any() else len(differs)
    return tokens // block_size
