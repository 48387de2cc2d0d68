"""The local index by example. Blocks are letters, and a letter's tokens are its code, twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memserve.changes import AnyChange, Cleared, Evicted, Inserted, Swapped
from memserve.core.radix import ABSENT, RadixIndex
from memserve.core.tokens import Path, pack
from memserve.types import BlockId, Medium, Namespace, SlotId

BLOCK_SIZE = 2
HBM, DRAM = Medium.HBM, Medium.DRAM
TENANT = Namespace(cache_salt="tenant")


class Clock:
    """Seconds, set by the test."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tokens(letters: str) -> list[int]:
    return [ord(letter) for letter in letters for _ in range(BLOCK_SIZE)]


def path(letters: str, namespace: Namespace = Namespace()) -> Path:  # noqa: B008
    return Path(tokens(letters), BLOCK_SIZE, namespace)


def index_of(
    *prompts: tuple[str, Sequence[int]], clock: Clock | None = None, published: bool = False
) -> RadixIndex:
    """An index with these prompts in HBM, inserted a second after each other."""
    clock = clock or Clock()
    index = RadixIndex(BLOCK_SIZE, clock, lambda _: published)
    for letters, block_ids in prompts:
        clock.now_s += 1
        index.insert(path(letters), block_ids)
    index.take_changes()
    return index


def inserted(
    letters: str,
    first_key: int,
    parent: int | None = None,
    medium: Medium = HBM,
    namespace: Namespace = Namespace(),  # noqa: B008
) -> AnyChange:
    return Inserted(namespace, parent, first_key, pack(tokens(letters)), medium)


# ── prompts ───────────────────────────────────────────────────────────────────────────────────


def test_the_longest_known_prefix_is_found() -> None:
    index = index_of(("ABC", [7, 8, 9]))
    assert index.match(path("ABXY")).hbm_prefix() == [7, 8]
    assert index.match(path("ABCD")).hbm_prefix() == [7, 8, 9]
    assert index.match(path("AB")).hbm_prefix() == [7, 8]
    nothing = index.match(path("BC"))
    assert (nothing.num_blocks, nothing.hbm_prefix(), nothing.end) == (0, [], None)


def test_a_partial_block_is_no_block() -> None:
    index = index_of(("AB", [7, 8]))
    assert index.match(Path(tokens("AB")[:-1], BLOCK_SIZE)).hbm_prefix() == [7]
    assert index.match(Path(tokens("A")[:1], BLOCK_SIZE)).num_blocks == 0


def test_a_node_is_split_where_prompts_part() -> None:
    index = index_of(("ABCD", [1, 2, 3, 4]))
    assert index.num_nodes == 1
    done = index.insert(path("ABXY"), [1, 2, 5, 6])
    assert done.duplicates == []
    assert (index.num_nodes, index.num_blocks) == (3, 6)
    assert index.match(path("ABCD")).hbm_prefix() == [1, 2, 3, 4]
    assert index.match(path("ABXY")).hbm_prefix() == [1, 2, 5, 6]
    index.check_integrity()


def test_blocks_can_begin_alike() -> None:
    index = RadixIndex(2, Clock())
    index.insert(Path([1, 2, 3, 4], 2), [0, 1])
    index.insert(Path([1, 2, 3, 5], 2), [0, 2])
    index.insert(Path([1, 9], 2), [3])
    assert index.match(Path([1, 2, 3, 5], 2)).hbm_prefix() == [0, 2]
    assert index.match(Path([1, 9, 3, 4], 2)).hbm_prefix() == [3]
    index.check_integrity()


def test_namespaces_share_nothing() -> None:
    index = index_of(("AB", [1, 2]))
    index.insert(path("AB", TENANT), [3, 4])
    assert index.match(path("AB", TENANT)).hbm_prefix() == [3, 4]
    assert index.match(path("AB")).hbm_prefix() == [1, 2]
    assert index.match(path("AB", Namespace(lora_name="tenant"))).num_blocks == 0
    index.delete(path("AB", TENANT))
    assert index.match(path("AB")).hbm_prefix() == [1, 2]
    index.check_integrity()


