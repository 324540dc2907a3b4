"""Decides where our expert kernels replace vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.passes.flash_dmoe import backend_choice as peers
from moe_optimizer.passes.flash_dmoe import kernel_choice as speeds
from moe_optimizer.passes.flash_dmoe.fused_router import with_fused_router
from moe_optimizer.passes.flash_dmoe.questions import (
    found_tables,
    layer_shape,
    open_questions,
    questions,
    stored_weights,
    table_of_ours_alone,
)
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.plan.serve_args import NO_ARGUMENTS, ServeArguments
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.cpu_workers import worker_cores, worker_threads
from moe_optimizer.plan_context.expert_balancing import load_balancer_runs
from moe_optimizer.plan_context.expert_kernel import (
    NOT_DATA_PARALLEL,
    OP,
    converted_format,
    has_gpt_oss_experts,
    stored_four_bits,
    why_adapters_keep_vllms,
    why_groups_are_cut,
    why_model_does_not_fit,
    why_not_beside_triton,
    why_not_built,
)
from moe_optimizer.specs.expert_formats import INT4, MXFP4
from moe_optimizer.specs.kernel_speeds import (
    KernelSpeeds,
    TokenRange,
    TokenSpeeds,
    fastest_ranges,
    never_slower,
    ours_never_slower,
)

_ASK_FOR_OURS = "--enable-flash-dmoe takes ours"
_IN_WORDS = {MXFP4: "gpt-oss's experts", INT4: "the INT4 experts"}
_STOCK_READS = {
    MXFP4: "vLLM's own kernels compute gpt-oss's experts (triton_kernels, which it brings along)",
    INT4: "vLLM's own kernels compute the INT4 experts (Marlin, or Humming where its package is there)",
}
_AMX = "amx_tile"
_CALIBRATE_HINT = "`moe-optimizer serve` without `--calibrate 0`, or `moe-optimizer measure speeds`, measures it"


class FlashDmoe(OptimizationPass):
    """The routed experts' two matrix products, activation and combine by kernels of ours.

    Applied by the plugin: its experts class goes before vLLM's in the kernel choice of each MoE layer, and a layer it
    does not support falls through to vLLM's own. On GPUs it is used for the numbers of tokens at which it was measured
    to be faster, on the CPU for all of them or none: there the weights lie for the one or for the other. What was not
    measured is vLLM's, unless nothing but ours can compute it.
    """

    name = "flash_dmoe"
    flag = "flash-dmoe"
    title = "our expert kernel instead of vLLM's"
    limits = (
        "gated SiLU experts without biases, or gpt-oss's; no act-order; at most 1024 experts and top-32; no LoRA on "
        "experts; on the CPU no data parallelism; on GPUs Hopper, BF16 activations, BF16, FP8, MXFP4 or INT4 weights"
    )
    no_gain = "our kernel and vLLM's are not measured on this machine"

    def why_not(self, ctx: PlanContext) -> str:
        """Check the model's experts, then vLLM, then which kernels are built."""
        why = why_model_does_not_fit(ctx) or why_groups_are_cut(ctx) or _vllm_fits(ctx) or why_not_built(ctx)
        # vLLM has nothing to fall back on: it ends while it builds the first layer.
        alone = ctx.device == "cpu" and ctx.model.int4 is not None and _AMX not in ctx.cpu.isa
        return f"{why}; vLLM itself does not start on INT4 experts without AMX" if why and alone else why

    def is_required(self, ctx: PlanContext) -> bool:
        """Return whether it is asked for, or expert parallelism on the CPU cannot do without it."""
        return _needed_for_experts_apart(ctx) or super().is_required(ctx)

    def choose(self, ctx: PlanContext) -> Decision:
        """Return the decision by the tables of measured speeds."""
        return with_fused_router(ctx, self._on_gpus(ctx)) if ctx.device == "cuda" else self._on_the_cpu(ctx)

    def _on_gpus(self, ctx: PlanContext) -> Decision:
        if converted_format(ctx):
            return self._converted_on_gpus(ctx)
        if stored_four_bits(ctx.model):
            return self._as_stored_on_gpus(ctx)
        asked, tables = questions(ctx), found_tables(ctx)
        if not asked:
            return self.refused(ctx, f"needs BF16 or FP8 expert weights, found {_quantisation(ctx)}")
        if asked[0].weights not in tables and ctx.request.will_measure:
            return self._pending(ctx)
        if not tables:
            return self._unmeasured(ctx)
        dispatch = speeds.all_ranges(tables)
        weights = next(iter(dispatch or tables))
        table, ranges, batch = tables[weights], dispatch.get(weights, ()), ctx.workload.batch_size
        fields: dict[str, Any] = {"evidence": _sources(tables), "warnings": _disturbed(tables)}
        params = FlashDmoeParams(kernel=None, measure=open_questions(ctx))
        ours, of_vllm = peers.with_ours(ranges), peers.of_backend(table.backend)
        best = peers.best_backend(table, ours, batch, peers.selectable(ctx, table, formats=len(asked)))
        if best and not (dispatch and ctx.wish(self.name)[0] is Wish.ON):
            return self._backend(ctx, table, best, ours, params=params, **fields)
        if dispatch and best:
            words = peers.in_words(best, peers.of_backend(best), ours, table.rows, batch)
            fields["warnings"] += (f"flash_dmoe ({ctx.wish(self.name)[1]}): {words}",)
        others = peers.compared(table, ours if dispatch else of_vllm, batch, without="" if dispatch else table.backend)
        own_choice = table.backend not in ("", peers.TRITON)
        if own_choice and (
            peers.FLAG in ctx.pinned
            or ctx.request.inside_vllm
            or not peers.never_slower_than(ours, of_vllm, table.rows)
        ):
            reason = f"vLLM takes its {table.backend} experts here"
            reason += f", and {peers.in_words(table.backend, of_vllm, ours, table.rows, batch)}"
            return self._left_to_vllm(ctx, reason, params=params, rejected=others, **fields)
        if not dispatch:
            reason = speeds.why_vllms(tuple(tables.values()))
            return self._left_to_vllm(ctx, reason, params=params, rejected=others, **fields)
        unasked = [question.weights for question in asked if question.weights not in tables]
        unmeasured = (
            f"; nothing is measured for {' and '.join(unasked)} weights, which vLLM computes" if unasked else ""
        )
        return self.decision(
            ctx,
            Status.ON,
            f"our CUDA kernels up to {ranges[-1].up_to} tokens, {weights} weights",
            f"measured on {table.device} with vLLM {table.vllm}: {speeds.in_plain_words(table, ranges)}{unmeasured}",
            Applier.PLUGIN,
            gain=speeds.measured_gain(table, ranges, batch),
            no_gain="vLLM's own kernel computes the planned batch size",
            rejected={f"above {ranges[-1].up_to} tokens": _why_not_above(table, ranges[-1].up_to)} | others,
            params=dataclasses.replace(params, kernel="cuda", dispatch=dispatch),
            # Ours compute beside Triton's, on weights as they were loaded.
            vllm_args=ServeArguments(peers.FLAG, peers.TRITON) if own_choice else NO_ARGUMENTS,
            **fields,
        )

    def _converted_on_gpus(self, ctx: PlanContext) -> Decision:
        """Return the decision for experts that the plugin converts, which nothing but our kernels reads."""
        weights, kept = stored_weights(ctx)[0], found_tables(ctx)
        table, ranges, measured = _ours_alone(ctx)
        return self.decision(
            ctx,
            Status.ON,
            f"our CUDA kernels, {weights} weights",
            f"the only ones that read experts which are converted while loading; {measured}",
            Applier.PLUGIN,
            evidence=() if table is None else (table.source,),
            no_gain="vLLM computes no layer of these weights beside it",
            params=FlashDmoeParams(
                kernel="cuda",
                measure=(),
                dispatch=speeds.all_ranges({each: kept[each] for each in kept if each != weights}) | {weights: ranges},
            ),
            vllm_args=NO_ARGUMENTS if peers.FLAG in ctx.pinned else ServeArguments(peers.FLAG, peers.TRITON),
        )

    def _as_stored_on_gpus(self, ctx: PlanContext) -> Decision:
        """Return the decision for experts that are in four bits in the checkpoint, which vLLM repacks for a kernel of
        its own: one kernel or the other computes every number of tokens.
        """
        four_bits, weights = stored_four_bits(ctx.model), stored_weights(ctx)[0]
        table, ranges, measured = _ours_alone(ctx)
        evidence = () if table is None else (table.source,)
        compared = table is not None and table.vllm == _vllm(ctx) and not table.unfinished
        faster = compared and table is not None and ours_never_slower(table, rounded=True)
        if not faster and ctx.wish(self.name)[0] is not Wish.ON:
            why = _why_not_as_stored(ctx, table, measured)
            return self._left_to_vllm(ctx, f"{_STOCK_READS[four_bits]}; {why}: {_ASK_FOR_OURS}", evidence=evidence)
        return self.decision(
            ctx,
            Status.ON,
            f"our CUDA kernels, {weights} weights",
            f"read {_IN_WORDS[four_bits]} as the checkpoint stores them, in place of vLLM's kernels; {measured}",
            Applier.PLUGIN,
            evidence=evidence,
            gain=speeds.gain_over_stock(table, _fastest_of_ours, ctx.workload.batch_size) if table else None,
            no_gain="ours and vLLM's kernels are not measured side by side on such experts",
            params=FlashDmoeParams(kernel="cuda", measure=(), dispatch={weights: ranges}),
        )

    def _backend(self, ctx: PlanContext, table: KernelSpeeds, name: str, ours: peers.Times, **fields: Any) -> Decision:
        """Return the decision for another backend of vLLM's, which is the fastest of all."""
        batch, its = ctx.workload.batch_size, peers.of_backend(name)
        faster = peers.in_words(name, its, ours, table.rows, batch)
        reason = f"measured on {table.device} with vLLM {table.vllm}: {faster} than our kernels and Triton's"
        others = peers.compared(table, its, batch, without=name)
        if name == table.backend:
            return self._left_to_vllm(ctx, f"{reason}; vLLM takes it by itself", rejected=others, **fields)
        return self.decision(
            ctx,
            Status.ON,
            f"vLLM's {name} experts",
            f"{reason}, and slower at no measured number",
            Applier.FLAGS,
            gain=speeds.gain_over_stock(table, its, batch),
            vllm_args=ServeArguments(peers.FLAG, name),
            rejected=others,
            **fields,
        )

    def _on_the_cpu(self, ctx: PlanContext) -> Decision:
        tables = {key: table for key, table in found_tables(ctx).items() if not table.unfinished}
        needs, (wish, origin) = _needed_for(ctx), ctx.wish(self.name)
        four_bits = stored_four_bits(ctx.model)
        forced = bool(needs) or wish is Wish.ON
        if not tables and not forced:
            return self._pending(ctx) if ctx.request.will_measure else self._unmeasured(ctx)
        faster = bool(tables) and all(never_slower(table.rows, OP) for table in tables.values())
        measure = () if needs or four_bits else open_questions(ctx)
        evidence = _sources(tables)
        params = FlashDmoeParams(kernel="cpu", measure=measure, cores=worker_cores(ctx) if measure else ())
        warnings = _disturbed(tables)
        if not faster and not forced:
            reason, params = speeds.why_vllms(tuple(tables.values())), dataclasses.replace(params, kernel=None)
            return self._left_to_vllm(ctx, reason, evidence=evidence, params=params, warnings=warnings)
        reason = "replaces vLLM's expert kernel in every MoE layer"
        for need in needs:
            reason += f"; needed for {need}"
        first, batch = next(iter(tables.values()), None), ctx.workload.batch_size
        if first is None:
            reason += f"; no speed-up is claimed: {_why_unmeasured(ctx)}"
        else:
            reason += f"; measured here, vLLM's time over ours: {_ratios(first)}"
            if not faster and not needs:
                warnings += (f"flash_dmoe ({origin}): vLLM's own kernel is faster here at some numbers of tokens",)
        if not forced:
            params = dataclasses.replace(params, threads=worker_threads(ctx))
        return self.decision(
            ctx,
            Status.ON,
            f"cpu kernel, {converted_format(ctx) or stored_weights(ctx)[0]} weights",
            reason,
            Applier.PLUGIN,
            evidence=(f"{OP} is built for cpu (csrc {ctx.software.kernels.source_hash[:12]})", *evidence),
            gain=speeds.gain_over_stock(first, lambda row: row.ours_us[OP], batch) if first else None,
            params=params,
            warnings=warnings,
        )

    def _pending(self, ctx: PlanContext) -> Decision:
        reason = f"{_why_unmeasured(ctx)}; it is measured at the start (--calibrate), and used where it is faster"
        return self.decision(
            ctx, Status.PENDING, "will be measured", reason, Applier.NONE, params=_nothing_but_questions(ctx)
        )

    def _unmeasured(self, ctx: PlanContext) -> Decision:
        reason = f"not measured, so vLLM's own kernel computes: {_why_unmeasured(ctx)}; {_CALIBRATE_HINT}"
        return self._left_to_vllm(ctx, reason, params=_nothing_but_questions(ctx))

    def _left_to_vllm(self, ctx: PlanContext, reason: str, **fields: object) -> Decision:
        wish, _ = ctx.wish(self.name)
        status, value = (Status.REFUSED, "refused") if wish is Wish.ON else (Status.OFF, "vLLM's kernel")
        return self.decision(ctx, status, value, reason, Applier.NONE, **fields)


