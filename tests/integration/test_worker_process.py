"""Real workers, forked by a real zygote, driven by hand over the control channel.

One prefill and one decode instance in float32 serve the whole module; the numbers in names refer
to the list of failures in the design notes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder

from memserve.messages import (
    Abort,
    Allocate,
    Allocated,
    Commit,
    Finished,
    Inserted,
    InsertFailed,
    Prefill,
    Ready,
    Refused,
    Rejected,
    ResetCache,
    Sent,
    Started,
    StartFailed,
    Stop,
    StopAsked,
    Tokens,
    Transmit,
    TransmitFailed,
)
from memserve.types import InstanceId, Namespace, RequestId, TransferId
from memserve.workers.spec import receive_notice
from tests.integration.worker_harness import BLOCK, DEADLINE_S, ENGINE, Rig, request_bytes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

NUM_TOKENS = 40
"""Long enough that decoding fills at least one block of its own."""


@pytest.fixture(scope="module")
def pair(model_folder: Path) -> Iterator[Rig]:
    """P0 and D0, linked."""
    rig = Rig(str(model_folder))
    try:
        rig.link(rig.start("P0", "D0"))
        yield rig
    finally:
        rig.close()


@pytest.fixture
def rig(pair: Rig) -> Iterator[Rig]:
    """The same, empty; afterwards nobody holds anything."""
    for instance in ("P0", "D0"):
        pair.send(instance, ResetCache(epoch=1))
        pair.take(instance)
    yield pair
    pair.assert_clean("P0", "D0")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 10_000 + length).choices(range(1000, 40_000), k=length)


# ── the way of a request ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 300])
def test_split_request_gives_the_tokens_of_a_whole_one(rig: Rig, length: int) -> None:
    """17, 13, 14, 15: block edges, nothing to send, a full hit."""
    prompt, request, name = prompt_of(length), request_bytes(NUM_TOKENS), f"split{length}"
    expected = rig.whole("P0", prompt, request, "whole")

    started, first = rig.prefill(prompt, request, name)
    assert started.cached_tokens == 0
    allocated, sent, inserted = rig.carry("P0", "D0", prompt, name, pin=True)
    assert allocated.hit_blocks == 0
    assert sent.num_blocks == length // BLOCK
    assert inserted.num_tokens == length // BLOCK * BLOCK
    everything = prompt + first
    rig.decode(everything, request, name, known_tokens=length, hold=True)
    d_started = rig.expect("D0", Started)
    # At least the last token has to be computed, so of a full block at the end D computes one.
    assert d_started.cached_tokens == length // BLOCK * BLOCK
    tokens = first + rig.tokens_until_end("D0", name)
    assert tokens == expected
    finished = rig.expect("D0", Finished)
    assert finished.held_tokens == length + NUM_TOKENS - 1  # the last token's KV is never made

    # What D generated goes back to P, which then has the whole conversation.
    full = finished.held_tokens // BLOCK * BLOCK
    known = (prompt + tokens)[:full]
    back, _, inserted = rig.carry(
        "D0", "P0", known, name, known_tokens=min(length, full), pin=False
    )
    assert back.hit_blocks == length // BLOCK
    assert inserted.num_tokens == full
    rig.forget(name, "P0", "D0")
    rig.assert_clean("P0", "D0")

    # A second turn, on what both have now.
    turn, request = prompt + tokens + prompt_of(20, seed=1), request_bytes(8)
    expected = rig.whole("P0", turn, request, "whole")
    started, first = rig.prefill(turn, request, "turn")
    assert started.cached_tokens == full
    allocated, sent, _ = rig.carry("P0", "D0", turn, "turn", pin=True)
    assert allocated.hit_blocks == full // BLOCK
    assert sent.num_blocks == len(turn) // BLOCK - full // BLOCK
    rig.decode(turn + first, request, "turn", known_tokens=len(turn))
    assert first + rig.tokens_until_end("D0", "turn") == expected
    rig.forget("turn", "P0", "D0")


def test_events_of_a_prefill_come_in_order(rig: Rig) -> None:
    prompt = prompt_of(2 * BLOCK)
    name, transfer = RequestId("ordered"), TransferId("ordered")
    rig.send(
        "D0",
        Allocate(
            epoch=1,
            transfer_id=transfer,
            request_id=name,
            known_tokens=0,
            token_ids=prompt,
            namespace=Namespace(),
            is_private=False,
            deadline_s=30.0,
        ),
    )
    blocks = rig.expect("D0", Allocated).block_ids
    rig.send(
        "P0",
        Prefill(
            epoch=1,
            request_id=name,
            attempt=3,
            request=request_bytes(NUM_TOKENS),
            known_tokens=0,
            token_ids=prompt,
            whole=False,
            hold=True,
            is_private=False,
        ),
    )
    # Ahead of the prefill's end: it has to wait there.
    rig.send(
        "P0",
        Transmit(
            epoch=1,
            transfer_id=transfer,
            request_id=name,
            peer=InstanceId("D0"),
            first_block=0,
            block_ids=blocks,
        ),
    )
    seen = rig.until("P0", Sent)
    assert [type(event).__name__ for event in seen] == ["Started", "Tokens", "Finished", "Sent"]
    assert {event.attempt for event in seen if isinstance(event, Started | Finished)} == {3}
    rig.send("D0", Commit(epoch=1, transfer_id=transfer, size_bytes=0, pin=True))
    assert "promised" in rig.expect("D0", InsertFailed).reason  # 8: bytes are counted
    rig.forget(name, "P0", "D0")


def test_payload_carries_the_hub_s_request_id(rig: Rig) -> None:
    rig.send(
        "P0",
        Prefill(
            epoch=1,
            request_id=RequestId("known"),
            attempt=2,
            request=request_bytes(1, logprobs=3, prompt_logprobs=1),
            known_tokens=0,
            token_ids=prompt_of(40),
            whole=True,
            hold=False,
            is_private=False,
        ),
    )
    event = rig.expect("P0", Tokens)
    outputs = MsgpackDecoder(EngineCoreOutputs).decode(bytearray(event.payload))
    (output,) = outputs.outputs
    assert output.request_id == "known" == event.outputs[0].request_id
    assert output.new_token_ids == event.outputs[0].token_ids
    assert event.outputs[0].finish_reason == "length"
    assert output.new_logprobs is not None
    assert output.new_prompt_logprobs_tensors.logprobs.shape[0] == 39
    rig.forget("known", "P0")


def test_private_requests_share_nothing(rig: Rig) -> None:
    prompt, request = prompt_of(3 * BLOCK), request_bytes(4)
    for turn in ("one", "two"):
        started, first = rig.prefill(prompt, request, turn, is_private=True)
        assert started.cached_tokens == 0
        allocated, _, _ = rig.carry("P0", "D0", prompt, turn, is_private=True, pin=True)
        assert allocated.hit_blocks == 0
        rig.decode(prompt + first, request, turn, known_tokens=len(prompt), is_private=True)
        assert rig.expect("D0", Started).cached_tokens == len(prompt)
        rig.tokens_until_end("D0", turn)
        rig.forget(turn, "P0", "D0")
    for instance in ("P0", "D0"):
        assert rig.audit(instance).stats.historical_blocks == 0


def test_salted_requests_do_not_meet_unsalted_ones(rig: Rig) -> None:
    """40: the salt is part of the key."""
    prompt = prompt_of(3 * BLOCK)
    expected = {None: 0, "a": 0, "b": 0}
    for salt in (None, "a", "b", "a"):
        name = f"salt-{salt}"
        started, _ = rig.prefill(prompt, request_bytes(2, cache_salt=salt), name)
        assert started.cached_tokens == expected[salt]
        expected[salt] = 2 * BLOCK  # the last token of a prompt is always computed
        rig.forget(name, "P0")


# ── ends ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stage", ["queued", "prefilled", "allocated", "sent", "decoding"])
def test_abort_at_each_stage_leaves_nothing(rig: Rig, stage: str) -> None:
    """10, 26: whoever is told to forget a request holds nothing for it."""
    prompt, request, name = prompt_of(200), request_bytes(1000), "aborted"
    if stage == "queued":
        rig.send(
            "P0",
            Prefill(
                epoch=1,
                request_id=RequestId(name),
                attempt=1,
                request=request,
                known_tokens=0,
                token_ids=prompt,
                whole=False,
                hold=True,
                is_private=False,
            ),
        )
    else:
        rig.prefill(prompt, request, name)
    transfer = TransferId(f"{name} P0 to D0")
    if stage == "allocated":
        allocate = Allocate(
            epoch=1,
            transfer_id=transfer,
            request_id=RequestId(name),
            known_tokens=0,
            token_ids=prompt,
            namespace=Namespace(),
            is_private=False,
            deadline_s=30.0,
        )
        rig.send("D0", allocate)
        rig.expect("D0", Allocated)
        rig.send("D0", Commit(epoch=1, transfer_id=transfer, size_bytes=1, pin=True))
    if stage in ("sent", "decoding"):
        rig.carry("P0", "D0", prompt, name, pin=True)
    if stage == "decoding":
        rig.decode([*prompt, 5], request, name, known_tokens=len(prompt), hold=True)
        rig.expect("D0", Tokens)
    rig.forget(name, "P0", "D0")
    rig.assert_clean("P0", "D0")
    seen = [*rig.take("P0"), *rig.take("D0")]
    if stage != "queued":
        assert not any(isinstance(event, Finished) for event in seen)


def test_transmit_for_an_aborted_request_is_answered(rig: Rig) -> None:
    """2: never silence."""
    rig.prefill(prompt_of(64), request_bytes(4), "gone")
    rig.forget("gone", "P0")
    rig.send(
        "P0",
        Transmit(
            epoch=1,
            transfer_id=TransferId("late"),
            request_id=RequestId("gone"),
            peer=InstanceId("D0"),
            first_block=0,
            block_ids=[],
        ),
    )
    assert "gone" in rig.expect("P0", TransmitFailed).reason


def test_stop_string_ends_the_request_and_keeps_its_kv(rig: Rig) -> None:
    prompt, name = prompt_of(100), RequestId("stopped")
    _, first = rig.prefill(prompt, request_bytes(1000), name)
    rig.carry("P0", "D0", prompt, name, pin=True)
    rig.decode(prompt + first, request_bytes(1000), name, known_tokens=100, hold=False)
    seen = list(first)
    while len(seen) < 30:
        seen += rig.expect("D0", Tokens).outputs[0].token_ids
    rig.send("D0", Abort(epoch=1, request_id=name, hold=True))
    held = rig.expect("D0", Finished).held_tokens
    later = [o for e in rig.take("D0") if isinstance(e, Tokens) for o in e.outputs]
    seen += [token for output in later for token in output.token_ids]
    assert all(output.finish_reason is None for output in later)
    assert held == len(prompt) + len(seen) - 1

    # Asked once more, it answers once more, and the KV is still there to be sent.
    rig.send("D0", Abort(epoch=1, request_id=name, hold=True))
    assert rig.expect("D0", Finished).held_tokens == held
    full = held // BLOCK * BLOCK
    rig.carry("D0", "P0", (prompt + seen)[:full], name, known_tokens=100, pin=False)
    rig.forget(name, "P0", "D0")


def test_abort_with_hold_of_an_unknown_request_is_answered(rig: Rig) -> None:
    rig.send("D0", Abort(epoch=1, request_id=RequestId("never seen"), hold=True))
    assert rig.expect("D0", Finished).held_tokens == 0


# ── what a worker refuses ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "request_", "num_generated", "says"),
    [
        ([], request_bytes(4), 0, "allowed: 1 to 2047"),
        ([1] * 2048, request_bytes(4), 0, "allowed: 1 to 2047"),
        ([1, 2], b"\xc1 no msgpack", 0, "EngineCoreRequest"),
        ([1, 2, 3], request_bytes(2), 2, "2 tokens are generated already, of 2"),
    ],
)
def test_what_cannot_run_is_rejected(
    rig: Rig, prompt: list[int], request_: bytes, num_generated: int, says: str
) -> None:
    """7: a prompt too long is refused in words, and the engine lives on."""
    rig.send(
        "P0",
        Prefill(
            epoch=1,
            request_id=RequestId("bad"),
            attempt=4,
            request=request_,
            known_tokens=0,
            token_ids=prompt,
            whole=True,
            hold=False,
            is_private=False,
            num_generated=num_generated,
        ),
    )
    rejected = rig.expect("P0", Rejected)
    assert (rejected.request_id, rejected.attempt) == ("bad", 4)
    assert says in rejected.message
    rig.forget("bad", "P0")
    assert len(rig.whole("P0", [1, 2, 3], request_bytes(2), "good")) == 2


def test_tokens_that_are_not_known_are_refused(rig: Rig) -> None:
    rig.decode([1, 2, 3], request_bytes(4), "hole", known_tokens=2)
    assert "2 tokens are said to be known here, 0 are" in rig.expect("D0", Rejected).message


def test_command_of_another_life_is_ignored(rig: Rig) -> None:
    """23: the epoch is in every command."""
    rig.send("P0", Stop(epoch=2), to_epoch=1)
    rig.assert_clean("P0")


def test_pins_on_arrivals_give_way_to_a_starving_request(rig: Rig) -> None:
    """3, and the pool's blocks: soft pins never block the engine for good."""
    total = rig.audit("D0").stats.total_blocks
    length = total // 2 * BLOCK
    block_bytes = 30 * 2 * 3 * 64 * 4 * BLOCK
    for seed in (1, 2):
        transfer = TransferId(f"early {seed}")
        rig.send(
            "D0",
            Allocate(
                epoch=1,
                transfer_id=transfer,
                request_id=RequestId(f"early {seed}"),
                known_tokens=0,
                token_ids=prompt_of(length - BLOCK, seed),
                namespace=Namespace(),
                is_private=False,
                deadline_s=30.0,
            ),
        )
        size = len(rig.expect("D0", Allocated).block_ids) * block_bytes
        rig.send("D0", Commit(epoch=1, transfer_id=transfer, size_bytes=size, pin=True))
        rig.expect("D0", Inserted)
    assert rig.audit("D0").stats.pinned_requests == 2

    tokens = rig.whole("D0", prompt_of(20 * BLOCK, seed=3), request_bytes(2), "late")
    assert len(tokens) == 2
    stats = rig.audit("D0").stats
    assert stats.pinned_requests == 0
    rig.forget("early 1", "D0")
    rig.forget("early 2", "D0")
    rig.send("D0", ResetCache(epoch=1))  # their KV was never written


