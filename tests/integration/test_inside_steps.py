"""A worker that serves inside the steps of vLLM's own core, over a device that is late.

Requests come and go at random moments: prefilled and sent, received and decoded, fetched,
cancelled, aborted; in a pool that is too small for all. Peers write their blocks as soon as they
have them. The device raises when a request reads KV that is not its own, and every block that was
sent is compared with what it should hold.
"""

from __future__ import annotations

import random
import select
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from memserve.messages import (
    Abort,
    Allocate,
    Allocated,
    AnyCommand,
    AnyEvent,
    Audit,
    Audited,
    Cancel,
    Commit,
    Decode,
    Finished,
    History,
    Inserted,
    InsertFailed,
    PeerJoined,
    Prefill,
    Refused,
    Rejected,
    Sent,
    Started,
    Tokens,
    Transmit,
    TransmitFailed,
)
from memserve.types import (
    BlockId,
    Geometry,
    InstanceId,
    Namespace,
    RequestId,
    TransferId,
    TransferStyle,
)
from memserve.workers.compat import Engine
from memserve.workers.engine_loop import EngineLoop
from memserve.workers.engine_pool import EnginePool
from memserve.workers.index_reports import IndexReports
from memserve.workers.links.base import Completion
from memserve.workers.mempool import MemPool
from memserve.workers.swap_queue import NoSwaps
from memserve.workers.transfer import Transfers
from tests.contract.transfer_rig import FakeClock
from tests.integration.late_device import (
    BLOCK,
    DEADLINE_S,
    NUM_BLOCKS,
    Block,
    Host,
    LateExecutor,
    build,
    device_of,
    generate,
    kv_of,
)
from tests.integration.worker_harness import request_bytes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

NUM_LIVES = 60
GEOMETRY = Geometry(
    model="late",
    dtype="float32",
    block_size=BLOCK,
    num_blocks=NUM_BLOCKS,
    num_kv_heads=1,
    page_bytes=64,
    block_stride=64,
    layer_offsets=(0,),
)
KINDS = ("out", "out", "in", "in", "returned", "history", "whole")


_Pairs = deque[tuple[BlockId, BlockId]]