def _ours_alone(ctx: PlanContext) -> tuple[KernelSpeeds | None, tuple[TokenRange, ...], str]:
    """Return the table of experts that our kernels alone read, with those that the profile allows, which of them for
    how many tokens, and why in words.
    """
    table, shape, weights = table_of_ours_alone(ctx), layer_shape(ctx), stored_weights(ctx)[0]
    rounded = weights == MXFP4 and ctx.profile.passes.four_bit.activations == "fp8"
    from_tokens = speeds.rounded_from(shape.num_global_experts, shape.top_k) if rounded else None
    rows = () if table is None else speeds.with_allowed_kernels(table.rows, rounded=rounded)
    if table is None or not rows:
        by_arithmetic = "which kernel for how many tokens is by arithmetic: none was measured on this layer here"
        ranges = speeds.unmeasured(weights, rounded_from=from_tokens)
        return None, ranges, f"{by_arithmetic}{speeds.rounding_in_words(ranges)}"
    table = dataclasses.replace(table, rows=rows)
    ranges = fastest_ranges(table.rows)
    if from_tokens is not None:
        ranges = speeds.with_rounded(ranges, from_tokens)
    gains = [row.stock_us / _fastest_of_ours(row) for row in table.rows]
    rival = "triton_kernels" if has_gpt_oss_experts(ctx.model) else "Marlin"
    against = f"{min(gains):.2f} to {max(gains):.2f} times as fast as vLLM's {rival} on such weights"
    used = f"{speeds.uses_in_words(ranges)}, {against}{speeds.rounding_in_words(ranges)}"
    return table, ranges, f"measured on {table.device}: {used}"


