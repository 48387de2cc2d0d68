"""The other process of the contract tests; answers each line of its input with a line.

`own SIZE` makes a KV buffer of so many bytes and answers with its address, `own_gpu SIZE` one on
the first GPU. `send ADDRESS BUDGET SOURCE_IDS TARGET_IDS` maps the buffer there, writes its own
blocks (random, seed 7) into it until BUDGET bytes are written, and answers with the number of
transfers that have ended.

`own_nccl DEVICE LAYOUT NUM_BLOCKS NAME EPOCH FOLDER` is one end of NCCL links, on fakes (cpu) or on
the second GPU (cuda), over random blocks (seed 7): it answers with where its memory and its
endpoint are. `nccl_open LAYOUT NUM_BLOCKS NAME EPOCH ADDRESS` opens a link from there to another
end, `nccl_hold` stops what moves on the fakes, `nccl_send SOURCE_IDS TARGET_IDS` starts a transfer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from memserve.ops.device_memory import CudaDeviceMemory
from memserve.types import BlockId, InstanceId, TransferId
from memserve.workers.gpu_memory import GpuBuffer
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.links.base import Link, RankPeer
from memserve.workers.links.shm import ShmLink
from tests.contract.link_rig import buffer_bytes, fill_random, geometry
from tests.contract.nccl_rig import End, cuda_end

_kept: list[object] = []
_ends: list[End] = []
_links: list[Link] = []


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


def own_nccl(device: str, layout: str, num_blocks: str, name: str, epoch: str, folder: str) -> str:
    shape = geometry(layout, int(num_blocks))
    contents = bytearray(buffer_bytes(shape))
    fill_random(contents, seed=7)
    if device == "cpu":
        buffer = KvBuffer.create(len(contents))
        end = End(name, buffer.tensor, shape, Path(folder), epoch=int(epoch))
        address = buffer.address
        buffer.tensor.copy_(torch.frombuffer(contents, dtype=torch.int8))
        _kept.append(buffer)
    else:
        gpu_buffer = GpuBuffer(CudaDeviceMemory(torch.device("cuda", 1)), len(contents))
        end = cuda_end(name, 1, gpu_buffer.tensor, shape, Path(folder), epoch=int(epoch))
        address = gpu_buffer.address
        gpu_buffer.tensor.copy_(torch.frombuffer(contents, dtype=torch.int8))
        torch.cuda.synchronize(1)
        _kept.append(gpu_buffer)
    _kept.append(end)
    _ends.append(end)
    return f"{address} {end.endpoint.address}"


def nccl_open(layout: str, num_blocks: str, name: str, epoch: str, address: str) -> str:
    shape = geometry(layout, int(num_blocks))
    _links.append(_ends[-1].endpoint.open(RankPeer(InstanceId(name), int(epoch), shape, address)))
    return _links[-1].kind


def nccl_hold() -> str:
    _ends[-1].fake.is_held = True
    return "held"


def nccl_send(source_ids: str, target_ids: str) -> str:
    _links[-1].send(TransferId("t"), block_ids(source_ids), block_ids(target_ids))
    return "sent"


def block_ids(text: str) -> list[BlockId]:
    return [BlockId(int(number)) for number in text.split(",")]


_COMMANDS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (own, own_gpu, send, own_nccl, nccl_open, nccl_hold, nccl_send)
}

if __name__ == "__main__":
    for line in sys.stdin:
        name, *arguments = line.split()
        print(_COMMANDS[name](*arguments), flush=True)
