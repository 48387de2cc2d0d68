"""Placement: longest prefix, then least load; what the timeline is told."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.core.policy import InstanceView, Rank, place
from memserve.errors import UnavailableError
from memserve.types import InstanceId, Role


def view(
    instance: str, *, queued: int = 0, requests: int = 0, running: int = 0, cached: int = 0
) -> InstanceView:
    role = Role(instance.rstrip("0123456789"))
    return InstanceView(InstanceId(instance), role, queued, requests, running, cached)


def chosen(num_tokens: int, *views: InstanceView) -> tuple[str, str | None]:
    placement = place(num_tokens, views)
    return placement.first, placement.decode


def test_the_longest_prefix_wins_over_load() -> None:
    views = [view("P0", queued=9000, cached=64), view("P1", cached=48), view("D0")]
    assert chosen(100, *views) == ("P0", "D0")


def test_between_equal_prefixes_the_least_queued_tokens_win() -> None:
    views = [view("P0", queued=10, cached=16), view("P1", queued=9, cached=16), view("D0")]
    assert chosen(100, *views) == ("P1", "D0")


def test_then_the_fewest_requests_then_the_id() -> None:
    assert chosen(100, view("PD0", requests=1), view("PD1")) == ("PD1", None)
    assert chosen(100, view("PD1"), view("PD0")) == ("PD0", None)


def test_decode_goes_to_the_longest_prefix_then_to_the_least_loaded() -> None:
    views = [view("P0"), view("D0", cached=16, running=5000), view("D1")]
    assert chosen(100, *views) == ("P0", "D0")
    views = [view("P0"), view("D0", running=900, requests=1), view("D1", running=10, requests=5)]
    assert chosen(100, *views) == ("P0", "D1")


def test_whole_and_split_compete_by_the_prompt_s_side() -> None:
    views = [view("PD0", cached=16), view("P0", cached=32), view("D0")]
    assert chosen(100, *views) == ("P0", "D0")
    views = [view("PD0", cached=32), view("P0", cached=16), view("D0")]
    assert chosen(100, *views) == ("PD0", None)


def test_a_prefill_instance_without_a_decode_instance_is_no_place() -> None:
    assert chosen(100, view("P0", cached=96), view("PD0", queued=500)) == ("PD0", None)


@pytest.mark.parametrize("views", [[], [view("P0")], [view("D0")]])
def test_no_place_is_an_error(views: list[InstanceView]) -> None:
    with pytest.raises(UnavailableError, match="no instance is ready"):
        place(100, views)


def test_a_tree_that_claims_more_than_the_prompt_gives_no_advantage() -> None:
    views = [view("P0", queued=1, cached=4096), view("P1", cached=10), view("D0")]
    assert chosen(10, *views) == ("P1", "D0")


def test_the_reason_names_every_candidate_and_its_terms() -> None:
    placement = place(100, [view("P0", queued=7, cached=32), view("D0", running=5, requests=1)])
    assert placement.reason == {
        "ranking": "longest prefix, then least load",
        "tokens": 100,
        "P0": "32 tokens cached, 7 queued, 0 running in 0 requests",
        "D0": "0 tokens cached, 0 queued, 5 running in 1 requests",
    }


def test_another_ranking_decides_alone() -> None:
    class MostLoaded:
        name = "most loaded"

        def first(self, view: InstanceView, num_tokens: int) -> Rank:
            return (-view.queued_tokens, view.instance)

        def decode(self, view: InstanceView, num_tokens: int) -> Rank:
            return (-view.running_tokens, view.instance)

    views = [view("P0", cached=64), view("P1", queued=1), view("D0"), view("D1", running=1)]
    placement = place(100, views, MostLoaded())
    assert (placement.first, placement.decode) == ("P1", "D1")
    assert placement.reason["ranking"] == "most loaded"


loads = st.integers(0, 3)
instances = st.lists(
    st.sampled_from(["P0", "P1", "P2", "D0", "D1", "PD0", "PD1"]), unique=True, max_size=6
)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.data(), instances)
def test_the_choice_is_valid_and_does_not_depend_on_the_order(
    data: st.DataObject, names: list[str]
) -> None:
    views = [
        view(
            name,
            queued=data.draw(loads),
            requests=data.draw(loads),
            running=data.draw(loads),
            cached=data.draw(loads) * 16,
        )
        for name in names
    ]
    roles = {v.role for v in views}
    if Role.COLOCATED not in roles and not {Role.PREFILL, Role.DECODE} <= roles:
        with pytest.raises(UnavailableError):
            place(64, views)
        return
    placement = place(64, views)
    by_id = {v.instance: v for v in views}
    is_split = by_id[placement.first].role is Role.PREFILL
    assert (placement.decode is not None) == is_split
    if placement.decode is not None:
        assert by_id[placement.decode].role is Role.DECODE
    for order in itertools.islice(itertools.permutations(views), 6):
        assert place(64, order) == msgspec.structs.replace(
            placement, reason=place(64, order).reason
        )
