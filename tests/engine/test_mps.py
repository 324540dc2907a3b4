"""MPS cannot run here. What the engine asks torch for on it is recorded on a CPU, and looked up in torch's own table of
which device has which operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_optimizer.engine import LLM, SamplingParams
from moe_optimizer.engine.engine_args import EngineArgs, EngineConfig
from moe_optimizer.engine.layers.moe import MoE
from moe_optimizer.engine.model_runner import ModelRunner
from moe_optimizer.engine.out_of_memory import out_of_memory_explained
from moe_optimizer.errors import DoesNotFitError, InputError
from moe_optimizer.ops import _load

LACKING = {torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn}


class Recorder(TorchDispatchMode):
    """Keeps what is called, and with which dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(str(func))
        self.dtypes |= {each.dtype for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)}
        return result


def table() -> dict[str, str]:
    """torch's declaration of each of its operations, by name and overload."""
    torchgen = pytest.importorskip("torchgen")
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = path.read_text(encoding="utf-8").split("\n- func: ")[1:]
    return {entry.partition("(")[0]: entry for entry in entries}


def lacking_on_mps(names: Iterable[str], declared: dict[str, str]) -> list[str]:
    lacking = []
    for name in names:
        namespace, operation, overload = name.split(".") if name.count(".") == 2 else (*name.split("."), "default")
        if namespace != "aten":
            lacking.append(name)
            continue
        entry = declared[operation if overload == "default" else f"{operation}.{overload}"]
        if delegate := re.search(r"structured_delegate: (\S+)", entry):
            entry = declared[delegate[1]]
        if not ("dispatch:" not in entry or "Composite" in entry or re.search(r"\bMPS\b", entry)):
            lacking.append(name)
    return lacking


def test_an_operation_that_mps_lacks_is_told_from_one_that_it_has() -> None:
    names = ["aten.linalg_eig.default", "aten.mm.default", "mkldnn._linear_pointwise.default"]
    assert lacking_on_mps(names, table()) == [names[0], names[2]]


def generate(llm: LLM) -> None:
    """Prompts, chunks, decodes, every way to sample, samples of one prompt, blocks copied, preempted and swapped."""
    prompts = [list(range(start, start + 3 + 11 * number)) for number, start in enumerate((1, 5, 7, 20))]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"seed": 1, "n": 2}, {"top_k": 5, "top_p": 0.8, "min_p": 0.01},
        {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "min_tokens": 2, "logprobs": 3},
    ]  # fmt: skip
    params = [SamplingParams(**way, max_tokens=24, ignore_eos=True, detokenize=False) for way in ways]
    llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "mixtral", "olmoe-clipped"])
@pytest.mark.parametrize("backend", ["sdpa", "sdpa_padded"])
def test_the_engine_asks_for_nothing_that_mps_lacks(
    name: str, backend: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_load, "calls", lambda _name: None)  # as on MPS
    llm = LLM(
        str(tiny_model(name)), dtype="float16", device="cpu", skip_tokenizer_init=True, packed_weights=False,
        attention_backend=backend, num_gpu_blocks_override=6, max_num_batched_tokens=16, max_num_seqs=8,
        max_model_len=64, swap_space=1e-4,
    )  # fmt: skip
    runner = llm.llm_engine.executor
    assert isinstance(runner, ModelRunner)
    for module in runner.model.modules():
        if isinstance(module, MoE):
            # As on MPS, where there is no kernel: the same function of plain torch.
            module.fused = False
    with Recorder() as recorder:
        generate(llm)
    assert llm.llm_engine.scheduler.num_preemptions
    assert lacking_on_mps(recorder.names, table()) == []
    assert not recorder.dtypes & LACKING
    assert len(recorder.names) > 40


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="needs a machine without MPS")
@pytest.mark.parametrize("device", ["mps", "cuda", "cuda:7"])
def test_a_device_that_is_not_there_is_refused(device: str, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match=f"device: got '{device}'"):
        EngineConfig.resolve(EngineArgs(model=str(tiny_model("qwen3")), device=device))


def test_fp8_is_refused_on_mps(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(InputError, match="quantization"):
        EngineConfig.resolve(EngineArgs(model=str(tiny_model("qwen3_moe")), device="mps", quantization="fp8"))


def test_memory_that_is_used_up_is_explained() -> None:
    with pytest.raises(DoesNotFitError, match="out of memory"), out_of_memory_explained():
        # MPS raises no error of its own for it.
        raise RuntimeError("MPS backend out of memory (MPS allocated: 1.0 GiB, max allowed: 1.0 GiB).")
