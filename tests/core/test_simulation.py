"""The simulator: steps and their times, blocks, links, whole clusters, and known formulas."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.config import Config, SchedulerConfig, TransferConfig
from memserve.core.builtin import built_in
from memserve.core.cost_model import CostModel
from memserve.core.mode import parse_mode
from memserve.scheduler_settings import scheduler_settings
from memserve.simulator.clock import EventQueue
from memserve.simulator.engine import EngineLimits, Step
from memserve.simulator.link import SimulatedLink, Ways
from memserve.simulator.setup import MODELS, Options, cluster, costs, load
from memserve.simulator.simulation import Result, Setup, Simulation
from memserve.simulator.synthetic import Shape
from memserve.simulator.worker import Hardware
from memserve.simulator.workload import Call, Piece, key_of
from memserve.types import BlockId, Caching, Geometry, InstanceId, TransferId

BLOCK = 16
BLOCK_BYTES = 1600
MESSAGE_S = 0.001
FRONT_END_S = 0.002
PLAIN = msgspec.structs.replace(
    Config(),
    scheduler=SchedulerConfig(
        policy="prefix",
        max_running=10_000,
        max_waiting=10_000,
        max_queued_s=1e9,
        wait_timeout_s=10_000.0,
    ),
)
CLOCK = functools.partial(next, itertools.count())


class Plain(CostModel):
    """Costs that can be checked by hand: 10 ms a step, 0.1 ms a token, 1 µs a token of context."""

    def __init__(self, bytes_per_s: float = 1e9, launch_s: float = math.inf) -> None:
        super().__init__(built_in(MODELS["smollm2-135m"], "cpu"))
        self._bytes_per_s = bytes_per_s
        self._launch_s = launch_s

    def step_s(
        self,
        chunks: Sequence[tuple[int, int]],
        num_decodes: int = 0,
        context_tokens: int = 0,
        begun_tokens: int = 0,
    ) -> float:
        computed = sum(new for new, _ in chunks) + num_decodes
        return 0.01 + 1e-4 * computed + 1e-6 * context_tokens

    def launch_s(self, num_tokens: int) -> float:
        return self._launch_s

    def transfer_s(self, size_bytes: int, link: str) -> float:
        return 0.001 + size_bytes / self._bytes_per_s if size_bytes else 0.0


def geometry(blocks: int) -> Geometry:
    return Geometry("m", "bfloat16", BLOCK, blocks, 1, BLOCK_BYTES, BLOCK_BYTES, (0,))


def simulate(
    calls: Sequence[Call],
    mode: str = "1PD-CC",
    *,
    blocks: int = 1000,
    caching: Caching | None = None,
    requests: int = 16,
    tokens: int = 512,
    steps_together: int = 64,
    config: Config = PLAIN,
    costs: CostModel | None = None,
    link: str = "shm",
    slowdowns: Mapping[InstanceId, float] | None = None,
) -> Result:
    """Run to the end; nothing may be left anywhere."""
    parsed = parse_mode(mode)
    setup = Setup(
        mode=parsed,
        scheduler=scheduler_settings(config, caching or parsed.default_caching, link),
        hardware=Hardware(geometry(blocks), link, EngineLimits(tokens, requests, steps_together)),
        message_s=MESSAGE_S,
        front_end_s=FRONT_END_S,
        slowdowns=slowdowns or {},
    )
    simulation = Simulation(setup, calls, costs or Plain(), CLOCK)
    result = simulation.run()
    assert simulation.check_idle() == []
    return result


def call(name: str, prompt: int, reply: int, at: float = 0.0) -> Call:
    return Call(name, (Piece(key_of(name), prompt),), Piece(key_of(name, "reply"), reply), at)


def follow_up(before: Call, prompt: int, reply: int, at: float) -> Call:
    pieces = (*before.prompt, before.reply, Piece(key_of(before.session, at), prompt))
    return Call(before.session, pieces, Piece(key_of(before.session, at, "reply"), reply), at)


@st.composite
def loads(draw: st.DrawFn) -> list[Call]:
    """A few sessions that share a beginning, close in time."""
    calls: list[Call] = []
    now = 0.0
    for number in range(draw(st.integers(1, 6))):
        head = Piece(key_of("shared", draw(st.integers(0, 1))), draw(st.integers(1, 200)))
        own = Piece(key_of("own", number), draw(st.integers(1, 100)))
        reply = Piece(key_of("reply", number), draw(st.integers(1, 60)))
        first = Call(f"s{number}", (head, own), reply, now)
        calls.append(first)
        if draw(st.booleans()):
            calls.append(follow_up(first, draw(st.integers(1, 50)), draw(st.integers(1, 30)), now))
        now += draw(st.floats(0, 0.2))
    return calls


# ── one request, by hand ──────────────────────────────────────────────────────────────────────


def test_a_request_takes_its_messages_its_prefill_and_its_steps() -> None:
    result = simulate([call("a", 100, 4)])
    (outcome,) = result.outcomes
    prefill_s = 0.01 + 100e-4
    decode_s = sum(0.01 + 1e-4 + 1e-6 * context for context in (101, 102, 103))
    assert outcome.ttft_s == pytest.approx(FRONT_END_S + 2 * MESSAGE_S + prefill_s)
    assert outcome.jct_s == pytest.approx(FRONT_END_S + 2 * MESSAGE_S + prefill_s + decode_s)
    assert outcome.tpot_s == pytest.approx(decode_s / 3)
    assert result.busy["PD0"] == pytest.approx((prefill_s + decode_s) / result.duration_s)


def test_a_slow_instance_takes_longer_for_its_steps_alone() -> None:
    calls = [call("a", 100, 40)]
    plain = simulate(calls, "1P1D-CC").outcomes[0]
    slow_p = simulate(calls, "1P1D-CC", slowdowns={InstanceId("P0"): 3.0}).outcomes[0]
    slow_d = simulate(calls, "1P1D-CC", slowdowns={InstanceId("D0"): 3.0}).outcomes[0]
    prefill_s = 0.01 + 100e-4
    assert slow_p.ttft_s == pytest.approx(plain.ttft_s + 2 * prefill_s)  # type: ignore[operator]
    assert slow_p.jct_s == pytest.approx(plain.jct_s + 2 * prefill_s)  # type: ignore[operator]
    assert slow_d.ttft_s == plain.ttft_s
    # all that D does besides steps is to wait for the first token, and the prompt's KV
    before_d = plain.ttft_s + 0.001 + 6 * BLOCK_BYTES / 1e9  # type: ignore[operator]
    rest_s = plain.jct_s - before_d  # type: ignore[operator]
    assert slow_d.jct_s == pytest.approx(before_d + 3 * rest_s, rel=0.02)


def test_what_the_scheduler_observes_changes_no_engine() -> None:
    """Its model is corrected by messages and waits; the engines' would drift with it."""
    costs = Plain()
    calls = [call(f"s{n}", 100, 2, at=float(n)) for n in range(50)]
    outcomes = simulate(calls, costs=costs).outcomes
    assert (costs.device_factor, costs.host_factor) == (1.0, 1.0)
    assert outcomes[-1].jct_s == pytest.approx(outcomes[0].jct_s)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    (outcome,) = simulate([call("a", 1100, 1)]).outcomes
    chunks_s = 3 * 0.01 + 1100e-4
    assert outcome.ttft_s == pytest.approx(FRONT_END_S + 2 * MESSAGE_S + chunks_s)


