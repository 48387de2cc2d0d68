"""The operators that calibration measures, on a GPU: the right kernels, and times that grow."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from memserve.core.profile import ModelShape  # noqa: E402
from memserve.workers.operators import Operators  # noqa: E402
from memserve.workers.paged_attention import PagedAttention  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPE = ModelShape(2, 4096, 32, 8, 128, 14336, 32000)


@pytest.mark.parametrize(("new", "cached", "requests"), [(5, 0, 1), (400, 700, 1), (1, 631, 3)])
def test_paged_attention_is_attention(new: int, cached: int, requests: int) -> None:
    device = torch.device("cuda")
    with torch.inference_mode():
        run = PagedAttention(
            device,
            torch.bfloat16,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            new_tokens=new,
            cached_tokens=cached,
            num_requests=requests,
        )
        found = run().view(requests, new, 32, 128)
        mask = torch.ones(new, new + cached, dtype=torch.bool, device=device).tril(cached)
        for request in range(requests):
            query = run.query.view(requests, new, 32, 128)[request].transpose(0, 1).float()
            keys, values = (
                both[request, : new + cached].transpose(0, 1).float()
                for both in (run.keys, run.values)
            )
            expected = torch.nn.functional.scaled_dot_product_attention(
                query[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
            )[0]
            torch.testing.assert_close(
                found[request].transpose(0, 1).float(), expected, atol=1e-2, rtol=2e-2
            )


def test_more_work_takes_longer() -> None:
    with torch.inference_mode():
        operators = Operators(torch.device("cuda"), torch.bfloat16, SHAPE.head_dim)
        for gemm in (*SHAPE.layer_gemms(1), SHAPE.head_gemm(1)):
            weights = operators.make_weights(gemm)
            few, many = (operators.gemm(gemm, tokens, weights) for tokens in (64, 4096))
            assert 0 < few < many < 1
        heads = SHAPE.heads(1)
        assert 0 < operators.attention(heads, 512, 0) < operators.attention(heads, 512, 16000)
        assert 0 < operators.norm(8, 4096) < operators.norm(8192, 4096)
        assert 0 < operators.activation(8, 28672) < operators.activation(8192, 28672)
        assert 0 < operators.rope(8, heads) < operators.rope(8192, heads)
        assert 0 < operators.copy(1 << 16) < operators.copy(1 << 26)
