"""Following one instance's cache through gaps, contradictions, snapshots and audits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.changes import AnyChange, Evicted, Inserted
from memserve.core.cache_follower import CacheFollower, FollowerState
from memserve.core.following_tree import FollowingTree
from memserve.core.tokens import Path
from memserve.messages import CacheChanged, CacheSnapshot
from memserve.types import InstanceId, Medium, Namespace
from tests.core.index_model import BLOCK_SIZE, IndexModel

P0 = InstanceId("P0")
REFRESH_S = 1000.0
PLAIN = Namespace()


class Instance:
    """An index, and the channel from it to the follower: what is on its way, in order."""

    def __init__(self, max_blocks: int = 1000) -> None:
        self.tree = FollowingTree(BLOCK_SIZE, [P0], max_blocks)
        self.follower = CacheFollower(self.tree, P0, REFRESH_S, 0.0)
        self.index = IndexModel()
        self.sequence = 0
        self.way: list[CacheChanged | CacheSnapshot] = []
        self.num_asked = 0
        self.found: list[list[str]] = []
        self.now = 0.0

    def insert(self, *tokens: int) -> None:
        self.index.insert(PLAIN, list(tokens), Medium.HBM)

    def flush(self) -> None:
        if changes := self.index.take_changes():
            self.sequence += 1
            self.way.append(
                CacheChanged(instance=P0, epoch=1, sequence=self.sequence, changes=changes)
            )

    def answer(self, per_part: int = 2) -> None:
        """As a worker answers `SendSnapshot`, if it was asked."""
        while self.num_asked:
            self.num_asked -= 1
            self.flush()
            parts = self.index.snapshot(per_part)
            self.way += [
                CacheSnapshot(
                    instance=P0,
                    epoch=1,
                    sequence=self.sequence,
                    changes=part,
                    is_last=number == len(parts) - 1,
                )
                for number, part in enumerate(parts)
            ]

    def deliver(self, count: int = 1000) -> None:
        for event in self.way[:count]:
            if isinstance(event, CacheChanged):
                self.num_asked += self.follower.changed(event, self.now)
            else:
                self.num_asked += self.follower.snapshot(event, self.now)
            self.tree.check_integrity()
        del self.way[:count]

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.num_asked += self.follower.tick(self.now)

    def check(self) -> None:
        self.num_asked += self.follower.check(self.found.append, self.now)

    @property
    def is_true(self) -> bool:
        return self.tree.index_of(P0) == self.index.index()


def test_what_comes_in_order_is_followed() -> None:
    instance = Instance()
    for token in range(5):
        instance.insert(1, 1, token, token)
        instance.flush()
        instance.deliver()
        assert instance.is_true
    assert instance.num_asked == 0


def test_a_gap_asks_for_a_snapshot_and_what_was_known_stays_until_it_comes() -> None:
    instance = Instance()
    instance.insert(1, 1)
    instance.flush()
    instance.deliver()
    instance.insert(2, 2)
    instance.flush()
    instance.way.clear()
    instance.insert(3, 3, 4, 4)
    instance.flush()
    instance.deliver()
    assert instance.num_asked == 1
    assert instance.tree.match(Path([1, 1], BLOCK_SIZE)).cached(P0) == 2
    instance.insert(5, 5)
    instance.flush()
    instance.deliver()
    assert instance.num_asked == 1, "it was asked for already"
    instance.answer()
    instance.deliver()
    assert instance.is_true
    assert instance.follower.num_resyncs == 1
    instance.insert(6, 6)
    instance.flush()
    instance.deliver()
    assert instance.is_true


def test_the_first_thing_heard_may_be_late() -> None:
    instance = Instance()
    instance.insert(1, 1)
    instance.flush()
    instance.way.clear()
    instance.insert(2, 2)
    instance.flush()
    instance.deliver()
    instance.answer()
    instance.deliver()
    assert instance.is_true


def test_an_answer_that_does_not_come_is_asked_for_again() -> None:
    instance = Instance()
    instance.sequence = 7
    instance.insert(1, 1)
    instance.flush()
    instance.deliver()
    instance.num_asked = 0  # lost
    instance.tick(1.0)
    assert instance.num_asked == 0
    instance.tick(10.0)
    assert instance.num_asked == 1
    instance.answer()
    instance.deliver()
    assert instance.is_true


def test_a_contradiction_is_mended() -> None:
    instance = Instance()
    instance.insert(1, 1, 2, 2)
    instance.flush()
    instance.sequence += 1
    wrong: list[AnyChange] = [Evicted([(99, 1)])]
    instance.way.append(CacheChanged(instance=P0, epoch=1, sequence=2, changes=wrong))
    instance.deliver()
    assert instance.num_asked == 1
    assert instance.tree.index_of(P0) == {}, "what it said before is worth nothing"
    instance.answer()
    instance.deliver()
    assert instance.is_true


def test_anything_between_the_parts_of_a_snapshot_starts_again() -> None:
    instance = Instance()
    instance.insert(1, 1, 2, 2, 3, 3)
    instance.flush()
    instance.way.clear()
    instance.insert(4, 4)
    instance.flush()
    instance.deliver()
    instance.answer(per_part=1)
    instance.deliver(2)
    assert instance.follower.state is FollowerState.LOADING
    instance.way.insert(0, CacheChanged(instance=P0, epoch=1, sequence=3, changes=[]))
    instance.deliver()
    instance.answer()
    instance.deliver()
    assert instance.is_true


def test_it_is_refreshed_now_and_then() -> None:
    instance = Instance()
    instance.insert(1, 1)
    instance.flush()
    instance.way.clear()  # and nobody has noticed
    instance.tick(REFRESH_S / 2)
    assert instance.num_asked == 0
    instance.tick(REFRESH_S / 2)
    assert instance.num_asked == 1
    instance.answer()
    instance.deliver()
    assert instance.is_true
    assert instance.follower.num_resyncs == 0
    instance.tick(1.0)
    assert instance.num_asked == 0


def test_a_check_finds_nothing_where_nothing_is_wrong() -> None:
    instance = Instance()
    instance.insert(1, 1, 2, 2)
    instance.flush()
    instance.check()
    instance.insert(3, 3)  # under way when the answer is made
    instance.answer(per_part=1)
    instance.deliver()
    assert instance.found == [[]]
    assert instance.is_true
    assert instance.num_asked == 0


def test_a_check_names_what_is_wrong_and_it_is_mended() -> None:
    instance = Instance()
    instance.insert(1, 1, 2, 2)
    instance.flush()
    instance.deliver()
    instance.tree.apply(P0, [Evicted([(2, 1)]), Inserted(PLAIN, None, 9, b"x" * 8, Medium.HBM)], 0)
    instance.check()
    instance.answer()
    instance.deliver()
    assert instance.found == [
        [
            "the prompt tree lacks 1 blocks, first 2",
            "the prompt tree is wrong of 1 blocks, first 9",
        ]
    ]
    assert instance.num_asked == 1
    instance.answer()
    instance.deliver()
    assert instance.is_true


def test_a_check_that_was_broken_off_starts_from_nothing() -> None:
    instance = Instance()
    instance.insert(1, 1, 2, 2)
    instance.flush()
    instance.check()
    instance.answer(per_part=1)
    instance.deliver(2)  # the changes, and the first part
    instance.index.evict(PLAIN, [1, 1], split=False)
    instance.flush()
    instance.sequence += 1  # something is lost
    instance.way.clear()
    instance.insert(3, 3)
    instance.flush()
    for _ in range(2):
        instance.deliver()
        instance.answer()
    instance.deliver()
    assert instance.found == [[]]
    assert instance.is_true


def test_a_check_waits_for_a_snapshot_that_is_on_its_way() -> None:
    instance = Instance()
    instance.sequence = 7
    instance.insert(1, 1)
    instance.flush()
    instance.deliver()
    instance.check()
    instance.check()
    for _ in range(2):
        instance.answer()
        instance.deliver()
    assert instance.found == [[], []]


def test_a_tree_without_room_is_not_blamed_for_what_it_forgot() -> None:
    instance = Instance(max_blocks=2)
    instance.insert(1, 1, 2, 2, 3, 3)
    instance.flush()
    instance.check()
    instance.answer()
    instance.deliver()
    assert instance.found == [[]]


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 1), max_size=9)), max_size=50))
def test_whatever_gets_lost_it_is_true_again_after_one_answer(
    schedule: list[tuple[int, list[int]]],
) -> None:
    instance = Instance()
    for kind, tokens in schedule:
        match kind:
            case 0 | 1 | 2:
                instance.insert(*tokens)
            case 3:
                instance.index.evict(PLAIN, tokens[: len(tokens) // 2 * 2], split=False)
            case 4:
                instance.flush()
            case 5:
                instance.deliver(len(tokens))
            case 6 if instance.way:
                lost = instance.way.pop(len(tokens) % len(instance.way))
                instance.tick(11.0 if isinstance(lost, CacheSnapshot) else 0.0)
            case 7:
                instance.answer(per_part=len(tokens) + 1)
            case 8:
                instance.check()
            case 9:
                instance.tick(float(len(tokens)))
    instance.insert(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 0)
    for _ in range(4):  # a lost event is noticed with the next one; an answer may have been lost
        instance.index.insert(PLAIN, [0, instance.sequence % 50], Medium.HBM)
        instance.flush()
        instance.deliver()
        instance.tick(11.0)
        instance.answer()
        instance.deliver()
    assert instance.follower.state is FollowerState.FOLLOWING
    assert instance.is_true
    assert not [found for found in instance.found if found]
