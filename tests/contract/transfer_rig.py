"""What the tests of pools and transfers share: a real BlockPool without an engine, and two nodes.

The contents of a KV block follow from the tokens up to its end (`kv_of`), as in a real model: so a
test can tell for every block that the index finds whether it holds what it should.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from memserve.errors import TransferError
from memserve.messages import Allocate, AnyEvent, PeerJoined
from memserve.types import (
    BlockId,
    Direction,
    InstanceId,
    Namespace,
    RequestId,
    TransferId,
    TransferStyle,
)
from memserve.workers.engine_pool import EnginePool, Steps, resume_hashing
from memserve.workers.links.fake import FakeLink
from memserve.workers.mempool import MemPool
from memserve.workers.transfer import Transfers
from tests.contract.link_rig import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    PAGE_BYTES,
    FakeClock,
    buffer_bytes,
    geometry,
    read_block,
)

DEADLINE_S = 30.0
NO_NAMESPACE = Namespace()
_EventT = TypeVar("_EventT", bound=AnyEvent)


def make_hasher(block_size: int = BLOCK_SIZE) -> Callable[..., Request]:
    """`EnginePool`'s `make_request`, with vLLM's own block hasher and without an engine."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_size, sha256)

    def make_request(
        tokens: Sequence[int], namespace: Namespace, known_hashes: Sequence[BlockHash] = ()
    ) -> Request:
        return Request(
            request_id="key",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            arrival_time=0.0,
            cache_salt=namespace.cache_salt,
            lora_request=lora_of(namespace),
            block_hasher=resume_hashing(hasher, known_hashes),
        )

    return make_request


def lora_of(namespace: Namespace) -> LoRARequest | None:
    """An adapter of that name."""
    name = namespace.lora_name
    return None if name is None else LoRARequest(name, 1, f"/adapters/{name}")


class FakeSteps:
    """Of an engine: see `engine_pool.Steps`."""

    def __init__(self) -> None:
        self.composed: int | None = None
        self.num_launched = 0
        self.num_ended = 0

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        """The next step, which is launched then."""
        self.composed = self.num_launched + 1
        yield
        self.composed = None
        self.num_launched += 1


def make_pool(
    num_blocks: int = NUM_BLOCKS,
    reserve_blocks: int = 1,
    block_size: int = BLOCK_SIZE,
    clock: Callable[[], float] = lambda: 0.0,
    steps: Steps | None = None,
) -> tuple[MemPool, BlockPool]:
    """A MemPool over a real BlockPool; one of `num_blocks` is vLLM's null block."""
    pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=block_size)
    engine_pool = EnginePool(pool, make_hasher(block_size), steps or FakeSteps())
    mempool = MemPool(
        engine_pool,
        block_size,
        reserve_blocks=reserve_blocks,
        clock=clock,
        records_changes=True,
    )
    return mempool, pool


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Prompts of one seed are prefixes of each other."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(num_tokens)]


def kv_of(tokens: Sequence[int], num_layers: int) -> bytes:
    """What a block holds whose last token is the last one of these."""
    text = ",".join(map(str, tokens))
    return b"".join(
        hashlib.blake2b(f"{layer}:{text}".encode(), digest_size=PAGE_BYTES).digest()
        for layer in range(num_layers)
    )


