"""vLLM's own dense layers in FP8 with our op in them, on the CPU, where plain torch takes the kernel's place.

Weights with scales of tensors and channels are multiplied by vLLM's own kernel for CPUs. Its kernels for blocks need a
GPU or AMX, so one of plain torch stands for them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optimizer.plan.decision import Wish
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.skinny_layers import configured, install, make_fp8_layer, planned, without_ranks

pytest.importorskip("vllm")

OUTPUTS, INPUTS = 192, 320
SCALES = ("tensor", "channel", "block", "compressed")
MOST = 4


@pytest.fixture(autouse=True)
def _layers_can_be_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are whole, those in BF16 are multiplied as on GPUs, and those with scales of blocks have a kernel.

    With AMX vLLM packs weights with a scale of the tensor for a kernel of its own, which no GPU has.
    """
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    class BlockKernelOfPlainTorch(Fp8BlockScaledMMLinearKernel):
        @classmethod
        def is_supported(cls, compute_capability: Any = None) -> Any:
            return True, None

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> Any:
            x = A.float() * As.repeat_interleave(128, 1)[:, : A.shape[1]]
            whole = Bs.repeat_interleave(128, 0).repeat_interleave(128, 1)[: B.shape[0], : B.shape[1]]
            return (x @ (B.float() * whole).T).to(self.config.out_dtype)

    def init(**arguments: Any) -> Any:
        if arguments["weight_quant_key"].scale.group_shape.row != 128:
            return init_fp8_linear_kernel(**arguments)
        del arguments["module_name"]
        return BlockKernelOfPlainTorch(FP8ScaledMMLinearLayerConfig(**arguments))

    without_ranks(monkeypatch)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(linear, "dispatch_unquantized_gemm", lambda *_: default_unquantized_gemm)
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", init)
    monkeypatch.setattr(fp8, "per_block_cast_to_fp8", inspect.unwrap(fp8.per_block_cast_to_fp8))  # not compiled
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with configured():
        yield
    torch.set_default_dtype(before)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens that reached the kernel, which is faster up to `MOST` of them."""
    from moe_optimizer.ops.skinny_gemm import skinny_gemm
    from moe_optimizer.vllm_plugin.linears import dense_layers, op, speeds

    made: list[int] = []

    def multiply(x: Any, w: Any, bias: Any, scale: Any = None) -> Any:
        made.append(x.shape[0])
        return skinny_gemm(x, w, bias, scale=scale)

    for module in (op, dense_layers):
        monkeypatch.setattr(module, "multiply", multiply)
    monkeypatch.setattr(dense_layers, "why_no_kernel", lambda _: None)
    monkeypatch.setattr(speeds, "why_not_cold", lambda _: "")
    monkeypatch.setattr(speeds, "times", lambda _: tuple(speeds.Timed(n, n / MOST * 0.97, 1.0) for n in speeds.TOKENS))
    return made


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    """A plan in which the pass was asked for."""
    return planned(tmp_path, monkeypatch)


def make_model(scales: str, *, bias: bool = False) -> Any:
    """A model of two layers."""
    model: Any = torch.nn.Module()
    model.layers = torch.nn.ModuleList(make_fp8_layer(scales, OUTPUTS, INPUTS, bias=bias) for _ in range(2))
    return model


def tokens_of(count: int) -> Any:
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(count), dtype=torch.float).bfloat16()


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("scales", SCALES)
def test_few_tokens_reach_the_kernel_unrounded_and_more_are_multiplied_as_by_vllm(session, products, scales, bias):
    model = make_model(scales, bias=bias)
    want = {count: [layer(tokens_of(count))[0] for layer in model.layers] for count in (1, MOST, MOST + 1)}
    entry = install(session, model)
    assert (entry.applied, entry.ran, entry.why_not) == (True, False, "")
    assert f"[{OUTPUTS} x {INPUTS}] of 2: ours up to 4" in entry.found
    assert "vLLM's FP8" in entry.found
    for count, stock in want.items():
        products.clear()
        found = [layer(tokens_of(count))[0] for layer in model.layers]
        assert products == ([count] * 2 if count <= MOST else [])
        for layer, got, theirs in zip(model.layers, found, stock, strict=True):
            if count > MOST:
                assert torch.equal(got, theirs)
                continue
            exact = tokens_of(count).double() @ whole_weight(layer).T
            exact = exact + layer.bias.double() if bias else exact
            ours_off, theirs_off = ((each.double() - exact).norm() / exact.norm() for each in (got, theirs))
            assert ours_off < 2.0**-8 < theirs_off < 0.1
    assert entry.ran


def whole_weight(layer: Any) -> Any:
    """The weight that a layer's FP8 one stands for, in float64."""
    scale = getattr(layer, "weight_scale_inv", None)
    if scale is None:
        return layer.weight.t().double() * layer.weight_scale.double()
    whole = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return layer.weight.double() * whole[:OUTPUTS, :INPUTS]


@pytest.mark.parametrize("scales", SCALES)
def test_a_replaced_method_is_of_vllms_class_still(session, products, scales):
    model = make_model(scales)
    before = type(model.layers[0].quant_method)
    install(session, model)
    method = model.layers[0].quant_method
    assert type(method) is not before
    assert isinstance(method, before)


