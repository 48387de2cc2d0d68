"""The environment that vLLM reads when it is imported; so this module imports nothing of it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""What keeps the ranks of an instance from NVLink multicast: a program that dies with it set up can
leave the GPUs of a host unusable for everybody. vLLM's own all-reduce does without it."""

GRAMMAR_STACK_BYTES = 64 << 20
"""Stack of the threads that check and compile grammars: three times what the deepest of 64 Ki
characters was seen to take. It costs address space, and memory only as far as it is used."""


def set_engine_environment(
    environment: MutableMapping[str, str],
    *,
    num_threads: int,
    log_level: str,
    compiles: bool = True,
) -> None:
    """Set what the engine needs, in the zygote and in every worker.

    The engine lives in the worker's own process, for the loop serves the block pool between steps;
    on the CPU vLLM would start another process otherwise.

    `compiles`: False where the model runs eagerly on the CPU. What else is compiled there are parts
    of the sampler, at the first request that samples or asks for logprobs: that would stop its
    instance for seconds (ten with an empty cache of torch's), and gains nothing.
    """
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment["VLLM_NO_USAGE_STATS"] = "1"
    environment["VLLM_HOST_IP"] = "127.0.0.1"
    environment["VLLM_LOGGING_LEVEL"] = log_level.upper()
    if not compiles:
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")
    # torch would initialise CUDA to count GPUs, and no fork of such a process can use them.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # GPUs are numbered as the driver and nvidia-smi number them.
    environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Instances share the cores: binding would put every instance's threads onto the same ones.
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    environment.setdefault("OMP_NUM_THREADS", str(num_threads))
    for name, value in NO_MULTICAST.items():
        environment.setdefault(name, value)


def without_multicast(engine: Mapping[str, Any], tp: int) -> Mapping[str, Any]:
    """The engine's arguments for `tp` ranks whose all-reduces are not fused with what follows, if
    the user does not ask for it: the fused ones may set up NVLink multicast."""
    compilation = engine.get("compilation_config") or {}
    if tp == 1 or not isinstance(compilation, Mapping):
        return engine
    passes = {"fuse_allreduce_rms": False, **(compilation.get("pass_config") or {})}
    return {**engine, "compilation_config": {**compilation, "pass_config": passes}}
