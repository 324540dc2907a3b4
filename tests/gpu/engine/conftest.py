"""The embedded engine on any CUDA GPU: only the expert kernels need Hopper and the build.

    python -m pytest -q tests/gpu/engine

Needs torch for CUDA with Triton, and for the tests that say so the compiled kernels (bash build.sh), transformers, or
FlashAttention: flash-attn, or a vLLM for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optimizer.engine import LLMEngine
from moe_optimizer.engine.engine_args import EngineArgs, EngineConfig
from tests.gpu.engine.random_models import DTYPES, MODELS, model_of


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    """In place of the folder's fixture: any CUDA GPU will do, and only the expert kernels need the build."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: torch sees none")
    yield
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def exact_products() -> None:
    """float32 products in float32: the bound is on what else differs."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., LLMEngine]:
    """Return a function that makes an engine with random weights, equal for equal names; transformers is not needed."""

    def resolve(args: EngineArgs) -> EngineConfig:
        values = MODELS[args.model]
        parameters = {"rope_type": "default", "rope_theta": 1e4}
        hf_config: Any = SimpleNamespace(**values, rope_parameters=parameters, eos_token_id=None)
        return EngineConfig(
            args=args, folder=tmp_path, tokenizer_folder=None, hf_config=hf_config, device=torch.device("cuda", 0),
            dtype=DTYPES[args.dtype], max_model_len=values["max_position_embeddings"],
            cuda_graphs=not args.enforce_eager, compile=bool(args.compile_layers),
            async_scheduling=args.async_scheduling is not False,
        )  # fmt: skip

    monkeypatch.setattr(EngineConfig, "resolve", staticmethod(resolve))

    def make(name: str, *, sampler: Any = None, **arguments: Any) -> LLMEngine:
        values: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 16, "num_gpu_blocks_override": 256, **arguments}
        engine = LLMEngine(
            EngineArgs(model=name, load_format="dummy", skip_tokenizer_init=True, **values), sampler=sampler
        )
        generator = torch.Generator().manual_seed(3)
        for parameter in model_of(engine).parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            drawn = drawn.abs() + 0.5 if parameter.dim() == 1 else 2 * drawn
            # In bfloat16 in every run: the runs then have the same weights.
            parameter.data.copy_(drawn.bfloat16())
        return engine

    return make