def test_a_block_keeps_its_place_and_the_caller_is_told() -> None:
    index = index_of(("ABC", [1, 2, 3]))
    done = index.insert(path("ABXY"), [1, 9, 5, 6])
    assert done.duplicates == [(1, 2)]
    assert index.match(path("ABXY")).hbm_prefix() == [1, 2, 5, 6]
    assert not index.contains(9, HBM)


def test_a_prompt_that_grows_stays_one_node() -> None:
    index = index_of(("A", [0]))
    end = index.match(path("A")).end
    for block_id, letter in enumerate("BCDEFGH", 1):
        assert end is not None
        end = index.append(end, pack(tokens(letter)), [block_id]).end
    assert index.num_nodes == 1
    assert index.match(path("ABCDEFGH")).hbm_prefix() == [*range(8)]
    index.check_integrity()


def test_what_grows_from_the_middle_is_a_branch() -> None:
    index = index_of(("AB", [0, 1]))
    middle = index.match(path("A")).end
    assert middle is not None
    index.insert(path("ABC"), [0, 1, 2])
    index.append(middle, pack(tokens("BX")), [1, 3])
    assert index.match(path("ABX")).hbm_prefix() == [0, 1, 3]
    assert index.match(path("ABC")).hbm_prefix() == [0, 1, 2]
    index.check_integrity()


def test_a_cursor_outlives_a_split_and_what_was_below() -> None:
    index = index_of(("ABCD", [0, 1, 2, 3]))
    end = index.match(path("AB")).end
    assert end is not None
    index.insert(path("ABX"), [0, 1, 4])
    index.delete(path("ABCD"), first=2)
    index.append(end, pack(tokens("Y")), [5])
    assert index.match(path("ABY")).hbm_prefix() == [0, 1, 5]


def test_a_cursor_is_stale_once_its_block_has_left_even_if_another_takes_its_place() -> None:
    index = index_of(("ABC", [0, 1, 2]))
    end = index.match(path("ABC")).end
    assert end is not None
    index.drop([2], HBM)
    index.insert(path("ABX"), [0, 1, 2])
    with pytest.raises(LookupError, match="block 2"):
        index.append(end, pack(tokens("D")), [3])


# ── what is refused ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("letters", "places", "first", "error", "says"),
    [
        ("ABCD", [5], 3, LookupError, "block 2 of the path is unknown"),
        ("XY", [1, 5], 0, ValueError, "hbm 1 holds another block"),
        ("BA", [1, 2], 0, ValueError, "hbm 1 holds another block"),
        ("AXB", [1, 2, 5], 0, ValueError, "hbm 2 holds another block"),
        ("XY", [5, 5], 0, ValueError, "named twice"),
        ("XY", [5, -1], 0, ValueError, "no place -1"),
        ("XY", [5, 6, 7], 0, ValueError, "3 places for blocks 0… of 2"),
    ],
)
def test_a_wrong_insert_changes_nothing(
    letters: str, places: list[int], first: int, error: type[Exception], says: str
) -> None:
    index = index_of(("AB", [1, 2]))
    with pytest.raises(error, match=says):
        index.insert(path(letters), places, first)
    assert index.num_blocks == 2
    assert not any(index.contains(place, HBM) for place in (5, 6, 7))
    index.check_integrity()


def test_other_calls_refuse_unknown_blocks() -> None:
    index = index_of(("AB", [1, 2]))
    with pytest.raises(LookupError, match="3 blocks to refer to, 2 of the path"):
        index.acquire(path("ABC"))
    with pytest.raises(ValueError, match="blocks of 4, not 2"):
        index.match(Path([1, 2, 3, 4], 4))
    end = index.match(path("AB")).end
    assert end is not None
    with pytest.raises(ValueError, match="bytes of tokens for 2 blocks"):
        index.append(end, pack(tokens("C")), [3, 4])


