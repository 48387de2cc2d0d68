"""Swapping in the engine loop (over a scripted engine), and with a real engine and a tiny HBM pool.

What the real engine generates with most of its history in DRAM equals what a plain vLLM instance
without any cache generates, token by token, in float32.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from memserve.messages import (
    Abort,
    Allocated,
    AnyCommand,
    AnyEvent,
    Cancel,
    Finished,
    History,
    Prefill,
    Ready,
    Rejected,
    ResetCache,
    Sent,
    Started,
    StartFailed,
    Tokens,
    Transmit,
    TransmitFailed,
)
from memserve.types import InstanceId, Namespace, RequestId, TransferId
from tests.contract.link_rig import BLOCK_SIZE
from tests.contract.swap_rig import ManualQueues
from tests.contract.transfer_rig import prompt
from tests.integration.cluster_harness import until
from tests.integration.loop_rig import (
    ID,
    JOINED,
    Bench,
    allocate,
    decode,
    kinds,
    only,
    prefill,
)
from tests.integration.reference import Job, Reference
from tests.integration.worker_harness import DEADLINE_S, ENGINE, Rig, request_bytes

PROMPT = prompt(18)
"""Four full blocks, and two tokens more."""


class SwapBench(Bench):
    """The past request's blocks are in DRAM alone, and copies wait for the test."""

    def __init__(self) -> None:
        self.queues = ManualQueues()
        super().__init__(self.queues)
        self.run(prefill(PROMPT, request_id=RequestId("past"), whole=True, hold=False))
        self.run(Abort(epoch=1, request_id=RequestId("past")))
        assert self.swapper.swap_out(99) == 4
        self.run()
        self.queues.out.finish(4)
        self.run()
        self.pool.free_blocks(self.pool.get_new_blocks(self.pool.get_num_free_blocks()))
        assert self.mempool.match(PROMPT) == []

    def finish(self, *commands: AnyCommand) -> list[AnyEvent]:
        """Serve these, then let the copies inwards happen."""
        events = self.run(*commands)
        self.queues.into.finish(99)
        return events + self.run()

    def assert_idle(self) -> None:
        audited = self.audit()
        assert (audited.problems, audited.stats.active_blocks) == ([], 0)
        assert audited.holders == []


@pytest.fixture
def bench() -> SwapBench:
    return SwapBench()


# ── the loop ──────────────────────────────────────────────────────────────────────────────────


def test_a_prompt_in_dram_is_a_hit(bench: SwapBench) -> None:
    assert bench.run(prefill(PROMPT, hold=False)) == [], "it waits, and the engine is idle"
    bench.queues.into.finish(3)
    assert bench.run() == []
    bench.queues.into.finish(1)
    events = bench.run()
    assert kinds(events) == [Started, Tokens, Finished]
    assert only(events, Started).cached_tokens == 4 * BLOCK_SIZE
    stats = bench.audit().stats
    assert (stats.swapped_in_blocks, stats.swapped_out_blocks) == (4, 4)
    assert (stats.dram_blocks, stats.dram_used_blocks) == (32, 4)
    bench.run(Abort(epoch=1, request_id=ID))
    bench.assert_idle()


def test_other_requests_are_served_while_one_waits(bench: SwapBench) -> None:
    other = prefill(prompt(10, 5), request_id=RequestId("other"), whole=True, hold=False)
    events = bench.run(prefill(PROMPT), other)
    assert only(events, Started).request_id == "other"
    assert only(events, Finished).request_id == "other"
    assert bench.audit().holders[0] == "swap-in for r/1: 4 blocks"
    assert only(bench.finish(), Started).request_id == ID


def test_a_decode_waits_as_well(bench: SwapBench) -> None:
    events = bench.finish(decode(PROMPT))
    assert only(events, Started).cached_tokens == 4 * BLOCK_SIZE


def test_a_request_that_must_not_use_the_cache_does_not_wait(bench: SwapBench) -> None:
    events = bench.run(prefill(PROMPT, request=request_bytes(2, prompt_logprobs=1)))
    assert only(events, Started).request_id == ID
    assert not bench.queues.into.pieces


def test_a_private_request_sees_nothing_of_it(bench: SwapBench) -> None:
    events = bench.run(prefill(PROMPT, is_private=True))
    assert only(events, Started).cached_tokens == 0


@pytest.mark.parametrize("hold", [False, True])
def test_abort_while_it_waits(bench: SwapBench, hold: bool) -> None:
    events = bench.run(prefill(PROMPT), Abort(epoch=1, request_id=ID, hold=hold))
    if hold:
        assert (only(events, Finished).request_id, only(events, Finished).held_tokens) == (ID, 0)
    else:
        assert events == []
    assert bench.finish() == []
    bench.run(Abort(epoch=1, request_id=ID))
    bench.assert_idle()


