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

Whether a request runs whole, by `[scheduler] split`: on a colocated instance, always. The others
are engines as complete, and may run a request whole too. `always` splits all. `never` lets decode
instances run all. `auto` leaves it to the policy (only `cost` can tell, and only with a calibrated
profile: a guess that is right within a factor of two cannot; else all are split).

But for `always`, whoever lives stands in for those who do not: where no prefill instance is there,
the decode instances run requests whole, and the other way round. Who is only busy, or full, is
there; who is silent (`hearing.py`) is not.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec
import numpy as np

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


class Splitting(msgspec.Struct, frozen=True):
    """Which roles do what, depending on the roles of those who are there; see the module."""

    split: Split
    can_tell: bool = False
    """Whether the policy can tell if a request is better split or run whole."""

    def is_split(self, there: Collection[Role]) -> bool:
        """Whether requests may be split."""
        is_pair = Role.PREFILL in there and Role.DECODE in there
        return is_pair and self.split is not Split.NEVER

    def wholes(self, there: Collection[Role]) -> set[Role]:
        """The roles that may run requests whole."""
        wholes = {Role.COLOCATED}
        if self.split is not Split.ALWAYS:
            if self.split is Split.NEVER or self.can_tell or Role.PREFILL not in there:
                wholes.add(Role.DECODE)
            if Role.DECODE not in there:
                wholes.add(Role.PREFILL)
        return wholes.intersection(there)

    def can_place(self, there: Collection[Role], free: Collection[Role] | None = None) -> bool:
        """Whether a request could be served. `free`: those that can take one; None: all."""
        free = there if free is None else free
        is_pair_free = Role.PREFILL in free and Role.DECODE in free
        return not self.wholes(there).isdisjoint(free) or (self.is_split(there) and is_pair_free)

    def absence(self, there: Collection[Role], all_roles: Collection[Role]) -> str | None:
        """Who of a pair is not there, in words; None: nobody is missed."""
        if len(there) == len(all_roles):
            return None
        pair = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
        absent = [word for role, word in pair.items() if role in all_roles and role not in there]
        if not absent or (self.split is Split.NEVER and absent == ["prefill"]):
            return None
        return f"no {' and no '.join(absent)} instance answers"


class Fetching(enum.Enum):
    """Whether KV is fetched from other instances before a prefill; see the module."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Demand(msgspec.Struct, frozen=True):
    """A request that wants a place, and what the instances hold of its tokens."""

    num_tokens: int
    cached_tokens: Counts
    """[instances] Leading tokens that each is believed to hold, in any medium."""
    dram_tokens: Counts
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

    def _useful(self, tokens: Counts) -> Counts:
        most = (self.num_tokens - 1) // self.block_size * self.block_size
        useful: Counts = np.minimum(tokens, max(most, 0))
        return useful


class FetchChoice(msgspec.Struct, frozen=True):
    """Take the KV of the first tokens from there before the prefill."""

    source: InstanceId
    num_tokens: int
    predicted_s: float | None = None
    """Until it has come, if the policy can tell."""
    known_s: float | None = None
    """The same by its known terms alone (`fetch_times.py`)."""


class Placement(msgspec.Struct, frozen=True):
    """Where a request runs. Without `decode` it runs whole on `first`."""

    first: InstanceId
    decode: InstanceId | None
    fetch: FetchChoice | None
    cached_tokens: int
    """That `first` will have of the prompt when it computes the rest."""
    explain: Callable[[], Detail]
    """Gives the reason, of which few are asked: who waits is placed again and again."""

    @property
    def reason(self) -> Detail:
        """Why: the policy, and the candidates with their terms (seconds, tokens), as they were."""
        return self.explain()


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

    @property
    def splitting(self) -> Splitting: ...

    def place(self, demand: Demand, loads: Loads) -> Placement:
        """Does not mutate. Raises: UnavailableError if no open instance can run the request."""
        ...

    def placed(self, demand: Demand, placement: Placement) -> None:
        """The request runs there. Mutates what the policy remembers."""
        ...


def session_key(explicit: str | None, packed: bytes, block_bytes: int) -> str:
    """What tells conversations apart: what the client says, else how the prompt begins."""
    return explicit if explicit else packed[: _SESSION_BLOCKS * block_bytes].hex()


class Eligible(msgspec.Struct, frozen=True):
    """[instances] each: who may do what now."""

    whole: Bools
    prefill: Bools
    decode: Bools
    computing: Bools
    """Whole, or prefill."""
    generating: Bools
    """Decode, and not whole."""
    sending: Bools
    """From whom may be fetched."""
    reason: Detail
    """What a placement's reason has to say of that."""


def eligible(loads: Loads, splitting: Splitting, *, may_wait: bool) -> Eligible:
    """By roles, among the open ones. Raises: UnavailableError if nobody can run a request.

    `may_wait`: as in `Demand`.
    """
    there = loads.roles_there()
    is_open = loads.is_open & ~loads.is_silent
    nobody = np.zeros(len(is_open), bool)
    whole = nobody.copy()
    for role in splitting.wholes(there):
        whole |= is_open & loads.has_role[role]
    decode = is_open & loads.has_role[Role.DECODE]
    prefill = is_open & loads.has_role[Role.PREFILL]
    if not splitting.is_split(there) or not np.count_nonzero(decode):
        prefill = nobody
    if not np.count_nonzero(whole | prefill):
        raise UnavailableError("no instance is ready that could run the request")
    if not may_wait and np.count_nonzero((whole | prefill) & ~loads.is_busy):
        whole, prefill = whole & ~loads.is_busy, prefill & ~loads.is_busy
    absence = splitting.absence(there, loads.all_roles)
    return Eligible(
        whole=whole,
        prefill=prefill,
        decode=decode,
        computing=whole | prefill,
        generating=decode & ~whole,
        sending=loads.can_send,
        reason={} if absence is None else {"runs whole": absence},
    )


class Eligibility:
    """`eligible`, kept until somebody's state changes: every request asks."""

    def __init__(self, splitting: Splitting) -> None:
        self._splitting = splitting
        self._kept: tuple[Loads, bytes, Eligible] | None = None

    def among(self, loads: Loads, *, may_wait: bool) -> Eligible:
        """As `eligible`."""
        if not may_wait:  # seldom, and who is busy changes all the time
            return eligible(loads, self._splitting, may_wait=False)
        states = loads.states.tobytes()
        if self._kept is None or self._kept[0] is not loads or self._kept[1] != states:
            self._kept = loads, states, eligible(loads, self._splitting, may_wait=True)
        return self._kept[2]
