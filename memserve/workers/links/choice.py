"""Which link leads to a peer: the fastest that both ends have and that can be opened, from each
rank to each.

An instance has a kind of link if it can write by it, and offers its own memory under the same name
(`Ready.addresses`). Collaborators: `hosts.py` lists this instance's kinds, fastest first, and opens
lanes; `transfer.py` opens links through `LinkChoice`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Protocol

from memserve.errors import TransferError
from memserve.messages import PeerJoined
from memserve.types import Geometry
from memserve.workers.links.base import Link, RankPeer
from memserve.workers.links.heads import Route, routes_to
from memserve.workers.links.ranked import RankedLink

logger = logging.getLogger(__name__)

AUTO = "auto"


class LanesOpener(Protocol):
    """Opens links of one kind between ranks."""

    def __call__(self, kind: str, routes: Sequence[Route]) -> list[Link]:
        """One for each route, in order. Raises: TransferError, with none left open."""
        ...


class LinkChoice:
    """A `LinkOpener` over several kinds of links."""

    def __init__(
        self, own: Geometry, kinds: Iterable[str], open_lanes: LanesOpener, wanted: str = AUTO
    ) -> None:
        """`own`: of any rank. `kinds`: fastest first. `wanted`: `auto`, or the only kind to use."""
        self._own = own
        self._kinds = tuple(kinds)
        self._open_lanes = open_lanes
        self._wanted = wanted

    def __call__(self, peer: PeerJoined) -> Link:
        """Raises: TransferError (no kind in common; the peer's memory cannot be reached)."""
        problems = []
        for kind in self._kinds:
            if kind in peer.addresses and self._wanted in (AUTO, kind):
                try:
                    lanes = self._open_lanes(kind, routes_to(kind, self._own, peer))
                except TransferError as error:
                    problems.append(f"{kind}: {error}")
                    continue
                if problems:
                    logger.warning("%s is reached by %s; %s", peer.peer, kind, "; ".join(problems))
                return lanes[0] if len(lanes) == 1 else RankedLink(lanes)
        if problems:
            raise TransferError(f"no link to {peer.peer}: {'; '.join(problems)}")
        offered = ", ".join(sorted(peer.addresses)) or "none"
        here = ", ".join(self._kinds) or "none"
        only = "" if self._wanted == AUTO else f" (transfer.link is {self._wanted!r})"
        raise TransferError(
            f"no link to {peer.peer}: it offers {offered}; this instance has {here}{only}"
        )


def open_here(opener: Callable[[RankPeer], Link], routes: Sequence[Route]) -> list[Link]:
    """Open lanes in this process, which has the only rank. Raises: TransferError."""
    lanes: list[Link] = []
    with ExitStack() as if_one_fails:
        for route in routes:
            lane = opener(route.peer)
            if_one_fails.callback(lane.close)
            lanes.append(lane)
        if_one_fails.pop_all()
    return lanes
