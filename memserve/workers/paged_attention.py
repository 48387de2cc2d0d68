"""vLLM's attention kernels, called as its backends call them, outside an engine.

For `operators.py`, which times them. Reaches into vLLM as `compat.py` does: the CPU kernel with its
schedule and its way of writing KV, and the flash attention of CUDA.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm import envs

BLOCK_SIZE = 32


class PagedAttention:
    """One layer's attention of equal requests over paged KV; each call does it once more.

    The KV cache is block-first, `[num_blocks, num_kv_heads, block_size, 2·head_dim]`, filled with
    numbers; the blocks of a request lie scattered.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        new_tokens: int,
        cached_tokens: int,
        num_requests: int,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def numbers(*shape: int) -> torch.Tensor:
            made = torch.rand(*shape, generator=generator, device=device)
            return (made - 0.5).to(dtype)

        self._device, self._head_dim = device, head_dim
        self._new_tokens, self._length = new_tokens, new_tokens + cached_tokens
        per_request = -(-self._length // BLOCK_SIZE)
        num_blocks = per_request * num_requests
        kv_shape = (num_requests, per_request * BLOCK_SIZE, num_kv_heads, head_dim)
        self.query = numbers(num_requests * new_tokens, num_heads, head_dim)
        self.keys, self.values = numbers(*kv_shape), numbers(*kv_shape)
        """`[num_requests, length up to the block's end, num_kv_heads, head_dim]`."""
        order = torch.randperm(num_blocks, generator=generator, device=device)
        self._table = order.to(torch.int32).view(num_requests, per_request)
        self._starts = torch.arange(
            0, (num_requests + 1) * new_tokens, new_tokens, dtype=torch.int32, device=device
        )
        self._lengths = torch.full((num_requests,), self._length, dtype=torch.int32, device=device)
        self._cache = torch.zeros(
            num_blocks, num_kv_heads, BLOCK_SIZE, 2 * head_dim, dtype=dtype, device=device
        )
        self._out = torch.empty_like(self.query)
        if device.type == "cuda":
            self._version = _flash_version(head_dim)
            self._fill_on_cuda()
        else:
            self._isa = _cpu_isa(dtype, head_dim)
            self._schedule = self._make_schedule(num_heads, num_kv_heads)
            self._fill_on_cpu()

    def __call__(self) -> torch.Tensor:
        """Returns `[num_requests · new_tokens, num_heads, head_dim]`, the same tensor each time."""
        if self._device.type == "cuda":
            self._attend_on_cuda()
        else:
            self._attend_on_cpu()
        return self._out

    # CUDA.

    def _fill_on_cuda(self) -> None:
        blocks = self._table.flatten().long()
        for part, source in enumerate((self.keys, self.values)):
            paged = source.reshape(-1, BLOCK_SIZE, *source.shape[2:]).transpose(1, 2)
            self._cache[blocks, ..., part * self._head_dim : (part + 1) * self._head_dim] = paged

    def _attend_on_cuda(self) -> None:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        keys, values = self._cache.transpose(1, 2).split(self._head_dim, dim=-1)
        flash_attn_varlen_func(
            q=self.query,
            k=keys,
            v=values,
            out=self._out,
            cu_seqlens_q=self._starts,
            max_seqlen_q=self._new_tokens,
            seqused_k=self._lengths,
            max_seqlen_k=self._length,
            softmax_scale=self._head_dim**-0.5,
            causal=True,
            block_table=self._table,
            fa_version=self._version,
        )

    # CPU.

    def _halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the kernel keeps keys and values: in an order of its own within each half."""
        num_blocks, num_kv_heads, block_size, _ = self._cache.shape
        keys, values = self._cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, 2)
        return keys, values

    def _fill_on_cpu(self) -> None:
        offsets = torch.arange(BLOCK_SIZE)
        slots = (self._table.long().unsqueeze(-1) * BLOCK_SIZE + offsets).flatten()
        ops.cpu_attn_reshape_and_cache(
            self.keys.flatten(0, 1), self.values.flatten(0, 1), *self._halves(), slots, self._isa
        )

    def _make_schedule(self, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        schedule: torch.Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self._lengths),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self._head_dim,
            seq_lens=self._lengths,
            dtype=self.query.dtype,
            query_start_loc=self._starts,
            causal=True,
            sliding_window_size=-1,
            isa=self._isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        return schedule

    def _attend_on_cpu(self) -> None:
        keys, values = self._halves()
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=keys,
            value_cache=values,
            output=self._out,
            query_start_loc=self._starts,
            seq_lens=self._lengths,
            scale=self._head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self._table,
            softcap=0,
            scheduler_metadata=self._schedule,
            s_aux=None,
        )


def _flash_version(head_dim: int) -> int:
    """The flash attention that the engine would take."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version: int = get_flash_attn_version(head_size=head_dim)
    return version


def _cpu_isa(dtype: torch.dtype, head_dim: int) -> str:
    """The instructions that the engine would take."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa: str = _get_attn_isa(dtype, BLOCK_SIZE, head_dim)
    return isa
