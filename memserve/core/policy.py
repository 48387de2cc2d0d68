"""Which instances a request runs on: pure, from what the scheduler knows at the moment.

`scheduler.py` calls a `Policy` with what the prompt trees know of the prompt (`Demand`) and with
what every instance has to do (`loads.py`), and turns the answer into a `vocabulary.Plan`; the
reason goes to the request's timeline. The paper: section 6.

Policies, chosen by `[scheduler] policy`:

    cost          least time by the cost model, queues, fetching and links included (`cost_policy`)
    prefix        the longest cached prefix, then the least work
    session       the instance that served the session before; a new one goes to the least work
    least_loaded  the least work
    round_robin   one after the other

The last four are there to be compared with, and do not fetch by themselves.

Whether KV that another instance holds is fetched, by `[scheduler] fetch`: `auto` leaves it to the
policy, `always` lets the chosen instance fetch whatever another one holds and it lacks, `never`
lets it compute that.

Whether a request runs whole, by `[scheduler] split`: on a colocated instance, always. A decode
instance is as complete an engine, and may run a request whole too: `always` splits all, `never`
splits none, `auto` leaves it to the policy (only `cost` can tell, and only with a calibrated
profile: a guess that is right within a factor of two cannot; else it is the same as `always`).
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from memserve.core.loads import Bools, Counts, Loads, Seconds
from memserve.core.timeline import Detail
from memserve.errors import UnavailableError
from memserve.types import InstanceId, Role

_SESSION_BLOCKS = 8


class Split(enum.Enum):
    """Whether decode instances run requests whole; see the module."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Fetching(enum.Enum):
    """Whether KV is fetched from other instances before a prefill; see the module."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Demand(msgspec.Struct, frozen=True):
    """A request that wants a place, and what the instances hold of its tokens."""

    num_tokens: int
    cached_tokens: npt.NDArray[np.int32]
    """[instances] Leading tokens that each is believed to hold, in any medium."""
    dram_tokens: npt.NDArray[np.int32]
    """[instances] Of those: in DRAM alone."""
    expected_tokens: int
    """That it will generate, as far as one can tell."""
    session: str
    """Equal for the requests of one conversation."""
    now: float
    coming_tokens: Counts | None = None
    """[instances] Leading tokens that each will hold when it comes to this request: others, before
    it in the queue, begin with them. None: nowhere any."""
    may_fetch: bool = True
    block_size: int = 1
    ahead_s: Seconds | None = None
    """[instances] Of computing there what waits at the scheduler before it. None: nothing does."""
    may_wait: bool = True
    """For a busy instance, while another one is free."""

    def reusable(self) -> Counts:
        """[instances] Cached tokens that save something: the last token is always computed."""
        return self._useful(self.cached_tokens)

    def found(self) -> Counts:
        """[instances] What each will find of them, when it comes to this request."""
        if self.coming_tokens is None:
            return self.reusable()
        return self._useful(np.maximum(self.cached_tokens, self.coming_tokens))

    def _useful(self, tokens: npt.NDArray[Any]) -> Counts:
        most = (self.num_tokens - 1) // self.block_size * self.block_size
        useful: Counts = np.minimum(tokens, max(most, 0)).astype(np.int64)
        return useful


class FetchChoice(msgspec.Struct, frozen=True):
    """Take the KV of the first tokens from there before the prefill."""

    source: InstanceId
    num_tokens: int
    predicted_s: float | None = None
    """Until it has come, if the policy can tell."""


class Placement(msgspec.Struct, frozen=True):
    """Where a request runs. Without `decode` it runs whole on `first`."""

    first: InstanceId
    decode: InstanceId | None
    fetch: FetchChoice | None
    cached_tokens: int
    """That `first` will have of the prompt when it computes the rest."""
    reason: Detail
    """Why: the policy, and the candidates with their terms (seconds, tokens)."""


def with_fetch(placement: Placement, demand: Demand, loads: Loads) -> Placement:
    """The same, fetching all that another ready instance holds and the first one lacks."""
    usable = np.where(loads.can_send, demand.reusable(), 0)
    source = int(usable.argmax())
    if usable[source] <= demand.found()[loads.slots[placement.first]]:
        return placement
    num_tokens = int(usable[source])
    return msgspec.structs.replace(
        placement,
        fetch=FetchChoice(loads.instances[source], num_tokens),
        cached_tokens=num_tokens,
    )


class Policy(Protocol):
    """Chooses among the open instances, the busy ones too: then the request waits for its place.

    Deterministic; owns what it remembers, if anything.
    """

    @property
    def name(self) -> str: ...

    def place(self, demand: Demand, loads: Loads) -> Placement:
        """Does not mutate. Raises: UnavailableError if no open instance can run the request."""
        ...

    def placed(self, demand: Demand, placement: Placement) -> None:
        """The request runs there. Mutates what the policy remembers."""
        ...


def can_place(roles: Collection[Role], split: Split) -> bool:
    """Whether instances of these roles could serve a request."""
    if Role.COLOCATED in roles:
        return True
    if split is Split.NEVER:
        return Role.DECODE in roles
    return Role.DECODE in roles and Role.PREFILL in roles


def session_key(explicit: str | None, packed: bytes, block_bytes: int) -> str:
    """What tells conversations apart: what the client says, else how the prompt begins."""
    return explicit if explicit else packed[: _SESSION_BLOCKS * block_bytes].hex()


class Eligible(msgspec.Struct, frozen=True):
    """[instances] each: who may do what now."""

    whole: Bools
    prefill: Bools
    decode: Bools


def eligible(
    loads: Loads, split: Split, *, may_wait: bool, whole_on_decode: bool = False
) -> Eligible:
    """By roles, among the open ones. Raises: UnavailableError if nobody can run a request.

    `may_wait`: as in `Demand`. `whole_on_decode`: whether AUTO lets decode instances run requests
    whole.
    """
    is_decode = loads.is_open & loads.has_role[Role.DECODE]
    whole = loads.is_open & loads.has_role[Role.COLOCATED]
    prefill = loads.is_open & loads.has_role[Role.PREFILL]
    if split is Split.NEVER or (split is Split.AUTO and whole_on_decode):
        whole = whole | is_decode
    if split is Split.NEVER or not is_decode.any():
        prefill = np.zeros_like(prefill)
    if not whole.any() and not prefill.any():
        raise UnavailableError("no instance is ready that could run the request")
    if not may_wait and ((whole | prefill) & ~loads.is_busy).any():
        whole, prefill = whole & ~loads.is_busy, prefill & ~loads.is_busy
    return Eligible(whole, prefill, is_decode)
