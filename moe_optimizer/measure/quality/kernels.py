"""Tells which kernel computes the experts at a number of tokens: by the plan, and by what its processes proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import LayerProof, Proof, read_proofs
from moe_optimizer.proof.verdict import model_holders
from moe_optimizer.specs.kernel_speeds import STOCK

_PASS = "flash_dmoe"


@dataclass(frozen=True, slots=True)
class Kernel:
    """What computes the experts."""

    name: str
    dtype: str
    """Of their weights: proven, or where vLLM's own kernel computes, as the checkpoint or vLLM's arguments say."""
    backend: str


def kernel_at(plan: Plan, proofs: Sequence[Proof], tokens: int) -> Kernel:
    """Return the kernel of a plan's experts in a step of so many tokens."""
    layers = [layer for proof in model_holders(proofs) for layer in _layers(proof)]
    dtype = ", ".join(sorted({_dtype(layer) for layer in layers})) or _as_served(plan)
    decision = plan.decision(_PASS)
    params = decision.params
    if decision.status is not Status.ON or not isinstance(params, FlashDmoeParams) or params.kernel is None:
        return Kernel(plan.serve_args.values.get("--moe-backend", STOCK), dtype, "vllm")
    for ranges in params.dispatch.values():
        use = next((each.use for each in ranges if tokens <= each.up_to), STOCK)
        return Kernel(use, dtype, "vllm" if use == STOCK else f"moe_optimizer {params.kernel}")
    proven = (proof.passes[_PASS].kernel for proof in model_holders(proofs) if _PASS in proof.passes)
    name = next(filter(None, proven), params.kernel)
    return Kernel(name, dtype, f"moe_optimizer {params.kernel}")


def _as_served(plan: Plan) -> str:
    """Return the dtype of the experts' weights where vLLM alone holds them."""
    if named := plan.serve_args.value("--quantization"):
        return named
    if plan.model.expert_format not in ("dtype", "none"):
        return plan.model.quant_method or plan.model.expert_format
    asked = plan.serve_args.value("--dtype")
    return plan.model.dtype if asked in (None, "auto") else asked


def proofs_in(run_dir: Path) -> tuple[Proof, ...]:
    """Return the proofs of a run, of all its servers."""
    folders = (run_dir, *(path for path in run_dir.iterdir() if path.is_dir())) if run_dir.is_dir() else ()
    return tuple(proof for folder in folders for proof in read_proofs(folder))


def _layers(proof: Proof) -> tuple[LayerProof, ...]:
    return proof.passes[_PASS].layers if _PASS in proof.passes else ()


def _dtype(layer: LayerProof) -> str:
    return layer.dtype if layer.weight_format == "plain" else layer.weight_format
