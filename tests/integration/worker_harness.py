"""Real workers without an orchestrator: a zygote, and a hub that tests drive by hand.

`Rig` starts a zygote, forks workers and holds the hub's socket; every wait has a deadline and
fails with the worker's log. Used by the tests of worker processes and bench/startup.py.
"""

from __future__ import annotations

import os
import select
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackEncoder

from memserve.frames import FrameSocket
from memserve.messages import (
    Abort,
    Allocate,
    Allocated,
    AnyCommand,
    AnyEvent,
    Audit,
    Audited,
    CacheChanged,
    Commit,
    Decode,
    Finished,
    Heartbeat,
    History,
    Inserted,
    LinkReady,
    PeerJoined,
    Prefill,
    Ready,
    Sent,
    Started,
    Tokens,
    Transmit,
    decode_event,
    decode_greeting,
    encode,
)
from memserve.types import InstanceId, Namespace, RequestId, Role, TransferId
from memserve.workers.spec import (
    AnyNotice,
    Exited,
    Fork,
    Forked,
    WorkerSpec,
    receive_notice,
    send_frame,
)

BLOCK = 32
DEADLINE_S = 60.0
ENGINE = {"dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "block_size": BLOCK}

E = TypeVar("E", bound=AnyEvent)
N = TypeVar("N", bound=AnyNotice)


def request_bytes(max_tokens: int = 16, cache_salt: str | None = None, **params: Any) -> bytes:
    """A front end's request, greedy unless said otherwise."""
    sampling = SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params}
    )
    request = EngineCoreRequest(
        request_id="front end's",
        prompt_token_ids=[],
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=cache_salt,
        data_parallel_rank=None,
    )
    return bytes(MsgpackEncoder(size_threshold=sys.maxsize).encode(request)[0])


def prefill(name: str, token_ids: list[int], request: bytes, **changes: Any) -> Prefill:
    """The command: for D to go on with, unless said otherwise."""
    fields = _first_attempt(name, token_ids, request) | {"whole": False, "hold": True}
    return Prefill(**fields | changes)


def decode(name: str, token_ids: list[int], request: bytes, **changes: Any) -> Decode:
    """The command: after one generated token, unless said otherwise."""
    fields = _first_attempt(name, token_ids, request) | {"num_generated": 1, "hold": False}
    return Decode(**fields | changes)


def _first_attempt(name: str, token_ids: list[int], request: bytes) -> dict[str, Any]:
    return {
        "epoch": 1,
        "request_id": RequestId(name),
        "attempt": 1,
        "request": request,
        "known_tokens": 0,
        "token_ids": token_ids,
        "is_private": False,
    }


def allocate(name: str, token_ids: list[int], **changes: Any) -> Allocate:
    """The command; the transfer is named as the request, unless said otherwise."""
    fields: dict[str, Any] = {
        "epoch": 1,
        "transfer_id": TransferId(name),
        "request_id": RequestId(name),
        "known_tokens": 0,
        "token_ids": token_ids,
        "namespace": Namespace(),
        "is_private": False,
        "deadline_s": 30.0,
    }
    return Allocate(**fields | changes)


