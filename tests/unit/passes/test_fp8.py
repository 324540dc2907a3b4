from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from moe_optimizer.errors import InputError, RequiredNotAppliedError, UnsupportedError
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan_context.context import PlanContext
from moe_optimizer.planner import make_plan
from moe_optimizer.specs.fp8_sensitivity import Fp8Sensitivity, Fp8SensitivityFile
from moe_optimizer.specs.quantity import Source
from tests.builders import (
    context,
    cpu_machine,
    decided_by,
    deepseek_v3,
    dense_model,
    gpt_oss_120b,
    gpus,
    mixtral_8x7b,
    profile_with,
    qwen3_30b_a3b,
    qwen3_30b_a3b_fp8,
    request,
    software,
    tiny_moe,
)

ON = {"fp8": (Wish.ON, "flag --enable-fp8")}
WITHOUT_FLASH = {**ON, "flash_dmoe": (Wish.OFF, "flag --disable-flash-dmoe")}


def planned(model, hardware, settings: dict[str, Any] | None = None, **changes: Any) -> PlanContext:
    profile = profile_with("aggressive", {"fp8": settings or {}})
    return decided_by(context(model, hardware, profile, **({"wishes": ON} | changes)), "parallelism", "fp8")


def on_gpu(model=None, name: str = "h100_sxm", settings: dict[str, Any] | None = None, **changes: Any) -> Decision:
    return planned(model or qwen3_30b_a3b(), gpus(name, 8), settings, **changes).decided["fp8"]


def on_cpu(model=None, settings: dict[str, Any] | None = None, **changes: Any) -> Decision:
    return planned(model or tiny_moe(), cpu_machine(), settings, **changes).decided["fp8"]


def quantization_config(decision: Decision) -> dict[str, Any]:
    assert decision.vllm_args[:3] == ("--quantization", "online", "--quantization-config")
    return json.loads(decision.vllm_args[3])


def is_ignored(config: dict[str, Any], module: str) -> bool:
    """As vLLM compares: from the start of the name."""
    assert all(pattern.startswith("re:") for pattern in config["ignore"])
    return any(re.match(pattern.removeprefix("re:"), module) for pattern in config["ignore"])


# On GPUs: vLLM converts.


def test_on_a_gpu_experts_and_linears_are_converted_by_vllm_in_blocks():
    decision = on_gpu()
    assert (decision.status, decision.applier, decision.value) == (
        Status.ON,
        Applier.FLAGS,
        "experts and linears in FP8",
    )
    config = quantization_config(decision)
    assert (config["linear"], config["moe"]) == ("fp8_per_block", "fp8_per_block")
    assert "no quality gate has judged it" in decision.reason


def test_the_granularity_is_vllms_scheme():
    config = quantization_config(on_gpu(settings={"granularity": "channel"}))
    assert (config["linear"], config["moe"]) == ("fp8_per_channel", "fp8_per_channel")


@pytest.mark.parametrize(("off", "left"), [("experts", "linear"), ("linears", "moe")])
def test_a_part_that_is_off_is_not_converted_and_said(off, left):
    decision = on_gpu(settings={off: "off"})
    assert set(quantization_config(decision)) == {left, "ignore"}
    assert any(f"fp8.{off} is off in profile aggressive" in why for why in decision.rejected.values())


def test_a_dense_model_has_its_linears_converted():
    decision = on_gpu(dense_model())
    assert decision.value == "linears in FP8"
    assert "moe" not in quantization_config(decision)
    assert "experts" not in decision.rejected


@pytest.mark.parametrize(
    "router",
    [
        "model.layers.3.mlp.gate",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.11.mlp.router",
        "model.layers.3.mlp.shared_expert_gate",
        "model.layers.3.mlp.text_experts_gate",
        "model.layers.3.mlp.v_router",
    ],
)
def test_routers_stay_whatever_the_profile_lists(router):
    assert is_ignored(quantization_config(on_gpu(settings={"keep_bf16_layers": []})), router)


