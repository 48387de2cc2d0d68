"""Random transfers between two instances, against a naive model of who owns how many blocks.

The machine plays the hub by its rules (a reservation ends by a commit after `Sent`, or by a cancel
once the sender is quiet) and breaks everything else: links stall, fail, lose bytes and die, clients
leave, deadlines pass, the engine takes every block it can get, and computes prompts in chunks whose
blocks the sender may be told of while their step is in flight. After each rule every reference in
both pools must have its owner, and every block that an index finds must hold the right KV.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from memserve.messages import (
    Allocated,
    AnyEvent,
    Cancel,
    Commit,
    Expired,
    History,
    Inserted,
    InsertFailed,
    LinkReady,
    Refused,
    Sent,
    Transmit,
    TransmitFailed,
)
from memserve.types import BlockId, Direction, Namespace, RequestId, TransferId
from memserve.workers.transfer import private_namespace
from tests.contract.link_rig import BLOCK_SIZE
from tests.contract.transfer_rig import DEADLINE_S, NO_NAMESPACE, Node, allocate, prompt

SEEDS = 3
MAX_TOKENS = 27
CHUNK_TOKENS = 6
"""In one step, where a prompt is computed in several: not whole blocks."""


class Flow(msgspec.Struct):
    """One request with one transfer, as the hub knows it."""

    request_id: RequestId
    tokens: list[int]
    is_private: bool
    source: Node
    target: Node
    is_running: bool = True
    """At the source; then it is held until the transfer's end, or dropped."""
    is_held: bool = False
    state: str = "new"
    """new → asked → ordered → sent → done"""
    hit_blocks: int = 0
    block_ids: list[BlockId] = []
    sent_bytes: int = 0
    is_arrival: bool = False
    was_deleted: bool = False
    """Its tokens were deleted from the index while it was pinned."""
    is_fetch: bool = False
    """The source does not run it: it sends what its index holds."""
    unwritten: list[BlockId] = []
    """Of a fetch: what the source's steps in flight had to write when it was ordered."""

    @property
    def is_computing(self) -> bool:
        """A chunk of its prompt was not scheduled yet."""
        return len(self.source.engine.tokens(self.request_id)) < len(self.tokens)

    @property
    def direction(self) -> Direction:
        return Direction.FETCH if self.is_fetch else Direction.FORWARD

    @property
    def transfer_id(self) -> TransferId:
        return TransferId(f"{self.request_id}/{self.direction.value}/1")

    @property
    def num_blocks(self) -> int:
        return len(self.tokens) // BLOCK_SIZE

    @property
    def namespace(self) -> Namespace:
        if not self.is_private:
            return NO_NAMESPACE
        return private_namespace(self.request_id, Namespace())


