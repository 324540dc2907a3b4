"""The check of a kernel on a layer's own weights: what it must see, and that it raises no false alarm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from moe_optimizer.vllm_plugin.experts.layer import ExpertsLayer  # noqa: E402
from moe_optimizer.vllm_plugin.experts.self_check import CheckedKernel, CheckResult, check_layer  # noqa: E402
from moe_optimizer.vllm_plugin.experts.weight_format import ExpertsCall, KernelWeights, WeightFormat  # noqa: E402

HIDDEN, WIDTH, EXPERTS = 64, 32, 8
DTYPES = ["float32", "bfloat16", "float16"]


def layer(
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    scale: float = 0.2,
    expert_map: Any = None,
    bias: bool = False,
    hidden: int = HIDDEN,
) -> ExpertsLayer:
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)

    def randn(*shape: int) -> Any:
        return (torch.randn(*shape, generator=generator) * scale).to(kind)

    return ExpertsLayer(
        name=f"layers.{seed}",
        weights=KernelWeights(format="plain", w13=randn(EXPERTS, 2 * WIDTH, hidden), w2=randn(EXPERTS, hidden, WIDTH)),
        dtype=kind,
        top_k=2,
        expert_map=expert_map,
        w13_bias=randn(EXPERTS, 2 * WIDTH) if bias else None,
        w2_bias=randn(EXPERTS, hidden) if bias else None,
    )


def every_other_expert() -> Any:
    return torch.tensor([index // 2 if index % 2 else -1 for index in range(2 * EXPERTS)], dtype=torch.int32)


def checked(
    under_check: ExpertsLayer,
    change: Callable[[KernelWeights, ExpertsCall], tuple[KernelWeights, ExpertsCall]] | None = None,
) -> CheckResult:
    """Check the package's kernel, called with something else than it should be."""

    def kernel(call: ExpertsCall) -> None:
        weights, changed = (under_check.weights, call) if change is None else change(under_check.weights, call)
        under_check.format.compute(weights, changed)

    return check_layer(under_check, {"kernel": CheckedKernel(run=kernel, tokens=(4,))})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 0.2, 5.0])
def test_a_right_kernel_passes_whatever_the_size_of_the_weights(dtype: str, scale: float) -> None:
    for seed in range(20):
        result = checked(layer(seed=seed, dtype=dtype, scale=scale))
        assert result.reason == ""
        assert 0 <= result.error <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_kernel_passes_with_expert_map_and_biases(dtype: str) -> None:
    for seed in range(10):
        assert checked(layer(seed=seed, dtype=dtype, expert_map=every_other_expert(), bias=True)).reason == ""


def test_it_works_under_the_default_dtype_and_device_that_vllm_loads_with() -> None:
    under_check = layer(expert_map=every_other_expert())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert checked(under_check).reason == ""
    finally:
        torch.set_default_dtype(before)


def swapped_experts(weights: KernelWeights, call: ExpertsCall) -> tuple[KernelWeights, ExpertsCall]:
    return weights._replace(w13=weights.w13.flip(0)), call


def up_before_gate(weights: KernelWeights, call: ExpertsCall) -> tuple[KernelWeights, ExpertsCall]:
    return weights._replace(w13=weights.w13.roll(WIDTH, dims=1)), call


def five_percent_too_large(weights: KernelWeights, call: ExpertsCall) -> tuple[KernelWeights, ExpertsCall]:
    return weights._replace(w2=weights.w2 * 1.05), call


def unweighted(weights: KernelWeights, call: ExpertsCall) -> tuple[KernelWeights, ExpertsCall]:
    return weights, call._replace(topk_weights=torch.ones_like(call.topk_weights))


def last_slot_forgotten(weights: KernelWeights, call: ExpertsCall) -> tuple[KernelWeights, ExpertsCall]:
    ids = call.topk_ids.clone()
    ids[:, -1] = -1
    return weights, call._replace(topk_ids=ids)


def last_token_forgotten(weights: KernelWeights, call: ExpertsCall) -> tuple[KernelWeights, ExpertsCall]:
    rows = {name: getattr(call, name)[:-1] for name in ("out", "x", "topk_weights", "topk_ids")}
    return weights, call._replace(**rows)