def test_receiver_without_room_refuses(rig: Rig) -> None:
    too_many = (rig.audit("D0").stats.total_blocks + 1) * BLOCK
    rig.send(
        "D0",
        Allocate(
            epoch=1,
            transfer_id=TransferId("big"),
            request_id=RequestId("big"),
            known_tokens=0,
            token_ids=prompt_of(too_many),
            namespace=Namespace(),
            is_private=False,
            deadline_s=30.0,
        ),
    )
    assert "available" in rig.expect("D0", Refused).reason
    rig.forget("big", "D0")


def test_idle_worker_has_no_thread_that_polls(rig: Rig) -> None:
    """Each of gloo's wakes up a hundred times a second; one is shared by all process groups."""
    names = [
        (task / "comm").read_text().strip()
        for task in Path(f"/proc/{rig.pids['P0']}/task").iterdir()
    ]
    assert names.count("gloo_tcp_loop") <= 1


# ── processes ─────────────────────────────────────────────────────────────────────────────────


def is_gone(pidfd: int, deadline_s: float = DEADLINE_S) -> bool:
    """Wait for the process's end."""
    return bool(select.select([pidfd], [], [], deadline_s)[0])


@pytest.fixture(scope="module")
def spare(pair: Rig) -> Rig:
    """The same zygote, for workers that do not survive their test."""
    return pair


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
    spare: Rig, changes: dict[str, object], says: str
) -> None:
    pid = spare.fork(spare.spec("PD1", **changes))
    message = spare.expect("PD1", StartFailed).message
    assert says in message
    assert "\n" not in message
    assert spare.exit_of(pid) == 2


