"""The operators of a model, each alone, on the device at hand: for `calibrate.py`.

The kernels are the engine's own: vLLM's attention over paged KV in the block-first layout, its
norms, activation and rotary embedding, and the product that it dispatches to.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from memserve.core.profile import Gemm
from memserve.workers.paged_attention import PagedAttention

Clock = Callable[[], float]

_CACHE_BYTES = {"cuda": 256 << 20, "cpu": 128 << 20}
"""More than any cache holds: weights are taken in turns from so much, as in a whole model."""
_SAMPLE_S = {"cuda": 4e-3, "cpu": 20e-3}
_MOST_CALLS = 64
_RUNS = 5


class Stopwatch:
    """How long a call takes when many follow one another, as a step's kernels do."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device = device
        self._clock = clock

    def seconds(self, call: Callable[[], object]) -> float:
        """Per call, the least disturbed of several runs. On CUDA the calls are replayed as one
        graph, so that launching them is not in it."""
        call()
        once = self._run(call, 1)
        calls = max(1, min(_MOST_CALLS, round(_SAMPLE_S[self._device.type] / max(once, 1e-7))))
        run = self._replay(call, calls) if self._device.type == "cuda" else None
        times = [run() if run else self._run(call, calls) for _ in range(_RUNS)]
        return min(times) / calls

    def _run(self, call: Callable[[], object], calls: int) -> float:
        self._wait()
        begun = self._clock()
        for _ in range(calls):
            call()
        self._wait()
        return self._clock() - begun

    def _replay(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries make their workspaces before the capture
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()

        def run() -> float:
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            return float(begun.elapsed_time(ended)) / 1e3

        run()
        return run

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


class Operators:
    """Runs one rank's operators and says how many seconds each takes."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        head_dim: int,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._head_dim = head_dim
        self._watch = Stopwatch(device, clock)
        self._generator = torch.Generator(device).manual_seed(0)

    def gemm(self, gemm: Gemm, tokens: int, weights: list[Callable[..., torch.Tensor]]) -> float:
        """`[tokens, k]` times weights of `make_weights`."""
        x = self._random(tokens, gemm.k)
        count = 0

        def call() -> None:
            nonlocal count
            weights[count % len(weights)](x)
            count += 1

        return self._watch.seconds(call)

    def make_weights(self, gemm: Gemm) -> list[Callable[..., torch.Tensor]]:
        """Several layers' products `x → x·W`, together larger than the caches."""
        size = gemm.n * gemm.k * self._dtype.itemsize
        count = max(1, -(-_CACHE_BYTES[self._device.type] // size))
        return [self._make_weight(gemm) for _ in range(min(count, _MOST_CALLS))]

    def _make_weight(self, gemm: Gemm) -> Callable[..., torch.Tensor]:
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(self._random(gemm.n, gemm.k), requires_grad=False)
        if self._device.type == "cpu":
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
            return lambda x: layer.cpu_linear(x, layer.weight, None)
        return lambda x: torch.nn.functional.linear(x, layer.weight)

    def attention(
        self, heads: tuple[int, int], new_tokens: int, cached_tokens: int, num_requests: int = 1
    ) -> float:
        """One layer's, causal, over paged KV of which nothing has to be written."""
        run = PagedAttention(
            self._device,
            self._dtype,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=self._head_dim,
            new_tokens=new_tokens,
            cached_tokens=cached_tokens,
            num_requests=num_requests,
        )
        return self._watch.seconds(run)

    def norm(self, tokens: int, hidden: int) -> float:
        """The residual's addition and the norm after it, in place."""
        x, residual = self._random(tokens, hidden), self._random(tokens, hidden)
        weight = self._random(hidden)
        return self._watch.seconds(lambda: ops.fused_add_rms_norm(x, residual, weight, 1e-5))

    def activation(self, tokens: int, width: int) -> float:
        """The gated activation of `[tokens, width]`."""
        x = self._random(tokens, width)
        out = torch.empty(tokens, width // 2, dtype=self._dtype, device=self._device)
        return self._watch.seconds(lambda: torch.ops._C.silu_and_mul(out, x))

    def rope(self, tokens: int, heads: tuple[int, int]) -> float:
        """The rotary embedding of queries and keys, in place."""
        query, key = (self._random(tokens, count * self._head_dim) for count in heads)
        positions = torch.arange(tokens, device=self._device)
        angles = self._random(tokens, self._head_dim)
        return self._watch.seconds(
            lambda: ops.rotary_embedding(positions, query, key, self._head_dim, angles, True)
        )

    def copy(self, size_bytes: int) -> float:
        """Between pinned host memory and the device; on CPU, between two places in memory."""
        is_cuda = self._device.type == "cuda"
        source = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        target = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
        return self._watch.seconds(lambda: target.copy_(source, non_blocking=is_cuda))

    def _random(self, *shape: int) -> torch.Tensor:
        made = torch.rand(*shape, generator=self._generator, device=self._device)
        return ((made - 0.5) * 0.1).to(self._dtype)
