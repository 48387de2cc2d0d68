"""What the engine loop serves while a step runs, and what has to wait until it has ended."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.messages import (
    Abort,
    Allocate,
    Allocated,
    AnyCommand,
    Audit,
    Audited,
    Cancel,
    Commit,
    Finished,
    Heartbeat,
    History,
    Inserted,
    InsertFailed,
    PeerLost,
    Prefill,
    Refused,
    ResetCache,
    SendSnapshot,
    Sent,
    Started,
    Stop,
    Tokens,
    Transmit,
    TransmitFailed,
)
from memserve.types import InstanceId, Namespace, RequestId, TransferId, TransferStyle
from tests.contract.link_rig import geometry
from tests.contract.transfer_rig import prompt
from tests.integration.loop_rig import (
    CHUNKED,
    ID,
    JOINED,
    WAKE_FD,
    Bench,
    allocate,
    decode,
    kinds,
    prefill,
    transmit,
)
from tests.integration.worker_harness import request_bytes


def deliver_inside(bench: Bench, *commands: AnyCommand, step: int = 1) -> None:
    """These arrive while the engine waits in this step, counted from now; it has time for all."""
    bench.engine.turns_inside = len(commands) + 2
    number = bench.engine.num_steps + step

    def deliver() -> None:
        if bench.engine.num_steps == number:
            bench.channel.commands.extend(commands)

    bench.engine.before_each_wait = deliver


BUSY = RequestId("busy")


def busy(num_tokens: int = 4) -> Prefill:
    """A request of several steps."""
    request = request_bytes(num_tokens)
    return prefill(prompt(9, seed=1), whole=True, hold=False, request_id=BUSY, request=request)


def commit(num_blocks: int) -> Commit:
    size_bytes = num_blocks * geometry().block_bytes
    return Commit(epoch=1, transfer_id=TransferId("t"), size_bytes=size_bytes, pin=True)


def abort(request_id: RequestId = ID) -> Abort:
    return Abort(epoch=1, request_id=request_id)


def test_what_arrives_inside_a_step_is_served_there_and_runs_in_the_next_one() -> None:
    bench = Bench()
    deliver_inside(bench, allocate(prompt(9)), commit(2), decode([77], known_tokens=9))
    events = bench.run(busy())
    assert kinds(events)[:6] == [Started, Allocated, Inserted, Tokens, Started, Tokens]
    assert [o.request_id for o in events[5].outputs] == [BUSY, ID]  # type: ignore[union-attr]
    assert bench.channel.wakes == [WAKE_FD]
    bench.run(abort(), abort(BUSY))
    assert bench.audit().problems == [] and bench.audit().holders == []


def test_a_source_is_sent_inside_a_step_of_others() -> None:
    bench = Bench()
    bench.run(JOINED, prefill(prompt(8)))
    deliver_inside(bench, transmit(5, 6))
    assert kinds(bench.run(busy()))[:3] == [Started, Sent, Tokens]


def test_history_that_the_step_computes_is_sent_after_it() -> None:
    """The pool has indexed it when the step was scheduled."""
    bench = Bench()
    bench.run(JOINED)
    computed = History(Namespace(), prompt(9, seed=1))
    deliver_inside(bench, msgspec.structs.replace(transmit(5, 6), history=computed))
    assert kinds(bench.run(busy()))[:3] == [Started, Tokens, Sent]


@pytest.mark.parametrize("again", [abort(BUSY), busy()], ids=["abort", "place again"])
def test_who_runs_is_taken_out_between_steps_and_nothing_overtakes_that(again: AnyCommand) -> None:
    bench = Bench()
    deliver_inside(bench, allocate(prompt(4)), again, allocate(prompt(8), transfer_id="t2"))
    bench.channel.waits_inside.clear()
    events = bench.run(busy())
    answers = [e for e in events if isinstance(e, Allocated | Tokens)]
    assert [type(e) for e in answers[:3]] == [Allocated, Tokens, Allocated]
    assert answers[0].transfer_id == "t" and answers[2].transfer_id == "t2"  # type: ignore[union-attr]
    # Two turns found something to do; what is held back is not looked at again and again.
    assert [wait for wait in bench.channel.waits_inside[:5] if wait == 0.0] == []
    assert bench.channel.waits_inside[:5] == [0.005] * 5
    bench.run(abort(BUSY), abort())
    assert bench.audit().problems == []


def test_who_does_not_run_is_forgotten_inside_a_step() -> None:
    bench = Bench()
    bench.run(prefill(prompt(8)))  # it has ended, and is held
    free: list[int] = []
    deliver_inside(bench, abort(), Audit(epoch=1, audit_id=2))
    events = bench.run(busy())
    free = [e.stats.pinned_requests for e in events if isinstance(e, Audited)]
    assert kinds(events)[:3] == [Started, Audited, Tokens] and free == [0]


def test_what_is_held_back_in_the_last_step_is_served_at_once() -> None:
    bench = Bench()
    deliver_inside(bench, abort(BUSY), allocate(prompt(8)))
    bench.channel.waits.clear()
    assert kinds(bench.run(busy(1))) == [Started, Tokens, Finished, Allocated]
    assert bench.channel.waits[-2] == 0.0, "and only then it slept"


@pytest.mark.parametrize("ending", ["stop", "signal"])
def test_nothing_is_served_after_the_order_to_stop(ending: str) -> None:
    bench = Bench()
    deliver_inside(bench, Stop(epoch=1), allocate(prompt(8)))
    if ending == "signal":
        deliver_inside(bench, allocate(prompt(8)))
        deliver = bench.engine.before_each_wait
        bench.engine.before_each_wait = lambda: (deliver(), bench.loop.stop())[0]
    assert kinds(bench.run(busy())) == [Started, Tokens]


def test_a_step_that_hangs_does_not_look_alive() -> None:
    bench = Bench()
    deliver_inside(bench, allocate(prompt(8)))
    deliver = bench.engine.before_each_wait

    def hang() -> None:
        deliver()
        bench.clock.now_s += 100.0

    bench.engine.before_each_wait = hang
    bench.run(busy(1))
    seen = [type(e) for e in bench.channel.events if isinstance(e, Allocated | Tokens | Heartbeat)]
    assert seen[:3] == [Allocated, Tokens, Heartbeat]


def test_layers_of_the_step_are_all_at_the_link_before_its_peer_can_be_lost() -> None:
    bench = Bench(style=TransferStyle.LAYER)
    bench.engine.chunk_tokens, bench.engine.layers_told = 6, (2, 0)
    bench.run(JOINED)
    deliver_inside(bench, PeerLost(epoch=1, peer=InstanceId("D0"), peer_epoch=1), step=2)
    events = bench.run(prefill(CHUNKED), transmit(5, 6, 7, 8))
    assert kinds(events) == [Started, TransmitFailed, Tokens, Finished]
    assert bench.writes[-1] == "layer 1 of 2 in step 2"
    bench.run(abort())
    assert bench.audit().holders == []


def life(number: int, kind: str) -> list[AnyCommand]:
    """The commands of one request; its KV comes, goes, or is returned."""
    name, tokens = RequestId(f"r{number}"), prompt(9, seed=number % 3)
    coming, going = TransferId(f"in {number}"), TransferId(f"out {number}")
    size = {"size_bytes": 2 * geometry().block_bytes}
    send = msgspec.structs.replace(transmit(5, 6), request_id=name, transfer_id=going)
    take = allocate(tokens, request_id=name, transfer_id=coming)
    done = msgspec.structs.replace(commit(2), transfer_id=coming, **size)
    run = decode([77], known_tokens=9, request_id=name, hold=kind == "returned")
    forget = abort(name)
    lives: dict[str, list[AnyCommand]] = {
        "sent": [prefill(tokens, request_id=name), send, forget],
        "sent late": [prefill(tokens, request_id=name), abort(BUSY), send, forget],
        "history": [msgspec.structs.replace(send, history=History(Namespace(), tokens))],
        "received": [take, done, run, forget],
        "returned": [take, done, run, send, forget],
        "cancelled": [take, Cancel(epoch=1, transfer_id=coming), forget],
        "twice": [
            prefill(tokens, request_id=name),
            prefill(tokens, request_id=name, attempt=2),
            forget,
        ],
        "reset": [ResetCache(epoch=1), SendSnapshot(epoch=1)],
    }
    return lives[kind]


KINDS = ("sent", "sent late", "history", "received", "returned", "cancelled", "twice", "reset")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_commands_may_arrive_at_any_moment(data: st.DataObject) -> None:
    """Every order gets its answer, once; in the end nobody holds anything. The engine itself
    refuses to abort a request inside a step."""
    bench = Bench(style=data.draw(st.sampled_from(TransferStyle)))
    bench.engine.turns_inside = data.draw(st.integers(0, 4), "turns inside")
    bench.engine.steps_in_flight = data.draw(st.integers(0, 1), "steps in flight")
    bench.engine.chunk_tokens = data.draw(st.sampled_from([3, 1000]), "chunk")
    bench.run(JOINED)
    kinds_of = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), "lives")
    lives = [deque(life(number, kind)) for number, kind in enumerate(kinds_of)]
    said: list[AnyCommand] = []
    bench.channel.commands.append(busy(30))
    while waiting := [one for one in lives if one]:
        said.append(data.draw(st.sampled_from(waiting)).popleft())
        looks = data.draw(st.integers(0, 2), "empty looks")
        bench.channel.commands.extend([said[-1], *[None] * looks])
    events = bench.run(abort(BUSY))
    events += bench.run(*(abort(RequestId(f"r{number}")) for number in range(len(lives))))
    asked = {
        (Allocated, Refused): [c.transfer_id for c in said if isinstance(c, Allocate)],
        (Inserted, InsertFailed): [c.transfer_id for c in said if isinstance(c, Commit)],
        (Sent, TransmitFailed): [c.transfer_id for c in said if isinstance(c, Transmit)],
    }
    for answers, transfers in asked.items():
        answered = [e.transfer_id for e in events if isinstance(e, answers)]
        assert sorted(answered) == sorted(transfers), answers
    audited = bench.audit()
    assert (audited.problems, audited.holders) == ([], [])
