"""A request in the scheduler's hands, from submission until nobody holds anything for it."""

from __future__ import annotations

import msgspec

from memserve.core.admission import Ticket
from memserve.core.lifecycle import RequestLifecycle
from memserve.core.timeline import Timeline
from memserve.core.tokens import Path, pack
from memserve.core.vocabulary import WorkerEvent
from memserve.types import RequestId


class Active(msgspec.Struct):
    """See the module."""

    lifecycle: RequestLifecycle
    timeline: Timeline
    packed: bytes
    """The prompt's tokens, as the trees compare them: packed once."""
    missing_tokens: int = 0
    """Prompt tokens that its first instance has to compute, as far as the tree knows."""
    prefill_s: float = 0.0
    """How long it takes for that, by the cost model."""
    fetch_known_s: float | None = None
    """What is fetched should take so long, by what is known, if the policy could tell."""
    placed_at: float = 0.0
    patient_until: float | None = None
    """Until when it waits for the better place; None: it does not."""

    @property
    def num_tokens(self) -> int:
        """Of the prompt, and generated so far."""
        return self.lifecycle.num_tokens

    def path(self, block_size: int) -> Path:
        """Those tokens, as the trees want them."""
        generated = self.lifecycle.generated
        packed = self.packed + pack(generated) if generated else self.packed
        return Path(packed, block_size, self.lifecycle.spec.namespace)

    def ticket(self, deadline: float) -> Ticket:
        """Its place in the queue."""
        spec = self.lifecycle.spec
        return Ticket(
            id=spec.id,
            client=spec.client,
            priority=spec.priority,
            num_tokens=len(spec.prompt_token_ids),
            deadline=deadline,
        )

    def newly_known_cached_tokens(self) -> int:
        """What the first prefill found of the prompt, when that is known for the first time, else
        0. Notes it in the timeline."""
        cached = self.lifecycle.cached_tokens
        if cached is None or self.timeline.cached_tokens is not None:
            return 0
        self.timeline.cached_tokens = cached
        return cached


def request_of(event: WorkerEvent) -> RequestId:
    """The request that an event belongs to (`TransferId` is request id / direction / attempt)."""
    transfer_id = getattr(event, "transfer_id", None)
    if transfer_id is not None:
        return RequestId(transfer_id.rsplit("/", 2)[0])
    request_id: RequestId = event.request_id  # type: ignore[union-attr]
    return request_id
