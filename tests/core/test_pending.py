"""Prompts that are not computed yet, against a naive list of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.core.pending import Pending
from memserve.core.tokens import Path
from memserve.types import InstanceId, Namespace, RequestId

INSTANCES = [InstanceId("P0"), InstanceId("P1")]
BLOCK = 2


def path(*tokens: int, salt: str | None = None) -> Path:
    return Path(tokens, BLOCK, Namespace(salt))


def found(pending: Pending, prompt: Path) -> list[int]:
    coming = pending.match(prompt)
    return [0, 0] if coming is None else coming.tokens.tolist()


def test_what_is_placed_is_found_until_it_is_computed() -> None:
    pending = Pending(INSTANCES)
    pending.add(RequestId("a"), INSTANCES[1], path(1, 2, 3, 4, 5), is_fetched=False)
    assert found(pending, path(1, 2, 3, 4, 9, 9)) == [0, 4]
    assert found(pending, path(1, 2, 9, 4)) == [0, 2]
    assert pending.match(path(9, 2, 3, 4)) is None
    assert pending.match(path(1)) is None
    assert pending.match(path(1, 2, 3, 4, salt="other")) is None
    pending.add(RequestId("a"), INSTANCES[0], path(1, 2), is_fetched=False)  # placed again
    assert found(pending, path(1, 2, 3, 4)) == [2, 0]
    pending.remove(RequestId("a"))
    pending.remove(RequestId("unknown"))
    assert pending.match(path(1, 2)) is None and len(pending) == 0


def test_what_is_being_fetched_is_told_apart_from_what_is_in_the_queue() -> None:
    def fetched() -> list[bool]:
        coming = pending.match(path(1, 2, 3, 4))
        assert coming is not None
        return coming.is_fetched.tolist()

    pending = Pending(INSTANCES)
    pending.add(RequestId("a"), INSTANCES[1], path(1, 2, 3, 4, 5), is_fetched=True)
    assert fetched() == [False, True]
    pending.add(RequestId("b"), INSTANCES[1], path(1, 2), is_fetched=False)
    assert fetched() == [False, True], "b brings less"
    pending.add(RequestId("c"), INSTANCES[1], path(1, 2, 3, 4), is_fetched=False)
    assert fetched() == [False, False], "c brings as much, and is in the queue"
    pending.remove(RequestId("c"))
    assert fetched() == [False, True]
    pending.fetched(RequestId("a"))
    pending.fetched(RequestId("unknown"))
    assert fetched() == [False, False]


moves = st.tuples(
    st.integers(0, 5), st.integers(0, 1), st.lists(st.integers(0, 1), max_size=9), st.booleans()
)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.lists(moves, max_size=30))
def test_it_is_what_a_list_would_say(moves: list[tuple[int, int, list[int], bool]]) -> None:
    pending = Pending(INSTANCES)
    naive: dict[RequestId, tuple[int, list[int]]] = {}
    for number, slot, tokens, is_removal in moves:
        request_id = RequestId(str(number))
        if is_removal:
            pending.remove(request_id)
            naive.pop(request_id, None)
        else:
            pending.add(request_id, INSTANCES[slot], path(*tokens), is_fetched=False)
            naive[request_id] = slot, tokens
        expected = [
            max((_shared(tokens, other) for at, other in naive.values() if at == place), default=0)
            for place in range(2)
        ]
        assert found(pending, path(*tokens)) == expected
    assert len(pending) == sum(len(tokens) >= BLOCK for _, tokens in naive.values())


def _shared(one: list[int], other: list[int]) -> int:
    """Tokens in the full blocks that both begin with."""
    most = min(len(one), len(other)) // BLOCK * BLOCK
    return max(end for end in range(0, most + 1, BLOCK) if one[:end] == other[:end])
