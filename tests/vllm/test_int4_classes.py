"""Layers of INT4 checkpoints through vLLM's own methods, with our patches in place: on the CPU with our kernel, and as
on a GPU with stand-ins for the kernels (tests/vllm/cuda_class.py).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.specs.kernel_speeds import ANY_NUMBER, TokenRange
from moe_optimizer.specs.model import Int4Scheme
from moe_optimizer.vllm_plugin import patch as patches
from moe_optimizer.vllm_plugin import session as sessions
from moe_optimizer.vllm_plugin.experts.int4_choice import INT4_CHOICE, INT4_LOADED
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.int4_checkpoint import Form, quantized, scheme, stored
from tests.plugin_state import own_patches
from tests.vllm import cuda_class, expert_layers
from tests.vllm.cuda_class import Kernels, asked_on_a_gpu, stand_in_kernels
from tests.vllm.expert_layers import PASS, moe_config

torch = pytest.importorskip("torch")

EXPERTS, TOP_K, HIDDEN, WIDTH, GROUP = 4, 2, 256, 192, 64
"""Neither matrix is square, and w13 has 12 times as many rows as words in a row."""
KINDS: dict[str, tuple[Form, bool]] = {
    "gptq": ("gptq", False), "awq": ("awq", True), "awq symmetric": ("awq", False),
    "compressed-tensors": ("compressed-tensors", True), "compressed-tensors symmetric": ("compressed-tensors", False),
}  # fmt: skip
RANGES = (TokenRange(up_to=2, use="direct"), TokenRange(up_to=ANY_NUMBER, use="grouped-int4_weights"))
PATCHES = (INT4_CHOICE, *(patch for patches_of_one in INT4_LOADED.values() for patch in patches_of_one))
HELD = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_weight_zero", "w2_weight_zero")


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our patches, and the configuration that vLLM has while it builds a model."""
    from vllm.config import VllmConfig, set_current_vllm_config

    own_patches(monkeypatch)
    for patch in PATCHES:
        if not patch.module.endswith("_marlin"):  # of 0.26 alone
            importlib.import_module(patch.module)
            assert patches.apply_when_imported(patch).state is patches.PatchState.APPLIED
    config: Any = VllmConfig()
    config.model_config = SimpleNamespace(quantization_config=None)
    with set_current_vllm_config(config):
        yield
    for patch in PATCHES:
        patches.undo(patch.target)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def layer_config(**changes: Any) -> Any:
    fields = {
        "num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_logical_experts": EXPERTS,
        "experts_per_token": TOP_K, "hidden_dim": HIDDEN, "intermediate_size": WIDTH,
        "in_dtype": torch.bfloat16,
    }  # fmt: skip
    return moe_config(**(fields | changes))


def made_method(kind: str, **changes: Any) -> Any:
    """vLLM's method for a layer of such a checkpoint, from what its config.json says."""
    from compressed_tensors.quantization import QuantizationArgs
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig, AutoAWQMoEMethod
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQMoEMethod
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as wna16,
    )

    form, zero_points = KINDS[kind]
    said, config = scheme(form, group=GROUP, zero_points=zero_points), layer_config(**changes)
    if form == "gptq":
        return AutoGPTQMoEMethod(AutoGPTQConfig.from_config(said), config)
    if form == "awq":
        return AutoAWQMoEMethod(AutoAWQConfig.from_config(said), config)
    weights = QuantizationArgs(**said["config_groups"]["group_0"]["weights"])
    return wna16.CompressedTensorsWNA16MoEMethod(weights, None, config)


def quantized_experts(kind: str, seed: int) -> dict[str, list[tuple[Any, Any, Any]]]:
    """Codes, scales and zero points of each expert's w13 (gate rows first) and w2."""
    _, zero_points = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w13": (2 * WIDTH, HIDDEN, 0.1), "w2": (HIDDEN, WIDTH, 0.1)}
    return {
        name: [
            quantized(torch.randn(rows, columns, generator=generator) * scale, GROUP, zero_points)
            for _ in range(EXPERTS)
        ]
        for name, (rows, columns, scale) in shapes.items()
    }