def test_layouts_differ_in_speed_only(spare: Rig) -> None:
    """Block-first, which the CPU backend does not name, computes what layer-first computes."""
    prompt, request, name = prompt_of(3 * BLOCK + 5), request_bytes(12), "mixed"
    readies = spare.start("PD6", layout="layer_first")
    assert not readies["PD6"].geometry.is_aggregated
    layer_first = spare.whole("PD6", prompt, request, "whole")
    assert spare.whole("P0", prompt, request, "whole") == layer_first

    # And one can send to the other.
    p0 = spare.ready["P0"]
    assert p0.geometry.is_aggregated
    spare.link({"P0": p0, **readies})
    _, first = spare.prefill(prompt, request, name)
    _, sent, _ = spare.carry("P0", "PD6", prompt, name, pin=True)
    assert sent.num_blocks == 3
    spare.decode(prompt + first, request, name, known_tokens=len(prompt), instance="PD6")
    started = spare.expect("PD6", Started, lambda e: e.request_id == name)
    assert started.cached_tokens == 3 * BLOCK
    assert first + spare.tokens_until_end("PD6", name) == layer_first
    spare.forget(name, "P0", "PD6")
    spare.assert_clean("P0", "PD6")
    spare.send("PD6", Stop(epoch=1))


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


def test_model_with_several_kv_groups_is_refused_in_words(spare: Rig, sliding_model: Path) -> None:
    engine = {**ENGINE, "load_format": "dummy", "skip_tokenizer_init": True}
    pid = spare.fork(spare.spec("PD7", model=str(sliding_model), engine=engine))
    message = spare.expect("PD7", StartFailed).message
    assert message.startswith("the model has 2 KV cache groups")
    assert spare.exit_of(pid) == 2