class TransferMachine(RuleBasedStateMachine):
    @initialize(layouts=st.tuples(*[st.sampled_from(["block_first", "layer_first"])] * 2))
    def build(self, layouts: tuple[str, str]) -> None:
        self.nodes = [Node(f"N{i}", layout=layout) for i, layout in enumerate(layouts)]
        self.epochs = [1, 1]
        first, second = self.nodes
        first.join(second)
        second.join(first)
        self.count = 0
        self.num_lost = 0
        """Bytes that links were told to lose."""
        self.known: dict[TransferId, Flow] = {}
        self.fillers: list[tuple[Node, RequestId]] = []
        self.read_events()

    def new_id(self) -> RequestId:
        self.count += 1
        return RequestId(f"r{self.count}")

    # ── the engines ───────────────────────────────────────────────────────────────────────────

    @rule(
        data=st.data(),
        num_moves=st.integers(0, 10),
        direction=st.integers(0, 1),
        length=st.integers(0, MAX_TOKENS),
        seed=st.integers(0, SEEDS - 1),
        is_private=st.booleans(),
        num_computed=st.integers(0, MAX_TOKENS) | st.integers(0, CHUNK_TOKENS),
    )
    def start(
        self,
        data: st.DataObject,
        num_moves: int,
        direction: int,
        length: int,
        seed: int,
        is_private: bool,
        num_computed: int,
    ) -> None:
        """A request that will move its KV starts at its source, and goes on for a while.

        The first step computes all of it, or the first tokens.
        """
        source, target = self.nodes[direction], self.nodes[1 - direction]
        flow = Flow(self.new_id(), prompt(length, seed), is_private, source, target)
        if source.compute(flow.request_id, flow.tokens[:num_computed]) is not None:
            self.known[flow.transfer_id] = flow
            self.go_on(data, flow, num_moves)

    @rule(
        data=st.data(),
        num_moves=st.integers(0, 6),
        direction=st.integers(0, 1),
        num_blocks=st.integers(1, MAX_TOKENS // BLOCK_SIZE),
        seed=st.integers(0, SEEDS - 1),
    )
    def start_fetch(
        self, data: st.DataObject, num_moves: int, direction: int, num_blocks: int, seed: int
    ) -> None:
        """The target fetches what the source may or may not hold, and goes on for a while.

        Often what the source is about to compute: its step is in flight.
        """
        source, target = self.nodes[direction], self.nodes[1 - direction]
        tokens = prompt(num_blocks * BLOCK_SIZE, seed)
        running = [f for f in self.known.values() if f.source is source and f.is_running]
        if (computing := [f for f in running if f.is_computing]) and data.draw(st.booleans()):
            self.step(computing[-1])
            self.read_events()
            tokens = computing[-1].tokens[: len(computing[-1].tokens) // BLOCK_SIZE * BLOCK_SIZE]
        flow = Flow(self.new_id(), tokens, False, source, target, is_running=False, is_fetch=True)
        self.known[flow.transfer_id] = flow
        self.go_on(data, flow, num_moves)

    @rule(node=st.integers(0, 1), length=st.integers(1, 40), seed=st.integers(0, SEEDS))
    def fill(self, node: int, length: int, seed: int) -> None:
        """Another request takes blocks, and evicts history."""
        request_id = self.new_id()
        if self.nodes[node].compute(request_id, prompt(length, seed)) is not None:
            self.fillers.append((self.nodes[node], request_id))

    @precondition(lambda self: self.fillers)
    @rule()
    def end_filler(self) -> None:
        node, request_id = self.fillers.pop(0)
        node.engine.finish(request_id)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), num_moves=st.integers(1, 8))
    def advance(self, data: st.DataObject, num_moves: int) -> None:
        """One of the latest requests goes on."""
        flow = data.draw(st.sampled_from([*self.known.values()][-4:]), label="flow")
        self.go_on(data, flow, num_moves)

    def go_on(self, data: st.DataObject, flow: Flow, num_moves: int) -> None:
        """In one of the orders in which it can."""
        for _ in range(num_moves):
            if not (moves := self.moves(flow)):
                return
            data.draw(st.sampled_from(moves), label="move")(flow)
            self.read_events()

    def moves(self, flow: Flow) -> list[Callable[[Flow], None]]:
        """What may happen to the request now, misfortune apart."""
        possible = [
            (flow.is_running and not flow.is_computing, self.finish),
            *[(flow.is_running and flow.is_computing, self.step)] * 3,  # mostly it goes on
            (flow.is_running or (flow.is_fetch and flow.state == "ordered"), self.end_step),
            (flow.is_running and flow.state == "ordered", self.preempt),
            (flow.state == "new", self.ask),
            (flow.state == "new" and flow.is_running, self.ask_and_order),
            (flow.state == "asked" and (flow.is_running or flow.is_held), self.order),
            (flow.state == "asked" and flow.is_fetch, self.order_history),
            (flow.state == "ordered" and (flow.is_held or flow.is_fetch), self.poll_for),
            (flow.state == "sent", self.commit_pinned),
            (flow.state == "sent", self.commit_loose),
            (flow.is_arrival, self.schedule),
            (flow.is_arrival, self.forget),
        ]
        return [move for is_possible, move in possible if is_possible]

    @precondition(lambda self: self.known)
    @rule(data=st.data(), is_abort=st.booleans())
    def give_up(self, data: st.DataObject, is_abort: bool) -> None:
        """The hub calls the transfer off, or the source forgets the request."""
        flow = data.draw(st.sampled_from([*self.known.values()]), label="flow")
        (self.leave if is_abort else self.call_off)(flow)
        self.read_events()

    def step(self, flow: Flow) -> None:
        """One step ends, and the next chunk of its prompt is in flight; the sender is told."""
        flow.source.end_step()
        known = len(flow.source.engine.tokens(flow.request_id))
        if not flow.source.extend(flow.request_id, flow.tokens[: known + CHUNK_TOKENS]):
            self.leave(flow)
        elif flow.request_id in flow.source.transfers.sender.awaited():
            flow.source.tell(flow.request_id)

    def end_step(self, flow: Flow) -> None:
        """Nothing is in flight; the sender is told."""
        flow.source.end_step()
        if flow.request_id in flow.source.transfers.sender.awaited():
            flow.source.tell(flow.request_id)

    def preempt(self, flow: Flow) -> None:
        """It loses its blocks, and begins again with what the index still has."""
        flow.source.end_step()
        flow.source.engine.preempt(flow.request_id)
        if flow.source.compute(flow.request_id, flow.tokens[:CHUNK_TOKENS]) is None:
            self.leave(flow)

    def finish(self, flow: Flow) -> None:
        """The source's run ends, and its KV is held."""
        flow.source.end_step()
        flow.is_running = False
        flow.is_held = flow.state in ("new", "asked", "ordered")
        flow.source.end(flow.request_id, flow.tokens, hold=flow.is_held)
        flow.source.transfers.source_ready(flow.request_id)

    def leave(self, flow: Flow) -> None:
        """The source forgets the request."""
        flow.source.end_step()
        flow.is_running = flow.is_held = False
        flow.source.abort(flow.request_id)

    def schedule(self, flow: Flow) -> None:
        """The target schedules the request, and runs it to its end."""
        flow.is_arrival = False
        target, tokens = flow.target, [*flow.tokens, 1]
        hits = target.compute(flow.request_id, tokens, flow.namespace)
        target.transfers.scheduled(flow.request_id)
        if hits is not None:
            assert hits == flow.num_blocks or flow.was_deleted
            target.engine.finish(flow.request_id)
        if flow.is_private:
            target.mempool.delete(tokens, flow.namespace)

    def forget(self, flow: Flow) -> None:
        """The target forgets the request, which has not been scheduled."""
        flow.is_arrival = False
        flow.target.transfers.forget(flow.request_id)
        if flow.is_private:
            assert flow.target.mempool.match(flow.tokens, flow.namespace) == []

    @rule(node=st.integers(0, 1))
    def relax(self, node: int) -> None:
        self.nodes[node].transfers.relax()
        for flow in self.known.values():
            if flow.target is self.nodes[node]:
                flow.is_arrival = False

    @rule(node=st.integers(0, 1), seed=st.integers(0, SEEDS - 1), is_reset=st.booleans())
    def forget_history(self, node: int, seed: int, is_reset: bool) -> None:
        mempool = self.nodes[node].mempool
        if is_reset:
            mempool.reset()
            return
        mempool.delete(prompt(MAX_TOKENS, seed))
        assert mempool.match(prompt(MAX_TOKENS, seed)) == []
        for flow in self.known.values():
            flow.was_deleted |= flow.target is self.nodes[node] and flow.is_arrival

    # ── the hub ───────────────────────────────────────────────────────────────────────────────

    def ask(self, flow: Flow) -> None:
        command = allocate(flow.request_id, flow.direction, is_private=flow.is_private)
        flow.target.transfers.allocate(command, flow.tokens)

    def ask_and_order(self, flow: Flow) -> None:
        self.ask(flow)
        self.read_events()
        if flow.state == "asked":
            self.order(flow)

    def order(self, flow: Flow) -> None:
        flow.state = "ordered"
        flow.source.transfers.transmit(transmit(flow))

    def order_history(self, flow: Flow) -> None:
        found = flow.source.mempool.match(flow.tokens)
        flow.state = "ordered"
        history = History(Namespace(), flow.tokens)
        in_flight = flow.source.in_flight
        flow.unwritten = [b for b in found[flow.hit_blocks : flow.num_blocks] if b in in_flight]
        flow.source.transfers.transmit_history(transmit(flow), history)
        held = flow.source.mempool.held(f"sending of {flow.transfer_id}")
        self.read_events()
        if len(found) < flow.num_blocks:
            assert flow.state == "done"
        elif not flow.block_ids:
            assert flow.state == "sent"
        elif flow.unwritten:
            assert flow.state == "ordered" and held == found[flow.hit_blocks :]

    def call_off(self, flow: Flow) -> None:
        """Tell whoever may be told: the sender once it was ordered, else the receiver."""
        command = Cancel(epoch=1, transfer_id=flow.transfer_id)
        if flow.state == "ordered":
            flow.source.transfers.cancel(command)
        elif flow.state in ("asked", "sent"):
            flow.state = "done"
            flow.target.transfers.cancel(command)

    def commit_pinned(self, flow: Flow) -> None:
        self.commit(flow, pin=True)

    def commit_loose(self, flow: Flow) -> None:
        self.commit(flow, pin=False)

    def commit(self, flow: Flow, *, pin: bool) -> None:
        flow.state = "done"
        promised = len(flow.block_ids) * flow.target.geometry.block_bytes
        is_whole = flow.sent_bytes == promised
        flow.is_arrival = pin and is_whole and flow.num_blocks > 0
        flow.target.transfers.commit(
            Commit(epoch=1, transfer_id=flow.transfer_id, size_bytes=flow.sent_bytes, pin=pin)
        )
        (event,) = flow.target.take()
        assert isinstance(event, Inserted if is_whole else InsertFailed)
        found = flow.target.mempool.match(flow.tokens, flow.namespace)
        if flow.is_arrival:
            assert len(found) == flow.num_blocks
            assert flow.target.mempool.held(f"arrival for {flow.request_id}") == found
        if flow.is_private and not pin:
            assert found == []

    # ── faults ────────────────────────────────────────────────────────────────────────────────

    @rule(node=st.integers(0, 1), fault=st.sampled_from(["hold", "release", "fail", "lose"]))
    def disturb(self, node: int, fault: str) -> None:
        (link,) = self.nodes[node].links.values()
        act: dict[str, Callable[[], None]] = {
            "hold": link.hold,
            "release": link.release,
            "fail": lambda: link.fail_next("no wire"),
            "lose": lambda: link.lose_bytes(1),
        }
        self.num_lost += fault == "lose"
        act[fault]()

    @rule(node=st.integers(0, 1))
    def reconnect(self, node: int) -> None:
        """The link is replaced, as for a new life of the peer."""
        self.epochs[node] += 1
        self.nodes[node].join(self.nodes[1 - node], self.epochs[node])
        self.read_events()

    @rule(seconds=st.sampled_from([0.1, DEADLINE_S]))
    def pass_time(self, seconds: float) -> None:
        for node in self.nodes:
            node.clock.now_s += seconds
            node.transfers.expire()
        self.read_events()

    def poll_for(self, flow: Flow) -> None:
        flow.source.transfers.poll()

    @rule()
    def poll(self) -> None:
        for node in self.nodes:
            node.transfers.poll()
        self.read_events()

    # ── what must hold ────────────────────────────────────────────────────────────────────────

    def read_events(self) -> None:
        for node in self.nodes:
            for event in node.take():
                self._on_event(node, event)

    def _on_event(self, node: Node, event: AnyEvent) -> None:
        if isinstance(event, LinkReady):
            assert event.error is None
            return
        flow = self.known[event.transfer_id]  # type: ignore[union-attr]
        match event:
            case Allocated() if flow.state == "new" and node is flow.target:
                flow.state = "asked"
                flow.hit_blocks, flow.block_ids = event.hit_blocks, event.block_ids
                assert event.hit_blocks + len(event.block_ids) == flow.num_blocks
            case Refused() if flow.state == "new" and node is flow.target:
                flow.state = "done"
            case Sent() if flow.state == "ordered" and node is flow.source:
                assert node.in_flight.keys().isdisjoint(flow.unwritten)
                assert not flow.is_running
                flow.state = "sent"
                flow.sent_bytes = event.size_bytes
                promised = len(flow.block_ids) * flow.target.geometry.block_bytes
                assert 0 <= promised - event.size_bytes <= self.num_lost
                flow.is_held = False
            case TransmitFailed() if flow.state == "ordered" and node is flow.source:
                flow.state = "done"
                flow.target.transfers.cancel(Cancel(epoch=1, transfer_id=flow.transfer_id))
                # The pin of a request that was being sent ends here; of one that waits, later.
                flow.is_held = False
            case Expired() if flow.state in ("asked", "ordered", "sent"):
                assert node is flow.target
            case _:
                pytest.fail(f"{event} from {node.id} in state {flow.state}")

    @invariant()
    def every_reference_has_its_owner(self) -> None:
        for node in self.nodes:
            assert self._owned(node) == {h for h in node.mempool.holders() if "sending" not in h}
            flows = [f for f in self.known.values() if f.target is node]
            reserved = sum(
                len(f.block_ids) for f in flows if f.state in ("asked", "ordered", "sent")
            )
            assert node.transfers.reserved_blocks == reserved

    def _owned(self, node: Node) -> set[str]:
        """Owner and count, as the events so far imply; links in flight apart."""
        owned: dict[str, int] = {}
        for flow in self.known.values():
            if flow.target is node and flow.state in ("asked", "ordered", "sent"):
                owned[f"reservation of {flow.transfer_id}"] = flow.num_blocks
            if flow.target is node and flow.is_arrival:
                owned[f"arrival for {flow.request_id}"] = flow.num_blocks
            is_sending = flow.state == "ordered"
            if flow.source is node and flow.is_held and not is_sending:
                owned[f"source of {flow.request_id}"] = flow.num_blocks
        return {f"{owner}: {count} blocks" for owner, count in owned.items() if count}

    @invariant()
    def pools_are_sound(self) -> None:
        prompts = [prompt(MAX_TOKENS, seed) for seed in range(SEEDS)]
        namespaces = {NO_NAMESPACE, *(f.namespace for f in self.known.values())}
        for node in self.nodes:
            node.check(*prompts, namespaces=[*namespaces])
            stats = node.mempool.stats()
            assert stats.free + stats.historical + stats.active == stats.total
            free = node.pool.free_block_queue.get_all_free_blocks()
            assert stats.historical == sum(b.block_hash is not None for b in free)

    def teardown(self) -> None:
        """Let everything end: nothing may be held by anybody."""
        if not hasattr(self, "nodes"):
            return
        for node in self.nodes:
            for link in node.links.values():
                link.release()
        self.poll()
        for flow in self.known.values():
            self.leave(flow)
            self.read_events()
            self.call_off(flow)
            flow.target.transfers.forget(flow.request_id)
        for node in self.nodes:
            for request_id in list(node.engine.running):
                node.engine.finish(request_id)
            assert node.is_idle(), node.mempool.holders()
            assert not node.transfers.is_active
        self.pools_are_sound()


def transmit(flow: Flow) -> Transmit:
    return Transmit(
        epoch=1,
        transfer_id=flow.transfer_id,
        request_id=flow.request_id,
        peer=flow.target.id,
        first_block=flow.hit_blocks,
        block_ids=flow.block_ids,
    )


TransferMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestTransfers = TransferMachine.TestCase
