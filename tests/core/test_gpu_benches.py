"""What the scripts for GPUs make of their measurements: a mistake there costs a machine's time."""

from __future__ import annotations

import math
import os

import pytest

from bench import _cuda_processes, gpu_kill, gpu_vs_vllm, handoff_latency, swap_vs_tpot


def burst(server: str, number: int, tpot_s: float, steady_s: float) -> gpu_vs_vllm.Burst:
    return gpu_vs_vllm.Burst(server, 8, number, 0.1, tpot_s, steady_s, 1000.0, 0.001)


def test_the_steady_period_counts_only_while_all_decode() -> None:
    first, second = [0.0, 1.0, 2.0, 3.0, 4.0], [1.0, 1.5, 2.0, 2.5, 3.0]
    # From 1.0 to 3.0: two tokens of the first, four of the second.
    assert gpu_vs_vllm.steady_period([first, second]) == pytest.approx(2.0 / 3)
    assert math.isnan(gpu_vs_vllm.steady_period([[0.0, 1.0], [2.0, 3.0]]))


def test_ratios_are_taken_within_a_round_and_what_is_not_known_is_left_out() -> None:
    metrics, rows = gpu_vs_vllm.summary(
        [
            burst("memserve", 0, 0.005, math.nan),
            burst("vllm", 0, 0.004, 0.004),
            burst("vllm", 1, 0.010, 0.010),
            burst("memserve", 1, 0.010, 0.011),
            burst("memserve", 2, 0.100, 0.100),  # the other one was not asked any more
        ]
    )
    assert metrics["tpot_ratio_at_8_least"] == 1.0 and metrics["tpot_ratio_at_8_most"] == 1.25
    assert metrics["steady_ratio_at_8"] == metrics["steady_ratio_at_8_most"] == 1.1
    assert [row["server"] for row in rows] == ["memserve", "vllm"]


def test_a_phase_is_compared_with_its_neighbours() -> None:
    phase = swap_vs_tpot.Phase
    metrics, rows = swap_vs_tpot.summary(
        [
            phase("in", decodes=False, seconds=1.0, steps=9, in_bytes=36e9, moving_steps=9),
            phase("nothing", seconds=10.0, steps=10),
            phase("out", True, 16.5, 10, 3.3, moving_steps=5, out_bytes=16.5 * 45e9),
            phase("nothing", seconds=20.0, steps=10),
            phase("both", True, 20.0, 10, 2.0, out_bytes=20 * 27e9, in_bytes=20 * 15e9),
            phase("nothing", seconds=20.0, steps=10, error="the requests have ended"),
        ],
        {"out": 50e9, "in": 40e9, "both": 30e9},
    )
    assert [row["variant"] for row in rows] == ["in alone", "nothing", "out", "both"]
    assert metrics["in alone: in_of_plain"] == 0.9
    assert metrics["out: tpot_ratio"] == pytest.approx(1.1)
    assert metrics["out: out_of_plain"] == 0.9
    assert metrics["out: longest_step_to_tpot"] == 2.0
    assert metrics["out: moving"] == 0.5
    assert metrics["both: out_of_plain"] == 0.9
    assert metrics["both: moved_GB"] == pytest.approx(840.0)
    assert "both: tpot_ratio" not in metrics, "its neighbour failed"


def test_silence_reaches_to_both_ends() -> None:
    load = object.__new__(gpu_kill.Load)
    load.arrivals = [0.5, 1.0, 1.25, 4.0]
    assert load.longest_silence(1.0, 3.0) == 1.75
    assert load.longest_silence(0.0, 1.1) == 0.5
    assert load.longest_silence(2.0, 3.0) == 1.0


def test_a_check_that_sees_no_worker_use_a_gpu_says_so() -> None:
    found, _ = _cuda_processes.faults(os.getpid(), workers=[os.getpid()])
    assert found == ["no worker shows that it uses a GPU: the check sees nothing here"]


def test_ways_to_serve_are_compared_by_their_medians() -> None:
    def way(name: str, *sent_s: float) -> handoff_latency.Variant:
        samples = [handoff_latency.Sample(s, 0.001, 0.002, 0.003, s + 0.005, 0.004) for s in sent_s]
        return handoff_latency.Variant(name, samples)

    both = [way("inside", 0.001, 0.002, 0.009), way("between", 0.004, 0.008, 0.001)]
    metrics = handoff_latency.metrics(both)
    assert (metrics["sent_ratio"], metrics["tpot_ratio"]) == (0.5, 1.0)
    assert metrics["inside/gap_p50_ms"] == 7.0
    assert handoff_latency.row(both[0])["sent"] == "2.0 8.9"
    alone = handoff_latency.metrics([both[0], way("between")])
    assert "sent_ratio" not in alone and "between/gap_p50_ms" not in alone
