"""The cluster manager without processes: who is taken for dead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from memserve.cluster import ClusterManager, ClusterSettings
from memserve.core.vocabulary import Seat
from memserve.messages import Audited, Heartbeat
from memserve.types import InstanceId, InstanceState, Role
from memserve.zygote_process import WorkerProcess
from tests.core.scheduler_rig import STATS

D0 = InstanceId("D0")
TIMEOUT_S = 60.0


class Process:
    """Of one worker."""

    num_kills = 0

    def kill(self) -> None:
        self.num_kills += 1


@pytest.mark.parametrize("beats", [True, False])
def test_what_is_answered_inside_a_step_that_hangs_is_no_sign_of_life(
    tmp_path: Path, beats: bool
) -> None:
    now = 0.0
    nobody: Any = None
    cluster = ClusterManager(
        ClusterSettings(300.0, TIMEOUT_S, 0, 300.0, may_fetch=True),
        {D0: Role.DECODE},
        nobody,
        run_dir=tmp_path,
        environment={},
        members=nobody,
        send=nobody,
        watcher=nobody,
        clock=lambda: now,
    )
    process, seat = Process(), Seat(D0, 0)
    instance = cluster._instances[D0]
    instance.state, instance.process = InstanceState.READY, cast(WorkerProcess, process)
    cluster.on_event(seat, Heartbeat(instance=D0, epoch=0, stats=STATS))
    while now <= TIMEOUT_S:
        now += 1.0
        assert cluster.is_current(seat)  # asked for each event of whatever kind
        cluster.on_event(
            seat, Audited(instance=D0, epoch=0, audit_id=1, stats=STATS, problems=[], holders=[])
        )
        if beats:
            cluster.on_event(seat, Heartbeat(instance=D0, epoch=0, stats=STATS))
        cluster.tick()
    assert process.num_kills == (not beats)