def test_the_next_attempt_takes_the_place_of_one_that_waits(bench: SwapBench) -> None:
    bench.run(prefill(PROMPT, attempt=1, hold=False))
    assert bench.finish(prefill(PROMPT, attempt=2, hold=False)) == [], "the first one's copy ended"
    events = bench.finish()
    assert only(events, Started).attempt == 2
    assert only(events, Finished).attempt == 2
    bench.run(Abort(epoch=1, request_id=ID))
    bench.assert_idle()


def test_a_second_command_for_one_that_waits_is_rejected(bench: SwapBench) -> None:
    events = bench.run(prefill(PROMPT), decode(PROMPT, attempt=2))
    assert "it runs here already, as r/1" in only(events, Rejected).message
    assert only(bench.finish(), Started).attempt == 1


def test_an_engine_that_refuses_what_has_waited(bench: SwapBench) -> None:
    bench.engine.breaks_on_add = ValueError("not this one")
    events = bench.finish(prefill(PROMPT))
    assert only(events, Rejected).message == "not this one"
    bench.run(Abort(epoch=1, request_id=ID))
    bench.assert_idle()


def test_the_loop_wakes_up_for_the_deadline(bench: SwapBench) -> None:
    """The copy never ends: the engine computes the prompt."""
    bench.run(prefill(PROMPT, hold=False))
    bench.clock.now_s += 5.0
    events = bench.run()
    assert only(events, Started).cached_tokens == 0
    bench.queues.into.finish(99)
    bench.run(Abort(epoch=1, request_id=ID))
    bench.assert_idle()


def test_a_reset_leaves_what_somebody_waits_for(bench: SwapBench) -> None:
    events = bench.finish(ResetCache(epoch=1), prefill(PROMPT, hold=False))
    assert only(events, Started).cached_tokens == 0
    assert bench.audit().stats.dram_used_blocks == 0
    bench = SwapBench()
    events = bench.finish(prefill(PROMPT, hold=False), ResetCache(epoch=1))
    assert only(events, Started).cached_tokens == 16
    bench.run(Abort(epoch=1, request_id=ID))
    bench.assert_idle()


def test_hits_in_dram_count_for_a_reservation(bench: SwapBench) -> None:
    tokens = PROMPT[:16] + prompt(8, 9)
    assert bench.run(allocate(tokens)) == []
    allocated = only(bench.finish(), Allocated)
    assert (allocated.hit_blocks, len(allocated.block_ids)) == (4, 2)
    bench.run(Cancel(epoch=1, transfer_id=TransferId("t")), Abort(epoch=1, request_id=ID))
    bench.assert_idle()


def test_a_reservation_that_is_cancelled_while_it_waits(bench: SwapBench) -> None:
    events = bench.run(allocate(PROMPT), Cancel(epoch=1, transfer_id=TransferId("t")))
    assert events == [] and bench.finish() == []
    bench.run(Abort(epoch=1, request_id=ID))
    bench.assert_idle()


def history(tokens: list[int], *block_ids: int) -> Transmit:
    return Transmit(
        epoch=1,
        transfer_id=TransferId("t"),
        request_id=ID,
        peer=InstanceId("D0"),
        first_block=0,
        block_ids=list(block_ids),  # type: ignore[arg-type]
        history=History(Namespace(), tokens),
    )


def test_history_in_dram_is_brought_for_another_instance(bench: SwapBench) -> None:
    assert kinds(bench.run(JOINED, history(PROMPT[:16], 9, 8, 7, 6)))[1:] == []
    assert only(bench.finish(), Sent).num_blocks == 4
    bench.assert_idle()


def test_history_that_is_cancelled_while_it_waits_is_answered(bench: SwapBench) -> None:
    events = bench.run(
        JOINED, history(PROMPT[:16], 9, 8, 7, 6), Cancel(epoch=1, transfer_id=TransferId("t"))
    )
    assert only(events, TransmitFailed).reason == "cancelled"
    assert bench.finish() == []
    bench.assert_idle()


# ── a real engine ─────────────────────────────────────────────────────────────────────────────


def slow(test: Any) -> Any:
    """With real processes."""
    return pytest.mark.integration(pytest.mark.timeout(300)(test))


SMALL = ENGINE | {"max_model_len": 512}
BLOCK_BYTES = 1_474_560  # SmolLM2-135M in float32
NUM_BLOCKS = 36
"""Of the HBM pool: two conversations."""
DRAM_BLOCKS = 110


