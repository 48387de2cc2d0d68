"""What comes from P waits at D for room: in order, for a while, and with room for what follows."""

from __future__ import annotations

import msgspec
import pytest

from memserve.messages import Allocate, Allocated, Cancel, Commit, Refused
from memserve.types import Direction, RequestId
from tests.contract.link_rig import geometry
from tests.contract.transfer_rig import Node, allocate, prompt

A, B = RequestId("a"), RequestId("b")
BUSY = RequestId("busy")
PATIENCE_S = 5.0
BLOCK_BYTES = geometry().block_bytes


@pytest.fixture
def node() -> Node:
    """16 blocks of 4 tokens: one is vLLM's null block, one kept for requests that run."""
    return Node("D0")


def ask(request_id: RequestId, expected_tokens: int = 0) -> Allocate:
    """A reservation that may wait."""
    command = allocate(request_id)
    return msgspec.structs.replace(command, patience_s=PATIENCE_S, expected_tokens=expected_tokens)


def cancel(request_id: RequestId) -> Cancel:
    return Cancel(epoch=1, transfer_id=ask(request_id).transfer_id)


def commit(request_id: RequestId, num_blocks: int) -> Commit:
    """So many blocks were written."""
    transfer_id = ask(request_id).transfer_id
    return Commit(epoch=1, transfer_id=transfer_id, size_bytes=num_blocks * BLOCK_BYTES, pin=True)


def wait_behind_a_busy_engine(node: Node, *requests: tuple[RequestId, int]) -> None:
    """Requests with so many blocks ask, while another one runs that leaves one block."""
    node.compute(BUSY, prompt(52, seed=9))
    for request_id, num_blocks in requests:
        node.transfers.allocate(ask(request_id), prompt(4 * num_blocks, seed=num_blocks))
    assert node.take() == []


def allocated(node: Node) -> list[str]:
    """Whose reservations were made since the last call."""
    events = node.take()
    assert all(isinstance(event, Allocated) for event in events)
    return [event.transfer_id.split("/")[0] for event in events if isinstance(event, Allocated)]


def test_it_waits_until_there_is_room(node: Node) -> None:
    wait_behind_a_busy_engine(node, (A, 3))
    node.transfers.reserve_waiting(engine_starves=False)
    assert node.take() == [] and node.mempool.holders() == []
    node.engine.finish(BUSY)
    node.transfers.reserve_waiting(engine_starves=False)
    event = node.only(Allocated)
    assert len(event.block_ids) == 3
    node.transfers.commit(commit(A, 3))
    node.take()
    node.abort(A)
    assert node.is_idle()


def test_what_came_meanwhile_is_a_hit(node: Node) -> None:
    wait_behind_a_busy_engine(node, (A, 3))
    node.engine.finish(BUSY)
    node.compute(B, prompt(12, seed=3))
    node.end(B, prompt(12, seed=3), hold=False)
    node.transfers.reserve_waiting(engine_starves=False)
    event = node.only(Allocated)
    assert (event.hit_blocks, event.block_ids) == (3, [])


def test_nobody_overtakes(node: Node) -> None:
    wait_behind_a_busy_engine(node, (A, 6), (B, 1))
    node.transfers.reserve_waiting(engine_starves=False)
    assert node.take() == []  # B would have room
    node.engine.finish(BUSY)
    node.transfers.reserve_waiting(engine_starves=False)
    assert allocated(node) == ["a", "b"]


def test_patience_ends(node: Node) -> None:
    wait_behind_a_busy_engine(node, (A, 3), (B, 1))
    assert node.transfers.next_deadline() == node.clock() + PATIENCE_S
    node.clock.now_s += PATIENCE_S
    node.transfers.expire()
    first, second = node.take()
    assert isinstance(first, Refused) and isinstance(second, Refused)
    assert first.reason == "no room within 5 s"
    assert node.transfers.next_deadline() is None and node.mempool.holders() == []
    node.engine.finish(BUSY)
    node.transfers.reserve_waiting(engine_starves=False)
    assert node.take() == []


def test_a_cancel_ends_the_waiting_and_lets_the_next_one_come(node: Node) -> None:
    wait_behind_a_busy_engine(node, (A, 3), (B, 1))
    node.transfers.cancel(cancel(A))
    node.transfers.reserve_waiting(engine_starves=False)
    assert allocated(node) == ["b"]


def test_a_second_one_of_a_transfer_that_waits_is_refused(node: Node) -> None:
    wait_behind_a_busy_engine(node, (A, 3))
    node.transfers.allocate(ask(A), prompt(12))
    assert "already" in node.only(Refused).reason


def test_room_is_left_for_what_the_others_generate(node: Node) -> None:
    node.transfers.allocate(ask(A, expected_tokens=16), prompt(24, seed=1))
    assert allocated(node) == ["a"]
    node.transfers.allocate(ask(B, expected_tokens=16), prompt(24, seed=2))
    assert node.take() == []  # 6 of 8 blocks are left, but each may need 3 more
    node.transfers.commit(commit(A, 6))
    node.take()
    node.compute(A, [*prompt(24, seed=1), 1])
    node.transfers.scheduled(A)
    node.transfers.reserve_waiting(engine_starves=False)
    assert node.take() == []  # it runs, and may still need them
    node.abort(A)
    node.transfers.reserve_waiting(engine_starves=False)
    assert allocated(node) == ["b"]


def test_a_cancelled_reservation_needs_no_room_any_more(node: Node) -> None:
    node.transfers.allocate(ask(A, expected_tokens=1000), prompt(4, seed=1))
    node.transfers.allocate(ask(B), prompt(4, seed=2))
    assert allocated(node) == ["a"]
    node.transfers.cancel(cancel(A))
    node.transfers.reserve_waiting(engine_starves=False)
    assert allocated(node) == ["b"]


def test_who_is_alone_may_have_everything(node: Node) -> None:
    node.transfers.allocate(ask(A, expected_tokens=1000), prompt(56))
    assert len(node.only(Allocated).block_ids) == 14


def test_what_can_never_fit_is_refused_at_once(node: Node) -> None:
    node.transfers.allocate(ask(A), prompt(64))
    assert "16 blocks asked for" in node.only(Refused).reason
    assert node.transfers.next_deadline() is None


def test_what_may_not_wait_does_not(node: Node) -> None:
    wait_behind_a_busy_engine(node, (A, 3))
    node.transfers.allocate(allocate(B, Direction.FETCH), prompt(12))
    assert "3 blocks asked for" in node.only(Refused).reason


def test_close_ends_the_waiting(node: Node) -> None:
    wait_behind_a_busy_engine(node, (A, 3))
    node.transfers.close()
    assert node.transfers.next_deadline() is None and node.mempool.holders() == []
