"""The plugin's CUDA experts classes inside vLLM's own modular kernel, with the real kernels of both sides.

Needs a vLLM for CUDA beside a Hopper GPU; tests/vllm has the same classes on the CPU with stand-ins.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optimizer.ops import reference
from moe_optimizer.ops.cuda_variants import MoeSizes, candidate_variants
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.specs.kernel_speeds import TokenRange, kernel_for, rounds_activations
from tests.plugin_state import own_session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

# The bundled model's layer and one of Qwen3-30B-A3B.
SHAPES = [(16, 128, 128, 4), (128, 2048, 768, 8)]
TOKENS = (1, 2, 5, 8, 12, 30, 64, 200)


def ranges(experts: int, hidden: int, width: int, top_k: int, weight_bits: int) -> tuple[TokenRange, ...]:
    """A direct and two grouped kernels of ours, and vLLM's in between."""
    found = []
    for tokens, index in ((8, 0), (16, -1), (64, -1)):
        sizes = MoeSizes(num_tokens=tokens, top_k=top_k, num_experts=experts, hidden_size=hidden,
                         intermediate_size=width, weight_bits=weight_bits)  # fmt: skip
        found.append(TokenRange(up_to=tokens, use=str(candidate_variants(sizes)[index])))
    return (*found[:2], TokenRange(up_to=40, use="stock"), found[2])


@pytest.fixture(scope="module", autouse=True)
def workspace() -> None:
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cuda"))


def activated(run_dir: Path, monkeypatch: pytest.MonkeyPatch, dispatch: dict[str, tuple[TokenRange, ...]]) -> Any:
    """A plan that has our kernels on with this dispatch is this process's own."""
    from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
    from moe_optimizer.vllm_plugin import session as sessions

    @dataclasses.dataclass
    class Plan:
        plugin_decisions: tuple[Decision, ...]
        digest: str = ""

    decision = Decision(
        pass_name="flash_dmoe", wish=Wish.ON, wish_origin="test", status=Status.ON, value="", reason="",
        applier=Applier.PLUGIN, params=FlashDmoeParams(kernel="cuda", dispatch=dispatch), required=True,
    )  # fmt: skip
    own_session(monkeypatch)
    plan: Any = Plan((decision,))
    return sessions.start_session(sessions.PluginSession(run_dir=run_dir, plan=plan))


