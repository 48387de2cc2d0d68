"""P and D over a fake link, with one request to carry."""

from __future__ import annotations

from memserve.messages import Allocated, Cancel, Commit, LinkReady, Sent, Transmit
from memserve.types import InstanceId, Namespace, RequestId, TransferId
from memserve.workers.transfer import private_namespace
from tests.contract.link_rig import geometry
from tests.contract.transfer_rig import NO_NAMESPACE, Node, allocate

R = RequestId("r")
T = TransferId("r/forward/1")
BLOCK_BYTES = geometry().block_bytes


class Pair:
    """P and D with links both ways."""

    def __init__(self, p_layout: str = "block_first", d_layout: str = "block_first") -> None:
        self.p = Node("P0", layout=p_layout)
        self.d = Node("D0", layout=d_layout)
        self.p.join(self.d)
        self.d.join(self.p)
        assert self.p.only(LinkReady).error is None and self.d.only(LinkReady).error is None

    def prefill(self, tokens: list[int]) -> None:
        """P computes the prompt and holds it; it may be sent."""
        assert self.p.compute(R, tokens) is not None
        self.p.end(R, tokens, hold=True)
        self.p.transfers.source_ready(R)

    def allocate(self, tokens: list[int], *, is_private: bool = False) -> Allocated:
        self.d.transfers.allocate(allocate(R, is_private=is_private), tokens)
        return self.d.only(Allocated)

    def transmit(self, allocated: Allocated) -> None:
        self.p.transfers.transmit(order(allocated))

    def commit(self, sent: Sent, *, pin: bool = True) -> None:
        self.d.transfers.commit(
            Commit(epoch=1, transfer_id=sent.transfer_id, size_bytes=sent.size_bytes, pin=pin)
        )

    @property
    def link(self):  # type: ignore[no-untyped-def]
        """P's fake link to D."""
        return self.p.links[self.d.id]

    def check(self, *prompts: list[int]) -> None:
        self.p.check(*prompts)
        self.d.check(*prompts, namespaces=(NO_NAMESPACE, private(R)))


def private(request_id: RequestId, salt: str | None = None) -> Namespace:
    return private_namespace(request_id, Namespace(salt))


def order(allocated: Allocated) -> Transmit:
    return Transmit(
        epoch=1,
        transfer_id=allocated.transfer_id,
        request_id=R,
        peer=InstanceId("D0"),
        first_block=allocated.hit_blocks,
        block_ids=allocated.block_ids,
    )


def cancel(transfer_id: TransferId = T) -> Cancel:
    return Cancel(epoch=1, transfer_id=transfer_id)
