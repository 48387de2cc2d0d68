"""Which link leads to a peer: the fastest that both ends have.

An instance has a kind of link if it can write by it, and offers its own memory under the same name
(`Ready.addresses`). Collaborators: `main.py` lists this worker's kinds, fastest first;
`transfer.py` opens links through `LinkChoice`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from memserve.errors import TransferError
from memserve.messages import PeerJoined
from memserve.workers.links.base import Link, RankPeer, rank_peer

AUTO = "auto"


class LinkChoice:
    """A `LinkOpener` over several kinds of links."""

    def __init__(self, kinds: Mapping[str, Callable[[RankPeer], Link]], wanted: str = AUTO) -> None:
        """`kinds`: how to open each, fastest first. `wanted`: `auto`, or the only kind to use."""
        self._kinds = dict(kinds)
        self._wanted = wanted

    def __call__(self, peer: PeerJoined) -> Link:
        """Raises: TransferError (no kind in common; the peer's memory cannot be reached)."""
        for kind, open_link in self._kinds.items():
            if kind in peer.addresses and self._wanted in (AUTO, kind):
                return open_link(rank_peer(kind, peer))
        offered = ", ".join(sorted(peer.addresses)) or "none"
        here = ", ".join(self._kinds) or "none"
        only = "" if self._wanted == AUTO else f" (transfer.link is {self._wanted!r})"
        raise TransferError(
            f"no link to {peer.peer}: it offers {offered}; this instance has {here}{only}"
        )
