"""vLLM's own kernel choice with our patch in place: what we take, what we leave, and what a failure of ours does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.vllm_plugin import install
from moe_optimizer.vllm_plugin import patch as patches
from moe_optimizer.vllm_plugin.experts import kernel, kernel_choice
from moe_optimizer.vllm_plugin.experts.kernel_choice import UNQUANTIZED_ORACLE
from moe_optimizer.vllm_plugin.experts.lora import MOE_LAYER_CONFIG
from moe_optimizer.vllm_plugin.patch import PatchState
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.plugin_state import own_patches, own_session
from tests.vllm.conftest import tiny_plan
from tests.vllm.expert_layers import PASS, moe_config


@pytest.fixture(scope="module")
def oracle() -> Any:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    return unquantized


@pytest.fixture
def activate(oracle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PluginSession]]:
    """Applies a plan in this process, as in a fresh worker, and undoes it afterwards."""
    import vllm.envs as envs

    own_session(monkeypatch)
    own_patches(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    forget_self_tests = kernel.self_test.cache_clear
    forget_self_tests()

    def start(**changes: Any) -> PluginSession:
        return install.install_plan(tiny_plan(**changes), run_dir=tmp_path)

    yield start
    patches.undo(UNQUANTIZED_ORACLE.target)
    patches.undo(MOE_LAYER_CONFIG.target)
    forget_self_tests()


def chosen(oracle: Any, **changes: Any) -> str:
    return oracle.select_unquantized_moe_backend(moe_config(**changes))[1].__name__


@contextlib.contextmanager
def lora_server(target_modules: list[str] | None) -> Iterator[None]:
    """vLLM builds a model in here whose adapters are limited to these modules."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.lora import LoRAConfig

    config = VllmConfig()
    config.lora_config = LoRAConfig(target_modules=target_modules)
    with set_current_vllm_config(config):
        yield


def why_not(session: PluginSession) -> str:
    return session.proof.passes[PASS].why_not


def test_our_class_is_chosen(oracle: Any, activate: Callable[..., PluginSession]) -> None:
    session = activate()
    assert chosen(oracle) == "MoeOptimizerCpuExperts"
    assert session.proof.passes[PASS].applied
    assert why_not(session) == ""


# Under plain vLLM the patch is there before there is a plan.
def test_a_plan_without_the_pass_leaves_stock(oracle: Any, activate: Callable[..., PluginSession]) -> None:
    session = activate()
    session.plan = tiny_plan(disabled=["flash-dmoe"])
    assert chosen(oracle) == "CPUUnquantizedExperts"


def test_undone_it_is_stock_again(oracle: Any, activate: Callable[..., PluginSession]) -> None:
    stock = oracle.backend_to_kernel_cls
    activate()
    assert oracle.backend_to_kernel_cls is not stock
    assert patches.undo(UNQUANTIZED_ORACLE.target)
    assert oracle.backend_to_kernel_cls is stock
    assert chosen(oracle) == "CPUUnquantizedExperts"


def test_the_installed_source_is_the_known_one(activate: Callable[..., PluginSession]) -> None:
    activate()
    states = {report.patch.target: report.state for report in patches.patch_reports()}
    assert states[UNQUANTIZED_ORACLE.target] is PatchState.APPLIED


