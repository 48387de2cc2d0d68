"""The hub's end of the control channel, over a real socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from memserve.channel import Hub, identity
from memserve.core.vocabulary import Seat
from memserve.messages import AnyEvent, CacheChanged, encode
from memserve.types import InstanceId

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
