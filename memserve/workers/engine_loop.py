"""The life of a worker: serve the hub's commands between the engine's steps, and inside them.

One thread does everything, so nothing is locked and no block changes hands unseen::

    wait (busy: not at all; idle: until a command, a deadline or the next heartbeat)
      └▶ serve all commands ─▶ let links go on ─▶ one engine step ─▶ Tokens, Finished, sources ┐
      ◀──────────────────────────────────── what changed in the index (CacheChanged) ──────────┘
    one engine step: schedule and launch ─▶ wait for an older step's output ─▶ use it
                                              └▶ wait, serve a command, let links go on ┐
                                              ◀──────────── until the output is there ──┘

Inside a step commands are served in order up to one that takes a request out of the engine; that
one and all behind it wait for the step's end (docs/adr/0028). Heartbeats do so always: a device
that hangs must not look alive.

Collaborators: `commands.py` answers the commands, which `port.py` brings; `compat.Engine` is vLLM;
`mempool.py`, `transfer.py` and `swap_queue.py` hold and move KV; `connector.py` calls the hooks
from inside a step; `main.py` builds all of it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from memserve.messages import (
    AnyCommand,
    AnyEvent,
    Heartbeat,
    PoolStats,
    Started,
    Stop,
    StopAsked,
    TokenOutput,
    Tokens,
)
from memserve.types import InstanceId
from memserve.workers.commands import Commands
from memserve.workers.compat import Engine, EngineCodec
from memserve.workers.copies import Pace
from memserve.workers.early import EarlySends
from memserve.workers.index_reports import IndexReports
from memserve.workers.mempool import MemPool
from memserve.workers.records import Records
from memserve.workers.swap_queue import Swaps
from memserve.workers.transfer import Transfers

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_WAITING_WAIT_S = 0.005
"""While the engine's requests all wait, for blocks or for the device: a command wakes it up, and so
does the device."""
_COPYING_WAIT_S = 0.00002
"""Between two looks at copies under way: what they are late by, their request is."""


class Channel(Protocol):
    """To the hub: `Port`, or a fake one."""

    def send(self, event: AnyEvent) -> None: ...
    def wait(self, timeout_s: float) -> None: ...
    def receive(self) -> AnyCommand | None: ...
    def wake_on(self, fd: int) -> None: ...


class EngineLoop:
    """One instance. Construct it, then `run`; `on_scheduled` and `on_finished` are the hooks."""

    def __init__(
        self,
        instance: InstanceId,
        epoch: int,
        engine: Engine,
        mempool: MemPool,
        transfers: Transfers,
        swaps: Swaps,
        reports: IndexReports,
        channel: Channel,
        heartbeat_interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._instance = instance
        self._epoch = epoch
        self._engine = engine
        self._mempool = mempool
        self._transfers = transfers
        self._swaps = swaps
        self._reports = reports
        self._channel = channel
        self._heartbeat_interval_s = heartbeat_interval_s
        self._clock = clock
        self._codec = EngineCodec()
        self._records = Records()
        self._commands = Commands(
            instance,
            epoch,
            engine,
            mempool,
            transfers,
            swaps,
            reports,
            self._records,
            self.stats,
        )
        self._early = EarlySends(transfers, engine, self._commands.engine_id)
        self._held_back: deque[AnyCommand] = deque()
        """Received inside a step; some of them wait for its end."""
        self._hit_tokens = 0
        self._query_tokens = 0
        self._num_steps = 0
        self._step_s = 0.0
        self._turn_s = 0.0
        self._next_heartbeat = 0.0
        self._is_starved = False
        self._is_stopping = False
        self._is_asked_to_stop = False
        channel.wake_on(engine.serve_while_waiting(self._serve_inside))

    # ── the loop ──────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Until `Stop`, or `stop`. Raises: what breaks the engine; the process must end then."""
        while not self._is_stopping:
            self._channel.wait(self._patience_s())
            began = self._clock()
            self._serve_all()
            self._early.between_steps()
            self._is_starved &= self._engine.is_busy
            self._transfers.reserve_waiting(engine_starves=self._is_starved)
            rests = self._is_starved or not self._engine.is_busy
            self._move_kv(Pace.FREE if rests else Pace.BETWEEN_STEPS)
            was_busy = self._engine.is_busy
            if was_busy:
                self._step()
            if self._is_asked_to_stop:
                self._is_asked_to_stop = False
                self._emit(StopAsked(instance=self._instance, epoch=self._epoch))
            self._reports.flush()
            if was_busy:
                self._turn_s += self._clock() - began
            falls_idle = was_busy and not self._engine.is_busy
            if falls_idle or self._clock() >= self._next_heartbeat:
                self._beat()

    def stop(self) -> None:
        """End `run` after the present step."""
        self._is_stopping = True

    def ask_to_stop(self) -> None:
        """Tell the hub that somebody wants this, at the next turn. Made for a signal handler."""
        self._is_asked_to_stop = True

    def _patience_s(self) -> float:
        """How long nothing but a command can matter."""
        if self._held_back or (self._engine.is_busy and not self._is_starved):
            return 0.0
        if self._engine.is_busy or self._transfers.is_active or self._swaps.is_active:
            return self._pause_s()
        deadlines = (self._transfers.next_deadline(), self._swaps.next_deadline())
        until = min([self._next_heartbeat, *(d for d in deadlines if d is not None)])
        return until - self._clock()

    def _pause_s(self) -> float:
        """Between two looks at what goes on without the engine."""
        is_copying = self._transfers.is_active or self._swaps.is_active
        return _COPYING_WAIT_S if is_copying else _WAITING_WAIT_S

    def _serve_all(self) -> None:
        while not self._is_stopping:
            command = self._held_back.popleft() if self._held_back else self._channel.receive()
            if command is None:
                return
            self._serve(command)

    def _serve_inside(self) -> None:
        """One turn while the engine waits for the output of a step."""
        self._early.after_step()  # what the scheduler could launch, it has
        self._channel.wait(0.0 if self._can_serve_inside() else self._pause_s())
        # All of them: what waits in the channel would keep it from sleeping.
        while (command := self._channel.receive()) is not None:
            self._held_back.append(command)
        if self._can_serve_inside():
            self._serve(self._held_back.popleft())
        self._move_kv(Pace.INSIDE_STEP)

    def _can_serve_inside(self) -> bool:
        if self._is_stopping or not self._held_back:
            return False
        return not self._commands.must_wait(self._held_back[0])

    def _serve(self, command: AnyCommand) -> None:
        if command.epoch != self._epoch:
            name = type(command).__name__
            logger.warning("ignored a command of epoch %d: %s", command.epoch, name)
        elif isinstance(command, Stop):
            self._is_stopping = True
        else:
            self._commands.serve(command)

    def _move_kv(self, pace: Pace) -> None:
        self._transfers.poll()
        self._transfers.expire()
        self._swaps.poll(pace)

    def _step(self) -> None:
        began = self._clock()
        outputs, has_run = self._engine.step()
        self._step_s += self._clock() - began
        self._num_steps += has_run
        self._early.after_step()
        if outputs is not None and outputs.outputs:
            self._send_tokens(outputs)
        self._commands.report_ended()
        self._is_starved = not has_run and self._engine.is_starved
        if self._is_starved and (num_blocks := self._transfers.relax() + self._swaps.relax()):
            logger.info("requests wait for blocks: released %d that had arrived early", num_blocks)

    def _beat(self) -> None:
        self._next_heartbeat = self._clock() + self._heartbeat_interval_s
        self._emit(Heartbeat(instance=self._instance, epoch=self._epoch, stats=self.stats()))

    # ── the engine's hooks (see connector.ConnectorHost) ──────────────────────────────────────

    def on_scheduled(self, engine_id: str, cached_tokens: int) -> None:
        """Say it before the step runs: the hub allocates on D while the prompt is computed."""
        record = self._records.running(engine_id)
        if record is None:
            return
        self._query_tokens += len(record.tokens)
        self._hit_tokens += cached_tokens
        self._transfers.scheduled(record.id)
        self._swaps.scheduled(engine_id)
        self._emit(
            Started(
                instance=self._instance,
                epoch=self._epoch,
                request_id=record.id,
                attempt=record.attempt,
                cached_tokens=cached_tokens,
            )
        )

    def on_step(self, num_scheduled: Mapping[str, int]) -> None:
        """Called after `on_scheduled`, before the step runs."""
        self._early.on_step(num_scheduled)

    def on_layer(self, layer: int) -> None:
        """In the midst of a step."""
        self._early.on_layer(layer)

    def on_finished(self, request: Request, block_ids: list[int]) -> None:
        """Pin what is to be sent, while the request still has its blocks."""
        self._commands.on_finished(request, block_ids)

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def _send_tokens(self, outputs: EngineCoreOutputs) -> None:
        """One message for the step; its outputs get the ids that the hub knows them by."""
        known: list[EngineCoreOutput] = []
        token_outputs: list[TokenOutput] = []
        for out in outputs.outputs:
            record = self._records.running(out.request_id)
            if record is None:
                continue
            reason = None if out.finish_reason is None else str(out.finish_reason)
            out.request_id = record.id
            known.append(out)
            token_outputs.append(
                TokenOutput(record.id, record.attempt, list(out.new_token_ids), reason)
            )
        outputs.outputs = known
        if known:
            self._emit(
                Tokens(
                    instance=self._instance,
                    epoch=self._epoch,
                    outputs=token_outputs,
                    payload=self._codec.encode_outputs(outputs),
                )
            )

    def _emit(self, event: AnyEvent) -> None:
        self._reports.send(event)

    def stats(self) -> PoolStats:
        """The pool and the queues now."""
        counts, swaps = self._mempool.stats(), self._swaps.stats()
        return PoolStats(
            total_blocks=counts.total,
            free_blocks=counts.free,
            historical_blocks=counts.historical,
            active_blocks=counts.active,
            reserved_blocks=self._transfers.reserved_blocks,
            quarantined_blocks=self._transfers.quarantined_blocks,
            pinned_requests=self._transfers.pinned_requests,
            running_requests=self._engine.num_running,
            waiting_requests=self._engine.num_waiting,
            prefix_hit_tokens=self._hit_tokens,
            prefix_query_tokens=self._query_tokens,
            dram_blocks=swaps.slots,
            dram_used_blocks=swaps.used_slots,
            swapped_out_blocks=swaps.swapped_out,
            swapped_in_blocks=swaps.swapped_in,
            steps=self._num_steps,
            step_s=self._step_s,
            turn_s=self._turn_s,
        )
