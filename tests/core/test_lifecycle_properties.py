"""The lifecycle against worker models, under every order of events that the channels allow.

One schedule is one byte string: it decides what is delivered next, where requests are placed, what
fails, who hangs and who dies. After it has run out everything takes its plain course; then nobody
may hold anything, and every client must have got what the rules promise. Those who hang go on only
when nothing else can happen, whatever deadlines pass: nobody may have waited for them who only
wanted to fetch from them.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
from collections.abc import Callable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.core.kv_transfer import RequestTransfers
from memserve.core.lifecycle import Phase, RequestLifecycle
from memserve.core.told import Told
from memserve.core.vocabulary import (
    Action,
    AnyInput,
    ClientCancelled,
    Deliver,
    Ended,
    Fail,
    Fetch,
    InstanceLost,
    InstanceSilent,
    Learned,
    Limits,
    Note,
    Output,
    PlaceAgain,
    Plan,
    RequestSpec,
    Seat,
    Send,
    StopSeen,
)
from memserve.messages import (
    Allocated,
    AnyEvent,
    Commit,
    Decode,
    PeerJoined,
    PeerLost,
    Prefill,
    Sent,
    TokenOutput,
    Tokens,
)
from memserve.types import Caching, Geometry, InstanceId, Namespace, RequestId, TransferId
from tests.core.worker_model import BLOCK_SIZE, Choices, Truth, WorkerModel

INSTANCES = {
    "P": [InstanceId("P0"), InstanceId("P1")],
    "D": [InstanceId("D0"), InstanceId("D1")],
    "PD": [InstanceId("PD0")],
}
GEOMETRY = Geometry("m", "float32", BLOCK_SIZE, 64, 1, 100, 100, (0,))
MAX_STEPS = 3000
"""Far more than any schedule needs: reaching it means that something goes round in circles."""


@dataclasses.dataclass
class Client:
    """What the user of the API sees of one request, and the checks on it."""

    truth: Truth
    stop_after: int
    """Tokens after which the front end finds a stop string; 0: never."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    ended_by: str | None = None
    prompt_attempts: set[int] = dataclasses.field(default_factory=set)

    def take(self, deliver: Deliver, output: TokenOutput) -> None:
        assert self.ended_by is None, "an output after the end"
        if deliver.delivery.prompt:
            self.prompt_attempts.add(output.attempt)
        if deliver.delivery.tokens:
            self.tokens += output.token_ids
        assert self.tokens == self.truth.continuation[: len(self.tokens)]
        if deliver.delivery.final:
            assert output.finish_reason in ("stop", "length")
            self.end("final")

    def end(self, how: str) -> None:
        assert self.ended_by is None, (self.ended_by, how)
        self.ended_by = how

    def has_stop_string(self) -> bool:
        return self.ended_by is None and 0 < self.stop_after <= len(self.tokens)


@dataclasses.dataclass
class Request:
    lifecycle: RequestLifecycle
    client: Client
    caching: Caching
    complete: set[TransferId] = dataclasses.field(default_factory=set)
    """Transfers whose receiver held everything already."""
    sent: set[TransferId] = dataclasses.field(default_factory=set)
    committed: set[TransferId] = dataclasses.field(default_factory=set)
    has_ended: bool = False


