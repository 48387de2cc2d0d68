"""What a prefill, a decode step and a move of KV will cost, in seconds.

Pure arithmetic over a `Profile` (`profile.py`: what was calibrated; `builtin.py`: without
calibration; `cost_fit.py`: fitting). Used by `policy.py` to place requests and to decide between
fetching and recomputing, and by the simulator in place of engines. The paper: section 6.

A prompt is computed in steps of at most `chunk_tokens`, each of which costs

    max(floor, host + products(n) + element-wise operators(n) + all-reduces(n) + attention(n, c))

with n the tokens that the step computes and c those before them. The host launches a step while
the device computes the one before it, so the last step's floor counts only if launching all of them
takes longer than computing them. All that depends on n alone is tabulated when the model is built;
the attention of all full chunks is summed in closed form. So a call costs about a microsecond,
however long the prompt.

Two factors, which observed prefills correct, stand for what has changed since the calibration: one
for the device's work, one for the host's (the floors, and what surrounds the steps), whose speed is
another one on another day.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from memserve.core.builtin import BUILT_IN, built_in
from memserve.core.profile import Floats, ModelShape, Profile, Tokens, step_parts

__all__ = ["BUILT_IN", "CostModel", "ModelShape", "Profile", "built_in"]

DECODE_LAUNCH = 0.5
"""Of a decode step's time on a GPU, what launching it keeps the host."""
_DECODE_ROWS = 1024
"""Decode batches up to this size are looked up; larger ones cost in proportion."""
_OBSERVATION_WEIGHT = 0.1
_MOST_CORRECTION = 2.0
_MOST_SURPRISE = 4.0
"""One observation counts at most this far from what was expected."""


