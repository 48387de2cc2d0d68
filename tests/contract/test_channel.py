"""The control channel, over real sockets: the hub in an event loop, and ports that tests drive."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from memserve import channel
from memserve.channel import Hub
from memserve.core.vocabulary import Seat
from memserve.errors import StartError
from memserve.frames import MAX_FRAME_BYTES, FrameSocket, pack
from memserve.messages import (
    Abort,
    AnyCommand,
    AnyEvent,
    CacheChanged,
    Greeting,
    SendSnapshot,
    StartFailed,
    Stop,
    decode_command,
    encode,
)
from memserve.types import InstanceId, RequestId
from memserve.workers import port as port_module
from memserve.workers.port import Port

P0, D0 = Seat(InstanceId("P0"), 1), Seat(InstanceId("D0"), 1)
DEADLINE_S = 30.0
MANY = 4000
MUCH = 2_000_000
"""Bytes: several times what a socket takes before the other end reads."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # pytest's own has too long a path
        yield Path(name)


class Listener:
    """What the hub is told, and waits for more of it."""

    def __init__(self) -> None:
        self.events: list[tuple[Seat, AnyEvent]] = []
        self._changed = asyncio.Event()

    def __call__(self, seat: Seat, event: AnyEvent) -> None:
        self.events.append((seat, event))
        self._changed.set()

    def of(self, seat: Seat) -> list[AnyEvent]:
        return [event for at, event in self.events if at == seat]

    async def until(self, num_events: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.events) < num_events:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def serving(hub: Hub) -> AsyncIterator[None]:
    work = asyncio.create_task(hub.serve())
    try:
        yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        hub.close()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def hub(folder: Path, listener: Listener) -> AsyncIterator[Hub]:
    """One that serves."""
    hub = Hub(folder, listener)
    hub.open()
    async with serving(hub):
        yield hub
    assert os.listdir(folder) == []


@pytest.fixture
def connect(hub: Hub, listener: Listener) -> Iterator[Callable[[Seat], Awaitable[Port]]]:
    """A port that the hub knows of."""
    ports = []

    async def make(seat: Seat) -> Port:
        ports.append(Port(hub.address, seat.instance, seat.epoch))
        num_events = len(listener.events)
        ports[-1].send(event_of(seat))
        await listener.until(num_events + 1)
        listener.events.clear()
        return ports[-1]

    yield make
    for port in ports:
        port.close()


Connect = Callable[[Seat], Awaitable[Port]]


def event_of(seat: Seat, number: int = 0) -> CacheChanged:
    return CacheChanged(instance=seat.instance, epoch=seat.epoch, sequence=number, changes=[])


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """This process may open nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def long_event(seat: Seat, number: int) -> StartFailed:
    return StartFailed(instance=seat.instance, epoch=seat.epoch, message=f"{number:07}" * 20_000)


def command_of(number: int) -> Abort:
    return Abort(epoch=1, request_id=RequestId(str(number)))


def raw(hub: Hub, *frames: bytes) -> socket.socket:
    """A connection that has said this."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(DEADLINE_S)
    sock.connect(hub.address)
    sock.sendall(b"".join(frames))
    return sock


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (nothing tells it)
            await asyncio.sleep(0)


async def is_closed(sock: socket.socket) -> bool:
    """Whether the hub says nothing more, but closes the connection."""
    try:
        return await asyncio.to_thread(sock.recv, 1) == b""
    except ConnectionError:  # it left something unread
        return True


async def next_command(port: Port) -> AnyCommand:
    async with asyncio.timeout(DEADLINE_S):
        while (command := port.receive()) is None:
            await asyncio.to_thread(port.wait, DEADLINE_S)
    return command


async def assert_hears(port: Port, hub: Hub, listener: Listener, seat: Seat = P0) -> None:
    """The connection works, in both directions."""
    listener.events.clear()
    hub.send(seat, command_of(1))
    assert await next_command(port) == command_of(1)
    port.send(event_of(seat, 1))
    await listener.until(1)
    assert listener.events == [(seat, event_of(seat, 1))]


