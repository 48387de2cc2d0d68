"""The queue of requests that wait: its order, its bounds, and that nobody is passed over."""

from __future__ import annotations

import dataclasses
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.core.admission import AdmissionQueue, Ticket
from memserve.types import RequestId

LARGEST = 50
"""Tokens of the largest request."""


def ticket(
    name: str, client: str = "a", priority: int = 0, num_tokens: int = 10, deadline: float = 60.0
) -> Ticket:
    return Ticket(RequestId(name), client, priority, num_tokens, deadline)


def pop(queue: AdmissionQueue, now: float = 0.0) -> Ticket | None:
    """Take whose turn it is."""
    for ticket in queue.first(1):
        queue.take(ticket.id, now)
        return ticket
    return None


def drain(queue: AdmissionQueue) -> list[str]:
    """Everybody, in order."""
    names = []
    while (popped := pop(queue)) is not None:
        names.append(str(popped.id))
        queue.check_integrity()
    return names


def queue_of(*tickets: Ticket, max_waiting: int = 100) -> AdmissionQueue:
    queue = AdmissionQueue(max_waiting)
    for one in tickets:
        queue.push(one)
    queue.check_integrity()
    return queue


# ── by example ────────────────────────────────────────────────────────────────────────────────


def test_one_client_is_served_in_the_order_of_arrival() -> None:
    queue = queue_of(ticket("1", num_tokens=50), ticket("2", num_tokens=1), ticket("3"))
    assert drain(queue) == ["1", "2", "3"]
    assert pop(queue) is None


def test_lower_priority_numbers_go_first() -> None:
    queue = queue_of(ticket("later", priority=5), ticket("plain"), ticket("now", priority=-1))
    assert drain(queue) == ["now", "plain", "later"]


def test_clients_take_turns_however_much_one_of_them_asks_for() -> None:
    queue = queue_of(*(ticket(f"a{n}") for n in range(4)), ticket("b0", "b"), ticket("b1", "b"))
    assert drain(queue) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_turns_are_counted_in_tokens() -> None:
    small = [ticket(f"b{n}", "b", num_tokens=10) for n in range(4)]
    queue = queue_of(ticket("a0", num_tokens=30), ticket("a1", num_tokens=30), *small)
    assert drain(queue) == ["a0", "b0", "b1", "b2", "a1", "b3"]


def test_what_was_generated_counts_too() -> None:
    queue = queue_of(ticket("a0"), ticket("a1"), ticket("b0", "b"), ticket("b1", "b"))
    queue.charge("a", 15)
    assert drain(queue) == ["b0", "b1", "a0", "a1"]


def test_idling_earns_no_credit() -> None:
    queue = queue_of(*(ticket(f"a{n}") for n in range(9)))
    for _ in range(5):
        pop(queue)
    for n in range(3):
        queue.push(ticket(f"b{n}", "b"))
    assert drain(queue) == ["b0", "a5", "b1", "a6", "b2", "a7", "a8"]


def test_a_newcomer_starts_level_with_those_of_its_priority_not_with_busier_ones() -> None:
    queue = queue_of(ticket("a0", priority=1), ticket("a1", priority=1))
    queue.push(ticket("urgent0", "b", num_tokens=1000))
    queue.push(ticket("urgent1", "b", num_tokens=1000))
    assert [str(popped.id) for _ in range(2) if (popped := pop(queue))] == ["urgent0", "urgent1"]
    queue.push(ticket("c0", "c", priority=1))
    queue.push(ticket("a2", priority=1))
    assert drain(queue) == ["a0", "c0", "a1", "a2"]


def test_who_lost_its_place_goes_first_and_is_taken_when_full() -> None:
    queue = queue_of(ticket("1", priority=-9), max_waiting=1)
    assert queue.is_full
    queue.push_returned(ticket("again", priority=9))
    queue.check_integrity()
    assert drain(queue) == ["again", "1"]


def test_those_who_are_next_are_named_in_the_order_in_which_they_would_be_taken() -> None:
    small = [ticket(f"b{n}", "b", num_tokens=10) for n in range(4)]
    queue = queue_of(ticket("a0", num_tokens=30), ticket("a1", num_tokens=30), *small)
    queue.push(ticket("urgent", "c", priority=-1))
    queue.push_returned(ticket("again"))
    ahead = [str(one.id) for one in queue.first(99)]
    assert ahead == ["again", "urgent", "a0", "b0", "b1", "b2", "a1", "b3"]
    assert [one.id for one in queue.first(3)] == ahead[:3]
    assert drain(queue) == ahead


def test_who_is_passed_over_stays_where_it_was_and_its_client_is_owed_the_more() -> None:
    queue = queue_of(*(ticket(f"{client}{n}", client) for n in range(3) for client in "ab"))
    for name in ("b0", "b1"):  # a0 waits for its place
        queue.take(RequestId(name), 0.0)
        queue.check_integrity()
    assert drain(queue) == ["a0", "a1", "a2", "b2"]