def dense(kind: str, seed: int) -> tuple[Any, Any]:
    matrices = quantized_experts(kind, seed)
    w13, w2 = (
        torch.stack([stored("m", "dequantized", *expert)["m.weight"] for expert in matrices[name]]).float()
        for name in ("w13", "w2")
    )
    return w13, w2


def fill(method: Any, layer: Any, kind: str, seed: int, *, eights: bool = False) -> None:
    """Give a layer weights as vLLM's loader does, in parameters that the method makes; `eights`: zero points of 8."""
    method.create_weights(layer, EXPERTS, HIDDEN, WIDTH, torch.bfloat16, weight_loader=None)
    for name, experts in quantized_experts(kind, seed).items():
        parts = [
            stored("m", KINDS[kind][0], codes, scale, torch.full_like(zero, 8) if eights else zero)
            for codes, scale, zero in experts
        ]
        for part in parts[0]:
            parameter = getattr(layer, f"{name}_{part.removeprefix('m.')}", None)
            if parameter is not None:  # vLLM passes over g_idx
                parameter.data.copy_(torch.stack([each[part] for each in parts]))


def loaded_layer(method: Any, kind: str, **how: Any) -> Any:
    layer: Any = torch.nn.Module()
    layer.layer_name, layer.expert_map, layer.quant_method = "model.layers.0.mlp.experts", None, method
    layer._expert_routing_tables = lambda: None
    layer._loaded_expert_biases = set()
    fill(method, layer, kind, 3, **how)
    method.process_weights_after_loading(layer)
    return layer


def forward(layer: Any, kind: str, tokens: int, *, seed: int = 3) -> tuple[Any, Any]:
    """Return what vLLM's kernel gives with the layer's weights as they are now, and what those of `seed` say."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from moe_optimizer.ops.reference import fused_experts

    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    topk_weights, ids = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    got = layer.quant_method.moe_kernel.apply(
        x, layer.w13_weight, layer.w2_weight, topk_weights, ids.int(), MoEActivation.SILU, EXPERTS, None,
        apply_router_weight_on_input=False,
    )  # fmt: skip
    return got.float(), fused_experts(x.float(), *dense(kind, seed), topk_weights, ids.int())


def assert_close(pair: tuple[Any, Any]) -> None:
    torch.testing.assert_close(*pair, atol=0.02, rtol=0.02)


def load_again(layer: Any, kind: str, seed: int) -> None:
    """Reload as vLLM does: new tensors are loaded and processed, and copied into those that graphs read."""
    method, old = layer.quant_method, dict(layer._parameters)
    for name in old:
        delattr(layer, name)
    fill(method, layer, kind, seed)
    method.process_weights_after_loading(layer)
    assert set(layer._parameters) == set(old)
    for name, parameter in old.items():
        parameter.data.copy_(getattr(layer, name))
        setattr(layer, name, parameter)


def of_a_checkpoint(session: PluginSession, kind: str) -> PluginSession:
    """Make the plan's model one of such a checkpoint."""
    assert session.plan is not None
    form, zero_points = KINDS[kind]
    int4 = Int4Scheme(group=GROUP, zero_points=zero_points, act_order=False)
    model = dataclasses.replace(session.plan.model, quant_method=form, expert_format="int4", int4=int4)
    session.plan = session.plan.replace(model=model)
    return session