# ── turns, order, backlogs ────────────────────────────────────────────────────────────────────


async def test_a_flood_of_events_leaves_turns_to_others_and_keeps_its_order(
    connect: Connect, listener: Listener
) -> None:
    port = await connect(P0)
    turns = 0
    for sequence in range(MANY):
        port.send(event_of(P0, sequence))
    async with asyncio.timeout(DEADLINE_S):
        while len(listener.events) < MANY:
            turns += 1
            assert port.receive() is None  # the kernel does not take so many at once
            await asyncio.sleep(0)
    assert listener.of(P0) == [event_of(P0, sequence) for sequence in range(MANY)]
    assert turns >= MANY // 16


async def test_a_flood_of_one_worker_does_not_hold_up_another_ones_event(
    connect: Connect, listener: Listener
) -> None:
    noisy, quiet = await connect(P0), await connect(D0)
    for sequence in range(MANY):
        noisy.send(event_of(P0, sequence))
    quiet.send(event_of(D0))
    await listener.until(MANY // 20)  # what the kernel took at once is more
    assert (D0, event_of(D0)) in listener.events


async def test_a_worker_that_does_not_read_holds_up_nobody_and_misses_nothing(
    hub: Hub, connect: Connect, listener: Listener
) -> None:
    stopped, other = raw(hub, pack(encode(Greeting(instance=P0.instance, epoch=1)))), None
    try:
        stopped.sendall(pack(encode(event_of(P0))))
        await listener.until(1)
        commands = [
            Abort(epoch=1, request_id=RequestId(f"{number:07}" * 20_000)) for number in range(20)
        ]
        for command in commands:
            hub.send(P0, command)
        other = await connect(D0)
        await assert_hears(other, hub, listener, D0)
        reader = FrameSocket(stopped)
        found: list[AnyCommand] = []
        async with asyncio.timeout(DEADLINE_S):
            while len(found) < len(commands):
                if (frame := reader.receive()) is not None:
                    found.append(decode_command(frame))
                else:
                    await asyncio.sleep(0)
        assert found == commands
        ours = hub._seats[P0]._socket
        await until(lambda: not ours.has_unsent)
        assert not asyncio.get_running_loop().remove_writer(ours)  # it waits for no room
        hub.send(P0, command_of(1))
        assert reader.receive() == encode(command_of(1))
    finally:
        stopped.close()


async def test_sending_to_a_hub_that_does_not_read_waits_in_the_port(
    connect: Connect, listener: Listener
) -> None:
    port = await connect(P0)
    events = [long_event(P0, number) for number in range(20)]
    for event in events:  # without a turn of the loop in between
        port.send(event)
    while port._socket.has_unsent:
        await asyncio.to_thread(port.wait, DEADLINE_S)  # it ends when there is room
    await listener.until(len(events))
    assert listener.of(P0) == events


async def test_a_busy_engine_sends_what_was_left_when_it_looks_for_commands(
    connect: Connect, listener: Listener
) -> None:
    port = await connect(P0)
    events = [long_event(P0, number) for number in range(20)]
    for event in events:
        port.send(event)
    async with asyncio.timeout(DEADLINE_S):
        while len(listener.events) < len(events):
            port.wait(0.0)
            assert port.receive() is None
            await asyncio.sleep(0)
    assert listener.of(P0) == events


async def test_closing_gives_the_last_events_a_moment(connect: Connect, listener: Listener) -> None:
    port = await connect(P0)
    events = [long_event(P0, number) for number in range(20)]
    for event in events:
        port.send(event)
    await asyncio.to_thread(port.close)
    await listener.until(len(events))
    assert listener.of(P0) == events


def test_closing_gives_up_on_a_hub_that_does_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_module, "_LINGER_S", 0.01)
    hub = Hub(folder, lambda seat, event: None)
    hub.open()
    port = Port(hub.address, P0.instance, 1)
    port.send(StartFailed(instance=P0.instance, epoch=1, message="x" * MUCH))
    port.close()
    hub.close()


