"""Token ids as the radix trees compare them: packed, 32 bits each, in whole KV blocks.

Packing costs more than a look-up in a tree, so a prompt is packed once and its bytes are passed on.
Used by `radix` (an instance's index) and `prompt_tree.py` (the scheduler's trees).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from memserve.types import Namespace

_TYPE = "I"  # unsigned: filling it from a list is three times as fast as filling "i"
TOKEN_BYTES = array(_TYPE).itemsize


def pack(token_ids: Sequence[int]) -> bytes:
    """4 bytes a token. Raises: OverflowError for ids that are not unsigned 32-bit integers."""
    return array(_TYPE, token_ids).tobytes()


def unpack(packed: bytes) -> list[int]:
    """The token ids again."""
    return array(_TYPE, packed).tolist()


def shared_blocks(label: bytes | bytearray, packed: bytes, start: int, block_size: int) -> int:
    """How many whole blocks `label` and `packed[start:]` have in common at their beginnings.

    `start` is in bytes. Time: the common length, at memory speed.
    """
    block_bytes = block_size * TOKEN_BYTES
    if packed.startswith(label, start):
        return len(label) // block_bytes
    count = min(len(label), len(packed) - start) // TOKEN_BYTES
    if not count:
        return 0
    ours = np.frombuffer(label, dtype=np.int32, count=count)
    theirs = np.frombuffer(packed, dtype=np.int32, count=count, offset=start)
    differs = ours != theirs
    first = int(differs.argmax())
    return (first if differs[first] else count) // block_size


class Path:
    """A prompt under a namespace: packed once, then used for any number of calls."""

    __slots__ = ("block_size", "namespace", "num_blocks", "packed")

    def __init__(
        self,
        token_ids: Sequence[int] | bytes,
        block_size: int,
        namespace: Namespace = Namespace(),  # noqa: B008 (frozen)
    ) -> None:
        """`token_ids`: a sequence, or what `pack` made of one. A partial last block is left out.

        Raises: OverflowError as `pack` does; ValueError for bytes that are no whole tokens.
        """
        packed = token_ids if isinstance(token_ids, bytes) else pack(token_ids)
        if len(packed) % TOKEN_BYTES:
            raise ValueError(f"{len(packed)} bytes are no whole tokens of {TOKEN_BYTES} bytes")
        block_bytes = block_size * TOKEN_BYTES
        self.block_size = block_size
        self.namespace = namespace
        self.num_blocks = len(packed) // block_bytes
        """Full blocks."""
        self.packed = packed[: self.num_blocks * block_bytes]
        """The tokens of the full blocks."""

    def __repr__(self) -> str:
        return f"Path({self.num_blocks} blocks of {self.block_size}, {self.namespace})"