def test_the_next_turn_finds_what_was_computed_and_generated() -> None:
    first = call("a", 100, 60)
    after = follow_up(first, 10, 5, at=5.0)
    one, two = simulate([first, after]).outcomes
    assert one.cached_tokens == 0
    assert two.cached_tokens == (160 - 1) // BLOCK * BLOCK  # the last token was not computed


def test_a_session_waits_for_its_reply_and_others_do_not() -> None:
    first = call("a", 100, 100)
    early = follow_up(first, 10, 5, at=0.01)
    other = call("b", 10, 1, at=0.01)
    one, three, two = simulate([first, early, other]).outcomes
    assert one.ended_at is not None
    assert two.sent_at == pytest.approx(one.ended_at)
    assert three.sent_at == 0.01


def test_prompt_and_reply_travel_where_the_paper_sends_them() -> None:
    """1P1D-CC: the prompt's blocks go to D, those of the reply come back; then only new ones."""
    first = call("a", 100, 60)
    result = simulate([first, follow_up(first, 10, 5, at=5.0)], "1P1D-CC")
    forward, back = 6 + 0, (159 // BLOCK) - 6
    second_forward = 170 // BLOCK - 159 // BLOCK
    assert result.traffic.bytes["forward"] == (forward + second_forward) * BLOCK_BYTES
    assert result.traffic.bytes["back"] == (back + (174 // BLOCK - 170 // BLOCK)) * BLOCK_BYTES
    assert result.outcomes[1].cached_tokens == 144


def test_what_another_instance_holds_is_fetched() -> None:
    """The two instances take turns: the second one has nothing of the first turn."""
    first = call("a", 100, 600)
    calls = [first, follow_up(first, 10, 5, at=15.0)]
    never, always = (
        simulate(
            calls,
            "2PD-CC",
            config=Config(scheduler=SchedulerConfig(policy="round_robin", fetch=fetch)),
        )
        for fetch in ("never", "always")
    )
    assert never.outcomes[1].cached_tokens == 0
    assert always.outcomes[1].cached_tokens == 688
    assert "fetch" not in never.traffic.transfers
    assert always.traffic.transfers["fetch"] == 1
    assert always.outcomes[1].ttft_s < never.outcomes[1].ttft_s  # type: ignore[operator]


def test_at_the_decode_level_nothing_is_fetched() -> None:
    """The reply's KV is on D alone, and stays there: the levels are there to be compared."""
    first = call("a", 100, 600)
    calls = [first, follow_up(first, 10, 5, at=15.0)]
    result = simulate(calls, "1P1D-CC", caching=Caching.DECODE, config=Config())
    assert result.outcomes[1].cached_tokens == 96
    assert "fetch" not in result.traffic.transfers


@pytest.mark.parametrize(
    ("caching", "cached", "forwarded"),
    [
        (Caching.NONE, 0, 6 + 10),
        (Caching.PREFILL, 96, 6 + 10),
        (Caching.DECODE, 96, 6 + 1),
        (Caching.FULL, 144, 6 + 1),
    ],
)
def test_caching_levels(caching: Caching, cached: int, forwarded: int) -> None:
    first = call("a", 100, 60)
    calls = [first, follow_up(first, 10, 5, at=5.0)]
    result = simulate(calls, "1P1D-CC", caching=caching)
    assert result.outcomes[1].cached_tokens == cached
    assert result.traffic.bytes["forward"] == forwarded * BLOCK_BYTES


# ── batches and blocks ────────────────────────────────────────────────────────────────────────


@settings(max_examples=25, deadline=None)
@given(loads(), st.sampled_from(["1PD-CC", "1P1D-CC", "1P1D"]))
def test_taking_steps_together_changes_no_time(calls: list[Call], mode: str) -> None:
    together = simulate(calls, mode)
    apart = simulate(calls, mode, steps_together=1)
    for one, other in zip(together.outcomes, apart.outcomes, strict=True):
        assert one.ttft_s == pytest.approx(other.ttft_s)
        assert one.jct_s == pytest.approx(other.jct_s)
        assert one.cached_tokens == other.cached_tokens


@settings(max_examples=40, deadline=None)
@given(
    loads(),
    st.sampled_from(["1PD", "2PD-CC", "1P1D", "2P1D-CC", "1P2D-CC", "1P1D+1PD-CC"]),
    st.sampled_from([None, *Caching]),
    st.integers(30, 60),
    st.integers(1, 4),
    st.sampled_from([PLAIN, Config()]),
)
def test_every_request_ends_and_nothing_is_left(
    calls: list[Call],
    mode: str,
    caching: Caching | None,
    blocks: int,
    requests: int,
    config: Config,
) -> None:
    """Also when pools are so small that requests are put back and reservations refused."""
    result = simulate(
        calls, mode, caching=caching, blocks=blocks, requests=requests, tokens=64, config=config
    )
    assert len(result.outcomes) == len(calls)
    for outcome in result.outcomes:
        assert outcome.error is None
        assert outcome.ttft_s is not None and outcome.jct_s is not None
        assert 0 < outcome.ttft_s <= outcome.jct_s
        assert 0 <= outcome.cached_tokens < outcome.prompt_tokens
        if (caching or parse_mode(mode).default_caching) is Caching.NONE:
            assert outcome.cached_tokens == 0


def test_a_pool_too_small_for_all_puts_the_youngest_back() -> None:
    calls = [call(f"c{n}", 64, 200) for n in range(4)]
    result = simulate(calls, blocks=30)
    assert result.num_preempted > 0
    ends = [outcome.ended_at for outcome in result.outcomes]
    assert ends[0] == min(ends)  # type: ignore[type-var]


def test_a_full_decode_instance_computes_no_prompt_again() -> None:
    calls = [call(f"c{n}", 4 * BLOCK, 3 * BLOCK, n / 100) for n in range(24)]
    result = simulate(calls, "1P1D-CC", blocks=16)  # D has room for two of them
    assert result.traffic.transfers["forward"] == len(calls)
    assert result.num_preempted == 0


def test_a_transfer_that_takes_too_long_is_abandoned() -> None:
    """D computes the prompt itself, and the request ends when the link is quiet."""
    config = Config(transfer=TransferConfig(reservation_s=3.0), scheduler=PLAIN.scheduler)
    (outcome,) = simulate(
        [call("a", 100, 4)], "1P1D-CC", config=config, costs=Plain(bytes_per_s=100), link="ipc"
    ).outcomes
    assert outcome.error is None
    assert 3.0 < (outcome.jct_s or 0) < 3.0 + 0.1


def test_a_full_queue_refuses_calls_and_the_run_goes_on() -> None:
    scheduler = msgspec.structs.replace(PLAIN.scheduler, max_waiting=1, max_running=1)
    config = msgspec.structs.replace(PLAIN, scheduler=scheduler)
    result = simulate([call(name, 100, 4) for name in "abc"], config=config)
    assert [outcome.error is None for outcome in result.outcomes] == [True, True, False]
    assert "max_waiting" in (result.outcomes[2].error or "")


def test_a_full_batch_makes_others_wait() -> None:
    calls = [call(f"c{n}", 10, 50) for n in range(3)]
    alone = simulate(calls, requests=1).outcomes
    assert alone[1].first_token_at is not None
    assert alone[0].ended_at is not None
    assert alone[1].first_token_at > alone[0].ended_at
    together = simulate(calls, requests=3).outcomes
    assert together[2].first_token_at is not None
    assert together[0].ended_at is not None
    assert together[2].first_token_at < together[0].ended_at


def test_a_request_larger_than_the_pool_fails_alone() -> None:
    big, small = simulate([call("big", 400, 200), call("small", 10, 2)], blocks=30).outcomes
    assert big.error is not None and "larger than the pool" in big.error
    assert small.error is None


def test_a_request_for_which_the_queue_is_full_fails_alone() -> None:
    narrow = msgspec.structs.replace(
        PLAIN, scheduler=msgspec.structs.replace(PLAIN.scheduler, max_running=1, max_waiting=1)
    )
    served, waiting, refused = simulate(
        [call(f"c{n}", 10, 50) for n in range(3)], config=narrow
    ).outcomes
    assert served.error is None and waiting.error is None
    assert refused.error is not None and "waiting already" in refused.error


def test_two_runs_are_the_same() -> None:
    options = Options(mode="2P2D-CC", requests=60, rate=20.0, blocks=2000,
                      synthetic=Shape(documents=3, document_tokens=500))  # fmt: skip
    outcomes = []
    for _ in range(2):
        model = costs(options)
        calls = load(options)
        simulation = Simulation(cluster(options, Config(), model, calls), calls, model, CLOCK)
        outcomes.append(simulation.run().outcomes)
    assert outcomes[0] == outcomes[1]


# ── against a formula ─────────────────────────────────────────────────────────────────────────


def test_one_server_with_poisson_arrivals_waits_as_queueing_theory_says() -> None:
    """M/D/1: mean wait = load · service / 2(1 − load). One request at a time, one step each."""
    rng = random.Random(5)
    service_s = 0.01 + 100e-4
    load_factor = 0.7
    now = 0.0
    calls = []
    for number in range(6000):
        now += rng.expovariate(load_factor / service_s)
        calls.append(call(f"c{number}", 100, 1, now))
    outcomes = simulate(calls, "1PD", requests=1, tokens=100).outcomes
    fixed_s = FRONT_END_S + 2 * MESSAGE_S + service_s
    waits = [outcome.ttft_s - fixed_s for outcome in outcomes if outcome.ttft_s is not None]
    expected = load_factor * service_s / (2 * (1 - load_factor))
    assert sum(waits) / len(waits) == pytest.approx(expected, rel=0.1)


# ── links ─────────────────────────────────────────────────────────────────────────────────────


def test_what_goes_to_one_instance_takes_turns() -> None:
    queue = EventQueue()
    ended: list[tuple[float, str]] = []
    one, two, target, elsewhere = Ways(), Ways(), Ways(), Ways()

    def link(source: Ways, to: Ways) -> SimulatedLink:
        made: list[SimulatedLink] = []

        def wake() -> None:
            ended.extend((queue.now(), c.transfer_id) for c in made[0].poll())

        made.append(SimulatedLink("shm", 100, lambda size, _: size / 1000, source, to, queue, wake))
        return made[0]

    blocks = [BlockId(n) for n in range(10)]
    link(one, target).send(TransferId("a"), blocks, blocks)
    link(two, target).send(TransferId("b"), blocks[:5], blocks[:5])
    link(two, elsewhere).send(TransferId("c"), blocks[:1], blocks[:1])
    queue.run()
    assert ended == [(1.0, "a"), (1.5, "b"), (1.6, "c")]


def test_only_links_that_copy_themselves_keep_the_sender_from_computing() -> None:
    """P sends the first prompt's KV, which takes 11 ms, while a second prompt waits: 20 ms."""
    calls = [call("a", 100, 2), call("b", 100, 2)]
    copying, beside = (
        simulate(calls, "1P1D-CC", tokens=100, costs=Plain(bytes_per_s=960_000), link=link).outcomes
        for link in ("shm", "ipc")
    )
    second_after = [(two.ttft_s or 0) - (one.ttft_s or 0) for one, two in (copying, beside)]
    assert second_after == pytest.approx([0.011 + 0.02, 0.02])
    # the other kind of link has ended as early, which is noticed after the step that runs then
    first_ends = [(one.jct_s or 0) - (one.ttft_s or 0) for one, _ in (copying, beside)]
    assert first_ends[1] - first_ends[0] == pytest.approx(0.02 - 0.011)


def test_what_ended_is_noticed_as_soon_as_the_step_is_launched() -> None:
    """P's next step takes 20 ms; the KV, 11 ms, has left when it is launched after 15 of them."""
    calls = [call("a", 100, 2), call("b", 100, 2)]
    at_end, late, early = (
        simulate(calls, "1P1D-CC", tokens=100, link="ipc", costs=Plain(960_000, seconds)).outcomes
        for seconds in (math.inf, 0.015, 0.005)
    )
    assert at_end[0].ttft_s == late[0].ttft_s == early[0].ttft_s
    first_ends = [one.jct_s or 0 for one, _ in (at_end, late, early)]
    assert first_ends[0] - first_ends[1] == pytest.approx(0.02 - 0.015)
    assert first_ends[0] - first_ends[2] == pytest.approx(0.02 - 0.011)


@pytest.mark.parametrize(
    ("now", "end", "served"),
    [(0.002, 0.01, 0.005), (0.012, 0.02, 0.015), (0.017, 0.02, 0.017), (0.02, 0.02, 0.02)],
)
def test_a_command_ends_a_run_of_steps_and_is_served_inside(
    now: float, end: float, served: float
) -> None:
    """Three steps of 10 ms, each launched in half of that."""
    step = Step([], [], num_steps=3, begun=0.0, first_s=0.01, launch_s=0.005)
    step.cut(now)
    assert (step.end, step.served_at(now)) == pytest.approx((end, served))


def test_a_cancelled_transfer_ends_with_an_error() -> None:
    queue = EventQueue()
    link = SimulatedLink("shm", 100, lambda size, _: 1.0, Ways(), Ways(), queue, lambda: None)
    link.send(TransferId("a"), [BlockId(1)], [BlockId(1)])
    link.cancel(TransferId("a"))
    (completion,) = link.poll()
    assert (completion.error, completion.size_bytes) == ("cancelled", 0)


def test_events_of_one_moment_keep_their_order() -> None:
    queue = EventQueue()
    seen: list[str] = []
    queue.at(2.0, lambda: seen.append("late"))
    queue.at(1.0, lambda: queue.after(1.0, lambda: seen.append("later")))
    queue.at(1.0, lambda: queue.at(0.0, lambda: seen.append("past is now")))
    queue.run()
    assert seen == ["past is now", "late", "later"]
    assert queue.num_done == 5