async def test_last_words_are_heard_although_commands_were_sent_after_them(
    hub: Hub, connect: Connect, listener: Listener
) -> None:
    port = await connect(P0)
    events = [event_of(P0, number) for number in range(3)]
    for event in events:
        port.send(event)
    port.close()
    for number in range(3):
        hub.send(P0, command_of(number))
    await listener.until(3)
    assert listener.of(P0) == events


# ── who is who ────────────────────────────────────────────────────────────────────────────────


async def test_what_is_for_an_earlier_life_or_for_nobody_goes_nowhere(
    hub: Hub, connect: Connect, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    second = Seat(P0.instance, 2)
    port = await connect(second)
    caplog.set_level(logging.DEBUG, "memserve.channel")
    hub.send(P0, SendSnapshot(epoch=1))
    hub.send(D0, SendSnapshot(epoch=1))
    assert [r.levelname for r in caplog.records] == ["DEBUG", "DEBUG"]
    assert "is not connected: dropped SendSnapshot" in caplog.text
    await assert_hears(port, hub, listener, second)


async def test_a_seat_is_free_again_when_its_connection_has_ended(
    hub: Hub, connect: Connect, listener: Listener
) -> None:
    first = await connect(P0)
    first.send(event_of(P0))
    first.close()
    await listener.until(1)
    await until(lambda: not hub._connections)
    await assert_hears(await connect(P0), hub, listener)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([pack(encode(Greeting(instance=P0.instance, epoch=1)))], "P0 epoch 1 is connected alread"),
        ([pack(b"hello")], "ended the connection of a stranger: not a greeting"),
        ([pack(encode(event_of(D0)))], "ended the connection of a stranger: not a greeting"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "a frame of 1195725856 bytes; the longest allowed"),
        (
            [
                pack(encode(Greeting(instance=D0.instance, epoch=1))),
                (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
            ],
            "epoch=1): a frame of 67108865 bytes; the longest allowed: 67108864",
        ),
    ],
)
async def test_who_cannot_be_understood_is_refused_and_disturbs_nobody(
    hub: Hub,
    connect: Connect,
    listener: Listener,
    caplog: pytest.LogCaptureFixture,
    frames: list[bytes],
    message: str,
) -> None:
    port = await connect(P0)
    with raw(hub, *frames) as stranger:
        assert await is_closed(stranger)
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert message in caplog.text
    await assert_hears(port, hub, listener)
    hub.send(D0, SendSnapshot(epoch=1))  # goes nowhere


async def test_an_event_that_does_not_decode_is_dropped_alone(
    hub: Hub, listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    greeting = encode(Greeting(instance=P0.instance, epoch=1))
    with raw(hub, pack(greeting), pack(b"?"), pack(encode(event_of(P0, 7)))):
        await listener.until(1)
    assert listener.of(P0) == [event_of(P0, 7)]
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "dropped a message from Seat(instance='P0', epoch=1): not an event" in caplog.text


async def test_a_command_that_does_not_decode_is_dropped_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(folder / "hub.sock"))
        listening.listen()
        port = Port(str(folder / "hub.sock"), P0.instance, 1)
        with listening.accept()[0] as hub:
            hub.sendall(pack(b"?") + pack(encode(command_of(1))) + pack(encode(command_of(2))))
            assert await next_command(port) == command_of(1)
            port.wait(DEADLINE_S * 1000)  # the second one is here already
            assert port.receive() == command_of(2)
            assert port.receive() is None
            hub.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
            assert await next_command(port) == Stop(epoch=1)
            assert port.receive() is None
        port.close()
    assert [r.levelname for r in caplog.records] == ["ERROR", "ERROR", "WARNING"]


# ── ends ──────────────────────────────────────────────────────────────────────────────────────


