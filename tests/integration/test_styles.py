"""Every transfer style, between real workers: the same tokens, and nothing left by what goes wrong.

The prompts are computed in several steps, and P is told where to send them before it begins, so
that the early styles can be early. Each style has a P of its own; all share one D.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from memserve.messages import (
    Abort,
    Allocate,
    Allocated,
    Cancel,
    Commit,
    Finished,
    Inserted,
    PeerLost,
    Prefill,
    ResetCache,
    Sent,
    Started,
    Stop,
    Transmit,
    TransmitFailed,
)
from memserve.types import BlockId, InstanceId, Namespace, RequestId, TransferId, TransferStyle
from memserve.workers.kvbuffer import KvBuffer
from tests.integration.worker_harness import BLOCK, DEADLINE_S, ENGINE, Rig, request_bytes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

CHUNK = 2 * BLOCK + 5
"""Tokens in a step; not whole blocks."""
LONG = 1500
"""Takes some seconds to compute."""
NUM_TOKENS = 4
STYLES = {style: f"P{number}" for number, style in enumerate(TransferStyle)}
EARLY = (TransferStyle.CHUNK, TransferStyle.LAYER)


@pytest.fixture(scope="module")
def rig(model_folder: Path) -> Iterator[Rig]:
    """D0 alone."""
    rig = Rig(str(model_folder))
    try:
        rig.start("D0")
        yield rig
    finally:
        rig.close()


@pytest.fixture(scope="module", params=TransferStyle, ids=lambda style: style.value)
def style(request: pytest.FixtureRequest, rig: Rig) -> Iterator[TransferStyle]:
    """Its P runs, one at a time, and has a link to D0."""
    style: TransferStyle = request.param
    name = STYLES[style]
    engine = {**ENGINE, "max_num_batched_tokens": CHUNK, "max_num_seqs": 8}
    ready = rig.start(name, style=style, engine=engine)
    rig.link({name: ready[name], "D0": rig.ready["D0"]})
    yield style
    rig.send(name, Stop(epoch=1))
    assert rig.exit_of(rig.pids[name]) in (0, -signal.SIGKILL)


@pytest.fixture
def p(rig: Rig, style: TransferStyle) -> Iterator[str]:
    """The style's P, empty; afterwards nobody holds anything."""
    name = STYLES[style]
    for instance in (name, "D0"):
        rig.send(instance, ResetCache(epoch=1))
        rig.take(instance)
    yield name
    rig.assert_clean(name, "D0")


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(1000, 40_000), k=length)


def allocate(rig: Rig, name: str, prompt: list[int]) -> Allocated:
    rig.send(
        "D0",
        Allocate(
            epoch=1,
            transfer_id=TransferId(name),
            request_id=RequestId(name),
            known_tokens=0,
            token_ids=prompt,
            namespace=Namespace(),
            is_private=False,
            deadline_s=60.0,
        ),
    )
    return rig.expect("D0", Allocated)


def begin(rig: Rig, p: str, name: str, prompt: list[int], allocated: Allocated) -> None:
    """P knows where D has room, and begins to compute."""
    rig.send(
        p,
        Prefill(
            epoch=1,
            request_id=RequestId(name),
            attempt=1,
            request=request_bytes(NUM_TOKENS),
            known_tokens=0,
            token_ids=prompt,
            whole=False,
            hold=True,
            is_private=False,
        ),
    )
    rig.send(
        p,
        Transmit(
            epoch=1,
            transfer_id=allocated.transfer_id,
            request_id=RequestId(name),
            peer=InstanceId("D0"),
            first_block=allocated.hit_blocks,
            block_ids=allocated.block_ids,
        ),
    )
    rig.expect(p, Started, lambda e: e.request_id == name)


