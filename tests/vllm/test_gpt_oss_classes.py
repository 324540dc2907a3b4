"""Layers of gpt-oss through vLLM's own method for them, with our patches in place: on the CPU with our kernel, and as
on a GPU with stand-ins for the kernels (tests/vllm/cuda_class.py); tests/gpu/test_gpt_oss.py has the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.ops.mxfp4 import quantize_mxfp4
from moe_optimizer.specs.kernel_speeds import ANY_NUMBER, STOCK, TokenRange
from moe_optimizer.vllm_plugin import patch as patches
from moe_optimizer.vllm_plugin.experts.gpt_oss_choice import GPT_OSS_CHOICE, GPT_OSS_LOADED
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.plugin_state import own_patches
from tests.vllm import cuda_class, expert_layers
from tests.vllm.cuda_class import Kernels, asked_on_a_gpu, stand_in_kernels
from tests.vllm.expert_layers import PASS, moe_config

torch = pytest.importorskip("torch")

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 4, 480, 96
"""Multiples of 32, and of nothing wider; rows of H / 2 bytes are filled up on a GPU."""
GROUPED = "grouped-mxfp4_weights"
RANGES = (TokenRange(up_to=2, use="direct"), TokenRange(up_to=ANY_NUMBER, use=GROUPED))
BYTES = EXPERTS * 3 * HIDDEN * WIDTH * 4.25 / 8
NAMES = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias")


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our patches, and the configuration that vLLM has while it builds a model of gpt-oss."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

    own_patches(monkeypatch)
    for patch in (GPT_OSS_CHOICE, GPT_OSS_LOADED):
        assert patches.apply_when_imported(patch).state is patches.PatchState.APPLIED
    config: Any = VllmConfig()
    config.quant_config = GptOssMxfp4Config()
    config.model_config = SimpleNamespace(quantization_config=None)
    with set_current_vllm_config(config):
        yield
    for patch in (GPT_OSS_CHOICE, GPT_OSS_LOADED):
        assert patches.undo(patch.target)


def layer_config(**changes: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    fields = {
        "num_experts": EXPERTS, "num_local_experts": EXPERTS, "num_logical_experts": EXPERTS,
        "experts_per_token": TOP_K, "hidden_dim": HIDDEN, "intermediate_size": WIDTH,
        "activation": MoEActivation.SWIGLUOAI, "has_bias": True, "in_dtype": torch.bfloat16,
    }  # fmt: skip
    return moe_config(**(fields | changes))


def made_method() -> Any:
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

    return GptOssMxfp4MoEMethod(layer_config())


def random_tensors(seed: int) -> dict[str, Any]:
    """What a checkpoint has for a layer, under vLLM's names."""
    generator = torch.Generator().manual_seed(seed)
    w13 = quantize_mxfp4(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) * 0.3)
    w2 = quantize_mxfp4(torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) * 0.1)
    w13_bias = torch.randn(EXPERTS, 2 * WIDTH, generator=generator).bfloat16()
    w2_bias = torch.randn(EXPERTS, HIDDEN, generator=generator).bfloat16()
    return dict(zip(NAMES, (w13[0], w2[0], w13[1], w2[1], w13_bias, w2_bias), strict=True))


def fill(method: Any, layer: Any, seed: int) -> None:
    """Give a layer weights as vLLM's loader does, in parameters that the method makes."""
    hidden, width = method.maybe_roundup_sizes(HIDDEN, WIDTH, torch.bfloat16, method.moe.moe_parallel_config)
    assert (hidden, width) == (HIDDEN, WIDTH), "padded sizes would be a copy of the weights"
    method.create_weights(layer, EXPERTS, hidden, width, torch.bfloat16)
    for name, tensor in random_tensors(seed).items():
        getattr(layer, name).data.copy_(tensor)


def loaded_layer(method: Any, seed: int = 3) -> Any:
    layer: Any = torch.nn.Module()
    layer.layer_name, layer.expert_map, layer.quant_method = "model.layers.0.mlp.experts", None, method
    layer._expert_routing_tables = lambda: None
    fill(method, layer, seed)
    method.process_weights_after_loading(layer)
    return layer


