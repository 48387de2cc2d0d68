"""What calibration runs: the engine's own kernels, called rightly, and a real engine's prefills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from memserve import cli
from memserve.core.profile import ModelShape
from memserve.errors import StartError
from memserve.workers.all_reduce import measure_reduces
from memserve.workers.operators import Operators, Stopwatch
from memserve.workers.paged_attention import PagedAttention

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")
SHAPE = ModelShape(2, 128, 4, 2, 32, 256, 512)
DEADLINE_S = 200.0


@pytest.mark.parametrize(("new", "cached", "requests"), [(5, 0, 1), (40, 70, 1), (1, 63, 3)])
@torch.inference_mode()
def test_paged_attention_is_attention(new: int, cached: int, requests: int) -> None:
    run = PagedAttention(
        CPU,
        torch.float32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        new_tokens=new,
        cached_tokens=cached,
        num_requests=requests,
    )
    found = run().view(requests, new, 4, 32)
    for request in range(requests):
        keys, values = (
            both[request, : new + cached].transpose(0, 1) for both in (run.keys, run.values)
        )
        query = run.query.view(requests, new, 4, 32)[request].transpose(0, 1)
        mask = torch.ones(new, new + cached, dtype=torch.bool).tril(cached)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(found[request].transpose(0, 1), expected, atol=2e-4, rtol=1e-3)


@torch.inference_mode()
def test_products_are_products_with_different_weights() -> None:
    operators = Operators(CPU, torch.float32, 32)
    weights = operators.make_weights(SHAPE.layer_gemms(1)[0])
    x = torch.ones(3, 128)
    assert len(weights) > 1
    found = [product(x) for product in weights[:2]]
    assert all(out.shape == (3, SHAPE.layer_gemms(1)[0].n) for out in found)
    assert not torch.equal(*found)


@torch.inference_mode()
def test_every_operator_takes_time() -> None:
    ticks = iter(range(10**6))
    operators = Operators(CPU, torch.bfloat16, 32, clock=lambda: float(next(ticks)))
    gemm = SHAPE.head_gemm(1)
    # Each run lies between two ticks: one second for one call.
    assert operators.gemm(gemm, 4, operators.make_weights(gemm)) == 1.0
    assert operators.attention((4, 2), 8, 8) == 1.0
    assert (
        operators.norm(4, 128) == operators.activation(4, 512) == operators.rope(4, (4, 2)) == 1.0
    )
    assert operators.copy(1 << 12) == 1.0


def test_a_stopwatch_takes_the_least_disturbed_run() -> None:
    times = iter([0.0, 1.0, 0, 5, 10, 13, 20, 27, 30, 34, 40, 49])
    assert Stopwatch(CPU, lambda: next(times)).seconds(lambda: None) == 3.0


PROBE = """
import sys, time
from memserve.workers.probe import EngineProbe

engine = {"dtype": "bfloat16", "max_model_len": 512, "block_size": 32, "enforce_eager": True}
probe = EngineProbe(sys.argv[1], engine, 48 << 20)
probe.start()
probe.warm_up()
print(probe.held_tokens)
for num_tokens, cached in ((300, 0), (300, 200), (300, 300), (40, 10)):
    sample = probe.prefill(num_tokens, cached)
    print(sample.num_tokens, sample.cached_tokens, 0 < sample.seconds < 60)
decode = probe.decode(3, 100, 4)
print(decode.num_requests, decode.context_tokens, 0 < decode.seconds < 60)
print(probe.shape.num_layers, probe.limits.chunk_tokens, probe.limits.graph_sizes)
again = probe.prefill(300, 200)
print(again.cached_tokens, probe.is_idle, probe.held_tokens)
sys.stdout.flush()
probe.close()
import os
os._exit(0)
"""


@pytest.mark.timeout(240)
def test_a_probe_measures_what_it_was_asked_for(model_folder: Path) -> None:
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(model_folder)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-8:] == [
        "480",
        "300 0 True",
        "300 192 True",
        "300 288 True",
        "40 0 True",
        "3 306 True",
        "30 2048 ()",
        "192 True 0",
    ]


@pytest.mark.timeout(240)
def test_ranks_measure_their_all_reduces() -> None:
    sizes = (1 << 13, 1 << 18)
    found = measure_reduces("cpu", 2, sizes, timeout_s=DEADLINE_S)
    assert [(one.ranks, one.size_bytes) for one in found] == [(2, size) for size in sizes]
    assert all(0 < one.seconds < 60 for one in found)


@pytest.mark.timeout(240)
def test_a_rank_that_fails_says_why_and_leaves_no_other_behind() -> None:
    with pytest.raises(StartError, match=r"rank \d of an all-reduce failed: .*empty"):
        measure_reduces("cpu", 2, (), timeout_s=DEADLINE_S)
    assert not psutil.Process().children()


@pytest.mark.timeout(240)
def test_a_model_that_the_engine_refuses_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command, with the real process."""
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    out = tmp_path / "profile.json"
    arguments = ["--model", str(tmp_path), "--device", "cpu", "--out", str(out)]
    assert cli.invoke(["calibrate", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("memserve: error: the calibration failed: ")
    assert error.count("\n") == 1
    assert "unheard-of" in error
    assert not out.exists()
