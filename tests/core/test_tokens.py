"""Packed tokens: the bytes that the radix trees compare."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.core.tokens import TOKEN_BYTES, Path, pack, shared_blocks, unpack
from memserve.types import Namespace

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=30)


@given(TOKENS)
def test_packing_keeps_every_token(tokens: list[int]) -> None:
    packed = pack(tokens)
    assert len(packed) == len(tokens) * TOKEN_BYTES
    assert unpack(packed) == tokens


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack([token])


@given(
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.integers(0, 2), max_size=12),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_shared_blocks_are_counted_from_the_beginning(
    ours: list[int], theirs: list[int], start: int, block_size: int
) -> None:
    ours = ours[: len(ours) // block_size * block_size]
    start = min(start, len(theirs))
    rest = theirs[start:]
    expected = 0
    while (end := (expected + 1) * block_size) <= min(len(ours), len(rest)):
        if ours[:end] != rest[:end]:
            break
        expected += 1
    for label in (pack(ours), bytearray(pack(ours))):
        assert shared_blocks(label, pack(theirs), start * TOKEN_BYTES, block_size) == expected


def test_a_path_has_full_blocks_only() -> None:
    path = Path([1, 2, 3, 4, 5], 2, Namespace(cache_salt="s"))
    assert (path.num_blocks, path.packed) == (2, pack([1, 2, 3, 4]))
    assert path.namespace == Namespace(cache_salt="s")
    assert Path([1], 2).num_blocks == 0


def test_a_path_takes_tokens_that_are_packed_already() -> None:
    assert Path(pack([1, 2, 3]), 2).packed == Path([1, 2, 3], 2).packed
    with pytest.raises(ValueError, match="5 bytes"):
        Path(b"12345", 2)
