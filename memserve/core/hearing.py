"""Who has been heard of lately: an instance that gives no sign may hang.

A sign is a heartbeat, which an instance gives between two steps alone; it also answers inside a
step, and one in which the device hangs (docs/adr/0028). So one that is silent for longer than
that, and than the step that it may be in, is given nothing more to do, and who waits for it goes on
elsewhere: long before the cluster manager takes it for dead (`cluster.heartbeat_timeout_s`), and at
no risk, for with its next sign it is back.

Silence counts only while somebody listens: after a pause of the listener's own (its process was
stopped, or starved) nobody is blamed. Collaborators: `accounting.Members` passes signs on, and
takes the silent ones off its lists; `cluster.ClusterManager` ends who is silent for far longer.
"""

from __future__ import annotations

from collections.abc import Callable

from memserve.types import InstanceId

_PATIENCE = 2.0
"""A step may take so many times what was predicted."""
_RHYTHM_S = 1.0
"""Who is asked at least so often does not pause."""


class Hearing:
    """Of ready instances. Times are the caller's clock, in seconds."""

    def __init__(self, silence_s: float) -> None:
        """`silence_s`: how long an instance may be silent besides its step."""
        self._silence_s = silence_s
        self._heard_at: dict[InstanceId, float] = {}
        self._listening_since = self._asked_at = 0.0

    def heard(self, instance: InstanceId, now: float) -> None:
        """It gave a sign, or became ready."""
        self._heard_at[instance] = now

    def forget(self, instance: InstanceId) -> None:
        """Its life is over."""
        self._heard_at.pop(instance, None)

    def silent(self, step_s: Callable[[InstanceId], float], now: float) -> list[InstanceId]:
        """Those that are. To be asked every second, or twice per `silence_s`: else it was a pause.

        `step_s`: the longest step that an instance may be in, as predicted.
        """
        if now - self._asked_at > max(self._silence_s / 2, _RHYTHM_S):
            self._listening_since = now
        self._asked_at = now
        return [
            instance
            for instance, heard_at in self._heard_at.items()
            if (silent_s := now - max(heard_at, self._listening_since)) > self._silence_s
            and silent_s > self._silence_s + _PATIENCE * step_s(instance)
        ]
