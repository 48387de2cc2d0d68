"""An engine without a model: what runs in each step, how long it takes, which blocks it needs.

It batches as vLLM does: running requests first, one token each; then chunks of prompts, up to a
budget of tokens; new requests come in while there is room for their whole prompt and a seat in the
batch; when a running request finds no block, the youngest one is put back and starts again. How
long a step takes, the cost model says. Blocks come from the same `MemPool` that transfers use.

Steps in which nothing but decoding happens are taken together, up to the next moment at which the
batch changes; `cut` ends such a run earlier, between two of its steps, when a command arrives.

Collaborator: `worker.py`, which drives it and tells the scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from memserve.core.cost_model import CostModel
from memserve.errors import OutOfBlocksError
from memserve.messages import TokenOutput
from memserve.types import BlockId, Namespace, RequestId
from memserve.workers.mempool import MemPool


class Run(msgspec.Struct, eq=False):
    """One `Prefill` or `Decode` in the engine."""

    id: RequestId
    attempt: int
    tokens: list[int]
    """Known at its start, then also those that it generates."""
    reply: list[int]
    """What is still to be generated, in order."""
    hold: bool
    namespace: Namespace
    owner: str
    """Name in the pool of what it holds."""
    block_ids: list[BlockId] = []
    num_computed: int = 0
    """Tokens whose KV is there."""
    num_indexed: int = 0
    """Full blocks that are in the index."""
    num_generated: int = 0
    is_started: bool = False

    @property
    def is_decoding(self) -> bool:
        """Whether only the last token is to be computed, and that token was generated here."""
        return self.num_generated > 0 and self.num_computed == len(self.tokens) - 1


class Step(msgspec.Struct, eq=False):
    """What is being computed now; several steps at once if nothing but decoding happens."""

    chunks: list[tuple[Run, int]]
    """Requests with a part of their prompt, and how many tokens of it."""
    decodes: list[Run]
    num_steps: int
    begun: float
    first_s: float
    launch_s: float
    """Each keeps the host for so long, or to its end; then commands are served."""
    growth_s: float = 0.0
    """How much longer each step takes than the one before."""

    def seconds(self, num_steps: int) -> float:
        """How long the first so many of its steps take."""
        return num_steps * self.first_s + num_steps * (num_steps - 1) / 2 * self.growth_s

    @property
    def end(self) -> float:
        return self.begun + self.seconds(self.num_steps)

    def served_at(self, now: float) -> float:
        """When a command is served that comes now, after `cut`: at the end at the latest."""
        launched = self.begun + self.seconds(self.num_steps - 1) + self.launch_s
        return min(max(now, launched), self.end)

    def cut(self, now: float) -> bool:
        """End with the step that runs now. Returns whether that is earlier than planned."""
        elapsed = now - self.begun
        steps = next((n for n in range(1, self.num_steps) if self.seconds(n) >= elapsed), None)
        if steps is None:
            return False
        self.num_steps = steps
        return True


class EngineLimits(msgspec.Struct, frozen=True):
    """vLLM's `max_num_batched_tokens` and `max_num_seqs`, and how finely time is cut."""

    batched_tokens: int
    requests: int
    steps_together: int = 64
    """Decoding steps that may be taken as one: bounds how late anything is heard of."""


class EngineHooks(Protocol):
    """What the engine says while it plans and ends steps."""

    def on_scheduled(self, run: Run, cached_tokens: int) -> None:
        """It is in a step for the first time."""

    def on_finished(self, run: Run) -> None:
        """It has its last token; its blocks are still its own."""


