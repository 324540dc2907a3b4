"""`EngineArgs`: what the user asks for. `EngineConfig`: the same with every choice made."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from moe_optimizer.arguments import Arguments
from moe_optimizer.engine.attention.backend import BackendName
from moe_optimizer.engine.weights import LoadFormat
from moe_optimizer.errors import InputError, described
from moe_optimizer.inspection.hub import fetch_model, resolve_model
from moe_optimizer.log import get_logger

_log = get_logger(__name__)


class EngineArgs(Arguments):
    """The arguments of `LLM`, `AsyncLLM` and the server, named as vLLM names them where it has them."""

    model: str
    """Folder of the model, where `~` is the home folder, or a hub id, whose files are fetched."""
    tokenizer: str | None = None
    """Folder of the tokenizer; None is the model's."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto is the checkpoint's, and float32 on a CPU that has no instructions for it."""
    load_format: LoadFormat = "auto"
    """auto, safetensors, pt (torch's .bin files) or dummy (random weights)."""
    quantization: Literal["fp8"] | None = None
    """fp8 converts the experts' weights while loading."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest sequence, prompt and output; None is the model's own limit, as far as the KV cache holds it."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences computed at the same time."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Tokens computed in one step."""
    max_waiting_requests: int = Field(default=4096, ge=1)
    """Requests that may wait in `AsyncLLM`; more are refused."""
    block_size: int = Field(default=16, ge=1)
    """Tokens per block of the KV cache."""
    num_gpu_blocks_override: int | None = Field(default=None, ge=1)
    """Blocks of the KV cache; None sizes it from the memory."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Part of a GPU's memory that the engine may use."""
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Size of the KV cache; None sizes it from the memory."""
    swap_space: float = Field(default=0.0, ge=0, le=1 << 20)
    """GiB of host memory for preempted sequences; above 0 they are swapped instead of computed again."""
    kv_cache: bool = True
    """False computes every text whole for each of its tokens, and leaves out prefix caching."""
    continuous_batching: bool = True
    """False lets requests in once all that run have ended."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool | None = None
    """Whether the host prepares and launches a step while the device computes the one before; None does on one GPU."""
    attention_backend: BackendName = "auto"
    """auto is the fastest that is there; flash, triton, paged, sdpa or sdpa_padded."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes that share the model, a GPU each; on a CPU they share its cores."""
    enable_expert_parallel: bool = False
    """Whole experts on each of them instead of a slice of every expert."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    compile_layers: bool | None = None
    """Whether torch.compile joins the operations between matrix products; None does on GPUs."""
    fused_moe: bool = True
    """False computes the experts one after the other in plain torch."""
    gpu_sampler: bool = True
    """False chooses tokens on the CPU, whatever computes their logits."""
    packed_weights: bool = True
    """On CPUs a second copy of large weights in oneDNN's order, in which products take half the time."""
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}, expected at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence computes one token a step"
            )
        if self.async_scheduling and (self.tensor_parallel_size > 1 or not self.kv_cache):
            raise ValueError("async_scheduling: got True, expected False with several processes or without kv_cache")
        return self


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine runs with: no "auto" is left but the size of the KV cache, which the loaded model decides."""

    args: EngineArgs
    folder: Path
    tokenizer_folder: Path | None
    hf_config: Any
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    cuda_graphs: bool
    compile: bool
    async_scheduling: bool

    @classmethod
    def resolve(cls, args: EngineArgs, *, rank: int = 0) -> Self:
        """Read the model's configuration and make every choice, for one of the processes that share the model."""
        from transformers import AutoConfig

        if args.load_format == "dummy":
            folder = resolve_model(args.model)
        else:
            folder = fetch_model(args.model, weights="*.bin" if args.load_format == "pt" else "*.safetensors")
        try:
            hf_config = AutoConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # noqa: BLE001  (each family's class checks as it likes)
            raise InputError(f"{folder}/config.json: {described(error)}") from None
        device = _device(args.device, rank, args.tensor_parallel_size)
        max_model_len = args.max_model_len or hf_config.max_position_embeddings
        if max_model_len > hf_config.max_position_embeddings:
            limit = f"{hf_config.max_position_embeddings}, the model's max_position_embeddings"
            raise InputError(f"max_model_len: got {max_model_len}, expected at most {limit}")
        if not args.enable_chunked_prefill and args.max_num_batched_tokens < max_model_len:
            raise InputError(
                f"max_num_batched_tokens: got {args.max_num_batched_tokens} without chunked prefill, expected at "
                f"least max_model_len ({max_model_len})"
            )
        tokenizer = None if args.skip_tokenizer_init else Path(args.tokenizer or folder).expanduser()
        if args.quantization == "fp8" and device.type == "mps":
            raise InputError("quantization: got 'fp8' on mps, which has no such numbers")
        dtype, on_gpu = _dtype(args.dtype, hf_config, device), device.type == "cuda"
        graphs = on_gpu and not args.enforce_eager
        compiles = _compiles(device) if args.compile_layers is None else args.compile_layers
        alone = on_gpu and args.tensor_parallel_size == 1 and args.kv_cache
        overlaps = alone if args.async_scheduling is None else args.async_scheduling
        return cls(args, folder, tokenizer, hf_config, device, dtype, max_model_len, graphs, compiles, overlaps)


def _compiles(device: torch.device) -> bool:
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        _log.warning("Triton is not installed: norms, rotations and activations run one operation at a time")
        return False
    return device.type == "cuda"


def _device(name: str, rank: int, size: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return device
    first, count = device.index or 0, torch.cuda.device_count()
    if not torch.backends.mps.is_available() if device.type == "mps" else first >= count:
        raise InputError(f"device: got {name!r}, which torch does not find here", hint="device='cpu' runs everywhere")
    if device.type == "mps":
        if size > 1:
            raise InputError(f"tensor_parallel_size: got {size} on mps, expected 1")
        return device
    if first + size > count:
        raise InputError(
            f"tensor_parallel_size: got {size} from {name!r} on, and torch finds {count} GPUs",
            hint="processes on device='cpu' share its cores",
        )
    return torch.device("cuda", first + rank)


def _dtype(name: str, hf_config: Any, device: torch.device) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    stored = hf_config.dtype if isinstance(hf_config.dtype, torch.dtype) else torch.float32
    short = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(stored)
    if device.type != "cpu" or short is None:
        return stored
    has = torch.cpu.get_capabilities()
    if any(has.get(f"{prefix}{short}", False) for prefix in ("avx512_", "amx_", "")):
        return stored
    _log.warning(
        "this CPU has no instructions for %s: the weights are held in float32, twice the memory; dtype='bfloat16' "
        "keeps them as they are, and matrix products become many times slower",
        str(stored).removeprefix("torch."),
    )
    return torch.float32
