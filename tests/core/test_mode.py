"""The mode grammar: what it takes, what it refuses and what it proposes instead."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.core.mode import MAX_INSTANCES, Group, Mode, nearest_mode, parse_mode
from memserve.errors import ConfigError
from memserve.types import Caching, Role

_counts = st.integers(1, 4)
_groups = st.one_of(
    st.builds(lambda n, m: Group(prefill=n, decode=m), _counts, _counts),
    st.builds(lambda n: Group(colocated=n), _counts),
)
_modes = st.builds(
    Mode, st.lists(_groups, min_size=1, max_size=6).map(tuple), has_caching=st.booleans()
)


@given(_modes)
def test_text_and_back(mode: Mode) -> None:
    assert parse_mode(str(mode)) == mode
    assert str(parse_mode(str(mode))) == str(mode)


@given(_modes)
def test_instances_are_those_of_the_groups(mode: Mode) -> None:
    instances = mode.instances()
    by_role = Counter(role for _, role in instances)
    assert len(instances) == len({name for name, _ in instances}) == mode.num_instances
    for role in Role:
        assert by_role[role] == mode.count(role)
        names = [name for name, of in instances if of is role]
        assert names == [f"{role.value}{number}" for number in range(len(names))]


@pytest.mark.parametrize(
    ("text", "names", "caching"),
    [
        ("2PD", "PD0 PD1", Caching.NONE),
        ("2PD-CC", "PD0 PD1", Caching.FULL),
        ("1P1D", "P0 D0", Caching.NONE),
        ("1P2D-CC", "P0 D0 D1", Caching.FULL),
        ("1P2D+1PD-CC", "P0 D0 D1 PD0", Caching.FULL),
        ("1P1D+1PD+2P1D", "P0 D0 PD0 P1 P2 D1", Caching.NONE),
        ("10PD", " ".join(f"PD{number}" for number in range(10)), Caching.NONE),
    ],
)
def test_modes(text: str, names: str, caching: Caching) -> None:
    mode = parse_mode(text)
    assert [name for name, _ in mode.instances()] == names.split()
    assert mode.default_caching is caching
    assert str(mode) == text


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("", "1P1D-CC"),
        ("nonsense", "1P1D-CC"),
        ("1p1d-cc", "1P1D-CC"),
        ("1P1D-cc", "1P1D-CC"),
        ("1P1D-", "1P1D"),
        ("1P1DCC", "1P1D-CC"),
        (" 1P1D", "1P1D"),
        ("1P1D\n", "1P1D"),
        ("PD", "1PD"),
        ("1P", "1P1D"),
        ("2D", "1P2D"),
        ("2D1P-CC", "1P2D-CC"),
        ("0P1D", "1P1D"),
        ("01P1D", "1P1D"),
        ("1P1D++1PD", "1P1D+1PD"),
        ("1PD+", "1PD"),
        ("1P1D-CC+1PD", "1P1D+1PD-CC"),
        ("1P1D1PD", "1P1D+1PD"),
        ("1P-1D", "1P1D"),
        ("64pd", "64PD"),
        ("65pd", "1P1D-CC"),
        ("99999P1D", "1P1D-CC"),
        ("9" * 5000 + "PD", "1P1D-CC"),
        ("\u0661P\u0661D", "1P1D"),
    ],
)
def test_refused_with_the_nearest_mode(text: str, near: str) -> None:
    with pytest.raises(ConfigError, match="did you mean") as caught:
        parse_mode(text)
    assert caught.value.key == "cluster.mode"
    assert repr(near) in caught.value.problem
    assert "<n>P<m>D" in str(caught.value.allowed)


def test_too_many_instances() -> None:
    assert parse_mode(f"{MAX_INSTANCES}PD").num_instances == MAX_INSTANCES
    with pytest.raises(ConfigError, match=f"asks for {MAX_INSTANCES + 1} instances.*at most"):
        parse_mode(f"{MAX_INSTANCES - 1}PD+1P1D")


@given(st.text(alphabet="0123456789PDpdCc+- ", max_size=20))
def test_what_is_proposed_is_always_valid(text: str) -> None:
    parse_mode(nearest_mode(text))
