"""vLLM's own dense layers with our op in them, on the CPU, where plain torch takes the kernel's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.skinny_layers import install, planned, without_ranks

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

HIDDEN, HEADS, WIDTH = 64, 4, 32
MOST = 4


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens that reached the kernel, which is faster up to `MOST` of them."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    from moe_optimizer.ops.skinny_gemm import skinny_gemm
    from moe_optimizer.vllm_plugin.linears import dense_layers, op, speeds

    made: list[int] = []

    def multiply(x: Any, w: Any, bias: Any, scale: Any = None) -> Any:
        made.append(x.shape[0])
        return skinny_gemm(x, w, bias, scale=scale)

    without_ranks(monkeypatch)
    # As on GPUs: vLLM's CPU build multiplies by another function, of weights that it packs.
    monkeypatch.setattr(linear, "dispatch_unquantized_gemm", lambda *_: default_unquantized_gemm)
    for module in (op, dense_layers):
        monkeypatch.setattr(module, "multiply", multiply)
    monkeypatch.setattr(dense_layers, "why_no_kernel", lambda _: None)
    monkeypatch.setattr(speeds, "why_not_cold", lambda layers: "" if len(layers) > 1 else "only one")
    monkeypatch.setattr(speeds, "times", lambda _: tuple(speeds.Timed(n, n / MOST * 0.97, 1.0) for n in speeds.TOKENS))
    return made


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    """A plan that has the pass."""
    return planned(tmp_path, monkeypatch)


def make_model(layers: int = 2, *, bias: bool = False) -> Any:
    """Attention's and an MLP's layers of vLLM, as they are loaded, and a gate."""
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        ReplicatedLinear,
        RowParallelLinear,
    )

    model: Any = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    options: dict[str, Any] = {"bias": bias, "params_dtype": torch.bfloat16}
    for _ in range(layers):
        layer: Any = torch.nn.Module()
        layer.self_attn, layer.mlp = torch.nn.Module(), torch.nn.Module()
        layer.self_attn.qkv_proj = QKVParallelLinear(HIDDEN, HIDDEN // HEADS, HEADS, HEADS, **options)
        layer.self_attn.o_proj = RowParallelLinear(HIDDEN, HIDDEN, **options)
        layer.mlp.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [WIDTH, WIDTH], **options)
        layer.mlp.gate = ReplicatedLinear(HIDDEN, 8, **options)
        model.layers.append(layer)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def forward(model: Any, tokens: int) -> list[Any]:
    """What the layers return."""
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    found = []
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [attention.qkv_proj(x)[0], attention.o_proj(x)[0], mlp.gate_up_proj(x)[0], mlp.gate(x)[0]]
    return found


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_few_tokens_reach_the_kernel_and_more_are_multiplied_as_before(session, products, bias):
    model = make_model(bias=bias)
    want = {tokens: forward(model, tokens) for tokens in (0, 1, MOST, MOST + 1)}
    entry = install(session, model)
    assert (entry.applied, entry.ran, entry.why_not) == (True, False, "")
    assert "qkv_proj [192 x 64] of 2: ours up to 4" in entry.found
    for tokens, expected in want.items():
        products.clear()
        for got, stock in zip(forward(model, tokens), expected, strict=True):
            assert torch.equal(got, stock)
        # Of each layer three; the gate is not among them.
        assert products == ([tokens] * 6 if 0 < tokens <= MOST else [])
    assert entry.ran


def test_the_op_in_a_compiled_graph_does_not_depend_on_what_was_chosen(session, products):
    from moe_optimizer.vllm_plugin.linears import op

    model = make_model()
    install(session, model)
    layer = model.layers[0].self_attn.qkv_proj
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.code))
        return graph

    run = torch.compile(lambda x: layer.quant_method.apply(layer, x) * 2, backend=keep, fullgraph=True)
    x = torch.randn(2, HIDDEN).bfloat16()
    products.clear()
    want = torch.nn.functional.linear(x, layer.weight) * 2
    assert torch.equal(run(x), want)
    assert len(products) == 1
    op.chosen.max_tokens = {}
    assert torch.equal(run(x), want)
    assert len(products) == 1
    assert len(graphs) == 1
    assert "moe_optimizer_vllm.linear" in graphs[0]


def test_shapes_for_which_it_is_not_faster_stay_as_they_are(session, products, monkeypatch):
    from moe_optimizer.vllm_plugin.linears import speeds

    def times(layers: Any) -> Any:
        return (speeds.Timed(1, 0.8 if layers[0].w.shape == (HIDDEN, HIDDEN) else 1.0, 1.0),)

    monkeypatch.setattr(speeds, "times", times)
    model = make_model()
    entry = install(session, model)
    assert "qkv_proj [192 x 64] of 2: cuBLAS (1.0 us for 1.0 at 1)" in entry.found
    layer = model.layers[0].self_attn
    kinds = [type(each.quant_method).__name__ for each in (layer.qkv_proj, layer.o_proj)]
    assert kinds == ["UnquantizedLinearMethod", "SkinnyLinearMethod"]


def test_compiled_graphs_in_which_other_layers_call_the_op_have_other_keys(session, products, monkeypatch):
    from vllm import envs

    from moe_optimizer.vllm_plugin.compile_factor import add_compile_factor
    from moe_optimizer.vllm_plugin.linears import speeds

    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    assert add_compile_factor() == ""
    keys = []
    for faster in (1, 1, 2):

        def times(layers: Any, faster: int = faster) -> Any:
            return (speeds.Timed(1, 0.8 if len(set(layers[0].w.shape)) <= faster else 1.0, 1.0),)

        monkeypatch.setattr(speeds, "times", times)
        assert install(session, make_model()).applied
        keys.append(envs.compile_factors())
    assert keys[0] == keys[1] != keys[2]


def test_where_nothing_is_faster_the_pass_is_not_applied_and_says_the_times(session, products, monkeypatch):
    from moe_optimizer.vllm_plugin.linears import speeds

    monkeypatch.setattr(speeds, "times", lambda _: (speeds.Timed(1, 1.0, 1.0),))
    model = make_model()
    entry = install(session, model)
    assert not entry.applied
    assert "not faster" in entry.why_not
    assert "1.0 us for 1.0 at 1" in entry.why_not
    assert entry.timed_no_faster
    forward(model, 1)
    assert products == []


def test_a_wrong_kernel_leaves_every_layer_as_it_was(session, products, monkeypatch):
    from moe_optimizer.vllm_plugin.linears import dense_layers

    monkeypatch.setattr(dense_layers, "multiply", lambda x, w, bias, _: torch.nn.functional.linear(x, w, bias) * 1.1)
    model = make_model()
    entry = install(session, model)
    assert not entry.applied
    assert "layers.0.self_attn.qkv_proj: differs from cuBLAS by" in entry.why_not
    assert not entry.timed_no_faster
    forward(model, 1)
    assert products == []


def test_lora_is_refused(session, products):
    entry = install(session, make_model(), lora=object())
    assert "LoRA" in entry.why_not
    assert not entry.applied
    assert not entry.timed_no_faster


def test_a_model_without_such_layers_is_refused(session, products):
    entry = install(session, torch.nn.Linear(2, 2))
    assert "no dense layers" in entry.why_not


def test_a_further_reason_is_no_choice_by_times_any_more(session, products, monkeypatch):
    from moe_optimizer.vllm_plugin.linears import speeds

    monkeypatch.setattr(speeds, "times", lambda _: (speeds.Timed(1, 1.0, 1.0),))
    assert install(session, make_model()).timed_no_faster
    session.refused("skinny_gemm", "cheese")
    assert not session.proof.passes["skinny_gemm"].timed_no_faster


def test_what_is_required_and_cannot_be_ends_the_start(products, tmp_path, monkeypatch):
    session = planned(tmp_path, monkeypatch, required=True)
    with pytest.raises(RequiredNotAppliedError, match="LoRA"):
        install(session, make_model(), lora=object())


def test_this_vllms_source_is_known():
    from moe_optimizer.vllm_plugin.compat import why_changed
    from moe_optimizer.vllm_plugin.linears.skinny_linears import RELIED_ON

    assert why_changed(RELIED_ON) == ""
