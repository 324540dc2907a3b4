"""The CUDA experts classes inside vLLM's own modular kernel, on the CPU: who computes what, and what comes out.

The compiled kernels are replaced by their reference and vLLM's Triton experts by a stand-in; tests/gpu has the real
ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.vllm_plugin.session import PluginSession
from tests.vllm.cuda_class import RANGES, activated, offered
from tests.vllm.expert_layers import EXPERTS, HIDDEN, PASS, TOP_K, WIDTH, moe_config

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.vllm


class Kernels:
    """Stand-ins for the compiled kernels: compute, and note what was asked."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int]] = []
        self.wrong: str = ""
        """A variant that computes twice the result."""

    def run(self, problem: Any, variant: Any) -> None:
        from moe_optimizer.ops.reference import fused_experts

        self.runs.append((str(variant), problem.x.shape[0]))
        out = fused_experts(
            problem.x, problem.w13, problem.w2, problem.topk_weights, problem.topk_ids,
            expert_map=problem.expert_map, w13_scale=problem.w13_scale, w2_scale=problem.w2_scale,
        )  # fmt: skip
        problem.out.copy_(out * (2 if str(variant) == self.wrong else 1))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    from moe_optimizer.vllm_plugin.experts import cuda_layer

    fake = Kernels()
    monkeypatch.setattr(cuda_layer.cuda_dispatch, "run", fake.run)
    monkeypatch.setattr(cuda_layer.cuda_dispatch, "prepare_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return fake


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    return activated(tmp_path, monkeypatch, {"bf16": RANGES, "fp8_block": RANGES})


def modular_kernel(experts_class: Any, quant_config: Any, **changes: Any) -> Any:
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import MoEPrepareAndFinalizeNoDPEPModular

    config = moe_config(in_dtype=torch.bfloat16, **changes)
    return mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts_class(config, quant_config))


@pytest.fixture
def kernel(kernels: Kernels, session: PluginSession) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    return modular_kernel(offered("cuda", "MoeOptimizerCudaExperts"), FusedMoEQuantConfig.make())


@pytest.fixture
def weights() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    w13 = (torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) * 0.1).bfloat16()
    return w13, (torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) * 0.1).bfloat16()


