"""The hub's end of the control channel, over a real socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from memserve.channel import Hub, identity
from memserve.core.vocabulary import Seat
from memserve.messages import AnyEvent, CacheChanged, Expired, SendSnapshot, encode
from memserve.types import InstanceId, TransferId

SEAT = Seat(InstanceId("P0"), 1)
NUM_EVENTS = 400


@pytest.mark.timeout(60)
async def test_a_flood_of_events_leaves_turns_to_others_and_keeps_its_order(
    tmp_path: Path,
) -> None:
    received: list[int] = []
    turns = 0
    is_complete = asyncio.Event()

    def on_event(seat: Seat, event: AnyEvent) -> None:
        assert seat == SEAT and isinstance(event, CacheChanged)
        received.append(event.sequence)
        if len(received) == NUM_EVENTS:
            is_complete.set()

    async def others() -> None:
        nonlocal turns
        while not is_complete.is_set():
            turns += 1
            await asyncio.sleep(0)

    hub = Hub(tmp_path, on_event)
    hub.open()
    context = zmq.asyncio.Context()
    worker = context.socket(zmq.DEALER)
    worker.setsockopt(zmq.IDENTITY, identity(SEAT))
    worker.connect(hub.address)
    try:
        for sequence in range(NUM_EVENTS):
            event = CacheChanged(instance=SEAT.instance, epoch=1, sequence=sequence, changes=[])
            await worker.send(encode(event))
        serving = asyncio.create_task(hub.serve())
        async with asyncio.timeout(30):
            await asyncio.gather(others(), is_complete.wait())
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    finally:
        worker.close(linger=0)
        context.term()
        await hub.close()
    assert received == list(range(NUM_EVENTS))
    assert turns >= NUM_EVENTS // 16


@pytest.mark.timeout(60)
async def test_what_arrives_while_commands_are_sent_is_not_left_lying(tmp_path: Path) -> None:
    num_received = 0
    has_answered = asyncio.Event()

    def on_event(seat: Seat, event: AnyEvent) -> None:
        nonlocal num_received
        num_received += 1
        has_answered.set()

    hub = Hub(tmp_path, on_event)
    hub.open()
    context = zmq.Context()
    worker = context.socket(zmq.DEALER)
    worker.setsockopt(zmq.IDENTITY, identity(SEAT))
    worker.connect(hub.address)
    answer = encode(Expired(instance=SEAT.instance, epoch=1, transfer_id=TransferId("t")))
    serving = asyncio.create_task(hub.serve())
    try:
        for number in range(1, 301):
            worker.send(answer)
            if number > 1:
                for _ in range(3):  # each may take the signal of the answer
                    hub.send(SEAT, SendSnapshot(epoch=1))
            async with asyncio.timeout(10):
                while num_received < number:
                    has_answered.clear()
                    await has_answered.wait()
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        worker.close(linger=0)
        context.term()
        await hub.close()


async def test_a_worker_that_is_gone_and_a_hub_that_is_closed_harm_nobody(tmp_path: Path) -> None:
    hub = Hub(tmp_path, lambda seat, event: None)
    hub.open()
    hub.send(SEAT, SendSnapshot(epoch=1))
    await hub.close()
    hub.send(SEAT, SendSnapshot(epoch=1))
