"""A driver and two ranks without an engine: `hosts.RankedKvHost`, forked and called as vLLM does.

It prints one JSON line about itself, then answers each line of its input:

    PEER SOURCE_IDS TARGET_IDS   sends its blocks to the peer (a JSON `PeerJoined`): bytes, error
    out BLOCK_IDS                copies blocks to DRAM: slots, bytes, error
    in SLOT_IDS BLOCK_IDS        copies them into blocks: bytes, error
    begin BLOCK_IDS              begins to copy blocks to DRAM: slots

At the end of its input it ends in order.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import torch

from memserve.messages import PeerJoined
from memserve.types import BlockId, Geometry, InstanceId, SlotId, TransferId, TransferStyle
from memserve.workers import hosts, main
from memserve.workers.dram import DramTier
from memserve.workers.links.choice import LinkChoice

TP = 2
NUM_SLOTS = 3
NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE, CONTENT = 8, 2, 4, 6
"""One head a rank; shape `[NUM_SLOTS = 3
NUM_BLOCKS, NUM_LAYERS, 1, BLOCK_SIZE, CONTENT]`, float32."""


def contents(rank: int) -> torch.Tensor:
    """What a rank's KV holds."""
    shape = (NUM_BLOCKS, NUM_LAYERS, 1, BLOCK_SIZE, CONTENT)
    return torch.rand(shape, generator=torch.Generator().manual_seed(rank))


def be_rank(host: hosts.RankedKvHost, rank: int) -> None:
    hosts.get_tensor_model_parallel_rank = lambda: rank
    placing = host.kv_cache_memory()
    assert placing is not None
    mine = contents(rank)
    with placing:
        raw = torch.zeros(mine.nbytes, dtype=torch.int8)
    views = raw.view(torch.float32).view(mine.shape)
    views.copy_(mine)
    layers = {f"layer {number}": view for number, view in enumerate(views.unbind(1))}
    host.on_kv_caches(layers, BLOCK_SIZE)
    signal.pause()


def serve(host: hosts.RankedKvHost, geometry: Geometry, tier: DramTier) -> None:
    choice = LinkChoice(geometry, host.addresses, host.open_lanes)
    for line in sys.stdin:
        match line.split():
            case ["out", ids]:
                slots = tier.copy_out("out", block_ids(ids))
                answer = [slots, *ended(tier)]
            case ["in", slot_ids, ids]:
                tier.copy_in("in", [SlotId(slot) for slot in block_ids(slot_ids)], block_ids(ids))
                answer = ended(tier)
            case ["begin", ids]:
                answer = [*tier.copy_out("begun", block_ids(ids))]
            case _:
                answer = send(choice, *line.rsplit(maxsplit=2))
        print(json.dumps(answer), flush=True)
    tier.close()


def send(choice: LinkChoice, peer: str, source_ids: str, target_ids: str) -> list[Any]:
    link = choice(msgspec.json.decode(peer, type=PeerJoined))
    link.send(TransferId("t"), block_ids(source_ids), block_ids(target_ids))
    deadline = time.monotonic() + 20
    while not (done := link.poll()):
        assert time.monotonic() < deadline
    link.close()
    return [done[0].size_bytes, done[0].error]


def ended(tier: DramTier) -> list[Any]:
    deadline = time.monotonic() + 20
    while not (ends := tier.poll()):
        assert time.monotonic() < deadline
    return [ends[0].size_bytes, ends[0].error]


def block_ids(text: str) -> list[BlockId]:
    return [BlockId(int(number)) for number in text.split(",")]


def run() -> None:
    torch.set_num_threads(1)
    host = hosts.RankedKvHost(
        "tiny", "cpu", hosts.Home(InstanceId("P0"), 1, Path()), TP, TransferStyle.REQUEST
    )
    host.total_kv_heads = TP
    main._tie_forks_to_their_parents()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=be_rank, args=(host, rank), daemon=True) for rank in range(TP)]
    for rank in ranks:
        rank.start()
    geometry = host.settle()
    tier = DramTier(host.open_dram(NUM_SLOTS * TP * geometry.block_bytes))
    about = {
        "geometry": msgspec.to_builtins(geometry),
        "addresses": host.addresses,
        "pids": [rank.pid for rank in ranks],
    }
    print(json.dumps(about), flush=True)
    serve(host, geometry, tier)
    host.stop()
    for rank in ranks:
        rank.kill()
        rank.join(20)
    host.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run()