def test_nothing_else_stays_unless_it_is_listed():
    config = quantization_config(on_gpu())
    for module in (
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.experts",
        "mlp.shared_expert.down_proj",
    ):
        assert not is_ignored(config, f"model.layers.3.{module}")


@pytest.mark.parametrize(
    ("part", "kept", "converted"),
    [
        ("attention", "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.experts"),
        ("shared_experts", "model.layers.3.mlp.shared_experts.up_proj", "model.layers.3.mlp.experts"),
        ("layers.3", "model.layers.3.mlp.experts", "model.layers.30.mlp.experts"),
        ("layers.3", "model.layers.3.self_attn.o_proj", "model.layers.13.self_attn.o_proj"),
    ],
)
def test_what_is_listed_stays_and_nothing_beside_it(part, kept, converted):
    decision = on_gpu(settings={"keep_bf16_layers": [part]})
    config = quantization_config(decision)
    assert is_ignored(config, kept)
    assert not is_ignored(config, converted)
    assert decision.rejected[part] == "kept by profile aggressive"


def test_the_gain_is_the_least_time_of_a_step_and_modelled():
    gain = planned(qwen3_30b_a3b(), gpus("h100_sxm", 1)).decided["fp8"].gain
    assert gain is not None
    assert gain.metric == "least time of one decode step"
    assert gain.ratio.source is Source.MODELLED
    assert 1.0 < gain.ratio.value < 2.0


def test_the_gain_over_several_gpus_counts_their_all_reduces_which_are_assumed():
    gain = on_gpu().gain
    assert gain is not None
    assert gain.ratio.source is Source.ASSUMED
    assert "96 all-reduces" in gain.ratio.ref


def test_the_gain_is_that_of_a_step_of_what_the_cache_holds():
    # 94 GB of weights in BF16 do not fit 85 GB; in FP8 they leave 32 GB, or 330 requests of 1536 tokens.
    decision = planned(mixtral_8x7b(), gpus("h100_sxm", 1)).decided["fp8"]
    assert decision.gain is not None
    sequences = re.search(r"(\d+) sequences at 1536 tokens", decision.gain.ratio.ref)
    assert sequences is not None
    assert 300 < int(sequences[1]) < 350
    assert decision.gain.ratio.value > 1.5
    assert "in bfloat16 the model does not fit these GPUs" in decision.evidence


def test_auto_does_not_change_the_output_for_little():
    # A large batch waits for its cache, not for weights.
    profile = profile_with("aggressive", workload={"batch_size": 4096, "input_tokens": 8192, "output_tokens": 512})
    model, machine = qwen3_30b_a3b(), gpus("h100_sxm", 8)
    asked = decided_by(context(model, machine, profile, wishes=ON), "parallelism", "fp8").decided["fp8"]
    auto = decided_by(context(model, machine, profile), "parallelism", "fp8").decided["fp8"]
    assert (asked.status, auto.status) == (Status.ON, Status.OFF)
    assert re.fullmatch(r"a decode step would be at best 1\.0\dx faster, too little .*", auto.reason)


def test_experts_alone_gain_less_than_all():
    every, experts = on_gpu().gain, on_gpu(settings={"linears": "off"}).gain
    assert every is not None
    assert experts is not None
    assert 1.0 < experts.ratio.value < every.ratio.value


def test_linears_whose_slices_are_no_whole_groups_stay_in_blocks_and_go_in_channels():
    # 64 heads of 64 on 8 GPUs are 512 wide, on 64 heads of 72 they are 576.
    model = qwen3_30b_a3b(heads=64, head_dim=72)
    decision = on_gpu(model)
    assert decision.value == "experts in FP8"
    assert decision.params["linear_bits"] is None
    assert decision.rejected["attention and dense linears"] == (
        "the attention heads of a device: 576 wide, vLLM needs a multiple of 128; they stay bfloat16, "
        "granularity channel converts them"
    )
    assert on_gpu(model, settings={"granularity": "channel"}).value == "experts and linears in FP8"