def forward(layer: Any, tokens: int, *, seed: int = 3, x: Any = None) -> tuple[Any, Any]:
    """Return what vLLM's kernel gives with the layer's weights as they are now, and what those of `seed` say."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from moe_optimizer.ops.reference import fused_experts

    generator = torch.Generator().manual_seed(tokens)
    if x is None:
        x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    topk_weights, ids = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    got = layer.quant_method.moe_kernel.apply(
        x, layer.w13_weight, layer.w2_weight, topk_weights, ids.int(), MoEActivation.SWIGLUOAI, EXPERTS, None,
        apply_router_weight_on_input=False,
    )  # fmt: skip
    w13, w2, w13_scale, w2_scale, w13_bias, w2_bias = random_tensors(seed).values()
    want = fused_experts(
        x, w13, w2, topk_weights, ids.int(), activation="swigluoai", w13_scale=w13_scale, w2_scale=w2_scale,
        w13_bias=w13_bias, w2_bias=w2_bias,
    )  # fmt: skip
    return got, want


def assert_close(pair: tuple[Any, Any]) -> None:
    """Check a layer's output: in BF16 it is off by 0.002 of its size, with weights in another order by about 1."""
    got, want = (each.float() for each in pair)
    assert float((got - want).norm() / want.norm()) < 0.01


def assert_as_stored(layer: Any) -> None:
    for name, tensor in random_tensors(3).items():
        assert torch.equal(getattr(layer, name), tensor.float() if name.endswith("bias") else tensor), name


def load_again(layer: Any, seed: int) -> None:
    """Reload as vLLM does: new tensors are loaded and processed, and copied into those that graphs read."""
    method, old = layer.quant_method, {name: getattr(layer, name) for name in NAMES}
    fill(method, layer, seed)
    method.process_weights_after_loading(layer)
    for name, parameter in old.items():
        parameter.data.copy_(getattr(layer, name))
        setattr(layer, name, parameter)


@pytest.fixture
def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    return expert_layers.activated(tmp_path, monkeypatch)


def test_our_cpu_kernel_computes_a_layer_from_the_weights_as_stored(on_cpu: PluginSession) -> None:
    layer = loaded_layer(made_method())
    assert_as_stored(layer)
    for tokens in (1, 5, 40):
        assert_close(forward(layer, tokens))
    (entry,) = on_cpu.proof.passes[PASS].layers
    assert (entry.weight_format, entry.weight_dtype, entry.weight_bytes) == ("gpt_oss", "uint8", BYTES)
    assert entry.calls == 3
    assert entry.self_check_error is not None


def test_new_weights_reach_the_kernel_that_compiled_graphs_call(on_cpu: PluginSession) -> None:
    layer = loaded_layer(made_method())
    before = layer.quant_method.moe_kernel
    load_again(layer, 4)
    assert layer.quant_method.moe_kernel is before
    assert_close(forward(layer, 5, seed=4))
    assert len(on_cpu.proof.passes[PASS].layers) == 1


def chosen(config: Any) -> Any:
    """vLLM's choice of a class; None where it has none, as on a CPU without AMX."""
    from vllm.model_executor.layers.quantization import mxfp4

    try:
        return mxfp4.select_mxfp4_moe_backend(config)[1]
    except NotImplementedError:
        return None


def is_ours(experts_class: Any) -> bool:
    return experts_class is not None and experts_class.__name__.startswith("MoeOptimizer")


