"""What a worker does for each of the hub's commands.

A request's commands meet here: what is known of it (`records.py`), what the engine makes of it, and
its KV's way in and out (`transfer.py`). The engine knows a request by an id of its own,
`<request>/<attempt>`: a request that is placed again must not meet what is left in flight of its
earlier attempt.

Collaborators: `engine_loop.py` brings the commands, one after the other, and tells of requests that
have ended in the engine; events leave through `index_reports.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from memserve.errors import ProtocolError, RequestError
from memserve.messages import (
    Abort,
    Allocate,
    AnyCommand,
    AnyEvent,
    Audit,
    Audited,
    Cancel,
    Commit,
    Decode,
    Finished,
    PeerJoined,
    PeerLost,
    PoolStats,
    Prefill,
    Refused,
    Rejected,
    ResetCache,
    SendSnapshot,
    Transmit,
    TransmitFailed,
)
from memserve.types import BlockId, InstanceId, Namespace, RequestId, TransferId
from memserve.workers.compat import Engine, EngineCodec, complete_tokens
from memserve.workers.engine_pool import namespace_of
from memserve.workers.index_reports import IndexReports
from memserve.workers.mempool import MemPool
from memserve.workers.records import Record, Records
from memserve.workers.requests import decode_request, prefill_request
from memserve.workers.swap_queue import Swaps
from memserve.workers.transfer import Transfers, private_namespace

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_RunT = TypeVar("_RunT", Prefill, Decode)


class Commands:
    """Of one instance, all but `Stop`."""

    def __init__(
        self,
        instance: InstanceId,
        epoch: int,
        engine: Engine,
        mempool: MemPool,
        transfers: Transfers,
        swaps: Swaps,
        reports: IndexReports,
        records: Records,
        stats: Callable[[], PoolStats],
    ) -> None:
        self._instance = instance
        self._epoch = epoch
        self._engine = engine
        self._mempool = mempool
        self._transfers = transfers
        self._swaps = swaps
        self._reports = reports
        self._records = records
        self._codec = EngineCodec()
        self._stats = stats
        self._ended: list[Record] = []
        """Ended in the present step, or by the present command; `Finished` is still to be said."""

    def serve(self, command: AnyCommand) -> None:
        """Do it now; answers that take time follow later."""
        match command:
            case Prefill():
                self._prefill(command)
            case Decode():
                self._decode(command)
            case Allocate():
                self._allocate(command)
            case Transmit():
                self._transmit(command)
            case Commit():
                self._transfers.commit(command)
            case Cancel():
                self._cancel(command)
            case Abort():
                self._abort(command)
            case PeerJoined():
                self._transfers.peer_joined(command)
            case PeerLost():
                self._transfers.peer_lost(command.peer, command.peer_epoch)
            case Audit():
                self._audit(command)
            case ResetCache():
                logger.info("dropped %d historical blocks", self._mempool.reset())
            case SendSnapshot():
                self._reports.send_snapshot()

    def must_wait(self, command: AnyCommand) -> bool:
        """Whether it takes a request out of the engine: not while that waits inside a step."""
        match command:
            case Prefill() | Abort():
                return self.engine_id(command.request_id) is not None
        return False

    def engine_id(self, request_id: RequestId) -> str | None:
        """What the engine calls the request; None: it is not there."""
        record = self._records.get(request_id)
        return None if record is None else record.engine_id

    def on_finished(self, request: Request, block_ids: list[int]) -> None:
        """Pin what is to be sent, while the request still has its blocks."""
        self._mempool.request_ended(request.request_id)
        record = self._records.running(request.request_id)
        if record is None:
            return
        if record.is_private:
            # Blocks that are in use leave the index only; they are freed as empty ones.
            self._mempool.delete(request.all_token_ids[:], namespace_of(request))
        if record.hold:
            record.held_tokens = complete_tokens(request)
            held_ids = [BlockId(block_id) for block_id in block_ids]
            self._transfers.hold_source(record.id, held_ids, record.held_tokens)
        self._ended.append(record)

    def report_ended(self) -> None:
        """`Finished` goes out before what `source_ready` sends."""
        ended, self._ended = self._ended, []
        for record in ended:
            self._records.leave_engine(record)
            self._finish(record.id, record.attempt, record.held_tokens)
            if record.hold:
                self._transfers.source_ready(record.id)

    # ── requests ──────────────────────────────────────────────────────────────────────────────

    def _prefill(self, command: Prefill) -> None:
        if not command.known_tokens:
            self._forget(command.request_id)
        self._start(command, prefill_request)

    def _decode(self, command: Decode) -> None:
        self._start(command, decode_request)

    def _start(
        self,
        command: _RunT,
        build: Callable[[EngineCoreRequest, _RunT, Sequence[int], str, str | None], object],
    ) -> None:
        """Put the request into the engine. A request that the engine refuses must not break it."""
        try:
            record = self._records.learn(
                command.request_id, command.known_tokens, command.token_ids
            )
        except ProtocolError as error:
            self._reject(command, error)
            return
        if record.engine_id is not None:
            self._reject(command, RequestError(f"it runs here already, as {record.engine_id}"))
            return
        record.attempt = command.attempt
        record.hold = command.hold
        record.is_private = command.is_private
        record.held_tokens = 0
        engine_id = f"{record.id}/{command.attempt}"
        token_ids = record.tokens[: command.known_tokens + len(command.token_ids)]
        try:
            self._check_length(record)
            request = self._codec.decode_request(command.request)
            salt = request.cache_salt
            if record.is_private:
                salt = private_namespace(record.id, Namespace(salt)).cache_salt
            build(request, command, token_ids, engine_id, salt)
        except Exception as error:  # noqa: BLE001 (the request's boundary: vLLM raises anything)
            self._cannot_run(command, record, error)
            return
        self._records.enter_engine(record, engine_id)
        # The last token is computed in any case, and so is what must not come from the cache.
        params = request.sampling_params
        can_hit = params is not None and not params.skip_reading_prefix_cache
        self._swaps.bring(
            engine_id,
            token_ids[:-1] if can_hit else [],
            namespace_of(request),
            partial(self._enter, command, record, request),
            keeps=True,
        )

    def _enter(self, command: Prefill | Decode, record: Record, request: EngineCoreRequest) -> None:
        """What the request needs of DRAM is in HBM, or will not come."""
        try:
            self._engine.add(request)
        except Exception as error:  # noqa: BLE001 (as above)
            self._cannot_run(command, record, error)

    def _cannot_run(self, command: Prefill | Decode, record: Record, error: Exception) -> None:
        if not isinstance(error, RequestError):
            text = "%s: the engine cannot take %s"
            logger.error(text, self._instance, record.id, exc_info=error)
        self._drop_from_engine(record)
        self._reject(command, error)

    def _check_length(self, record: Record) -> None:
        longest = self._engine.max_model_len - 1
        if not 1 <= len(record.tokens) <= longest:
            raise RequestError(f"a prompt of {len(record.tokens)} tokens; allowed: 1 to {longest}")

    def _reject(self, command: Prefill | Decode, error: Exception) -> None:
        self._emit(
            Rejected(
                instance=self._instance,
                epoch=self._epoch,
                request_id=command.request_id,
                attempt=command.attempt,
                message=str(error) or type(error).__name__,
            )
        )

    # ── transfers ─────────────────────────────────────────────────────────────────────────────

    def _allocate(self, command: Allocate) -> None:
        try:
            record = self._records.learn(
                command.request_id, command.known_tokens, command.token_ids
            )
        except ProtocolError as error:
            self._emit(
                Refused(
                    instance=self._instance,
                    epoch=self._epoch,
                    transfer_id=command.transfer_id,
                    reason=str(error),
                )
            )
            return
        token_ids = record.tokens[: command.known_tokens + len(command.token_ids)]
        self._swaps.bring(
            command.transfer_id,
            token_ids,
            command.namespace,
            partial(self._transfers.allocate, command, token_ids),
            keeps=False,
        )

    def _transmit(self, command: Transmit) -> None:
        if (history := command.history) is not None:
            self._swaps.bring(
                _sending_key(command.transfer_id),
                history.token_ids,
                history.namespace,
                partial(self._transfers.transmit_history, command, history),
                keeps=False,
                is_prompt=False,
            )
            return
        if self._records.get(command.request_id) is not None:
            self._transfers.transmit(command)
            return
        self._fail_transmit(command.transfer_id, f"unknown request {command.request_id}")

    def _fail_transmit(self, transfer_id: TransferId, reason: str) -> None:
        self._emit(
            TransmitFailed(
                instance=self._instance, epoch=self._epoch, transfer_id=transfer_id, reason=reason
            )
        )

    def _cancel(self, command: Cancel) -> None:
        self._swaps.drop(command.transfer_id)
        if self._swaps.drop(_sending_key(command.transfer_id)):
            self._fail_transmit(command.transfer_id, "cancelled")
        self._transfers.cancel(command)

    # ── ends ──────────────────────────────────────────────────────────────────────────────────

    def _abort(self, command: Abort) -> None:
        record = self._records.get(command.request_id)
        if not command.hold:
            self._forget(command.request_id)
        elif record is None:
            self._finish(command.request_id, attempt=0, held_tokens=0)
        elif record.engine_id is not None and self._swaps.drop(record.engine_id):
            self._records.leave_engine(record)  # it has not begun
            self._finish(record.id, record.attempt, held_tokens=0)
        elif record.engine_id is not None:
            record.hold = True
            self._engine.abort(record.engine_id)
            self.report_ended()
        else:  # it has ended by itself, or never began; what is pinned stays pinned
            self._finish(record.id, record.attempt, record.held_tokens)

    def _forget(self, request_id: RequestId) -> None:
        record = self._records.get(request_id)
        if record is None:
            return
        self._drop_from_engine(record)
        self._records.forget(request_id)
        self._transfers.drop_source(request_id)
        self._transfers.forget(request_id)

    def _drop_from_engine(self, record: Record) -> None:
        """Abort it, if it runs, and say nothing about it."""
        if record.engine_id is not None:
            record.hold = False
            self._swaps.drop(record.engine_id)
            self._engine.abort(record.engine_id)
            self._ended = [ended for ended in self._ended if ended is not record]
            self._records.leave_engine(record)

    # ── the rest ──────────────────────────────────────────────────────────────────────────────

    def _audit(self, command: Audit) -> None:
        engine_blocks = {
            f"request {holder}": [BlockId(block_id) for block_id in block_ids]
            for holder, block_ids in self._engine.held_blocks().items()
        }
        problems = self._mempool.check_integrity(engine_blocks)
        problems += self._transfers.check_integrity() + self._swaps.check_integrity()
        holders = [f"{holder}: {len(ids)} blocks" for holder, ids in engine_blocks.items()]
        holders += self._mempool.holders()
        holders += [f"{r.id}: {len(r.tokens)} tokens known" for r in self._records]
        self._emit(
            Audited(
                instance=self._instance,
                epoch=self._epoch,
                audit_id=command.audit_id,
                stats=self._stats(),
                problems=problems,
                holders=holders,
            )
        )

    def _finish(self, request_id: RequestId, attempt: int, held_tokens: int) -> None:
        self._emit(
            Finished(
                instance=self._instance,
                epoch=self._epoch,
                request_id=request_id,
                attempt=attempt,
                held_tokens=held_tokens,
            )
        )

    def _emit(self, event: AnyEvent) -> None:
        self._reports.send(event)


def _sending_key(transfer_id: TransferId) -> str:
    """A sender's blocks that wait for DRAM; the receiver's go by the transfer's own name."""
    return f"{transfer_id}, to be sent"
