"""`fused_experts` and `flash_dmoe` on CUDA tensors run our kernels without being asked; here on their emulation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.ops import _load, cuda_dispatch, flash_dmoe, fused_experts, measured_variant, why_reference
from moe_optimizer.ops.int4 import Int4Weight
from moe_optimizer.ops.topk_router import topk_router
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, LayerShape, SpeedTables, TokenSpeeds
from tests.kernel_emulator import Case, Emulator, assert_close, make_case


class CudaTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))  # pyrefly: ignore[bad-assignment]
    is_cuda = property(lambda self: True)  # pyrefly: ignore[bad-assignment, bad-override]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(cls) if isinstance(result, Tensor) else result


class FakeHopper:
    """A GPU of compute capability 9.0 whose kernels are the emulation; remembers which ran."""

    def __init__(self, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capability: tuple[int, int] = (9, 0)
        self.ran: list[tuple[str, int]] = []
        module = SimpleNamespace(
            cuda_layout=emulator.module.cuda_layout, cuda_run=lambda *arguments: self._run(emulator, arguments)
        )
        monkeypatch.setattr(_load, "import_kernels", lambda: (module, ""))
        # What it returned before is remembered, of the module that is really there.
        monkeypatch.setattr(_load, "calls", lambda name: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "fake Hopper")
        properties = SimpleNamespace(multi_processor_count=2)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1))
        counter = torch.zeros((), dtype=torch.int32)
        # The real counters are kept per device for the life of the process.
        monkeypatch.setattr(cuda_dispatch, "zeroed_words", lambda device, stream: counter)

    def _run(self, emulator: Emulator, arguments: tuple[Any, ...]) -> None:
        variant = arguments[3]
        self.ran.append(("direct" if variant["direct"] else "grouped", variant["tile_tokens"]))
        emulator.module.cuda_run(*arguments)


def _made_on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The factory, with CPU tensors that say they are on the GPU in place of CUDA tensors."""

    def make(*size: Any, device: Any = None, **options: Any) -> Tensor:
        tensor = factory(*size, **options)
        return tensor.as_subclass(CudaTensor) if torch.device(device or "cpu").type == "cuda" else tensor

    return make


@pytest.fixture
def gpu(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> FakeHopper:
    """The mock in place of a GPU."""
    measured_variant._rows.cache_clear()
    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, _made_on_cpu(getattr(torch, name)))
    return FakeHopper(emulator, monkeypatch)


def on_gpu(case: Case) -> dict[str, Any]:
    """The case's arguments as CUDA tensors."""
    problem = case.problem
    names = ("x", "w13", "w2", "topk_weights", "topk_ids", "w13_scale", "w2_scale", "w13_zero", "w2_zero")
    tensors = {name: getattr(problem, name) for name in names}
    found: dict[str, Any] = {
        name: None if value is None else value.as_subclass(CudaTensor) for name, value in tensors.items()
    }
    zeros = {name: found.pop(f"{name}_zero") for name in ("w13", "w2")}
    if problem.int4:
        found |= {name: Int4Weight(found[name], found.pop(f"{name}_scale"), zeros[name]) for name in zeros}
    return found


def run(case: Case) -> Tensor:
    """`fused_experts` of the case, as any caller calls it."""
    return fused_experts(**on_gpu(case)).as_subclass(Tensor)


@pytest.mark.parametrize(("tokens", "kernel"), [(3, "direct"), (70, "grouped")])
def test_fused_experts_picks_a_kernel_by_sizes_where_nothing_was_measured(gpu: FakeHopper, tokens: int, kernel: str):
    case = make_case(tokens, 2, 4, 64, 32)
    out = run(case)
    assert [name for name, _ in gpu.ran] == [kernel]
    assert_close(case, out)


def test_flash_dmoe_runs_the_gate_and_a_kernel(gpu: FakeHopper):
    case = make_case(3, 2, 4, 64, 32)
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    weights, ids = topk_router(logits, top_k=2)
    arguments = on_gpu(case)
    out = flash_dmoe(arguments["x"], logits.as_subclass(CudaTensor), arguments["w13"], arguments["w2"], top_k=2)
    assert [name for name, _ in gpu.ran] == ["direct"]
    assert_close(Case(replace(case.problem, topk_weights=weights, topk_ids=ids)), out.as_subclass(Tensor))


