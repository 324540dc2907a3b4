"""The CUDA experts classes inside vLLM's own modular kernel, on the CPU: who computes what, and what comes out.

The compiled kernels are replaced by their reference and vLLM's Triton experts by a stand-in; tests/gpu has the real
ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.vllm_plugin.session import PluginSession
from tests.vllm.cuda_class import RANGES, Kernels, activated, modular_kernel, offered, stand_in_kernels
from tests.vllm.expert_layers import EXPERTS, HIDDEN, PASS, TOP_K, WIDTH

torch = pytest.importorskip("torch")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return stand_in_kernels(monkeypatch)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    return activated(tmp_path, monkeypatch, {"bf16": RANGES, "fp8_block": RANGES})


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


@pytest.mark.parametrize("form", ["block", "channel", "tensor"])
def test_fp8_weights_are_read_with_their_scales_and_vllms_kernel_gets_quantised_activations(
    kernels: Kernels, weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    from moe_optimizer.vllm_plugin.experts import fp8_cuda as fp8_experts_cuda

    session = activated(tmp_path, monkeypatch, {f"fp8_{form}": RANGES})
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
        "tensor": ((EXPERTS,), (EXPERTS,)),
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


def test_a_kernel_counts_as_run_only_once_it_has_run(
    kernel: Any, kernels: Kernels, weights: Any, session: PluginSession
) -> None:
    forward(kernel, weights, 6)
    proof = session.proof.passes[PASS]
    calls = proof.calls
    kernels.failure = RuntimeError("no launch")
    with pytest.raises(RuntimeError, match="no launch"):
        forward(kernel, weights, 6)
    assert proof.calls == calls


def test_a_forward_that_vllm_does_not_finish_does_not_count_and_the_next_one_is_written(
    kernel: Any, kernels: Kernels, weights: Any, session: PluginSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a later vLLM took the experts' own buffer as the layer's output."""
    experts = kernel.fused_experts
    finalize = kernel.impl.prepare_finalize.finalize
    forward(kernel, weights, 6)
    proof = session.proof.passes[PASS]

    def unfinished(output: Any, fused_out: Any, *rest: Any, **named: Any) -> None:
        output.copy_(fused_out)

    monkeypatch.setattr(kernel.impl.prepare_finalize, "finalize", unfinished)
    calls = proof.calls
    forward(kernel, weights, 6)
    assert proof.calls == calls
    torch.testing.assert_close(*forward(kernel, weights, 6))
    assert proof.calls == calls + 1
    assert "not finish" in proof.why_not
    monkeypatch.setattr(kernel.impl.prepare_finalize, "finalize", finalize)
    torch.testing.assert_close(*forward(kernel, weights, 6))
    assert experts._output.pending is None or experts._output.left_out


def test_an_output_that_the_kernels_cannot_write_in_place_gets_a_copy(
    kernel: Any, kernels: Kernels, weights: Any
) -> None:
    experts = kernel.fused_experts
    forward(kernel, weights, 6)
    for output in (torch.empty(HIDDEN, 6, dtype=torch.bfloat16).T, torch.empty(6, HIDDEN)):
        buffer = torch.empty(6, HIDDEN, dtype=torch.bfloat16)
        experts._output.pending = lambda out: out.fill_(3.0)
        experts._output.apply(output, buffer, None, None, False)
        assert bool((output == 3).all())


def test_a_call_of_another_shape_is_computed_by_vllm_with_the_reason(
    kernel: Any, kernels: Kernels, weights: Any, session: PluginSession
) -> None:
    experts = kernel.fused_experts
    forward(kernel, weights, 6)
    kernels.runs.clear()
    x = torch.randn(2, HIDDEN).bfloat16()
    got = torch.empty_like(x)
    ones, ids = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32)
    arguments = {
        "output": got, "hidden_states": x, "w1": weights[0], "w2": weights[1], "topk_weights": ones, "topk_ids": ids,
        "activation": None, "global_num_experts": EXPERTS, "expert_map": None, "a1q_scale": None, "a2_scale": None,
        "workspace13": None, "workspace2": None, "expert_tokens_meta": None, "apply_router_weight_on_input": False,
    }  # fmt: skip
    seen: list[dict[str, Any]] = []
    experts.stock.apply = lambda **named: seen.append(named)
    experts.apply(**arguments, of_a_later_version=1)
    assert [call["of_a_later_version"] for call in seen] == [1]
    assert kernels.runs == []
    assert "of_a_later_version" in session.proof.passes[PASS].why_not


def test_rows_that_are_padding_are_zero_whatever_the_kernel_of_their_number(kernel: Any, weights: Any) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    for tokens in (1, 2, 6):
        x = torch.randn(tokens, HIDDEN).bfloat16()
        # As vLLM marks all rows while it captures a graph.
        ids, zeros = torch.full((tokens, TOP_K), -1, dtype=torch.int32), torch.zeros(tokens, TOP_K)
        got = kernel.apply(
            x, *weights, zeros, ids, MoEActivation.SILU, EXPERTS, None, apply_router_weight_on_input=False
        )
        assert bool((got == 0).all())