def unsupported() -> dict[str, tuple[dict[str, Any], str]]:
    """What a layer may be, and the words with which it is refused."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    def parallel(**changes: Any) -> dict[str, Any]:
        alone = vars(FusedMoEParallelConfig.make_no_parallel())
        return {"moe_parallel_config": FusedMoEParallelConfig(**alone | changes)}

    return {
        "GELU": ({"activation": MoEActivation.GELU}, "activation"),
        "data parallel": (parallel(dp_size=2), "parallel config"),
        "EPLB": (parallel(enable_eplb=True), "parallel config"),
        "clamped": ({"swiglu_limit": 7.0}, "swiglu_limit=7.0"),
        "FP64": ({"in_dtype": torch.float64}, "float64"),
    }


def test_lora_is_left_to_stock_because_vllm_would_not_ask(
    oracle: Any, activate: Callable[..., PluginSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = activate()
    with lora_server(None):
        assert chosen(oracle) == "CPUUnquantizedExperts"
    assert "LoRA" in why_not(session)


def test_a_layer_that_no_adapter_may_change_is_ours_and_no_longer_marked(
    oracle: Any, activate: Callable[..., PluginSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = {"is_lora_enabled": True}
    with lora_server(["q_proj"]):
        assert chosen(oracle, **marked) == "TritonExperts"
        session = activate()
        assert chosen(oracle, **marked) == "MoeOptimizerCpuExperts"
        assert why_not(session) == ""
        # Another vLLM: it would take the first class without asking.
        patches.undo(MOE_LAYER_CONFIG.target)
        assert chosen(oracle, **marked) == "TritonExperts"
        assert "unasked" in why_not(session)


@pytest.mark.parametrize("layer", ["GELU", "data parallel", "EPLB", "clamped", "FP64"])
def test_what_the_kernel_does_not_do_is_left_to_stock_with_the_reason(
    oracle: Any, activate: Callable[..., PluginSession], layer: str
) -> None:
    session = activate()
    changes, reason = unsupported()[layer]
    assert chosen(oracle, **changes) != "MoeOptimizerCpuExperts"
    assert reason in why_not(session)


def test_sizes_that_no_kernel_covers_are_refused_with_the_reason(
    oracle: Any, activate: Callable[..., PluginSession]
) -> None:
    session = activate()
    # Stock pads this width and takes it.
    assert chosen(oracle, intermediate_size=40) == "CPUUnquantizedExperts"
    assert "multiples of 16" in why_not(session)


def test_a_vllm_that_routes_inside_its_own_kernel_is_left_alone(
    oracle: Any, activate: Callable[..., PluginSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_optimizer.vllm_plugin.experts import cpu

    monkeypatch.setattr(cpu, "CPU_ROUTER", f"{cpu.CPU_ROUTER}_of_a_later_version")
    session = activate()
    assert chosen(oracle) == "CPUUnquantizedExperts"
    assert "before 0.30" in why_not(session)


def raising(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("injected")


POINTS = [
    (kernel_choice, "world"),
    (kernel_choice, "offered_classes"),
    (kernel, "self_test"),
    (kernel, "why_not_covered"),
    (kernel, "isa"),
    (PluginSession, "resolve_plan"),
    (PluginSession, "applied"),
]


@pytest.mark.parametrize(("owner", "name"), POINTS, ids=lambda value: value if isinstance(value, str) else "")
def test_an_exception_at_any_point_of_the_choice_leaves_stock(
    oracle: Any, activate: Callable[..., PluginSession], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    session = activate()
    monkeypatch.setattr(owner, name, raising)
    assert chosen(oracle) == "CPUUnquantizedExperts"
    assert why_not(session) == "fallback: RuntimeError: injected"


def test_an_exception_about_adapters_leaves_vllm_its_mark(
    activate: Callable[..., PluginSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    with lora_server(["q_proj"]):
        session = activate()
        assert not moe_config(is_lora_enabled=True).is_lora_enabled
        monkeypatch.setattr(PluginSession, "resolve_plan", raising)
        assert moe_config(is_lora_enabled=True).is_lora_enabled
    assert why_not(session) == "fallback: RuntimeError: injected"


@pytest.mark.parametrize("name", ["add_compile_factor", "supported_version", "apply_when_imported"])
def test_an_exception_while_applying_leaves_stock(
    oracle: Any, activate: Callable[..., PluginSession], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(install, name, raising)
    session = activate()
    assert chosen(oracle) == "CPUUnquantizedExperts"
    assert why_not(session) == "fallback: RuntimeError: injected"


def replace_op(monkeypatch: pytest.MonkeyPatch, replacement: Callable[..., Any]) -> None:
    # Not by its dotted name: the package shows the function under the name of its module.
    monkeypatch.setattr(sys.modules["moe_optimizer.ops.fused_experts"], "fused_experts", replacement)


def test_a_kernel_that_computes_something_else_is_refused(
    oracle: Any, activate: Callable[..., PluginSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_optimizer.ops.fused_experts import fused_experts as right

    def swapped_experts(x: Any, w13: Any, w2: Any, weights: Any, ids: Any, **kwargs: Any) -> Any:
        return right(x, w13.flip(0), w2, weights, ids, **kwargs)

    replace_op(monkeypatch, swapped_experts)
    session = activate()
    assert chosen(oracle) == "CPUUnquantizedExperts"
    assert "self-test failed" in why_not(session)


def test_a_kernel_that_ignores_the_expert_map_is_refused(
    oracle: Any, activate: Callable[..., PluginSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_optimizer.ops.fused_experts import fused_experts as right

    def no_map(x: Any, w13: Any, w2: Any, weights: Any, ids: Any, *, expert_map: Any = None, **kwargs: Any) -> Any:
        return right(x, w13, w2, weights, ids.clamp(max=1), **kwargs)

    replace_op(monkeypatch, no_map)
    session = activate()
    assert chosen(oracle) == "CPUUnquantizedExperts"
    assert "self-test failed" in why_not(session)


def test_the_self_test_accepts_the_kernel_in_every_dtype() -> None:
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        kernel.self_test.cache_clear()
        assert kernel.self_test(dtype) == ""


def test_a_required_pass_raises_before_any_weight_is_loaded(
    oracle: Any, activate: Callable[..., PluginSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(required=(PASS,))
    monkeypatch.setattr(kernel, "isa", raising)
    with pytest.raises(RequiredNotAppliedError, match=f"{PASS}: required"):
        chosen(oracle)


def test_an_old_vllm_is_left_alone(
    oracle: Any, activate: Callable[..., PluginSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.25.1")
    session = activate()
    assert chosen(oracle) == "CPUUnquantizedExperts"
    assert why_not(session) == "needs vLLM >= 0.26, found 0.25.1"


def test_compiled_graphs_with_and_without_our_kernel_have_different_keys(
    oracle: Any, activate: Callable[..., PluginSession]
) -> None:
    import vllm.envs as envs

    stock = envs.compile_factors()
    activate()
    chosen(oracle)
    assert envs.compile_factors() != stock