async def test_a_worker_whose_hub_is_gone_is_told_once_to_stop(
    folder: Path, listener: Listener
) -> None:
    hub = Hub(folder, listener)
    hub.open()
    async with serving(hub):
        port = Port(hub.address, P0.instance, 3)
        port.send(event_of(P0))
        await listener.until(1)
        hub.send(Seat(P0.instance, 3), command_of(1))
    read, write = os.pipe()
    try:
        port.wake_on(read)
        assert port.receive() == command_of(1)
        assert port.receive() == Stop(epoch=3)
        assert port.receive() is None
        port.send(event_of(P0))  # nobody minds
        waiting = asyncio.create_task(asyncio.to_thread(port.wait, DEADLINE_S))
        assert (await asyncio.wait([waiting], timeout=0.05))[1], "it waits no more"
        os.write(write, b"!")
        await waiting
    finally:
        os.close(read)
        os.close(write)
        port.close()


async def test_what_the_hubs_user_raises_ends_serving(folder: Path) -> None:
    def refuse(seat: Seat, event: AnyEvent) -> None:
        raise ZeroDivisionError(event)

    hub = Hub(folder, refuse)
    hub.open()
    port = Port(hub.address, P0.instance, 1)
    try:
        port.send(event_of(P0))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(hub.serve(), DEADLINE_S)
        assert await next_command(port) == Stop(epoch=1)
    finally:
        port.close()
        hub.close()


async def test_a_hub_that_is_closed_harms_nobody_and_leaves_nothing(folder: Path) -> None:
    hub = Hub(folder, lambda seat, event: None)
    hub.open()
    hub.send(P0, SendSnapshot(epoch=1))
    serving_task = asyncio.create_task(hub.serve())
    with raw(hub) as stranger:
        await asyncio.sleep(0)
        hub.close()
        assert await is_closed(stranger)
    hub.close()
    hub.send(P0, SendSnapshot(epoch=1))
    serving_task.cancel()
    await asyncio.gather(serving_task, return_exceptions=True)
    assert os.listdir(folder) == []
    gc.collect()  # a socket that was not closed would warn here


async def test_a_connection_that_cannot_be_accepted_is_accepted_later(
    folder: Path,
    listener: Listener,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = asyncio.get_running_loop()
    call_later, later = loop.call_later, []

    def never(delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        later.append(callback)
        return call_later(3600, callback)

    monkeypatch.setattr(loop, "call_later", never)
    hub = Hub(folder, listener)
    hub.open()
    port = Port(hub.address, P0.instance, 1)
    port.send(event_of(P0))
    async with serving(hub):
        with no_more_descriptors():
            for number_of_errors in (1, 2):
                await until(lambda: bool(later))
                for _ in range(20):  # it does not try all the time
                    await asyncio.sleep(0)
                assert [r.levelname for r in caplog.records] == ["ERROR"] * number_of_errors
                later.pop()()
        assert "cannot accept a worker's connection: [Errno 24] Too many open" in caplog.text
        await until(lambda: bool(later) or bool(listener.events))
        for callback in later:
            callback()
        await listener.until(1)
        port.close()


def test_a_folder_with_too_long_a_path_is_refused_in_words(folder: Path) -> None:
    deep = folder / ("x" * (channel._MAX_PATH_BYTES - len(str(folder)) - len("//hub.sock")))
    deep.mkdir()
    hub = Hub(deep, lambda seat, event: None)
    hub.open()
    hub.close()
    hub = Hub(deep.with_name(deep.name + "ä"), lambda seat, event: None)
    size = channel._MAX_PATH_BYTES + 2
    with pytest.raises(StartError, match=rf"{deep}ä/hub.sock has a path of {size} bytes; .* 107:"):
        hub.open()


def test_a_socket_that_cannot_be_made_or_reached_is_named(folder: Path) -> None:
    nowhere = folder / "nowhere"
    with pytest.raises(StartError, match=f"cannot listen on the hub's socket {nowhere}/hub.sock"):
        Hub(nowhere, lambda seat, event: None).open()
    with pytest.raises(StartError, match=f"cannot reach the hub at {nowhere}"):
        Port(str(nowhere), P0.instance, 1)
