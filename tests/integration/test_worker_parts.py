"""Parts of a worker's process that need vLLM's import but no engine."""

from __future__ import annotations

import fcntl
import pickle
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memserve.errors import StartError
from memserve.types import BlockId, InstanceId, SlotId, TransferStyle
from memserve.workers import main
from memserve.workers.connector import MemServeConnector
from memserve.workers.kv_layout import geometry_of
from memserve.workers.kv_memory import GpuKvMemory, HostKvMemory, KvMemory, Openers, kv_memory
from memserve.workers.links.base import Rank
from memserve.workers.rank_messages import Saving, StepOrders
from tests.contract.link_rig import geometry

pytestmark = pytest.mark.integration


# ── taking turns on a GPU ─────────────────────────────────────────────────────────────────────


def _is_locked(path: Path) -> bool:
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_engines_on_one_gpu_are_built_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "gpu-0.lock"
    second_has_begun, second_may_end = threading.Event(), threading.Event()

    def second() -> None:
        with main._turn_on_gpus((str(path),)):
            second_has_begun.set()
            assert second_may_end.wait(30)

    with main._turn_on_gpus((str(path),)):
        thread = threading.Thread(target=second)
        thread.start()
        assert _is_locked(path)
        assert not second_has_begun.is_set()
    assert second_has_begun.wait(30)
    assert _is_locked(path)
    second_may_end.set()
    thread.join(30)
    assert not _is_locked(path)


def test_a_failed_start_lets_the_next_one_begin(tmp_path: Path) -> None:
    path = tmp_path / "gpu-0.lock"
    with pytest.raises(StartError, match="no room"), main._turn_on_gpus((str(path),)):
        raise StartError("no room")
    assert not _is_locked(path)


def test_ranks_that_were_forked_meanwhile_do_not_keep_the_turn(tmp_path: Path) -> None:
    path = tmp_path / "gpu-0.lock"
    with main._turn_on_gpus((str(path),)):
        fds = [fd for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == path]
        assert fds
        rank = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[int(f.name) for f in fds])
    try:
        assert not _is_locked(path)
    finally:
        rank.communicate(timeout=30)


def test_an_engine_alone_on_its_gpu_takes_no_turn(tmp_path: Path) -> None:
    with main._turn_on_gpus(()):
        assert list(tmp_path.iterdir()) == []


# ── device and memory ─────────────────────────────────────────────────────────────────────────


def test_a_device_that_the_engine_was_not_built_for_is_refused() -> None:
    main._require_device("cpu")
    with pytest.raises(StartError, match="device is cuda, but the installed vLLM finds 'cpu'"):
        main._require_device("cuda")


def _openers(memory: KvMemory) -> Openers:
    return memory.openers(geometry(), TransferStyle.REQUEST)


def test_memory_by_device(tmp_path: Path) -> None:
    rank = Rank(InstanceId("P0"), 1, 0)
    memory = kv_memory("cuda", rank, tmp_path)
    assert isinstance(memory, GpuKvMemory)  # and CUDA is not touched by that
    assert memory.tensor is None and memory.addresses == {} and _openers(memory) == {}
    assert isinstance(kv_memory("cpu", rank, tmp_path), HostKvMemory)


def test_host_memory_is_made_once_and_offered() -> None:
    memory = HostKvMemory()
    assert memory.tensor is None and memory.addresses == {} and _openers(memory) == {}
    made = memory.make(4096)
    assert memory.tensor is not None and memory.tensor.data_ptr() == made.data_ptr()
    assert memory.addresses.keys() == _openers(memory).keys() == {"shm"}
    with pytest.raises(StartError, match="several buffers"):
        memory.make(4096)
    memory.close()


# ── what a step carries to the ranks ──────────────────────────────────────────────────────────


class OrderingHost:
    """Both halves of a connector's host; `told` is what the worker's half has heard."""

    def __init__(self, orders: StepOrders | None) -> None:
        self.orders = orders
        self.told: list[tuple[str, StepOrders]] = []

    def on_step(self, num_scheduled: dict[str, int]) -> StepOrders | None:
        assert num_scheduled == {"r": 3}
        return self.orders

    def on_step_begins(self, orders: StepOrders) -> None:
        self.told.append(("begins", orders))

    def on_step_ended(self, orders: StepOrders) -> None:
        self.told.append(("ended", orders))


@pytest.mark.parametrize("has_tier", [True, False])
def test_orders_travel_with_the_step_to_both_its_ends(has_tier: bool) -> None:
    orders = StepOrders(7, [Saving([BlockId(3)], [SlotId(1)])]) if has_tier else None
    connector = object.__new__(MemServeConnector)  # what vLLM configures is not needed here
    host = connector._host = OrderingHost(orders)  # type: ignore[assignment]
    step: Any = SimpleNamespace(scheduled_new_reqs=[], num_scheduled_tokens={"r": 3})
    metadata = pickle.loads(pickle.dumps(connector.build_connector_meta(step)))  # as vLLM sends it
    connector.handle_preemptions(metadata)
    connector.bind_connector_metadata(metadata)
    connector.wait_for_save()
    assert host.told == ([("begins", orders), ("ended", orders)] if has_tier else [])


# ── how pages lie ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("order", "heads", "is_block_first", "page_order"),
    [
        ("HNC", 3, True, "HNC"),
        ("HNC", 3, False, "HNC"),
        ("NHC", 3, True, "NHC"),
        ("NHC", 3, False, "NHC"),
        ("NHC", 1, True, "HNC"),  # with one head there is no difference
    ],
)
def test_the_order_in_a_page_is_part_of_the_geometry(
    order: str, heads: int, is_block_first: bool, page_order: str
) -> None:
    layers, blocks, tokens, content = 2, 5, 4, 6
    page = {"HNC": (heads, tokens, content), "NHC": (tokens, heads, content)}[order]
    outer = (blocks, layers) if is_block_first else (layers, blocks)
    buffer = torch.zeros((*outer, *page), dtype=torch.float32)
    by_layer = buffer.unbind(1 if is_block_first else 0)
    views = [view if order == "HNC" else view.transpose(1, 2) for view in by_layer]
    made = geometry_of("tiny", tokens, {f"l{i}": view for i, view in enumerate(views)})
    assert (made.page_order, made.num_kv_heads) == (page_order, heads)
    assert made.is_aggregated == is_block_first
    assert made.page_bytes == heads * tokens * content * 4