def _fastest_of_ours(row: TokenSpeeds) -> float:
    """Return the time of the fastest of our kernels, in us."""
    return min(row.ours_us.values())


def _vllm(ctx: PlanContext) -> str:
    """Return the version of the vLLM that is planned for, as tables have it; "" where there is none."""
    return "" if ctx.software.vllm is None else ctx.software.vllm.release


def _why_not_as_stored(ctx: PlanContext, table: KernelSpeeds | None, measured: str) -> str:
    """Return why plans leave experts to vLLM that our kernels would read as the checkpoint stores them."""
    ours = "ours read them as they are stored"
    if table is None:
        return f"{ours}, and were not measured beside these on such a layer with the kernels of this build"
    if table.vllm != _vllm(ctx):
        return (
            f"{ours}, and were measured beside those of vLLM {table.vllm}, not of {_vllm(ctx) or 'none'} ({measured})"
        )
    return f"{speeds.why_vllms((table,))}, {measured}"


def _nothing_but_questions(ctx: PlanContext) -> FlashDmoeParams:
    cores = worker_cores(ctx) if ctx.device == "cpu" else ()
    return FlashDmoeParams(kernel=None, measure=open_questions(ctx), cores=cores)


def _why_unmeasured(ctx: PlanContext) -> str:
    tables, question = ctx.software.kernel_speeds, questions(ctx)[0]
    return "its measurement is not finished" if tables.find(question) else tables.why_none(question)


