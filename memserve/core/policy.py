"""Which instances a request runs on: pure, from what the scheduler knows at the moment.

`scheduler.py` calls `place` with a view of every ready instance and turns the answer into a
`vocabulary.Plan`; the reason goes to the request's timeline. The paper: section 6.

A request runs whole on a colocated instance, or split over a prefill and a decode instance. Where
it computes its prompt is chosen by a `Ranking`; `LongestPrefix` is the first. It looks at load only
between equal prefixes, so one hot prefix keeps one instance busy while others idle. A ranking by
time (queue, computing and fetching, all in seconds) takes its place without a change elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias

import msgspec

from memserve.errors import UnavailableError
from memserve.types import InstanceId, Role


class InstanceView(msgspec.Struct, frozen=True):
    """A ready instance, as one request sees it."""

    instance: InstanceId
    role: Role
    queued_tokens: int
    """Prompt tokens placed here and not yet computed."""
    running_requests: int
    running_tokens: int
    """Tokens whose KV the running requests hold here."""
    cached_tokens: int
    """Of this request's tokens, how many the prompt tree believes to be here."""


class Placement(msgspec.Struct, frozen=True):
    """Where a request runs. Without `decode` it runs whole on `first`."""

    first: InstanceId
    decode: InstanceId | None
    reason: dict[str, str | int | float]
    """The ranking and its terms for each instance that was considered, for the timeline."""


Rank: TypeAlias = tuple[float | str, ...]
"""The least one wins."""


class Ranking(Protocol):
    """How good an instance is for a request of `num_tokens`. Ends in the id: no ties."""

    name: str

    def first(self, view: InstanceView, num_tokens: int) -> Rank:
        """As the instance that computes the prompt."""

    def decode(self, view: InstanceView, num_tokens: int) -> Rank:
        """As the instance that generates."""


class LongestPrefix:
    """The longest cached prefix, then the least load."""

    name = "longest prefix, then least load"

    def first(self, view: InstanceView, num_tokens: int) -> Rank:
        cached = min(view.cached_tokens, num_tokens)
        return (-cached, view.queued_tokens, view.running_requests, view.instance)

    def decode(self, view: InstanceView, num_tokens: int) -> Rank:
        cached = min(view.cached_tokens, num_tokens)
        return (-cached, view.running_tokens, view.running_requests, view.instance)


def place(
    num_tokens: int, views: Iterable[InstanceView], ranking: Ranking | None = None
) -> Placement:
    """Choose among all colocated instances, and the best prefill with the best decode instance.

    Raises: UnavailableError if the views hold neither a colocated instance nor a pair.
    """
    ranking = ranking or LongestPrefix()
    views = list(views)
    decoders = [view for view in views if view.role is Role.DECODE]
    firsts = [
        view
        for view in views
        if view.role is Role.COLOCATED or (view.role is Role.PREFILL and decoders)
    ]
    if not firsts:
        raise UnavailableError("no instance is ready that could run the request")
    first = min(firsts, key=lambda view: ranking.first(view, num_tokens))
    considered = list(firsts)
    decode = None
    if first.role is Role.PREFILL:
        decode = min(decoders, key=lambda view: ranking.decode(view, num_tokens))
        considered += decoders
    return Placement(
        first=first.instance,
        decode=decode.instance if decode is not None else None,
        reason=_reason(ranking, num_tokens, considered),
    )


def _reason(
    ranking: Ranking, num_tokens: int, considered: list[InstanceView]
) -> dict[str, str | int | float]:
    terms: dict[str, str | int | float] = {"ranking": ranking.name, "tokens": num_tokens}
    for view in considered:
        terms[view.instance] = (
            f"{view.cached_tokens} tokens cached, {view.queued_tokens} queued, "
            f"{view.running_tokens} running in {view.running_requests} requests"
        )
    return terms
