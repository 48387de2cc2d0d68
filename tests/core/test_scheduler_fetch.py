"""The global scheduler and sources of fetches that hang, or are late."""

from __future__ import annotations

import msgspec
import pytest

from memserve.core.policy import Fetching
from memserve.messages import Allocate, Transmit
from memserve.types import InstanceId, RequestId, Role
from tests.core.scheduler_rig import SHAPE, Rig, rig_of


def fetching_rig() -> Rig:
    """Two instances that take turns; PD0 knows a prompt of two blocks."""
    always = {"policy": "round_robin", "fetching": Fetching.ALWAYS}
    rig = rig_of({"PD0": Role.COLOCATED, "PD1": Role.COLOCATED}, freshness="ttl", **always)
    rig.submit("known", length=9)
    rig.run()
    return rig


def transmits(rig: Rig) -> list[str]:
    return [seat.instance for seat, command in rig.sent if isinstance(command, Transmit)]


def test_a_hung_source_delays_one_request_by_its_fetch_s_deadline_and_no_other() -> None:
    rig = fetching_rig()
    rig.hanging.add(InstanceId("PD0"))
    rig.submit("b", length=9)
    rig.run()
    assert transmits(rig) == ["PD0"] and "b" not in rig.ended
    receiver = rig.workers[InstanceId("PD1")]
    (transfer_id,) = receiver.expirable()
    receiver.expire(transfer_id)
    rig.run()
    assert rig.ended[RequestId("b")] == "final"
    assert receiver.expirable() == [transfer_id], "its source may still be writing"
    rig.submit("on PD0", length=3)
    rig.submit("c", length=10)  # PD1's turn, which holds as much by now
    rig.run()
    assert rig.ended[RequestId("c")] == "final" and len(transmits(rig)) == 1
    rig.lose("PD0", returns=False)
    rig.run()
    rig.check_quiet()


def test_who_lacks_something_computes_it_while_the_source_owes_an_answer() -> None:
    rig = fetching_rig()
    rig.hanging.add(InstanceId("PD0"))
    rig.submit("b", length=9)
    rig.run()
    rig.cancel("b")  # before anything was inserted
    rig.submit("on PD0", length=3)
    rig.submit("c", length=9)
    rig.run()
    assert rig.ended[RequestId("c")] == "final" and len(transmits(rig)) == 1
    rig.hanging.clear()  # it goes on, and answers
    rig.run()
    rig.check_quiet()


def test_what_a_fetch_really_took_counts_for_the_next_one() -> None:
    """The cost policy's own fetches, of a model so large that every block is worth one."""
    large = msgspec.structs.replace(SHAPE, num_layers=80, hidden=8192, intermediate=28672)
    roles = {"PD0": Role.COLOCATED, "PD1": Role.COLOCATED}
    rig = rig_of(roles, shape=large, freshness="ttl", max_running=1)
    rig.submit("known", length=401)
    rig.run()
    rig.submit("beside", length=401)  # where it is known
    while not rig.has_begun("beside"):
        rig.candidates()[0]()
    rig.hanging.add(InstanceId("PD0"))
    rig.submit("fetches", length=401)
    rig.run()
    assert transmits(rig) == ["PD0"] and "fetches" not in rig.ended
    before = fetch_s(rig, "fetches")
    patience_s = rig.cost.exec_s(400) + 2 * before + 0.1
    assert deadline_s(rig, "fetches") == pytest.approx(patience_s, abs=1e-5)
    rig.now += before + 0.01
    rig.hanging.clear()
    rig.run()
    rig.check_quiet()
    late_s = rig.scheduler._members.loads.fetch_times._sources[0]._last_s[-1]
    assert late_s == pytest.approx(0.01, rel=1e-4)


def deadline_s(rig: Rig, name: str) -> float:
    """What its fetch was given."""
    (command,) = [c for _, c in rig.sent if isinstance(c, Allocate) and c.request_id == name]
    return command.deadline_s


def fetch_s(rig: Rig, name: str) -> float:
    """What was predicted for its fetch."""
    timeline = rig.scheduler.timeline(RequestId(name))
    assert timeline is not None
    (reason,) = [step.detail for step in timeline.steps if step.name == "placed"]
    candidates = reason["candidates"]
    assert isinstance(candidates, list)
    return float(candidates[0]["fetch_s"])
