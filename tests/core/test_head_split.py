"""Heads between instances of unequal tensor parallelism: each of them arrives once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.core.head_split import HeadRoute, heads_of_rank, split_heads
from memserve.errors import GeometryMismatchError
from memserve.types import Heads


def _whole(sender: int, receiver: int, count: int) -> HeadRoute:
    return HeadRoute(sender, receiver, Heads(0, count), Heads(0, count))


@pytest.mark.parametrize("tp", [1, 3])
def test_equals_send_rank_to_rank(tp: int) -> None:
    assert split_heads(3, tp, tp) == [_whole(rank, rank, 3 // tp) for rank in range(tp)]


def test_equals_with_copies_send_rank_to_rank_too() -> None:
    assert split_heads(2, 8, 8) == [_whole(rank, rank, 1) for rank in range(8)]


def test_one_rank_gives_each_of_three_its_head_and_back() -> None:
    assert split_heads(3, 1, 3) == [
        HeadRoute(0, rank, Heads(rank, 1), Heads(0, 1)) for rank in range(3)
    ]
    assert split_heads(3, 3, 1) == [
        HeadRoute(rank, 0, Heads(0, 1), Heads(rank, 1)) for rank in range(3)
    ]


def test_degrees_that_do_not_divide_each_other_share_ranks() -> None:
    assert split_heads(6, 2, 3) == [
        HeadRoute(0, 0, Heads(0, 2), Heads(0, 2)),
        HeadRoute(0, 1, Heads(2, 1), Heads(0, 1)),
        HeadRoute(1, 1, Heads(0, 1), Heads(1, 1)),
        HeadRoute(1, 2, Heads(1, 2), Heads(0, 2)),
    ]


def test_copies_are_read_evenly() -> None:
    routes = split_heads(2, 4, 8)  # each head: two senders, four receivers
    assert [(route.sender, route.receiver) for route in routes] == [
        *((0, 0), (0, 1), (1, 2), (1, 3)),
        *((2, 4), (2, 5), (3, 6), (3, 7)),
    ]


@pytest.mark.parametrize(
    ("total", "tp", "words"),
    [(3, 2, "3 KV heads.*2 ranks"), (8, 12, "8 KV heads.*12 ranks"), (0, 1, "0 KV heads")],
)
def test_heads_that_cannot_be_divided_are_refused_on_either_side(
    total: int, tp: int, words: str
) -> None:
    with pytest.raises(GeometryMismatchError, match=words):
        split_heads(total, 1, tp)
    with pytest.raises(GeometryMismatchError, match=words):
        split_heads(total, tp, 1)


@st.composite
def _splits(draw: st.DrawFn) -> tuple[int, int, int]:
    total = draw(st.integers(1, 24))
    allowed = [n for n in range(1, 49) if total % n == 0 or n % total == 0]
    return total, draw(st.sampled_from(allowed)), draw(st.sampled_from(allowed))


@given(_splits())
def test_every_head_of_every_receiver_comes_once_and_from_who_has_it(
    split: tuple[int, int, int],
) -> None:
    total, sender_tp, receiver_tp = split
    arrived: dict[int, list[int]] = {rank: [] for rank in range(receiver_tp)}
    for route in split_heads(*split):
        held = heads_of_rank(total, sender_tp, route.sender)
        wanted = heads_of_rank(total, receiver_tp, route.receiver)
        assert route.sender_heads.count == route.receiver_heads.count >= 1
        for step in range(route.sender_heads.count):
            head = held[route.sender_heads.first + step]
            assert wanted[route.receiver_heads.first + step] == head
            arrived[route.receiver].append(head)
    for rank, heads in arrived.items():
        assert sorted(heads) == list(heads_of_rank(total, receiver_tp, rank))


@given(_splits())
def test_no_copy_is_read_twice_more_than_another(split: tuple[int, int, int]) -> None:
    total, sender_tp, receiver_tp = split
    reads = Counter(route.sender for route in split_heads(*split))
    for head in range(total):
        holders = [r for r in range(sender_tp) if head in heads_of_rank(total, sender_tp, r)]
        if receiver_tp >= total:
            counts = [reads[rank] for rank in holders]
            assert max(counts) - min(counts) <= 1