def test_a_dense_model_that_cannot_be_converted_in_blocks_is_refused():
    decision = on_gpu(dataclasses.replace(dense_model(), hidden_size=4000))
    assert decision.status is Status.REFUSED
    assert "linears: the model width of a device: 4000 wide" in decision.reason


def test_experts_that_vllm_fills_up_to_blocks_are_counted_and_warned_about():
    # 768 / 8 = 96, filled up to 128.
    decision = on_gpu()
    assert decision.params["stored_expert_bits"] == pytest.approx(8 * 128 / 96)
    assert decision.warnings == ("fp8: vLLM fills the experts up to whole blocks: 1.33x",)
    profile = profile_with("aggressive", {"fp8": {"mode": "on"}})
    filled = make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm", 8), profile)).memory
    whole = make_plan(request(qwen3_30b_a3b(width=1024), gpus("h100_sxm", 8), profile)).memory
    assert filled.weight_bytes == pytest.approx(whole.weight_bytes, rel=0.001)


def test_a_gpu_without_fp8_units_is_refused_with_what_it_has():
    assert on_gpu(name="a100_80gb").reason == "needs FP8 matrix units (sm_89 or later), found sm_80"


def test_float32_is_refused_on_a_gpu():
    assert on_gpu(dtype="float32").reason == "vLLM converts bfloat16 and float16 weights only, found float32"


# On the CPU build: the plugin converts the experts.


def test_on_the_cpu_the_plugin_converts_the_experts_and_the_linears_stay():
    decision = on_cpu()
    assert (decision.status, decision.applier, decision.value) == (Status.ON, Applier.PLUGIN, "experts in FP8")
    assert decision.vllm_args == ()
    assert decision.params == {
        "weight_format": "fp8",
        "granularity": "block",
        "quantizer": "builtin",
        "kept_layers": [],
        "max_layer_error": 0.08,
        "expert_bits": 8,
        "linear_bits": None,
        "stored_expert_bits": 8,
        "stored_linear_bits": None,
    }
    assert (
        decision.rejected["attention and dense linears"] == "vLLM's CPU build cannot convert them; they stay bfloat16"
    )


def test_settings_of_the_profile_reach_the_plugin():
    settings = {"granularity": "channel", "keep_bf16_layers": ["layers.2", "layers.0"], "max_layer_error": None}
    params = on_cpu(settings=settings).params
    assert (params["granularity"], params["kept_layers"], params["max_layer_error"]) == ("channel", [0, 2], None)


def test_linears_asked_for_by_name_are_warned_about_on_the_cpu():
    assert on_cpu(settings={"linears": "on"}).warnings == (
        "fp8.linears (profile aggressive): vLLM's CPU build cannot convert them; they stay bfloat16",
    )


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 2.0), ("float32", 4.0)])
def test_the_gain_on_the_cpu_is_in_bytes_of_what_is_served(dtype, ratio):
    gain = on_cpu(dtype=dtype).gain
    assert gain is not None
    assert gain.metric == "expert weight bytes per decode step"
    assert gain.ratio.value == pytest.approx(ratio, rel=0.001)


def test_it_needs_our_kernel_on_the_cpu():
    decision = on_cpu(wishes=WITHOUT_FLASH)
    assert decision.status is Status.REFUSED
    assert decision.reason == (
        "needs our expert kernel to read the weights, and flash_dmoe is switched off by flag --disable-flash-dmoe"
    )


def test_it_needs_the_kernel_built_on_the_cpu():
    assert on_cpu(software=software("cpu", cpu_ops=())).reason == "kernel not built: run build.sh"


