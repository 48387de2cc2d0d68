"""The other process of the contract tests; answers each line of its input with a line.

`own SIZE` makes a KV buffer of so many bytes and answers with its address, `own_gpu SIZE` one on
the first GPU. `send ADDRESS BUDGET SOURCE_IDS TARGET_IDS` maps the buffer there, writes its own
blocks (random, seed 7) into it until BUDGET bytes are written, and answers with the number of
transfers that have ended.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from memserve.ops.device_memory import CudaDeviceMemory
from memserve.types import BlockId, TransferId
from memserve.workers.gpu_memory import GpuBuffer
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.links.shm import ShmLink
from tests.contract.link_rig import buffer_bytes, fill_random, geometry

_kept: list[object] = []


def own(size_bytes: str) -> str:
    buffer = KvBuffer.create(int(size_bytes))
    _kept.append(buffer)
    return buffer.address


def own_gpu(size_bytes: str) -> str:
    buffer = GpuBuffer(CudaDeviceMemory(torch.device("cuda", 0)), int(size_bytes))
    torch.cuda.synchronize()
    _kept.append(buffer)
    return buffer.address


def send(address: str, budget: str, source_ids: str, target_ids: str) -> str:
    shape = geometry()
    source = KvBuffer.create(buffer_bytes(shape))
    fill_random(source.array, seed=7)
    link = ShmLink(source, shape, KvBuffer.open(address), shape, poll_bytes=int(budget))
    _kept.append(link)
    link.send(TransferId("t"), block_ids(source_ids), block_ids(target_ids))
    return str(len(link.poll()))


def block_ids(text: str) -> list[BlockId]:
    return [BlockId(int(number)) for number in text.split(",")]


if __name__ == "__main__":
    for line in sys.stdin:
        name, *arguments = line.split()
        print({"own": own, "own_gpu": own_gpu, "send": send}[name](*arguments), flush=True)
