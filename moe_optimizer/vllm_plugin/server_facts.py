"""Reads what the vLLM around the plugin was started with, while it builds its model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """The configuration of a running vLLM, from which a plan is made under plain `vllm serve`."""

    model: str
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    device: str
    """"cpu" or "cuda"."""
    tensor_parallel_size: int
    expert_parallel: bool
    world_size: int
    max_model_len: int
    max_num_seqs: int
    trust_remote_code: bool
    quantization: str | None = None
    """vLLM's name of how the weights are quantised, by the checkpoint or while loading; None: they are not."""
    lora: bool = False
    """Whether it takes LoRA adapters."""
    lora_targets: tuple[str, ...] | None = None
    """Names of the modules that adapters are limited to; None: any."""
    worker_threads: int | None = None
    """Threads that this worker computes with; None on GPUs."""


def server_facts() -> ServerFacts:
    """Read the current vLLM configuration.

    Raises:
        AssertionError: vLLM is not building a model in this thread.
    """
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    config = get_current_vllm_config()
    model, parallel, targets = config.model_config, config.parallel_config, lora_targets()
    return ServerFacts(
        model=model.model,
        dtype=str(model.dtype).removeprefix("torch."),
        device="cpu" if current_platform.is_cpu() else "cuda",
        tensor_parallel_size=parallel.tensor_parallel_size,
        expert_parallel=bool(parallel.enable_expert_parallel),
        world_size=world()[1],
        max_model_len=model.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        trust_remote_code=bool(model.trust_remote_code),
        quantization=model.quantization,
        lora=config.lora_config is not None,
        lora_targets=None if targets is None else tuple(targets),
        worker_threads=cpu_threads() if current_platform.is_cpu() else None,
    )


def world() -> tuple[int, int]:
    """Return (rank, number of processes) of the model's process group."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def cpu_threads() -> int:
    """Return how many threads this process computes with on the CPU."""
    import torch

    return torch.get_num_threads()


def uses_lora() -> bool:
    """Whether this server takes LoRA adapters."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return config is not None and config.lora_config is not None


def lora_targets() -> list[str] | None:
    """Return the names that the server's LoRA adapters are limited to; None: any module, or no adapters."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    return None if config is None or config.lora_config is None else config.lora_config.target_modules
