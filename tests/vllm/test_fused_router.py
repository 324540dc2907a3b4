"""vLLM's own gate and router with our launch in them, on the CPU, where plain torch takes the kernel's place."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.vllm.cuda_class import activated
from tests.vllm.expert_layers import EXPERTS, HIDDEN, PASS, TOP_K, make_layer, moe_config

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

MOST = 4


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    """A plan with the launch up to four tokens; vLLM's top-k is a kernel for GPUs, and so is ours."""
    from vllm.model_executor import parameter
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    from moe_optimizer.ops.topk_router import topk_router
    from moe_optimizer.vllm_plugin.experts import fused_router

    def fused_topk(hidden_states: Any, gating_output: Any, topk: int, renormalize: bool, **_: Any) -> Any:
        weights, ids = topk_router(gating_output, top_k=topk, renormalize=renormalize)
        return weights, ids, ids

    for name, value in (("rank", 0), ("world_size", 1)):  # of a process without groups of ranks
        monkeypatch.setattr(parameter, f"get_tensor_model_parallel_{name}", lambda value=value: value)
    monkeypatch.setattr(fused_topk_router, "fused_topk", fused_topk)
    monkeypatch.setattr(fused_router, "why_no_kernel", lambda call: None)
    session = activated(tmp_path, monkeypatch, {})
    assert session.plan is not None
    decisions = tuple(
        dataclasses.replace(each, params=FlashDmoeParams(kernel="cuda", fused_router=MOST))
        if each.pass_name == PASS
        else each
        for each in session.plan.decisions
    )
    session.plan = session.plan.replace(decisions=decisions)
    return session


def make_gate() -> Any:
    """vLLM's linear layer of a gate, as it is loaded."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    gate = ReplicatedLinear(HIDDEN, EXPERTS, bias=False, params_dtype=torch.bfloat16, prefix="gate", disable_tp=True)
    torch.nn.init.normal_(gate.weight, generator=torch.Generator().manual_seed(3))
    gate.cpu_linear = torch.nn.functional.linear  # vLLM's CPU build would pack the weight, which a GPU's does not
    return gate


def make_runner(**changes: Any) -> Any:
    """What the launch reads of vLLM's MoE runner, whose experts are ours but for three tokens."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter

    from moe_optimizer.vllm_plugin.experts.cuda import MoeOptimizerCudaExperts

    class Ours(MoeOptimizerCudaExperts):
        def __init__(self) -> None:
            pass

        def computes(self, tokens: int) -> bool:
            return tokens != 3

    runner: Any = torch.nn.Module()
    runner.gate = make_gate()
    runner.router = FusedTopKRouter(top_k=TOP_K, global_num_experts=EXPERTS)
    runner.routed_experts = make_layer()
    runner.routed_experts.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=Ours()))
    runner.moe_config, runner.layer_name, runner._fse_fuse_gate = moe_config(), "layers.0", False
    for name, value in changes.items():
        setattr(runner, name, value)
    return runner


def installed(session: PluginSession, runner: Any) -> str:
    """Install it into a model of one layer, and return what its entry in the proof says."""
    from moe_optimizer.vllm_plugin.experts.fused_router import install_fused_routers
    from moe_optimizer.vllm_plugin.experts.layer import ExpertsLayer
    from moe_optimizer.vllm_plugin.experts.weight_format import PLAIN, KernelWeights

    install_fused_routers(session, torch.nn.ModuleList([runner]))
    layer = runner.routed_experts
    weights = KernelWeights(format=PLAIN, w13=layer.w13_weight, w2=layer.w2_weight)
    entry = ExpertsLayer(name="layers.0", weights=weights, dtype=torch.bfloat16, top_k=TOP_K).proof()
    session.add_layer((PASS,), layer.w13_weight.data_ptr(), entry)
    return entry.router


def routed(runner: Any, x: Any) -> tuple[Any, Any, Any]:
    """As vLLM's runner goes from tokens to experts."""
    logits, _ = runner.gate(x)
    return logits, *runner.router.select_experts(hidden_states=x, router_logits=logits)


def tokens(count: int) -> Any:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).bfloat16()


def test_few_tokens_are_routed_by_the_launch_as_vllm_routes_them(session: PluginSession) -> None:
    runner, stock = make_runner(), make_runner()
    assert installed(session, runner) == f"gate_topk up to {MOST}"
    (entry,) = session.proof.passes[PASS].layers
    for count in range(1, MOST + 3):
        before = entry.router_calls
        logits, weights, ids = routed(runner, tokens(count))
        want = routed(stock, tokens(count))
        torch.testing.assert_close(logits.float(), want[0].float(), rtol=2**-7, atol=2**-4)
        assert torch.equal(ids, want[2])
        torch.testing.assert_close(weights, want[1], rtol=0.02, atol=1e-3)
        # Above the plan's limit, and where the experts are vLLM's, so is the gate.
        assert entry.router_calls - before == (count <= MOST and count != 3)