@dataclasses.dataclass
class Layer:
    """One layer, its kernel as vLLM builds it, and what is true of it."""

    kernel: Any
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    top_k: int
    num_global: int
    expert_map: torch.Tensor | None

    def inputs(self, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = torch.Generator(device="cuda").manual_seed(1000 * seed + tokens)
        x = torch.randn(tokens, self.w13.shape[2], device="cuda", generator=g).bfloat16()
        logits = torch.randn(tokens, self.num_global, device="cuda", generator=g)
        weights, ids = logits.softmax(-1).topk(self.top_k)
        return x, weights, ids.int()

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        return self.kernel.apply(
            x, self.w13, self.w2, weights, ids, MoEActivation.SILU, self.num_global, self.expert_map,
            apply_router_weight_on_input=False,
        )  # fmt: skip

    def assert_right(self, got: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor,
                     *, rounded: bool) -> None:  # fmt: skip
        options: dict[str, Any] = {
            "expert_map": self.expert_map, "w13_scale": self.w13_scale, "w2_scale": self.w2_scale,
        }  # fmt: skip
        want = reference.fused_experts(x.float(), *_dense(self), weights, ids, expert_map=self.expert_map)
        in_bf16 = reference.fused_experts(
            x, self.w13, self.w2, weights, ids, **options, compute_dtype=torch.bfloat16
        ).float()
        error, torch_error = (got.float() - want).norm(), (in_bf16 - want).norm()
        # To E4M3's 4 significant bits, as vLLM's FP8 kernel does.
        bound = 0.06 * want.norm() if rounded and self.w13_scale is not None else 2 * torch_error + 1e-3 * want.norm()
        assert error <= bound, (error / want.norm(), torch_error / want.norm())


def _dense(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    w13, w2 = (
        torch.stack([reference.dequantize(weight, scale, expert, torch.float32) for expert in range(weight.shape[0])])
        for weight, scale in ((layer.w13, layer.w13_scale), (layer.w2, layer.w2_scale))
    )
    return w13, w2


def make_layer(shape: tuple[int, int, int, int], *, fp8: bool, apart: bool = False) -> Layer:
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular

    from moe_optimizer.vllm_plugin.experts.cuda import MoeOptimizerCudaExperts
    from moe_optimizer.vllm_plugin.experts.fp8_cuda import MoeOptimizerFp8CudaExperts

    experts, hidden, width, top_k = shape
    g = torch.Generator(device="cuda").manual_seed(1)
    w13 = (torch.randn(experts, 2 * width, hidden, device="cuda", generator=g) * hidden**-0.5).bfloat16()
    w2 = (torch.randn(experts, hidden, width, device="cuda", generator=g) * width**-0.5).bfloat16()
    w13_scale = w2_scale = None
    config: Any = FUSED_MOE_UNQUANTIZED_CONFIG
    base: Any = MoeOptimizerCudaExperts
    if fp8:
        w13, w2 = ((weight.float() * 64).to(torch.float8_e4m3fn) for weight in (w13, w2))
        w13_scale = (torch.rand(experts, 2 * width // 128, hidden // 128, device="cuda", generator=g) + 0.5) / 64
        w2_scale = (torch.rand(experts, hidden // 128, width // 128, device="cuda", generator=g) + 0.5) / 64
        config = fp8_w8a8_moe_quant_config(w13_scale, w2_scale, block_shape=[128, 128])
        base = MoeOptimizerFp8CudaExperts
    expert_map, num_global = None, experts
    if apart:
        num_global = 2 * experts
        local = torch.arange(num_global, device="cuda")
        expert_map = torch.where(local % 2 == 1, local // 2, -1).int()
    cls = type("Offered", (base,), {"stock_classes": (TritonExperts,)})
    kernel = mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), cls(_moe_config(shape, num_global), config))
    return Layer(kernel, w13, w2, w13_scale, w2_scale, top_k, num_global, expert_map)


def _moe_config(shape: tuple[int, int, int, int], num_global: int) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    experts, hidden, width, top_k = shape
    return FusedMoEConfig(
        num_experts=num_global, experts_per_token=top_k, hidden_dim=hidden, intermediate_size=width,
        num_local_experts=experts, num_logical_experts=num_global, activation=MoEActivation.SILU, device="cuda",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(), in_dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("apart", [False, True], ids=["all-experts", "expert-map"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=["tiny", "qwen3"])
def test_every_number_of_tokens_is_right_and_goes_where_the_plan_says(shape, fp8, apart, tmp_path, monkeypatch):
    experts, hidden, width, top_k = shape
    planned = ranges(experts, hidden, width, top_k, 8 if fp8 else 16)
    session = activated(tmp_path, monkeypatch, {"fp8_block" if fp8 else "bf16": planned})
    layer = make_layer(shape, fp8=fp8, apart=apart)
    expected: dict[str, int] = {}
    for tokens in TOKENS:
        use = kernel_for(planned, tokens)
        expected[use] = expected.get(use, 0) + 1
        inputs = layer.inputs(tokens)
        layer.assert_right(layer.forward(*inputs), *inputs, rounded=use == "stock" or rounds_activations(use))
    (entry,) = session.proof.passes["flash_dmoe"].layers
    assert entry.calls_by_kernel == expected
    assert entry.self_check_error is not None
    assert entry.self_check_error <= 1
    assert session.proof.passes["flash_dmoe"].why_not == ""


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 8, 16, 30, 64])
def test_a_captured_graph_replays_with_new_inputs_to_the_bits_of_the_eager_run(tokens, fp8, tmp_path, monkeypatch):
    shape = SHAPES[0]
    activated(tmp_path, monkeypatch, {"fp8_block" if fp8 else "bf16": ranges(*shape[:1], *shape[1:], 8 if fp8 else 16)})
    layer = make_layer(shape, fp8=fp8)
    x, weights, ids = layer.inputs(tokens)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer.forward(x, weights, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = layer.forward(x, weights, ids)
    for seed in (1, 2, 3):
        fresh = layer.inputs(tokens, seed)
        for target, source in zip((x, weights, ids), fresh, strict=True):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, layer.forward(*fresh))