def ranks(*degrees: tuple[int, int]) -> Any:
    """With P0 and D0 of so many ranks."""
    ids = [f"P{p}D{d}" for p, d in degrees]
    return pytest.mark.parametrize("rig", degrees, indirect=True, ids=ids, scope="module")


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Rig]:
    """A prefill and a decode instance, both with a small HBM pool and a DRAM tier."""
    made = Rig(str(model_folder))
    try:
        readies: dict[str, Ready] = {}
        for instance, tp in zip(("P0", "D0"), request.param, strict=True):
            readies |= made.start(
                instance,
                engine=SMALL,
                kv_bytes=NUM_BLOCKS * BLOCK_BYTES,
                dram_bytes=DRAM_BLOCKS * BLOCK_BYTES,
                tp=tp,
            )
        made.link(readies)
        yield made
    finally:
        made.close()


def words(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 20_000) for _ in range(num_tokens)]


def whole_request(tokens: list[int], count: int, name: str) -> Prefill:
    return Prefill(
        epoch=1,
        request_id=RequestId(name),
        attempt=1,
        request=request_bytes(count),
        known_tokens=0,
        token_ids=tokens,
        whole=True,
        hold=False,
        is_private=False,
    )


def run(rig: Rig, instance: str, tokens: list[int], count: int, name: str) -> tuple[Any, list[int]]:
    """A whole request there; what it started with, and its tokens."""
    rig.send(instance, whole_request(tokens, count, name))
    started = rig.expect(instance, Started, lambda e: e.request_id == name)
    generated = rig.tokens_until_end(instance, name)
    rig.expect(instance, Finished, lambda e: e.request_id == name)
    rig.forget(name, instance)
    return started, generated


@slow
@ranks((1, 1), (3, 1))
def test_conversations_that_outgrow_hbm_generate_what_no_cache_generates(
    rig: Rig, reference: Reference
) -> None:
    """Conversations in turns, twice the HBM pool and more: all later turns come from DRAM."""
    num_turns, num_tokens = 3, 12
    # Ranks share the machine's cores, and take several times as long.
    num_conversations = 8 if rig.ready["P0"].geometry.tp_size == 1 else 6
    contexts = [words(300 + 7 * number, number) for number in range(num_conversations)]
    hits = []
    for turn in range(num_turns):
        jobs = [Job(list(context), num_tokens) for context in contexts]
        answers = []
        for number, job in enumerate(jobs):
            name = f"turn {turn} of {number}"
            started, generated = run(rig, "P0", job.prompt, num_tokens, name)
            answers.append(generated)
            if turn:
                hits.append(started.cached_tokens / len(job.prompt))
        assert answers == reference.tokens(jobs)
        for number, (context, answer) in enumerate(zip(contexts, answers, strict=True)):
            context += answer + words(20, 100 * turn + number)
    audited = rig.audit("P0")
    assert audited.problems == [] and audited.holders == []
    assert audited.stats.swapped_in_blocks > 10 * num_conversations
    assert min(hits) > 0.8, hits


@slow
@ranks((1, 1), (3, 1), (1, 3))
def test_what_the_receiver_has_in_dram_does_not_travel(rig: Rig, reference: Reference) -> None:
    request, num_tokens = request_bytes(12), 12
    tokens = words(330, 50)
    run(rig, "D0", tokens, 1, "past")
    for number in range(4):  # push it out of D0's HBM
        run(rig, "D0", words(400, 60 + number), 1, f"other {number}")
    before = rig.audit("D0").stats
    _, first = rig.prefill(tokens, request, "split")
    allocated, sent, _ = rig.carry("P0", "D0", tokens, "split", pin=True)
    assert allocated.hit_blocks == 10 and sent.num_blocks == 0
    assert rig.audit("D0").stats.swapped_in_blocks - before.swapped_in_blocks == 10
    rig.decode([*tokens, *first], request, "split", known_tokens=len(tokens))
    started = rig.expect("D0", Started, lambda e: e.request_id == "split")
    assert started.cached_tokens == 320
    generated = first + rig.tokens_until_end("D0", "split")
    assert [generated] == reference.tokens([Job(tokens, num_tokens)])
    rig.forget("split", "P0", "D0")
    rig.assert_clean("P0", "D0")


