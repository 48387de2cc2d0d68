"""Owners and leases: what can be dropped, by whom, and when."""

from __future__ import annotations

import pytest

from memserve.types import BlockId
from memserve.workers.owners import Owners
from tests.contract.link_rig import FakeClock


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def test_references_are_dropped_by_number() -> None:
    owners = Owners(FakeClock())
    owners.hold("a", ids(1, 2, 1, 3))
    owners.hold("b", ids(1))
    owners.remove("a", ids(1, 3))
    assert owners.held("a") == ids(2, 1)
    with pytest.raises(KeyError, match=r"a does not hold the blocks \[1\]"):
        owners.remove("a", ids(1, 1, 2))
    assert owners.held("a") == ids(2, 1)
    owners.remove("a", ids(1, 2))
    assert "a" not in owners
    assert dict(owners) == {"b": ids(1)}


def test_an_owner_without_blocks_is_none() -> None:
    owners = Owners(FakeClock())
    owners.hold("a", [])
    owners.remove("a", [])
    assert "a" not in owners
    assert owners.remove_all("a") == []
    owners.hand_over("a", to="b")
    assert dict(owners) == {}


def test_a_lease_is_due_when_its_time_is_over_and_not_before() -> None:
    clock = FakeClock()
    owners = Owners(clock)
    for owner, lease_s in (("a", 2.0), ("b", 5.0)):
        owners.hold(owner, ids(1))
        owners.lease(owner, lease_s)
    assert (owners.due(), owners.next_due()) == ([], clock.now_s + 2.0)
    clock.now_s += 2.0
    assert owners.due() == ["a"]
    owners.lease("a", 4.0)
    assert (owners.due(), owners.next_due()) == ([], clock.now_s + 3.0)
    clock.now_s += 4.0
    assert owners.due() == ["a", "b"]
    owners.end_lease("a")
    assert owners.remove_all("b") == ids(1)
    assert (owners.due(), owners.next_due()) == ([], None)
    assert owners.held("a") == ids(1)


def test_handing_over_ends_the_lease() -> None:
    clock = FakeClock()
    owners = Owners(clock)
    owners.hold("a", ids(1, 2))
    owners.lease("a", 1.0)
    owners.hand_over("a", to="b")
    clock.now_s += 1.0
    assert (owners.due(), dict(owners)) == ([], {"b": ids(1, 2)})


def test_nothing_leaves_quarantine_until_the_lease_is_ended() -> None:
    owners = Owners(FakeClock())
    owners.hold("a", ids(1, 2))
    with pytest.raises(KeyError, match="a has no lease"):
        owners.quarantine("a")
    owners.lease("a", 1.0)
    owners.quarantine("a")
    for drop in (
        lambda: owners.remove("a", ids(1)),
        lambda: owners.remove_all("a"),
        lambda: owners.hand_over("a", to="b"),
    ):
        with pytest.raises(ValueError, match="a is in quarantine"):
            drop()
    owners.lease("a", 3.0)
    assert owners.is_quarantined("a") and owners.held("a") == ids(1, 2)
    owners.end_lease("a")
    assert not owners.is_quarantined("a")
    assert owners.remove_all("a") == ids(1, 2)


def test_replacing_keeps_the_order() -> None:
    owners = Owners(FakeClock())
    owners.hold("a", ids(4, 5, 6, 5))
    owners.replace("a", {BlockId(5): BlockId(9)})
    owners.replace("b", {})
    assert dict(owners) == {"a": ids(4, 9, 6, 5)}
