"""Decides which weights are served in FP8, in which scheme, and who converts them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from moe_optimizer.costs.fp8_blocks import padded_experts
from moe_optimizer.costs.roofline import experts_read_ratio
from moe_optimizer.costs.weights import DTYPE_BYTES
from moe_optimizer.errors import UnsupportedError
from moe_optimizer.passes.base import OptimizationPass
from moe_optimizer.passes.fp8.exclusions import (
    excluded_layers,
    excluded_parts,
    ignored_modules,
    max_error_while_loading,
    stored_bits,
)
from moe_optimizer.passes.fp8.scale_rounding import WHY, exact_scales
from moe_optimizer.plan.decision import UNJUDGED, Applier, Decision, Gain, Status, Wish
from moe_optimizer.plan.pass_params import Fp8Params
from moe_optimizer.plan.serve_args import NO_ARGUMENTS, ServeArguments
from moe_optimizer.plan_context.cache_dtype import cache_bits, cache_dtype
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.plan_context.decode_step import held_at_once, least_step_us
from moe_optimizer.plan_context.expert_kernel import why_not_for_converted_weights
from moe_optimizer.plan_context.four_bits import four_bit_stored_bits, will_be_in_four_bits
from moe_optimizer.plan_context.layer_sensitivity import measured_on
from moe_optimizer.specs.quantity import Quantity, bytes_in_words

if TYPE_CHECKING:
    from moe_optimizer.profiles.schema import Fp8Section

FORMAT = "fp8"
"""Name of the plugin's weight format."""
_QUANTIZATION_FLAGS = ("--quantization", "--quantization-config")
_SCHEMES = {"block": "fp8_per_block", "channel": "fp8_per_channel"}
"""Granularity -> vLLM's name of the online scheme, from 0.26 on."""
_LINEARS = "channel"
"""Granularity of attention and dense linears. vLLM multiplies them with CUTLASS kernels that it ships compiled; in
blocks it takes DeepGEMM, which compiles one for most token counts: minutes of a first start, and stalls later."""
_SCALES = {"block": "one scale per 128x128 block", "channel": "one scale per output channel"}
_GPU_RECORDS = (
    "benchmarks/records/2026-11-21_h200_fused_experts.json",
    "benchmarks/records/2026-11-21_h200_served.json",
)
_CPU_RECORDS = (
    "benchmarks/records/2026-11-21_epyc-avx512_bf16_fused_experts.json",
    "benchmarks/records/2026-11-21_epyc-avx512_fused_experts.json",
)
_OTHER_FORMATS = {
    "four_bit": "the experts have either four bits or eight",
    "sparsity_24": "the experts are either pruned or quantised",
}
"""Passes that convert the experts too, which the CPU build has one format of."""
_LEAST_GAIN = 1.1
"""Chosen: what `auto` takes a changed output for."""
_CHANGES = f"the output changes, and {UNJUDGED}"


