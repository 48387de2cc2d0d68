"""Instances without engines, and the hub between them: what the benches of transfers run over.

`Cluster` is the hub's side: the real `Hub`, a worker's process for each instance, and one transfer
at a time or many, driven as the scheduler drives them. A worker has a real MemPool, `Transfers` and
links over KV memory whose contents say which block they are; it takes commands as an engine's loop
does, and answers questions on its standard input, which are no part of what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench._transfer import SHAPES, geometry, platform
from bench.ops_blocks import BLOCK_SIZE
from memserve.channel import Hub
from memserve.core.vocabulary import Seat
from memserve.messages import (
    PROTOCOL_VERSION,
    Allocate,
    Allocated,
    AnyCommand,
    AnyEvent,
    Cancel,
    Commit,
    Inserted,
    InsertFailed,
    LinkReady,
    PeerJoined,
    PeerLost,
    PoolStats,
    Ready,
    Refused,
    Sent,
    Stop,
    Transmit,
    TransmitFailed,
)
from memserve.ops.blocks import library_for
from memserve.types import BlockId, InstanceId, Namespace, RequestId, TransferId, TransferStyle
from memserve.workers.links import nccl
from memserve.workers.links.base import Link, Rank, rank_peer
from memserve.workers.links.nccl_worker import NcclSettings
from memserve.workers.mempool import MemPool
from memserve.workers.pools import PlainPool
from memserve.workers.port import Port
from memserve.workers.sleeps import sleep_exactly
from memserve.workers.transfer import Transfers

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60.0
COPYING_WAIT_S = 20e-6
_WORD = 4
_NULL = "null block"
_SOURCE = "source"


class WorkerConfig(msgspec.Struct, frozen=True):
    """What a worker is born with."""

    instance: InstanceId
    epoch: int
    hub: str
    device: str
    link: str
    """ipc, shm or nccl."""
    shape: str
    pool_bytes: int
    num_source_blocks: int
    folder: str


# ── the worker ────────────────────────────────────────────────────────────────────────────────


class Worker:
    """One instance without an engine."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._platform = platform(config.device)
        self._blocks = geometry(SHAPES[config.shape], config.pool_bytes)
        self._buffer = self._platform.own(self._blocks.num_blocks * self._blocks.block_bytes)
        self._words = self._buffer.tensor.view(torch.int32).view(self._blocks.num_blocks, -1)
        for block in range(self._blocks.num_blocks):
            self._words[block] = self._contents(config.instance, block)
        self._platform.finish()
        self._mempool = MemPool(PlainPool(self._blocks.num_blocks), BLOCK_SIZE)
        assert self._mempool.alloc_mem(1, _NULL) == [0]
        self._source_ids = self._mempool.alloc_mem(config.num_source_blocks, _SOURCE)
        random.Random(0).shuffle(self._source_ids)
        self._port = Port(config.hub, config.instance, config.epoch)
        rank = Rank(config.instance, config.epoch, 0)
        self._endpoint = self._platform.endpoint(
            rank, self._buffer, self._blocks, Path(config.folder), NcclSettings()
        )
        self._transfers = Transfers(
            self._mempool,
            self._blocks,
            self._open,
            config.instance,
            config.epoch,
            self._port.send,
            TransferStyle.REQUEST,
        )
        self._is_stopping = False
        self._asked = b""

    def run(self) -> None:
        """Until `Stop`."""
        self._port.send(
            Ready(
                instance=self._config.instance,
                epoch=self._config.epoch,
                protocol=PROTOCOL_VERSION,
                geometry=self._blocks,
                addresses={
                    self._platform.kind: (self._buffer.address,),
                    nccl.KIND: (self._endpoint.address,),
                },
                max_model_len=1,
                stats=PoolStats(*[0] * 11),
                startup_s={},
            )
        )
        self._port.wake_on(sys.stdin.fileno())
        while not self._is_stopping:
            self._port.wait(COPYING_WAIT_S if self._transfers.is_active else 1.0)
            while (command := self._port.receive()) is not None:
                self._dispatch(command)
            self._transfers.poll()
            self._transfers.expire()
            self._answer()
        self._transfers.close()
        self._endpoint.close()
        self._platform.finish()
        self._buffer.close()
        self._port.close()

    def _open(self, peer: PeerJoined) -> Link:
        one = rank_peer(self._config.link, peer, 0)
        if self._config.link == nccl.KIND:
            return self._endpoint.open(one)
        return self._platform.open(self._buffer, self._blocks, one)

    def _dispatch(self, command: AnyCommand) -> None:
        match command:
            case Allocate():
                self._transfers.allocate(command, command.token_ids)
            case Transmit():
                self._hold_source(command)
                self._transfers.transmit(command)
            case Commit():
                self._transfers.commit(command)
            case Cancel():
                self._transfers.cancel(command)
            case PeerJoined():
                self._transfers.peer_joined(command)
            case PeerLost():
                self._transfers.peer_lost(command.peer, command.peer_epoch)
            case Stop():
                self._is_stopping = True

    def _hold_source(self, command: Transmit) -> None:
        """As if the request had ended here just now; its KV is in the same blocks each time."""
        count = command.first_block + len(command.block_ids)
        self._transfers.hold_source(
            command.request_id, self._source_ids[:count], count * BLOCK_SIZE
        )
        self._transfers.source_ready(command.request_id)

    def _contents(self, instance: str, block: int) -> torch.Tensor:
        """What a block of that instance holds from the start."""
        num_words = self._blocks.block_bytes // _WORD
        words = torch.arange(num_words, dtype=torch.int32, device=self._platform.device)
        return words + (block * 7919 + sum(instance.encode()) * 1_000_003)

    # ── questions ─────────────────────────────────────────────────────────────────────────────

    def _answer(self) -> None:
        while select.select([sys.stdin], [], [], 0)[0]:
            data = os.read(sys.stdin.fileno(), 1 << 16)
            if not data:  # the bench is gone
                self._is_stopping = True
                return
            self._asked += data
            while b"\n" in self._asked:
                line, _, self._asked = self._asked.partition(b"\n")
                question: dict[str, Any] = json.loads(line)
                answers: dict[str, Callable[[dict[str, Any]], object]] = {
                    "source ids": lambda _: self._source_ids,
                    "verify": self._verify,
                    "check": lambda _: self._check(),
                }
                print(json.dumps(answers[question["what"]](question)), flush=True)

    def _verify(self, question: dict[str, Any]) -> object:
        """How many of the tokens' blocks do not hold what the sender's blocks hold."""
        found = self._mempool.match(question["token_ids"])
        expected = question["source_ids"]
        wrong = sum(
            not torch.equal(self._words[here], self._contents(question["sender"], there))
            for here, there in zip(found, expected, strict=False)
        )
        return {"found": len(found), "wrong": wrong + abs(len(found) - len(expected))}

    def _check(self) -> object:
        """Whether the GPU computes, and who holds blocks that nobody should."""
        side = 512
        ones = torch.ones(side, side, device=self._platform.device)
        computes = bool((ones @ ones == side).all())
        own = (f"{_NULL}:", f"{_SOURCE}:")
        holders = [held for held in self._mempool.holders() if not held.startswith(own)]
        return {"computes": computes, "holders": holders + self._transfers.check_integrity()}


