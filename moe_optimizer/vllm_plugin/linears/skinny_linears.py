"""Puts our kernel for few tokens into the dense layers of a loaded model, where it is faster than cuBLAS there.

vLLM has no place for it. A layer's quantisation method multiplies; it is one object of each layer, and that of an
unquantised layer is replaced by one that calls our op. What is faster is measured here, on the model's own weights: a
table would need the shapes of all models and of all their parts under tensor parallelism. Ranks need not agree, as each
multiplies its own part, and what they exchange they all receive alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from moe_optimizer.errors import RequiredNotAppliedError, described
from moe_optimizer.log import get_logger
from moe_optimizer.ops.kernel_arguments import SkinnyGemm
from moe_optimizer.ops.skinny_gemm import multiply, why_no_kernel
from moe_optimizer.vllm_plugin.compat import why_changed
from moe_optimizer.vllm_plugin.linears import SKINNY_PASS, op, speeds
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


def install_skinny_linears(session: PluginSession, worker: Any) -> None:
    """Have our kernel multiply in each dense layer of a loaded model for which it is faster.

    Called before the model's first forward, which may be compiled.

    Raises:
        RequiredNotAppliedError: no layer gets it, and the plan requires the pass. Any other failure leaves the model as
            it is, with the reason in the proof.
    """
    if session.wanted(SKINNY_PASS) is None or session.proof.passes[SKINNY_PASS].why_not:
        return
    try:
        reason = why_changed(RELIED_ON) or _why_not(worker.vllm_config)
        if not reason:
            with torch.inference_mode():
                reason = _installed(session, worker.model_runner.get_model())
    except RequiredNotAppliedError:
        raise
    except Exception as error:  # noqa: BLE001 - vLLM is starting; it must go on without us
        reason = f"fallback: {described(error)}"
    if reason:
        session.refused(SKINNY_PASS, reason)


def _why_not(vllm_config: Any) -> str:
    """Return what of this server's settings does not go with it, or ""."""
    from vllm import envs

    if vllm_config.lora_config is not None:
        return "LoRA: vLLM adds adapters to the products of its own linear layers"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT: every number of tokens has to take the same kernel"
    return ""


def _installed(session: PluginSession, model: torch.nn.Module) -> str:
    """Measure, choose and replace; return why no layer gets the kernel, or ""."""
    layers = dict(dense_layers(model))
    if not layers:
        return "the model has no dense layers in BF16 that are not quantised"
    by_shape: dict[op.Shape, list[str]] = {}
    for name, layer in layers.items():
        by_shape.setdefault(_shape(layer), []).append(name)
    max_tokens: dict[op.Shape, int] = {}
    said = []
    for shape, names in by_shape.items():
        most, words = _chosen([layers[name] for name in names])
        said.append(f"{names[0].rpartition('.')[2]} [{shape[0]} x {shape[1]}] of {len(names)}: {words}")
        if most:
            max_tokens[shape] = most
    found = "; ".join(said)
    logger.info("%s: %s", SKINNY_PASS, found)
    if not max_tokens:
        return f"it is not faster than cuBLAS for any layer: {found}"
    covered = {name: layer for name, layer in layers.items() if _shape(layer) in max_tokens}
    for name, layer in covered.items():
        wrong = why_wrong(layer, max_tokens[_shape(layer)])
        if wrong:
            return f"{name}: {wrong}"

    def used() -> None:
        op.chosen.on_use = None
        session.ran(SKINNY_PASS)

    op.chosen.max_tokens, op.chosen.on_use = max_tokens, used
    from moe_optimizer.vllm_plugin.linears.method import SkinnyLinearMethod

    for layer in covered.values():
        layer.quant_method = SkinnyLinearMethod(layer.quant_method)
    session.applied(SKINNY_PASS, kernel=KERNEL, isa=ISA)
    session.proof.passes[SKINNY_PASS].found = found
    return ""


def dense_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that vLLM multiplies by cuBLAS in BF16, by name, in the model's order.

    Not replicated ones, such as gates: their products are small, and the choice of experts hangs on them.
    """
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear, UnquantizedLinearMethod
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    modules: Iterable[tuple[str, Any]] = model.named_modules()  # vLLM's own attributes, which torch does not declare
    for name, layer in modules:
        if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            continue
        if type(layer.quant_method) is not UnquantizedLinearMethod:
            continue
        # From 0.32 on the user can have another backend multiply.
        if getattr(layer.quant_method, "_gemm_impl", default_unquantized_gemm) is not default_unquantized_gemm:
            continue
        if _covers(cast("torch.Tensor", layer.weight), cast("torch.Tensor | None", layer.bias)):
            yield name, layer


def _covers(weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    rows, depth = weight.shape
    call = SkinnyGemm(weight.new_empty((1, depth)), weight, bias, weight.new_empty((1, rows)))
    return why_no_kernel(call) is None


def _shape(layer: Any) -> op.Shape:
    return layer.weight.shape[0], layer.weight.shape[1]


def _chosen(layers: Sequence[Any]) -> tuple[int, str]:
    """Return up to how many tokens our kernel computes layers of one shape, and why in words."""
    weights = [(layer.weight, layer.bias) for layer in layers]
    reason = speeds.why_not_cold(weights)
    if reason:
        return 0, f"cuBLAS, {reason}"
    timed = speeds.times(weights)
    most = speeds.faster_up_to(timed)
    shown = ", ".join(f"{each.ours_us:.1f} us for {each.cublas_us:.1f} at {each.tokens}" for each in timed)
    return most, f"{f'ours up to {most}' if most else 'cuBLAS'} ({shown})"


def why_wrong(layer: Any, max_tokens: int) -> str:
    """Return in what the kernel differs from cuBLAS on a layer's own weight, or ""."""
    weight, bias = layer.weight, layer.bias
    g = torch.Generator(device=weight.device).manual_seed(0)
    for tokens in {1, max_tokens}:
        x = torch.randn(tokens, weight.shape[1], device=weight.device, generator=g).to(weight.dtype)
        theirs = torch.nn.functional.linear(x, weight, bias).float()
        ours = multiply(x, weight, bias).float()
        off = (ours - theirs).abs().amax(-1)
        if not (off <= _RELATIVE * theirs.abs().amax(-1)).all():
            return f"differs from cuBLAS by {float(off.max()):.2g} at {tokens} tokens"
    return ""