# ── two media ─────────────────────────────────────────────────────────────────────────────────


def test_a_block_that_is_in_dram_stays_when_it_leaves_hbm() -> None:
    index = index_of(("ABC", [1, 2, 3]))
    assert index.copied(HBM, [2, 3], DRAM, [12, 13]) == []
    assert (index.slot_of(BlockId(2)), index.block_of(SlotId(12))) == (12, 2)
    assert index.slot_of(BlockId(1)) is None
    assert index.drop([2], HBM).hbm == []
    found = index.match(path("ABC"))
    assert found.hbm.tolist() == [1, ABSENT, 3]
    assert found.dram.tolist() == [ABSENT, 12, 13]
    assert (found.num_hbm_prefix, found.hbm_prefix()) == (1, [1])
    assert index.block_of(SlotId(12)) is None
    index.check_integrity()


def test_a_block_that_lies_nowhere_takes_along_what_is_below() -> None:
    index = index_of(("ABC", [1, 2, 3]), ("ABX", [1, 2, 4]), ("AZ", [1, 5]))
    index.copied(HBM, [3, 4], DRAM, [13, 14])
    freed = index.drop([2], HBM)
    assert sorted(freed.hbm) == [3, 4]
    assert sorted(freed.dram) == [13, 14]
    assert index.match(path("ABC")).hbm_prefix() == [1]
    assert index.match(path("AZ")).hbm_prefix() == [1, 5]
    assert (index.num_blocks, index.num_in(HBM), index.num_in(DRAM)) == (2, 2, 0)
    index.check_integrity()


def test_the_places_named_are_not_returned() -> None:
    index = index_of(("ABC", [1, 2, 3]))
    assert index.drop([1, 3, 77], HBM).hbm == [2]
    assert index.num_blocks == 0


def test_two_branches_can_be_dropped_at_once_also_one_below_the_other() -> None:
    index = index_of(("ABC", [1, 2, 3]), ("ABX", [1, 2, 4]))
    assert sorted(index.drop([1, 4], HBM).hbm) == [2, 3]
    assert index.num_blocks == 0
    index.check_integrity()


def test_copies_are_refused_for_what_has_left_or_is_there_already() -> None:
    index = index_of(("ABC", [1, 2, 3]))
    index.copied(HBM, [1], DRAM, [11])
    index.drop([3], HBM)
    assert index.copied(HBM, [1, 2, 3], DRAM, [14, 12, 13]) == [14, 13]
    assert index.slot_of(BlockId(1)) == 11


def test_swapped_in_blocks_are_inserted_where_they_are_missing() -> None:
    index = index_of(("ABC", [1, 2, 3]))
    index.copied(HBM, [2, 3], DRAM, [12, 13])
    index.drop([2, 3], HBM)
    assert index.insert(path("ABC"), [7, 8], first=1).duplicates == []
    assert index.match(path("ABC")).hbm_prefix() == [1, 7, 8]
    assert index.match(path("ABC")).dram.tolist() == [ABSENT, 12, 13]


# ── eviction ──────────────────────────────────────────────────────────────────────────────────


def test_what_was_used_longest_ago_goes_first_and_ends_before_beginnings() -> None:
    clock = Clock()
    index = index_of(("ABC", [1, 2, 3]), ("ABX", [1, 2, 4]), ("ZY", [8, 9]), clock=clock)
    assert index.oldest(3, HBM) == [3, 4, 2]
    assert index.oldest(99, HBM) == [3, 4, 2, 1, 9, 8]
    clock.now_s += 1
    index.touch(path("ABC"))
    assert index.oldest(99, HBM) == [4, 9, 8, 3, 2, 1]
    assert index.evict(2, HBM).hbm == [4, 9]
    assert index.oldest(99, HBM) == [8, 3, 2, 1]
    index.check_integrity()


