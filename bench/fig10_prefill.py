"""What MemServe's whole caching path adds to a prefill (the second half of the paper's figure 10).

    python -m bench.fig10_prefill --model FOLDER [--runs 8] [--lengths 128,512,1024,2000] [--out F]

Three engines, all with prefix caching: plain vLLM, and two as workers have it, with the connector,
MemPool's index that follows the pool, and the reports to the hub (encoded, and not sent). One has
vLLM's own layout of the KV cache, one has aggregated blocks. Each run takes a new random prompt,
cold and then once more with its blocks cached, on one engine after another; the first one changes.
Pools are so small that prompts evict each other. An engine has a process to itself, as vLLM keeps
its connector in a global; the others sleep meanwhile. Shown is the difference to plain vLLM run by
run, and what MemServe's own calls took by the clock: where a step takes a second, these are what
the caching path adds, and the rest of the difference is noise or the layout's.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench._report import Scalar, parser, publish
from memserve.workers.environment import set_engine_environment

set_engine_environment(os.environ, num_threads=1, log_level="error")  # before vllm is imported

from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from memserve.messages import AnyEvent, encode  # noqa: E402
from memserve.types import InstanceId, TransferStyle  # noqa: E402
from memserve.workers.compat import Engine, make_config  # noqa: E402
from memserve.workers.engine_pool import EnginePool  # noqa: E402
from memserve.workers.index_reports import IndexReports  # noqa: E402
from memserve.workers.mempool import MemPool  # noqa: E402
from memserve.workers.rank_messages import StepOrders  # noqa: E402

BLOCK_SIZE = 32
ENGINE = {"max_model_len": 2048, "enforce_eager": True, "block_size": BLOCK_SIZE}
KV_BYTES = 128 << 20
VOCABULARY = 40_000
DEADLINE_S = 120.0
PLAIN = "plain"
SIDES = (PLAIN, "layer_first", "block_first")


class Plain:
    """vLLM alone."""

    own_s = 0.0

    def __init__(self, model: str, layout: str) -> None:
        config = EngineArgs(
            model=model, kv_cache_memory_bytes=KV_BYTES, enable_prefix_caching=True, **ENGINE
        ).create_engine_config()
        self.engine = Engine(config)

    def after_step(self) -> None:
        """Nothing."""


class WithMemServe:
    """The engine of a worker, without commands and peers. It is its connector's host, too."""

    def __init__(self, model: str, layout: str) -> None:
        self.own_s = 0.0
        """Spent in MemServe's calls."""
        self._mempool: MemPool | None = None
        config = make_config(
            model,
            ENGINE,
            engine_id="bench",
            kv_bytes=KV_BYTES,
            layout=layout,
            host=self,
            style=TransferStyle.REQUEST,
            tp=1,
        )
        self.engine = Engine(config)
        self.mempool = MemPool(
            EnginePool(self.engine.block_pool, self.engine.hash_request, self.engine.steps),
            self.engine.block_size,
            records_changes=True,
        )
        self._reports = IndexReports(self.mempool, InstanceId("PD0"), 1, _encode_only)
        for name in ("on_cached", "on_evicted", "request_ended"):
            setattr(self.mempool, name, self._timed(getattr(self.mempool, name)))
        self._mempool = self.mempool
        self._after_step = self._timed(self._follow)

    def after_step(self) -> None:
        """What the engine loop does for the cache after each step."""
        self._after_step()

    def _follow(self) -> None:
        self._reports.flush()

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.own_s += time.perf_counter() - begun

        return timed

    # The connector's hooks.

    def kv_cache_memory(self) -> AbstractContextManager[None] | None:
        return None

    def on_kv_caches(self, kv_caches: dict[str, Any], block_size: int) -> None:
        pass

    def on_scheduled(self, request_id: str, cached_tokens: int) -> None:
        pass

    def on_step(self, num_scheduled: Mapping[str, int]) -> None:
        pass

    def on_step_begins(self, orders: StepOrders) -> None:
        pass

    def on_step_ended(self, orders: StepOrders) -> None:
        pass

    def on_layer(self, layer_name: str) -> None:
        pass

    def on_finished(self, request: Request, block_ids: list[int]) -> None:
        if self._mempool is not None:
            self._mempool.request_ended(request.request_id)