class EngineStandIn:
    """Does with the BlockPool what vLLM's scheduler does for a request, and nothing else."""

    def __init__(self, mempool: MemPool, pool: BlockPool) -> None:
        self.mempool = mempool
        self.pool = pool
        self._hasher = make_hasher(mempool.block_size)
        self._requests: dict[str, Request] = {}
        self.running: dict[str, list[BlockId]] = {}

    def find(self, tokens: Sequence[int], namespace: Namespace) -> list[BlockId]:
        """The longest prefix by vLLM's own hashes, without MemPool's index."""
        found: list[BlockId] = []
        for block_hash in self._hasher(tokens, namespace).block_hashes:
            blocks = self.pool.get_cached_block(block_hash, [0])
            if not blocks:
                break
            found.append(BlockId(blocks[0].block_id))
        return found

    def start(
        self,
        request_id: str,
        tokens: Sequence[int],
        namespace: Namespace = NO_NAMESPACE,
    ) -> int | None:
        """Schedule a whole prompt: hits, new blocks, index. Returns its hit blocks; None: no room.

        Like vLLM, it leaves at least one token to compute.
        """
        request = self._hasher(tokens, namespace)
        request.request_id = request_id
        block_size = self.mempool.block_size
        hits = self.find(tokens, namespace)[: max(0, len(tokens) - 1) // block_size]
        num_new = -(-len(tokens) // block_size) - len(hits)
        hit_blocks = [self.pool.blocks[b] for b in hits]
        evictable_hits = sum(b.ref_cnt == 0 for b in hit_blocks)
        if num_new > self.pool.get_num_free_blocks() - evictable_hits:
            return None
        self.pool.touch(hit_blocks)
        blocks = hit_blocks + self.pool.get_new_blocks(num_new)
        num_full = len(tokens) // block_size
        self.pool.cache_full_blocks(request, blocks, len(hits), num_full, block_size, 0)
        self._requests[request_id] = request
        self.running[request_id] = [BlockId(b.block_id) for b in blocks]
        return len(hits)

    def generate(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Append tokens to a running request, as decode steps do. False: there is no room."""
        request, block_size = self._requests[request_id], self.mempool.block_size
        blocks = [self.pool.blocks[b] for b in self.running[request_id]]
        num_cached = request.num_tokens // block_size
        num_blocks = -(-(request.num_tokens + len(tokens)) // block_size)
        if num_blocks - len(blocks) > self.pool.get_num_free_blocks():
            return False
        blocks += self.pool.get_new_blocks(max(0, num_blocks - len(blocks)))
        request.append_output_token_ids(list(tokens))
        num_full = request.num_tokens // block_size
        self.pool.cache_full_blocks(request, blocks, num_cached, num_full, block_size, 0)
        self.running[request_id] = [BlockId(b.block_id) for b in blocks]
        return True

    def tokens(self, request_id: str) -> list[int]:
        """All tokens of a running request."""
        return list(self._requests[request_id].all_token_ids)

    def preempt(self, request_id: str) -> None:
        """Take the blocks away; the request keeps its tokens, and may be started again."""
        self.pool.free_blocks(reversed([self.pool.blocks[b] for b in self.running.pop(request_id)]))

    def finish(self, request_id: str) -> None:
        """Free the request's blocks, tail first."""
        self.mempool.request_ended(request_id)
        del self._requests[request_id]
        block_ids = self.running.pop(request_id)
        self.pool.free_blocks(reversed([self.pool.blocks[b] for b in block_ids]))


class Node:
    """One instance: pool, engine, memory, transfers, and fake links to its peers."""

    def __init__(
        self, name: str, num_blocks: int = NUM_BLOCKS, layout: str = "block_first"
    ) -> None:
        self.id = InstanceId(name)
        self.epoch = 1
        self.geometry = geometry(layout, num_blocks)
        self.memory = bytearray(buffer_bytes(self.geometry))
        self.clock = FakeClock()
        self.steps = FakeSteps()
        self.mempool, self.pool = make_pool(num_blocks, clock=self.clock, steps=self.steps)
        self.engine = EngineStandIn(self.mempool, self.pool)
        self.links: dict[InstanceId, FakeLink] = {}
        self.in_flight: dict[BlockId, bytes] = {}
        """What the steps in flight will have written when they end."""
        self._peers: dict[InstanceId, Node] = {}
        self._events: list[AnyEvent] = []
        self.transfers = Transfers(
            self.mempool,
            self.geometry,
            self._open_link,
            self.id,
            self.epoch,
            self._events.append,
            TransferStyle.REQUEST,
        )

    def _open_link(self, peer: PeerJoined) -> FakeLink:
        if not peer.addresses:
            raise TransferError(f"{peer.peer} offers nothing")
        node = self._peers[peer.peer]
        link = FakeLink(self.memory, self.geometry, node.memory, node.geometry)
        self.links[peer.peer] = link
        return link

    def join(self, peer: Node, epoch: int = 1) -> None:
        """Open the link to the peer."""
        self._peers[peer.id] = peer
        self.transfers.peer_joined(
            PeerJoined(
                epoch=self.epoch,
                peer=peer.id,
                peer_epoch=epoch,
                geometry=peer.geometry,
                addresses={"fake": (peer.id,)},
            )
        )

    def take(self) -> list[AnyEvent]:
        """The events since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def only(self, kind: type[_EventT]) -> _EventT:
        """The one event since the last call, which must be of this kind."""
        (event,) = self.take()
        assert isinstance(event, kind), event
        return event

    def compute(
        self, request_id: str, tokens: Sequence[int], namespace: Namespace = NO_NAMESPACE
    ) -> int | None:
        """Run a prompt, writing the KV of what was not found; it keeps running.

        Its step is over when those are that were in flight before.
        """
        with self.steps.scheduling():
            hits = self.engine.start(request_id, tokens, namespace)
        if not self.in_flight:
            self.end_step()
        if hits is not None:
            for index in range(hits, len(tokens) // BLOCK_SIZE):
                block_id = self.engine.running[request_id][index]
                self._write(block_id, kv_of(tokens[: (index + 1) * BLOCK_SIZE], 3))
        return hits

    def extend(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Schedule the next chunk of a prompt, up to the last of these tokens, as asynchronous
        scheduling does: the index has its blocks now, and their KV is there when the step has
        ended. False: there is no room."""
        known = len(self.engine.tokens(request_id))
        with self.steps.scheduling():
            has_room = self.engine.generate(request_id, tokens[known:])
        if not has_room:
            return False
        for index in range(known // BLOCK_SIZE, len(tokens) // BLOCK_SIZE):
            block_id = self.engine.running[request_id][index]
            self.in_flight[block_id] = kv_of(tokens[: (index + 1) * BLOCK_SIZE], 3)
        return True

    def end_step(self) -> None:
        """What is in flight has its KV."""
        self.steps.num_ended = self.steps.num_launched
        for block_id, contents in self.in_flight.items():
            self._write(block_id, contents)
        self.in_flight.clear()

    def fence(self) -> Callable[[], bool]:
        """Whether the steps that are in flight at this moment have ended."""
        last = self.steps.num_launched
        return lambda: self.steps.num_ended >= last

    def tell(self, request_id: RequestId) -> None:
        """What the engine loop says of a running request in the style `chunk`."""
        block_ids = self.engine.running[request_id]
        num_tokens = len(self.engine.tokens(request_id))
        self.transfers.sender.computed(request_id, block_ids, num_tokens, self.fence())

    def end(self, request_id: RequestId, tokens: Sequence[int], *, hold: bool) -> None:
        """End a running request as the engine loop does; its source is not ready yet."""
        if hold:
            block_ids = self.engine.running[request_id]
            self.transfers.hold_source(request_id, block_ids, len(tokens))
        self.engine.finish(request_id)

    def abort(self, request_id: RequestId) -> None:
        """What the engine loop does when a request is forgotten."""
        if request_id in self.engine.running:
            self.engine.finish(request_id)
        self.transfers.drop_source(request_id)
        self.transfers.forget(request_id)

    def _write(self, block_id: int, contents: bytes) -> None:
        size = self.geometry.page_bytes
        for layer, offset in enumerate(self.geometry.layer_offsets):
            start = offset + block_id * self.geometry.block_stride
            self.memory[start : start + size] = contents[layer * size : (layer + 1) * size]

    def check(
        self, *prompts: Sequence[int], namespaces: Sequence[Namespace] = (NO_NAMESPACE,)
    ) -> None:
        """Every reference has an owner, and whatever the index finds holds the right KV.

        The index finds what vLLM finds by its own hashes.
        """
        assert self.mempool.check_integrity(self.engine.running) == []
        assert self.transfers.check_integrity() == []
        for tokens in prompts:
            for namespace in namespaces:
                found = self.mempool.match(tokens, namespace)
                assert found == self.engine.find(tokens, namespace)
                for index, block_id in enumerate(found):
                    if block_id in self.in_flight:
                        continue
                    expected = kv_of(tokens[: (index + 1) * BLOCK_SIZE], 3)
                    assert read_block(self.memory, self.geometry, block_id) == expected

    def is_idle(self) -> bool:
        """Nobody holds anything."""
        return self.mempool.holders() == [] and self.mempool.stats().active == 0


def allocate(
    request_id: RequestId,
    direction: Direction = Direction.FORWARD,
    *,
    attempt: int = 1,
    salt: str | None = None,
    is_private: bool = False,
) -> Allocate:
    """The command, without the tokens: tests pass those apart, as the engine loop does."""
    return Allocate(
        epoch=1,
        transfer_id=TransferId(f"{request_id}/{direction.value}/{attempt}"),
        request_id=request_id,
        known_tokens=0,
        token_ids=[],
        namespace=Namespace(salt),
        is_private=is_private,
        deadline_s=DEADLINE_S,
    )
