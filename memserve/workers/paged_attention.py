"""vLLM's attention kernels, called as its backends call them, outside an engine.

For `operators.py`, which times them. Reaches into vLLM as `compat.py` does: the CPU kernel with its
schedule, and the flash attention of CUDA.
"""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm import envs

_BLOCK_SIZE = 32


class PagedAttention:
    """One layer's attention of equal requests over paged KV; each call does it once more.

    KV: `[num_blocks, num_kv_heads, block_size, 2·head_dim]`, K before V, filled with numbers; the
    blocks of a request lie scattered.
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
        length = new_tokens + cached_tokens
        per_request = -(-length // _BLOCK_SIZE)
        generator = torch.Generator(device).manual_seed(0)
        num_blocks = per_request * num_requests
        self._cache = torch.rand(
            num_blocks,
            num_kv_heads,
            _BLOCK_SIZE,
            2 * head_dim,
            generator=generator,
            device=device,
            dtype=torch.float32,
        ).to(dtype)
        self.query = torch.rand(
            new_tokens * num_requests, num_heads, head_dim, generator=generator, device=device
        ).to(dtype)
        self._out = torch.empty_like(self.query)
        order = torch.randperm(num_blocks, generator=generator, device=device)
        self._table = order.to(torch.int32).view(num_requests, per_request)
        self._starts = torch.arange(
            0, (num_requests + 1) * new_tokens, new_tokens, dtype=torch.int32, device=device
        )
        self._lengths = torch.full((num_requests,), length, dtype=torch.int32, device=device)
        self._new_tokens, self._length = new_tokens, length
        self._scale = head_dim**-0.5
        self._head_dim = head_dim
        self._run = self._on_cuda if device.type == "cuda" else self._on_cpu
        self._schedule: torch.Tensor | None = None
        if device.type == "cpu":
            self._schedule = self._cpu_schedule(num_heads, num_kv_heads, dtype)

    def __call__(self) -> torch.Tensor:
        """Returns `[new_tokens · num_requests, num_heads, head_dim]`, the same tensor each time."""
        self._run()
        return self._out

    def kv_of(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one request, each `[num_kv_heads, length, head_dim]`."""
        blocks = self._cache[self._table[request].long()]
        num_kv_heads = blocks.shape[1]
        num_blocks, block_size = blocks.shape[0], blocks.shape[2]
        if self._schedule is None:
            both = blocks.transpose(0, 1).reshape(num_kv_heads, num_blocks * block_size, -1)
            keys, values = both.split(self._head_dim, dim=-1)
        else:
            halves = blocks.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, 2)
            keys, values = (
                half.transpose(0, 1).reshape(num_kv_heads, num_blocks * block_size, -1)
                for half in halves
            )
        return keys[:, : self._length], values[:, : self._length]

    def _on_cuda(self) -> None:
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )

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
            softmax_scale=self._scale,
            causal=True,
            block_table=self._table,
            fa_version=get_flash_attn_version(head_size=self._head_dim),
        )

    def _cpu_schedule(self, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        schedule: torch.Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(self._lengths),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self._head_dim,
            seq_lens=self._lengths,
            dtype=dtype,
            query_start_loc=self._starts,
            causal=True,
            sliding_window_size=-1,
            isa=_get_attn_isa(dtype, _BLOCK_SIZE, self._head_dim),
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        return schedule

    def _on_cpu(self) -> None:
        num_blocks, num_kv_heads, block_size, _ = self._cache.shape
        keys, values = self._cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, 2)
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=keys,
            value_cache=values,
            output=self._out,
            query_start_loc=self._starts,
            seq_lens=self._lengths,
            scale=self._scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self._table,
            softcap=0,
            scheduler_metadata=self._schedule,
            s_aux=None,
        )
