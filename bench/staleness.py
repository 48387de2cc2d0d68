"""How true the scheduler's picture of the caches stays when they evict all the time.

    python -m bench.staleness [--requests 6000] [--out FILE]

Eight simulated instances, each a real local index over a small pool with plain LRU eviction, serve
conversations that need more memory than there is (by the number of sessions): system prompts shared
by many, turns that grow each conversation, a reply of 128 tokens. Requests are placed by the `cost`
policy on what a prompt tree says, and take the time that the cost model says (Llama-3.1-8B on an
H200).
What differs between the runs is how the tree comes to know: by the instances' events, by requests'
ends with a TTL (the paper), or by those alone, for ever. News takes 5 ms.

Compared: the hit ratio that the scheduler counted on when it placed each request, and the one that
the request then found. Everything is simulated, with fixed seeds: no figure depends on the machine.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from bench._report import Scalar, parser, publish
from memserve.core.builtin import built_in
from memserve.core.cost_model import CostModel
from memserve.core.following_tree import FollowingTree
from memserve.core.guessing_tree import GuessingTree
from memserve.core.loads import Loads, Share
from memserve.core.policies import make_policy
from memserve.core.policy import Demand, Split
from memserve.core.radix import RadixIndex
from memserve.core.tokens import Path, pack
from memserve.simulator.setup import MODELS
from memserve.types import InstanceId, Medium, Namespace, Role

BLOCK_SIZE = 16
NUM_INSTANCES, POOL_BLOCKS = 8, 1024
NUM_SYSTEMS, SYSTEM_TOKENS = 8, 512
REPLY_TOKENS, TOKEN_S, NEWS_S, THINK_S = 128, 0.02, 0.005, 12.0
MAX_TOKENS = 6000
"""A conversation that is longer ends, and another one takes its place."""


class Instance:
    """A local index over a pool of its own, and the time until which it computes prompts."""

    def __init__(self, id: InstanceId, clock: Callable[[], float]) -> None:
        self.id = id
        self.index = RadixIndex(BLOCK_SIZE, clock, lambda _: True)
        self.free_at = 0.0
        self._free = list(range(POOL_BLOCKS))

    def hit_tokens(self, path: Path) -> int:
        return self.index.match(path).num_blocks * BLOCK_SIZE

    def hold(self, path: Path) -> Any:
        """All of the path is in the index, and stays until `let_go`; None if there is no room."""
        known = self.index.match(path).num_blocks
        guard = self.index.acquire(path, known) if known else None
        missing = path.num_blocks - known
        if missing > len(self._free):
            freed = self.index.evict(missing - len(self._free), Medium.HBM)
            self._free += freed.hbm
        held = None
        if missing <= len(self._free):
            places = [self._free.pop() for _ in range(missing)]
            self.index.insert(path, places, known)
            held = self.index.acquire(path)
        if guard is not None:
            self.index.release(guard)
        return held

    def let_go(self, held: Any) -> None:
        if held is not None:
            self.index.release(held)


class Session:
    """A conversation: its tokens so far."""

    def __init__(self, system: list[int]) -> None:
        self.tokens = list(system)


class Outcome(msgspec.Struct):
    """Of one request."""

    tokens: int
    predicted: int
    found: int
    ttft_s: float


class Run:
    """One simulation. `freshness`: "events", or how long a guess is believed (None: for ever)."""

    def __init__(
        self, freshness: str | float | None, num_sessions: int, num_requests: int, seed: int
    ) -> None:
        self.now = 0.0
        self.outcomes: list[Outcome] = []
        self._num_requests = num_requests
        self._rng = random.Random(seed)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        ids = [InstanceId(f"PD{number}") for number in range(NUM_INSTANCES)]
        self._instances = [Instance(id, lambda: self.now) for id in ids]
        self._following = FollowingTree(BLOCK_SIZE, ids, 10_000_000)
        ttl_s = freshness if isinstance(freshness, float) else 1e12
        self._guessing = GuessingTree(BLOCK_SIZE, ids, 10_000_000, ttl_s)
        self._tree = self._following if freshness == "events" else self._guessing
        self._cost = CostModel(built_in(MODELS["llama-3.1-8b"], "NVIDIA H200"))
        self._policy = make_policy("cost", Split.ALWAYS, self._cost, "ipc")
        self._loads = Loads(dict.fromkeys(ids, Role.COLOCATED), self._cost)
        for id in ids:
            self._loads.start(id)
        self._systems = [self._text(SYSTEM_TOKENS) for _ in range(NUM_SYSTEMS)]
        for _ in range(num_sessions):
            session = Session(self._rng.choice(self._systems))
            self._after(self._rng.uniform(0, 2 * THINK_S), partial(self._turn, session))

    def run(self) -> None:
        while self._agenda:
            self.now, _, happen = heapq.heappop(self._agenda)
            happen()

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._numbers), happen))

    def _text(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(128_000) for _ in range(num_tokens)]

    # ── one request ───────────────────────────────────────────────────────────────────────────

    def _turn(self, session: Session) -> None:
        """The user has written: place the request."""
        if self._num_requests == 0:
            return
        self._num_requests -= 1
        if len(session.tokens) > MAX_TOKENS:
            session.tokens = list(self._rng.choice(self._systems))
        session.tokens += self._text(self._rng.randrange(64, 512))
        path = Path(pack(session.tokens), BLOCK_SIZE, Namespace())
        self._guessing.expire(self.now)
        match = self._tree.match(path)
        demand = Demand(
            num_tokens=len(session.tokens),
            cached_tokens=match.cached_tokens,
            dram_tokens=match.dram_tokens,
            expected_tokens=REPLY_TOKENS,
            session="",
            now=self.now,
            may_fetch=False,
            block_size=BLOCK_SIZE,
        )
        placement = self._policy.place(demand, self._loads)
        instance = self._instances[self._loads.slots[placement.first]]
        predicted = int(match.cached_tokens[self._loads.slots[placement.first]])
        exec_s = self._cost.exec_s(len(session.tokens), min(predicted, len(session.tokens) - 1))
        share = Share(len(session.tokens), exec_s, len(session.tokens) - predicted)
        self._loads.add(instance.id, share, self.now)
        arrived = self.now
        wait_s = max(instance.free_at - self.now, 0.0)
        instance.free_at = self.now + wait_s + exec_s
        self._after(wait_s, lambda: self._start(session, path, instance, predicted, share, arrived))

    def _start(
        self,
        session: Session,
        path: Path,
        instance: Instance,
        predicted: int,
        share: Share,
        arrived: float,
    ) -> None:
        """Its turn has come: what is in the cache is known now."""
        num_tokens = len(session.tokens)
        found = instance.hit_tokens(path)
        exec_s = self._cost.exec_s(num_tokens, min(found, num_tokens - 1))
        late_s = exec_s - share.prefill_s  # the prompt was thought to be cached, or was not
        instance.free_at += late_s
        self.outcomes.append(Outcome(num_tokens, predicted, found, self.now + exec_s - arrived))
        held = instance.hold(path)
        self._tell(instance, path)
        self._after(exec_s, lambda: self._computed(session, instance, held, share))

    def _computed(self, session: Session, instance: Instance, held: Any, share: Share) -> None:
        self._loads.remove(instance.id, share, self.now)
        running = Share(share.context_tokens)
        self._loads.add(instance.id, running, self.now)
        self._after(REPLY_TOKENS * TOKEN_S, lambda: self._end(session, instance, held, running))

    def _end(self, session: Session, instance: Instance, held: Any, running: Share) -> None:
        self._loads.remove(instance.id, running, self.now)
        session.tokens += self._text(REPLY_TOKENS)
        path = Path(pack(session.tokens), BLOCK_SIZE, Namespace())
        instance.let_go(held)
        instance.let_go(instance.hold(path))
        self._tell(instance, path)
        self._after(self._rng.expovariate(1 / THINK_S), lambda: self._turn(session))

    def _tell(self, instance: Instance, path: Path) -> None:
        """What the scheduler hears, a moment later: changes, or that a request left this behind."""
        changes = instance.index.take_changes()
        self._after(NEWS_S, lambda: self._following.apply(instance.id, changes, self.now))
        self._after(
            NEWS_S, lambda: self._guessing.learn(path, path.num_blocks, instance.id, self.now)
        )


def figures(outcomes: list[Outcome]) -> dict[str, float]:
    """Without the first quarter, while the caches fill."""
    steady = outcomes[len(outcomes) // 4 :]
    tokens = sum(outcome.tokens for outcome in steady)
    ttfts = sorted(outcome.ttft_s for outcome in steady)
    return {
        "predicted_hit_percent": 100 * sum(o.predicted for o in steady) / tokens,
        "real_hit_percent": 100 * sum(o.found for o in steady) / tokens,
        "wrong_tokens_percent": 100 * sum(abs(o.predicted - o.found) for o in steady) / tokens,
        "misled_requests_percent": 100 * sum(o.found < o.predicted for o in steady) / len(steady),
        "ttft_mean_ms": 1e3 * statistics.fmean(ttfts),
        "ttft_p99_ms": 1e3 * ttfts[int(len(ttfts) * 0.99)],
    }


def main(args: argparse.Namespace) -> None:
    ways: dict[str, str | float | None] = {
        "events": "events",
        "ttl_10s": 10.0,
        "ttl_60s": 60.0,
        "ttl_600s": 600.0,
        "history": None,
    }
    metrics: dict[str, Scalar] = {}
    rows: list[dict[str, Scalar]] = []
    for num_sessions in args.sessions:
        for name, freshness in ways.items():
            run = Run(freshness, num_sessions, args.requests, seed=1)
            run.run()
            found = figures(run.outcomes)
            metrics |= {f"{num_sessions}_{name}_{key}": value for key, value in found.items()}
            shown = {key.replace("_", " "): value for key, value in found.items()}
            rows.append({"sessions": num_sessions, "freshness": name} | shown)
    publish(
        "staleness",
        settings={
            "requests": args.requests,
            "instances": NUM_INSTANCES,
            "pool_blocks": POOL_BLOCKS,
            "sessions": args.sessions,
        },
        metrics=metrics,
        raw=rows,
        rows=rows,
        out=args.out,
    )


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=3000, help="of each run")
    options.add_argument(
        "--sessions", type=int, nargs="+", default=[50, 80, 160], help="conversations at a time"
    )
    main(options.parse_args())
