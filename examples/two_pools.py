"""Two processes with a pool each and no engine: one computes a prompt's KV, the other receives it.

    python examples/two_pools.py

The parent allocates blocks, fills them and indexes them (alloc_mem, insert, match); then it gives
them to the child's pool over shared memory (transfer_with_insert), twice: the second time a longer
prompt, of which only the new blocks travel. The child looks up what has arrived, and compares.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import torch

from memserve.types import BlockId
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.mempool import MemPool
from memserve.workers.peers import RemotePool, SharedPool, block_first_geometry
from memserve.workers.pools import PlainPool

NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 64, 16, 4, 2, 8
PAGE_SHAPE = (2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)  # K and V of one layer
PAGE_BYTES = 4 * 2 * BLOCK_SIZE * NUM_HEADS * HEAD_SIZE
GEOMETRY = block_first_geometry(NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS, PAGE_BYTES, model="example")

PROMPT = list(range(1000, 1150))  # 150 tokens: nine full blocks, and six tokens that stay behind
LONGER = PROMPT + list(range(2000, 2060))  # 210 tokens: thirteen full blocks


class Instance:
    """A KV cache `[num_blocks, num_layers, 2, block_size, num_heads, head_size]` and its pool."""

    def __init__(self) -> None:
        self.buffer = KvBuffer.create(NUM_BLOCKS * NUM_LAYERS * PAGE_BYTES)
        kv = self.buffer.tensor.view(torch.float32)
        self.kv = kv.view(NUM_BLOCKS, NUM_LAYERS, *PAGE_SHAPE)
        self.mempool = MemPool(PlainPool(NUM_BLOCKS), BLOCK_SIZE)


def kv_of(tokens: list[int], index: int) -> torch.Tensor:
    """What a model would compute for block `index`: it depends on all tokens up to its end."""
    seed = hash(tuple(tokens[: (index + 1) * BLOCK_SIZE]))
    return torch.rand(NUM_LAYERS, *PAGE_SHAPE, generator=torch.Generator().manual_seed(seed))


def prefill(instance: Instance, tokens: list[int]) -> list[BlockId]:
    """Compute what the index lacks; the blocks stay held by the owner "prefill"."""
    mempool = instance.mempool
    hits = mempool.match(tokens)
    mempool.pin("prefill", hits)
    num_blocks = len(tokens) // BLOCK_SIZE
    new = mempool.alloc_mem(num_blocks - len(hits), "prefill")
    for index, block_id in enumerate(new, len(hits)):
        instance.kv[block_id] = kv_of(tokens, index)
    return mempool.insert(tokens, hits + new, "prefill")


def send(connection: Connection) -> None:
    """The parent: compute, and give it to the peer."""
    instance = Instance()
    with RemotePool(connection, instance.buffer, GEOMETRY, "prefill") as peer:
        for tokens in (PROMPT, LONGER):
            block_ids = prefill(instance, tokens)
            sent = instance.mempool.transfer_with_insert(peer, tokens, block_ids)
            instance.mempool.free_all("prefill")  # from now on it is history
            print(f"{len(tokens)} tokens: {len(block_ids)} blocks, {sent} sent", flush=True)


def receive(connection: Connection) -> None:
    """The child: serve the peer until it has gone, then look at what there is."""
    instance = Instance()
    with_peer = SharedPool(instance.mempool, instance.buffer, GEOMETRY, connection, "decode")
    while with_peer.serve(patience_s=1.0):
        pass
    found = instance.mempool.match(LONGER)
    equal = all(
        torch.equal(instance.kv[block_id], kv_of(LONGER, index))
        for index, block_id in enumerate(found)
    )
    problems = instance.mempool.check_integrity({})
    print(f"received: {len(found)} blocks, equal: {equal}, problems: {problems}", flush=True)
    sys.exit(0 if equal and len(found) == 13 and not problems else 1)


def main() -> int:
    """Returns the child's exit code."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=receive, args=(theirs,))
    child.start()
    theirs.close()
    send(ours)
    child.join(timeout=60)
    return 1 if child.exitcode is None else child.exitcode


if __name__ == "__main__":
    sys.exit(main())