class Fp8(OptimizationPass):
    """FP8 weights: half the bytes of BF16 for the experts, which is what decoding waits for.

    An existing FP8 checkpoint is served as it is. Otherwise weights are converted while loading: on GPUs by vLLM's
    own online quantisation, experts and linears (linears alone where four_bit has the experts); on the CPU build the
    experts, by the plugin. Router, embeddings, head and norms stay. `auto` converts wherever that can be done and a
    decode step gains a tenth by the roofline: a profile that must keep the checkpoint's numbers has the pass off.
    """

    name = "fp8"
    flag = "fp8"
    title = "FP8 weights"
    limits = (
        "GPUs need FP8 matrix units (compute capability 8.9 and up); on the CPU build only experts, and only those "
        "that our kernel computes"
    )
    no_gain = "the rates of this GPU are not known"

    def why_not(self, ctx: PlanContext) -> str:
        """Check the checkpoint's own quantisation, the user's arguments, then the device."""
        model = ctx.model
        if ctx.model.weights_are_fp8:
            return ""
        if model.quant_method is not None:
            return f"the checkpoint is quantised already: {model.quant_method}, {model.weight_bits:g} bits"
        given = next((flag for flag in _QUANTIZATION_FLAGS if flag in ctx.pinned), None)
        if given is not None:
            return f"{given} {ctx.pinned.value(given)} is given after -- and decides"
        if ctx.device == "cpu":
            return _other_format_instead(ctx) or why_not_for_converted_weights(ctx)
        if not ctx.gpu.supports("fp8"):
            major, minor = ctx.gpu.compute_capability
            return f"needs FP8 matrix units (sm_89 or later), found sm_{major}{minor}"
        if ctx.dtype == "float32":
            return "vLLM converts bfloat16 and float16 weights only, found float32"
        return ""

    def when_off(self, ctx: PlanContext, reason: str) -> Decision:
        """Return that nothing is converted; of an FP8 checkpoint, that it is FP8 all the same."""
        if ctx.model.weights_are_fp8:
            return self._checkpoint(ctx, Status.OFF, "off", f"{reason}; the checkpoint is FP8 already and stays so")
        return self.decision(ctx, Status.OFF, "off", reason, Applier.NONE)

    def _checkpoint(self, ctx: PlanContext, status: Status, value: str, reason: str) -> Decision:
        """Return the decision for a checkpoint that is FP8 already."""
        env = exact_scales(ctx, blocks=ctx.model.weight_block is not None)
        applier, said = (Applier.FLAGS, f"{reason}; {WHY}") if env else (Applier.NONE, reason)
        same = "the checkpoint is FP8, for stock vLLM too"
        return self.decision(ctx, status, value, said, applier, env=env, no_gain=same)

    def gain(self, ctx: PlanContext) -> Gain | None:
        """Return how much less one decode step must at least take, or on the CPU read; None on an unknown GPU."""
        if ctx.model.weights_are_fp8:
            return None
        expert_bits, linear_bits = _stored_bits(ctx, excluded_layers(ctx, experts=_parts(ctx)[0]))
        whole = 8 * DTYPE_BYTES[ctx.dtype]
        if ctx.device == "cpu":
            to_bits = whole if expert_bits is None else expert_bits
            ratio = experts_read_ratio(ctx.model, batch=ctx.workload.batch_size, from_bits=whole, to_bits=to_bits)
            return Gain(metric="expert weight bytes per decode step", ratio=ratio)
        kv_bits = cache_bits(ctx, cache_dtype(ctx))
        four_bits = four_bit_stored_bits(ctx) if will_be_in_four_bits(ctx) else None
        expert_bits = expert_bits or four_bits
        memory = ctx.split_terms() | {"expert_bits": expert_bits, "linear_bits": linear_bits, "kv_bits": kv_bits}
        requests = min(ctx.workload.batch_size, max(1, held_at_once(ctx, **memory)))
        try:
            before = least_step_us(ctx, requests, kv_bits=kv_bits, expert_bits=four_bits, linear_bits=None)
            after = least_step_us(ctx, requests, kv_bits=kv_bits, expert_bits=expert_bits, linear_bits=linear_bits)
        except UnsupportedError:
            return None
        ref = f"{before.ref}; in 16 bits / in FP8"
        ratio = Quantity(before.value / after.value, "ratio", before.source | after.source, ref)
        return Gain(metric="least time of one decode step", ratio=ratio)

    def choose(self, ctx: PlanContext) -> Decision:
        """Keep an FP8 checkpoint as it is, else have the wished parts converted."""
        if ctx.model.weights_are_fp8:
            reason = "the checkpoint is FP8 already and is served as it is"
            return self._checkpoint(ctx, Status.ON, "as in the checkpoint", reason)
        experts, linears = _parts(ctx)
        if not experts and not linears:
            return self._refused_parts(ctx)
        layers = excluded_layers(ctx, experts=experts)
        if set(range(ctx.model.num_layers) if linears else ctx.model.moe_layers) <= set(layers):
            return self.refused(ctx, "every layer stays as it is: keep_bf16_layers and max_layer_error leave none")
        gain = self.gain(ctx)
        if ctx.wish(self.name)[0] is Wish.AUTO and gain is not None and gain.ratio.value < _LEAST_GAIN:
            faster = f"a decode step would be at best {gain.ratio.value:.2f}x faster"
            return self.when_off(ctx, f"{faster}, too little for a changed output (auto wants {_LEAST_GAIN:g}x)")
        return self._converted(ctx, layers, experts=experts, linears=linears)

    def _refused_parts(self, ctx: PlanContext) -> Decision:
        """Return the decision where neither part is converted."""
        what = "the experts are" if ctx.device == "cpu" else "experts and linears are both"
        return self.refused(ctx, f"{what} off in {ctx.profile_origin}")

    def _converted(self, ctx: PlanContext, layers: tuple[int, ...], *, experts: bool, linears: bool) -> Decision:
        section, on_cpu = ctx.profile.passes.fp8, ctx.device == "cpu"
        parts = " and ".join(word for word, wanted in (("experts", experts), ("linears", linears)) if wanted)
        quantizer, warnings = _quantizer(ctx, experts=experts)
        if on_cpu and section.linears == "on":
            warnings = (f"fp8.linears ({ctx.profile_origin}): {_why_part_off(ctx, 'linears')}", *warnings)
        padding = 1.0 if on_cpu or not experts else _expert_padding(ctx)
        if padding > 1:
            warnings += (f"fp8: vLLM pads the experts to whole blocks of scales: {padding:.2f}x their memory",)
        rejected = {} if linears else {"attention and dense linears": _why_part_off(ctx, "linears")}
        if not experts and ctx.model.is_moe:
            rejected["experts"] = _why_part_off(ctx, "experts")
        by = "layer by layer" if on_cpu else "by vLLM"
        records = _CPU_RECORDS if on_cpu else _GPU_RECORDS if experts else ()
        expert_bits, linear_bits = _stored_bits(ctx, layers)
        env = exact_scales(ctx, blocks=experts and section.granularity == "block")
        return self.decision(
            ctx,
            Status.ON,
            f"{parts} in FP8",
            f"{_scales(section, experts=experts, linears=linears)}, converted {by} while loading"
            f"{_found_while_loading(ctx, layers)}{f'; {WHY}' if env else ''}; {_CHANGES}",
            # vLLM converts on GPUs; with another quantiser than its own, the plugin has to put it there.
            Applier.FLAGS if quantizer == "vllm" else Applier.PLUGIN,
            evidence=(
                *records,
                *_unconverted_does_not_fit(ctx),
                f"quantizer: {quantizer}",
                *measured_on(ctx.request.fp8_sensitivity, "FP8 changes"),
            ),
            rejected={**rejected, **excluded_parts(ctx)},
            gain=self.gain(ctx),
            env=env,
            vllm_args=NO_ARGUMENTS if on_cpu else _vllm_args(section, layers, experts=experts, linears=linears),
            params=Fp8Params(
                weight_format=FORMAT if on_cpu else None,
                granularity=section.granularity,
                quantizer=quantizer,
                excluded_layers=layers,
                max_layer_error=max_error_while_loading(ctx),
                expert_bits=8 if experts else None,
                linear_bits=8 if linears else None,
                stored_expert_bits=expert_bits,
                stored_linear_bits=linear_bits,
            ),
            warnings=warnings,
        )


