"""Simulated loads: tokens of pieces, arrivals, data sets, synthetic sessions."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memserve.errors import ConfigError
from memserve.simulator import datasets
from memserve.simulator.synthetic import Shape, sessions
from memserve.simulator.workload import (
    Call,
    Piece,
    key_of,
    literal,
    poisson,
    prompt_ids,
    replay,
    tokens_of,
)

# ── tokens ────────────────────────────────────────────────────────────────────────────────────


@given(st.text(), st.text(), st.integers(1, 300))
def test_pieces_of_one_name_have_one_text_and_others_another(
    one: str, other: str, length: int
) -> None:
    first = tokens_of(Piece(key_of(one), length))
    assert len(first) == length
    assert tokens_of(Piece(key_of(one), length + 7))[:length] == first
    if one != other and length >= 16:
        assert tokens_of(Piece(key_of(other), length))[:16] != first[:16]


def test_token_ids_are_shared_objects() -> None:
    """A prompt costs a pointer a token, however long it is."""
    piece = Piece(key_of("a"), 500)
    assert all(a is b for a, b in zip(tokens_of(piece), tokens_of(piece), strict=True))


def test_names_with_different_parts_do_not_run_into_each_other() -> None:
    assert key_of("a", "bc") != key_of("ab", "c")


def test_a_prompt_is_its_pieces_in_order() -> None:
    call = Call("s", (literal([5, 6]), Piece(key_of("x"), 3)), Piece(key_of("r"), 4))
    assert prompt_ids(call) == [5, 6, *tokens_of(Piece(key_of("x"), 3))]
    assert (call.prompt_tokens, call.total_tokens) == (5, 9)


# ── arrivals ──────────────────────────────────────────────────────────────────────────────────


def talks(num_sessions: int, turns: int) -> list[Call]:
    return [
        Call(f"s{s}", (Piece(key_of(s, t), 10),), Piece(key_of(s, t, "r"), 5))
        for s in range(num_sessions)
        for t in range(turns)
    ]


def trace(*times: float) -> list[Call]:
    return [
        Call(f"c{n}", (Piece(key_of(n), 10),), Piece(key_of(n, "r"), 5), at)
        for n, at in enumerate(times)
    ]


def arrivals(calls: list[Call]) -> list[float]:
    return [call.arrival_s for call in calls if call.arrival_s is not None]


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 60), st.integers(0, 5))
def test_poisson_sends_every_session_in_order(
    num_sessions: int, turns: int, requests: int, seed: int
) -> None:
    calls = talks(num_sessions, turns)
    sent = poisson(calls, rate=3.0, requests=requests, think_s=None, seed=seed)
    assert len(sent) == min(requests, len(calls))
    assert arrivals(sent) == sorted(arrivals(sent))
    for session in {call.session for call in sent}:
        keys = [call.reply.key for call in sent if call.session == session]
        expected = [call.reply.key for call in calls if call.session == session]
        assert keys == expected[: len(keys)]


def test_poisson_keeps_its_rate_and_its_seed() -> None:
    calls = talks(500, 4)
    sent = poisson(calls, rate=5.0, requests=2000, think_s=None, seed=1)
    assert 2000 / arrivals(sent)[-1] == pytest.approx(5.0, rel=0.1)
    assert sent == poisson(calls, rate=5.0, requests=2000, think_s=None, seed=1)
    assert sent != poisson(calls, rate=5.0, requests=2000, think_s=None, seed=2)


def test_think_time_bounds_how_many_sessions_are_open() -> None:
    sent = poisson(talks(300, 6), rate=2.0, requests=1000, think_s=5.0, seed=3)
    left = Counter(call.session for call in sent)
    opened: set[str] = set()
    for call in sent:
        opened.add(call.session)
        left[call.session] -= 1
        assert sum(1 for session in opened if left[session]) <= 10


def test_replay_keeps_times_or_scales_them() -> None:
    assert arrivals(replay(trace(5.0, 7.0, 11.0), None)) == [0.0, 2.0, 6.0]
    scaled = arrivals(replay(trace(*range(101)), 4.0))
    assert scaled[-1] == pytest.approx(25.0, rel=0.02)


def test_copies_of_a_trace_share_nothing() -> None:
    calls = replay(trace(*range(50)), None, copies=3, seed=1)
    assert len(calls) == 150
    assert arrivals(calls) == sorted(arrivals(calls))
    assert max(arrivals(calls)) <= 51
    assert len({call.session for call in calls}) == 150
    assert len({call.prompt[0] for call in calls}) == 150


# ── synthetic ─────────────────────────────────────────────────────────────────────────────────


def test_each_prompt_begins_with_the_one_before_and_its_reply() -> None:
    calls = list(sessions(Shape(documents=2, turns=3), 4, seed=1))
    assert len(calls) == 12
    for before, after in itertools.pairwise(calls):
        if before.session == after.session:
            start = prompt_ids(before) + tokens_of(before.reply)
            assert prompt_ids(after)[: len(start)] == start


def test_a_hot_document_gets_its_share() -> None:
    calls = list(sessions(Shape(documents=10, hot=0.5, turns=1), 2000, seed=1))
    counts = Counter(call.prompt[1] for call in calls)
    assert counts.most_common(1)[0][1] == pytest.approx(1100, rel=0.1)


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (Shape(turns=0), "turns"),
        (Shape(reply_tokens=0), "reply_tokens"),
        (Shape(documents=1, hot=1.5), "hot"),
        (Shape(hot=0.5), "hot"),
    ],
)
def test_shapes_that_mean_nothing_are_refused(shape: Shape, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        shape.check()


# ── data sets ─────────────────────────────────────────────────────────────────────────────────


def written(path: Path, *rows: object) -> Path:
    text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_mooncake_shares_blocks_by_hash(tmp_path: Path) -> None:
    path = written(
        tmp_path / "trace.jsonl.gz",
        {"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]},
        {"timestamp": 3500, "input_length": 1024, "output_length": 9, "hash_ids": [4, 9]},
    )
    one, other = datasets.read(path)
    assert (one.arrival_s, other.arrival_s) == (1.0, 3.5)
    assert (one.prompt_tokens, other.prompt_tokens) == (1100, 1024)
    assert prompt_ids(one)[:512] == prompt_ids(other)[:512]
    assert prompt_ids(one)[512:528] != prompt_ids(other)[512:528]


def test_azure(tmp_path: Path) -> None:
    path = written(
        tmp_path / "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    one, other = datasets.read(path)
    assert other.arrival_s == pytest.approx(4.314579)
    assert (one.prompt_tokens, one.reply.length) == (374, 44)
    assert prompt_ids(one)[:16] != prompt_ids(other)[:16]


def test_sharegpt_lengths_make_a_conversation(tmp_path: Path) -> None:
    path = written(tmp_path / "lengths.jsonl", {"s": 3, "t": [[28, 60], [11, 5]]})
    one, other = datasets.read(path)
    assert (one.prompt_tokens, one.reply.length) == (20 + 28 + 8, 60)
    assert other.prompt[: len(one.prompt) + 1] == (*one.prompt, one.reply)


def test_sharegpt_text(tmp_path: Path) -> None:
    says = [{"from": "human", "value": "Hello, you there!"}, {"from": "gpt", "value": "Yes?"}]
    path = written(tmp_path / "chat.jsonl", {"id": "a", "conversations": [*says, *says]})
    one, other = datasets.read(path)
    assert one.prompt_tokens == 20 + 6
    assert one.reply.length == 2
    assert other.prompt[:3] == (*one.prompt, one.reply)


def test_loogle_questions_share_their_document(tmp_path: Path) -> None:
    questions = [{"q": "Why so?", "a": "No idea."}, {"q": "When?", "a": "Then."}]
    path = written(
        tmp_path / "loogle.jsonl",
        {"doc_id": "d", "document": "word " * 200, "questions": questions},
    )
    one, other = datasets.read(path)
    assert prompt_ids(one)[:200] == prompt_ids(other)[:200]
    assert one.session != other.session


def test_react_steps_begin_with_what_was_observed(tmp_path: Path) -> None:
    step = {"thought": "think", "action": "Search[x]", "observation": "seen"}
    path = written(
        tmp_path / "react.jsonl",
        {"type": "prefix", "prefix_id": "p", "tokens": 3, "text": "solve it"},
        {"type": "t", "prefix_id": "p", "id": "q1", "question": "Who?", "steps": [step, step]},
        {"type": "t", "prefix_id": "p", "id": "q2", "question": "When?", "steps": [step]},
    )
    one, two, other = datasets.read(path)
    assert two.prompt[:3] == (*one.prompt, one.reply)
    assert one.prompt[0] == other.prompt[0]


def test_own_format(tmp_path: Path) -> None:
    path = written(
        tmp_path / "own.jsonl",
        {"session": 1, "prompt": [["doc", 100], ["q", 5]], "output_tokens": 3, "arrival_s": 0},
        {
            "session": 1,
            "prompt": [["q2", 7]],
            "output_tokens": 3,
            "arrival_s": 1,
            "continues": True,
        },
        {"session": 2, "prompt": [["doc", 100]], "output_tokens": 2, "arrival_s": 2},
        {"session": 3, "prompt": [1, 2, 3], "output_tokens": 2, "arrival_s": 2.5},
    )
    one, two, three, four = datasets.read(path)
    assert two.prompt[:3] == (*one.prompt, one.reply)
    assert three.prompt[0] == one.prompt[0]
    assert prompt_ids(four) == [1, 2, 3]


GOOD = {"session": 1, "prompt": [1], "output_tokens": 1}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "no call"),
        (["{"], "line 1: not JSON"),
        ([GOOD, "[1]"], "line 2: a record is a JSON object"),
        ([{"a": 1}], "a is of no known kind"),
        ([{**GOOD, "surprise": 1}], "surprise"),
        ([GOOD, {**GOOD, "prompt": "text"}], "after 1 calls"),
        ([{**GOOD, "prompt": []}], "has no tokens"),
        ([{**GOOD, "output_tokens": 0}], "has no tokens"),
        ([{**GOOD, "prompt": [-1]}], "after 0 calls"),
        ([GOOD, {**GOOD, "arrival_s": 1.0}], "some calls say when they arrive"),
        ([{**GOOD, "prompt": [["a", 9], ["b", -2]]}], "a piece of -2 tokens"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"], "line 2"),
        (
            [
                "TIMESTAMP,ContextTokens,GeneratedTokens",
                "2024-05-10 00:00:00,1,2",
                "2024-05-10 00:00:01+00:00,1,2",
            ],
            "line 3",
        ),
        (
            [{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}],
            "600 tokens in 1 blocks",
        ),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, rows: list[object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        datasets.read(written(tmp_path / "bad.jsonl", *rows))
    assert "bad.jsonl" in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        datasets.read(tmp_path / "none.jsonl")
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(random.Random(1).randbytes(50))
    with pytest.raises(ConfigError, match="cannot read"):
        datasets.read(broken)
