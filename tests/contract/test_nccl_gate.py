"""The gate that keeps threads of NCCL links out of CUDA while one gives a communicator up."""

from __future__ import annotations

import threading

import pytest

from memserve.workers.links import nccl_gate
from memserve.workers.links.nccl_gate import CallGate
from tests.contract.nccl_rig import DEADLINE_S, until


def test_nobody_enters_while_it_is_closed_and_everybody_does_afterwards() -> None:
    gate = CallGate()
    with gate.closed():
        with gate.closed():  # two communicators are given up at once
            assert not gate.enter()
        assert not gate.enter()
    assert gate.enter() and gate.enter()


def test_it_is_closed_when_those_inside_have_left() -> None:
    gate = CallGate()
    assert gate.enter()
    is_closed = threading.Event()

    def close() -> None:
        with gate.closed():
            is_closed.set()

    thread = threading.Thread(target=close)
    thread.start()
    until(lambda: not gate.enter() or gate.leave() is not None, "it should be closing")
    assert not is_closed.is_set()
    gate.leave()
    thread.join(DEADLINE_S)
    assert is_closed.is_set()


def test_one_that_does_not_leave_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_gate, "_LEAVE_S", 0.01)
    gate = CallGate()
    assert gate.enter()
    with gate.closed():
        assert not gate.enter()