class SimulatedEngine:
    """The batch, its queue, and the step that runs."""

    def __init__(
        self,
        mempool: MemPool,
        costs: CostModel,
        limits: EngineLimits,
        clock: Callable[[], float],
        hooks: EngineHooks,
        slowdown: float = 1.0,
    ) -> None:
        """`slowdown`: its steps take so many times as long as the costs say."""
        self._mempool = mempool
        self._costs = costs
        self._limits = limits
        self._clock = clock
        self._hooks = hooks
        self._slowdown = slowdown
        self._waiting: deque[Run] = deque()
        self._running: list[Run] = []
        self.busy_s = 0.0
        self.num_preempted = 0
        self._begun_tokens = 0
        """Of the prompts that begin with the next step."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, run: Run) -> None:
        """Queue a request."""
        self._waiting.append(run)

    # ── steps ─────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> Step | None:
        """What to compute now; None: nothing can be (no request, or no block)."""
        decodes = self._plan_decodes()
        chunks = self._plan_chunks(self._limits.batched_tokens - len(decodes))
        if not decodes and not chunks:
            return None
        context = sum(len(run.tokens) for run in decodes)
        parts = [(count, run.num_computed) for run, count in chunks]
        first_s = self._costs.step_s(parts, len(decodes), context, self._begun_tokens)
        self._begun_tokens = 0
        if chunks:
            launch_s = self._costs.launch_s(len(decodes) + sum(count for _, count in chunks))
        else:
            launch_s = self._costs.decode_launch_s(first_s)
        step = Step(
            chunks, decodes, 1, self._clock(), self._slowdown * first_s, self._slowdown * launch_s
        )
        if not chunks:
            self._take_together(step, context)
        return step

    def finish(self, step: Step) -> list[TokenOutput]:
        """The step has run: its outputs, in order."""
        self.busy_s += step.seconds(step.num_steps)
        outputs = [self._advance(run, step.num_steps) for run in step.decodes]
        for run, count in step.chunks:
            run.num_computed += count
            self._index(run)
            if run.num_computed == len(run.tokens):
                outputs.append(self._advance(run, 1))
        return outputs

    def _advance(self, run: Run, num_steps: int) -> TokenOutput:
        new = run.reply[:num_steps]
        del run.reply[:num_steps]
        run.tokens += new
        run.num_generated += len(new)
        run.num_computed = len(run.tokens) - 1
        if not run.reply:
            self._index(run)
            self._running.remove(run)
            self._hooks.on_finished(run)
            self._release(run)
        return TokenOutput(run.id, run.attempt, new, None if run.reply else "length")

    def _plan_decodes(self) -> list[Run]:
        """Every decoding request that has a block for its next token."""
        decodes: list[Run] = []
        for run in list(self._running):
            if not run.block_ids or not run.is_decoding:  # without blocks: put back for another
                continue
            while not self._grow(run, len(run.tokens)):
                youngest = self._running[-1]
                self._put_back(youngest)
                if youngest is run:
                    break
            else:
                decodes.append(run)
        return [run for run in decodes if run.block_ids]

    def _plan_chunks(self, budget: int) -> list[tuple[Run, int]]:
        chunks: list[tuple[Run, int]] = []
        for run in self._running:
            if not run.is_decoding and budget > 0:
                count = min(budget, len(run.tokens) - run.num_computed)
                chunks.append((run, count))
                budget -= count
        while self._waiting and budget > 0 and len(self._running) < self._limits.requests:
            run = self._waiting[0]
            if not self._admit(run):
                break
            self._waiting.popleft()
            self._running.append(run)
            count = min(budget, len(run.tokens) - run.num_computed)
            chunks.append((run, count))
            budget -= count
        return chunks

    def _take_together(self, step: Step, context: int) -> None:
        """Add the following steps, up to where the batch changes or blocks run out."""
        shortest = min(len(run.reply) for run in step.decodes)
        count = min(shortest, self._limits.steps_together)
        while count > 1 and not all(
            self._grow(run, len(run.tokens) + count - 1) for run in step.decodes
        ):
            count //= 2
        step.num_steps = count
        if count > 1:
            width = len(step.decodes)
            last_s = self._costs.step_s((), width, context + width * (count - 1)) * self._slowdown
            step.growth_s = (last_s - step.first_s) / (count - 1)

    # ── blocks ────────────────────────────────────────────────────────────────────────────────

    def _admit(self, run: Run) -> bool:
        """Take what the index has of the prompt, and blocks for all the rest."""
        size = self._mempool.block_size
        path = self._mempool.path(run.tokens, run.namespace)
        hits = self._mempool.match_path(path)[: (len(run.tokens) - 1) // size]
        self._mempool.pin(run.owner, hits)
        try:
            new = self._mempool.alloc_mem(-(-len(run.tokens) // size) - len(hits), run.owner)
        except OutOfBlocksError:
            self._mempool.unpin(run.owner)
            return False
        run.block_ids = hits + new
        run.num_computed = len(hits) * size
        run.num_indexed = len(hits)
        if not run.is_started:
            run.is_started = True
            self._begun_tokens += len(run.tokens)
            self._hooks.on_scheduled(run, run.num_computed)
        return True

    def _grow(self, run: Run, num_tokens: int) -> bool:
        """Have blocks for so many tokens."""
        missing = -(-num_tokens // self._mempool.block_size) - len(run.block_ids)
        if missing <= 0:
            return True
        try:
            run.block_ids += self._mempool.alloc_mem(missing, run.owner)
        except OutOfBlocksError:
            return False
        return True

    def _put_back(self, run: Run) -> None:
        self._index(run)
        self._running.remove(run)
        self._release(run)
        self._waiting.appendleft(run)
        self.num_preempted += 1

    def _index(self, run: Run) -> None:
        """What is computed becomes findable."""
        full = run.num_computed // self._mempool.block_size
        if full <= run.num_indexed:
            return
        tokens = run.tokens[: full * self._mempool.block_size]
        path = self._mempool.path(tokens, run.namespace)
        run.block_ids[:full] = self._mempool.insert_path(path, run.block_ids[:full], run.owner)
        run.num_indexed = full

    def _release(self, run: Run) -> None:
        self._mempool.free_all(run.owner)
        run.block_ids = []
        run.num_computed = run.num_indexed = 0