@slow
@ranks((1, 1), (3, 1), (1, 3))
def test_what_the_source_has_in_dram_is_fetched(rig: Rig, reference: Reference) -> None:
    num_tokens = 12
    tokens = words(330, 80)
    run(rig, "P0", tokens, 1, "known")
    for number in range(4):  # push it out of P0's HBM
        run(rig, "P0", words(400, 90 + number), 1, f"beside {number}")
    before = rig.audit("P0").stats
    _, sent, inserted = rig.carry("P0", "D0", tokens[:320], "fetches", pin=True, is_history=True)
    assert (sent.num_blocks, inserted.num_tokens) == (10, 320)
    assert rig.audit("P0").stats.swapped_in_blocks - before.swapped_in_blocks == 10
    rig.decode(tokens, request_bytes(num_tokens), "fetches", known_tokens=320, num_generated=0)
    started = rig.expect("D0", Started, lambda e: e.request_id == "fetches")
    assert started.cached_tokens == 320
    generated = rig.tokens_until_end("D0", "fetches")
    assert [generated] == reference.tokens([Job(tokens, num_tokens)])
    rig.forget("fetches", "D0")
    rig.assert_clean("P0", "D0")


@slow
@ranks((1, 1))
def test_a_killed_worker_leaves_no_host_memory(rig: Rig) -> None:
    """The tier's memory is private and has no name in any file system."""
    size = DRAM_BLOCKS * BLOCK_BYTES
    rig.start("PD7", engine=SMALL, kv_bytes=NUM_BLOCKS * BLOCK_BYTES, dram_bytes=size)
    pid = rig.pids["PD7"]
    before = set(os.listdir("/dev/shm"))
    assert has_private_memory(pid, size)
    os.kill(pid, signal.SIGKILL)
    assert rig.exit_of(pid) == -signal.SIGKILL
    assert set(os.listdir("/dev/shm")) <= before


def has_private_memory(pid: int, size_bytes: int) -> bool:
    """Whether it has memory of this size, and all such is private and without a name."""
    regions = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    fitting = [r for r in regions if -4096 < _size(r[0]) - size_bytes < 4096]
    return bool(fitting) and all(r[1] == "rw-p" and r[4] == "0" and len(r) == 5 for r in fitting)


@slow
@ranks((1, 1))
def test_a_rank_that_is_killed_in_mid_swap_takes_the_instance_along(rig: Rig) -> None:
    """And with it all host memory: each rank has its own third of the tier."""
    before = set(os.listdir("/dev/shm"))
    few = {"kv_bytes": 18 * BLOCK_BYTES, "dram_bytes": 30 * BLOCK_BYTES}
    rig.start("PD9", engine=SMALL, tp=3, **few)
    pid = rig.pids["PD9"]
    children = psutil.Process(pid).children()
    members = [child for child in children if "tracker" not in " ".join(child.cmdline())]
    assert len(members) == 3
    assert all(has_private_memory(member.pid, 10 * BLOCK_BYTES) for member in members)
    tokens = words(330, 110)
    run(rig, "PD9", tokens, 1, "past")
    # Pushes it out of HBM, and leaves empty blocks behind.
    rig.whole("PD9", words(400, 111), request_bytes(1), "other")
    for _ in range(3):  # turns of the loop: the ranks are told of the end by a step without tokens
        rig.assert_clean("PD9")
    members[1].suspend()  # its part of the copy cannot end
    rig.send("PD9", whole_request(tokens, 1, "again"))
    holders = rig.audit("PD9").holders
    assert any(holder.startswith("swap-in for again/1: ") for holder in holders), holders
    members[1].kill()
    assert rig.exit_of(pid) == 1
    until(lambda: not any(map(is_alive, members)), "all ranks are gone", DEADLINE_S)
    until(lambda: set(os.listdir("/dev/shm")) <= before, "/dev/shm is as before", DEADLINE_S)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _size(region: str) -> int:
    begin, end = (int(text, 16) for text in region.split("-"))
    return end - begin


@slow
@ranks((1, 1))
@pytest.mark.parametrize(
    ("dram_bytes", "says"),
    [
        (1 << 50, "mempool.dram_gb: 1048576.00 GiB of host memory asked for"),
        (1 << 20, f"mempool.dram_gb: {1 << 20} bytes do not hold one block of {BLOCK_BYTES}"),
    ],
)
def test_memory_that_cannot_be_had_ends_the_start_in_one_line(
    rig: Rig, dram_bytes: int, says: str
) -> None:
    spec = rig.spec("PD8", engine=SMALL, kv_bytes=NUM_BLOCKS * BLOCK_BYTES, dram_bytes=dram_bytes)
    pid = rig.fork(spec)
    message = rig.expect("PD8", StartFailed).message
    assert message.startswith(says) and "\n" not in message
    assert rig.exit_of(pid) == 2
