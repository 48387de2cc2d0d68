"""How a driver and its ranks live and die together, without an engine: `rank_process.py`."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from memserve.errors import StartError
from memserve.messages import PeerJoined
from memserve.types import Geometry, InstanceId, TransferStyle
from memserve.workers.hosts import Home, RankedKvHost, common_addresses, require_alike
from memserve.workers.kvbuffer import KvBuffer
from tests.contract.rank_rig import rank_geometry
from tests.integration.cluster_harness import until
from tests.integration.rank_process import NUM_BLOCKS, TP, contents

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SCRIPT = Path(__file__).with_name("rank_process.py")
DEADLINE_S = 20.0


class Driver:
    """The script, running."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=SCRIPT.parents[2],
        )
        assert self.process.stdout is not None
        about: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.geometry = msgspec.convert(about["geometry"], Geometry)
        self.addresses = about["addresses"]
        self.ranks = [psutil.Process(pid) for pid in about["pids"]]

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def until_ranks_are_gone(self) -> None:
        until(lambda: not any(map(_is_alive, self.ranks)), "the ranks are gone", DEADLINE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.until_ranks_are_gone()


@pytest.fixture
def driver() -> Iterator[Driver]:
    started = Driver()
    yield started
    started.close()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def sent(driver: Driver, source_ids: str) -> torch.Tensor:
    """These blocks, three of them, as they arrive at a peer of one rank, all heads together."""
    heads = torch.cat([contents(rank) for rank in range(TP)], dim=2)
    whole = msgspec.structs.replace(
        driver.geometry,
        num_kv_heads=TP,
        page_bytes=TP * driver.geometry.page_bytes,
        block_stride=TP * driver.geometry.block_stride,
        layer_offsets=tuple(TP * offset for offset in driver.geometry.layer_offsets),
        tp_size=1,
    )
    with KvBuffer.create(heads.nbytes) as buffer:
        peer = PeerJoined(
            epoch=1,
            peer=InstanceId("D0"),
            peer_epoch=1,
            geometry=whole,
            addresses={"shm": (buffer.address,)},
        )
        size, error = driver.ask(f"{msgspec.json.encode(peer).decode()} {source_ids} 7,0,2")
        assert (size, error) == (3 * whole.block_bytes, None)
        arrived = buffer.tensor.view(torch.float32).view(heads.shape).clone()
    others = [block for block in range(NUM_BLOCKS) if block not in (7, 0, 2)]
    assert not arrived[others].any()
    return arrived[[7, 0, 2]]


def test_ranks_send_their_own_memory_and_end_with_their_driver(driver: Driver) -> None:
    assert driver.geometry.tp_size == TP and driver.geometry.model_kv_heads == TP
    (addresses,) = driver.addresses.values()
    assert [int(address.split("/")[2]) for address in addresses] == [p.pid for p in driver.ranks]
    heads = torch.cat([contents(rank) for rank in range(TP)], dim=2)
    assert torch.equal(sent(driver, "1,5,6"), heads[[1, 5, 6]])

    assert driver.process.stdin is not None
    driver.process.stdin.close()
    assert driver.process.wait(DEADLINE_S) == 0
    driver.until_ranks_are_gone()


def test_every_rank_has_its_part_in_its_own_host_memory(driver: Driver) -> None:
    heads = torch.cat([contents(rank) for rank in range(TP)], dim=2)
    three = TP * 3 * driver.geometry.block_bytes
    slots, size, error = driver.ask("out 4,2,7")
    assert (size, error) == (three, None)
    assert driver.ask(f"in {','.join(map(str, slots))} 0,1,3") == [three, None]
    assert torch.equal(sent(driver, "0,1,3"), heads[[4, 2, 7]])


def test_a_rank_killed_in_the_midst_of_a_swap_takes_the_instance_along() -> None:
    before = set(os.listdir("/dev/shm"))
    driver = Driver()
    try:
        driver.ranks[1].suspend()  # its part of the copy cannot end
        assert len(driver.ask("begin 1,2")) == 2
        assert driver.process.poll() is None
        driver.ranks[1].kill()
        assert driver.process.wait(DEADLINE_S) == 1
        driver.until_ranks_are_gone()
    finally:
        driver.close()
    assert set(os.listdir("/dev/shm")) <= before


def test_no_rank_ends_by_a_signal_to_all(driver: Driver) -> None:
    for rank in driver.ranks:
        for number in (signal.SIGTERM, signal.SIGINT):
            rank.send_signal(number)
    heads = torch.cat([contents(rank) for rank in range(TP)], dim=2)
    assert torch.equal(sent(driver, "1,5,6"), heads[[1, 5, 6]])


def test_no_rank_outlives_a_killed_driver(driver: Driver) -> None:
    driver.process.kill()
    driver.until_ranks_are_gone()


def test_no_driver_outlives_a_killed_rank(driver: Driver) -> None:
    os.kill(driver.ranks[1].pid, signal.SIGKILL)
    assert driver.process.wait(DEADLINE_S) == 1
    driver.until_ranks_are_gone()


def test_ranks_cannot_be_started_anew() -> None:
    host = RankedKvHost("tiny", "cpu", Home(InstanceId("P0"), 1, Path()), 2, TransferStyle.REQUEST)
    with pytest.raises(StartError, match="have to be forked"):
        pickle.dumps(host)
    host.close()


def test_only_kinds_of_links_that_all_ranks_have_are_offered() -> None:
    both = [{"ipc": "a", "nccl": "b"}, {"ipc": "c", "nccl": "d"}]
    assert common_addresses(both) == {"ipc": ("a", "c"), "nccl": ("b", "d")}
    assert list(common_addresses(both)) == ["ipc", "nccl"]  # the fastest first
    for ranks in ([*both, {"ipc": "e"}], [{"ipc": "e"}, *both]):
        assert common_addresses(ranks).keys() == {"ipc"}


def test_ranks_whose_kv_lies_differently_are_refused() -> None:
    require_alike(rank_geometry(0, 2), rank_geometry(1, 2))
    other = msgspec.structs.replace(rank_geometry(1, 2), num_blocks=5)
    with pytest.raises(StartError, match=r"rank 1 lies unlike that of rank 0: num_blocks$"):
        require_alike(rank_geometry(0, 2), other)