def measured(tokens: int, times: dict[str, float], weights: str = "bf16", hash: str = "h") -> KernelSpeeds:  # noqa: A002
    shape = LayerShape(hidden_size=64, intermediate_size=32, num_experts=4, num_global_experts=4, top_k=2)
    row = TokenSpeeds(tokens=tokens, stock_us=1.0, ours_us=times)
    return KernelSpeeds(device="fake Hopper", weights=weights, shape=shape, kernel_hash=hash, vllm="1", driver="1",
                        rows=(row,), source="here")  # fmt: skip


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("tokens", "kernel"), [(3, "direct"), (70, "grouped")])
def test_int4_weights_run_their_own_kernels(gpu: FakeHopper, tokens: int, kernel: str, zero_points: bool):
    case = make_case(tokens, 2, 4, 64, 32, int4=32, zero_points=zero_points)
    out = run(case)
    assert [name for name, _ in gpu.ran] == [kernel]
    assert_close(case, out)


def test_int4_scales_in_fp16_run_in_plain_torch(gpu: FakeHopper):
    case = make_case(3, 2, 4, 64, 32, int4=32)
    assert case.problem.w13_scale is not None
    assert case.problem.w2_scale is not None
    half = {"w13_scale": case.problem.w13_scale.half(), "w2_scale": case.problem.w2_scale.half()}
    out = run(Case(replace(case.problem, **half)))
    assert gpu.ran == []
    assert_close(case, out)


# Up to 8 tokens were measured: the fastest runs, but none that rounds the activations. Above: by sizes.
@pytest.mark.parametrize(
    ("tokens", "fp8", "table", "kernel", "tile"),
    [
        (3, None, measured(8, {"direct": 2.0, "grouped-bf16-n32": 1.0}), "grouped", 32),
        (9, None, measured(8, {"direct": 2.0, "grouped-bf16-n32": 1.0}), "direct", None),
        (3, None, measured(8, {"direct": 2.0, "grouped-bf16-n32": 1.0}, hash="another"), "direct", None),
        (3, "block", measured(8, {"direct": 2.0, "grouped-fp8-n32": 1.0}, "fp8_block"), "direct", None),
        (3, "channel", measured(8, {"grouped-fp8_weights-n64": 1.0}, "fp8_channel"), "grouped", 64),
        (3, "int4", measured(8, {"grouped-int4_weights-n64": 1.0}, "int4_g32"), "grouped", 64),
        (3, "int4", measured(8, {"grouped-mxfp4_weights-n64": 1.0}, "mxfp4"), "direct", None),
    ],
    ids=["fastest", "above the table", "other kernels", "activations stay", "per channel", "INT4", "MXFP4's table"],
)
def test_the_fastest_measured_kernel_is_the_default(
    gpu: FakeHopper, monkeypatch: pytest.MonkeyPatch, tokens, fp8, table: KernelSpeeds, kernel: str, tile: int | None
):
    monkeypatch.setattr(measured_variant, "read_kernel_speeds", lambda: SpeedTables(tables=(table,)))
    monkeypatch.setattr(measured_variant, "read_kernel_inventory", lambda: SimpleNamespace(cuda_sources="h"))
    case = make_case(tokens, 2, 4, 64, 32, fp8=fp8 if fp8 != "int4" else None, int4=32 if fp8 == "int4" else None)
    out = run(case)
    [(name, tile_tokens)] = gpu.ran
    assert name == kernel
    assert tile in {None, tile_tokens}
    assert_close(case, out)


def test_another_gpu_runs_the_reference_and_why_reference_names_it(gpu: FakeHopper):
    gpu.capability = (10, 0)
    case = make_case(3, 2, 4, 64, 32)
    arguments = on_gpu(case)
    reason = why_reference(arguments["x"], arguments["w13"], arguments["w2"], arguments["topk_ids"])
    assert reason is not None
    assert "sm_100" in reason
    assert_close(case, run(case))
    assert gpu.ran == []


@pytest.mark.parametrize(
    ("module", "reason"), [(None, "kernels not built"), (SimpleNamespace(), "built without CUDA kernels")]
)
def test_without_cuda_kernels_the_reference_runs_and_why_reference_says_so(gpu, monkeypatch, module, reason):
    monkeypatch.setattr(_load, "import_kernels", lambda: (module, "" if module else "kernels not built"))
    case = make_case(3, 2, 4, 64, 32)
    arguments = on_gpu(case)
    why_not = why_reference(arguments["x"], arguments["w13"], arguments["w2"], arguments["topk_ids"])
    assert (why_not or "").startswith(reason)
    assert_close(case, run(case))
    assert gpu.ran == []


def test_float16_runs_the_reference(gpu: FakeHopper):
    case = make_case(3, 2, 4, 64, 32)
    half: dict[str, Any] = {name: value.half() if value is not None and value.dtype == torch.bfloat16 else value
            for name, value in on_gpu(case).items()}  # fmt: skip
    out = fused_experts(**half).as_subclass(Tensor)
    torch.testing.assert_close(out.float(), case.reference().float(), rtol=0.05, atol=0.05)
    assert gpu.ran == []