class Cluster:
    """Workers, their channels, and a hub that does what the scheduler will do."""

    def __init__(self, data: bytes) -> None:
        self.choices = Choices(data)
        self.coverage: collections.Counter[tuple[str, str]] = collections.Counter()
        self.lives: dict[tuple[InstanceId, int], WorkerModel] = {}
        self.workers: dict[InstanceId, WorkerModel] = {}
        """The current life of each instance, as the hub knows it."""
        self.noticed_lost: set[InstanceId] = set()
        self.truths: dict[RequestId, Truth] = {}
        self.requests: dict[RequestId, Request] = {}
        self.agenda: dict[int, list[Callable[[], None]]] = collections.defaultdict(list)
        self.hanging: set[WorkerModel] = set()
        """They serve nothing, and nothing is heard of them; their processes are there."""
        self.outlasted: set[TransferId] = set()
        """Whose deadline has passed while somebody hung."""
        self.suspected: set[WorkerModel] = set()
        """Who was taken for silent, rightly or not."""
        self.num_losses = 0
        self.step = 0
        self.max_faults = self.choices.pick(4)
        for ids in INSTANCES.values():
            for instance in ids:
                self._start(instance, 1)
        self._serve_all()
        for number in range(1 + self.choices.pick(2)):
            self._submit(RequestId(f"r{number}"))
        self._plan_trouble()

    # ── set-up ────────────────────────────────────────────────────────────────────────────────

    def _start(self, instance: InstanceId, epoch: int) -> None:
        worker = WorkerModel(instance, epoch, self.truths, self.choices, self.lives)
        worker.faults_left = self.max_faults
        self.lives[instance, epoch] = self.workers[instance] = worker
        self.noticed_lost.discard(instance)
        for other in self.workers.values():
            if other is not worker and other.instance not in self.noticed_lost:
                self._introduce(worker, other)
                self._introduce(other, worker)

    def _introduce(self, worker: WorkerModel, peer: WorkerModel) -> None:
        worker.inbox.append(
            PeerJoined(
                epoch=worker.epoch,
                peer=peer.instance,
                peer_epoch=peer.epoch,
                geometry=GEOMETRY,
                addresses={},
            )
        )

    def _serve_all(self) -> None:
        for worker in self.workers.values():
            while worker.inbox:
                worker.serve()

    def _submit(self, request_id: RequestId) -> None:
        number = len(self.requests) + 1
        prompt = list(range(1 + self.choices.pick(11)))  # shared by the requests: prefix hits
        continuation = [1000 * number + i for i in range(1 + self.choices.pick(8))]
        ends_with_stop = self.choices.pick(2) == 1
        spare = self.choices.pick(3) if ends_with_stop else 0
        truth = Truth(prompt, continuation, ends_with_stop)
        self.truths[request_id] = truth
        spec = RequestSpec(
            id=request_id,
            prompt_token_ids=prompt,
            request=b"",
            max_tokens=len(continuation) + spare,
            resample=self.choices.pick(4) == 3,
            namespace=Namespace(),
        )
        limits = Limits(block_size=BLOCK_SIZE, max_attempts=3, reservation_s=30.0)
        caching = list(Caching)[self.choices.pick(4)]
        client = Client(truth, self.choices.pick(6))
        self.requests[request_id] = Request(RequestLifecycle(spec, limits), client, caching)

    def _plan_trouble(self) -> None:
        """At which steps clients leave, instances die and reservations expire; 0 is never."""
        for request_id in self.requests:
            self.agenda[self.choices.pick(120)].append(lambda i=request_id: self._cancel(i))
        for _ in range(3):
            self.agenda[self.choices.pick(120)].append(self._kill)
        for _ in range(3):
            self.agenda[self.choices.pick(120)].append(self._expire)
        for _ in range(2):
            self.agenda[self.choices.pick(60)].append(self._hang)
        for _ in range(2):
            self.agenda[self.choices.pick(120)].append(self._suspect)

    # ── the run ───────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        while True:
            self.step += 1
            assert self.step < MAX_STEPS, "no end in sight"
            for trouble in self.agenda.pop(self.step, []):
                trouble()
            candidates = self._candidates() or self._outlast()
            if not candidates:
                break
            candidates[self.choices.pick(len(candidates))]()
            for request in self.requests.values():
                request.lifecycle.check_integrity()
        self._check_end()

    def _candidates(self) -> list[Callable[[], None]]:
        """Everything that could happen next, in the order of a plain course."""
        todo: list[Callable[[], None]] = []
        for request_id, request in self.requests.items():
            if request.lifecycle.phase is Phase.UNPLACED and self._seats():
                todo.append(lambda i=request_id: self._place(i))
            if request.client.has_stop_string():
                todo.append(lambda i=request_id: self._stop(i))
        for instance, worker in self.workers.items():
            if instance in self.noticed_lost:
                todo.append(lambda w=worker: self._start(w.instance, w.epoch + 1))
                continue
            if worker in self.hanging and worker.is_alive:
                continue
            if worker.outbox:
                todo.append(lambda w=worker: self._take_event(w))
            if not worker.is_alive:
                todo.append(lambda w=worker: self._notice(w))
                continue
            if worker.inbox:
                todo.append(worker.serve)
            todo += worker.progress()
        return todo

    def _outlast(self) -> list[Callable[[], None]]:
        """Nothing more happens while some hang: deadlines pass, and then those go on."""
        if not self.hanging:
            return []
        serving = [w for w in self.workers.values() if w.is_alive and w not in self.hanging]
        overdue = [(w, t) for w in serving for t in w.expirable() if t not in self.outlasted]
        for worker, transfer_id in overdue:
            self.outlasted.add(transfer_id)
            worker.expire(transfer_id)
        if overdue:
            return self._candidates()
        for worker in self.hanging - self.suspected:
            self._hear_nothing_of(worker)
        if candidates := self._candidates():
            return candidates
        for request in self.requests.values():
            if request.lifecycle.phase is Phase.FETCH:
                plan = request.lifecycle.plan
                assert plan is not None
                assert self.workers[plan.first.instance] in self.hanging, "waits for a source"
        self.hanging.clear()
        return self._candidates()

    def _seats(self) -> dict[InstanceId, Seat]:
        return {
            instance: Seat(instance, worker.epoch)
            for instance, worker in self.workers.items()
            if instance not in self.noticed_lost
        }

    def _place(self, request_id: RequestId) -> None:
        request = self.requests[request_id]
        seats = self._seats()
        prefill = [seats[i] for i in INSTANCES["P"] if i in seats]
        decode = [seats[i] for i in INSTANCES["D"] if i in seats]
        caching = request.caching
        plans = [
            Plan(
                p,
                d,
                first_is_private=not caching.prefill_keeps,
                decode_is_private=not caching.decode_keeps,
                returns=caching.decode_returns,
            )
            for p in prefill
            for d in decode
        ]
        is_private = not caching.prefill_keeps
        plans += [
            Plan(seats[i], None, is_private, is_private, returns=False)
            for i in INSTANCES["PD"]
            if i in seats
        ]
        if not plans or self.choices.happens(32):
            self._carry_out(request, request.lifecycle.give_up("no place"), None, None)
            return
        plan = plans[self.choices.pick(len(plans))]
        if not plan.first_is_private:
            plan = msgspec.structs.replace(plan, fetch=self._fetch(request, plan.first, seats))
        self._carry_out(request, request.lifecycle.place(plan), None, None)

    def _fetch(self, request: Request, first: Seat, seats: dict[InstanceId, Seat]) -> Fetch | None:
        """What a hint may lead to: a source that holds as much, or less, or nothing."""
        num_blocks = len(request.lifecycle.token_ids) // BLOCK_SIZE
        sources = [seat for seat in seats.values() if seat != first]
        if not num_blocks or not sources or not self.choices.happens(2):
            return None
        num_tokens = (1 + self.choices.pick(num_blocks)) * BLOCK_SIZE
        return Fetch(sources[self.choices.pick(len(sources))], num_tokens, deadline_s=1.0)

    def _take_event(self, worker: WorkerModel) -> None:
        event = worker.outbox.popleft()
        if isinstance(event, Tokens):
            for output in event.outputs:
                request = self.requests[output.request_id]
                self._feed(request, Output(event.instance, output), event, output)
            return
        request = self.requests[_request_of(event)]
        if isinstance(event, Sent):
            request.sent.add(event.transfer_id)
        if isinstance(event, Allocated) and not event.block_ids:
            request.complete.add(event.transfer_id)
        self._feed(request, event, event, None)  # type: ignore[arg-type]

    def _feed(
        self,
        request: Request,
        event: AnyInput,
        source: AnyEvent | None = None,
        output: TokenOutput | None = None,
    ) -> None:
        phase = request.lifecycle.phase
        self.coverage[phase.value, type(event).__name__] += 1
        if isinstance(event, Output):
            other = _copied(request.lifecycle)
        actions = request.lifecycle.step(event)
        if isinstance(event, Output):
            self._check_short_way(other, request.lifecycle, event, actions)
        if phase is Phase.ENDED:
            assert actions == []
        self._carry_out(request, actions, source, output)

    def _check_short_way(
        self,
        other: RequestLifecycle,
        stepped: RequestLifecycle,
        event: Output,
        actions: list[Action],
    ) -> None:
        """`more_tokens` must do what `step` does, or leave it to it."""
        delivery = other.more_tokens(event.instance, event.output)
        if delivery is None:
            self.coverage["step", "Output"] += 1
            return
        assert actions == [Deliver(delivery)]
        assert _state(other) == _state(stepped)
        self.coverage["more_tokens", "with prompt" if delivery.prompt else "tokens"] += 1

    def _carry_out(
        self,
        request: Request,
        actions: list[Action],
        source: AnyEvent | None,
        output: TokenOutput | None,
    ) -> None:
        assert sum(isinstance(action, Deliver) for action in actions) <= 1
        for action in actions:
            assert not request.has_ended, "an action after the end"
            match action:
                case Send():
                    self._send(request, action)
                case Deliver():
                    assert output is not None
                    request.client.take(action, output)
                case Fail():
                    request.client.end("fail")
                case PlaceAgain():
                    assert request.lifecycle.phase is Phase.UNPLACED
                case Learned():
                    self._check_learned(request, action, source)
                case Ended():
                    request.has_ended = True
                case Note():
                    pass

    def _send(self, request: Request, action: Send) -> None:
        instance, command = action.instance, action.command
        worker = self.workers[instance]
        assert instance not in self.noticed_lost, f"a dead instance gets {command}"
        assert command.epoch == worker.epoch, f"{command} is for another life"
        if isinstance(command, Commit):
            is_there = command.transfer_id in request.sent | request.complete
            assert is_there, "committed before it was sent"
            assert command.transfer_id not in request.committed, "committed twice"
            request.committed.add(command.transfer_id)
        if isinstance(command, Prefill | Decode) and request.lifecycle.spec.resample:
            assert command.num_generated == 0, "generated tokens are taken for the prompt"
        if worker.is_alive:
            worker.inbox.append(command)

    def _check_learned(self, request: Request, action: Learned, source: AnyEvent | None) -> None:
        """The prompt tree is told the truth, and only by the instance itself."""
        assert source is not None and source.instance == action.instance
        token_ids = request.lifecycle.token_ids
        assert 0 < action.num_tokens <= len(token_ids)
        full = action.num_tokens // BLOCK_SIZE * BLOCK_SIZE
        history = self.lives[source.instance, source.epoch].history
        assert full == 0 or tuple(token_ids[:full]) in history

    # ── trouble ───────────────────────────────────────────────────────────────────────────────

    def _cancel(self, request_id: RequestId) -> None:
        request = self.requests[request_id]
        if request.client.ended_by is None:
            request.client.end("cancel")
        self._feed(request, ClientCancelled())

    def _stop(self, request_id: RequestId) -> None:
        request = self.requests[request_id]
        request.client.end("stop string")
        self._feed(request, StopSeen())

    def _kill(self) -> None:
        """An instance dies, most likely one that a request runs on."""
        plans = [request.lifecycle.plan for request in self.requests.values()]
        seats = [seat for plan in plans if plan for seat in (plan.first, plan.decode)]
        seats += [plan.fetch.source for plan in plans if plan and plan.fetch]
        victims = [seat.instance for seat in seats if seat] + list(self.workers)
        worker = self.workers[victims[self.choices.pick(len(victims))]]
        if worker.is_alive:
            self.num_losses += 1
            worker.die()
            worker.inbox.clear()

    def _hang(self) -> None:
        """Most likely the source of a fetch."""
        plans = [request.lifecycle.plan for request in self.requests.values()]
        sources = [plan.fetch.source.instance for plan in plans if plan and plan.fetch]
        victims = sources + list(self.workers)
        worker = self.workers[victims[self.choices.pick(len(victims))]]
        if worker.is_alive:
            self.hanging.add(worker)

    def _suspect(self) -> None:
        """Somebody who may well be serving is taken for silent."""
        workers = [worker for worker in self.workers.values() if worker.is_alive]
        if workers:
            self._hear_nothing_of(workers[self.choices.pick(len(workers))])

    def _hear_nothing_of(self, worker: WorkerModel) -> None:
        self.suspected.add(worker)
        if worker.instance not in self.noticed_lost:
            for request in self.requests.values():
                self._feed(request, InstanceSilent(Seat(worker.instance, worker.epoch)))

    def _expire(self) -> None:
        alive = [worker for worker in self.workers.values() if worker.is_alive]
        choices = [(worker, t) for worker in alive for t in worker.expirable()]
        if choices:
            worker, transfer_id = choices[self.choices.pick(len(choices))]
            worker.expire(transfer_id)

    def _notice(self, worker: WorkerModel) -> None:
        """The cluster manager found the process gone: everybody is told."""
        self.noticed_lost.add(worker.instance)
        worker.outbox.clear()  # events of an earlier life are dropped
        for other in self.workers.values():
            if other.is_alive and other.instance not in self.noticed_lost:
                command = PeerLost(epoch=other.epoch, peer=worker.instance, peer_epoch=worker.epoch)
                other.inbox.append(command)
        for request in self.requests.values():
            self._feed(request, InstanceLost(Seat(worker.instance, worker.epoch)))

    # ── the end ───────────────────────────────────────────────────────────────────────────────

    def _check_end(self) -> None:
        for request in self.requests.values():
            lifecycle, client = request.lifecycle, request.client
            assert lifecycle.phase is Phase.ENDED and request.has_ended, lifecycle.phase
            assert client.ended_by is not None
            assert len(client.prompt_attempts) <= 1, "the prompt was described twice"
            if client.ended_by == "final":
                assert client.tokens == client.truth.continuation
                assert len(client.prompt_attempts) == 1
            if client.ended_by == "fail":
                troubles = self.num_losses or self.max_faults or self.suspected
                assert troubles or not client.tokens, "a failure without a cause"
        for worker in self.workers.values():
            assert worker.is_alive
            assert worker.holders() == [], (worker.instance, worker.holders())


