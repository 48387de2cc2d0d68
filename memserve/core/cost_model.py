"""What a prefill, a decode step and a move of KV will cost, in seconds.

Pure arithmetic over a `Profile` (`profile.py`: what was calibrated; `builtin.py`: without
calibration; `cost_fit.py`: fitting). Used by `policy.py` to place requests and to decide between
fetching and recomputing, and by the simulator in place of engines. The paper: section 6.

A prompt is computed in steps of at most `chunk_tokens`, each of which costs

    max(floor, host + products and element-wise operators(n) + attention(n, c))

with n the tokens that the step computes and c those before them. All that depends on n alone is
tabulated when the model is built; the attention of all full chunks is summed in closed form. So a
call costs about a microsecond, however long the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from memserve.core.builtin import BUILT_IN, built_in
from memserve.core.profile import Floats, ModelShape, Profile, Tokens

__all__ = ["BUILT_IN", "CostModel", "ModelShape", "Profile", "built_in"]

_DECODE_ROWS = 1024
"""Decode batches up to this size are looked up, larger ones extrapolated."""
_OBSERVATION_WEIGHT = 0.05
_MOST_CORRECTION = 2.0


class CostModel:
    """Costs on one kind of instance. Only `observe` mutates."""

    def __init__(self, profile: Profile, tp: int | None = None) -> None:
        """`tp`: the degree to predict for; None: the one that the profile was calibrated at."""
        self.profile = profile
        self.tp = profile.tp if tp is None else tp
        self._factor = 1.0
        step, layers = profile.step, profile.shape.num_layers
        self._chunk = profile.chunk_tokens
        self._graph_tokens = profile.graph_sizes[-1] if profile.graph_sizes else 0
        attention = profile.attention_fit(*profile.shape.heads(self.tp))
        scale = layers * step.attention_scale
        self._attention = _Attention(
            cached_pair_s=attention.cached_pair_s * scale,
            new_pair_s=attention.new_pair_s * scale,
            token_s=attention.token_s * scale,
            read_s=attention.read_s * scale,
            fixed_s=attention.fixed_s * scale,
        )
        dense = self._operators_s(np.arange(self._chunk + 1, dtype=np.int64), 1)
        self._dense: list[float] = (dense + step.host_s).tolist()
        rows = np.arange(_DECODE_ROWS + 1, dtype=np.int64)
        scale = layers * step.decode_scale
        dense = self._operators_s(rows, rows) * step.decode_scale + step.decode_host_s
        dense += scale * attention.decode_fixed_s
        dense += rows * (step.decode_request_s + scale * attention.decode_request_s)
        self._decode: list[float] = dense.tolist()
        self._decode_context_s = scale * attention.decode_context_s

    @property
    def source(self) -> str:
        """Where the profile comes from, for status."""
        return self.profile.source

    @property
    def factor(self) -> float:
        """What observed prefills took, over what the profile says: within [0.5, 2]."""
        return self._factor

    def exec_s(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """The paper's exec(x, y): one prefill of `num_tokens`, of which `cached_tokens` are cached.

        At least the last token is computed. 0 for an empty prompt.
        """
        raise NotImplementedError

    def exec_many(self, num_tokens: int, cached_tokens: npt.ArrayLike) -> Floats:
        """`exec_s` of one prompt on many instances. Shape: that of `cached_tokens`."""
        raise NotImplementedError

    def step_s(
        self,
        chunks: Iterable[tuple[int, int]],
        num_decodes: int = 0,
        context_tokens: int = 0,
    ) -> float:
        """One engine step that computes chunks of prompts and one token each of running requests.

        `chunks`: tokens to compute, and tokens before them. `context_tokens`: summed over the
        `num_decodes` running requests.
        """
        raise NotImplementedError

    def decode_step_s(self, num_requests: int, context_tokens: int) -> float:
        """One decode step of a batch whose contexts sum up to `context_tokens`. 0 for no request."""
        raise NotImplementedError

    def transfer_s(self, size_bytes: int, link: str) -> float:
        """Moving KV over an idle link of this kind. 0 for no bytes.

        Raises: ValueError for a kind of link that the profile does not know.
        """
        raise NotImplementedError

    def swap_in_s(self, size_bytes: int) -> float:
        """Moving KV from DRAM to HBM: `transfer_s` over the link `dram`."""
        return self.transfer_s(size_bytes, "dram")

    def kv_bytes(self, num_tokens: int) -> int:
        """Size of the KV of that many tokens, over all ranks."""
        return num_tokens * self.profile.shape.kv_bytes_per_token

    def with_tp(self, tp: int) -> CostModel:
        """The prediction for another degree of tensor parallelism; starts with factor 1."""
        return CostModel(self.profile, tp)

    def observe(self, num_tokens: int, cached_tokens: int, seconds: float) -> None:
        """Mutates: one prefill really took `seconds` (computing alone, without its queue).

        Corrects all prefills and steps slowly and within bounds, by one common factor.
        """
        raise NotImplementedError

    def _operators_s(self, tokens: Tokens, sampled: int | Tokens) -> Floats:
        """A step's operators but attention, scaled. Shape: that of `tokens`.

        `sampled`: rows that go through the LM head.
        """
        raise NotImplementedError
