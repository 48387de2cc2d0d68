"""Keeps the threads of NCCL links out of CUDA while one of them gives a communicator up.

NCCL frees memory then. CUDA waits for that until the GPU is idle, and lets no other thread's calls
through meanwhile. A kernel that waits for a dead peer ends only when the thread of that passage
gives it up as well, which it cannot from inside a call: both would wait for each other. So whoever
gives up waits until the others are outside, and these watch their peers until they may go on.

Collaborators: `nccl_worker.py` has one for all threads of a rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_LEAVE_S = 1.0
"""A call ends within a millisecond, unless the engine's own calls hold it up: then to give up is
what may help."""


class CallGate:
    """Any thread may call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._num_ending = 0

    def enter(self) -> bool:
        """Whether calls may be made now; if so, `leave` after them."""
        with self._changed:
            if self._num_ending:
                return False
            self._num_inside += 1
            return True

    def leave(self) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Nobody enters in here, and those inside have left. Several threads may be in here."""
        with self._changed:
            self._num_ending += 1
            if not self._changed.wait_for(lambda: not self._num_inside, _LEAVE_S):
                logger.warning("a link's call to CUDA has not ended in %g s", _LEAVE_S)
        try:
            yield
        finally:
            with self._changed:
                self._num_ending -= 1
