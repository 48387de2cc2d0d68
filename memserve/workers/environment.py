"""The environment that vLLM reads when it is imported; so this module imports nothing of it."""

from __future__ import annotations

from collections.abc import MutableMapping


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
