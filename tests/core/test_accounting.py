"""The scheduler's books, through real lifecycles: what they charge, what they learn from time."""

from __future__ import annotations

from typing import Any

import pytest

from memserve.accounting import Members, Traffic
from memserve.core.cost_model import BUILT_IN, CostModel
from memserve.core.lifecycle import RequestLifecycle
from memserve.core.loads import Loads, Share
from memserve.core.tokens import Path
from memserve.core.vocabulary import (
    ClientCancelled,
    Fetch,
    InstanceLost,
    Limits,
    Output,
    Plan,
    RequestSpec,
    Seat,
)
from memserve.messages import (
    Allocated,
    Inserted,
    Refused,
    Sent,
    Started,
    TokenOutput,
    Transmit,
    TransmitFailed,
)
from memserve.types import BlockId, InstanceId, Namespace, RequestId, Role, TransferId

P0, P1, D0 = (Seat(InstanceId(name), 1) for name in ("P0", "P1", "D0"))
NUM_TOKENS = 600


def at(seat: Seat) -> dict[str, Any]:
    return {"instance": seat.instance, "epoch": seat.epoch}


class Books:
    """Members with two requests' worth of lifecycles, at times that the test tells."""

    def __init__(self, tp_of: dict[InstanceId, int] | None = None) -> None:
        self.cost = CostModel(BUILT_IN)
        roles = {
            P0.instance: Role.PREFILL,
            P1.instance: Role.PREFILL,
            D0.instance: Role.DECODE,
        }
        self.members = Members(roles, self.cost, 4, 1.5, tp_of)
        for seat in (P0, P1, D0):
            self.members.add(seat, roles[seat.instance], 0.0)

    def request(self, name: str, **plan: Any) -> RequestLifecycle:
        spec = RequestSpec(
            id=RequestId(name),
            prompt_token_ids=list(range(NUM_TOKENS)),
            request=b"",
            max_tokens=8,
            resample=False,
            namespace=Namespace(),
        )
        life = RequestLifecycle(spec, Limits(block_size=16, max_attempts=3, reservation_s=30.0))
        fields = {"first_is_private": False, "decode_is_private": False, "returns": False}
        life.place(Plan(first=P0, decode=D0, **{**fields, **plan}))
        self.members.pending.add(
            spec.id, P0.instance, Path(spec.prompt_token_ids, 16), is_fetched=False
        )
        return life

    def charge(self, life: RequestLifecycle, now: float) -> None:
        self.members.charge(life, NUM_TOKENS, self.cost.exec_s(NUM_TOKENS), now)
        self.members.loads.check_integrity()

    def first_token(self, life: RequestLifecycle) -> None:
        started = {"instance": P0.instance, "epoch": 1, "request_id": life.spec.id}
        life.step(Started(**started, attempt=1, cached_tokens=0))  # type: ignore[arg-type]
        life.step(Output(P0.instance, TokenOutput(life.spec.id, 1, [7], "length")))

    def queue_s(self, seat: Seat, now: float) -> float:
        return float(self.members.loads.queue_s(now)[self.members.loads.slots[seat.instance]])

    def counts(self) -> list[int]:
        return [int(count) for count in self.members.loads.num_requests]


def test_a_request_is_charged_where_it_is_and_nowhere_after_it() -> None:
    books = Books()
    life = books.request("a")
    books.charge(life, 0.0)
    assert books.counts() == [1, 0, 1] and len(books.members.pending) == 1
    assert books.queue_s(P0, 0.0) == pytest.approx(books.cost.exec_s(NUM_TOKENS))
    books.first_token(life)
    books.charge(life, 1.0)
    assert books.counts() == [0, 0, 1] and books.queue_s(P0, 1.0) == 0.0
    assert len(books.members.pending) == 0
    life.step(ClientCancelled())
    books.charge(life, 2.0)
    assert books.counts() == [0, 0, 0]


def test_a_fetch_is_work_that_waits_at_the_receiver_only() -> None:
    books = Books()
    life = books.request("a", fetch=Fetch(P1, 64, 1.0))
    books.charge(life, 0.0)
    assert books.counts() == [1, 0, 1] and books.queue_s(P0, 0.0) > 0.0


def test_a_prompt_that_d_has_to_compute_is_work_on_d() -> None:
    books = Books()
    life = books.request("a")
    books.charge(life, 0.0)
    books.first_token(life)
    life.step(Refused(**at(D0), transfer_id=TransferId("a/forward/1"), reason="no room"))
    books.charge(life, 1.0)
    assert books.queue_s(D0, 1.0) == pytest.approx(books.cost.exec_s(NUM_TOKENS), rel=0.01)
    assert books.counts() == [0, 0, 1]
    life.step(Output(D0.instance, TokenOutput(life.spec.id, 1, [8], None)))
    books.charge(life, 2.0)
    assert books.queue_s(D0, 2.0) == 0.0 and books.counts() == [0, 0, 1]


def test_a_lost_instance_takes_its_charges_along() -> None:
    books = Books()
    life = books.request("a")
    books.charge(life, 0.0)
    books.members.remove(P0)
    life.step(InstanceLost(P0))
    books.charge(life, 1.0)
    assert books.counts() == [0, 0, 0] and len(books.members.pending) == 0
    books.members.add(Seat(P0.instance, 2), Role.PREFILL, 1.0)
    assert books.counts() == [0, 0, 0] and books.queue_s(P0, 1.0) == 0.0