class Rig:
    """A zygote and its workers. Close it whatever happens."""

    def __init__(self, model: str) -> None:
        self.model = model
        # Not pytest's folder: a socket's path must be short.
        self.run_dir = Path(tempfile.mkdtemp(prefix="memserve-rig-"))
        self.address = str(self.run_dir / "hub.sock")
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[str, FrameSocket] = {}
        """By `<instance>/<epoch>`."""
        self._pending: dict[InstanceId, list[AnyEvent]] = {}
        self._notices: list[AnyNotice] = []
        self.pids: dict[str, int] = {}
        self.ready: dict[str, Ready] = {}
        """What each one that was started said."""
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(DEADLINE_S)
        with theirs, (self.run_dir / "zygote.log").open("wb") as log:
            command = [sys.executable, "-m", "memserve.workers.zygote", "--fd"]
            self.zygote = subprocess.Popen(
                [*command, str(theirs.fileno()), "--run-dir", str(self.run_dir)]
                + ["--parent", str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def close(self) -> None:
        """End everything."""
        self.sock.close()
        try:
            self.zygote.wait(DEADLINE_S)
        finally:
            if self.zygote.poll() is None:
                self.zygote.kill()
                self.zygote.wait()
            for peer in list(self._peers):
                self.disconnect(peer)
            self._listener.close()
            self._selector.close()
            shutil.rmtree(self.run_dir, ignore_errors=True)

    # ── the zygote ────────────────────────────────────────────────────────────────────────────

    def spec(self, instance: str, epoch: int = 1, **changes: Any) -> WorkerSpec:
        """For a P, D or PD by its name."""
        fields: dict[str, Any] = {
            "instance": InstanceId(instance),
            "epoch": epoch,
            "role": Role(instance.rstrip("0123456789")),
            "hub_address": self.address,
            "run_dir": str(self.run_dir),
            "log_path": str(self.run_dir / f"{instance}.log"),
            "model": self.model,
            "engine": ENGINE,
            "kv_bytes": 128 << 20,
            "heartbeat_interval_s": 0.2,
        }
        return WorkerSpec(**{**fields, **changes})

    def fork(self, spec: WorkerSpec) -> int:
        """Returns the pid."""
        send_frame(self.sock, Fork(spec))
        pid = self.notice(Forked, lambda n: n.instance == spec.instance).pid
        self.pids[spec.instance] = pid
        return pid

    def notice(self, kind: type[N], matches: Callable[[N], bool] = lambda n: True) -> N:
        """The next notice of this kind; others are kept."""
        for notice in self._notices:
            if isinstance(notice, kind) and matches(notice):
                self._notices.remove(notice)
                return notice
        while True:
            notice = receive_notice(self.sock)
            if isinstance(notice, kind) and matches(notice):
                return notice
            self._notices.append(notice)

    def exit_of(self, pid: int) -> int:
        """Wait for the worker's end; the exit code, or minus the signal."""
        return self.notice(Exited, lambda n: n.pid == pid).status

    # ── the hub ───────────────────────────────────────────────────────────────────────────────

    def send(self, instance: str, command: AnyCommand, to_epoch: int | None = None) -> None:
        """To the life that the command is for, unless another one is named."""
        epoch = command.epoch if to_epoch is None else to_epoch
        peer = self._peers[f"{instance}/{epoch}"]
        peer.send(encode(command))
        while peer.has_unsent:
            assert select.select([], [peer], [], DEADLINE_S)[1], f"{instance} does not read"
            peer.flush()

    def disconnect(self, seat: str) -> None:
        """Close the connection of `<instance>/<epoch>`."""
        peer = self._peers.pop(seat)
        self._selector.unregister(peer)
        peer.close()

    def expect(
        self, instance: str, kind: type[E], matches: Callable[[E], bool] = lambda e: True
    ) -> E:
        """The next event of this kind from the instance; others are kept, in order."""
        deadline = time.monotonic() + DEADLINE_S
        pending = self._pending.setdefault(InstanceId(instance), [])
        looked_at = 0
        while True:
            for index, event in enumerate(pending[looked_at:], looked_at):
                if isinstance(event, kind) and matches(event):
                    return pending.pop(index)  # type: ignore[return-value]
            looked_at = len(pending)
            self._receive(deadline, f"{kind.__name__} from {instance}")

    def until(self, instance: str, kind: type[AnyEvent]) -> list[AnyEvent]:
        """All events that `take` would give, up to and with the next one of this kind."""
        last = self.expect(instance, kind)
        return [*self.take(instance), last]

    def take(self, instance: str) -> list[AnyEvent]:
        """What has arrived and was not taken yet; heartbeats and the index's changes aside."""
        pending = self._pending.pop(InstanceId(instance), [])
        return [event for event in pending if not isinstance(event, Heartbeat | CacheChanged)]

    def _receive(self, deadline: float, what: str) -> None:
        ready = self._selector.select(max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"no {what} within {DEADLINE_S:g} s\n{self.logs()}")
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._greet(FrameSocket(self._listener.accept()[0]), deadline)
            else:
                self._receive_from(key.data)  # its seat

    def _greet(self, peer: FrameSocket, deadline: float) -> None:
        while (frame := peer.receive()) is None:
            assert not peer.is_ended and time.monotonic() < deadline, "a worker without a greeting"
            select.select([peer], [], [], max(0.0, deadline - time.monotonic()))
        greeting = decode_greeting(frame)
        seat = f"{greeting.instance}/{greeting.epoch}"
        if seat in self._peers:  # it has ended, which nobody has looked at yet
            self.disconnect(seat)
        self._peers[seat] = peer
        self._selector.register(peer, selectors.EVENT_READ, seat)
        self._receive_from(seat)

    def _receive_from(self, seat: str) -> None:
        peer = self._peers[seat]
        while (frame := peer.receive()) is not None:
            event = decode_event(frame)
            pending = self._pending.setdefault(event.instance, [])
            # One heartbeat says as much as many.
            if not (
                isinstance(event, Heartbeat) and pending and isinstance(pending[-1], Heartbeat)
            ):
                pending.append(event)
        if peer.is_ended:
            self.disconnect(seat)

    def logs(self, num_chars: int = 3000) -> str:
        """The ends of all logs."""
        paths = sorted(self.run_dir.glob("*.log"))
        return "\n".join(f"{p.name}: {p.read_text(errors='replace')[-num_chars:]}" for p in paths)

    def start(self, *instances: str, **changes: Any) -> dict[str, Ready]:
        """Fork these workers at once and wait until all are ready."""
        for instance in instances:
            self.fork(self.spec(instance, **changes))
        readies = {instance: self.expect(instance, Ready) for instance in instances}
        self.ready |= readies
        return readies

    def link(self, readies: dict[str, Ready]) -> None:
        """Introduce them all to each other."""
        for source in readies:
            for target, ready in readies.items():
                if source == target:
                    continue
                joined = PeerJoined(
                    epoch=readies[source].epoch,
                    peer=InstanceId(target),
                    peer_epoch=ready.epoch,
                    geometry=ready.geometry,
                    addresses=ready.addresses,
                )
                self.send(source, joined)
                answer = self.expect(source, LinkReady)
                assert answer.error is None and answer.kind == "shm", answer

    def audit(self, instance: str, epoch: int = 1) -> Audited:
        self.send(instance, Audit(epoch=epoch, audit_id=7))
        return self.expect(instance, Audited)

    def assert_clean(self, *instances: str) -> None:
        """Nobody holds anything there, and the accounting is right."""
        for instance in instances:
            audited = self.audit(instance)
            assert audited.problems == []
            assert audited.holders == []
            assert audited.stats.active_blocks == 0

    # ── a request, step by step ───────────────────────────────────────────────────────────────

    def tokens_until_end(self, instance: str, request_id: str) -> list[int]:
        """What the instance generates for the request, up to its finish reason."""
        token_ids: list[int] = []
        while True:
            event = self.expect(instance, Tokens, lambda e: _outputs(e, request_id) != [])
            for output in _outputs(event, request_id):
                token_ids += output.token_ids
                if output.finish_reason is not None:
                    return token_ids

    def whole(self, instance: str, prompt: list[int], request: bytes, name: str) -> list[int]:
        """Run the request on one instance, with nothing cached; its tokens."""
        command = prefill(name, prompt, request, whole=True, hold=False, is_private=True)
        self.send(instance, command)
        token_ids = self.tokens_until_end(instance, name)
        self.expect(instance, Finished)
        self.send(instance, Abort(epoch=1, request_id=RequestId(name)))
        return token_ids

    def prefill(
        self, prompt: list[int], request: bytes, name: str, *, is_private: bool = False
    ) -> tuple[Started, list[int]]:
        """On P0, up to its `Finished`; what it sampled."""
        self.send("P0", prefill(name, prompt, request, is_private=is_private))
        started = self.expect("P0", Started, lambda e: e.request_id == name)
        first = self.tokens_until_end("P0", name)
        finished = self.expect("P0", Finished, lambda e: e.request_id == name)
        assert finished.held_tokens == len(prompt)
        return started, first

    def carry(
        self,
        source: str,
        target: str,
        token_ids: list[int],
        name: str,
        *,
        known_tokens: int = 0,
        is_private: bool = False,
        is_history: bool = False,
        pin: bool,
    ) -> tuple[Allocated, Sent, Inserted]:
        """Allocate, transmit and commit the KV of the tokens; of `is_history`, whole blocks."""
        transfer = TransferId(f"{name} {source} to {target}")
        self.send(
            target,
            allocate(
                name,
                token_ids[known_tokens:],
                transfer_id=transfer,
                known_tokens=known_tokens,
                is_private=is_private,
            ),
        )
        allocated = self.expect(target, Allocated)
        self.send(
            source,
            Transmit(
                epoch=1,
                transfer_id=transfer,
                request_id=RequestId(name),
                peer=InstanceId(target),
                first_block=allocated.hit_blocks,
                block_ids=allocated.block_ids,
                history=History(Namespace(), token_ids) if is_history else None,
            ),
        )
        sent = self.expect(source, Sent)
        self.send(
            target, Commit(epoch=1, transfer_id=transfer, size_bytes=sent.size_bytes, pin=pin)
        )
        return allocated, sent, self.expect(target, Inserted)

    def decode(
        self,
        token_ids: list[int],
        request: bytes,
        name: str,
        *,
        known_tokens: int,
        num_generated: int = 1,
        hold: bool = False,
        is_private: bool = False,
        instance: str = "D0",
    ) -> None:
        """Start it there."""
        self.send(
            instance,
            decode(
                name,
                token_ids[known_tokens:],
                request,
                known_tokens=known_tokens,
                num_generated=num_generated,
                hold=hold,
                is_private=is_private,
            ),
        )

    def forget(self, name: str, *instances: str) -> None:
        for instance in instances:
            self.send(instance, Abort(epoch=1, request_id=RequestId(name)))


def _outputs(event: Tokens, request_id: str) -> list[Any]:
    return [output for output in event.outputs if output.request_id == request_id]
