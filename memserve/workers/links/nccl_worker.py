"""The thread of one direction of an NCCL link: what its two ends have in common.

A thread owns its socket, its communicator and its pipe (the engine's may begin a transfer while it
rests: `nccl_sender.py`). It waits for nothing that cannot be given up: each wait watches the socket
and a deadline, so that a dead or stuck peer ends in an error here, and `close` ends it from
outside. When it ends, the communicator has been aborted and the streams have run dry: only then may
anybody think that it touches no memory.

Collaborators: `nccl_sender.py` and `nccl_receiver.py` are the two ends; `nccl_gate.py` keeps the
threads of a process out of each other's way.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable

import msgspec

from memserve.errors import TransferError
from memserve.ops.nccl import Communicator, Fabric
from memserve.ops.nccl_pipe import Counts, Pieces, PipeSpec
from memserve.ops.views import BlockView
from memserve.workers.links.nccl_gate import CallGate
from memserve.workers.links.nccl_pipe import CHUNK_BYTES, EDGE_BYTES, Gpu, Pipe
from memserve.workers.links.nccl_wire import Schedule, Wake, Wire
from memserve.workers.sleeps import sleep_exactly

logger = logging.getLogger(__name__)

_POLL_S = 100e-6
"""Between two looks at what only the opening waits for."""


class NcclSettings(msgspec.Struct, frozen=True):
    """How transfers are cut up, and how long each wait may take."""

    chunk_bytes: int = CHUNK_BYTES
    edge_bytes: int = EDGE_BYTES
    pieces: Pieces = Pieces.STAGED
    chunks_ahead: int = 16
    """Launches under way at most: enough for any prompt's chunks, few enough for a stream's
    queue."""
    open_s: float = 20.0
    """For all of an opening, from the greeting to the first block: a few seconds on a busy host."""
    stall_s: float = 10.0
    """Without any progress of a transfer, the way is taken for broken."""
    quiet_s: float = 2.0
    """When closing: for the peer's word that it writes nothing any more."""

    def schedule(self, block_bytes: int, num_blocks: int) -> Schedule:
        """In blocks of that size: one at least, and no more than there are."""
        edge = min(num_blocks, max(1, self.edge_bytes // block_bytes))
        return Schedule(edge, max(edge, min(num_blocks, self.chunk_bytes // block_bytes)))


class Machinery(msgspec.Struct, frozen=True):
    """What all directions of one rank share."""

    fabric: Fabric
    gpu: Gpu
    settings: NcclSettings
    clock: Callable[[], float] = time.monotonic
    gate: CallGate = msgspec.field(default_factory=CallGate)


class ClosingError(Exception):
    """`close` was called: the thread is to end."""


class LinkThread(ABC):
    """Start it, then `close` it. Its socket is `_wire`, as soon as there is one."""

    def __init__(self, name: str, machinery: Machinery) -> None:
        self._machinery = machinery
        self._settings = machinery.settings
        self._clock = machinery.clock
        self._wake = Wake()
        self._wire: Wire | None = None
        self._is_closing = False
        self._open_by = 0.0
        """When an opening has taken too long."""
        self._communicator: Communicator | None = None
        self._pipe: Pipe | None = None
        self._counts = Counts(0, 0)
        """Of the pipe, when it ran last."""
        self._end = 0
        """Launches that were put into it."""
        self._progress_at = 0.0
        """When a transfer was queued, got on or ended last."""
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_close(self) -> None:
        """Have the thread end soon; it may be asked from any thread."""
        self._is_closing = True
        self._wake.set()

    def close(self) -> None:
        """End the thread; on return it touches no memory. Idempotent.

        A GPU that hangs keeps this waiting until the cluster manager ends the worker, which sends
        no heartbeat meanwhile.
        """
        self.ask_to_close()
        if self._thread.ident is not None:
            self._thread.join()
        self._wake.close()

    @abstractmethod
    def _run(self) -> None:
        """In the thread, on its GPU. May end in ClosingError."""

    def _main(self) -> None:
        sleep_exactly()
        try:
            self._machinery.gpu.enter()
            self._run()
        except ClosingError:
            pass
        except Exception:  # the thread's boundary
            logger.exception("%s has ended", self._thread.name)

    # ── waiting ───────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _look(self) -> None:
        """Take what the peer has said. Raises: PeerGoneError, TransferError."""

    def _check(self) -> None:
        if self._is_closing:
            raise ClosingError
        self._look()

    def _begin_opening(self) -> None:
        self._open_by = self._clock() + self._settings.open_s

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """A step of an opening. Raises: ClosingError; TransferError if the peer is gone, or the
        opening takes too long."""
        while not condition():
            self._check()
            if self._clock() > self._open_by:
                raise TransferError(f"{what}: not open after {self._settings.open_s:g} s")
            time.sleep(_POLL_S)

    def _enter_gate(self) -> None:
        """Of calls to CUDA; leave it after them. Raises: ClosingError, TransferError."""
        give_up_at = self._clock() + self._settings.stall_s
        while not self._machinery.gate.enter():
            self._check()
            if self._clock() > give_up_at:
                raise TransferError("another communicator cannot be given up")
            time.sleep(_POLL_S)

    # ── the passage ───────────────────────────────────────────────────────────────────────────

    def _open_passage(
        self, unique_id: bytes, rank: int, view: BlockView, schedule: Schedule, pieces: Pieces
    ) -> Pipe:
        """Join the other end; returns the pipe for all that follows.

        Raises: ClosingError, TransferError. `_end_passage` in any case.
        """
        communicator = self._communicator = self._machinery.fabric.join(unique_id, rank)
        self._until(communicator.progress, "making the communicator")
        self._connect_gpus(self._make_pipe(communicator, PipeSpec(view, rank == 0, 1, pieces, 1)))
        communicator.split()
        self._until(communicator.progress, "splitting the communicator")
        ahead = self._settings.chunks_ahead
        spec = PipeSpec(view, rank == 0, schedule.chunk_blocks, pieces, ahead)
        return self._make_pipe(communicator, spec)

    def _connect_gpus(self, pipe: Pipe) -> None:
        """What passes first sets connections up, which the other end has its part in, so that it
        may never end: this communicator can be given up meanwhile."""
        end = pipe.put(array("i", [0]), [1])  # vLLM's null block, which nobody reads

        def has_passed() -> bool:
            self._run_pipe(pipe, end)
            return self._counts.finished == end

        self._progress_at = self._clock()
        self._until(has_passed, "connecting the GPUs")
        with self._machinery.gate.closed():  # a pipe frees memory too
            self._close_pipe()

    def _make_pipe(self, communicator: Communicator, spec: PipeSpec) -> Pipe:
        """Raises: TransferError."""
        pipe = self._pipe = self._machinery.gpu.pipe(communicator, spec)
        return pipe

    def _end_passage(self) -> None:
        """Give the communicator up, and wait until what was queued has run dry, or has failed."""
        communicator, self._communicator = self._communicator, None
        with self._machinery.gate.closed():
            if communicator is not None:
                communicator.abort()
            try:
                self._close_pipe()
            except TransferError as error:  # of CUDA, and for good: nothing runs there any more
                logger.error("a pipe has ended badly: %s", error)

    def _close_pipe(self) -> None:
        """If there is one; the gate is closed. Raises: TransferError; it is gone in any case."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()

    def _put(self, pipe: Pipe, ids: array[int], schedule: Schedule) -> int:
        """Queue all chunks of a transfer; returns how many launches have finished when it is
        through. Raises: TransferError."""
        self._progress_at = self._clock()
        self._end = pipe.put(ids, schedule.sizes(len(ids)))
        return self._end

    def _launch_all(self, pipe: Pipe) -> None:
        """That was put. Raises: ClosingError, TransferError."""
        self._run_pipe(pipe)
        while self._counts.launched < self._end:
            self._check()
            self._run_pipe(pipe)

    def _run_pipe(self, pipe: Pipe, finished: int = 0, watch: int = -1) -> None:
        """Let it go on. Raises: TransferError, also if nothing has moved in time."""
        before = self._counts
        self._enter_gate()
        try:
            self._counts = pipe.run(finished, watch)
        finally:
            self._machinery.gate.leave()
        if self._counts != before:
            self._progress_at = self._clock()
        if self._clock() > self._progress_at + self._settings.stall_s:
            raise TransferError(f"no progress in {self._settings.stall_s:g} s")