class CostModel:
    """Costs on one kind of instance. Only `observe` mutates."""

    def __init__(self, profile: Profile, tp: int | None = None) -> None:
        """`tp`: the degree to predict for; None: the one that the profile was calibrated at."""
        self.profile = profile
        self.tp = profile.tp if tp is None else tp
        if self.tp < 1:
            raise ValueError(f"a tensor-parallel degree of {self.tp}; allowed: 1 or more")
        self._device_factor = self._host_factor = 1.0
        step, layers = profile.step_fit(self.tp), profile.shape.num_layers
        self._chunk = profile.chunk_tokens
        self._graph_tokens = profile.graph_sizes[-1] if profile.graph_sizes else 0
        self._request_s, self._prompt_token_s = step.request_s, step.prompt_token_s
        self._long_floor_s, self._graph_floor_s = profile.floor_s(self.tp), step.graph_floor_s
        attention = profile.attention_fit(*profile.shape.heads(self.tp))
        scale = layers * step.attention_scale
        self._cached_pair_s = attention.cached_pair_s * scale
        self._new_pair_s = attention.new_pair_s * scale
        self._token_s = attention.token_s * scale
        self._read_s = attention.read_s * scale
        self._fixed_s = attention.fixed_s * scale
        tokens = np.arange(self._chunk + 1, dtype=np.int64)
        parts = step_parts(profile, self.tp, tokens)
        work = step.gemm_scale * parts.gemms_s + step.linear_scale * parts.linear_s
        self._dense: list[float] = (step.host_s + work + parts.reduce_s).tolist()
        self._dense_array = np.array(self._dense)
        scale = layers * step.decode_scale
        rows = np.arange(_DECODE_ROWS + 1, dtype=np.int64)
        parts = step_parts(profile, self.tp, rows, rows)
        self._decode_request_s = step.decode_request_s + scale * attention.decode_request_s
        self._decode_context_s = scale * attention.decode_context_s
        self._decode: list[float] = (
            step.decode_host_s
            + step.decode_scale * (parts.gemms_s + parts.linear_s)
            + parts.reduce_s
            + scale * attention.decode_fixed_s
            + rows * self._decode_request_s
        ).tolist()

    @property
    def source(self) -> str:
        """Where the profile comes from, for status."""
        return self.profile.source

    @property
    def device_factor(self) -> float:
        """What the device's part of observed prefills took, over what the profile says: within
        [0.5, 2]."""
        return self._device_factor

    @property
    def host_factor(self) -> float:
        """The same of the host's part."""
        return self._host_factor

    # Prefill.

    def exec_s(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """The paper's exec(x, y): one prefill of `num_tokens`, of which `cached_tokens` are cached.

        At least the last token is computed. 0 for an empty prompt.
        """
        if num_tokens <= 0:
            return 0.0
        return max(self._steps_s(num_tokens, cached_tokens)) + self._taking_s(num_tokens)

    def exec_many(self, num_tokens: int, cached_tokens: npt.ArrayLike) -> Floats:
        """`exec_s` of one prompt on many instances. Shape: that of `cached_tokens`."""
        cached = np.asarray(cached_tokens, dtype=np.int64)
        if num_tokens <= 0:
            return np.zeros(cached.shape)
        chunk = self._chunk
        before = np.clip(cached, 0, num_tokens - 1)
        full = (num_tokens - 1 - before) // chunk
        start = before + full * chunk
        last = num_tokens - start
        floors = np.where(last <= self._graph_tokens, self._graph_floor_s, self._long_floor_s)
        floors = self._host_factor * floors + full * self._floor_s(chunk)
        seconds = self._device_factor * (self._dense_array[last] + self._attention_s(last, start))
        first = self._work_s(chunk, before)
        if (full > 0).any() and first.min() < self._floor_s(chunk):
            costs = [self.exec_s(num_tokens, tokens) for tokens in cached.ravel().tolist()]
            return np.array(costs).reshape(cached.shape)
        seconds = seconds + full * first + self._growth_s() * (full * (full - 1) // 2)
        total: Floats = np.maximum(seconds, floors) + self._taking_s(num_tokens)
        return total

    def _steps_s(self, num_tokens: int, cached_tokens: int) -> tuple[float, float]:
        """A prefill's steps, of which it takes the longer: computing them, and launching them."""
        before = min(max(cached_tokens, 0), num_tokens - 1)
        last = num_tokens - before
        work_s = floor_s = 0.0
        if last > self._chunk:
            full = (last - 1) // self._chunk
            work_s = self._full_chunks_s(full, before)
            floor_s = full * self._floor_s(self._chunk)
            before += full * self._chunk
            last -= full * self._chunk
        return work_s + self._work_s(last, before), floor_s + self._floor_s(last)

    def _taking_s(self, num_tokens: int) -> float:
        """What a prompt costs besides its steps."""
        return self._host_factor * (self._request_s + num_tokens * self._prompt_token_s)

    def _chunk_s(self, tokens: int, before: int) -> float:
        """One step that computes nothing else."""
        return max(self._work_s(tokens, before), self._floor_s(tokens))

    def _full_chunks_s(self, count: int, before: int) -> float:
        """The first `count` chunks: each attends to `chunk_tokens` more than the one before it."""
        chunk = self._chunk
        first = self._work_s(chunk, before)
        if first < self._floor_s(chunk):
            return sum(self._chunk_s(chunk, before + index * chunk) for index in range(count))
        return count * first + self._growth_s() * (count * (count - 1) // 2)

    def _growth_s(self) -> float:
        """By how much a full chunk takes longer than the one before it."""
        chunk = self._chunk
        growth_s: float = (chunk * self._cached_pair_s + self._read_s) * chunk
        return self._device_factor * growth_s

    @overload
    def _work_s(self, tokens: int, before: int) -> float: ...

    @overload
    def _work_s(self, tokens: int, before: Tokens) -> Floats: ...

    def _work_s(self, tokens: int, before: Any) -> Any:
        """What the device does in a step that computes nothing else."""
        return self._device_factor * (self._dense[tokens] + self._attention_s(tokens, before))

    @overload
    def _attention_s(self, tokens: int, before: int) -> float: ...

    @overload
    def _attention_s(self, tokens: int | Tokens, before: Tokens) -> Floats: ...

    def _attention_s(self, tokens: Any, before: Any) -> Any:
        pairs = self._cached_pair_s * before + self._new_pair_s * tokens + self._token_s
        return tokens * pairs + self._read_s * before + self._fixed_s

    def _floor_s(self, tokens: int) -> float:
        floor_s = self._graph_floor_s if tokens <= self._graph_tokens else self._long_floor_s
        return self._host_factor * floor_s

    # Steps.

    def step_s(
        self,
        chunks: Sequence[tuple[int, int]],
        num_decodes: int = 0,
        context_tokens: int = 0,
        begun_tokens: int = 0,
    ) -> float:
        """One engine step that computes chunks of prompts and one token each of running requests.

        `chunks`: tokens to compute, and tokens before them. `context_tokens`: summed over the
        `num_decodes` running requests. `begun_tokens`: of all the prompts that begin with this
        step. What surrounds the steps of a prefill is paid once for all that begin together. A
        chunk of one token is computed as a decode: with such alone it is a decode step. A step has
        at most `chunk_tokens` tokens in all: of more, only the attention grows.
        """
        longer = [chunk for chunk in chunks if chunk[0] > 1]
        num_decodes += len(chunks) - len(longer)
        context_tokens += sum(before + 1 for new, before in chunks if new == 1)
        taking_s = self._host_factor * begun_tokens * self._prompt_token_s
        if not longer:
            return self.decode_step_s(num_decodes, context_tokens) + taking_s
        if begun_tokens:
            taking_s += self._host_factor * self._request_s
        tokens = num_decodes + sum(new for new, _ in longer)
        seconds = self._dense[min(tokens, self._chunk)]
        seconds += sum(self._attention_s(new, before) for new, before in longer)
        seconds += num_decodes * self._decode_request_s + context_tokens * self._decode_context_s
        return max(self._device_factor * seconds, self._floor_s(tokens)) + taking_s

    def launch_s(self, num_tokens: int) -> float:
        """How long launching a step of prompts keeps the host, which serves commands while the rest
        of it is computed. Without end on a CPU: it computes what it launches.
        """
        if self.profile.is_on_cpu:
            return math.inf
        return max(self._floor_s(num_tokens), self._host_factor * self._graph_floor_s)

    def decode_launch_s(self, step_s: float) -> float:
        """As `launch_s`, of a decode step that takes so long in all."""
        return math.inf if self.profile.is_on_cpu else DECODE_LAUNCH * step_s

    def decode_step_s(self, num_requests: int, context_tokens: int) -> float:
        """One decode step of a batch whose contexts sum up to `context_tokens`.

        0 for no request.
        """
        if num_requests <= 0:
            return 0.0
        if num_requests > _DECODE_ROWS:
            dense = self._decode[_DECODE_ROWS] * num_requests / _DECODE_ROWS
        else:
            dense = self._decode[num_requests]
        return dense + context_tokens * self._decode_context_s

    # Moving KV.

    def transfer_s(self, size_bytes: int, link: str) -> float:
        """Moving KV over an idle link of this kind. 0 for no bytes.

        Raises: ValueError for a kind of link that the profile does not know.
        """
        fit = self.profile.links.get(link)
        if fit is None:
            known = ", ".join(sorted(self.profile.links))
            raise ValueError(f"no costs are known of the link {link!r}; known: {known}")
        return fit.seconds(size_bytes) if size_bytes > 0 else 0.0

    def swap_in_s(self, size_bytes: int) -> float:
        """Moving KV from DRAM to HBM: `transfer_s` over the link `dram`.

        `size_bytes`: of all ranks. Each moves its share over a link of its own, at the same time.
        """
        return self.transfer_s(-(-size_bytes // self.tp), "dram")

    def kv_bytes(self, num_tokens: int) -> int:
        """Size of the KV of that many tokens, over all ranks."""
        return num_tokens * self.profile.shape.kv_bytes_per_token

    # Other degrees, and what was observed.

    def with_tp(self, tp: int) -> CostModel:
        """The prediction for another degree of tensor parallelism; starts with factors of 1.

        Raises: ValueError for less than one rank.
        """
        return CostModel(self.profile, tp)

    def observe(self, num_tokens: int, cached_tokens: int, seconds: float) -> None:
        """Mutates: one prefill really took `seconds` (computing alone, without its queue).

        Corrects `exec_s` and the steps with prompts slowly and within bounds: each factor by as
        much of the surprise as its part had of the expectation. Nothing is learnt from an empty
        prompt or a time of 0.
        """
        if num_tokens <= 0 or seconds <= 0:
            return
        work_s, floor_s = self._steps_s(num_tokens, cached_tokens)
        expected = max(work_s, floor_s) + self._taking_s(num_tokens)
        if expected <= 0:
            return
        surprise = min(max(seconds / expected, 1 / _MOST_SURPRISE), _MOST_SURPRISE)
        correction = surprise**_OBSERVATION_WEIGHT
        device_share = work_s / expected if work_s >= floor_s else 0.0
        self._device_factor = _bounded(self._device_factor * correction**device_share)
        self._host_factor = _bounded(self._host_factor * correction ** (1 - device_share))


def _bounded(factor: float) -> float:
    return min(max(factor, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
