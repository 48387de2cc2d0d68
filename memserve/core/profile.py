"""What calibration knows of one model on one device: shapes, operator fits, constants, links.

Plain data, serialisable as JSON. `cost_fit.py` makes a `Profile` from measurements, `builtin.py`
one from a device's data sheet, `cost_model.py` computes with it. The paper: section 6.

All sizes are those of one rank. An operator fit that was measured at one degree of tensor
parallelism says what it costs at another (`GemmFit.resized`, `AttentionFit.resized`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Tokens: TypeAlias = npt.NDArray[np.int64]

FORMAT = 1
"""Raised whenever the meaning of a field changes: older profiles are not read."""

CALIBRATED = "calibrated"
"""The source of a profile that was measured."""

LM_HEAD = "lm_head"
"""The one GEMM that runs once per step, over the rows that are sampled from."""


class Gemm(msgspec.Struct, frozen=True):
    """A matrix product of `[tokens, k]` with weights `[k, n]`, as one rank runs it."""

    name: str
    n: int
    k: int


class ModelShape(msgspec.Struct, frozen=True):
    """A decoder-only transformer with a gated MLP, whole (not one rank's shard)."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP; of a mixture of experts, all the experts that one token visits."""
    vocab: int
    dtype_bytes: int = 2

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype_bytes: int | None = None) -> ModelShape:
        """From the contents of a Hugging Face `config.json`.

        `dtype_bytes`: as served; None: by the configuration. Raises: ValueError, naming the keys
        that are missing.
        """
        text: Mapping[str, Any] = config.get("text_config") or config
        needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        missing = [key for key in needed if not text.get(key)]
        experts = int(text.get("num_experts_per_tok") or 1)
        widths = ("moe_intermediate_size", "intermediate_size")
        width = next((text[key] for key in widths[experts == 1 :] if text.get(key)), None)
        if missing or not width:
            absent = [*missing, *([] if width else ["intermediate_size"])]
            raise ValueError(f"the model's configuration lacks {', '.join(absent)}")
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
        if wrong := [key for key in needed if int(text[key]) < 1]:
            raise ValueError(f"{wrong[0]} = {text[wrong[0]]}")
        return cls(
            num_layers=int(text["num_hidden_layers"]),
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate=int(width) * experts,
            vocab=int(text["vocab_size"]),
            dtype_bytes=dtype_bytes or (4 if dtype.endswith("float32") else 2),
        )

    def heads(self, tp: int) -> tuple[int, int]:
        """Query and KV heads of one rank; KV heads are repeated if there are fewer than ranks."""
        return _share(self.num_heads, tp), _share(self.num_kv_heads, tp)

    def degrees(self) -> list[int]:
        """Ranks among which its heads can be divided, KV heads too or each for several ranks."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        divisors = (n for n in range(1, heads + 1) if heads % n == 0)
        return [n for n in divisors if kv_heads % n == 0 or n % kv_heads == 0]

    def layer_gemms(self, tp: int) -> tuple[Gemm, ...]:
        """The products of one layer on one rank, in the order in which they run."""
        heads, kv_heads = self.heads(tp)
        width = _share(self.intermediate, tp)
        return (
            Gemm("qkv", (heads + 2 * kv_heads) * self.head_dim, self.hidden),
            Gemm("o", self.hidden, heads * self.head_dim),
            Gemm("gate_up", 2 * width, self.hidden),
            Gemm("down", self.hidden, width),
        )

    def head_gemm(self, tp: int) -> Gemm:
        """The product that gives the logits, once per step."""
        return Gemm(LM_HEAD, _share(self.vocab, tp), self.hidden)

    def elementwise(self, tp: int) -> dict[str, int]:
        """What a layer does besides products and attention: name → elements per token."""
        heads, kv_heads = self.heads(tp)
        return {
            "norm": 2 * self.hidden,
            "rope": (heads + 2 * kv_heads) * self.head_dim,
            "activation": 2 * _share(self.intermediate, tp),
        }

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers and ranks."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


class GemmFit(msgspec.Struct, frozen=True):
    """Seconds of one product by the number of tokens: waves of tiles, or reading the weights.

    `max((η−1)·full_wave_s + last_wave_s, read_s + tokens·read_token_s)`, η = ⌈tiles / num_sms⌉.
    """

    gemm: Gemm
    tile_m: int
    tile_n: int
    full_wave_s: float
    last_wave_s: float
    read_s: float
    read_token_s: float
    correction: tuple[tuple[int, float], ...] = ()
    """Tokens, rising → measured over the formula: libraries choose other kernels at other sizes."""

    def seconds(self, tokens: Tokens, num_sms: int) -> Floats:
        """Shape: that of `tokens`."""
        tiles = -(-tokens // self.tile_m) * -(-self.gemm.n // self.tile_n)
        waves = -(-tiles // num_sms)
        compute = (waves - 1) * self.full_wave_s + self.last_wave_s
        seconds = np.maximum(compute, self.read_s + tokens * self.read_token_s)
        if self.correction:
            known, ratios = np.array(self.correction).T
            seconds = seconds * np.interp(np.log2(np.maximum(tokens, 1)), np.log2(known), ratios)
        return np.where(tokens > 0, seconds, 0.0)

    def resized(self, gemm: Gemm) -> GemmFit:
        """The same kernel on another shard: a tile's time goes with `k`, the number of tiles with
        `n`, reading the weights with their size."""
        depth = gemm.k / self.gemm.k
        area = depth * gemm.n / self.gemm.n
        return msgspec.structs.replace(
            self,
            gemm=gemm,
            full_wave_s=self.full_wave_s * depth,
            last_wave_s=self.last_wave_s * depth,
            read_s=self.read_s * area,
            read_token_s=self.read_token_s * (gemm.n + gemm.k) / (self.gemm.n + self.gemm.k),
        )


class AttentionFit(msgspec.Struct, frozen=True):
    """Seconds of one layer's attention, `n` new tokens after `c` cached ones, on one rank.

    Prefill: `cached_pair_s·n·c + new_pair_s·n² + token_s·n + read_s·c + fixed_s`. That is the
    paper's `a·x²y + b·x² + c·x + d` with x = n and y = c/n, and the reads of the cached KV.
    Decode: `decode_fixed_s + requests·decode_request_s + context·decode_context_s`.
    """

    num_heads: int
    num_kv_heads: int
    cached_pair_s: float
    new_pair_s: float
    token_s: float
    read_s: float
    fixed_s: float
    decode_fixed_s: float
    decode_request_s: float
    decode_context_s: float

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """One request's."""
        pairs = self.cached_pair_s * cached_tokens + self.new_pair_s * new_tokens + self.token_s
        return new_tokens * pairs + self.read_s * cached_tokens + self.fixed_s

    def resized(self, num_heads: int, num_kv_heads: int) -> AttentionFit:
        """With other heads: computing goes with the query heads, reading with the KV heads."""
        queries = num_heads / self.num_heads
        reads = num_kv_heads / self.num_kv_heads
        return msgspec.structs.replace(
            self,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            cached_pair_s=self.cached_pair_s * queries,
            new_pair_s=self.new_pair_s * queries,
            token_s=self.token_s * queries,
            read_s=self.read_s * reads,
            decode_request_s=self.decode_request_s * queries,
            decode_context_s=self.decode_context_s * reads,
        )


