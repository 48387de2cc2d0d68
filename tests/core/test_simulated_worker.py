"""One simulated instance, told what to do as the scheduler would: who gets the blocks there."""

from __future__ import annotations

from functools import partial

import msgspec

from memserve.core.builtin import built_in
from memserve.core.cost_model import CostModel
from memserve.core.vocabulary import Seat
from memserve.messages import (
    Abort,
    Allocate,
    Allocated,
    AnyCommand,
    AnyEvent,
    Cancel,
    Decode,
    Finished,
    Started,
)
from memserve.simulator.clock import EventQueue
from memserve.simulator.engine import EngineLimits
from memserve.simulator.setup import MODELS
from memserve.simulator.worker import Hardware, SimulatedRequest, SimulatedWorker
from memserve.simulator.workload import Piece, key_of, tokens_of
from memserve.types import Geometry, InstanceId, Namespace, RequestId, TransferId

BLOCK = 16
NUM_BLOCKS = 20
SEAT = Seat(InstanceId("D0"), 1)
FIRST, BIG, NEXT = RequestId("first"), RequestId("big"), RequestId("next")


class Rig:
    """A worker without peers, and what it says of reservations, starts and ends."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._queue = EventQueue()
        geometry = Geometry("m", "bfloat16", BLOCK, NUM_BLOCKS, 1, 64, 64, (0,))
        self.worker = SimulatedWorker(
            SEAT,
            Hardware(geometry, "shm", EngineLimits(batched_tokens=512, requests=16)),
            CostModel(built_in(MODELS["smollm2-135m"], "cpu")),
            self._queue,
            self._hear,
            peers={},
        )

    def _hear(self, event: AnyEvent) -> None:
        match event:
            case Allocated():
                self.said.append(f"{event.transfer_id} allocated")
            case Started() | Finished():
                self.said.append(f"{event.request_id} {type(event).__name__.lower()}")

    def run(self, *commands: AnyCommand) -> None:
        """A command every minute: long after the answers to the one before."""
        for number, command in enumerate(commands):
            self._queue.at(60.0 * number, partial(self.worker.deliver, command))
        self._queue.run()


def allocate(request_id: RequestId, num_blocks: int) -> Allocate:
    return Allocate(
        epoch=1,
        transfer_id=TransferId(request_id),
        request_id=request_id,
        known_tokens=0,
        token_ids=tokens_of(Piece(key_of(request_id), num_blocks * BLOCK)),
        namespace=Namespace(),
        is_private=False,
        deadline_s=3600.0,
        patience_s=3600.0,
    )


def decode(request_id: RequestId, num_blocks: int, *, hold: bool = False) -> Decode:
    """One token, after a prompt that leaves no room for it to speak of in so many blocks."""
    return Decode(
        epoch=1,
        request_id=request_id,
        attempt=1,
        request=msgspec.msgpack.encode(SimulatedRequest(Piece(key_of("reply"), 1))),
        known_tokens=0,
        token_ids=tokens_of(Piece(key_of(request_id), num_blocks * BLOCK - 1)),
        num_generated=0,
        hold=hold,
        is_private=False,
    )


def forget(request_id: RequestId) -> Abort:
    return Abort(epoch=1, request_id=request_id)


def test_who_waits_in_the_engine_comes_before_who_waits_at_the_door() -> None:
    """As in `workers/engine_loop.py`: what is freed while an engine starves is the engine's."""
    rig = Rig()
    rig.run(
        decode(FIRST, 8, hold=True),  # ends, and its KV is pinned
        decode(BIG, 16),  # finds 12 of 20 blocks
        allocate(NEXT, 6),  # would find room
        forget(FIRST),
        Cancel(epoch=1, transfer_id=TransferId(NEXT)),
        forget(NEXT),
        forget(BIG),
    )
    ends = [f"{who} {what}" for who in (FIRST, BIG) for what in ("started", "finished")]
    assert rig.said == [*ends, "next allocated"]
    assert rig.worker.check_idle() == []
