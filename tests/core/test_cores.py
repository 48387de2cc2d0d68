"""Which cores a measurement runs on."""

from __future__ import annotations

import os
from pathlib import Path

from memserve.workers.cores import fastest_cores, one_thread_each, quickest_first


def test_one_hardware_thread_of_each_core_counts(tmp_path: Path) -> None:
    for core in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 2},{core % 2 + 2}\n")
    assert one_thread_each({3, 1, 0, 2}, tmp_path) == [0, 1]
    assert one_thread_each({3, 2}, tmp_path) == [2, 3]
    assert one_thread_each({5, 6}, tmp_path) == [5, 6], "nothing is told of these"


def test_the_quickest_core_is_first_and_one_slow_moment_does_not_count() -> None:
    calls: dict[int, int] = {}

    def measure(core: int) -> float:
        calls[core] = calls.get(core, 0) + 1
        is_disturbed = core == 2 and calls[core] == 1
        return 9.0 if is_disturbed else {1: 3.0, 2: 1.0, 4: 2.0}[core]

    assert quickest_first([1, 2, 4], measure) == (2, 4, 1)


def test_looking_for_the_quickest_core_leaves_the_thread_where_it_may_run() -> None:
    before = os.sched_getaffinity(0)
    found = fastest_cores(len(before) + 1)
    assert set(found) <= before
    assert found
    assert os.sched_getaffinity(0) == before
