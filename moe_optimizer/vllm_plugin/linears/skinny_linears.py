"""Puts our kernel for few tokens into the dense layers of a loaded model, where it is faster than vLLM's product there.

vLLM has no place for it. A layer's quantisation method multiplies; it is one object of each layer, and that of a
layer in BF16 or FP8 is replaced by one that calls our op. What is faster is measured here, on the model's own weights:
a table would need the shapes of all models and of all their parts under tensor parallelism. Ranks need not agree, as
each multiplies its own part, and what they exchange they all receive alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_optimizer.log import get_logger
from moe_optimizer.plan.decision import Wish
from moe_optimizer.vllm_plugin.compat import why_changed
from moe_optimizer.vllm_plugin.linears import SKINNY_PASS, fp8_layers, op, speeds
from moe_optimizer.vllm_plugin.linears.dense_layers import DenseLayer, dense_layers
from moe_optimizer.vllm_plugin.session import PluginSession

logger = get_logger(__name__)

KERNEL, ISA = "skinny_gemm (cuda)", "sm_90a"

RELIED_ON: Mapping[str, Mapping[str, str]] = {
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply": {
        "0.26": "ba0c0bd11ca697b7", "0.32, 0.33": "742ead1f3ef7ca03",
    },
    "vllm.model_executor.layers.linear:ColumnParallelLinear.forward": {"0.26 to 0.33": "9422dcd8a9c1c53a"},
    "vllm.model_executor.layers.linear:RowParallelLinear.forward": {"0.26 to 0.33": "ffa75b5e3b234ce1"},
}  # fmt: skip
"""What of vLLM this replaces or counts on -> versions -> `compat.fingerprint` of its source."""
_RELATIVE = 2.0**-6
"""Chosen: both round once to BF16, and cuBLAS a second time where it splits K."""
_OF_ROUNDED_TOKENS = 0.1
"""Chosen: norm of the difference over that of the product. vLLM's FP8 products round the tokens to E4M3, which changes
them by 4.7 % (docs/kernels.md); a scale that is read otherwise than vLLM does changes them by far more."""


def install_skinny_linears(session: PluginSession, worker: Any) -> None:
    """Have our kernel multiply in each dense layer of a loaded model for which it is faster.

    Layers in FP8 are among them only where the pass was asked for: vLLM rounds their tokens, and no record has a gain.
    Called before the model's first forward, which may be compiled.

    Raises:
        RequiredNotAppliedError: no layer gets it, and the plan requires the pass. Any other failure leaves the model as
            it is, with the reason in the proof.
    """
    decision = session.wanted(SKINNY_PASS)
    if decision is None or session.proof.passes[SKINNY_PASS].why_not:
        return
    with session.falling_back(SKINNY_PASS), torch.inference_mode():
        reason = why_changed(RELIED_ON) or _why_not(worker.vllm_config)
        if reason:
            session.refused(SKINNY_PASS, reason)
        else:
            _install(session, worker.model_runner.get_model(), fp8=decision.wish is Wish.ON)


def _why_not(vllm_config: Any) -> str:
    """Return what of this server's settings does not go with it, or ""."""
    from vllm import envs

    if vllm_config.lora_config is not None:
        return "LoRA: vLLM adds adapters to the products of its own linear layers"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT: every number of tokens has to take the same kernel"
    return ""


