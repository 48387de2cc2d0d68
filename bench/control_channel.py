"""What a command and its answer cost between the orchestrator and a worker, and a flood of events.

    python -m bench.control_channel [--repeats 1000] [--events 20000] [--out FILE]

The real `Hub`, in uvloop as in the orchestrator, and the real `Port` in another process. Round
trips, from `Hub.send` until the answer is handed on: at once after each other, and each after a
pause of 2 ms in which both processes have fallen asleep, as between the steps of a transfer. Then
events of 300 and 5,000 bytes as fast as one worker can send them, and what the hub's process
computes for each.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from bench._report import Scalar, parser, publish
from memserve.channel import Hub
from memserve.core.vocabulary import Seat
from memserve.messages import (
    AnyEvent,
    Audit,
    Commit,
    Heartbeat,
    Inserted,
    PoolStats,
    Stop,
    TokenOutput,
    Tokens,
    encode,
)
from memserve.types import InstanceId, RequestId, TransferId
from memserve.workers.port import Port
from memserve.workers.sleeps import sleep_exactly

SEAT = Seat(InstanceId("P0"), 1)
ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60.0
PAUSES_S = {"at once": 0.0, "after 2 ms": 0.002}
SIZES = (300, 5000)


class Counter:
    """Counts the hub's events, up to a number that somebody waits for."""

    def __init__(self) -> None:
        self._missing = 0
        self._is_complete = asyncio.Event()

    def expect(self, num_events: int) -> None:
        self._missing = num_events
        self._is_complete.clear()

    def __call__(self, seat: Seat, event: AnyEvent) -> None:
        self._missing -= 1
        if not self._missing:
            self._is_complete.set()

    async def wait(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self._is_complete.wait()


async def round_trips(hub: Hub, counter: Counter, repeats: int, pause_s: float) -> list[float]:
    """Seconds, each."""
    command = Commit(epoch=1, transfer_id=TransferId("r1/forward/1"), size_bytes=1 << 20, pin=True)
    spans = []
    for _ in range(repeats):
        await asyncio.sleep(pause_s)
        counter.expect(1)
        began = time.perf_counter()
        hub.send(SEAT, command)
        await counter.wait()
        spans.append(time.perf_counter() - began)
    return spans


async def flood(hub: Hub, counter: Counter, num_events: int, size: int) -> dict[str, float]:
    """How long so many events take, and the processor time of this process."""
    counter.expect(num_events)
    began, ran = time.perf_counter(), time.process_time()
    hub.send(SEAT, Audit(epoch=num_events, audit_id=size))
    await counter.wait()
    return {"elapsed_s": time.perf_counter() - began, "hub_s": time.process_time() - ran}


async def measure(repeats: int, num_events: int) -> dict[str, list[float] | dict[str, float]]:
    """All of it, with one worker."""
    raw: dict[str, list[float] | dict[str, float]] = {}
    counter = Counter()
    with tempfile.TemporaryDirectory(prefix="channel-") as folder:
        hub = Hub(Path(folder), counter)
        hub.open()
        counter.expect(1)
        serving = asyncio.create_task(hub.serve())
        command = [sys.executable, "-m", "bench.control_channel", "--worker", hub.address]
        worker = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
        try:
            await counter.wait()
            for name, pause_s in PAUSES_S.items():
                raw[f"round trip {name}, s"] = await round_trips(hub, counter, repeats, pause_s)
            for size in SIZES:
                raw[f"flood of {size} bytes"] = await flood(hub, counter, num_events, size)
            hub.send(SEAT, Stop(epoch=1))
            await asyncio.wait_for(worker.wait(), DEADLINE_S)
        finally:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            hub.close()
    return raw


def work(address: str) -> None:
    """The worker: an answer to every `Commit`, and to an `Audit` a flood."""
    sleep_exactly()
    port = Port(address, SEAT.instance, SEAT.epoch)
    port.send(Heartbeat(instance=SEAT.instance, epoch=1, stats=PoolStats(*[0] * 11)))
    while True:
        port.wait(1.0)
        while (command := port.receive()) is not None:
            match command:
                case Commit(transfer_id=name):
                    answer = Inserted(
                        instance=SEAT.instance, epoch=1, transfer_id=name, num_tokens=2048
                    )
                    port.send(answer)
                case Audit(epoch=num_events, audit_id=size):
                    event = event_of(size)
                    for _ in range(num_events):
                        port.send(event)
                case Stop():
                    port.close()
                    return


def event_of(size: int) -> Tokens:
    """One step's tokens, of so many bytes on the wire."""
    output = TokenOutput(RequestId("chatcmpl-0123456789abcdef"), 1, [17], None)

    def made(num_bytes: int) -> Tokens:
        return Tokens(instance=SEAT.instance, epoch=1, outputs=[output], payload=b"x" * num_bytes)

    return made(size - len(encode(made(size))) + size)


def metrics_of(
    raw: dict[str, list[float] | dict[str, float]], num_events: int
) -> dict[str, Scalar]:
    """Medians and 99th percentiles in µs; events a second."""
    metrics: dict[str, Scalar] = {}
    for name, samples in raw.items():
        if isinstance(samples, dict):
            metrics[f"{name}, events/s"] = round(num_events / samples["elapsed_s"])
            metrics[f"{name}, hub's µs each"] = round(samples["hub_s"] / num_events * 1e6, 2)
        else:
            label = name.removesuffix(", s")
            metrics[f"{label}: p50, µs"] = round(statistics.median(samples) * 1e6, 1)
            metrics[f"{label}: p99, µs"] = round(statistics.quantiles(samples, n=100)[98] * 1e6, 1)
    return metrics


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=1000, help="round trips of each kind")
    options.add_argument("--events", type=int, default=20_000, help="in each flood")
    options.add_argument("--worker", metavar="ADDRESS", help="be the worker, and nothing else")
    args = options.parse_args()
    if args.worker is not None:
        work(args.worker)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the orchestrator's
        raw = runner.run(measure(args.repeats, args.events))
    publish(
        "control_channel",
        settings={"repeats": args.repeats, "events": args.events},
        metrics=metrics_of(raw, args.events),
        raw=raw,
        out=args.out,
    )


if __name__ == "__main__":
    main()