def test_ids_are_captured_as_before(session: PluginSession) -> None:
    runner, seen = make_runner(), []
    installed(session, runner)
    runner.router.set_capture_fn(seen.append)
    _, _, ids = routed(runner, tokens(2))
    assert len(seen) == 1
    assert torch.equal(seen[0], ids)


def test_other_logits_than_those_of_the_gate_are_routed_by_vllm(session: PluginSession) -> None:
    runner = make_runner()
    installed(session, runner)
    logits, _ = runner.gate(tokens(2))
    exchanged = -logits
    _, ids = runner.router.select_experts(hidden_states=tokens(2), router_logits=exchanged)
    assert torch.equal(ids, exchanged.float().sort(dim=-1, descending=True, stable=True).indices[:, :TOP_K].int())


def test_nothing_of_a_forward_is_kept_after_its_routing(session: PluginSession) -> None:
    runner = make_runner()
    installed(session, runner)
    logits, _, ids = routed(runner, tokens(2))
    logits.neg_()
    _, again = runner.router.select_experts(hidden_states=tokens(2), router_logits=logits)
    assert not torch.equal(ids, again)


def test_padding_goes_to_no_expert(session: PluginSession, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    if not hasattr(fused_topk_router, "_get_padding_mask"):
        pytest.skip("needs a vLLM that marks padding: 0.27 or later")
    padding = torch.tensor([False, False, False, True])
    monkeypatch.setattr(fused_topk_router.envs, "VLLM_MOE_SKIP_PADDING", True, raising=False)
    monkeypatch.setattr(fused_topk_router, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(fused_topk_router, "get_forward_context", lambda: SimpleNamespace(is_padding=padding))
    runner = make_runner()
    installed(session, runner)
    _, weights, ids = routed(runner, tokens(4))
    assert (ids[3] == -1).all()
    assert (weights[3] == 0).all()
    assert (ids[:3] >= 0).all()


def other_router() -> Any:
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

    return GroupedTopKRouter(top_k=TOP_K, global_num_experts=EXPERTS, num_expert_group=4, topk_group=2)


def other_gate() -> Any:
    gate = make_gate()
    gate.__class__ = type("LoraLinear", (type(gate),), {})
    return gate


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gate": lambda: None}, "the model multiplies its gate itself"),
        ({"gate": other_gate}, "LoraLinear"),
        ({"gate": lambda: make_gate().float()}, "float32"),
        ({"router": other_router}, "GroupedTopKRouter"),
        ({"_fse_fuse_gate": lambda: True}, "together"),
        ({"moe_config": lambda: SimpleNamespace(dp_size=2)}, "dp_size=2"),
    ],
    ids=["no gate", "another gate", "FP32 gate", "another router", "both gates", "data parallelism"],
)
def test_a_layer_that_is_not_covered_stays_vllms_with_the_reason(session: PluginSession, change: Any, why: str) -> None:
    runner = make_runner(**{name: make() for name, make in change.items()})
    said = installed(session, runner)
    assert said.startswith("vLLM: ")
    assert why in said
    assert "_compute_routing" not in vars(runner.router)


def test_a_shape_that_no_kernel_covers_stays_vllms(session: PluginSession, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_optimizer.vllm_plugin.experts import fused_router

    monkeypatch.setattr(fused_router, "why_no_kernel", lambda call: f"H: got {call.x.shape[1]}")
    assert installed(session, make_runner()) == f"vLLM: H: got {HIDDEN}"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_launch_leaves_the_layer_to_vllm_or_ends_the_start_of_several_ranks(
    session: PluginSession, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    from moe_optimizer.vllm_plugin.experts import fused_router

    right = fused_router.gate_topk

    def wrong(*arguments: Any, **named: Any) -> Any:
        weights, ids = right(*arguments, **named)
        return weights, (ids + 1) % EXPERTS

    monkeypatch.setattr(fused_router, "gate_topk", wrong)
    session.proof.world_size = ranks
    runner = make_runner()
    if ranks > 1:
        with pytest.raises(RequiredNotAppliedError, match="same experts"):
            installed(session, runner)
        return
    assert "it chooses" in installed(session, runner)
    assert "_compute_routing" not in vars(runner.router)


def test_a_layer_that_was_not_found_in_the_model_says_so(session: PluginSession) -> None:
    runner = make_runner()
    del runner.routed_experts.quant_method
    assert "not found" in installed(session, runner)
    assert "forward" not in vars(runner.gate)


def test_without_the_setting_nothing_is_replaced(session: PluginSession) -> None:
    assert session.plan is not None
    off = tuple(
        dataclasses.replace(each, params=FlashDmoeParams(kernel="cuda")) if each.pass_name == PASS else each
        for each in session.plan.decisions
    )
    session.plan = session.plan.replace(decisions=off)
    runner = make_runner()
    assert installed(session, runner) == ""
    assert "forward" not in vars(runner.gate)


def test_what_is_relied_on_is_as_known_in_this_vllm() -> None:
    from moe_optimizer.vllm_plugin.compat import why_changed
    from moe_optimizer.vllm_plugin.experts.fused_router import RELIED_ON

    assert why_changed(RELIED_ON) == ""
