"""vLLM's own dense layers on a GPU with our op in them: timed, chosen, checked and replaced as a worker does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_optimizer.vllm_plugin.linears import speeds
from moe_optimizer.vllm_plugin.linears.dense_layers import DenseLayer, dense_layers
from moe_optimizer.vllm_plugin.session import PluginSession
from tests.skinny_layers import configured, install, make_fp8_layer, planned, without_ranks

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

HIDDEN, HEADS, KV_HEADS, HEAD = 2048, 32, 4, 128
LAYERS = 12
"""So many projections are more than L2 holds."""
SCALES = ("tensor", "channel", "block", "compressed")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginSession:
    """A plan that has the pass, in a process without groups of ranks."""
    without_ranks(monkeypatch)
    return planned(tmp_path, monkeypatch)


def make_model() -> Any:
    """The projections of attention of Qwen3-30B-A3B, as vLLM loads them."""
    from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

    model: Any = torch.nn.Module()
    model.layers = torch.nn.ModuleList()
    options: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16}
    with torch.device("cuda"):
        for _ in range(LAYERS):
            layer: Any = torch.nn.Module()
            layer.qkv_proj = QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, **options)
            layer.o_proj = RowParallelLinear(HEADS * HEAD, HIDDEN, **options)
            model.layers.append(layer)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def forward(model: Any, x: Any, heads: Any) -> list[Any]:
    """What the projections return."""
    return [each for layer in model.layers for each in (layer.qkv_proj(x)[0], layer.o_proj(heads)[0])]


def inputs(tokens: int) -> list[Any]:
    g = torch.Generator("cuda").manual_seed(tokens)
    return [torch.randn(tokens, width, device="cuda", generator=g).bfloat16() for width in (HIDDEN, HEADS * HEAD)]


def test_both_are_timed_in_time_and_what_is_chosen_is_what_was_faster(session):
    layers = [DenseLayer(layer, layer.qkv_proj.weight, None) for layer in make_model().layers]
    with torch.inference_mode():
        timed = speeds.times(layers)
    for each in timed:
        print(each)
        assert 2 < each.ours_us < 200
        assert 2 < each.stock_us < 200
    assert (speeds.faster_up_to(timed) == 0) == (not timed[0].is_faster)


def test_the_layers_return_what_cublas_does_up_to_rounding_and_in_graphs_too(session, monkeypatch):
    # Whatever is faster here: ours, so that the layers are replaced.
    monkeypatch.setattr(speeds, "times", lambda _: tuple(speeds.Timed(n, 1.0, 2.0) for n in speeds.TOKENS))
    model = make_model()
    want = {tokens: forward(model, *inputs(tokens)) for tokens in (1, 3, 8, 9)}
    entry = install(session, model)
    assert (entry.applied, entry.why_not) == (True, "")
    for tokens, theirs in want.items():
        ours = forward(model, *inputs(tokens))
        for one, other in zip(ours, theirs, strict=True):
            off = (one.float() - other.float()).abs().amax()
            assert off <= 2.0**-6 * other.float().abs().amax()
        assert tokens <= 8 or all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
        x, heads = inputs(tokens)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            forward(model, x, heads)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = forward(model, x, heads)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert tokens > 8 or all(torch.equal(one, other) for one, other in zip(captured, ours, strict=True))
    assert entry.ran


def test_a_worker_measures_and_says_what_it_found(session):
    entry = install(session, make_model())
    print(entry.found or entry.why_not)
    assert "qkv_proj [5120 x 2048] of 12" in (entry.found or entry.why_not)
    assert "fallback" not in entry.why_not


def make_fp8_model(scales: str, count: int, *, bias: bool = False) -> Any:
    """Layers of the output projection's size as vLLM holds them in FP8."""
    model: Any = torch.nn.Module()
    model.layers = torch.nn.ModuleList(
        make_fp8_layer(scales, HIDDEN, HEADS * HEAD, bias=bias, device="cuda") for _ in range(count)
    )
    return model


@pytest.fixture
def in_fp8() -> Any:
    """A process in which vLLM makes layers in FP8."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with configured():
        yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("in_fp8")
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("scales", SCALES)
def test_layers_in_fp8_return_the_exact_product_and_beyond_eight_tokens_what_vllm_does(
    session, monkeypatch, scales, bias
):
    # Whatever is faster here: ours, so that the layers are replaced.
    monkeypatch.setattr(speeds, "why_not_cold", lambda _: "")
    monkeypatch.setattr(speeds, "times", lambda _: tuple(speeds.Timed(n, 1.0, 2.0) for n in speeds.TOKENS))
    model = make_fp8_model(scales, 2, bias=bias)
    found = dict(dense_layers(model, fp8=True))
    assert len(found) == 2, "vLLM holds them otherwise than its source says"
    want = {tokens: [layer(inputs(tokens)[1])[0] for layer in model.layers] for tokens in (1, 3, 8, 9, 64)}
    entry = install(session, model)
    assert (entry.applied, entry.why_not) == (True, "")
    for tokens, stock in want.items():
        x = inputs(tokens)[1]
        ours = [layer(x)[0] for layer in model.layers]
        for layer, got, theirs in zip(found.values(), ours, stock, strict=True):
            if tokens > 8:
                assert torch.equal(got, theirs)
                continue
            exact = layer.exact(x)
            off, of_theirs = ((each.float() - exact).norm() / exact.norm() for each in (got, theirs))
            assert off < 2.0**-8
            assert of_theirs < 0.1
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model.layers[0](x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = model.layers[0](x)[0]
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, ours[0])
    assert entry.ran


@pytest.mark.usefixtures("in_fp8")
@pytest.mark.parametrize("scales", SCALES)
def test_a_worker_measures_layers_in_fp8_beside_vllms_kernel_with_its_quantisation(session, scales):
    entry = install(session, make_fp8_model(scales, 24))
    print(entry.found or entry.why_not)
    assert f"[{HIDDEN} x {HEADS * HEAD}] of 24" in (entry.found or entry.why_not)
    assert "vLLM's FP8" in (entry.found or entry.why_not)
    assert "fallback" not in entry.why_not