def test_enough_is_enough_and_room_comes_back() -> None:
    books = Books()
    lives = [books.request(name) for name in "ab"]
    books.charge(lives[0], 0.0)
    assert not books.members.is_waited_for
    books.charge(lives[1], 0.0)  # two prompts are more than the bound; P1 has none
    assert books.members.loads.is_busy.tolist() == [True, False, False]
    assert books.members.loads.is_open.all(), "four requests may be there"
    assert books.members.free_roles == {Role.PREFILL, Role.DECODE}
    books.members.remove(P1)
    assert books.members.free_roles == {Role.DECODE}
    lives[0].step(ClientCancelled())
    books.charge(lives[0], 1.0)
    assert not books.members.is_waited_for
    assert books.members.free_roles == {Role.PREFILL, Role.DECODE}


def factors(cost: CostModel) -> tuple[float, float]:
    return cost.device_factor, cost.host_factor


def test_a_prefill_that_ran_alone_corrects_the_cost_model() -> None:
    books = Books()
    life = books.request("a")
    books.charge(life, 0.0)
    books.first_token(life)
    books.charge(life, 2 * books.cost.exec_s(NUM_TOKENS))
    assert books.cost.exec_s(NUM_TOKENS) > CostModel(BUILT_IN).exec_s(NUM_TOKENS)


def test_prompts_are_charged_and_observed_at_each_instances_own_degree() -> None:
    books = Books({P0.instance: 2, D0.instance: 4})
    life = books.request("a")
    books.charge(life, 0.0)
    books.first_token(life)
    books.charge(life, 99.0)
    assert factors(books.cost) == (1.0, 1.0), "nothing is said of one rank"
    assert max(factors(books.members.loads.cost_of(P0.instance))) > 1.0
    life.step(Refused(**at(D0), transfer_id=TransferId("a/forward/1"), reason="no room"))
    books.charge(life, 99.0)
    assert books.queue_s(D0, 99.0) == CostModel(BUILT_IN, 4).exec_s(NUM_TOKENS)


@pytest.mark.parametrize("case", ["beside another", "fetched", "cancelled"])
def test_other_prefills_say_nothing_about_costs(case: str) -> None:
    books = Books()
    life = books.request("a", fetch=Fetch(P1, 64, 1.0) if case == "fetched" else None)
    books.charge(life, 0.0)
    if case == "beside another":
        books.charge(books.request("b"), 0.1)
    if case == "fetched":  # P holds it all by now
        about: dict[str, Any] = {"instance": P0.instance, "epoch": 1}
        about["transfer_id"] = TransferId("a/fetch/1")
        life.step(Allocated(**about, hit_blocks=4, block_ids=[]))
        life.step(Inserted(**about, num_tokens=64))
    if case == "cancelled":
        life.step(ClientCancelled())
    else:
        books.first_token(life)
        assert life.is_prompt_computed
    books.charge(life, 99.0)
    assert factors(books.cost) == (1.0, 1.0)


def test_a_prompt_that_d_computes_again_says_nothing_about_costs() -> None:
    """What D holds of it is not known: P's cached tokens are P's."""
    books = Books()
    life = books.request("a")
    books.charge(life, 0.0)
    books.first_token(life)
    life.step(Refused(**at(D0), transfer_id=TransferId("a/forward/1"), reason="no room"))
    books.charge(life, 1.0)
    before = factors(books.cost)
    life.step(Output(D0.instance, TokenOutput(life.spec.id, 1, [8], None)))
    books.charge(life, 99.0)
    assert factors(books.cost) == before


def test_what_is_under_way_counts_until_it_is_answered_or_its_sender_is_lost() -> None:
    books = Books()
    loads = books.members.loads
    traffic = Traffic(loads)
    ids = [TransferId(f"r{number}/forward/1") for number in range(3)]
    for transfer_id in ids:
        command = Transmit(
            epoch=1,
            transfer_id=transfer_id,
            request_id=RequestId("r"),
            peer=D0.instance,
            first_block=0,
            block_ids=[BlockId(1)],
        )
        traffic.ordered(P0.instance, command, 100)
    assert (loads.sending_bytes[0], loads.receiving_bytes[2]) == (300, 300)
    about = {"instance": P0.instance, "epoch": 1}
    sent = Sent(**about, transfer_id=ids[0], num_blocks=1, size_bytes=100, seconds=0.1)  # type: ignore[arg-type]
    traffic.answered(sent)
    traffic.answered(sent)
    traffic.answered(TransmitFailed(**about, transfer_id=ids[1], reason="broken"))  # type: ignore[arg-type]
    assert loads.sending_bytes[0] == 100 and loads.can_send[0]
    traffic.cancelled(D0.instance, ids[2])  # its receiver, which owes nothing
    assert loads.can_send.all()
    traffic.cancelled(P0.instance, ids[2])
    traffic.cancelled(P0.instance, ids[2])
    assert list(loads.can_send) == [False, True, True]
    traffic.lost(P0.instance)
    loads.check_integrity()
    assert not loads.sending_bytes.any() and not loads.receiving_bytes.any()
    assert loads.can_send.all()


def test_steps_are_reckoned_at_each_instances_own_degree() -> None:
    roles = {P0.instance: Role.PREFILL, D0.instance: Role.DECODE}
    loads = Loads(roles, CostModel(BUILT_IN, 2), {P0.instance: 2, D0.instance: 1})
    for instance, tp in ((P0.instance, 2), (D0.instance, 1)):
        loads.start(instance)
        loads.add(instance, Share(1000), 0.0)
        expected = CostModel(BUILT_IN, tp).decode_step_s(1, 1000)
        assert loads.step_s[loads.slots[instance]] == pytest.approx(expected)
