"""Decides whether experts are pruned to two of four weights."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.costs.roofline import experts_read_ratio
from moe_optimizer.errors import InputError
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.plan.decision import Applier, Decision, Gain, Status, Wish
from moe_optimizer.plan.pass_params import Sparsity24Params
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.expert_kernel import why_converted_already, why_not_for_converted_weights

FORMAT = "sparse_24"
"""Name of the plugin's weight format."""
_OP = "sparse_experts"
_BITS = 9
"""Of BF16, half of the weights' bits and one of mask for each."""
_SIZE_MULTIPLE = 16
"""H and I that the kernel covers."""
_RECORD = "benchmarks/records/2026-11-20_epyc_sparsity_24.json"
_MORE_PERPLEXITY = {False: 13, True: 14}
"""Percent on the bundled model, by the record; whether norms choose beside the magnitude -> how much."""


class Sparsity24(OptimizationPass):
    """Two of every four expert weights are zero and not stored.

    Off in every shipped profile, and `auto` is off too: pruning without training costs quality, and only a quality
    gate may allow it.
    """

    name = "sparsity_24"
    flag = "sparsity"
    title = "2:4 sparse experts"
    limits = "unquantised BF16 experts on vLLM's CPU build, through our kernel; it costs quality"
    no_gain = "the kernel reads fewer bytes on the CPU alone"
    needs_experts = True

    def why_not(self, ctx: PlanContext) -> str:
        """Check model, device, dtype and sizes, then the kernel."""
        model = ctx.model
        if model.quant_method is not None:
            return f"needs unquantised expert weights to prune, found {model.quant_method}"
        if ctx.device != "cpu":
            return "vLLM removed its 2:4 kernels, and ours is for vLLM's CPU build"
        if "--quantization" in ctx.pinned:
            return f"--quantization {ctx.pinned.value('--quantization')} is given after -- and decides"
        if ctx.dtype != "bfloat16":
            return f"needs bfloat16, found {ctx.dtype}"
        converted = why_converted_already(ctx)
        if converted:
            return converted
        width = model.moe_intermediate_size
        if not ctx.parallelism.expert_parallel:
            width //= ctx.parallelism.tensor_parallel_size
        if model.expert_hidden_size % _SIZE_MULTIPLE or width % _SIZE_MULTIPLE:
            return (
                f"needs a hidden size and an expert width in multiples of {_SIZE_MULTIPLE}, "
                f"found {model.expert_hidden_size} and {width}"
            )
        if ctx.request.activation_norms is not None and ctx.parallelism.tensor_parallel_size > 1:
            return "sparsity_24.activation_norms are those of whole layers: they need tensor parallel size 1"
        reason = why_not_for_converted_weights(ctx)
        if not reason and _OP not in ctx.software.kernels.cpu_ops:
            return f"{_OP} has no CPU kernel in this build"
        return reason

    def gain(self, ctx: PlanContext) -> Gain | None:
        """Return how many times fewer expert bytes a decode step reads."""
        if ctx.device != "cpu" or not ctx.model.is_moe:
            return None
        ratio = experts_read_ratio(ctx.model, batch=ctx.workload.batch_size, from_bits=16, to_bits=_BITS)
        return Gain(metric="expert weight bytes per decode step", ratio=ratio)

    def choose(self, ctx: PlanContext) -> Decision:
        """Prune where it is asked for by name."""
        if ctx.wish(self.name)[0] is not Wish.ON:
            return self.when_off(ctx, "pruning costs quality and no quality gate has allowed it; auto does not prune")
        norms = ctx.request.activation_norms
        _check_norms(ctx)
        chosen_by = "magnitude alone" if norms is None else "magnitude x norm of the input"
        measured = () if norms is None else (f"{norms.path}: norms on {norms.tokens} tokens",)
        return self.decision(
            ctx,
            Status.ON,
            "experts 2:4 sparse",
            f"two of every four expert weights stay, by {chosen_by}; pruned layer by layer while loading",
            Applier.PLUGIN,
            evidence=(_RECORD, *measured),
            gain=self.gain(ctx),
            params=Sparsity24Params(
                weight_format=FORMAT,
                stored_expert_bits=_BITS,
                # The server may be started in another folder than the plan was made in.
                activation_norms=None if norms is None else str(Path(norms.path).absolute()),
            ),
            warnings=(
                f"sparsity_24: the answers get worse: {_MORE_PERPLEXITY[norms is not None]} % more perplexity on the "
                "bundled model, not measured on others",
            ),
        )


def _check_norms(ctx: PlanContext) -> None:
    """Raise InputError when the norms are of another model."""
    given = ctx.request.activation_norms
    if given is None:
        return
    for what, found, wanted in (
        ("model", given.model, ctx.model.name.rstrip("/").rpartition("/")[2]),
        ("layers", list(given.layers), list(ctx.model.moe_layers)),
    ):
        if found != wanted:
            raise InputError(f"sparsity_24.activation_norms {given.path}: {what}: got {found}, expected {wanted}")
