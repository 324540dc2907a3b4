"""What the canary sees through vLLM's own kernel object, on FP8 experts with a scale each.

The compiled CUDA kernels are replaced by their reference; a graph is replaced by a function that runs again what was
captured, on what its inputs hold then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.specs.kernel_speeds import TokenRange
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.vllm.cuda_class import Kernels, activated, modular_kernel, offered, stand_in_kernels
from tests.vllm.expert_layers import EXPERTS, HIDDEN, PASS, WIDTH

torch = pytest.importorskip("torch")

RANGES = (
    TokenRange(up_to=2, use="direct"),
    TokenRange(up_to=8, use="stock"),
    TokenRange(up_to=512, use="grouped-bf16-n16"),
)
LARGEST = 300


@dataclasses.dataclass
class Server:
    """A loaded model of one layer, whose experts have run once."""

    session: PluginSession
    kernels: Kernels
    model: Any

    @property
    def layer(self) -> Any:
        return self.model[0]

    @property
    def canary(self) -> str:
        return self.session.proof.passes[PASS].canary

    def check(self, *, graphs: int = 0) -> None:
        from moe_optimizer.vllm_plugin.experts.canary import check_model

        check_model(self.session, self.model, when="before ready", largest=LARGEST, graphs=graphs)

    def forward(self, tokens: int = 12) -> Any:
        """Return what the layer gives for inputs that are the same every time."""
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
        topk_weights, ids = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(4)
        layer = self.layer
        return layer.quant_method.moe_kernel.apply(
            x, layer.w13_weight, layer.w2_weight, topk_weights, ids.int(), layer.activation, EXPERTS, None, False
        )

    def experts_made_anew(self) -> None:
        """As vLLM does for FP8 layers after it has processed new weights."""
        self.layer.quant_method.moe_kernel = fp8_kernel(
            self.layer.w13_weight_scale.clone(), self.layer.w2_weight_scale.clone()
        )


def fp8_kernel(*scales: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    return modular_kernel(offered("fp8_cuda", "MoeOptimizerFp8CudaExperts"), fp8_w8a8_moe_quant_config(*scales))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    kernels = stand_in_kernels(monkeypatch)
    session = activated(tmp_path, monkeypatch, {"fp8_tensor": RANGES})
    generator = torch.Generator().manual_seed(3)
    layer: Any = torch.nn.Module()
    tensors = {
        "w13_weight": torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator).to(torch.float8_e4m3fn),
        "w2_weight": torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator).to(torch.float8_e4m3fn),
        "w13_weight_scale": torch.rand(EXPERTS, generator=generator) * 0.1 + 0.05,
        "w2_weight_scale": torch.rand(EXPERTS, generator=generator) * 0.1 + 0.05,
    }
    for name, values in tensors.items():
        layer.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    layer.expert_map, layer.activation, layer.global_num_experts = None, MoEActivation.SILU, EXPERTS
    layer.quant_method = SimpleNamespace(
        moe_kernel=fp8_kernel(layer.w13_weight_scale, layer.w2_weight_scale), weight_scale_name="weight_scale"
    )
    server = Server(session, kernels, torch.nn.Sequential(layer))
    # As vLLM does: what the layer keeps are inference tensors, and weights are reloaded outside of this mode.
    with torch.inference_mode():
        server.forward()
    return server


def test_a_right_layer_passes_at_both_ends_of_every_range_and_the_proof_says_so(server: Server) -> None:
    server.kernels.runs.clear()
    calls = server.session.proof.passes[PASS].calls
    server.check()
    assert server.kernels.runs == [
        ("direct", 1), ("direct", 2), ("grouped-bf16-n16", 9), ("grouped-bf16-n16", LARGEST)
    ]  # fmt: skip
    assert re.match(r"passed before.*: 1 .* 1 to 300.* 0\.", server.canary)
    assert server.session.proof.passes[PASS].calls == calls


def replayed(layer: Any, call: Any) -> Callable[[], None]:
    """A graph: reads what its inputs hold when it is replayed."""
    from moe_optimizer.vllm_plugin.experts import canary

    return lambda: canary.through_vllm(layer, call)


def frozen(layer: Any, call: Any) -> Callable[[], None]:
    """A graph that reads what its inputs held when it was captured (vllm#52308)."""
    from moe_optimizer.vllm_plugin.experts import canary

    inputs = call._replace(x=call.x.clone())
    return lambda: canary.through_vllm(layer, inputs)


def test_graphs_are_replayed_on_other_inputs_than_those_of_the_capture(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_optimizer.vllm_plugin.experts import canary

    monkeypatch.setattr(canary, "captured", replayed)
    server.check(graphs=64)
    assert "graphs up to 64" in server.canary
    monkeypatch.setattr(canary, "captured", frozen)
    with pytest.raises(RequiredNotAppliedError, match="replayed graph"):
        server.check(graphs=64)
    assert server.canary.startswith("failed before ready:")


def test_what_vllm_does_not_capture_is_not_captured_here(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_optimizer.vllm_plugin.experts import canary

    sizes: list[int] = []

    def noted(layer: Any, call: Any) -> Callable[[], None]:
        sizes.append(call.x.shape[0])
        return replayed(layer, call)

    monkeypatch.setattr(canary, "captured", noted)
    server.check(graphs=9)
    assert sizes == [1, 2, 9]


def test_without_a_gpu_that_captures_the_canary_says_that_it_did_not_run(server: Server) -> None:
    server.check(graphs=64)
    assert re.match("not run.*no graph", server.canary)


def scaled(factor: float, experts: slice = slice(None)) -> Callable[[Any], Any]:
    def change(problem: Any) -> Any:
        scale = problem.w2_scale.clone()
        scale[experts] *= factor
        return dataclasses.replace(problem, w2_scale=scale)

    return change


def swapped(problem: Any) -> Any:
    return dataclasses.replace(problem, w13=problem.w13.view(torch.uint8).roll(1, dims=0).view(problem.w13.dtype))


def not_a_number(problem: Any) -> Any:
    weights = problem.topk_weights.clone()
    weights[0] = float("nan")
    return dataclasses.replace(problem, topk_weights=weights)


def above_200_tokens(problem: Any) -> Any:
    return scaled(1.02)(problem) if problem.x.shape[0] > 200 else problem


def one_token(problem: Any) -> Any:
    return swapped(problem) if problem.x.shape[0] == 1 else problem


WRONG = {
    "every scale 2 % too large": scaled(1.02),
    "every scale 2 % too small": scaled(0.98),
    "experts in another order": swapped,
    "not a number": not_a_number,
    "only above 200 tokens": above_200_tokens,
    "only at one token": one_token,
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_kernel_that_turns_wrong_ends_the_start(server: Server, mistake: str) -> None:
    server.kernels.change = WRONG[mistake]
    with pytest.raises(RequiredNotAppliedError, match="than their weights"):
        server.check()
    assert server.canary.startswith("failed before ready:")
    assert "canary before ready" in server.session.proof.passes[PASS].why_not


def found_in_layers(server: Server, count: int) -> int:
    """Return in how many layers of other names, so other inputs and routings, what the kernels do wrong is found."""
    checked, found = server.layer.quant_method.moe_kernel.fused_experts._layer, 0
    for index in range(count):
        checked._layer = dataclasses.replace(checked._layer, name=f"layers.{index}")
        with contextlib.suppress(RequiredNotAppliedError):
            server.check()
            continue
        found += 1
    return found


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_one_experts_scale_that_is_2_percent_off_is_seen_whatever_the_inputs(server: Server, factor: float) -> None:
    server.kernels.change = scaled(factor, slice(5, 6))
    assert found_in_layers(server, 24) == 24


def test_a_stale_scale_is_seen_and_an_update_that_is_noticed_leaves_none(server: Server) -> None:
    from moe_optimizer.vllm_plugin.experts.canary import our_layers

    server.layer.w2_weight_scale.data.mul_(1.5)
    with pytest.raises(RequiredNotAppliedError, match=r"factor|error"):
        server.check()
    for layer, experts in our_layers(server.model):
        experts.weights_changed(layer)
    server.check()


def test_graphs_captured_before_an_update_read_the_new_scales_after_it(server: Server) -> None:
    """What a captured graph reads are addresses: they stay, also when vLLM makes the experts anew."""
    from moe_optimizer.vllm_plugin.experts.canary import our_layers

    kept = server.layer.quant_method.moe_kernel.fused_experts._layer._layer.weights
    before = server.forward()
    server.layer.w2_weight_scale.data.mul_(2)
    server.experts_made_anew()
    for layer, experts in our_layers(server.model):
        experts.weights_changed(layer)
    torch.testing.assert_close(server.forward(), before * 2)
    now = server.layer.quant_method.moe_kernel.fused_experts._layer._layer.weights
    assert now.w2_scale.data_ptr() == kept.w2_scale.data_ptr()
    assert float(kept.w2_scale[3, 0]) == float(server.layer.w2_weight_scale[3])
    # The layer is the same one: it is in the proof once.
    assert len(server.session.proof.passes[PASS].layers) == 1


def test_a_layer_that_is_not_as_known_is_not_tried_and_the_proof_says_so(server: Server) -> None:
    del server.layer.activation
    server.check()
    assert re.match("not run.*: AttributeError", server.canary)
    assert server.session.proof.passes[PASS].why_not == ""


def test_layers_in_which_our_kernels_are_not_found_are_not_called_right(server: Server) -> None:
    server.layer.quant_method = SimpleNamespace(kernel_of_another_version=server.layer.quant_method.moe_kernel)
    server.check()
    assert re.match("not run.*not found", server.canary)
