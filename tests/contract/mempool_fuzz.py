"""Random work for a MemPool, with or without vLLM's pool below it, and what must hold after it.

The contents of every block are known: the namespace and the tokens up to its end, put there by
whoever fills it. A look-up that finds a block with other contents has found somebody else's KV.

Run it by itself for a long soak: `python -m tests.contract.mempool_fuzz --steps 1000000`.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterable

from vllm.v1.core.block_pool import BlockPool

from memserve.changes import AnyChange, Cleared, Evicted, Inserted, KeyRange, Swapped
from memserve.core.tokens import TOKEN_BYTES
from memserve.errors import OutOfBlocksError
from memserve.types import BlockId, Medium, Namespace
from memserve.workers.mempool import MemPool
from memserve.workers.pools import PlainPool
from tests.contract.link_rig import FakeClock
from tests.contract.transfer_rig import EngineStandIn, make_pool

BLOCK_SIZE = 4
POOL_SIZES = (18, 30, 60)
MAX_TOKENS = 44
NAMESPACES = (Namespace(), Namespace("a"), Namespace(None, "adapter"))
TREE_OF_PROMPTS = 3
"""Distinct tokens: few, so that prompts meet, leave each other and meet again."""


class Follower:
    """What somebody knows of an index who hears of its changes."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, Namespace, bytes, Medium]] = {}
        """Key → key of the block before it, namespace, tokens, medium."""

    def apply(self, changes: Iterable[AnyChange]) -> None:
        for change in changes:
            match change:
                case Inserted():
                    self._insert(change)
                case Evicted():
                    for key in _keys(change.keys):
                        del self.blocks[key]
                case Swapped():
                    for key in _keys(change.keys):
                        self.blocks[key] = (*self.blocks[key][:3], change.medium)
                case Cleared():
                    self.blocks.clear()

    def _insert(self, change: Inserted) -> None:
        parent = change.parent
        assert parent is None or parent in self.blocks
        size = BLOCK_SIZE * TOKEN_BYTES
        for index in range(len(change.token_ids) // size):
            key = change.first_key + index
            assert key not in self.blocks
            tokens = change.token_ids[index * size : (index + 1) * size]
            self.blocks[key] = (parent, change.namespace, tokens, change.medium)
            parent = key


def _keys(ranges: list[KeyRange]) -> list[int]:
    return [key for first, num in ranges for key in range(first, first + num)]


class Fuzz:
    """One pool and its users. Everything follows from the seed."""

    def __init__(self, seed: int, *, with_engine: bool) -> None:
        self.random = random.Random(seed)
        self.clock = FakeClock()
        num_blocks = self.random.choice(POOL_SIZES)
        self.engine: EngineStandIn | None = None
        self.pool: BlockPool | None = None
        if with_engine:
            self.mempool, self.pool = make_pool(num_blocks, 2, BLOCK_SIZE, self.clock)
            self.engine = EngineStandIn(self.mempool, self.pool)
        else:
            self.mempool = MemPool(
                PlainPool(num_blocks),
                BLOCK_SIZE,
                reserve_blocks=2,
                clock=self.clock,
                records_changes=True,
            )
        self.follower = Follower()
        self.contents: dict[BlockId, tuple[Namespace, tuple[int, ...]]] = {}
        self.paused: list[tuple[str, list[int]]] = []
        self.spaces: dict[str, Namespace] = {}
        self.prompts: list[list[int]] = [[]]
        self.owners: list[str] = []
        self.done: Counter[str] = Counter()
        self.count = 0

    # ── what happens ──────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        """One random operation, and all checks."""
        operations: list[Callable[[], bool]] = [self.arrive, self.arrive, self.hit, self.drop]
        operations += [self.hit, self.drop, self.drop, self.lease, self.hold_tail]
        if self.engine is not None:
            operations += [self.start, self.start, self.generate, self.generate, self.generate]
            operations += [self.finish, self.finish, self.preempt, self.resume, self.resume]
        if self.random.random() < 0.1:
            operations = [self.delete, self.wait]
            if self.engine is not None:
                operations.append(self.lose_block)
        if self.random.random() < 0.01:
            operations = [self.reset if self.engine is None else self.reset_pool]
        operation = self.random.choice(operations)
        if operation():
            self.done[operation.__name__] += 1
        self.check()

    def arrive(self) -> bool:
        """KV comes from elsewhere: hits are pinned, the rest allocated, written and inserted."""
        tokens, space, owner = self.prompt(), self.random.choice(NAMESPACES), self.new_name()
        path = self.mempool.path(tokens, space)
        hits = self.mempool.match_path(path)
        self.mempool.pin(owner, hits)
        try:
            new = self.mempool.alloc_mem(path.num_blocks - len(hits), owner, lease_s=5.0)
        except OutOfBlocksError:
            self.mempool.unpin(owner)
            return False
        if self.random.random() < 0.2:  # the transfer failed
            self.mempool.free_all(owner)
            return True
        if self.random.random() < 0.3:  # meanwhile
            self.mempool.delete_path(path)
        if self.engine is not None and self.random.random() < 0.3:
            self.run(self.new_name(), tokens, space)
        self.write(space, tokens, [*hits, *new], len(hits))
        self.mempool.end_lease(owner)
        held = self.mempool.insert_path(path, [*hits, *new], owner)
        assert held == self.mempool.held(owner)
        assert self.mempool.match_path(path) == held
        self.owners.append(owner)
        return True

    def hit(self) -> bool:
        """Somebody pins what is there."""
        owner = self.new_name()
        found = self.mempool.match(self.prompt(), self.random.choice(NAMESPACES))
        self.mempool.pin(owner, found)
        self.owners.append(owner)
        return bool(found)

    def hold_tail(self) -> bool:
        """Only the end of a prompt is pinned: what is before it may be evicted first."""
        found = self.mempool.match(self.prompt(), self.random.choice(NAMESPACES))
        if not found:
            return False
        owner = self.new_name()
        self.mempool.pin(owner, found[-1:])
        self.owners.append(owner)
        return True

    def drop(self) -> bool:
        if not self.owners:
            return False
        owner = self.owners.pop(self.random.randrange(len(self.owners)))
        held = self.mempool.held(owner)
        if held and self.random.random() < 0.3:
            self.mempool.free_mem(
                owner, self.random.sample(held, self.random.randint(1, len(held)))
            )
        self.mempool.free_all(owner)
        return True

    def delete(self) -> bool:
        tokens, space = self.prompt(), self.random.choice(NAMESPACES)
        return self.mempool.delete(tokens[: self.random.randint(0, len(tokens))], space) > 0

    def lease(self) -> bool:
        """A peer gets blocks to write, and is late: they are kept until it is known to be quiet."""
        owner = self.new_name()
        try:
            blocks = self.mempool.alloc_mem(self.random.randint(1, 3), owner, lease_s=2.0)
        except OutOfBlocksError:
            return False
        self.clock.now_s += 2.0
        assert owner in self.mempool.expired()
        self.mempool.quarantine(owner)
        try:
            self.mempool.free_all(owner)
        except ValueError:
            pass
        else:
            raise AssertionError(f"{owner} was freed in quarantine")
        self.check()
        assert self.mempool.held(owner) == blocks
        self.mempool.end_lease(owner)
        self.mempool.free_all(owner)
        return True

    def wait(self) -> bool:
        self.clock.now_s += self.random.random()
        return True

    def reset(self) -> bool:
        return self.mempool.reset() > 0

    # ── the engine ────────────────────────────────────────────────────────────────────────────

    def start(self) -> bool:
        return self.run(self.new_name(), self.prompt(), self.random.choice(NAMESPACES))

    def run(self, request_id: str, tokens: list[int], space: Namespace) -> bool:
        assert self.engine is not None
        hits = self.engine.start(request_id, tokens, space) if tokens else None
        if hits is None:
            return False
        self.spaces[request_id] = space
        self.write(space, tokens, self.engine.running[request_id], hits)
        return True

    def generate(self) -> bool:
        request_id = self.running()
        if request_id is None or self.engine is None:
            return False
        before = len(self.engine.tokens(request_id)) // BLOCK_SIZE
        tokens = [self.random.randrange(TREE_OF_PROMPTS) for _ in range(self.random.randint(1, 6))]
        if not self.engine.generate(request_id, tokens):
            return False
        tokens = self.engine.tokens(request_id)
        self.write(self.spaces[request_id], tokens, self.engine.running[request_id], before)
        self.remember(tokens)
        return True

    def finish(self) -> bool:
        request_id = self.running()
        if request_id is None or self.engine is None:
            return False
        self.engine.finish(request_id)
        return True

    def preempt(self) -> bool:
        request_id = self.running()
        if request_id is None or self.engine is None:
            return False
        self.preempt_one(request_id)
        return True

    def preempt_one(self, request_id: str) -> None:
        assert self.engine is not None
        self.paused.append((request_id, self.engine.tokens(request_id)))
        self.engine.preempt(request_id)

    def resume(self) -> bool:
        if not self.paused:
            return False
        which = self.random.randrange(len(self.paused))
        request_id, tokens = self.paused[which]
        if not self.run(request_id, tokens, self.spaces[request_id]):
            return False
        del self.paused[which]
        return True

    def lose_block(self) -> bool:
        """The engine gives up a block of its own accord, wherever it is in its prompt."""
        assert self.pool is not None
        published = [b.block_id for b in self.pool.blocks if b.block_hash is not None and b.ref_cnt]
        if not published:
            return False
        self.pool.evict_blocks({self.random.choice(published)})
        return True

    def reset_pool(self) -> bool:
        """As for new weights: vLLM refuses while anything is in use."""
        assert self.pool is not None and self.engine is not None
        for request_id in [*self.engine.running]:
            self.preempt_one(request_id)
        is_reset = self.pool.reset_prefix_cache()
        assert is_reset == (self.mempool.holders() == [])
        for owner in self.owners:
            self.mempool.free_all(owner)
        self.owners.clear()
        return self.pool.reset_prefix_cache() and self.mempool.reset() == 0

    # ── what must hold ────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Every reference has its owner, index and pool agree, and no look-up finds other KV."""
        running = {} if self.engine is None else self.engine.running
        problems = self.mempool.check_integrity(running)
        assert problems == [], problems
        self.follower.apply(self.mempool.take_changes())
        described = Follower()
        described.apply(self.mempool.snapshot())
        assert self.follower.blocks == described.blocks
        counts = self.mempool.stats()
        assert counts.free + counts.historical + counts.active == counts.total
        for tokens in self.random.sample(self.prompts, min(4, len(self.prompts))):
            for space in NAMESPACES:
                found = self.mempool.match(tokens, space)
                if self.engine is not None:
                    assert found == self.engine.find(tokens, space)
                for index, block_id in enumerate(found):
                    expected = (space, tuple(tokens[: (index + 1) * BLOCK_SIZE]))
                    assert self.contents[block_id] == expected

    def end(self) -> None:
        """Everybody leaves: nothing is held any more."""
        if self.engine is not None:
            for request_id in [*self.engine.running]:
                self.engine.finish(request_id)
        for owner in self.owners:
            self.mempool.free_all(owner)
        self.check()
        assert self.mempool.holders() == []
        assert self.mempool.stats().active == 0
        self.mempool.reset()
        assert self.mempool.index.num_blocks == 0
        assert self.mempool.stats().free == self.mempool.num_blocks

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def new_name(self) -> str:
        self.count += 1
        return f"n{self.count}"

    def prompt(self) -> list[int]:
        """An earlier one, up to some point, and something new after it."""
        known = self.random.choice(self.prompts)
        tokens = known[: self.random.randint(0, len(known))]
        for _ in range(self.random.randint(0, 12)):
            tokens.append(self.random.randrange(TREE_OF_PROMPTS))
        self.remember(tokens)
        return tokens[:MAX_TOKENS]

    def remember(self, tokens: list[int]) -> None:
        self.prompts.append(tokens[:MAX_TOKENS])
        if len(self.prompts) > 30:
            self.prompts.pop(self.random.randrange(len(self.prompts)))

    def running(self) -> str | None:
        assert self.engine is not None
        return self.random.choice([*self.engine.running]) if self.engine.running else None

    def write(
        self, space: Namespace, tokens: list[int], block_ids: list[BlockId], first: int
    ) -> None:
        for index in range(first, len(tokens) // BLOCK_SIZE):
            end = (index + 1) * BLOCK_SIZE
            self.contents[block_ids[index]] = (space, tuple(tokens[:end]))


def main() -> None:
    """Soak both kinds of pool; any fault ends it with the seed that shows it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=100_000)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    done: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + max(1, options.steps // 1000)):
        fuzz = Fuzz(seed, with_engine=seed % 4 != 3)
        try:
            for _ in range(1000):
                fuzz.step()
            fuzz.end()
        except BaseException:
            print(f"seed {seed}, after {sum(fuzz.done.values())} operations")
            raise
        done += fuzz.done
    print(f"{sum(done.values())} operations took effect: {dict(done)}")


if __name__ == "__main__":
    main()