def _encode_only(event: AnyEvent) -> None:
    """What sending an event costs this process."""
    encode(event)


def prefill(side: Plain | WithMemServe, token_ids: list[int], name: str) -> dict[str, float]:
    """Seconds until the first token, and those of them in MemServe's calls."""
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=token_ids,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    side.own_s = 0.0
    begun = time.perf_counter()
    side.engine.add(request)
    while side.engine.is_busy:
        side.engine.step()
        side.after_step()
    return {"total": time.perf_counter() - begun, "own": side.own_s}


def serve(layout: str, model: str, asked: Connection) -> None:
    """A side's process: answers each (tokens, name) with `prefill`'s times, until None."""
    side = (Plain if layout == PLAIN else WithMemServe)(model, layout)
    while (job := asked.recv()) is not None:
        asked.send(prefill(side, *job))
    if isinstance(side, WithMemServe):
        assert side.mempool.check_integrity({}) == []


class Side:
    """The other end of `serve`. A context manager."""

    def __init__(self, layout: str, model: str) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(layout, model, theirs), daemon=True)

    def __enter__(self) -> Side:
        self._process.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pipe.send(None)
        self._process.join(DEADLINE_S)
        self._process.kill()

    def prefill(self, tokens: list[int], name: str) -> dict[str, float]:
        """See the function."""
        self._pipe.send((tokens, name))
        if not self._pipe.poll(DEADLINE_S):
            raise TimeoutError(f"{name}: no answer within {DEADLINE_S:g} s")
        took: dict[str, float] = self._pipe.recv()
        return took


def measure(model: str, lengths: list[int], runs: int) -> dict[str, dict[str, list[float]]]:
    """Seconds: length and state → side and part → runs."""
    rng = random.Random(12)
    raw: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        sides = [(layout, stack.enter_context(Side(layout, model))) for layout in SIDES]
        for run in range(runs + 1):  # the first is a warm-up
            for length in lengths:
                tokens = [rng.randrange(VOCABULARY) for _ in range(length)]
                for state in ("cold", "cached"):
                    kept = raw.setdefault(f"{length} {state}", {})
                    for name, side in sides[run % 3 :] + sides[: run % 3]:
                        took = side.prefill(tokens, f"{run}/{length}/{state}")
                        if run:
                            kept.setdefault(name, []).append(took["total"])
                            kept.setdefault(f"{name} own", []).append(took["own"])
    return raw


def summary(raw: dict[str, dict[str, list[float]]]) -> list[dict[str, Scalar]]:
    """A row for each length and state, in ms."""
    rows: list[dict[str, Scalar]] = []
    for case, times in raw.items():
        plain = times[PLAIN]
        for layout in SIDES[1:]:
            pairs = zip(times[layout], plain, strict=True)
            low, middle, high = statistics.quantiles([1e3 * (us - it) for us, it in pairs], n=4)
            own = 1e3 * statistics.median(times[f"{layout} own"])
            rows.append(
                {
                    "tokens": case,
                    "layout": layout,
                    "plain, ms": 1e3 * statistics.median(plain),
                    "added, ms": middle,
                    "lower quartile": low,
                    "upper quartile": high,
                    "calls, ms": own,
                    "calls, % of plain": own / statistics.median(plain) / 10,
                }
            )
    return rows


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, required=True, help="a folder")
    arguments.add_argument("--runs", type=int, default=8)
    arguments.add_argument("--lengths", default="128,512,1024,2000")
    options = arguments.parse_args()
    lengths = [int(text) for text in options.lengths.split(",")]
    raw = measure(str(options.model), lengths, options.runs)
    rows = summary(raw)
    publish(
        "fig10_prefill",
        settings={
            "model": options.model.name,
            "runs": options.runs,
            "block_size": BLOCK_SIZE,
            "kv_bytes": KV_BYTES,
        },
        metrics={
            f"{row['tokens']}, {row['layout']}: {name}": value
            for row in rows
            for name, value in row.items()
            if name not in ("tokens", "layout")
        },
        raw=raw,
        out=options.out,
        rows=rows,
    )


if __name__ == "__main__":
    main()