class LinearFit(msgspec.Struct, frozen=True):
    """Seconds of a memory-bound operator: `fixed_s + elements·element_s`."""

    fixed_s: float
    element_s: float


class LinkFit(msgspec.Struct, frozen=True):
    """Seconds to move bytes: `fixed_s + size / bytes_per_s`."""

    fixed_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        return self.fixed_s + size_bytes / self.bytes_per_s


class ReduceFit(msgspec.Struct, frozen=True):
    """Seconds of one all-reduce over the ranks of an instance, by the size of the message.

    `fixed_s + sent / bytes_per_s`, where of a message of s bytes each of n ranks sends 2·(n−1)/n·s,
    times a correction: libraries choose other ways for other sizes.
    """

    fixed_s: float
    bytes_per_s: float
    launch_s: float = 0.0
    """What launching one takes on the host, outside of graphs."""
    correction: tuple[tuple[int, float], ...] = ()
    """Bytes of the message, rising → measured over the formula."""
    source: str = "not known"
    """Where it comes from, for people."""

    def seconds(self, ranks: int, size_bytes: Floats) -> Floats:
        """Shape: that of `size_bytes`."""
        seconds = self.fixed_s + 2 * (ranks - 1) / ranks * size_bytes / self.bytes_per_s
        if self.correction:
            known, ratios = np.array(self.correction).T
            seconds = seconds * np.interp(np.log2(size_bytes), np.log2(known), ratios)
        return seconds