def test_each_end_is_reported_once_with_its_cause(spare: Rig) -> None:
    pids = {}
    for instance in ("PD2", "PD3", "PD4", "PD8"):
        pids[instance] = spare.fork(spare.spec(instance))
    for instance in pids:
        spare.expect(instance, Ready)
    spare.send("PD2", Stop(epoch=1))
    assert spare.exit_of(pids["PD2"]) == 0
    os.kill(pids["PD3"], signal.SIGTERM)
    spare.expect("PD3", StopAsked)  # it is not its own to decide
    spare.send("PD3", Stop(epoch=1))
    assert spare.exit_of(pids["PD3"]) == 0
    os.kill(pids["PD4"], signal.SIGKILL)
    assert spare.exit_of(pids["PD4"]) == -signal.SIGKILL
    spare.disconnect("PD8/1")  # to a worker, that is the end of the hub
    assert spare.exit_of(pids["PD8"]) == 0
    # The zygote still answers, and has nothing more to say about them.
    pid = spare.fork(spare.spec("PD5", model="/nowhere"))
    assert spare.exit_of(pid) == 2
    spare.sock.settimeout(0.0)
    with contextlib.suppress(BlockingIOError):
        raise AssertionError(receive_notice(spare.sock))
    spare.sock.settimeout(DEADLINE_S)


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