def test_on_the_cpu_our_kernel_is_on_where_the_experts_are_converted():
    ctx = decided_by(planned(tiny_moe(), cpu_machine()), "flash_dmoe")
    assert ctx.decided["flash_dmoe"].status is Status.ON
    assert ctx.decided["flash_dmoe"].value == "cpu kernel, fp8 weights"
    assert "measure" not in ctx.decided["flash_dmoe"].params  # there is no other kernel to choose


def test_on_the_cpu_the_builtin_quantizer_converts_whatever_is_asked_for():
    assert on_cpu().warnings == ()
    assert "quantizer: builtin" in on_cpu().evidence
    decision = on_cpu(settings={"quantizer": "transformer_engine"})
    assert decision.params["quantizer"] == "builtin"
    assert decision.warnings == ("fp8.quantizer transformer_engine: it converts on CUDA devices only; builtin is used",)


@pytest.mark.parametrize(
    ("asked", "installed", "used", "warned"),
    [
        ("auto", True, "vllm", ""),
        ("builtin", False, "builtin", ""),
        ("transformer_engine", True, "transformer_engine", ""),
        ("transformer_engine", False, "builtin", "it is not installed; builtin is used"),
    ],
)
def test_the_quantizer_on_gpus_is_the_one_asked_for_where_it_is_installed(asked, installed, used, warned):
    found = dataclasses.replace(software(), transformer_engine=installed)
    decision = on_gpu(settings={"quantizer": asked}, software=found)
    assert decision.params["quantizer"] == used
    assert f"quantizer: {used}" in decision.evidence
    assert decision.applier is (Applier.FLAGS if used == "vllm" else Applier.PLUGIN)
    assert decision.vllm_args  # vLLM converts in every case
    about = [warning for warning in decision.warnings if warning.startswith("fp8.quantizer")]
    assert [warning.partition(": ")[2] for warning in about] == ([warned] if warned else [])


def test_per_channel_vllm_converts_with_its_own_quantizer():
    decision = on_gpu(settings={"quantizer": "builtin", "granularity": "channel"})
    assert decision.params["quantizer"] == "vllm"
    assert decision.warnings == ("fp8.quantizer builtin: per channel vLLM converts with its own",)


# On both.


def test_an_fp8_checkpoint_is_served_as_it_is_and_no_gain_is_claimed():
    decision = on_gpu(deepseek_v3())
    assert (decision.status, decision.value) == (Status.ON, "as in the checkpoint")
    assert decision.applier is Applier.NONE
    assert decision.gain is None


def test_a_checkpoint_quantised_otherwise_is_refused():
    decision = on_gpu(gpt_oss_120b())
    assert (decision.status, decision.reason) == (Status.REFUSED, "the checkpoint is quantised already: mxfp4, 4 bits")


def test_switched_off_an_fp8_checkpoint_is_said_to_stay_fp8():
    decision = planned(qwen3_30b_a3b_fp8(), gpus("h100_sxm"), wishes={"fp8": (Wish.OFF, "test")}).decided["fp8"]
    assert decision.status is Status.OFF
    assert decision.reason.endswith("the checkpoint is FP8 already and stays so")


def test_an_fp8_checkpoint_in_the_files_of_another_method_is_one_too():
    model = dataclasses.replace(qwen3_30b_a3b_fp8(), quant_method="compressed-tensors", weight_block=None)
    decision = planned(model, gpus("h100_sxm"), wishes=ON).decided["fp8"]
    assert (decision.status, decision.value, decision.vllm_args) == (Status.ON, "as in the checkpoint", ())


@pytest.mark.parametrize(
    ("block", "isa", "found"),
    [((128, 128), ("avx512f",), "a processor without amx_tile"), (None, ("amx_tile",), "scales of another kind")],
)
def test_the_cpu_build_gets_no_fp8_checkpoint_with_which_it_ends(block, isa, found):
    model = dataclasses.replace(qwen3_30b_a3b_fp8(), weight_block=block)
    with pytest.raises(UnsupportedError, match=f"{found}; the server would end"):
        make_plan(request(model, cpu_machine(gib=256, isa=isa)))