def forward(
    kernel: Any, weights: tuple[Any, Any], tokens: int, *, expert_map: Any = None, scales: Any = (None, None)
) -> tuple[Any, Any]:
    """Return vLLM's result with this kernel, and the reference's."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from moe_optimizer.ops.reference import fused_experts

    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    num_experts = EXPERTS if expert_map is None else expert_map.shape[0]
    topk_weights, ids = torch.randn(tokens, num_experts, generator=generator).softmax(-1).topk(TOP_K)
    got = kernel.apply(
        x, *weights, topk_weights, ids.int(), MoEActivation.SILU, num_experts, expert_map,
        apply_router_weight_on_input=False,
    )  # fmt: skip
    want = fused_experts(
        x, *weights, topk_weights, ids.int(), expert_map=expert_map, w13_scale=scales[0], w2_scale=scales[1]
    )
    return got, want


def test_a_routing_weight_that_vllm_multiplied_the_input_with_is_not_applied_again(
    kernel: Any, weights: tuple[Any, Any]
) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from moe_optimizer.ops.reference import fused_experts

    x = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
    topk_weights, ids = torch.tensor([[0.25], [0.5]]), torch.tensor([[3], [1]], dtype=torch.int32)
    got = kernel.apply(
        x, *weights, topk_weights, ids, MoEActivation.SILU, EXPERTS, None, apply_router_weight_on_input=True
    )
    want = fused_experts(x * topk_weights.bfloat16(), *weights, torch.ones_like(topk_weights), ids)
    torch.testing.assert_close(got, want)


def test_every_number_of_tokens_goes_where_the_plan_says_and_is_right(
    kernel: Any, kernels: Kernels, weights: Any, session: PluginSession
) -> None:
    expected = ["", *2 * ["direct"], *2 * ["stock"], *4 * ["grouped-bf16-n16"], *3 * ["stock"]]
    for tokens in range(1, 12):
        kernels.runs.clear()
        got, want = forward(kernel, weights, tokens)
        torch.testing.assert_close(got, want)
        if tokens > 1:  # the first forward also runs the check
            assert kernels.runs == [(use, tokens) for use in (expected[tokens],) if use != "stock"]
    (layer,) = session.proof.passes[PASS].layers
    assert layer.calls_by_kernel == {"direct": 2, "stock": 5, "grouped-bf16-n16": 4}
    assert (layer.calls, layer.tokens) == (6, 1 + 2 + 5 + 6 + 7 + 8)
    assert session.proof.passes[PASS].ran


def test_each_planned_kernel_is_tried_on_the_layer_before_its_first_forward(
    kernel: Any, kernels: Kernels, weights: Any, session: PluginSession
) -> None:
    forward(kernel, weights, 3)
    # Both ends of each of its ranges.
    assert kernels.runs == [("direct", 1), ("direct", 2), ("grouped-bf16-n16", 5), ("grouped-bf16-n16", 8)]
    (layer,) = session.proof.passes[PASS].layers
    assert layer.self_check_error is not None
    assert layer.self_check_error <= 1


def test_a_wrong_kernel_leaves_the_layer_to_vllm_with_the_reason(
    kernel: Any, kernels: Kernels, weights: Any, session: PluginSession
) -> None:
    kernels.wrong = "grouped-bf16-n16"
    for tokens in (1, 3, 6):
        torch.testing.assert_close(*forward(kernel, weights, tokens))
    proof = session.proof.passes[PASS]
    assert "self-check failed" in proof.why_not
    assert "grouped-bf16-n16" in proof.why_not
    assert proof.layers == ()
    assert not proof.ran


def test_a_wrong_kernel_of_a_required_pass_ends_the_start(
    kernels: Kernels, weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    from moe_optimizer.errors import RequiredNotAppliedError

    activated(tmp_path, monkeypatch, {"bf16": RANGES}, required=True)
    kernels.wrong = "direct"
    kernel = modular_kernel(offered("cuda", "MoeOptimizerCudaExperts"), FusedMoEQuantConfig.make())
    with pytest.raises(RequiredNotAppliedError, match="self-check failed"):
        forward(kernel, weights, 1)


def test_a_first_forward_inside_a_graph_capture_is_left_to_vllm(
    kernel: Any, kernels: Kernels, weights: Any, session: PluginSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    torch.testing.assert_close(*forward(kernel, weights, 1))
    assert kernels.runs == []
    assert "CUDA graph" in session.proof.passes[PASS].why_not


def test_with_an_expert_map_only_local_experts_are_computed(kernel: Any, weights: Any) -> None:
    expert_map = torch.tensor([index // 2 if index % 2 else -1 for index in range(2 * EXPERTS)], dtype=torch.int32)
    for tokens in (1, 3, 6):
        torch.testing.assert_close(*forward(kernel, weights, tokens, expert_map=expert_map))


def test_activations_that_the_kernels_cannot_read_in_place_are_left_to_vllm(
    kernel: Any, kernels: Kernels, weights: Any
) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from moe_optimizer.vllm_plugin.experts.cuda_layer import CudaLayer

    forward(kernel, weights, 1)
    layer = kernel.fused_experts._layer
    assert isinstance(layer, CudaLayer)
    rows = torch.zeros(4 * HIDDEN + 1, dtype=torch.bfloat16)
    assert layer.covers(rows[: 4 * HIDDEN].view(4, HIDDEN))
    assert not layer.covers(rows[1:].view(4, HIDDEN))
    assert not layer.covers(rows[: 4 * HIDDEN].view(4, HIDDEN)[:, ::2])

    def forward_of(x: Any) -> None:
        ones, ids = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32)
        kernel.apply(x, *weights, ones, ids, MoEActivation.SILU, EXPERTS, None, apply_router_weight_on_input=False)

    kernels.runs.clear()
    forward_of(rows[1 : 1 + 2 * HIDDEN].view(2, HIDDEN))
    assert kernels.runs == []
    forward_of(rows[: 2 * HIDDEN].view(2, HIDDEN))
    assert kernels.runs == [("direct", 2)]


def test_the_workspace_is_vllms_own_at_every_number_of_tokens(kernel: Any) -> None:
    experts = kernel.fused_experts
    for tokens in (1, 3, 6, 100):
        sizes = (tokens, 2 * WIDTH, HIDDEN, TOP_K, EXPERTS, EXPERTS, None, None)
        assert experts.workspace_shapes(*sizes) == experts.stock.workspace_shapes(*sizes)


@pytest.mark.parametrize("form", ["block", "channel", "expert"])
def test_fp8_weights_are_read_with_their_scales_and_vllms_kernel_gets_quantised_activations(
    kernels: Kernels, weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    from moe_optimizer.vllm_plugin.experts import fp8_cuda as fp8_experts_cuda

    kind = "fp8_block" if form == "block" else "fp8_channel"
    session = activated(tmp_path, monkeypatch, {kind: RANGES})
    asked: list[tuple[Any, ...]] = []

    def quantize(x: Any, *rest: Any) -> tuple[Any, Any]:
        asked.append(rest)
        return x, torch.ones(1)

    monkeypatch.setattr(fp8_experts_cuda, "moe_kernel_quantize_input", quantize)
    fp8 = tuple(weight.to(torch.float8_e4m3fn) for weight in weights)
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "block": ((EXPERTS, 2, 1), (EXPERTS, 1, 1)),
        "channel": ((EXPERTS, 2 * WIDTH, 1), (EXPERTS, HIDDEN, 1)),
        "expert": ((EXPERTS,), (EXPERTS,)),
    }[form]
    scales = [torch.rand(shape, generator=generator) + 0.5 for shape in shapes]
    config = fp8_w8a8_moe_quant_config(*scales, block_shape=[128, 128] if form == "block" else None)
    kernel = modular_kernel(offered("fp8_cuda", "MoeOptimizerFp8CudaExperts"), config)
    if form == "block":
        plain = scales
    else:
        rows = (2 * WIDTH, HIDDEN)
        by_expert = [scale.reshape(EXPERTS, -1) for scale in scales]
        plain = [scale.expand(EXPERTS, n).contiguous() for scale, n in zip(by_expert, rows, strict=True)]
    torch.testing.assert_close(*forward(kernel, fp8, 1, scales=plain))
    torch.testing.assert_close(*forward(kernel, fp8, 7, scales=plain))
    assert asked == []
    kernel.fused_experts.stock.quant_config = fp8_w8a8_moe_quant_config(*plain)
    torch.testing.assert_close(*forward(kernel, fp8, 3, scales=plain))
    assert asked == [(None, config.quant_dtype, config.per_act_token_quant, config.block_shape)]
    (layer,) = session.proof.passes[PASS].layers
    assert (layer.weight_format, layer.weight_dtype) == ("fp8", "float8_e4m3fn")