class StepFit(msgspec.Struct, frozen=True):
    """From operators to the engine's steps: `max(floor, host_s + Σ scale·operators)`.

    The floor is what launching the kernels takes, however little they do: lower where a step is
    replayed as a CUDA graph. It goes with the layers, so more ranks do not lower it; their
    all-reduces are launched too (`Profile.floor_s`). A fit has floors on a GPU, and `host_s` on a
    CPU, where launching is not beside computing. The scales say how the operators, measured alone,
    run in the engine (fused by the compiler, under its clocks); all-reduces are taken as measured.
    """

    request_s: float = 0.0
    """Once per prefill, whatever its steps; of prompts that begin in one step, once."""
    host_s: float = 0.0
    floor_s: float = 0.0
    graph_floor_s: float = 0.0
    gemm_scale: float = 1.0
    attention_scale: float = 1.0
    linear_scale: float = 1.0
    prompt_token_s: float = 0.0
    """Once per request and prompt token, cached or not: hashes, block tables."""
    decode_host_s: float = 0.0
    decode_request_s: float = 0.0
    """Per request of a decode step: sampling, output."""
    decode_scale: float = 1.0


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the cost model computes from."""

    format: int = FORMAT
    source: str
    """How it came about: `calibrated`, or what a built-in one is based on. Status shows it."""
    model: str
    device: str
    dtype: str
    engine: str
    """The engine and its version, as in `vllm 0.32.0`."""
    created: str = ""
    tp: int
    shape: ModelShape
    num_sms: int
    """Tiles that run at once: streaming multiprocessors, or the threads of a CPU."""
    chunk_tokens: int
    """The most tokens of a prompt that one step computes (`max_num_batched_tokens`)."""
    graph_sizes: tuple[int, ...] = ()
    """Token counts, rising, that steps are padded to and replayed at as CUDA graphs."""
    gemms: tuple[GemmFit, ...]
    attention: tuple[AttentionFit, ...]
    elementwise: dict[str, LinearFit]
    reduce: ReduceFit
    step: StepFit = StepFit()
    steps: dict[int, StepFit] = {}
    """Other numbers of ranks → the same, of the slowest of so many hosts."""
    links: dict[str, LinkFit]
    """Kind of link → its fit. `dram`: between host memory and HBM."""
    error: float | None = None
    """Mean absolute relative error over the prefills that it was calibrated with."""

    @property
    def is_calibrated(self) -> bool:
        return self.source == CALIBRATED

    @property
    def is_on_cpu(self) -> bool:
        return self.device.lower().startswith("cpu")

    def describe(self) -> str:
        """Where it comes from and what it is of, in a line."""
        if not self.is_calibrated:
            return self.source
        what = (self.model, self.device, self.dtype, self.engine)
        return f"{self.source} at {self.created or 'an unknown time'} for {', '.join(what)}"

    def gemm_fit(self, gemm: Gemm) -> GemmFit:
        """The fit of this very shard, else the nearest one of that name, resized."""
        named = [fit for fit in self.gemms if fit.gemm.name == gemm.name]
        exact = next((fit for fit in named if fit.gemm == gemm), None)
        if exact is not None:
            return exact
        return min(named, key=lambda fit: _distance(fit.gemm, gemm)).resized(gemm)

    def attention_fit(self, num_heads: int, num_kv_heads: int) -> AttentionFit:
        """The fit at these heads, else the nearest one, resized."""
        nearest = min(self.attention, key=lambda fit: abs(np.log(fit.num_heads / num_heads)))
        return nearest.resized(num_heads, num_kv_heads)

    def step_fit(self, tp: int) -> StepFit:
        """For `tp` ranks, or for the most below that are known of."""
        known = [ranks for ranks in self.steps if ranks <= tp]
        return self.step if tp == self.tp or not known else self.steps[max(known)]

    def floor_s(self, tp: int) -> float:
        """What launching a step takes on `tp` ranks, outside of graphs. 0 where nothing is known
        of it: on a CPU."""
        floor_s = self.step_fit(tp).floor_s
        if not floor_s:
            return 0.0
        launches_s = 2 * self.shape.num_layers * self.reduce.launch_s
        more = (tp > 1) - (self.tp > 1)  # what was calibrated has its own in its floor
        return floor_s + more * launches_s


class StepParts(msgspec.Struct, frozen=True):
    """A step's operators but attention, summed over the layers, unscaled. One shape for both."""

    gemms_s: Floats
    linear_s: Floats
    """Element-wise operators."""
    reduce_s: Floats
    """All-reduces, over several ranks."""


def step_parts(profile: Profile, tp: int, tokens: Tokens, sampled: int | Tokens = 1) -> StepParts:
    """What steps of `tokens` tokens cost one of `tp` ranks.

    `sampled`: rows that go through the LM head.
    """
    shape = profile.shape
    tokens = _padded(tokens, profile.graph_sizes)
    gemms = np.zeros(tokens.shape)
    for gemm in shape.layer_gemms(tp):
        gemms += shape.num_layers * profile.gemm_fit(gemm).seconds(tokens, profile.num_sms)
    rows = np.broadcast_to(np.asarray(sampled, dtype=np.int64), tokens.shape)
    gemms += profile.gemm_fit(shape.head_gemm(tp)).seconds(rows, profile.num_sms)
    linear = np.zeros(tokens.shape)
    for name, width in shape.elementwise(tp).items():
        fit = profile.elementwise[name]
        linear += shape.num_layers * (fit.fixed_s + fit.element_s * width * tokens)
    reduce = np.zeros(tokens.shape)
    if tp > 1:
        size_bytes = np.maximum(tokens, 1.0) * shape.hidden * shape.dtype_bytes
        reduce += 2 * shape.num_layers * profile.reduce.seconds(tp, size_bytes)
    return StepParts(gemms, linear, reduce)


def _padded(tokens: Tokens, graph_sizes: tuple[int, ...]) -> Tokens:
    """To the next size that a graph was captured at, if there is one."""
    if not graph_sizes:
        return tokens
    sizes = np.array(graph_sizes, dtype=np.int64)
    places = np.minimum(np.searchsorted(sizes, tokens), len(sizes) - 1)
    return np.where(tokens <= sizes[-1], sizes[places], tokens)


def _share(whole: int, tp: int) -> int:
    return max(1, -(-whole // tp))


def _distance(one: Gemm, other: Gemm) -> float:
    return float(abs(np.log(one.n / other.n)) + abs(np.log(one.k / other.k)))