def _scales(section: Fp8Section, *, experts: bool, linears: bool) -> str:
    """Return what is converted, each part with what its weights share a scale by."""
    parts = {"experts": section.granularity} if experts else {}
    if linears:
        parts["linears"] = _LINEARS
    if len(set(parts.values())) == 1:
        return f"{' and '.join(parts)} with {_SCALES[next(iter(parts.values()))]}"
    return " and ".join(f"{part} with {_SCALES[granularity]}" for part, granularity in parts.items())


def _vllm_args(section: Fp8Section, layers: tuple[int, ...], *, experts: bool, linears: bool) -> ServeArguments:
    config: dict[str, Any] = {"linear": _SCHEMES[_LINEARS]} if linears else {}
    if experts:
        config["moe"] = _SCHEMES[section.granularity]
    config["ignore"] = ignored_modules(section, layers)
    as_json = json.dumps(config, separators=(",", ":"))
    return ServeArguments("--quantization", "online", "--quantization-config", as_json)


def _other_format_instead(ctx: PlanContext) -> str:
    """Return why the experts are left to a pass that decides after this one, or "": it was asked for, and FP8 only by
    auto, or by the profile where the other is by flag.
    """
    by_flag = ctx.request.wishes
    for other, why in _OTHER_FORMATS.items():
        wish, origin = ctx.wish(other)
        goes_before = ctx.wish("fp8")[0] is Wish.AUTO or (other in by_flag and "fp8" not in by_flag)
        if wish is Wish.ON and goes_before:
            return f"{other} is asked for by {origin}, and {why}"
    return ""