@pytest.mark.parametrize("length", [3 * BLOCK, 300, 417])
def test_the_tokens_of_a_whole_request(rig: Rig, p: str, length: int) -> None:
    """Twice: the second time D has all but one block more, and P has all of it."""
    for total, held in ((length, 0), (length + 2 * BLOCK, length // BLOCK)):
        prompt, name = prompt_of(length)[:length] + prompt_of(total - length), f"r{total}"
        expected = rig.whole(p, prompt, request_bytes(NUM_TOKENS), "whole")
        allocated = allocate(rig, name, prompt)
        begin(rig, p, name, prompt, allocated)
        assert allocated.hit_blocks == held
        first = rig.tokens_until_end(p, name)
        sent = rig.expect(p, Sent)
        assert sent.num_blocks == total // BLOCK - held
        assert sent.size_bytes == sent.num_blocks * rig.ready["D0"].geometry.block_bytes
        commit = Commit(epoch=1, transfer_id=sent.transfer_id, size_bytes=sent.size_bytes, pin=True)
        rig.send("D0", commit)
        assert rig.expect("D0", Inserted).num_tokens == total // BLOCK * BLOCK
        request = request_bytes(NUM_TOKENS)
        rig.decode(prompt + first, request, name, known_tokens=total)
        assert rig.expect("D0", Started).cached_tokens == total // BLOCK * BLOCK
        assert first + rig.tokens_until_end("D0", name) == expected
        rig.expect("D0", Finished)
        rig.forget(name, p, "D0")


def test_several_at_once(rig: Rig, p: str) -> None:
    """Prefills that share steps, and a prefix that one finds while the other computes it."""
    prompts = {f"m{i}": prompt_of(250)[: 120 + 20 * i] + prompt_of(60 + i) for i in range(4)}
    request = request_bytes(NUM_TOKENS)
    expected = {name: rig.whole(p, t, request, "whole") for name, t in prompts.items()}
    for name, prompt in prompts.items():
        begin(rig, p, name, prompt, allocate(rig, name, prompt))
    firsts = {name: rig.tokens_until_end(p, name) for name in prompts}
    for name, prompt in prompts.items():
        sent = rig.expect(p, Sent, lambda e, name=name: e.transfer_id == name)  # type: ignore[misc]
        rig.send(
            "D0",
            Commit(epoch=1, transfer_id=sent.transfer_id, size_bytes=sent.size_bytes, pin=True),
        )
        rig.expect("D0", Inserted)
        rig.decode(prompt + firsts[name], request, name, known_tokens=len(prompt))
        assert firsts[name] + rig.tokens_until_end("D0", name) == expected[name], name
        rig.forget(name, p, "D0")


@pytest.mark.parametrize("how", ["abort", "cancel", "peer lost"])
def test_an_end_in_the_midst_of_a_prefill(
    rig: Rig, p: str, style: TransferStyle, memory: KvBuffer, how: str
) -> None:
    name = f"ended by {how}"
    allocated = begin_until_sent(rig, p, style, memory, name)
    match how:
        case "abort":
            rig.send(p, Abort(epoch=1, request_id=RequestId(name)))
        case "cancel":
            rig.send(p, Cancel(epoch=1, transfer_id=allocated.transfer_id))
        case "peer lost":
            rig.send(p, PeerLost(epoch=1, peer=InstanceId("D0"), peer_epoch=1))
    assert rig.expect(p, TransmitFailed).transfer_id == name
    assert not is_filled(memory, rig, allocated.block_ids[-1])
    rig.send("D0", Cancel(epoch=1, transfer_id=allocated.transfer_id))
    rig.forget(name, p, "D0")
    if how == "peer lost":
        rig.link({p: rig.ready[p], "D0": rig.ready["D0"]})


def test_a_kill_in_the_midst_of_a_prefill(rig: Rig, style: TransferStyle, memory: KvBuffer) -> None:
    """P's last test: D frees what P wrote."""
    p = STYLES[style]
    allocated = begin_until_sent(rig, p, style, memory, "killed")
    os.kill(rig.pids[p], signal.SIGKILL)
    rig.send("D0", PeerLost(epoch=1, peer=InstanceId(p), peer_epoch=1))
    rig.send("D0", Cancel(epoch=1, transfer_id=allocated.transfer_id))
    rig.forget("killed", "D0")
    rig.assert_clean("D0")


@pytest.fixture
def memory(rig: Rig) -> Iterator[KvBuffer]:
    """D's KV blocks, mapped here."""
    buffer = KvBuffer.open(rig.ready["D0"].addresses["shm"][0])
    yield buffer
    buffer.close()


def begin_until_sent(
    rig: Rig, p: str, style: TransferStyle, memory: KvBuffer, name: str
) -> Allocated:
    """A long prefill has begun; in an early style D has its first block, and not its last one."""
    prompt = prompt_of(LONG)
    allocated = allocate(rig, name, prompt)
    first, last = allocated.block_ids[0], allocated.block_ids[-1]
    for block_id in (first, last):
        page(memory, rig, block_id)[:] = 0
    begin(rig, p, name, prompt, allocated)
    if style in EARLY:
        deadline = time.monotonic() + DEADLINE_S
        while not is_filled(memory, rig, first):
            assert time.monotonic() < deadline, "nothing was sent early"
            rig.audit(p)  # answered between two steps
    assert is_filled(memory, rig, first) == (style in EARLY)
    assert not is_filled(memory, rig, last)
    return allocated


def page(memory: KvBuffer, rig: Rig, block_id: BlockId) -> np.ndarray:  # type: ignore[type-arg]
    """The last layer's page of D's block."""
    geometry = rig.ready["D0"].geometry
    start = geometry.layer_offsets[-1] + block_id * geometry.block_stride
    return memory.array[start : start + geometry.page_bytes]


def is_filled(memory: KvBuffer, rig: Rig, block_id: BlockId) -> bool:
    """Whether anything was written there."""
    return bool(np.any(page(memory, rig, block_id)))
