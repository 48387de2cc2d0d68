"""The engine loop, command by command: what it answers, in which order, and what it holds."""

from __future__ import annotations

import msgspec
import pytest
from vllm.v1.engine import EngineCoreOutputs

from memserve.changes import Evicted
from memserve.core.tokens import pack
from memserve.messages import (
    Abort,
    Allocated,
    CacheChanged,
    CacheSnapshot,
    Cancel,
    Commit,
    Expired,
    Finished,
    Heartbeat,
    History,
    Inserted,
    Rejected,
    ResetCache,
    SendSnapshot,
    Sent,
    Started,
    Stop,
    Tokens,
    TransmitFailed,
)
from memserve.types import Namespace, RequestId, TransferId, TransferStyle
from memserve.workers.copies import Pace
from memserve.workers.transfer import private_namespace
from tests.contract.link_rig import BLOCK_SIZE, geometry
from tests.contract.transfer_rig import prompt
from tests.integration.loop_rig import (
    CHUNKED,
    ID,
    JOINED,
    NUM_BLOCKS,
    Bench,
    allocate,
    decode,
    kinds,
    only,
    prefill,
    transmit,
)
from tests.integration.worker_harness import request_bytes


@pytest.fixture(params=[0, 3], ids=["between steps", "inside steps"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """An engine that never waits, as on the CPU, and one that waits in each step, as on a GPU."""
    made = Bench()
    made.engine.turns_inside = request.param
    return made


def test_prefill_is_told_in_order_and_held_until_forgotten(bench: Bench) -> None:
    tokens = prompt(10)
    events = bench.run(prefill(tokens, attempt=7))
    assert kinds(events) == [Started, Tokens, Finished]
    assert only(events, Started).attempt == 7
    (output,) = only(events, Tokens).outputs
    assert (output.request_id, output.attempt, output.finish_reason) == (ID, 7, "length")
    assert only(events, Finished).held_tokens == 10
    assert bench.audit().stats.active_blocks == 2  # the full ones; the third was never to be sent
    bench.run(Abort(epoch=1, request_id=ID))
    audited = bench.audit()
    assert (audited.holders, audited.problems) == ([], [])


@pytest.mark.parametrize("transmit_first", [True, False])
def test_sent_follows_finished(bench: Bench, transmit_first: bool) -> None:
    bench.run(JOINED)
    commands = [prefill(prompt(8)), transmit(5, 6)]
    if transmit_first:
        events = bench.run(*commands)
        assert kinds(events) == [Started, Tokens, Finished, Sent]
    else:
        events = [*bench.run(commands[0]), *bench.run(commands[1])]
        assert kinds(events) == [Started, Tokens, Finished, Sent]
    assert only(events, Sent).num_blocks == 2
    assert bench.audit().stats.active_blocks == 0


@pytest.mark.parametrize(
    ("style", "steps_in_flight", "writes"),
    [
        ("request", 0, ["4 blocks in step 3"]),
        ("discrete", 0, ["4 blocks in step 3"]),
        ("chunk", 0, ["1 blocks in step 1", "2 blocks in step 2", "1 blocks in step 3"]),
        ("chunk", 1, ["1 blocks in step 2", "2 blocks in step 3", "1 blocks in step 3"]),
        ("chunk", 9, ["1 blocks in step 3", "2 blocks in step 3", "1 blocks in step 3"]),
        (
            "layer",
            0,
            [
                f"layer {n} of {b} in step {s}"
                for s, b in ((1, 1), (2, 2), (3, 1))
                for n in (2, 0, 1)
            ],
        ),
    ],
)
def test_what_is_sent_in_which_step(style: str, steps_in_flight: int, writes: list[str]) -> None:
    """A prompt of three steps; `layer` also sends what the hooks do not tell of, here layer 1."""
    bench = Bench(style=TransferStyle(style))
    bench.engine.chunk_tokens, bench.engine.layers_told = 6, (2, 0)
    bench.engine.steps_in_flight = steps_in_flight
    bench.run(JOINED)
    events = bench.run(prefill(CHUNKED), transmit(5, 6, 7, 8))
    assert kinds(events) == [Started, Tokens, Finished, Sent]
    sent = only(events, Sent)
    assert (sent.num_blocks, sent.size_bytes) == (4, 4 * geometry().block_bytes)
    assert bench.writes == writes
    assert bench.audit().stats.active_blocks == 0


@pytest.mark.parametrize("style", ["chunk", "layer"])
def test_parts_of_a_request_that_is_aborted_in_its_prefill(style: str) -> None:
    bench = Bench(style=TransferStyle(style))
    bench.engine.chunk_tokens = 6
    bench.run(JOINED)

    def after_step() -> None:
        if bench.engine.num_steps == 2:
            bench.channel.commands.append(Abort(epoch=1, request_id=ID))

    bench.engine.after_each_step = after_step
    events = bench.run(prefill(CHUNKED), transmit(5, 6, 7, 8))
    assert kinds(events) == [Started, TransmitFailed]
    assert len(bench.writes) > 0 and not bench.transfers.is_active
    audited = bench.audit()
    assert (audited.holders, audited.problems) == ([], [])


def test_abort_fails_the_transmit_that_waits(bench: Bench) -> None:
    bench.run(JOINED)
    events = bench.run(
        prefill(prompt(8)), transmit(5, 6), Abort(epoch=1, request_id=ID), transmit(5, 6)
    )
    assert kinds(events) == [TransmitFailed, TransmitFailed]  # also the one that came too late
    assert bench.audit().holders == []


def test_several_requests_share_one_message_per_step(bench: Bench) -> None:
    names = [RequestId(f"r{i}") for i in range(3)]
    events = bench.run(*(prefill(prompt(6, seed=i), request_id=n) for i, n in enumerate(names)))
    assert [o.request_id for o in only(events, Tokens).outputs] == names
    assert kinds(events) == [Started] * 3 + [Tokens] + [Finished] * 3


def test_attempts_do_not_meet_in_the_engine(bench: Bench) -> None:
    bench.run(prefill(prompt(6), attempt=1), prefill(prompt(6), attempt=2))
    assert [request.request_id for request in bench.engine.added] == ["r/1", "r/2"]
    bench.run(Abort(epoch=1, request_id=ID))
    assert bench.audit().holders == []


def test_known_tokens_are_not_sent_again(bench: Bench) -> None:
    tokens = prompt(9)
    events = bench.run(allocate(tokens))
    assert len(only(events, Allocated).block_ids) == 2
    size = 2 * geometry().block_bytes
    commit = Commit(epoch=1, transfer_id=TransferId("t"), size_bytes=size, pin=True)
    events = bench.run(commit, decode([77], known_tokens=9))
    assert only(events, Inserted).num_tokens == 8
    assert bench.engine.added[0].prompt_token_ids == [*tokens, 77]
    assert only(events, Started).cached_tokens == 8
    assert len([e for e in events if isinstance(e, Tokens)]) == 2  # of 3 tokens, P made one
    bench.run(Abort(epoch=1, request_id=ID))
    assert bench.audit().holders == []


def test_prefill_goes_on_from_what_was_fetched(bench: Bench) -> None:
    tokens = prompt(10)
    bench.run(allocate(tokens[:8]))
    size = 2 * geometry().block_bytes
    commit = Commit(epoch=1, transfer_id=TransferId("t"), size_bytes=size, pin=True)
    events = bench.run(commit, prefill(tokens[8:], known_tokens=8))
    assert kinds(events)[:2] == [Inserted, Started]
    assert only(events, Started).cached_tokens == 8
    assert bench.engine.added[0].prompt_token_ids == tokens
    bench.run(Abort(epoch=1, request_id=ID))
    assert bench.audit().holders == []


@pytest.mark.parametrize("steps_in_flight", [0, 2])
@pytest.mark.parametrize("seed", [0, 1], ids=["of an earlier step", "of the step in flight"])
def test_history_is_sent_for_an_unknown_request_after_the_step_that_writes_it(
    bench: Bench, steps_in_flight: int, seed: int
) -> None:
    bench.run(JOINED, prefill(prompt(8)))
    bench.run(Abort(epoch=1, request_id=ID))
    bench.engine.steps_in_flight = steps_in_flight
    busy = prefill(prompt(9, seed=1), whole=True, request_id=RequestId("busy"))
    asked = History(Namespace(), prompt(8, seed=seed))
    history = msgspec.structs.replace(transmit(5, 6), history=asked)
    last = bench.engine.num_steps

    def after_step() -> None:
        if bench.engine.num_steps == last + 1:
            bench.channel.commands.append(history)

    bench.engine.after_each_step = after_step
    events = bench.run(busy)
    assert only(events, Sent).num_blocks == 2
    num_tokens = kinds(events)[: kinds(events).index(Sent)].count(Tokens)
    assert num_tokens == 1 + (steps_in_flight if seed == 1 else 0)
    bench.run(Abort(epoch=1, request_id=RequestId("busy")))
    assert bench.audit().holders == []


def test_unknown_tokens_are_a_refusal_and_the_loop_lives_on(bench: Bench) -> None:
    events = bench.run(allocate([], known_tokens=4), decode([1], known_tokens=4))
    assert "4 tokens are said to be known here, 0 are" in events[0].reason  # type: ignore[union-attr]
    assert isinstance(events[1], Rejected)
    assert bench.audit().holders == []


@pytest.mark.parametrize("error", [ValueError("no such adapter"), AssertionError(), KeyError("x")])
def test_request_that_breaks_on_its_way_in_is_rejected(bench: Bench, error: Exception) -> None:
    bench.engine.breaks_on_add = error
    rejected = only(bench.run(prefill(prompt(6), attempt=3)), Rejected)
    assert rejected.attempt == 3
    assert rejected.message in (str(error), type(error).__name__)
    bench.engine.breaks_on_add = None
    events = bench.run(Abort(epoch=1, request_id=ID), prefill(prompt(6), attempt=4))
    assert Finished in kinds(events)


def test_decode_of_a_running_request_is_rejected_and_does_not_touch_it(bench: Bench) -> None:
    events = bench.run(decode(prompt(6), attempt=1), decode(prompt(6), attempt=2))
    assert only(events, Rejected).attempt == 2
    assert only(events, Finished).attempt == 1


def test_private_kv_is_no_history(bench: Bench) -> None:
    events = bench.run(prefill(prompt(12), is_private=True))
    assert only(events, Finished).held_tokens == 12
    stats = bench.audit().stats
    assert (stats.active_blocks, stats.historical_blocks) == (3, 0)  # pinned, and not indexed
    assert bench.engine.added[0].cache_salt == private_namespace(ID, Namespace()).cache_salt
    bench.run(Abort(epoch=1, request_id=ID))
    stats = bench.audit().stats
    assert stats.free_blocks == stats.total_blocks


def test_abort_with_hold_ends_a_running_request_as_if_it_had_finished(bench: Bench) -> None:
    tokens = prompt(9)
    bench.channel.commands.extend([decode(tokens, request=request_bytes(30), num_generated=0)])
    bench.channel.is_idle_after = 0
    steps = 0
    step = bench.engine.step

    def step_and_stop() -> tuple[EngineCoreOutputs | None, bool]:
        nonlocal steps
        steps += 1
        if steps == 5:
            bench.channel.commands.append(Abort(epoch=1, request_id=ID, hold=True))
        return step()

    bench.engine.step = step_and_stop  # type: ignore[method-assign]
    bench.loop.run()
    finished = only(bench.channel.events, Finished)
    assert finished.held_tokens == 9 + 5 - 1
    again = only(bench.run(Abort(epoch=1, request_id=ID, hold=True)), Finished)
    assert again == finished
    bench.run(Abort(epoch=1, request_id=ID))
    assert bench.audit().holders == []


def test_abort_with_hold_is_answered_whatever_is_known(bench: Bench) -> None:
    assert only(bench.run(Abort(epoch=1, request_id=ID, hold=True)), Finished).held_tokens == 0
    bench.run(allocate(prompt(5)))
    assert only(bench.run(Abort(epoch=1, request_id=ID, hold=True)), Finished).held_tokens == 0


def test_commands_of_another_epoch_are_ignored(bench: Bench) -> None:
    assert bench.run(prefill(prompt(6), epoch=2), Stop(epoch=2), Stop(epoch=0)) == []
    assert bench.audit().holders == []


def test_stop_leaves_later_commands_alone(bench: Bench) -> None:
    assert bench.run(Stop(epoch=1), prefill(prompt(6))) == []
    assert len(bench.channel.commands) == 1


def test_starving_engine_gets_the_soft_pins_and_does_not_spin(bench: Bench) -> None:
    half = NUM_BLOCKS // 2 * BLOCK_SIZE
    size = NUM_BLOCKS // 2 * geometry().block_bytes
    commit = Commit(epoch=1, transfer_id=TransferId("t"), size_bytes=size, pin=True)
    bench.run(allocate(prompt(half)), commit)
    big = prefill(prompt(60, seed=1), request_id=RequestId("big"))
    events = bench.run(big)
    assert Finished in kinds(events)
    # Held for a transmit, though, blocks stay: the engine waits without using the processor.
    bench.channel.waits.clear()
    events = bench.run(prefill(prompt(60, seed=2), request_id=RequestId("too much")), idle_waits=9)
    assert events == []
    assert bench.channel.waits[-5:] == [0.005] * 5
    bench.run(Abort(epoch=1, request_id=RequestId("big")), Abort(epoch=1, request_id=ID))
    bench.run(Abort(epoch=1, request_id=RequestId("too much")))
    assert bench.audit().holders == []


def test_idle_worker_wakes_for_heartbeats_and_deadlines_only(bench: Bench) -> None:
    bench.run(idle_waits=5)
    assert bench.channel.waits[-5:] == [1.0] * 5
    bench.channel.waits.clear()
    events = bench.run(allocate(prompt(8), deadline_s=2.5), idle_waits=4)
    assert kinds(events) == [Allocated, Expired]
    assert pytest.approx(0.5) in bench.channel.waits  # what is left of 2.5 after two heartbeats
    assert bench.audit().stats.quarantined_blocks == 2


def test_heartbeat_follows_when_the_engine_falls_idle(bench: Bench) -> None:
    bench.run()
    before = bench.clock.now_s
    bench.run(prefill(prompt(6)))
    assert isinstance(bench.channel.events[4], Heartbeat), kinds(bench.channel.events)
    assert bench.channel.events[4].stats.running_requests == 0
    assert bench.clock.now_s - before <= 1.0
    stats = bench.channel.events[4].stats
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (6, 0)


def test_the_status_says_how_long_steps_and_turns_take(bench: Bench) -> None:
    step, poll = bench.engine.step, bench.loop._transfers.poll
    bench.engine.turns_inside = 0

    def slow_step() -> tuple[EngineCoreOutputs | None, bool]:
        bench.clock.now_s += 0.25
        return step()

    def slow_poll() -> None:
        bench.clock.now_s += 0.125
        poll()

    bench.engine.step, bench.loop._transfers.poll = slow_step, slow_poll  # type: ignore[method-assign]
    bench.run(prefill(prompt(6)))
    stats, ran = bench.audit().stats, bench.engine.num_steps
    assert stats.steps == ran > 0
    assert stats.step_s == 0.25 * ran and stats.turn_s == 0.375 * ran


def test_the_index_is_reported_before_the_end_of_a_request_and_on_demand(bench: Bench) -> None:
    bench.run(prefill(prompt(BLOCK_SIZE + 2), hold=False))
    assert kinds([e for e in bench.channel.events if not isinstance(e, Heartbeat)]) == [
        Started,
        Tokens,
        CacheChanged,
        Finished,
    ]
    assert bench.audit().problems == []
    (snapshot,) = bench.run(SendSnapshot(epoch=1))
    assert isinstance(snapshot, CacheSnapshot)
    assert (snapshot.sequence, snapshot.is_last) == (1, True)
    assert [c.token_ids for c in snapshot.changes] == [pack(prompt(BLOCK_SIZE))]
    bench.run(ResetCache(epoch=1))
    (changed,) = [e for e in bench.channel.events if isinstance(e, CacheChanged)]
    assert changed.sequence == 2
    assert [type(change) for change in changed.changes] == [Evicted]


def test_engine_that_breaks_ends_the_loop(bench: Bench) -> None:
    def broken() -> tuple[EngineCoreOutputs | None, bool]:
        raise RuntimeError("device lost")

    bench.engine.step = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="device lost"):
        bench.run(prefill(prompt(6)))


def test_who_waits_in_the_engine_comes_before_who_waits_at_the_door(bench: Bench) -> None:
    """A starving engine has dropped the pins on arrivals: not for another one's KV."""
    half = NUM_BLOCKS // 2 * BLOCK_SIZE
    size = NUM_BLOCKS // 2 * geometry().block_bytes
    bench.run(
        allocate(prompt(half)),
        Commit(epoch=1, transfer_id=TransferId("t"), size_bytes=size, pin=True),
    )
    big = prefill(prompt(60, seed=1), request_id=RequestId("big"))
    next_one = RequestId("next")
    waiting = allocate(
        prompt(half, seed=2), request_id=next_one, transfer_id=TransferId("u"), patience_s=300.0
    )
    events = bench.run(big, waiting)
    assert [type(e) for e in events if isinstance(e, Allocated | Finished)] == [Finished]
    assert only(bench.run(Abort(epoch=1, request_id=RequestId("big"))), Allocated)
    bench.run(Abort(epoch=1, request_id=ID), Cancel(epoch=1, transfer_id=TransferId("u")))
    bench.run(Abort(epoch=1, request_id=next_one))
    assert bench.audit().holders == []


def test_copies_make_way_for_steps_and_for_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces: list[Pace] = []
    monkeypatch.setattr(bench.swaps, "poll", paces.append)
    bench.run(prefill(prompt(60)))
    inside = bench.engine.turns_inside * [Pace.INSIDE_STEP]
    assert paces == [Pace.BETWEEN_STEPS, *inside, Pace.FREE]
    paces.clear()
    bench.run(prefill(prompt(60, seed=1), request_id=RequestId("too much")), idle_waits=3)
    between = [pace for pace in paces if pace is not Pace.INSIDE_STEP]
    assert between[-3:] == [Pace.FREE] * 3, "it starves: nothing is computed"
