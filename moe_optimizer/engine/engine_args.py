"""`EngineArgs`: what the user asks for. `EngineConfig`: the same with every choice made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import AutoConfig, PreTrainedConfig

from moe_optimizer.engine.weights import LoadFormat
from moe_optimizer.errors import InputError
from moe_optimizer.log import get_logger
from moe_optimizer.near_match import did_you_mean

_log = get_logger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["fp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """The arguments of `LLM`, `AsyncLLM` and the server, named as vLLM names them where it has them."""

    model: str
    """Folder of the model; `~` is the home folder."""
    tokenizer: str | None = None
    """Folder of the tokenizer; None is the model's."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    dtype: DtypeName = "auto"
    """auto is the checkpoint's, and float32 on a CPU that has no instructions for it."""
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None
    """fp8 converts the experts' weights while loading."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output; None is the model's own limit, as far as the KV cache holds it."""
    max_num_seqs: int = 256
    """Sequences computed at the same time."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step."""
    max_waiting_requests: int = 4096
    """Requests that may wait; more are refused."""
    block_size: int = 16
    """Tokens per block of the KV cache."""
    num_gpu_blocks_override: int | None = None
    """Blocks of the KV cache; None sizes it from the memory."""
    gpu_memory_utilization: float = 0.9
    """Part of a GPU's memory that the engine may use."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache; None sizes it from the memory."""
    swap_space: float = 0.0
    """GiB of host memory for preempted sequences; above 0 they are swapped instead of computed again."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    attention_backend: str = "auto"
    seed: int = 0

    @classmethod
    def of(cls, model: str, **arguments: Any) -> EngineArgs:
        """Return the arguments.

        Raises:
            InputError: there is no argument of that name.
        """
        known = [field.name for field in fields(cls)]
        for name in arguments:
            if name not in known:
                raise InputError(f"got the unknown argument {name!r}", hint=did_you_mean(name, known))
        return cls(model=model, **arguments)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting_requests", "block_size"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_model_len", "num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("swap_space", self.swap_space, 0)
        _one_of("dtype", self.dtype, get_args(DtypeName))
        _one_of("load_format", self.load_format, get_args(LoadFormat))
        _one_of("quantization", self.quantization, (None, *get_args(Quantization)))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(
                f"gpu_memory_utilization: got {self.gpu_memory_utilization}, expected above 0 and at most 1"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens: got {self.max_num_batched_tokens}, expected at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence computes one token a step"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine runs with: no "auto" is left but the size of the KV cache, which the loaded model decides."""

    args: EngineArgs
    folder: Path
    tokenizer_folder: Path | None
    hf_config: PreTrainedConfig
    device: torch.device
    dtype: torch.dtype
    max_model_len: int

    @classmethod
    def resolve(cls, args: EngineArgs) -> EngineConfig:
        """Read the model's configuration and make every choice.

        Raises:
            InputError: the model cannot be read, or arguments contradict each other or the model.
        """
        folder = Path(args.model).expanduser()
        if not (folder / "config.json").is_file():
            raise InputError(
                f"model: got {args.model!r}, expected a folder with config.json",
                hint="`hf download NAME --local-dir FOLDER` fetches a model",
            )
        hf_config = AutoConfig.from_pretrained(folder, local_files_only=True)
        device = _device(args.device)
        max_model_len = args.max_model_len or hf_config.max_position_embeddings
        if max_model_len > hf_config.max_position_embeddings:
            raise InputError(
                f"max_model_len: got {max_model_len}, expected at most {hf_config.max_position_embeddings}, "
                "the model's max_position_embeddings"
            )
        if not args.enable_chunked_prefill and args.max_num_batched_tokens < max_model_len:
            raise InputError(
                f"max_num_batched_tokens: got {args.max_num_batched_tokens} without chunked prefill, expected at "
                f"least max_model_len ({max_model_len})"
            )
        tokenizer = None if args.skip_tokenizer_init else Path(args.tokenizer or args.model).expanduser()
        return cls(
            args=args,
            folder=folder,
            tokenizer_folder=tokenizer,
            hf_config=hf_config,
            device=device,
            dtype=_dtype(args.dtype, hf_config, device),
            max_model_len=max_model_len,
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device: got {name!r}, expected auto, cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device: got {name!r}, and torch finds no CUDA device", hint="device='cpu' runs everywhere")
    return device


def _dtype(name: DtypeName, hf_config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    stored = hf_config.dtype if hf_config.dtype in _DTYPES.values() else torch.float32
    if device.type != "cpu" or stored is torch.float32 or _multiplies(stored):
        return stored
    _log.warning(
        "this CPU has no instructions for %s: the weights are held in float32, twice the memory; dtype='bfloat16' "
        "keeps them as they are, and matrix products become many times slower",
        str(stored).removeprefix("torch."),
    )
    return torch.float32


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices of `dtype` natively."""
    has = torch.cpu.get_capabilities()
    names = ("avx512_bf16", "amx_bf16", "bf16") if dtype is torch.bfloat16 else ("avx512_fp16", "amx_fp16", "fp16")
    return any(has.get(name, False) for name in names)


def _at_least(name: str, value: float, lowest: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < lowest:
        raise InputError(f"{name}: got {value!r}, expected at least {lowest}")


def _one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise InputError(f"{name}: got {value!r}, expected one of {', '.join(map(str, known))}")