@pytest.mark.parametrize("scales", ["channel", "block"])
def test_the_op_is_in_a_compiled_graph_and_quantises_nothing_there(session, products, scales):
    from moe_optimizer.vllm_plugin.linears import op

    model = make_model(scales)
    layer = model.layers[0]
    stock = layer(tokens_of(2))[0]
    install(session, model)
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.code))
        return graph

    run = torch.compile(lambda x: layer.quant_method.apply(layer, x) * 2, backend=keep, fullgraph=True)
    ours = layer(tokens_of(2))[0] * 2
    assert torch.equal(run(tokens_of(2)), ours)
    op.chosen.max_tokens = {}
    assert torch.equal(run(tokens_of(2)), stock * 2)
    assert len(graphs) == 1
    assert "moe_optimizer_vllm.linear" in graphs[0]
    assert "float8" not in graphs[0]


def test_where_the_pass_was_not_asked_for_layers_in_fp8_are_left_to_vllm(products, tmp_path, monkeypatch):
    model = make_model("channel")
    entry = install(planned(tmp_path, monkeypatch, wish=Wish.AUTO), model)
    assert not entry.applied
    assert "in BF16" in entry.why_not
    assert "FP8" not in entry.why_not


def test_layers_in_bf16_are_taken_beside_an_fp8_whose_source_is_not_known(session, products, monkeypatch):
    from vllm.model_executor.layers.linear import ColumnParallelLinear

    from moe_optimizer.vllm_plugin.linears import fp8_layers

    known = {target: {"0.26": "another"} for target in fp8_layers.RELIED_ON}
    monkeypatch.setattr(fp8_layers, "RELIED_ON", known)
    model = make_model("channel")
    wide: Any = ColumnParallelLinear(INPUTS, OUTPUTS, bias=False, params_dtype=torch.bfloat16)
    torch.nn.init.normal_(wide.weight)
    model.layers.append(wide)
    entry = install(session, model)
    assert entry.applied
    assert "layers in FP8 are left to vLLM" in entry.found
    products.clear()
    for layer in model.layers:
        layer(tokens_of(1))
    assert products == [1]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "input_scale", torch.ones(1, dtype=torch.float)),
        lambda layer: setattr(layer, "output_size_per_partition", OUTPUTS - 1),
        lambda layer: setattr(layer, "weight_scale", torch.nn.Parameter(layer.weight_scale.double(), False)),
        lambda layer: setattr(layer, "weight_scale", torch.nn.Parameter(layer.weight_scale[:3], False)),
        lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight.bfloat16(), False)),
        lambda layer: setattr(layer.quant_method.fp8_linear, "input_quant_key", lambda: "a key"),
    ],
    ids=["static scale of the input", "padded", "scales in FP64", "scales of parts", "no E4M3", "input comes in E4M3"],
)
def test_what_vllm_holds_otherwise_is_left_to_it(session, products, change):
    model = make_model("channel")
    for layer in model.layers:
        change(layer)
    entry = install(session, model)
    assert not entry.applied
    assert "no dense layers" in entry.why_not


def test_what_is_timed_and_compared_is_the_one_product_that_serves(session, products, monkeypatch):
    from moe_optimizer.vllm_plugin.linears import op, speeds

    timed: list[Any] = []

    def times(layers: Any) -> Any:
        timed.extend(layers)
        return (speeds.Timed(1, 0.5, 1.0),)

    monkeypatch.setattr(speeds, "times", times)
    assert install(session, make_model("channel")).applied
    assert len(timed) == 2
    assert {each.stock_product for each in timed} == {op.chosen.stock[timed[0].kind]}


def with_scales(multiply: Any, scales: Any, A: Any, B: Any, As: Any, Bs: Any) -> Any:
    """vLLM's product with a layer's own scales, whichever are given."""
    return multiply(A, B, As, scales)


def test_scales_that_are_read_otherwise_than_vllm_does_are_found_at_load(session, products, monkeypatch):
    from moe_optimizer.vllm_plugin.linears import fp8_layers

    model = make_model("block")
    read = fp8_layers.scale_of
    monkeypatch.setattr(fp8_layers, "scale_of", lambda layer: read(layer) * 2)
    for layer in model.layers:
        kernel = layer.quant_method.fp8_linear
        product = functools.partial(with_scales, kernel.apply_block_scaled_mm, read(layer))
        monkeypatch.setattr(kernel, "apply_block_scaled_mm", product)
    entry = install(session, model)
    assert not entry.applied
    assert "weight and scales" in entry.why_not


def test_a_wrong_kernel_leaves_every_layer_as_it_was(session, products, monkeypatch):
    from moe_optimizer.ops.skinny_gemm import skinny_gemm
    from moe_optimizer.vllm_plugin.linears import dense_layers

    monkeypatch.setattr(dense_layers, "multiply", lambda x, w, bias, scale: skinny_gemm(x, w, bias, scale=scale * 1.1))
    model = make_model("channel")
    entry = install(session, model)
    assert not entry.applied
    assert "layers.0: differs from torch by" in entry.why_not


def test_this_vllms_source_is_known():
    from moe_optimizer.vllm_plugin.compat import why_changed
    from moe_optimizer.vllm_plugin.linears.fp8_layers import RELIED_ON

    assert why_changed(RELIED_ON) == ""
