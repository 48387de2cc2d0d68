"""What a fetch takes beside its bytes: what both ends are in the middle of, and each other's words.

    known = round trips + wait(p) + wait(s) + transfer(bytes, and what the links have under way)

A CPU's host is kept by the rest of its step: p reserves after that, and then s begins. A link that
copies in s's own thread is done at once, but takes a turn for each portion; of another one's end s
hears a step later. A GPU's host is kept only while it launches, and then serves while the step is
computed, so what follows the first command mostly waits no more. But of what s is computing now,
for others that begin like this prompt, the last blocks are written when the step ends. What either
has in DRAM it brings to HBM first.

What fetches from s were late lately beyond all that comes on top (`fetch_times.py`); early they can
only be for want of such waits, so round trips and link are the least.

Collaborators: `cost_policy.py` compares with computing.
"""

from __future__ import annotations

import msgspec
import numpy as np

from memserve.core.cost_model import DECODE_LAUNCH, CostModel
from memserve.core.loads import Counts, Loads, Seconds
from memserve.types import COPIED_PORTION_BYTES, COPYING_LINKS

_ROUND_TRIPS_S = 0.5e-3
"""Reserving, ordering, inserting and starting, over the control channel. Measured: what
`bench/transfer_steps.py` takes besides the link, on GPUs and on the CPU."""


class Offer(msgspec.Struct, frozen=True):
    """What may be fetched."""

    source: int
    num_tokens: int
    """Leading ones that will be there."""
    num_dram: int
    """Of those: in the source's DRAM alone."""
    is_coming: bool
    """Whether the source may be computing the last of them just now."""


class Waits(msgspec.Struct, frozen=True):
    """[instances] each: what the engines are in the middle of, as far as one can tell."""

    queue_s: Seconds
    """Of what was placed there."""
    served_s: Seconds
    """Until the host has served what a fetch asks of it."""


class FetchCost:
    """Over one kind of link."""

    def __init__(self, cost: CostModel, link: str) -> None:
        self._link = cost.profile.links[link]
        self._copies_in_turn = link in COPYING_LINKS
        self._serves_inside = not cost.profile.is_on_cpu
        self._token_bytes = cost.kv_bytes(1)

    def waits(self, queue_s: Seconds, loads: Loads) -> Waits:
        """`queue_s`: of what was placed there."""
        if not self._serves_inside:
            rest_s, _ = _steps(queue_s, loads)
            return Waits(queue_s, rest_s + loads.decode_s / 2)
        launch_s = loads.each_s(lambda cost: cost.launch_s(cost.profile.chunk_tokens))
        chunk_s = loads.each_s(lambda cost: cost.exec_s(cost.profile.chunk_tokens))
        step_s = np.clip(loads.head_s, launch_s, chunk_s)
        # A command that comes at any time of a step meets its launch by that one's share, and then
        # waits for half of it.
        launching_s = np.minimum(queue_s, launch_s**2 / (2 * step_s))
        return Waits(queue_s, launching_s + loads.decode_s * (DECODE_LAUNCH**2 / 2))

    def seconds(
        self, offer: Offer, missing: Counts, waits: Waits, swap_s: Seconds | None, loads: Loads
    ) -> tuple[Seconds, Seconds]:
        """[instances] What fetching it is known to take, and the least that it can.

        `missing`: tokens of it that each lacks. `swap_s`: of bringing to HBM what each has in DRAM
        alone; None: nobody has any.
        """
        source = offer.source
        under_way = np.maximum(loads.sending_bytes[source], loads.receiving_bytes)
        size_bytes = missing * self._token_bytes + under_way
        least_s = size_bytes / self._link.bytes_per_s + (_ROUND_TRIPS_S + self._link.fixed_s)
        source_s = waits.served_s.item(source)
        step_s = 0.0  # of the source, after the present one
        if not self._serves_inside:
            _, next_s = _steps(waits.queue_s, loads)
            step_s = loads.decode_s.item(source) + next_s.item(source)
        elif offer.is_coming:
            rest_s, _ = _steps(waits.queue_s, loads)
            source_s += rest_s.item(source)
        if offer.num_dram and swap_s is not None:
            source_s += swap_s.item(source) + step_s
        known_s = least_s + waits.served_s + source_s
        if step_s:
            turns = size_bytes // COPIED_PORTION_BYTES if self._copies_in_turn else 1
            known_s = known_s + turns * step_s
        if swap_s is not None:
            known_s = known_s + swap_s
        return known_s, least_s


def _steps(queue_s: Seconds, loads: Loads) -> tuple[Seconds, Seconds]:
    """[instances] The rest of the present step, if it computes a prompt, and the longest one of a
    prompt's that can follow."""
    chunk_s = loads.each_s(lambda cost: cost.exec_s(cost.profile.chunk_tokens))
    # The last step of a prompt ends with the queue; of others, half is left on average.
    is_last = (loads.num_prefills == 1) & (queue_s <= chunk_s)
    rest_s = np.where(is_last, queue_s, np.minimum(queue_s, chunk_s / 2))
    return rest_s, np.where(is_last, 0.0, np.minimum(queue_s, chunk_s))
