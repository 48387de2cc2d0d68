"""What a fetch takes beside its bytes: what both ends are in the middle of, and each other's words.

    known = round trips + wait(p) + wait(s) + transfer(bytes, and what the links have under way)

p reserves when its host serves the command, then s begins when its own does. A CPU's host is kept
by the rest of its step, and a link that copies in s's own thread takes a turn for each portion. A
GPU's is kept only while it launches, and then serves while the step is computed; but of what s is
computing now, for others that begin like this prompt, the last blocks are written when the step
ends. What s has in DRAM it brings to HBM first, and so does p.

What fetches from s were late lately beyond all that comes on top (`fetch_times.py`); early they can
only be for want of such waits, so round trips and link are the least.

Collaborators: `cost_policy.py` compares with computing.
"""

from __future__ import annotations

import msgspec
import numpy as np

from memserve.core.cost_model import DECODE_LAUNCH, CostModel
from memserve.core.loads import Counts, Loads, Seconds
from memserve.core.policy import Demand
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


class Waits(msgspec.Struct, frozen=True):
    """[instances] each: what the engines are in the middle of, as far as one can tell."""

    queue_s: Seconds
    """Of what was placed there."""
    served_s: Seconds
    """Until the host serves a command."""


class FetchCost:
    """Over one kind of link."""

    def __init__(self, cost: CostModel, link: str) -> None:
        self._link = cost.profile.links[link]
        self._is_in_turn = link in COPYING_LINKS
        self._token_bytes = cost.kv_bytes(1)

    def waits(self, queue_s: Seconds, loads: Loads) -> Waits:
        """`queue_s`: of what was placed there."""
        if self._is_in_turn:
            rest_s, _ = _steps(queue_s, loads)
            return Waits(queue_s, rest_s + loads.decode_s / 2)
        launching_s = np.minimum(queue_s, loads.each_s(_launching_s))
        return Waits(queue_s, launching_s + loads.decode_s * (DECODE_LAUNCH**2 / 2))

    def seconds(
        self,
        offer: Offer,
        missing: Counts,
        waits: Waits,
        swap_s: Seconds | None,
        demand: Demand,
        loads: Loads,
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
        if self._is_in_turn:
            _, next_s = _steps(waits.queue_s, loads)
            step_s = loads.decode_s.item(source) + next_s.item(source)
        elif _is_coming(offer, demand):
            rest_s, _ = _steps(waits.queue_s, loads)
            source_s += rest_s.item(source)
        if offer.num_dram and swap_s is not None:
            source_s += swap_s.item(source) + step_s
        known_s = least_s + waits.served_s + source_s
        if step_s:
            known_s = known_s + size_bytes // COPIED_PORTION_BYTES * step_s
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


def _launching_s(cost: CostModel) -> float:
    """A command that comes at any time in a long step meets its launch by that one's share, and
    waits for half of it."""
    chunk = cost.profile.chunk_tokens
    mean_s: float = cost.launch_s(chunk) ** 2 / (2 * cost.exec_s(chunk))
    return mean_s


def _is_coming(offer: Offer, demand: Demand) -> bool:
    """Whether the source may be computing the last of these tokens just now."""
    coming = demand.coming_tokens
    return coming is not None and coming.item(offer.source) >= offer.num_tokens
