"""Where vLLM's KV cache lies: in memory of ours, and how.

Collaborators: `hosts.py` places the cache while vLLM allocates it, and describes it when vLLM
registers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memserve.errors import StartError
from memserve.types import Geometry


class _KvCachePlacement(TorchFunctionMode):
    """Inside it, the KV cache's `torch.zeros` gets its memory from `make`."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        is_raw = kwargs.get("dtype") is torch.int8 and len(args) == 1
        if func is torch.zeros and is_raw and isinstance(args[0], int):
            return self._make(args[0])
        return func(*args, **kwargs)


@contextmanager
def place_kv_cache(make: Callable[[int], torch.Tensor]) -> Iterator[None]:
    """Take the KV cache's memory from `make(size_bytes)`, which returns a zeroed int8 tensor."""
    with _KvCachePlacement(make):
        yield


def geometry_of(model: str, block_size: int, kv_caches: Mapping[str, torch.Tensor]) -> Geometry:
    """How the registered KV cache lies in its one buffer.

    Shapes: per layer `[num_blocks, num_heads, block_size, content]`, with K and V in `content`.

    Raises: StartError if the pages differ, overlap or have holes.
    """
    layers = list(kv_caches.values())
    first = layers[0]
    page = first[0]
    page_bytes = page.numel() * page.element_size()
    for name, layer in kv_caches.items():
        is_alike = layer.shape == first.shape and layer.stride() == first.stride()
        if not is_alike or layer.dtype is not first.dtype:
            raise StartError(f"the KV cache of layer {name} lies unlike the first layer's")
        if layer.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            raise StartError(f"the KV cache of layer {name} is in a buffer of its own")
    span = 1 + sum((size - 1) * step for size, step in zip(page.shape, page.stride(), strict=True))
    if span != page.numel():
        raise StartError("the KV of a block and layer is not contiguous in this layout")
    base = first.untyped_storage().data_ptr()
    return Geometry(
        model=model,
        dtype=str(first.dtype).removeprefix("torch."),
        block_size=block_size,
        num_blocks=first.shape[0],
        num_kv_heads=first.shape[1],
        page_bytes=page_bytes,
        block_stride=first.stride(0) * first.element_size(),
        layer_offsets=tuple(layer.data_ptr() - base for layer in layers),
        page_order=_page_order(page),
    )


def _page_order(page: torch.Tensor) -> str:
    """Shape `[num_heads, block_size, content]`; with one head both orders are the same bytes."""
    heads, tokens = page.stride(0), page.stride(1)
    return "NHC" if page.shape[0] > 1 and heads < tokens else "HNC"
