"""A driver and two ranks without an engine: `hosts.RankedKvHost`, forked and called as vLLM does.

It prints one JSON line about itself, then answers each line `PEER SOURCE_IDS TARGET_IDS` (`PEER`: a
JSON `PeerJoined`) by sending its blocks there, with the bytes and the error. At the end of its
input it ends in order.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import torch

from memserve.messages import PeerJoined
from memserve.types import BlockId, Geometry, InstanceId, TransferId, TransferStyle
from memserve.workers import hosts, main
from memserve.workers.links.choice import LinkChoice

TP = 2
NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE, CONTENT = 8, 2, 4, 6
"""One head a rank; shape `[NUM_BLOCKS, NUM_LAYERS, 1, BLOCK_SIZE, CONTENT]`, float32."""


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


def serve(host: hosts.RankedKvHost, geometry: Geometry) -> None:
    choice = LinkChoice(geometry, host.addresses, host.open_lanes)
    for line in sys.stdin:
        peer, source_ids, target_ids = line.rsplit(maxsplit=2)
        link = choice(msgspec.json.decode(peer, type=PeerJoined))
        link.send(TransferId("t"), block_ids(source_ids), block_ids(target_ids))
        deadline = time.monotonic() + 20
        while not (done := link.poll()):
            assert time.monotonic() < deadline
        link.close()
        print(json.dumps([done[0].size_bytes, done[0].error]), flush=True)


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
    about = {
        "geometry": msgspec.to_builtins(geometry),
        "addresses": host.addresses,
        "pids": [rank.pid for rank in ranks],
    }
    print(json.dumps(about), flush=True)
    serve(host, geometry)
    host.stop()
    for rank in ranks:
        rank.kill()
        rank.join(20)
    host.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run()