def _parts(ctx: PlanContext) -> tuple[bool, bool]:
    """Return whether experts and whether linears are converted."""
    section = ctx.profile.passes.fp8
    linears = section.linears != "off" and ctx.device == "cuda"
    experts = section.experts != "off" and ctx.model.is_moe and not will_be_in_four_bits(ctx)
    return experts, linears


def _stored_bits(ctx: PlanContext, layers: tuple[int, ...]) -> tuple[float | None, float | None]:
    experts, linears = _parts(ctx)
    padding = 1.0 if ctx.device == "cpu" else _expert_padding(ctx)
    return stored_bits(ctx, layers, experts=experts, linears=linears, padding=padding)


def _found_while_loading(ctx: PlanContext, layers: tuple[int, ...]) -> str:
    """Return that the plugin may leave more layers than planned, with the weights if it leaves all; "": it may not."""
    most = max_error_while_loading(ctx)
    if most is None:
        return ""
    planned = ctx.memory(**ctx.split_terms(), expert_bits=_stored_bits(ctx, layers)[0]).weight_bytes
    unconverted = ctx.memory(**ctx.split_terms(), expert_bits=None).weight_bytes
    return (
        f"; a layer that it changes by more than {most:g} stays {ctx.dtype}, which the memory plan does not count "
        f"(all: {bytes_in_words(unconverted)} of weights instead of {bytes_in_words(planned)})"
    )


def _expert_padding(ctx: PlanContext) -> float:
    """Return by what factor vLLM's conversion of the experts enlarges them."""
    if ctx.profile.passes.fp8.granularity == "channel":
        return 1.0
    slices = ctx.parallelism.num_devices
    return padded_experts(ctx.model, slices, expert_parallel=ctx.parallelism.expert_parallel)


def _why_part_off(ctx: PlanContext, part: str) -> str:
    if ctx.device == "cpu":
        return f"vLLM's CPU build cannot convert them; they stay {ctx.dtype}"
    if part == "experts" and will_be_in_four_bits(ctx):
        return f"four_bit is asked for by {ctx.wish('four_bit')[1]}, and converts them to four bits"
    return f"fp8.{part} is off in {ctx.profile_origin}; they stay {ctx.dtype}"


def _unconverted_does_not_fit(ctx: PlanContext) -> tuple[str, ...]:
    """Return that the weights do not fit the GPUs without being converted, () where they do, and on the CPU."""
    if ctx.device == "cpu" or ctx.memory(**ctx.split_terms()).fits:
        return ()
    return (f"in {ctx.dtype} the model does not fit these GPUs",)


def _quantizer(ctx: PlanContext, *, experts: bool) -> tuple[str, tuple[str, ...]]:
    """Return which quantiser is used, and a warning where it is not the one asked for."""
    section = ctx.profile.passes.fp8
    asked = section.quantizer
    if ctx.device == "cpu":
        unused = ("fp8.quantizer transformer_engine: it converts on CUDA devices only; builtin is used",)
        return "builtin", unused if asked == "transformer_engine" else ()
    if asked == "auto":
        return "vllm", ()
    if section.granularity == "channel" or not experts:
        return "vllm", (f"fp8.quantizer {asked}: per channel vLLM converts with its own",)
    if asked == "transformer_engine" and not ctx.software.transformer_engine:
        return "builtin", ("fp8.quantizer transformer_engine: it is not installed; builtin is used",)
    return asked, ()
