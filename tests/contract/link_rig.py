"""What the tests of links share: small geometries, a clock, a second process. Imports no vLLM."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from memserve.types import BlockId, Geometry, TransferId

BLOCK_SIZE = 4
NUM_LAYERS = 3
PAGE_BYTES = 64
NUM_BLOCKS = 17
T1, T2, T3 = TransferId("t1"), TransferId("t2"), TransferId("t3")

ROOT = Path(__file__).resolve().parents[2]
PEER_SCRIPT = Path(__file__).with_name("peer_process.py")


def geometry(
    layout: str = "block_first", num_blocks: int = NUM_BLOCKS, **changes: object
) -> Geometry:
    """A small KV cache: `block_first`, `layer_first`, or `padded` (gaps between the blocks)."""
    block_bytes = NUM_LAYERS * PAGE_BYTES
    stride = {"block_first": block_bytes, "layer_first": PAGE_BYTES, "padded": block_bytes + 16}
    step = num_blocks * PAGE_BYTES if layout == "layer_first" else PAGE_BYTES
    fields: dict[str, object] = {
        "model": "tiny",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_blocks": num_blocks,
        "num_kv_heads": 1,
        "page_bytes": PAGE_BYTES,
        "block_stride": stride[layout],
        "layer_offsets": tuple(layer * step for layer in range(NUM_LAYERS)),
    }
    return Geometry(**(fields | changes))  # type: ignore[arg-type]


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(n) for n in numbers]


def buffer_bytes(of: Geometry) -> int:
    """How large a buffer of this geometry is."""
    return max(of.layer_offsets) + (of.num_blocks - 1) * of.block_stride + of.page_bytes


def read_block(memory: object, of: Geometry, block_id: int) -> bytes:
    """All pages of a block, in the order of the layers."""
    view = memoryview(memory)  # type: ignore[arg-type]
    starts = [offset + block_id * of.block_stride for offset in of.layer_offsets]
    return b"".join(bytes(view[start : start + of.page_bytes]) for start in starts)


def fill_random(memory: object, seed: int) -> None:
    """Contents that differ from block to block."""
    view = np.frombuffer(memory, dtype=np.uint8)  # type: ignore[call-overload]
    view[:] = np.random.default_rng(seed).integers(0, 256, len(view), dtype=np.uint8)


class FakeClock:
    """Time that stands still until told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class PeerProcess:
    """`peer_process.py`, running. It answers each line with a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, *words: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer, "the peer process has ended"
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(timeout=30)


@contextmanager
def peer_process() -> Iterator[PeerProcess]:
    """Start a second process; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, str(PEER_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    peer = PeerProcess(process)
    try:
        yield peer
    finally:
        peer.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