def test_no_row_of_a_large_call_stands_for_another() -> None:
    """Rows are drawn for a part of it only."""
    under_check, tokens, seen = layer(), 2500, list[Any]()

    def kernel(call: ExpertsCall) -> None:
        seen.append(call.x.clone())
        under_check.format.compute(under_check.weights, call)

    assert check_layer(under_check, {"kernel": CheckedKernel(run=kernel, tokens=(tokens,))}).reason == ""
    assert seen[0].shape == (tokens, HIDDEN)
    assert len({tuple(row) for row in seen[0].tolist()}) == tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "mistake",
    [
        swapped_experts,
        up_before_gate,
        five_percent_too_large,
        unweighted,
        last_slot_forgotten,
        last_token_forgotten,
    ],
)
def test_a_wrong_kernel_is_seen_every_time(dtype: str, mistake: Any) -> None:
    for seed in range(10):
        assert "error" in checked(layer(seed=seed, dtype=dtype), mistake).reason


def test_a_kernel_that_ignores_the_expert_map_is_seen() -> None:
    def no_map(weights: KernelWeights, call: ExpertsCall) -> tuple[KernelWeights, ExpertsCall]:
        return weights, call._replace(expert_map=None, topk_ids=call.topk_ids // 2)

    assert "error" in checked(layer(expert_map=every_other_expert()), no_map).reason


@pytest.mark.parametrize("field", ["w13_bias", "w2_bias"])
def test_a_kernel_that_ignores_a_bias_is_seen(field: str) -> None:
    def without(weights: KernelWeights, call: ExpertsCall) -> tuple[KernelWeights, ExpertsCall]:
        missing: dict[str, Any] = {field: None}
        return weights, call._replace(**missing)

    assert "error" in checked(layer(bias=True), without).reason


def test_an_exception_is_a_reason() -> None:
    def raising(call: ExpertsCall) -> None:
        raise RuntimeError("no launch")

    reason = check_layer(layer(), {"direct": CheckedKernel(run=raising, tokens=(4,))}).reason
    assert reason.split(": ") == ["direct", "RuntimeError", "no launch"]


def test_the_first_wrong_kernel_of_several_is_named() -> None:
    under_check = layer()

    def right(call: ExpertsCall) -> None:
        under_check.format.compute(under_check.weights, call)

    def silent(call: ExpertsCall) -> None:
        """Write nothing."""

    result = check_layer(
        under_check, {"right": CheckedKernel(run=right, tokens=(4,)), "silent": CheckedKernel(run=silent, tokens=(1,))}
    )
    assert result.reason.startswith("silent: error nan")


def test_only_a_few_experts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    dense_expert = WeightFormat.dense_expert

    def recording(self: WeightFormat, weights: KernelWeights, expert: int) -> Any:
        seen.add(expert)
        return dense_expert(self, weights, expert)

    monkeypatch.setattr(WeightFormat, "dense_expert", recording)
    assert checked(layer()).reason == ""
    assert len(seen) == 4


def rounding(under_check: ExpertsLayer, share: float) -> CheckedKernel:
    """A kernel that quantises the activations, and multiplies its result by something."""

    def run(call: ExpertsCall) -> None:
        x = call.x.float()
        scale = x.abs().amax(dim=1, keepdim=True) / 448
        rounded = ((x / scale).to(torch.float8_e4m3fn).float() * scale).to(call.x.dtype)
        under_check.format.compute(under_check.weights, call._replace(x=rounded))
        call.out.mul_(share)

    return CheckedKernel(run=run, tokens=(16,), rounds_activations=True)


def test_a_kernel_that_rounds_the_activations_is_held_to_what_torch_can_do_with_them_rounded() -> None:
    for seed in range(10):
        under_check = layer(seed=seed)
        assert check_layer(under_check, {"fp8": rounding(under_check, 1.0)}).reason == ""
        assert "error" in check_layer(under_check, {"fp8": rounding(under_check, 1.5)}).reason


def test_a_kernel_that_rounds_the_activations_may_be_tried_with_fewer_tokens_than_experts() -> None:
    under_check = layer()
    one_token = dataclasses.replace(rounding(under_check, 1.0), tokens=(1,))
    assert check_layer(under_check, {"fp8": one_token}).reason == ""


def test_a_kernel_that_rounds_the_activations_without_saying_so_is_seen() -> None:
    under_check = layer()
    silent = dataclasses.replace(rounding(under_check, 1.0), rounds_activations=False)
    assert "error" in check_layer(under_check, {"fp8": silent}).reason


def stored(seed: int, form: str) -> ExpertsLayer:
    """A layer of one of the formats, with weights of another size for each."""
    from moe_optimizer.ops.fp8_quant import quantize_fp8

    plain = layer(seed=seed, scale=0.05 * (1 + seed % 7))
    if form == "plain":
        return plain
    (w13, w13_scale), (w2, w2_scale) = (
        quantize_fp8(weight, granularity=cast("Any", form)) for weight in (plain.weights.w13, plain.weights.w2)
    )
    fp8 = KernelWeights(format="fp8", w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)
    return dataclasses.replace(plain, weights=fp8)


FORMS = ["plain", "block", "channel"]
SIZES = (1, 4, 70)


@pytest.mark.thorough
def test_two_hundred_clean_starts_raise_no_alarm() -> None:
    for seed in range(200):
        right = stored(seed, FORMS[seed % len(FORMS)])
        kernels = {
            "kernel": CheckedKernel(run=lambda call, of=right: of.format.compute(of.weights, call), tokens=SIZES)
        }
        result = check_layer(right, kernels)
        assert result.reason == "", seed
        assert result.error <= 1


@pytest.mark.thorough
def test_two_hundred_clean_starts_of_a_kernel_that_rounds_activations_raise_no_alarm() -> None:
    for seed in range(200):
        under_check = layer(seed=seed, scale=0.05 * (1 + seed % 7))
        assert check_layer(under_check, {"fp8": rounding(under_check, 1.0)}).reason == "", seed


@pytest.mark.parametrize("factor", [1.02, 0.98])
@pytest.mark.parametrize("form", FORMS)
def test_two_percent_of_one_tried_expert_is_seen_every_time(form: str, factor: float) -> None:
    for seed in range(20):
        right = stored(seed, form)
        tried: list[int] = []

        def run(call: ExpertsCall, of: ExpertsLayer = right, tried: list[int] = tried) -> None:
            expert = int(call.topk_ids[0, 0])
            tried.append(expert)
            weights = call.topk_weights.clone()
            weights[call.topk_ids == expert] *= factor
            of.format.compute(of.weights, call._replace(topk_weights=weights))

        result = check_layer(right, {"kernel": CheckedKernel(run=run, tokens=(64,))})
        assert f" expert {tried[0]} is off" in result.reason or "error" in result.reason


def test_two_percent_are_seen_where_the_kernel_rounds_activations() -> None:
    # A model's width: the narrower, the fewer values the factor is known from.
    for seed in range(10):
        under_check = layer(seed=seed, hidden=1024)
        wrong = dataclasses.replace(rounding(under_check, 1.02), tokens=(256,))
        assert "factor" in check_layer(under_check, {"fp8": wrong}).reason


def test_padding_that_a_kernel_computes_is_seen() -> None:
    def padding_as_expert_0(weights: KernelWeights, call: ExpertsCall) -> tuple[KernelWeights, ExpertsCall]:
        ids, ones = call.topk_ids.clamp(min=0), torch.where(call.topk_ids < 0, 1.0, call.topk_weights)
        return weights, call._replace(topk_ids=ids, topk_weights=ones)

    assert "error" in checked(layer(), padding_as_expert_0).reason


def test_experts_that_are_all_the_same_raise_no_alarm() -> None:
    one = layer()
    same = KernelWeights(
        format="plain",
        w13=one.weights.w13[:1].expand(EXPERTS, -1, -1).contiguous(),
        w2=one.weights.w2[:1].expand(EXPERTS, -1, -1).contiguous(),
    )
    under_check = dataclasses.replace(one, weights=same)
    assert checked(under_check).reason == ""
