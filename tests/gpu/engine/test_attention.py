"""FlashAttention, our Triton kernels and SDPA on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.engine.attention.backend import make_backend
from moe_optimizer.inspection.vllm_installation import flash_attention_versions
from tests.gpu.engine.random_models import FLASH, NEEDS_FLASH, Recorder, generate, model_of, prompts

pytestmark = pytest.mark.gpu


def test_attention_on_a_gpu_is_flash_attention_where_there_is_one_else_triton(make_engine: Any) -> None:
    from moe_optimizer.engine.attention.triton_attention import TritonAttention

    layer = next(model_of(make_engine("dense")).attention_layers())
    assert (type(layer.backend) is TritonAttention) is not bool(flash_attention_versions())


class Beside:
    """SDPA, which keeps how far another backend is from it in each step, as a part of the largest output."""

    capturable = False

    def __init__(self, other: str) -> None:
        device = torch.device("cuda", 0)
        self.sdpa = make_backend("sdpa", device, 16)
        self.other = make_backend(other, device, 16)  # pyrefly: ignore[bad-argument-type]
        self.differences: list[float] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, batch: Any) -> Tensor:
        want, got = (each.attend(q, k, v, cache, batch) for each in (self.sdpa, self.other))
        self.differences.append(float((got - want).abs().max() / want.abs().max()))
        return want


@pytest.mark.parametrize("backend", ["triton", FLASH])
@pytest.mark.parametrize("name", ["dense", "dense-128"])
def test_attention_of_prompts_chunks_and_decodes_is_that_of_sdpa(name: str, backend: str, make_engine: Any) -> None:
    engine = make_engine(name, dtype="bfloat16", enforce_eager=True, max_num_batched_tokens=32)
    beside = Beside(backend)
    for layer in model_of(engine).attention_layers():
        layer.backend = beside
    generate(engine, prompts(16))
    # Both round each probability and the output to 8 bits.
    assert 0 < max(beside.differences) <= 2**-6


@NEEDS_FLASH
@pytest.mark.parametrize("name", ["dense", "dense-128"])
def test_flash_attention_in_a_graph_gives_what_it_gives_without(name: str, make_engine: Any) -> None:
    several, logits = prompts(11), []
    for eager in (False, True):
        recorder = Recorder()
        engine = make_engine(name, sampler=recorder, dtype="bfloat16", attention_backend="flash", enforce_eager=eager)
        generate(engine, several, max_tokens=2)
        logits.append(recorder.logits)
    graphed, eagerly = logits
    assert graphed.keys() == eagerly.keys()
    # A graph's bound of the lengths is another, so keys may be split otherwise: not the same bits.
    for key in graphed:
        assert (graphed[key] - eagerly[key]).abs().mean() <= 0.02 * eagerly[key].abs().mean()


def test_a_step_of_another_size_compiles_nothing_but_another_split(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda *, fn, **_: compiled.append(str(fn.name)) or False
    )
    engine = make_engine("dense", max_num_seqs=12, enforce_eager=True)
    for count in (1, 2, 3, 5, 8, 12):
        generate(engine, prompts(count), max_tokens=3)
    # A prompt's kernel, and a decode's for each number of parts: 1, 2, 4, 8 and 16.
    assert 0 < sum(name.endswith("_attend") for name in compiled) <= 6