def _sources(tables: Mapping[str, KernelSpeeds]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(table.source for table in tables.values()))


def _disturbed(tables: Mapping[str, KernelSpeeds]) -> tuple[str, ...]:
    """Return a warning for each table that was measured on a busy device."""
    return tuple(
        f"flash_dmoe: the {weights} kernels were measured while {table.disturbed}; "
        "`moe-optimizer serve` without `--calibrate 0` measures them again"
        for weights, table in tables.items()
        if table.disturbed
    )


def _why_not_above(table: KernelSpeeds, tokens: int) -> str:
    if tokens == table.rows[-1].tokens:
        return "nothing was measured there, so vLLM's own kernel computes it"
    return "vLLM's own kernel is as fast or faster there"


def _ratios(table: KernelSpeeds) -> str:
    shown = [f"{row.stock_us / row.ours_us[OP]:.2f} at {row.tokens}" for row in table.rows if OP in row.ours_us]
    return f"{', '.join(shown)} tokens"


def _needed_for(ctx: PlanContext) -> tuple[str, ...]:
    """Return what our kernel is on the CPU the only one for."""
    needs = ("EP, because vLLM's own CPU kernel ignores the expert map",) if _needed_for_experts_apart(ctx) else ()
    four_bits = stored_four_bits(ctx.model)
    if four_bits:
        # Seen with AMX (vLLM 0.32, a Xeon): SIGILL in the kernel for MXFP4, and no kernel for INT4 with zero points.
        needs += (f"{_IN_WORDS[four_bits]}, which vLLM's CPU kernel reads only with AMX, and there not all",)
    if ctx.pinned.is_on("--enable-lora"):
        # Seen with vLLM 0.32: the first request ends the server.
        needs += ("LoRA adapters, beside which vLLM's CPU build takes Triton's experts, which do not run there",)
    converted = converted_format(ctx)
    return (*needs, f"{converted} experts, which no other CPU kernel reads") if converted else needs


def _needed_for_experts_apart(ctx: PlanContext) -> bool:
    return ctx.device == "cpu" and ctx.parallelism.expert_parallel


def _quantisation(ctx: PlanContext) -> str:
    given = ctx.pinned.value("--quantization")
    return f"--quantization {given} after --" if given is not None else str(ctx.model.quant_method)


def _vllm_fits(ctx: PlanContext) -> str:
    if adapters := why_adapters_keep_vllms(ctx):
        return adapters
    if ctx.device == "cpu":
        if "--quantization" in ctx.pinned:
            return f"needs unquantised expert weights, found {_quantisation(ctx)}"
        return NOT_DATA_PARALLEL if ctx.parallelism.data_parallel_size > 1 else ""
    if not stored_weights(ctx):
        return f"needs BF16 or FP8 expert weights, found {_quantisation(ctx)}"
    if load_balancer_runs(ctx) and "fp8_tensor" in stored_weights(ctx):
        return "vLLM's EPLB does not move the scales per expert in the form that the kernel reads (expert_placement)"
    return why_not_beside_triton(ctx)
