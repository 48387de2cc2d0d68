"""What the scheduler knows of the caches, in both ways of coming to know it."""

from __future__ import annotations

from typing import Literal

from memserve.caches import Caches
from memserve.changes import Inserted
from memserve.core.tokens import Path, pack
from memserve.core.vocabulary import Seat
from memserve.messages import AnyCommand, CacheChanged, CacheSnapshot, SendSnapshot
from memserve.types import InstanceId, Medium, Namespace

P0 = InstanceId("P0")
BLOCK_SIZE = 2
PATH = Path([1, 1, 2, 2], BLOCK_SIZE)


class Rig:
    """`Caches` with a clock, and what it has sent."""

    def __init__(self, freshness: Literal["events", "ttl"]) -> None:
        self.now = 0.0
        self.sent: list[tuple[Seat, AnyCommand]] = []
        self.caches = Caches(
            freshness,
            BLOCK_SIZE,
            [P0],
            max_blocks=100,
            ttl_s=60.0,
            send=lambda seat, command: self.sent.append((seat, command)),
            clock=lambda: self.now,
        )

    def cached(self) -> int:
        return self.caches.match(PATH).cached(P0)

    def tell(self, epoch: int, sequence: int, tokens: list[int]) -> None:
        change = Inserted(Namespace(), None, sequence, pack(tokens), Medium.HBM)
        event = CacheChanged(instance=P0, epoch=epoch, sequence=sequence, changes=[change])
        self.caches.on_event(Seat(P0, epoch), event)

    def answer(self, epoch: int, sequence: int, *tokens: list[int]) -> None:
        changes = [
            Inserted(Namespace(), None, 1 + 9 * number, pack(prompt), Medium.HBM)
            for number, prompt in enumerate(tokens)
        ]
        event = CacheSnapshot(
            instance=P0, epoch=epoch, sequence=sequence, changes=changes, is_last=True
        )
        self.caches.on_event(Seat(P0, epoch), event)


def test_events_are_believed_and_ends_of_requests_are_not() -> None:
    rig = Rig("events")
    rig.caches.learn(PATH, 4, P0)
    assert rig.cached() == 0
    assert not rig.caches.is_guessing
    rig.tell(1, 1, [1, 1, 2, 2])
    assert rig.cached() == 4
    rig.caches.lost(P0)
    assert rig.cached() == 0


def test_a_guess_is_believed_for_a_while_and_events_are_not_asked_for() -> None:
    rig = Rig("ttl")
    rig.tell(1, 5, [1, 1, 2, 2])
    assert (rig.cached(), rig.sent) == (0, [])
    rig.caches.learn(PATH, 3, P0)
    assert rig.cached() == 2, "full blocks only"
    rig.now = 60.0
    rig.caches.tick()
    assert rig.cached() == 0


def test_a_new_life_begins_with_nothing_and_an_old_one_is_not_heard_any_more() -> None:
    rig = Rig("events")
    rig.tell(1, 1, [1, 1])
    rig.tell(2, 1, [1, 1, 2, 2])
    assert rig.cached() == 4
    rig.tell(1, 2, [3, 3])
    assert (rig.cached(), rig.sent) == (4, [])


def test_a_gap_and_an_overdue_answer_ask_the_instance() -> None:
    rig = Rig("events")
    rig.tell(3, 2, [1, 1])
    assert rig.sent == [(Seat(P0, 3), SendSnapshot(epoch=3))]
    rig.now = 11.0
    rig.caches.tick()
    assert len(rig.sent) == 2
    rig.answer(3, 2, [1, 1, 2, 2])
    assert rig.cached() == 4


async def test_a_check_tells_each_of_those_who_asked() -> None:
    rig = Rig("events")
    rig.tell(1, 1, [1, 1])
    seat = Seat(P0, 1)
    checks = [rig.caches.check([seat])[P0] for _ in range(2)]
    assert rig.sent == [(seat, SendSnapshot(epoch=1))]
    rig.answer(1, 1, [1, 1], [5, 5])
    assert [check.result() for check in checks] == [
        ["the prompt tree lacks 1 blocks, first 10"],
        ["the prompt tree lacks 1 blocks, first 10"],
    ]


async def test_a_check_ends_with_its_instance_and_a_guess_is_not_checked() -> None:
    rig = Rig("events")
    check = rig.caches.check([Seat(P0, 1)])[P0]
    rig.caches.lost(P0)
    assert check.cancelled()
    assert Rig("ttl").caches.check([Seat(P0, 1)]) == {}