def _install(session: PluginSession, model: torch.nn.Module, *, fp8: bool) -> None:
    """Measure, choose and replace."""
    without_fp8 = why_changed(fp8_layers.RELIED_ON) if fp8 else ""
    layers, stock = _with_one_product_of_a_kind(dense_layers(model, fp8=fp8 and not without_fp8))
    left = f"; layers in FP8 are left to vLLM: {without_fp8}" if without_fp8 else ""
    if not layers:
        dtypes = "BF16 or FP8" if fp8 else "BF16"
        session.refused(SKINNY_PASS, f"the model has no dense layers that the kernel covers, in {dtypes}{left}")
        return
    by_kind: dict[op.Kind, list[str]] = {}
    for name, layer in layers.items():
        by_kind.setdefault(layer.kind, []).append(name)
    max_tokens: dict[op.Kind, int] = {}
    said = []
    for kind, names in by_kind.items():
        most, words = _chosen([layers[name] for name in names])
        said.append(f"{names[0].rpartition('.')[2]} [{kind[0]} x {kind[1]}] of {len(names)}: {words}")
        if most:
            max_tokens[kind] = most
    found = f"{'; '.join(said)}{left}"
    logger.info("%s: %s", SKINNY_PASS, found)
    if not max_tokens:
        reason = f"it is not faster than vLLM's product for any layer: {found}"
        session.refused(SKINNY_PASS, reason, timed_no_faster=not without_fp8)
        return
    covered = {name: layer for name, layer in layers.items() if layer.kind in max_tokens}
    for name, layer in covered.items():
        wrong = why_wrong(layer, max_tokens[layer.kind])
        if wrong:
            session.refused(SKINNY_PASS, f"{name}: {wrong}")
            return

    def used() -> None:
        op.chosen.on_use = None
        session.ran(SKINNY_PASS)

    # Of all layers: a graph that vLLM kept on disk may call the op for one that this process leaves to vLLM.
    op.chosen.stock = stock
    op.chosen.max_tokens, op.chosen.on_use = max_tokens, used
    for layer in covered.values():
        _replace(layer)
    session.applied(SKINNY_PASS, kernel=KERNEL, isa=ISA)
    session.proof.passes[SKINNY_PASS].found = found
    session.graph_parts[SKINNY_PASS] = hashlib.sha256(str(sorted(covered)).encode()).hexdigest()


def _with_one_product_of_a_kind(
    found: Iterable[tuple[str, DenseLayer]],
) -> tuple[dict[str, DenseLayer], dict[op.Kind, op.Product]]:
    """Return the layers by name, and how stock vLLM multiplies each kind of quantised ones.

    Those of a kind have the product of the first, which the op takes for all: what serves is timed and compared. vLLM
    compiles the rounding of tokens, and a layer whose rounding met no tokens yet would compile it while a graph is
    captured.
    """
    layers: dict[str, DenseLayer] = {}
    stock: dict[op.Kind, op.Product] = {}
    for name, layer in found:
        quantised = layer.scale is not None
        product = stock.setdefault(layer.kind, layer.stock_product) if quantised else layer.stock_product
        layers[name] = replace(layer, stock_product=product)
    return layers, stock


def _replace(layer: DenseLayer) -> None:
    from moe_optimizer.vllm_plugin.linears.method import SkinnyLinearMethod, skinny_fp8_method

    module = layer.module
    if layer.scale is None:
        module.quant_method = SkinnyLinearMethod(module.quant_method)
    else:
        module.quant_method = skinny_fp8_method(module.quant_method, is_transposed=module.weight is not layer.w)


def _chosen(layers: Sequence[DenseLayer]) -> tuple[int, str]:
    """Return up to how many tokens our kernel computes layers of one kind, and why in words."""
    stock = layers[0].stock_name
    reason = speeds.why_not_cold(layers)
    if reason:
        return 0, f"{stock}, {reason}"
    timed = speeds.times(layers)
    most = speeds.faster_up_to(timed)
    shown = ", ".join(f"{each.ours_us:.1f} us for {each.stock_us:.1f} at {each.tokens}" for each in timed)
    if not most:
        return most, f"{stock} ({shown})"
    return most, f"ours up to {most} ({shown}{'' if layers[0].scale is None else f', {stock}'})"


def why_wrong(layer: DenseLayer, max_tokens: int) -> str:
    """Return in what the kernel differs from plain torch on a layer's own weight, or ""."""
    w = layer.w
    g = torch.Generator(device=w.device).manual_seed(0)
    for tokens in sorted({1, max_tokens}):
        x = torch.randn(tokens, w.shape[1], device=w.device, generator=g).bfloat16()
        exact = layer.exact(x)
        off = (layer.ours(x).float() - exact).abs().amax(-1)
        if not (off <= _RELATIVE * exact.abs().amax(-1)).all():
            other = "cuBLAS" if layer.scale is None else "torch"
            return f"differs from {other} by {float(off.max()):.2g} at {tokens} tokens"
        if layer.scale is not None:
            apart = (layer.stock(x).float() - exact).norm() / exact.norm()
            if not apart <= _OF_ROUNDED_TOKENS:
                return f"vLLM's product differs from that of weight and scales by {float(apart):.1%}"
    return ""