def _copied(lifecycle: RequestLifecycle) -> RequestLifecycle:
    """Shares nothing with it that changes."""
    shared = (lifecycle.spec, lifecycle.plan)
    return copy.deepcopy(lifecycle, {id(part): part for part in shared})


def _state(part: object) -> object:
    """What can be compared: a lifecycle and its parts by what they hold."""
    if isinstance(part, RequestLifecycle | RequestTransfers | Told):
        return {name: _state(value) for name, value in vars(part).items()}
    return part


def _request_of(event: AnyEvent) -> RequestId:
    request_id = getattr(event, "request_id", None)
    if request_id is None:
        request_id = getattr(event, "transfer_id").split("/")[0]  # noqa: B009
    return RequestId(request_id)


schedules = st.integers(0, 500).flatmap(lambda size: st.binary(min_size=size, max_size=size))


@settings(max_examples=1500, derandomize=True, deadline=None, database=None)
@given(schedules)
def test_every_schedule_ends_clean(data: bytes) -> None:
    Cluster(data).run()


def test_random_schedules_end_clean_and_reach_every_corner() -> None:
    coverage: collections.Counter[tuple[str, str]] = collections.Counter()
    ends: collections.Counter[str | None] = collections.Counter()
    for seed in range(12_000):
        cluster = Cluster(random.Random(seed).randbytes(500))
        cluster.run()
        coverage += cluster.coverage
        ends.update(request.client.ended_by for request in cluster.requests.values())
    assert set(ends) == {"final", "stop string", "cancel", "fail"}
    assert min(ends.values()) > 300
    missing = [pair for pair in CORNERS if coverage[pair] == 0]
    assert not missing, missing