def test_a_beginning_that_was_used_since_is_kept_for_longer_than_its_ends() -> None:
    clock = Clock()
    index = index_of(("AB", [1, 2]), ("AC", [1, 3]), ("Z", [9]), clock=clock)
    clock.now_s += 1
    index.touch(path("A"))
    assert index.oldest(99, HBM) == [2, 3, 9, 1]


def test_only_what_is_idle_for_long_enough_expires() -> None:
    clock = Clock()
    index = index_of(("AB", [1, 2]), ("AC", [1, 3]), ("Z", [9]), clock=clock)  # at 1, 2 and 3 s
    clock.now_s = 10.0
    assert index.oldest(99, HBM, idle_s=9.0) == [2]
    assert index.evict(99, HBM, idle_s=8.0).hbm == [2, 3, 1]
    assert index.match(path("Z")).hbm_prefix() == [9]


def test_a_match_is_no_use() -> None:
    index = index_of(("A", [1]), ("B", [2]))
    index.match(path("A"))
    assert index.oldest(1, HBM) == [1]


def test_referenced_blocks_and_all_above_them_are_kept() -> None:
    index = index_of(("ABCD", [1, 2, 3, 4]))
    first = index.acquire(path("ABC"))
    second = index.acquire(path("ABC"))
    index.copied(HBM, [1, 2, 3, 4], DRAM, [11, 12, 13, 14])
    assert index.oldest(99, HBM) == [4]
    assert index.oldest(99, DRAM) == [14]
    index.insert(path("AX"), [1, 5])  # splits above the end of the references
    assert index.oldest(99, HBM) == [4, 5]
    index.release(first)
    assert index.oldest(99, HBM) == [4, 5]
    index.release(second)
    assert index.oldest(99, HBM) == [4, 3, 2, 5, 1]
    with pytest.raises(KeyError):
        index.release(second)
    index.check_integrity()


def test_a_reference_ends_with_its_block() -> None:
    index = index_of(("ABC", [1, 2, 3]))
    reference = index.acquire(path("ABC"))
    index.drop([2], HBM)
    index.insert(path("ABC"), [1, 2, 3])
    assert index.oldest(99, HBM) == [3, 2, 1]
    index.release(reference)  # has no effect, and is no mistake
    index.check_integrity()


def test_a_medium_has_ends_of_its_own() -> None:
    """D is in HBM only; in DRAM the prompt ends with B."""
    index = index_of(("ABCD", [1, 2, 3, 4]))
    index.copied(HBM, [1, 2], DRAM, [11, 12])
    assert index.oldest(99, DRAM) == [12, 11]
    freed = index.evict(1, DRAM)
    assert (freed.hbm, freed.dram) == ([], [12])
    assert index.num_blocks == 4


def test_evicting_the_only_place_takes_along_what_is_below_in_the_other_medium() -> None:
    index = index_of(("ABC", [1, 2, 3]))
    index.copied(HBM, [1], DRAM, [11])
    index.drop([1], HBM)
    freed = index.evict(1, DRAM)
    assert (sorted(freed.hbm), freed.dram) == ([2, 3], [11])
    assert index.num_blocks == 0
    index.check_integrity()


def test_the_queue_forgets_nodes_that_are_gone() -> None:
    index = RadixIndex(1, Clock())
    for token in range(1000):
        index.insert(Path([token], 1), [token % 7])
        index.drop([token % 7], HBM)
    index.check_integrity()  # bounds it


# ── what is told ──────────────────────────────────────────────────────────────────────────────


def test_an_insert_is_told_with_its_parent() -> None:
    index = index_of(("ABC", [1, 2, 3]), published=True)
    index.insert(path("ABX"), [1, 2, 4])
    index.insert(path("Z"), [12], medium=DRAM)
    assert index.take_changes() == [inserted("X", 4, parent=2), inserted("Z", 5, medium=DRAM)]
    assert index.take_changes() == []