# ── the hub's side ────────────────────────────────────────────────────────────────────────────


class Course(msgspec.Struct):
    """One transfer, from `Allocate` on, and when what happened."""

    number: int
    sender: Seat
    receiver: Seat
    token_ids: list[int]
    done: asyncio.Future[str | None]
    """Its error, or None."""
    waits_for: str = "Allocated"
    at: dict[str, float] = {}
    size_bytes: int = 0
    link_s: float = 0.0

    @property
    def id(self) -> TransferId:
        return TransferId(f"r{self.number}/forward/1")


class Member(msgspec.Struct):
    """A worker's process."""

    config: WorkerConfig
    process: asyncio.subprocess.Process
    ready: asyncio.Future[Ready]
    lost_at: float | None = None

    @property
    def seat(self) -> Seat:
        return Seat(self.config.instance, self.config.epoch)

    async def ask(self, what: str, **fields: object) -> Any:
        """A question that is no part of the protocol."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write((json.dumps({"what": what, **fields}) + "\n").encode())
        line = await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)
        return json.loads(line)


class Cluster:
    """Members by name, their links, and the transfers under way."""

    def __init__(self, folder: Path) -> None:
        self.hub = Hub(folder, self._on_event)
        self._folder = folder
        self._members: dict[Seat, Member] = {}
        self._links: dict[tuple[Seat, InstanceId], asyncio.Future[LinkReady]] = {}
        self._courses: dict[TransferId, Course] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0

    async def start(
        self, name: str, *, epoch: int = 1, device: str, link: str, shape: str, **sizes: int
    ) -> Member:
        """A worker, ready. `sizes`: `pool_bytes`, `num_source_blocks`."""
        config = WorkerConfig(
            instance=InstanceId(name),
            epoch=epoch,
            hub=self.hub.address,
            device=device,
            link=link,
            shape=shape,
            folder=str(self._folder),
            **sizes,
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench._workers",
            msgspec.json.encode(config).decode(),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        member = Member(config, process, asyncio.get_running_loop().create_future())
        self._members[member.seat] = member
        self._keep(self._watch(member))
        await asyncio.wait_for(member.ready, DEADLINE_S)
        return member

    async def join(self, one: Member, other: Member) -> None:
        """Links in both directions. Raises: RuntimeError if one cannot be opened."""
        pairs = [(one, other), (other, one)]
        for at, peer in pairs:
            ready = peer.ready.result()
            key = (at.seat, peer.config.instance)
            self._links[key] = asyncio.get_running_loop().create_future()
            joined = PeerJoined(
                epoch=at.config.epoch,
                peer=peer.config.instance,
                peer_epoch=peer.config.epoch,
                geometry=ready.geometry,
                addresses=ready.addresses,
            )
            self.hub.send(at.seat, joined)
        for at, peer in pairs:
            opened = await asyncio.wait_for(self._links[at.seat, peer.config.instance], DEADLINE_S)
            if opened.error is not None:
                raise RuntimeError(opened.error)

    def transfer(self, sender: Member, receiver: Member, token_ids: list[int]) -> Course:
        """Start one; `Course.done` says when it has ended."""
        self._number += 1
        done = asyncio.get_running_loop().create_future()
        course = Course(self._number, sender.seat, receiver.seat, token_ids, done)
        self._courses[course.id] = course
        course.at["Allocate"] = time.perf_counter()
        self.hub.send(
            receiver.seat,
            Allocate(
                epoch=receiver.config.epoch,
                transfer_id=course.id,
                request_id=RequestId(f"r{course.number}"),
                known_tokens=0,
                token_ids=token_ids,
                namespace=Namespace(),
                is_private=False,
                deadline_s=DEADLINE_S,
            ),
        )
        return course

    def cancel(self, course: Course) -> None:
        """Free the reservation of one whose sender has ended."""
        self.hub.send(course.receiver, Cancel(epoch=course.receiver.epoch, transfer_id=course.id))

    async def stop(self) -> None:
        """End all members."""
        living = [m for m in self._members.values() if m.lost_at is None]
        for member in living:
            self.hub.send(member.seat, Stop(epoch=member.config.epoch))
        for member in living:
            try:
                await asyncio.wait_for(member.process.wait(), DEADLINE_S)
            except TimeoutError:
                member.process.kill()
                await member.process.wait()
        for task in self._tasks:
            task.cancel()
        self.hub.close()

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, member: Member) -> None:
        """Tell the others when it is gone, as the cluster manager does."""
        await member.process.wait()
        member.lost_at = time.perf_counter()
        if not member.ready.done():
            member.ready.set_exception(RuntimeError(f"{member.config.instance} has ended"))
        for other in self._members.values():
            if other.lost_at is None:
                lost = PeerLost(
                    epoch=other.config.epoch,
                    peer=member.config.instance,
                    peer_epoch=member.config.epoch,
                )
                self.hub.send(other.seat, lost)

    def _on_event(self, seat: Seat, event: AnyEvent) -> None:
        match event:
            case Ready():
                self._members[seat].ready.set_result(event)
            case LinkReady():
                self._links[seat, event.peer].set_result(event)
            case Allocated() | Refused() | Sent() | TransmitFailed() | Inserted() | InsertFailed():
                self._advance(self._courses[event.transfer_id], event)

    def _advance(
        self,
        course: Course,
        event: Allocated | Refused | Sent | TransmitFailed | Inserted | InsertFailed,
    ) -> None:
        course.at[type(event).__name__] = time.perf_counter()
        match event:
            case Allocated():
                transmit = Transmit(
                    epoch=course.sender.epoch,
                    transfer_id=course.id,
                    request_id=RequestId(f"r{course.number}"),
                    peer=course.receiver.instance,
                    first_block=event.hit_blocks,
                    block_ids=event.block_ids,
                )
                self.hub.send(course.sender, transmit)
            case Sent():
                course.size_bytes, course.link_s = event.size_bytes, event.seconds
                commit = Commit(
                    epoch=course.receiver.epoch,
                    transfer_id=course.id,
                    size_bytes=event.size_bytes,
                    pin=False,
                )
                self.hub.send(course.receiver, commit)
            case Inserted():
                course.done.set_result(None)
            case _:
                course.done.set_result(f"{type(event).__name__}: {event.reason}")


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    """A hub that serves, in this folder; all members end with it."""
    async with AsyncExitStack() as stack:
        made = Cluster(folder)
        made.hub.open()
        serving = asyncio.get_running_loop().create_task(made.hub.serve())
        stack.push_async_callback(made.stop)
        try:
            yield made
        finally:
            await stack.aclose()
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving


def build_once(device: str) -> None:
    """Have the library of the kernels there before several processes want it at once."""
    if device == "cuda":
        library_for(torch.device("cuda", 0))


def prompt(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32_000) for _ in range(num_tokens)]


def sources(ids: Sequence[BlockId], num_tokens: int) -> list[BlockId]:
    """Where the sender has the blocks of a prompt."""
    return list(ids[: num_tokens // BLOCK_SIZE])


if __name__ == "__main__":
    sleep_exactly()
    Worker(msgspec.json.decode(sys.argv[1], type=WorkerConfig)).run()