def test_the_overdue_are_named_and_can_be_removed() -> None:
    queue = queue_of(ticket("1", deadline=5.0), ticket("2", deadline=9.0))
    queue.push_returned(ticket("3", deadline=4.0))
    assert queue.overdue(5.0) == ["1", "3"]
    assert [queue.remove(RequestId(name)) for name in ("1", "3", "3")] == [True, True, False]
    queue.check_integrity()
    assert RequestId("1") not in queue
    assert drain(queue) == ["2"]


def test_the_estimate_follows_how_fast_the_queue_moves() -> None:
    queue = queue_of(*(ticket(str(n)) for n in range(60)))
    assert queue.retry_after_s(0.0) == 5, "nothing is known yet"
    for second in range(20):
        pop(queue, float(second))
    assert queue.retry_after_s(20.0) == 20  # half of 40, one a second
    assert queue.retry_after_s(10_000.0) == 60
    while pop(queue, 20.0):
        pass
    assert queue.retry_after_s(20.0) == 1


def test_the_estimate_leaves_out_when_nobody_waited() -> None:
    queue = queue_of()
    for hour in range(40):
        queue.push(ticket(f"at leisure {hour}"))
        pop(queue, 3600.0 * hour)
    for n in range(60):
        queue.push(ticket(str(n)))
    for tenth in range(20):
        pop(queue, 200_000.0 + tenth / 10)
    assert queue.retry_after_s(200_002.0) == 2  # half of 40, ten a second


# ── against what is promised ──────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Op:
    kind: str
    client: str
    priority: int
    num_tokens: int


def ops(priorities: list[int]) -> st.SearchStrategy[list[Op]]:
    return st.lists(
        st.builds(
            Op,
            kind=st.sampled_from(["push", "push", "push", "pop", "pop", "return", "remove"]),
            client=st.sampled_from("abc"),
            priority=st.sampled_from(priorities),
            num_tokens=st.integers(1, LARGEST),
        ),
        max_size=60,
    )


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(ops([-1, 0, 7]))
def test_it_holds_exactly_who_came_and_did_not_leave(schedule: list[Op]) -> None:
    queue, inside, returned = AdmissionQueue(10), dict[str, Ticket](), list[str]()
    for number, op in enumerate(schedule):
        one = ticket(str(number), op.client, op.priority, op.num_tokens)
        if op.kind == "push":
            queue.push(one)
            inside[one.id] = one
        elif op.kind == "return":
            queue.push_returned(one)
            inside[one.id] = one
            returned.append(one.id)
        elif op.kind == "remove" and inside:
            name = list(inside)[op.num_tokens % len(inside)]
            assert queue.remove(RequestId(name))
            del inside[name]
        elif op.kind == "pop":
            popped = pop(queue)
            assert (popped is None) == (not inside)
            if popped is not None:
                back = [name for name in returned if name in inside]
                assert not back or popped.id == back[0]
                others = [t for t in inside.values() if t.client == popped.client]
                first = min(others, key=lambda t: (t.priority, int(t.id)))
                assert back or popped.id == first.id, "within a client: priority, then arrival"
                assert back or popped.priority == min(t.priority for t in inside.values())
                del inside[popped.id]
        queue.check_integrity()
        assert len(queue) == len(inside)
        assert queue.is_full == (len(inside) >= 10)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(ops([0]))
def test_clients_that_wait_all_the_time_are_given_the_same(schedule: list[Op]) -> None:
    """Of any two, one is never ahead by more than the largest request."""
    queue, given_tokens = AdmissionQueue(1000), Counter[str]()
    for number, op in enumerate(schedule):
        for client in "abc":  # nobody's line is ever empty
            queue.push(ticket(f"{client}{number}", client, num_tokens=op.num_tokens))
        popped = pop(queue)
        assert popped is not None
        given_tokens[popped.client] += popped.num_tokens
        ahead = max(given_tokens.values()) - min(given_tokens[client] for client in "abc")
        assert ahead <= LARGEST


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(ops([0]))
def test_nobody_waits_for_more_than_a_round_of_the_others(schedule: list[Op]) -> None:
    """From the moment a request is first in its line, each other client gets its share at most."""
    queue = AdmissionQueue(1000)
    for number, op in enumerate(schedule):
        if op.kind == "pop":
            pop(queue)
        else:
            queue.push(ticket(str(number), op.client, num_tokens=op.num_tokens))
    queue.push(ticket("new", "newcomer"))
    passed = Counter[str]()
    while (popped := pop(queue)) is not None and popped.id != "new":
        passed[popped.client] += popped.num_tokens
        queue.push(ticket(f"more {passed}", popped.client, num_tokens=LARGEST))
        assert passed[popped.client] <= 2 * LARGEST
    assert popped is not None