class SlotLink:
    """Copies slots into a peer's memory: half of them when it is sent, the rest a few polls on."""

    kind = "slots"

    def __init__(self, memory: list[Block], peer: dict[int, Block], rng: random.Random) -> None:
        self._memory, self._peer, self._rng = memory, peer, rng
        self._jobs: list[tuple[TransferId, int, _Pairs]] = []
        self._errors: dict[TransferId, str] = {}

    def send(
        self, transfer_id: TransferId, source_ids: Sequence[BlockId], target_ids: Sequence[BlockId]
    ) -> None:
        pairs = deque(zip(source_ids, target_ids, strict=True))
        self._jobs.append((transfer_id, len(pairs) * GEOMETRY.block_bytes, pairs))
        self._copy(pairs, len(pairs) // 2)

    def poll(self) -> list[Completion]:
        ended = [job for job in self._jobs if self._rng.random() < 0.5]
        for job in ended:
            self._copy(job[2], len(job[2]))
            self._jobs.remove(job)
        return [
            Completion(name, size, 0.0, self._errors.pop(name, None)) for name, size, _ in ended
        ]

    def cancel(self, transfer_id: TransferId) -> None:
        self._errors[transfer_id] = "cancelled"

    def close(self, *, is_lost: bool = False) -> None:
        self._jobs.clear()

    def _copy(self, pairs: _Pairs, count: int) -> None:
        for _ in range(count):
            source, target = pairs.popleft()
            self._peer[target] = list(self._memory[source])


class Life(msgspec.Struct):
    """One request, as the hub sees it."""

    id: RequestId
    kind: str
    prompt: list[int]
    num_tokens: int
    generated: list[int] = []
    is_over: bool = False
    has_reservation: bool = False
    num_open: int = 0
    """Transfers that have not been answered."""
    targets: list[BlockId] = []
    """Blocks of the peer that are to hold its KV."""

    @property
    def into(self) -> TransferId:
        return TransferId(f"into {self.id}")

    @property
    def out(self) -> TransferId:
        return TransferId(f"out of {self.id}")

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated


class Hub:
    """The loop's channel, and who answers its events; commands are found some looks later."""

    def __init__(self, rng: random.Random, device: LateExecutor, peer: dict[int, Block]) -> None:
        self._rng = rng
        self._device = device
        self._peer = peer
        self._feed: deque[AnyCommand | None] = deque()
        self._fd = -1
        self._turns = 0
        self._num_waits = 0
        self.is_inside = False
        self.seen_inside: Counter[type] = Counter()
        self.lives: dict[RequestId, Life] = {}
        self.stop: Callable[[], None] = lambda: None
        self.say(
            PeerJoined(
                epoch=1, peer=InstanceId("D0"), peer_epoch=1, geometry=GEOMETRY, addresses={}
            )
        )
        prompts = [[rng.randrange(500) for _ in range(60)] for _ in range(4)]
        for number in range(NUM_LIVES):
            prompt = rng.choice(prompts)[: rng.randint(2, 45)]
            life = Life(RequestId(f"r{number}"), rng.choice(KINDS), prompt, rng.randint(2, 20))
            self.lives[life.id] = life
            self._begin(life)

    # ── a channel ─────────────────────────────────────────────────────────────────────────────

    def wake_on(self, fd: int) -> None:
        self._fd = fd

    def receive(self) -> AnyCommand | None:
        return self._feed.popleft() if self._feed else None

    def wait(self, timeout_s: float) -> None:
        self._num_waits += 1
        assert self._num_waits < 20_000, [life for life in self.lives.values() if not life.is_over]
        if self.is_inside:
            self._turns -= 1
            if self._turns < 0:
                self._let_step_end()
        elif self._device.steps and self._rng.random() < 0.2:
            self._device.finish_step()
        elif timeout_s > 0 and not self._feed and not self._open():
            self.stop()

    def _let_step_end(self) -> None:
        self._turns = self._rng.randint(0, 5)
        if self._device.steps and not select.select([self._fd], [], [], 0)[0]:
            self._device.finish_step()
        assert select.select([self._fd], [], [], DEADLINE_S)[0]

    def _open(self) -> list[Life]:
        return [life for life in self.lives.values() if not life.is_over or life.num_open]

    def say(self, *commands: AnyCommand) -> None:
        for command in commands:
            self._feed += [*[None] * self._rng.choice((0, 0, 1, 3)), command]

    # ── the hub's side of a life ──────────────────────────────────────────────────────────────

    def _begin(self, life: Life) -> None:
        match life.kind:
            case "out" | "whole":
                whole = life.kind == "whole"
                self.say(
                    Prefill(
                        epoch=1,
                        request_id=life.id,
                        attempt=1,
                        request=request_bytes(life.num_tokens),
                        known_tokens=0,
                        token_ids=life.prompt,
                        whole=whole,
                        hold=not whole,
                        is_private=self._rng.random() < 0.2,
                    )
                )
            case "in" | "returned":
                life.num_open += 1
                self.say(
                    Allocate(
                        epoch=1,
                        transfer_id=life.into,
                        request_id=life.id,
                        known_tokens=0,
                        token_ids=life.prompt,
                        namespace=Namespace(),
                        is_private=False,
                        deadline_s=30.0,
                    )
                )
            case "history":
                self._order(life, len(life.prompt), History(Namespace(), life.prompt))
        if self._rng.random() < 0.1:
            self.say(Audit(epoch=1, audit_id=1))

    def _order(self, life: Life, num_tokens: int, history: History | None = None) -> None:
        """Its KV is to go to the peer."""
        life.num_open += 1
        first = len(self._peer)
        life.targets = [BlockId(first + i) for i in range(num_tokens // BLOCK)]
        self._peer.update({target: [] for target in life.targets})
        peer = InstanceId("D0")
        self.say(
            Transmit(
                epoch=1,
                transfer_id=life.out,
                request_id=life.id,
                peer=peer,
                first_block=0,
                block_ids=life.targets,
                history=history,
            )
        )

    def _decode(self, life: Life) -> None:
        life.generated = generate(life.prompt, 1)
        self.say(
            Decode(
                epoch=1,
                request_id=life.id,
                attempt=1,
                request=request_bytes(life.num_tokens),
                known_tokens=len(life.prompt),
                token_ids=life.generated,
                num_generated=1,
                hold=life.kind == "returned",
                is_private=False,
            )
        )

    def _end(self, life: Life) -> None:
        if not life.is_over:
            life.is_over = True
            if life.has_reservation:
                self.say(Cancel(epoch=1, transfer_id=life.into))
            self.say(Abort(epoch=1, request_id=life.id))

    def send(self, event: AnyEvent) -> None:
        if self.is_inside:
            self.seen_inside[type(event)] += 1
        match event:
            case Tokens():
                for output in event.outputs:
                    self.lives[output.request_id].generated += output.token_ids
            case Audited():
                assert event.problems == []
            case Rejected():
                raise AssertionError(event)
            case Started():
                life = self.lives[event.request_id]
                if life.kind == "out" and not life.is_over:
                    self._order(life, len(life.prompt))
                elif life.kind == "whole" and not life.is_over and self._rng.random() < 0.5:
                    # Another instance wants what the present step computes.
                    self._order(life, len(life.prompt), History(Namespace(), life.prompt))
                self._perhaps_abort(life)
            case Finished():
                self._finished(self.lives[event.request_id], event.held_tokens)
            case _:
                self._answered(event)

    def _perhaps_abort(self, life: Life) -> None:
        if self._rng.random() < 0.3:
            self._end(life)

    def _finished(self, life: Life, held_tokens: int) -> None:
        if life.is_over:
            return
        expected = generate(life.prompt, 1 if life.kind == "out" else life.num_tokens)
        assert life.generated == expected
        if life.kind == "returned":
            assert held_tokens == len(life.tokens) - 1
            self._order(life, held_tokens)
        elif life.kind != "out":
            self._end(life)

    def _answered(self, event: AnyEvent) -> None:
        if not isinstance(
            event, Allocated | Refused | Inserted | InsertFailed | Sent | TransmitFailed
        ):
            return
        life = self.lives[RequestId(event.transfer_id.split()[-1])]
        match event:
            case Allocated():
                life.has_reservation = not life.is_over
                if not life.is_over:
                    self._write(life, event.hit_blocks, event.block_ids)
                    size = len(event.block_ids) * GEOMETRY.block_bytes
                    self.say(Commit(epoch=1, transfer_id=life.into, size_bytes=size, pin=True))
                    life.num_open += 1
                    self._perhaps_abort(life)
            case Inserted() | InsertFailed() | Refused():
                life.has_reservation = False
                if not life.is_over:
                    self._decode(life)
            case Sent():
                self._compare(life, event.num_blocks)
                self._end(life)
            case TransmitFailed():
                self._end(life)
        life.num_open -= 1

    def _write(self, life: Life, hit_blocks: int, block_ids: Sequence[BlockId]) -> None:
        """As the peer's link does, at the first moment at which it may."""
        held = kv_of(life.prompt)
        for index, block_id in enumerate(block_ids, hit_blocks):
            self._device.memory[block_id] = list(held[index * BLOCK : (index + 1) * BLOCK])

    def _compare(self, life: Life, num_blocks: int) -> None:
        assert num_blocks == len(life.targets)
        held = kv_of(life.tokens)
        for index, target in enumerate(life.targets):
            assert self._peer[target] == held[index * BLOCK : (index + 1) * BLOCK], (life, index)


class Bench:
    """One worker over a late device."""

    def __init__(self, model: Path, seed: int, style: TransferStyle, *, is_async: bool) -> None:
        rng = random.Random(seed)
        host, clock, peer = Host(), FakeClock(), dict[int, Block]()
        self.engine = engine = build(model, host, style, is_async=is_async)
        self.device = device_of(engine)
        self.hub = Hub(rng, self.device, peer)
        self.mempool = MemPool(
            EnginePool(engine.block_pool, engine.hash_request, engine.steps),
            BLOCK,
            reserve_blocks=2,
            clock=clock,
            records_changes=True,
        )
        reports = IndexReports(self.mempool, InstanceId("P0"), 1, self.hub.send)
        link = SlotLink(self.device.memory, peer, rng)
        transfers = Transfers(
            self.mempool, GEOMETRY, lambda _: link, InstanceId("P0"), 1, reports.send, style
        )
        _note_inside(engine, self.hub)
        self.loop = host.loop = EngineLoop(
            InstanceId("P0"),
            1,
            engine,
            self.mempool,
            transfers,
            NoSwaps(),
            reports,
            self.hub,
            heartbeat_interval_s=1.0,
            clock=clock,
        )
        self.hub.stop = self.loop.stop


def _note_inside(engine: Engine, hub: Hub) -> None:
    serve_while_waiting = engine.serve_while_waiting

    def noting(serve: Callable[[], None]) -> int:
        def noted() -> None:
            hub.is_inside = True
            serve()
            hub.is_inside = False

        return serve_while_waiting(noted)

    engine.serve_while_waiting = noting  # type: ignore[method-assign]


@pytest.fixture(params=["async", "ranks"])
def make(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make_one(seed: int, style: str = "request") -> Bench:
        is_async = request.param == "async"
        made.append(Bench(model_folder, seed, TransferStyle(style), is_async=is_async))
        return made[-1]

    yield make_one
    for bench in made:
        bench.engine.shutdown()


@pytest.mark.parametrize("style", ["request", "chunk"])
def test_no_block_changes_hands_under_a_step(make: Callable[..., Bench], style: str) -> None:
    inside: Counter[type] = Counter()
    for seed in range(8):
        bench = make(seed, style)
        bench.loop.run()
        assert bench.hub._open() == []
        bench.hub.say(Audit(epoch=1, audit_id=1))
        held = bench.engine.held_blocks()
        assert held == {} and bench.mempool.check_integrity({}) == []
        inside += bench.hub.seen_inside
    for kind in (Allocated, Inserted, Sent):
        assert inside[kind] > 5, inside


def test_a_request_is_aborted_when_the_step_that_writes_its_blocks_is_over(
    model_folder: Path,
) -> None:
    """Without asynchronous scheduling vLLM frees them at once: a peer would be given blocks which
    the step in flight still writes."""
    bench = Bench(model_folder, 0, TransferStyle.REQUEST, is_async=False)
    hub = bench.hub
    hub._feed.clear()
    running = Life(RequestId("running"), "whole", list(range(40)), 2)
    # All that there is, but for the reserve.
    coming = Life(RequestId("coming"), "in", list(range(500, 500 + (NUM_BLOCKS - 3) * BLOCK)), 2)
    hub.lives = {life.id: life for life in (running, coming)}
    targets: list[BlockId] = []
    send = hub.send

    def answer(event: AnyEvent) -> None:
        match event:
            case Started():
                hub._turns = 5
                hub._end(running)
                hub._begin(coming)
            case Allocated():
                targets.extend(event.block_ids)
                hub._write(coming, 0, targets)
                coming.has_reservation, coming.num_open = True, 0
                hub._end(coming)
            case _:
                send(event)

    bench.loop._reports._send = answer
    hub._begin(running)
    bench.loop.run()
    bench.engine.shutdown()
    held = kv_of(coming.prompt)
    assert len(targets) == NUM_BLOCKS - 3
    for index, block_id in enumerate(targets):
        assert bench.device.memory[block_id] == held[index * BLOCK : (index + 1) * BLOCK]