def test_the_cpu_build_gets_an_fp8_checkpoint_that_its_kernels_read():
    plan = make_plan(request(qwen3_30b_a3b_fp8(), cpu_machine(gib=256, isa=("amx_tile",)), wishes=ON))
    assert plan.decision("fp8").value == "as in the checkpoint"


@pytest.mark.parametrize("flag", ["--quantization", "--quantization-config"])
def test_the_users_own_quantisation_goes_before(flag):
    decision = on_gpu(pinned={flag: "fp8_per_tensor"})
    assert (decision.status, decision.vllm_args) == (Status.REFUSED, ())
    assert decision.reason == f"{flag} fp8_per_tensor is given after -- and decides"


def test_a_profile_with_both_parts_off_asks_for_nothing():
    off = {"experts": "off", "linears": "off"}
    assert on_gpu(settings=off, wishes={}).reason == "experts and linears are both off in profile aggressive"
    assert on_cpu(settings={"experts": "off"}, wishes={}).reason == "the experts are off in profile aggressive"
    assert on_cpu(settings={"experts": "off"}, wishes={}).status is Status.OFF


def test_asked_for_by_name_with_its_parts_off_it_is_refused():
    for decision in (on_gpu(settings={"experts": "off", "linears": "off"}), on_cpu(settings={"experts": "off"})):
        assert (decision.status, decision.vllm_args) == (Status.REFUSED, ())


def test_a_layer_that_the_model_does_not_have_is_an_error():
    with pytest.raises(InputError, match=r"got layers\.4, expected at most layers\.3: tiny-moe has 4 layers"):
        on_cpu(settings={"keep_bf16_layers": ["layers.4"]})


def sensitivity(errors: dict[int, float], **changes: Any) -> Fp8SensitivityFile:
    fields: dict[str, Any] = {"model": "tiny-moe", "granularity": "block", "tokens": 4096, "errors": errors}
    return Fp8SensitivityFile(path="s.json", measured=Fp8Sensitivity(**(fields | changes)))


MEASURED = {0: 0.02, 1: 0.09, 2: 0.03, 3: 0.081}


def test_layers_that_were_measured_over_the_budget_stay():
    decision = on_cpu(fp8_sensitivity=sensitivity(MEASURED))
    assert decision.params["kept_layers"] == [1, 3]
    assert decision.params["max_layer_error"] is None  # decided here, not once more while loading
    assert "s.json: FP8 changes the layers' outputs by 0.020 to 0.090 on 4096 tokens" in decision.evidence


def test_measured_and_named_layers_stay_together():
    settings = {"keep_bf16_layers": ["layers.0"], "max_layer_error": 0.085}
    assert on_cpu(settings=settings, fp8_sensitivity=sensitivity(MEASURED)).params["kept_layers"] == [0, 1]
    settings["max_layer_error"] = None
    assert on_cpu(settings=settings, fp8_sensitivity=sensitivity(MEASURED)).params["kept_layers"] == [0]


def test_on_gpus_measured_layers_are_left_out_of_vllms_conversion():
    errors = dict.fromkeys(range(48), 0.03) | {7: 0.2}
    decision = on_gpu(name="h200", fp8_sensitivity=sensitivity(errors, model="Qwen3-30B-A3B"))
    config = quantization_config(decision)
    assert is_ignored(config, "model.layers.7.mlp.experts")
    assert not is_ignored(config, "model.layers.8.mlp.experts")


