"""A real engine, run for its times: one prefill, one batch of decodes at a time.

For `calibrate.py` and `bench/fig14_cost_model.py`. The engine is built and stepped as a worker's is
(`compat.py`), with the connector in place, but there is no loop, no peer and no pool of our own.

What a prefill takes is the time that an instance with nothing else to do needs for it: from taking
the request until its token. That is what the scheduler adds up and what it observes, and the most
that one can take among others. On a GPU a short one takes what launching takes, which goes by the
core that launches: `pin` chooses it.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.request import Request

from memserve.core.cost_samples import DecodeSample, PrefillSample
from memserve.core.profile import ModelShape
from memserve.errors import StartError
from memserve.types import BlockId, Namespace, TransferStyle
from memserve.workers.compat import Engine, StepLimits, make_config, step_limits
from memserve.workers.cores import timed_host_work
from memserve.workers.rank_messages import StepOrders

_DEADLINE_S = 120.0
"""For one measurement."""
_MOST_PRIMINGS = 3
_WARM_UP = ((100, 0), (700, 0), (1500, 900))
_MOST_WARM_UPS = 12
_STEADY = 0.03
"""Two passes of the warm-up that differ by less are steady."""


class _Hooks:
    """The connector's host: notes how much of each request was cached. The processes of ranks get
    copies, which notice nothing."""

    def __init__(self) -> None:
        self.cached_tokens: dict[str, int] = {}

    def kv_cache_memory(self) -> AbstractContextManager[None] | None:
        return None

    def on_kv_caches(self, kv_caches: dict[str, torch.Tensor], block_size: int) -> None:
        pass

    def on_scheduled(self, request_id: str, cached_tokens: int) -> None:
        self.cached_tokens[request_id] = cached_tokens

    def on_step(self, num_scheduled: Mapping[str, int]) -> None:
        pass

    def on_step_begins(self, orders: StepOrders) -> None:
        pass

    def on_step_ended(self, orders: StepOrders) -> None:
        pass

    def on_layer(self, layer_name: str) -> None:
        pass

    def on_finished(self, request: Request, block_ids: list[int]) -> None:
        pass


class EngineProbe:
    """An engine that serves nobody. `start` it, and close it."""

    def __init__(
        self,
        model: str,
        engine: Mapping[str, Any],
        kv_bytes: int | None,
        layout: str = "auto",
        tp: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Only the configuration. Arguments as in `compat.make_config`.

        `clock`: what prefills and steps are timed by; deadlines go by real time. Raises: what
        `make_config` raises; StartError for a model whose configuration lacks sizes.
        """
        self.clock = clock
        self._hooks = _Hooks()
        self._config = make_config(
            model,
            engine,
            engine_id="probe",
            kv_bytes=kv_bytes,
            layout=layout,
            host=self._hooks,
            style=TransferStyle.REQUEST,
            tp=tp,
        )
        text: Any = self._config.model_config.hf_text_config
        self.dtype: torch.dtype = self._config.model_config.dtype
        try:
            self.shape = ModelShape.from_config(text.to_dict(), self.dtype.itemsize)
        except ValueError as error:
            raise StartError(str(error)) from error
        self._random = random.Random(0)
        self._num_requests = 0
        self._base: list[int] = []
        self._held: list[BlockId] = []
        """Blocks of the base prompt that cannot be evicted."""
        self._started: Engine | None = None

    def start(self) -> None:
        """Load the model, if that was not done. Raises: what `compat.Engine` raises."""
        if self._started is not None:
            return
        self._started = Engine(self._config)
        self._base = self.tokens(self.longest)

    def pin(self, cores: Sequence[int]) -> None:
        """Keep what launches the kernels on the first of these cores: this thread, or the process
        of each rank on a core of its own, and this thread on the next one."""
        has_ranks = self._config.parallel_config.world_size > 1
        ranks = multiprocessing.active_children() if has_ranks else []
        ranks.sort(key=lambda process: process.name)
        launching = [process.pid for process in ranks if process.pid is not None]
        for pid, core in zip([*launching, 0], cores, strict=False):
            os.sched_setaffinity(pid, {core})

    def warm_up(self) -> None:
        """Until short prefills take the same time again. Then the longest prompt is cached, and
        stays so where another one has room beside it."""
        before = float("inf")
        points = [point for point in _WARM_UP if point[0] <= self.longest]
        for _ in range(_MOST_WARM_UPS if points else 0):
            total = sum(self.prefill(*point).seconds for point in points)
            if abs(total / before - 1) < _STEADY:
                break
            before = total
        self.hold_base()

    def hold_base(self) -> None:
        """Compute the longest prompt and keep its blocks, unless they leave too little room."""
        if self._held or self.capacity_tokens < 2 * self.longest + self._engine.block_size:
            return
        self._run(self._base)
        pool = self._engine.block_pool
        for block_hash in self._engine.hash_request(self._base, Namespace()).block_hashes:
            if (found := pool.get_cached_block(block_hash, [0])) is None:
                break
            pool.touch(found)
            self._held += [BlockId(block.block_id) for block in found]

    @property
    def held_tokens(self) -> int:
        """Of the longest prompt, that cannot be evicted."""
        return len(self._held) * self._engine.block_size

    def release_base(self) -> None:
        """Let its blocks be evicted."""
        pool = self._engine.block_pool
        pool.free_blocks([pool.blocks[block_id] for block_id in reversed(self._held)])
        self._held.clear()

    @property
    def _engine(self) -> Engine:
        assert self._started is not None, "start the probe first"
        return self._started

    @property
    def is_on_gpu(self) -> bool:
        return bool(current_platform.is_cuda())

    @property
    def limits(self) -> StepLimits:
        """Final once it is started."""
        return step_limits(self._config)

    @property
    def max_model_len(self) -> int:
        length: int = self._config.model_config.max_model_len
        return length

    def close(self) -> None:
        """Give the engine's memory back, if it was started."""
        if self._started is not None:
            self._started.shutdown()
            self._started = None

    @property
    def longest(self) -> int:
        """The longest prompt that one token can follow, and that fits into the KV cache."""
        blocks: int = self._engine.block_pool.num_gpu_blocks - 1  # vLLM keeps one for itself
        return min(self._engine.max_model_len - 1, (blocks - 1) * self._engine.block_size)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return int(self._engine.block_pool.num_gpu_blocks - 2) * self._engine.block_size

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of what was measured."""
        return not self._engine.is_busy

    def tokens(self, count: int) -> list[int]:
        """Random token ids: no two prompts made of them share a block."""
        return [self._random.randrange(self.shape.vocab) for _ in range(count)]

    def prefill(self, num_tokens: int, cached_tokens: int) -> PrefillSample:
        """One prefill, alone, `cached_tokens` of it (in whole blocks) made cached beforehand.

        Raises: StartError if the engine does not keep them, or does not answer in time.
        """
        size = self._engine.block_size
        wanted = min(cached_tokens, num_tokens - 1) // size * size
        for _ in range(_MOST_PRIMINGS):
            prompt = self._base[:wanted] + self.tokens(num_tokens - wanted)
            host_s = timed_host_work()
            seconds, found = self._run(prompt)
            if found == wanted:
                return PrefillSample(num_tokens, wanted, seconds, host_s)
            self._run(self._base[:wanted] + self.tokens(1))
        raise StartError(f"of {wanted} tokens the engine kept {found}: give it more KV memory")

    def decode(self, num_requests: int, context_tokens: int, steps: int) -> DecodeSample:
        """The mean of `steps` decode steps of equal requests, of `context_tokens` each. The base
        prompt is held no longer."""
        self.release_base()
        generated = self.decode_tokens(num_requests, context_tokens, steps)
        names = [self._add(self.tokens(context_tokens), generated) for _ in range(num_requests)]
        deadline = time.perf_counter() + _DEADLINE_S
        waiting = set(names)
        while waiting:  # until every prompt is computed
            waiting -= {output.request_id for output in self._outputs(deadline)}
        self._outputs(deadline)
        begun = self.clock()
        for _ in range(steps):
            if len(self._outputs(deadline)) != num_requests:
                raise StartError(f"the engine does not decode {num_requests} requests at once")
        seconds = (self.clock() - begun) / steps
        for name in names:
            self._engine.abort(name)
        self._drain(deadline)
        return DecodeSample(num_requests, num_requests * (context_tokens + steps // 2), seconds)

    def decode_tokens(self, num_requests: int, context_tokens: int, steps: int) -> int:
        """What each request of `decode` may generate: more than is timed, for the first ones begin
        while the prompts of the others are computed."""
        return steps + 8 + num_requests * context_tokens // self.limits.chunk_tokens

    def _run(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds until the only token, and how much of the prompt was cached."""
        deadline = time.perf_counter() + _DEADLINE_S
        begun = self.clock()
        name = self._add(prompt, 1)
        while not any(output.finished for output in self._outputs(deadline)):
            pass
        seconds = self.clock() - begun
        self._drain(deadline)
        return seconds, self._hooks.cached_tokens.pop(name)

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._num_requests += 1
        name = f"probe-{self._num_requests}"
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._engine.add(request)
        return name

    def _outputs(self, deadline: float) -> Sequence[Any]:
        """The next outputs; steps until there are some."""
        while time.perf_counter() < deadline:
            outputs: EngineCoreOutputs | None = self._engine.step()[0]
            if outputs is not None and outputs.outputs:
                found: Sequence[Any] = outputs.outputs
                return found
        raise StartError(f"the engine gave no output within {_DEADLINE_S:.0f} s")

    def _drain(self, deadline: float) -> None:
        while self._engine.is_busy and time.perf_counter() < deadline:
            self._engine.step()
