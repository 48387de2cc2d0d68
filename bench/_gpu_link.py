"""The ipc link alone: blocks into another process's GPU memory; and that process is killed."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench._cluster import ROOT, require
from bench._report import Scalar

_BLOCKS = 1024
"""Of 2 MiB each."""
_SENT = 64
"""Blocks of a transfer that is compared."""
_KILLED_SENDS = 64
"""Transfers of all blocks that are under way when the peer is killed: 128 GiB, a tenth of a second
and more."""
_END_S = 5.0


class Peer:
    """The other process, as this one talks to it."""

    def __init__(self, size_bytes: int, gpu: int) -> None:
        command = [sys.executable, "-m", "bench._gpu_link", str(size_bytes), str(gpu)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._answer()

    def checksums(self, block_ids: list[int]) -> list[list[int]]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(block_ids) + "\n")
        self.process.stdin.flush()
        found: list[list[int]] = json.loads(self._answer())
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        require(bool(line), "the peer process ended; see above")
        return line


def check_link(peer_gpu: int = 0) -> dict[str, Scalar]:
    """Send to a peer on this GPU and compare; kill it in mid-transfer; use the GPU after that."""
    import torch

    from memserve.ops.device_memory import CudaDeviceMemory
    from memserve.workers.gpu_memory import GpuBuffer

    shape = geometry()
    size = shape.num_blocks * shape.block_stride
    memory = CudaDeviceMemory(torch.device("cuda", 0))
    source = GpuBuffer(memory, size)
    source.tensor.view(torch.uint8).random_(0, 256)
    torch.cuda.synchronize()
    try:
        with _peer(size, peer_gpu) as peer:
            began = time.perf_counter()
            link = _open(source, peer, memory)
            metrics: dict[str, Scalar] = {"link_open_s": time.perf_counter() - began}
            best_s = _send_and_compare(link, source, peer)
            metrics["link_ms"] = best_s * 1e3
            metrics["link_GB_per_s"] = _SENT * shape.block_bytes / best_s / 1e9
            metrics |= _kill_in_mid_transfer(link, peer)
        with _peer(size, peer_gpu) as peer:  # the next life of the same peer
            link = _open(source, peer, memory)
            _send_and_compare(link, source, peer)
            link.close()
    finally:
        source.close()
    metrics["free_GiB_after"] = torch.cuda.mem_get_info(0)[0] / 2**30
    return metrics


@contextlib.contextmanager
def _peer(size_bytes: int, gpu: int) -> Iterator[Peer]:
    peer = Peer(size_bytes, gpu)
    try:
        yield peer
    finally:
        peer.kill()


def _open(source: Any, peer: Peer, memory: Any) -> Any:
    import torch

    from memserve.ops.blocks import library_for
    from memserve.types import InstanceId, TransferStyle
    from memserve.workers.links.base import RankPeer
    from memserve.workers.links.ipc import open_ipc

    device = torch.device("cuda", 0)
    there = RankPeer(InstanceId("D0"), 1, geometry(), peer.address)
    return open_ipc(
        source, geometry(), there, memory, device, library_for(device), TransferStyle.REQUEST
    )


def _send_and_compare(link: Any, source: Any, peer: Peer) -> float:
    """Seconds of the fastest of a few transfers of random blocks, none of which may differ."""
    from memserve.types import BlockId, TransferId

    shape = geometry()
    rng = random.Random(1)
    times: list[float] = []
    for number in range(6):
        source_ids = [BlockId(b) for b in rng.sample(range(shape.num_blocks), _SENT)]
        target_ids = [BlockId(b) for b in rng.sample(range(shape.num_blocks), _SENT)]
        link.send(TransferId(f"t{number}"), source_ids, target_ids)
        (ended,) = _ended(link, 1)
        require(ended.error is None, f"the transfer failed: {ended.error}")
        require(ended.size_bytes == _SENT * shape.block_bytes, "wrong byte count")
        times.append(ended.seconds)
        own = [checksum(source.tensor, shape.block_stride, b) for b in source_ids]
        there = peer.checksums([int(b) for b in target_ids])
        wrong = [b for b, a, c in zip(target_ids, own, there, strict=True) if a != c]
        require(not wrong, f"{len(wrong)} blocks differ at the peer: {wrong[:8]}")
    return min(times)


def _kill_in_mid_transfer(link: Any, peer: Peer) -> dict[str, Scalar]:
    """Every transfer must end, and closing the link as well."""
    from memserve.types import BlockId, TransferId

    block_ids = [BlockId(b) for b in range(geometry().num_blocks)]
    for number in range(_KILLED_SENDS):
        link.send(TransferId(f"late {number}"), block_ids, block_ids)
    before = len(link.poll())
    require(before < _KILLED_SENDS, "all transfers were done before the peer could be killed")
    began = time.perf_counter()
    peer.process.kill()
    ended = _ended(link, _KILLED_SENDS - before)
    ended_s = time.perf_counter() - began
    link.close()
    closed_s = time.perf_counter() - began
    peer.process.wait(20)
    return {
        "mid_kill_under_way": _KILLED_SENDS - before,
        "mid_kill_ended_after_s": ended_s,
        "mid_kill_failed": sum(end.error is not None for end in ended),
        "mid_kill_closed_after_s": closed_s,
        "mid_kill_dead_after_s": time.perf_counter() - began,
    }


def _ended(link: Any, count: int) -> list[Any]:
    done: list[Any] = []
    deadline = time.monotonic() + _END_S
    while len(done) < count:
        done += link.poll()
        require(time.monotonic() < deadline, f"{count - len(done)} transfers do not end")
    return done


def geometry() -> Any:
    """The blocks of the Llama-3.1-8B shape, 16 tokens each."""
    from memserve.types import Geometry

    page = 64 << 10
    return Geometry(
        model="check",
        dtype="bfloat16",
        block_size=16,
        num_blocks=_BLOCKS,
        num_kv_heads=8,
        page_bytes=page,
        block_stride=32 * page,
        layer_offsets=tuple(layer * page for layer in range(32)),
    )


def checksum(memory: Any, stride: int, block: int) -> list[int]:
    """Of one block: two sums that change with any byte and with its place."""
    import torch

    words = memory[block * stride : (block + 1) * stride].view(torch.int32).to(torch.int64)
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return [int(words.sum()), int((words * places).sum())]


def be_peer(size_bytes: int, gpu: int) -> None:
    """Own memory, say where, answer with checksums of the blocks asked for."""
    import torch

    from memserve.ops.device_memory import CudaDeviceMemory
    from memserve.workers.gpu_memory import GpuBuffer

    torch.cuda.set_device(gpu)
    torch.cuda.init()
    buffer = GpuBuffer(CudaDeviceMemory(torch.device("cuda", gpu)), size_bytes)
    torch.cuda.synchronize()
    print(buffer.address, flush=True)
    stride = geometry().block_stride
    for line in sys.stdin:
        sums = [checksum(buffer.tensor, stride, block) for block in json.loads(line)]
        print(json.dumps(sums), flush=True)


if __name__ == "__main__":
    be_peer(int(sys.argv[1]), int(sys.argv[2]))