@pytest.mark.parametrize(
    ("changes", "errors", "message"),
    [
        ({"model": "other"}, MEASURED, "fp8.sensitivity s.json: model: got other, expected tiny-moe"),
        ({"granularity": "channel"}, MEASURED, "granularity: got channel, expected block"),
        ({}, {0: 0.1}, "layers: got [0], expected [0, 1, 2, 3]"),
    ],
)
def test_a_measurement_of_something_else_is_an_error(changes, errors, message):
    with pytest.raises(InputError) as caught:
        on_cpu(fp8_sensitivity=sensitivity(errors, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("profile", ["conservative", "balanced", "single_h100"])
def test_profiles_that_keep_the_models_numbers_have_it_off(profile):
    plan = make_plan(request(qwen3_30b_a3b(), gpus("h100_sxm"), profile))
    assert plan.decision("fp8").status is Status.OFF
    assert "--quantization" not in plan.serve_args


@pytest.mark.parametrize("machine", [gpus("h200"), cpu_machine(gib=256)], ids=["gpu", "cpu"])
def test_the_memory_plan_counts_the_converted_weights(machine):
    model = qwen3_30b_a3b()
    off = make_plan(request(model, machine, wishes={}))
    on = make_plan(request(model, machine, wishes=ON))
    converted = model.expert_params
    if machine.gpu is not None:
        converted += model.attention_params + model.dense_params + model.shared_expert_params
    saved = off.memory.weight_bytes - on.memory.weight_bytes
    assert saved == pytest.approx(converted, rel=0.01)  # one byte of two for each weight, less the scales


def weights(**settings: Any) -> int:
    profile = profile_with("aggressive", {"fp8": {"mode": "on", **settings}})
    return make_plan(request(MIXED, gpus("h100_sxm"), profile)).memory.weight_bytes


MIXED = deepseek_v3(bytes_per_weight=2.0, layers=4, dense_layers=1, quant_method=None, experts=16, max_position=4096)
"""With dense and shared feed-forward parts, and a layer without experts."""


@pytest.mark.parametrize(
    ("kept", "params"),
    [
        (["attention"], MIXED.attention_params),
        (["shared_experts"], MIXED.shared_expert_params),
        (["layers.0"], MIXED.attention_params / 4 + MIXED.dense_params),
        (
            ["layers.1", "layers.3"],
            MIXED.attention_params / 2 + (MIXED.shared_expert_params + MIXED.expert_params) * 2 / 3,
        ),
    ],
    ids=str,
)
def test_the_memory_plan_counts_what_stays_at_its_own_size(kept, params):
    assert weights(keep_bf16_layers=kept) - weights() == pytest.approx(params, rel=0.01)


def test_layers_that_stay_gain_nothing():
    gain = on_cpu(settings={"keep_bf16_layers": ["layers.0", "layers.3"]}).gain
    assert gain is not None
    assert gain.ratio.value == pytest.approx(16 / 12, rel=0.001)


@pytest.mark.parametrize("decide", [on_cpu, lambda **changes: on_gpu(tiny_moe(), **changes)])
def test_where_every_layer_stays_nothing_is_promised(decide):
    decision = decide(settings={"keep_bf16_layers": [f"layers.{layer}" for layer in range(4)]}, wishes=ON)
    assert decision.status is Status.REFUSED
    assert decision.reason.startswith("every layer stays as it is: keep_bf16_layers and max_layer_error leave none")


def test_required_without_our_kernel_is_no_plan():
    profile = profile_with(passes={"flash_dmoe": {"mode": "off"}})
    with pytest.raises(RequiredNotAppliedError, match=r"fp8 is required .* needs our expert kernel"):
        make_plan(request(tiny_moe(), cpu_machine(), profile, required=frozenset({"fp8"})))


def test_asked_for_and_our_kernel_switched_off_is_a_contradiction_on_the_cpu():
    with pytest.raises(InputError, match="--enable-fp8 and --disable-flash-dmoe contradict"):
        make_plan(request(tiny_moe(), cpu_machine(), wishes=WITHOUT_FLASH))
    assert make_plan(request(qwen3_30b_a3b(), gpus("h200"), wishes=WITHOUT_FLASH)).decision("fp8").status is Status.ON
