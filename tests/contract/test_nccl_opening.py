"""The NCCL link on fakes: who may open one to whom, and who is turned away."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from memserve.errors import StartError, TransferError
from memserve.ops.nccl_pipe import Counts
from memserve.types import Heads, InstanceId
from memserve.workers.links import nccl
from memserve.workers.links.base import Rank, RankPeer
from memserve.workers.links.nccl import NcclEndpoint
from memserve.workers.links.nccl_fake import FakeCommunicator, FakePipe
from memserve.workers.links.nccl_worker import Machinery
from tests.contract.link_rig import T1, buffer_bytes, geometry, ids
from tests.contract.nccl_rig import DEADLINE_S, SETTINGS, SHAPE, End, EndMaker, completions, until


@pytest.fixture
def make_end() -> Iterator[EndMaker]:
    with EndMaker() as ends:
        yield ends


def test_two_ranks_on_one_gpu_are_refused(make_end: EndMaker) -> None:
    p, d = make_end("P0", where="GPU-7"), make_end("D0", where="GPU-7")
    with pytest.raises(TransferError, match=r"^NCCL cannot join P0 and D0: both are on GPU GPU-7$"):
        p.endpoint.open(d.peer())


def test_ranks_whose_blocks_differ_in_size_are_refused(make_end: EndMaker) -> None:
    p = make_end("P0", geometry(num_kv_heads=4))
    d = make_end("D0", geometry(num_kv_heads=4))
    with pytest.raises(TransferError, match="D0: P0 sends 96 bytes of a block, 192 fit here"):
        p.endpoint.open(d.peer(own_heads=Heads(0, 2)))
    with pytest.raises(TransferError, match="D0: 9 heads from head 0 on are asked for"):
        p.endpoint.open(d.peer(peer_heads=Heads(0, 9)))


def test_what_is_no_address_is_refused(make_end: EndMaker) -> None:
    p = make_end("P0")
    with pytest.raises(TransferError, match="not the address of an NCCL endpoint"):
        p.endpoint.open(RankPeer(InstanceId("D0"), 1, SHAPE, "/tmp/there"))
    nobody = '{"socket": "/nonexistent.sock", "gpu": "other"}'
    with pytest.raises(TransferError, match="D0 does not answer: No such file"):
        p.endpoint.open(RankPeer(InstanceId("D0"), 1, SHAPE, nobody))


def test_a_receiver_that_cannot_join_is_told_by_name(make_end: EndMaker) -> None:
    p, d = make_end("P0"), make_end("D0")
    d.fake.error = "unhandled system error"
    with pytest.raises(TransferError, match="D0: NCCL failed: unhandled system error"):
        p.endpoint.open(d.peer())


@pytest.mark.parametrize("who", ["P0", "D0"])
@pytest.mark.parametrize("where", ["connecting", "splitting"])
def test_a_peer_that_gets_stuck_in_an_opening_is_not_waited_for(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch, where: str, who: str
) -> None:
    soon = msgspec.structs.replace(SETTINGS, open_s=1.0)
    p, d = make_end("P0", settings=soon), make_end("D0", settings=soon)
    stuck = {"P0": p, "D0": d}[who]
    run, split = FakePipe.run, FakeCommunicator.split

    def run_others(pipe: FakePipe, finished: int = 0, watch: int = -1) -> Counts:
        return pipe._counts if pipe._gpu is stuck.gpu else run(pipe, finished, watch)

    def split_others(communicator: FakeCommunicator) -> None:
        if communicator._fabric is not stuck.fake:
            split(communicator)

    if where == "connecting":
        monkeypatch.setattr(FakePipe, "run", run_others)
    else:
        monkeypatch.setattr(FakeCommunicator, "split", split_others)
    with pytest.raises(TransferError, match="not open after 1 s"):
        p.endpoint.open(d.peer())
    until(lambda: d.fake.num_aborted == 1, "the receiver should have given up")


@pytest.mark.parametrize("who", ["P0", "D0"])
def test_a_connecting_pipe_that_cannot_be_ended_well_is_closed_once(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """A native pipe is gone after `close`, also if that raises: a second one frees it again."""
    p, d = make_end("P0", seed=1), make_end("D0")
    end = {"P0": p, "D0": d}[who]
    close, closed = FakePipe.close, []

    def fail(pipe: FakePipe) -> None:
        if pipe._gpu is not end.gpu:
            return close(pipe)
        closed.append(pipe)
        if closed.count(pipe) == 1:
            close(pipe)
        raise TransferError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(FakePipe, "close", fail)
        with pytest.raises(TransferError, match="illegal memory access"):
            p.endpoint.open(d.peer())
        until(lambda: end.gpu.num_pipes == 0 and end.fake.num_aborted == 1, "it should end")
        until(lambda: not any(t.name.startswith("nccl from") for t in threading.enumerate()), "end")
    assert len(closed) == 1


def test_a_socket_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    end = End("P0", torch.zeros(buffer_bytes(SHAPE), dtype=torch.int8), SHAPE, tmp_path)
    machinery = Machinery(end.fake, end.gpu, SETTINGS)
    try:
        with pytest.raises(StartError, match=r"cannot listen on .*P0-1-0\.sock"):
            NcclEndpoint(
                Rank(InstanceId("P0"), 1, 0),
                end.memory,
                SHAPE,
                machinery,
                folder=tmp_path,
                gpu="other",
            )
    finally:
        end.close()


@pytest.mark.parametrize("greeting", [b"", b"\0\0\0\1\xc1", b"\xff\xff\xff\xff"])
def test_a_stranger_harms_nobody(make_end: EndMaker, greeting: bytes) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    where = msgspec.json.decode(d.endpoint.address)["socket"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(where)
        stranger.sendall(greeting)
        link = p.endpoint.open(d.peer())
        link.send(T1, ids(1), ids(2))
        assert completions(link, 1)[0].error is None


class _NoDescriptors:
    """A listener whose `accept` fails so many times."""

    def __init__(self, listener: socket.socket, num_failures: int) -> None:
        self._listener = listener
        self._num_failures = num_failures
        self.num_asked = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_asked += 1
        if self.num_asked <= self._num_failures:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()

    def close(self) -> None:
        self._listener.close()


def _run_out(end: End, num_failures: int) -> _NoDescriptors:
    listener = _NoDescriptors(end.endpoint._listener, num_failures)
    end.endpoint._listener = listener  # type: ignore[assignment]
    return listener


def test_a_peer_that_comes_while_there_are_no_descriptors_is_accepted_later(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_ACCEPT_AGAIN_S", 0.001)
    p, d = make_end("P0", seed=1), make_end("D0")
    listener = _run_out(d, num_failures=3)
    link = p.endpoint.open(d.peer())
    assert listener.num_asked == 4
    link.send(T1, ids(1), ids(2))
    assert completions(link, 1)[0].error is None


def test_without_descriptors_it_is_not_tried_all_the_time_and_can_be_closed(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_ACCEPT_AGAIN_S", 10 * DEADLINE_S)
    d = make_end("D0")
    listener = _run_out(d, num_failures=1_000_000)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(msgspec.json.decode(d.endpoint.address)["socket"])
        until(lambda: listener.num_asked > 0, "the endpoint should try")
        d.endpoint.close()
    assert listener.num_asked == 1