def test_neighbours_are_told_as_one_range() -> None:
    index = index_of(("ABCDEF", [1, 2, 3, 4, 5, 6]), published=True)
    for block_id in (6, 5, 4):
        index.drop([block_id], HBM)
    assert index.take_changes() == [Evicted([(4, 3)])]


def test_ranges_of_one_node_need_not_be_neighbours() -> None:
    index = index_of(("AB", [1, 2]), ("Z", [9]), ("ABCD", [1, 2, 3, 4]), published=True)
    assert index.num_nodes == 2
    index.delete(path("AB"))
    assert index.take_changes() == [Evicted([(1, 2), (4, 2)])]


def test_only_the_fastest_medium_is_told() -> None:
    index = index_of(("ABC", [1, 2, 3]), published=True)
    index.copied(HBM, [1, 2], DRAM, [11, 12])
    assert index.take_changes() == []
    index.drop([1, 2], HBM)
    assert index.take_changes() == [Swapped([(1, 2)], DRAM)]
    index.insert(path("A"), [7])
    index.copied(DRAM, [12], HBM, [8])
    assert index.take_changes() == [Swapped([(1, 2)], HBM)]
    index.drop([11, 12], DRAM)
    assert index.take_changes() == []


def test_clearing_makes_earlier_changes_moot() -> None:
    index = index_of(("AB", [1, 2]), published=True)
    index.insert(path("Z"), [3])
    freed = index.clear()
    assert sorted(freed.hbm) == [1, 2, 3]
    assert index.take_changes() == [Cleared()]
    index.insert(path("A"), [1])
    assert index.take_changes() == [inserted("A", 4)]
    index.check_integrity()


def test_private_namespaces_are_not_told() -> None:
    index = RadixIndex(BLOCK_SIZE, Clock(), lambda namespace: namespace != TENANT)
    index.insert(path("AB", TENANT), [1, 2])
    index.copied(HBM, [1, 2], DRAM, [1, 2])
    index.drop([1, 2], HBM)
    index.delete(path("AB", TENANT))
    assert index.take_changes() == []
    index.insert(path("A"), [1])
    assert index.take_changes() == [inserted("A", 3)]


def test_a_snapshot_has_parents_first_and_a_part_for_each_medium_and_run_of_keys() -> None:
    index = index_of(("AB", [1, 2]), ("Z", [9]), ("ABCD", [1, 2, 3, 4]), published=True)
    index.insert(path("ABX"), [1, 2, 5])
    index.copied(HBM, [4], DRAM, [14])
    index.drop([4], HBM)
    index.insert(path("Q", TENANT), [6])
    parts = list(index.snapshot())
    first_keys = {part.first_key: place for place, part in enumerate(parts)}
    assert first_keys[1] < first_keys[4] < first_keys[5] and first_keys[1] < first_keys[6]
    assert sorted(parts, key=lambda part: part.first_key) == [
        inserted("AB", 1),
        inserted("Z", 3),
        inserted("C", 4, parent=2),
        inserted("D", 5, parent=4, medium=DRAM),
        inserted("X", 6, parent=2),
        inserted("Q", 7, namespace=TENANT),
    ]


# ── nothing ───────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_a_valid_argument() -> None:
    index = index_of(("A", [1]))
    assert index.insert(path("ABC"), []).end is None
    assert index.drop([], HBM).hbm == index.evict(0, HBM).hbm == []
    assert index.copied(HBM, [], DRAM, []) == index.oldest(0, HBM) == []
    assert index.delete(path("")).hbm == index.delete(path("AB"), first=1).hbm == []
    index.touch(path("Q"))
    end = index.match(path("A")).end
    assert end is not None
    assert index.append(end, b"", []).end is end
    assert index.num_blocks == 1