@pytest.fixture
def on_cpu(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    return of_a_checkpoint(expert_layers.activated(tmp_path, monkeypatch), kind)


def test_vllm_may_ask_a_loaded_layer_for_its_configuration(on_cpu: PluginSession, kind: str) -> None:
    """As the warm-up of DeepGEMM does of every layer of experts on a GPU, whatever computes it."""
    method = made_method(kind)
    layer = loaded_layer(method, kind)
    assert method.get_fused_moe_quant_config(layer) is method.moe_quant_config
    load_again(layer, kind, seed=4)
    assert method.get_fused_moe_quant_config(layer) is method.moe_quant_config


def stored_bytes(kind: str) -> float:
    return EXPERTS * 3 * HIDDEN * WIDTH * (4 + (24 if KINDS[kind][1] else 16) / GROUP) / 8


def test_our_cpu_kernel_computes_a_layer_from_the_integers_of_the_checkpoint(on_cpu: PluginSession, kind: str) -> None:
    layer = loaded_layer(made_method(kind), kind)
    assert set(layer._parameters) == set(HELD if KINDS[kind][1] else HELD[:4]), "the loaded ones are given back"
    for tokens in (1, 5, 40):
        assert_close(forward(layer, kind, tokens))
    (entry,) = on_cpu.proof.passes[PASS].layers
    assert (entry.weight_format, entry.weight_dtype, entry.weight_bytes) == ("int4_stored", "uint8", stored_bytes(kind))
    assert entry.calls == 3
    assert entry.self_check_error is not None


# The zero points of the first load are all 8, which the readers leave out.
def test_new_weights_reach_the_kernel_that_compiled_graphs_call(on_cpu: PluginSession, kind: str) -> None:
    layer = loaded_layer(made_method(kind), kind, eights=True)
    before = layer.quant_method.moe_kernel
    load_again(layer, kind, 4)
    assert layer.quant_method.moe_kernel is before
    assert_close(forward(layer, kind, 5, seed=4))
    assert len(on_cpu.proof.passes[PASS].layers) == 1


@pytest.mark.parametrize("kind", ["compressed-tensors", "compressed-tensors symmetric"], indirect=True)
def test_what_earlier_vllms_hold_transposed_is_told_by_its_shape(kind: str) -> None:
    from moe_optimizer.ops.int4 import dequantize_int4
    from moe_optimizer.vllm_plugin.experts.weight_format_int4_stored import compressed_tensors_weights

    tensors: dict[str, Any] = {}
    for name, experts in quantized_experts(kind, 3).items():
        # The words hold columns of a row in both; those of zero points hold rows.
        parts = [stored("m", "compressed-tensors", *expert) for expert in experts]
        for part in ("weight_packed", "weight_scale", *(("weight_zero_point",) if KINDS[kind][1] else ())):
            tensors[f"{name}_{part}"] = torch.stack([each[f"m.{part}"].T.contiguous() for each in parts])
    method = SimpleNamespace(moe=layer_config(), symmetric=not KINDS[kind][1])
    got = compressed_tensors_weights(method, SimpleNamespace(**tensors))
    for weight, want in zip(got, dense(kind, 3), strict=True):
        assert torch.equal(dequantize_int4(weight), want)
        assert (weight.zero is not None) == KINDS[kind][1]


def is_ours(kind: str, **changes: Any) -> bool:
    """Whether vLLM chooses our class; on this processor it has none of its own."""
    try:
        return made_method(kind, **changes).experts_cls.__name__.startswith("MoeOptimizer")
    except NotImplementedError:
        return False


@pytest.mark.parametrize("kind", ["gptq"], indirect=True)
def test_without_the_pass_or_for_another_layer_vllm_chooses(
    on_cpu: PluginSession, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    assert is_ours(kind)
    assert not is_ours(kind, activation=MoEActivation.GELU)
    assert "activation" in on_cpu.proof.passes[PASS].why_not
    expert_layers.activated(tmp_path, monkeypatch, disabled=["flash-dmoe"])
    assert not is_ours(kind)


@pytest.mark.parametrize("kind", ["gptq"], indirect=True)
def test_experts_that_the_plan_was_not_made_for_are_vllms_and_the_proof_says_so(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = expert_layers.activated(tmp_path, monkeypatch)
    assert not is_ours(kind)
    assert "no INT4 experts" in session.proof.passes[PASS].why_not


@pytest.mark.parametrize("kind", ["awq"], indirect=True)
def test_a_method_that_loads_in_another_way_than_known_is_vllms(on_cpu: PluginSession, kind: str) -> None:
    (loaded,) = INT4_LOADED["awq"]
    assert is_ours(kind)
    assert patches.undo(loaded.target)
    assert not is_ours(kind)
    assert "does not load experts as known" in on_cpu.proof.passes[PASS].why_not


@pytest.mark.parametrize("kind", ["gptq"], indirect=True)
def test_eight_bits_and_a_backend_that_the_user_names_are_vllms(on_cpu: PluginSession, kind: str) -> None:
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQMoEMethod

    eight = AutoGPTQConfig.from_config(scheme("gptq", group=GROUP, zero_points=False) | {"bits": 8})
    with pytest.raises(NotImplementedError):
        AutoGPTQMoEMethod(eight, layer_config())
    with pytest.raises(ValueError, match="MARLIN"):
        made_method(kind, moe_backend="marlin")


@pytest.mark.parametrize("kind", ["gptq"], indirect=True)
def test_biases_that_only_the_checkpoint_has_end_the_start(on_cpu: PluginSession, kind: str) -> None:
    layer = loaded_layer(made_method(kind), kind)
    layer._loaded_expert_biases.add("w2_bias")
    fill(layer.quant_method, layer, kind, 3)
    with pytest.raises(RequiredNotAppliedError, match="w2_bias"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_wrong_cpu_kernel_ends_the_start_because_nothing_else_reads_the_weights(
    on_cpu: PluginSession, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expert_layers.compute_wrongly(monkeypatch, "int4_stored")
    with pytest.raises(RequiredNotAppliedError, match="no other"):
        loaded_layer(made_method(kind), kind)
    assert "self-check failed" in on_cpu.proof.passes[PASS].why_not


@pytest.fixture
def kernels(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """As on a GPU."""
    cuda_class.as_on_hopper(monkeypatch, "cuda_run")
    of_a_checkpoint(cuda_class.activated(tmp_path, monkeypatch, {"int4_g64": RANGES}), kind)
    return stand_in_kernels(monkeypatch)


def gpu_method(kind: str) -> Any:
    with asked_on_a_gpu():
        return made_method(kind)


def test_our_cuda_kernels_compute_every_number_of_tokens_from_the_same_integers(kernels: Kernels, kind: str) -> None:
    layer = loaded_layer(gpu_method(kind), kind)
    kernels.runs.clear()
    for tokens in (1, 2, 3, 700):
        assert_close(forward(layer, kind, tokens))
    assert kernels.runs == [("direct", 1), ("direct", 2), ("grouped-int4_weights", 3), ("grouped-int4_weights", 700)]
    session = sessions.current_session()
    assert session is not None
    (entry,) = session.proof.passes[PASS].layers
    bytes_ = stored_bytes(kind)
    assert (entry.weight_format, entry.loaded_bytes, entry.weight_bytes) == ("int4_stored", bytes_, bytes_)
    assert entry.calls_by_kernel == {"direct": 2, "grouped-int4_weights": 2}


def test_new_weights_are_read_by_the_cuda_kernels_where_captured_graphs_read_them(kernels: Kernels, kind: str) -> None:
    layer = loaded_layer(gpu_method(kind), kind, eights=True)
    read: list[tuple[int, ...]] = []

    def noted(problem: Any) -> Any:
        zeros = [zero.data_ptr() for zero in (problem.w13_zero, problem.w2_zero) if zero is not None]
        read.append((problem.w13.data_ptr(), problem.w13_scale.data_ptr(), *zeros))
        return problem

    kernels.change = noted
    forward(layer, kind, 3)
    load_again(layer, kind, 4)
    assert_close(forward(layer, kind, 3, seed=4))
    assert read[0] == read[-1]
    assert len(read[0]) == (4 if KINDS[kind][1] else 2)


@pytest.mark.parametrize("wrong", ["direct", "grouped-int4_weights"])
@pytest.mark.parametrize("kind", ["awq"], indirect=True)
def test_a_wrong_cuda_kernel_ends_the_start_because_nothing_else_reads_the_weights(
    kernels: Kernels, kind: str, wrong: str
) -> None:
    kernels.wrong = wrong
    with pytest.raises(RequiredNotAppliedError, match="self-check failed"):
        loaded_layer(gpu_method(kind), kind)