def test_without_the_pass_or_for_another_layer_vllm_chooses(
    on_cpu: PluginSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config

    assert is_ours(chosen(layer_config()))
    # Gate and up rows one after the other.
    assert not is_ours(chosen(layer_config(activation=MoEActivation.SWIGLUOAI_UNINTERLEAVE)))
    assert "activation" in on_cpu.proof.passes[PASS].why_not
    get_current_vllm_config().quant_config = Mxfp4Config()
    assert not is_ours(chosen(layer_config()))
    expert_layers.activated(tmp_path, monkeypatch, disabled=["flash-dmoe"])
    assert not is_ours(chosen(layer_config()))


def test_a_wrong_cpu_kernel_ends_the_start_because_nothing_else_reads_the_weights(
    on_cpu: PluginSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    expert_layers.compute_wrongly(monkeypatch, "gpt_oss")
    with pytest.raises(RequiredNotAppliedError, match="no other"):
        loaded_layer(made_method())
    assert "self-check failed" in on_cpu.proof.passes[PASS].why_not


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """As on a GPU."""
    cuda_class.as_on_hopper(monkeypatch, "cuda_run")
    planned(tmp_path, monkeypatch, RANGES)
    return stand_in_kernels(monkeypatch)


def gpu_method() -> Any:
    with asked_on_a_gpu():
        return made_method()


def chosen_on_a_gpu(config: Any) -> Any:
    with asked_on_a_gpu():
        return chosen(config)


def planned(run_dir: Path, monkeypatch: pytest.MonkeyPatch, ranges: Any) -> PluginSession:
    return cuda_class.activated(run_dir, monkeypatch, {"mxfp4": ranges})


def test_our_cuda_kernels_compute_every_number_of_tokens_from_the_weights_as_stored(kernels: Kernels) -> None:
    from moe_optimizer.vllm_plugin.session import current_session

    layer = loaded_layer(gpu_method())
    assert_as_stored(layer)
    assert (layer.w13_weight.stride(1), layer.w2_weight.stride(1)) == (256, WIDTH // 2)
    kernels.runs.clear()
    for tokens in (1, 2, 3, 700):
        assert_close(forward(layer, tokens))
    assert kernels.runs == [("direct", 1), ("direct", 2), (GROUPED, 3), (GROUPED, 700)]
    session = current_session()
    assert session is not None
    (entry,) = session.proof.passes[PASS].layers
    assert (entry.weight_format, entry.loaded_bytes, entry.weight_bytes) == ("gpt_oss", BYTES, BYTES)
    assert entry.calls_by_kernel == {"direct": 2, GROUPED: 2}


def test_new_weights_are_read_by_the_cuda_kernels_where_captured_graphs_read_them(kernels: Kernels) -> None:
    layer = loaded_layer(gpu_method())
    forward(layer, 3)
    read: list[tuple[int, ...]] = []

    def noted(problem: Any) -> Any:
        read.append(tuple(t.data_ptr() for t in (problem.w13, problem.w13_scale, problem.w13_bias, problem.w2_bias)))
        return problem

    kernels.change = noted
    forward(layer, 3)
    load_again(layer, 4)
    assert_close(forward(layer, 3, seed=4))
    assert read[0] == read[-1]
    served = layer.quant_method.moe_kernel.fused_experts.served(layer, largest=64, position=0)
    assert served.layer.weights.w13.data_ptr() == layer.w13_weight.data_ptr()


@pytest.mark.parametrize("wrong", ["direct", GROUPED])
def test_a_wrong_cuda_kernel_ends_the_start_because_nothing_else_reads_the_weights(
    kernels: Kernels, wrong: str
) -> None:
    kernels.wrong = wrong
    with pytest.raises(RequiredNotAppliedError, match="self-check failed"):
        loaded_layer(gpu_method())


@pytest.mark.parametrize(
    "ranges",
    [(TokenRange(up_to=8, use="direct"),),
     (TokenRange(up_to=8, use="direct"), TokenRange(up_to=ANY_NUMBER, use=STOCK))],
    ids=["ends", "stock"],
)  # fmt: skip
def test_a_plan_without_a_kernel_for_some_numbers_leaves_the_layer_to_vllm(
    kernels: Kernels, ranges: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = planned(tmp_path, monkeypatch, ranges)
    assert not is_ours(chosen_on_a_gpu(layer_config()))
    assert "numbers of tokens" in session.proof.passes[PASS].why_not
    assert kernels.runs == []


def test_a_backend_that_the_user_names_is_vllms_to_make(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="MARLIN"):
        chosen_on_a_gpu(layer_config(moe_backend="marlin"))
    assert kernels.runs == []


def test_activations_that_the_kernels_cannot_read_in_place_are_copied(kernels: Kernels) -> None:
    layer = loaded_layer(gpu_method())
    kernels.runs.clear()
    wide = torch.randn(3, HIDDEN + 1, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert_close(forward(layer, 3, x=wide[:, 1:]))
    assert kernels.runs == [(GROUPED, 3)]