CORNERS = [
    *((phase.value, "InstanceLost") for phase in Phase),
    *((phase.value, "InstanceSilent") for phase in Phase),
    *((phase.value, "ClientCancelled") for phase in Phase),
    *((phase, "StopSeen") for phase in ("prefill", "handoff", "decode")),
    *((phase, "Started") for phase in ("unplaced", "prefill", "decode", "drain")),
    *((phase, "Rejected") for phase in ("prefill", "decode", "drain")),
    *((phase, "Finished") for phase in ("unplaced", "handoff", "decode", "return", "drain")),
    *((phase, "Allocated") for phase in ("fetch", "prefill", "handoff", "return", "ended")),
    *((phase, "Refused") for phase in ("fetch", "prefill", "handoff", "return", "ended")),
    *((phase, "Expired") for phase in ("fetch", "prefill", "handoff", "return", "drain")),
    # In unplaced, prefill and decode: of a transfer that was abandoned.
    *(
        (phase, answer)
        for phase in ("unplaced", "fetch", "prefill", "handoff", "decode", "return", "drain")
        for answer in ("Sent", "TransmitFailed")
    ),
    *((phase, "Inserted") for phase in ("prefill", "decode", "return", "drain")),
    *((phase, "InsertFailed") for phase in ("prefill", "decode", "return")),
    ("step", "Output"),
    *(("more_tokens", what) for what in ("tokens", "with prompt")),
]
"""(phase, event) pairs that the random schedules must have tried, lest this test grows blind."""
