"""How workers that a real zygote has forked begin and end.

One that cannot start says why, each end is reported once, and nothing outlives the orchestrator.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from memserve.messages import Ready, StartFailed, Stop, StopAsked
from memserve.workers.spec import receive_notice
from tests.integration.worker_harness import DEADLINE_S, ENGINE, Rig

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def rig(model_folder: Path) -> Iterator[Rig]:
    """A zygote without workers."""
    rig = Rig(str(model_folder))
    try:
        yield rig
    finally:
        rig.close()


def is_gone(pidfd: int, deadline_s: float = DEADLINE_S) -> bool:
    """Wait for the process's end."""
    return bool(select.select([pidfd], [], [], deadline_s)[0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engine": {**ENGINE, "dtype": "float99"}}, "engine.dtype: 'float99': Input should"),
        ({"engine": {**ENGINE, "max_model_lem": 5}}, "did you mean 'engine.max_model_len'?"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"device": "cuda"}, "cluster.device is cuda, but the installed vLLM finds 'cpu'"),
        ({"kv_bytes": 1 << 20}, "mempool.hbm_mb: 1 MiB do not hold one request"),
    ],
)
def test_engine_that_cannot_be_built_says_why_in_one_line(
    rig: Rig, changes: dict[str, object], says: str
) -> None:
    pid = rig.fork(rig.spec("PD1", **changes))
    message = rig.expect("PD1", StartFailed).message
    assert says in message
    assert "\n" not in message
    assert rig.exit_of(pid) == 2


@pytest.fixture(scope="module")
def sliding_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, without weights, of which every second layer sees the last 64 tokens only."""
    folder = tmp_path_factory.mktemp("sliding")
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 256,
        "max_position_embeddings": 2048,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_model_with_several_kv_groups_is_refused_in_words(rig: Rig, sliding_model: Path) -> None:
    engine = {**ENGINE, "load_format": "dummy", "skip_tokenizer_init": True}
    pid = rig.fork(rig.spec("PD7", model=str(sliding_model), engine=engine))
    message = rig.expect("PD7", StartFailed).message
    assert message.startswith("the model has 2 KV cache groups")
    assert rig.exit_of(pid) == 2


def test_each_end_is_reported_once_with_its_cause(rig: Rig) -> None:
    pids = {}
    for instance in ("PD2", "PD3", "PD4", "PD8"):
        pids[instance] = rig.fork(rig.spec(instance))
    for instance in pids:
        rig.expect(instance, Ready)
    rig.send("PD2", Stop(epoch=1))
    assert rig.exit_of(pids["PD2"]) == 0
    os.kill(pids["PD3"], signal.SIGTERM)
    rig.expect("PD3", StopAsked)  # it is not its own to decide
    rig.send("PD3", Stop(epoch=1))
    assert rig.exit_of(pids["PD3"]) == 0
    os.kill(pids["PD4"], signal.SIGKILL)
    assert rig.exit_of(pids["PD4"]) == -signal.SIGKILL
    rig.disconnect("PD8/1")  # to a worker, that is the end of the hub
    assert rig.exit_of(pids["PD8"]) == 0
    # The zygote still answers, and has nothing more to say about them.
    pid = rig.fork(rig.spec("PD5", model="/nowhere"))
    assert rig.exit_of(pid) == 2
    rig.sock.settimeout(0.0)
    with contextlib.suppress(BlockingIOError):
        raise AssertionError(receive_notice(rig.sock))
    rig.sock.settimeout(DEADLINE_S)


_STAND_IN = """
import os, socket, subprocess, sys
from memserve.workers.spec import *
from memserve.types import InstanceId, Role
run_dir, fd = sys.argv[1], int(sys.argv[2])
hub = socket.socket(socket.AF_UNIX)
hub.bind(run_dir + "/h")
hub.listen()
ours, theirs = socket.socketpair()
zygote = subprocess.Popen(
    [sys.executable, "-m", "memserve.workers.zygote", "--fd", str(theirs.fileno()),
     "--run-dir", run_dir, "--parent", str(os.getpid())],
    pass_fds=[theirs.fileno()], process_group=0)
theirs.close()
for name in ("P0", "D0"):
    send_frame(ours, Fork(WorkerSpec(
        instance=InstanceId(name), epoch=1, role=Role.PREFILL, run_dir=run_dir,
        hub_address=run_dir + "/h", log_path=run_dir + "/" + name, model=run_dir,
        kv_bytes=None)))
pids = [zygote.pid]
while len(pids) < 3:
    notice = receive_notice(ours)
    if isinstance(notice, Forked):
        pids.append(notice.pid)
os.write(fd, " ".join(map(str, pids)).encode())
os.close(fd)
receive_notice(ours)
"""


def test_kill_9_of_the_orchestrator_leaves_no_process_and_no_folder() -> None:
    run_dir = Path(tempfile.mkdtemp(prefix="memserve-run-"))
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _STAND_IN, str(run_dir), str(write)], pass_fds=[write]
    )
    os.close(write)
    try:
        assert select.select([read], [], [], DEADLINE_S)[0]
        pidfds = [os.pidfd_open(int(pid)) for pid in os.read(read, 100).split()]
        process.kill()
        process.wait()
        for pidfd in pidfds:
            assert is_gone(pidfd)
            os.close(pidfd)
        assert len(pidfds) == 3
        assert not run_dir.exists()
    finally:
        process.kill()
        process.wait()
        os.close(read)
        shutil.rmtree(run_dir, ignore_errors=True)
