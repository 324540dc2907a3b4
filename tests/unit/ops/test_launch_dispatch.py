"""Which variant is chosen, why none is, and whose counters a stream gets."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_optimizer.errors import UnsupportedError
from moe_optimizer.ops import _load, cuda_dispatch
from moe_optimizer.ops.cuda_dispatch import WordBank
from moe_optimizer.ops.cuda_variants import DirectVariant, GemmMode, GroupedVariant, MoeSizes, choose_variant
from moe_optimizer.ops.expert_inputs import Inputs
from moe_optimizer.ops.kernel_arguments import CudaProblem, Router
from tests.kernel_emulator import Emulator, make_case
from tests.ops.moe_cases import make_case as ops_case


@pytest.fixture(autouse=True)
def _built(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation in place of the CUDA kernels, which may not be built here."""
    monkeypatch.setattr(_load, "import_kernels", lambda: (emulator.module, ""))


def why_not(problem: CudaProblem) -> str | None:
    return cuda_dispatch.why_not(problem, choose_variant(problem.sizes))


SIZES = MoeSizes(num_tokens=1, top_k=8, num_experts=128, hidden_size=2048, intermediate_size=768, weight_bits=16)


@pytest.mark.parametrize(
    ("tokens", "weight_bits", "expected"),
    [
        (1, 16, DirectVariant()),
        (64, 8, DirectVariant()),
        (65, 16, GroupedVariant(GemmMode.BF16)),
        (65, 8, GroupedVariant(GemmMode.FP8_WEIGHTS)),
        (8192, 8, GroupedVariant(GemmMode.FP8_WEIGHTS)),
        (64, 4, DirectVariant()),
        (65, 4, GroupedVariant(GemmMode.MXFP4_WEIGHTS)),
    ],
)
def test_small_batches_are_direct_and_activations_are_never_quantised_unasked(tokens, weight_bits, expected):
    assert choose_variant(replace(SIZES, num_tokens=tokens, weight_bits=weight_bits)) == expected


def test_more_pairs_than_the_tables_of_the_direct_kernels_hold_go_to_the_grouped_kernels():
    assert choose_variant(replace(SIZES, num_tokens=64, top_k=9)) == GroupedVariant(GemmMode.BF16)


def test_other_activation_dtypes_are_refused_with_the_dtype():
    problem = make_case(1, 2, 4, 64, 32).problem
    refused = why_not(replace(problem, x=problem.x.half()))
    assert re.fullmatch(r".*bfloat16 activations, .*torch\.float16", refused or "")


def test_sizes_and_logits_beyond_the_kernels_are_refused_with_the_number_or_dtype():
    problem = make_case(1, 2, 4, 64, 32).problem
    many = replace(problem, w13=problem.w13[:1].expand(1025, -1, -1))
    assert re.fullmatch(r".*1024.*top-32,.*1025, top-2", why_not(many) or "")
    wide = replace(problem, topk_ids=torch.zeros(1, 33, dtype=torch.int32))
    assert re.fullmatch(r".*1024.*top-32,.*4, top-33", why_not(wide) or "")
    router = Router(logits=torch.zeros(1, 4).half(), top_k=2)
    refused = why_not(replace(problem, router=router))
    assert re.fullmatch(r".*bfloat16 logits, .*torch\.float16", refused or "")


def test_a_row_that_starts_off_16_bytes_is_refused_with_its_address_or_stride():
    problem = make_case(3, 2, 4, 64, 32).problem
    assert why_not(problem) is None
    wide = torch.zeros(3, 65).bfloat16()
    assert "130 bytes in dim 0" in (why_not(replace(problem, x=wide[:, :64])) or "")
    shifted = torch.zeros(3 * 64 + 1).bfloat16()[1:].view(3, 64)
    assert "x starts at" in (why_not(replace(problem, x=shifted)) or "")


def test_no_tokens_need_no_kernel(monkeypatch):
    monkeypatch.setattr(cuda_dispatch, "why_unavailable", lambda device: None)
    case = ops_case(0, 64, 32, 4, 2, torch.bfloat16)
    assert cuda_dispatch.run_fused_experts(case.inputs(), torch.empty_like(case.x)) is None


# The kernels write in pieces of 16 bytes, and some of x is still read when the first output is there.
@pytest.mark.parametrize(
    ("columns", "in_place"),
    [(slice(64, 128), True), (slice(65, 129), False), (slice(0, 64), False)],
    ids=["apart", "off 16 bytes", "x itself"],
)
def test_the_kernels_write_where_they_may_and_the_result_is_in_the_output(monkeypatch, columns, in_place):
    written = []

    def fake(problem, variant):
        written.append(problem.out)
        problem.out.fill_(7)

    monkeypatch.setattr(cuda_dispatch, "why_unavailable", lambda device: None)
    monkeypatch.setattr(cuda_dispatch, "measured_variant", lambda problem: None)
    monkeypatch.setattr(cuda_dispatch, "why_not", lambda problem, variant: None)
    monkeypatch.setattr(cuda_dispatch, "run", fake)
    case = ops_case(3, 64, 32, 4, 2, torch.bfloat16)
    memory = case.x.clone()
    out = memory if columns.start == 0 else torch.zeros(3, 136).bfloat16()[:, columns]
    assert cuda_dispatch.run_fused_experts(replace(case, x=memory).inputs(), out) is None
    assert (written[0].data_ptr() == out.data_ptr()) is in_place
    assert (out == 7).all()


@pytest.mark.parametrize("measured", [None, GroupedVariant(GemmMode.MXFP4_WEIGHTS, 16)], ids=str)
def test_kernels_for_mxfp4_are_picked_by_arithmetic_where_nothing_was_measured(monkeypatch, measured):
    ran = []
    monkeypatch.setattr(cuda_dispatch, "why_unavailable", lambda device: None)
    monkeypatch.setattr(cuda_dispatch, "measured_variant", lambda problem: measured)
    monkeypatch.setattr(cuda_dispatch, "run", lambda problem, variant: ran.append(variant))
    for tokens, by_sizes in ((3, DirectVariant()), (300, GroupedVariant(GemmMode.MXFP4_WEIGHTS))):
        p = make_case(tokens, 2, 4, 64, 32, mxfp4=True).problem
        assert p.topk_weights is not None
        assert p.topk_ids is not None
        inputs = Inputs(
            p.x, p.w13, p.w2, p.topk_weights, p.topk_ids, None, p.w13_scale, p.w2_scale, None, None, "silu"
        )  # fmt: skip
        assert cuda_dispatch.run_fused_experts(inputs, torch.empty_like(p.x)) is None
        assert ran.pop() == (measured or by_sizes)


@pytest.mark.parametrize("tokens", [3, 300])
def test_a_dtype_that_no_kernel_takes_is_refused_before_one_is_picked(monkeypatch, tokens):
    monkeypatch.setattr(cuda_dispatch, "why_unavailable", lambda device: None)
    case = ops_case(tokens, 64, 32, 4, 2, torch.float32)
    reason = cuda_dispatch.run_fused_experts(case.inputs(), torch.empty_like(case.x))
    assert re.search(r"bfloat16 activations.*torch\.float32", reason or "")


def test_mxfp4_and_other_weights_do_not_take_each_others_kernels():
    packed, plain = make_case(3, 2, 4, 64, 32, mxfp4=True).problem, make_case(3, 2, 4, 64, 32).problem
    for mode in (GemmMode.BF16, GemmMode.FP8_WEIGHTS, GemmMode.FP8):
        assert re.search("bits per weight: got 4, expected", cuda_dispatch.why_not(packed, GroupedVariant(mode)) or "")
    refused = cuda_dispatch.why_not(plain, GroupedVariant(GemmMode.MXFP4_WEIGHTS))
    assert re.search("bits per weight: got 16, expected 4", refused or "")


# A grid of no blocks is an error of CUDA's, without a word of what is wrong.
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "width"), [(0, 2, 64, 32), (4, 0, 64, 32), (4, 2, 0, 32), (4, 2, 64, 0)]
)
@pytest.mark.parametrize("tokens", [3, 70])
def test_a_layer_with_an_empty_dimension_is_refused_with_its_sizes(tokens, experts, top_k, hidden, width):
    problem = CudaProblem(
        x=torch.zeros(tokens, hidden).bfloat16(),
        w13=torch.zeros(experts, 2 * width, hidden).bfloat16(),
        w2=torch.zeros(experts, hidden, width).bfloat16(),
        out=torch.zeros(tokens, hidden).bfloat16(),
        topk_weights=torch.zeros(tokens, top_k),
        topk_ids=torch.zeros(tokens, top_k, dtype=torch.int32),
    )
    assert (why_not(problem) or "").endswith(f"E={experts}, k={top_k}, H={hidden}, I={width}")


def test_a_stream_keeps_its_counters_and_no_two_share():
    bank = WordBank(torch.device("cpu"))
    first = bank.get(111)
    assert bank.get(111).data_ptr() == first.data_ptr()
    seen = {bank.get(stream).data_ptr() for stream in range(WordBank.STREAMS + 3)}
    assert first.data_ptr() not in seen
    assert len(seen) >= WordBank.STREAMS
    assert not bank.get(10**6).any()


def test_a_variant_that_does_not_cover_a_call_is_refused_with_the_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2))
    problem = make_case(65, 2, 4, 64, 32).problem
    assert re.search("T:.*65,.* 64", cuda_dispatch.why_not(problem, DirectVariant()) or "")
    with pytest.raises(UnsupportedError, match=r"T:.*65,.* 64"):
        cuda_dispatch.run(problem, DirectVariant())


STRUCTS = ("experts", "router", "int4", "variant")


@pytest.mark.parametrize("change", ["missing", "unknown"])
@pytest.mark.parametrize("struct", STRUCTS)
def test_a_missing_or_unknown_field_is_an_error_before_anything_is_launched(emulator: Emulator, struct, change):
    problem = make_case(1, 2, 4, 64, 32, int4=32).problem
    problem = replace(problem, router=Router(logits=torch.zeros(1, 4), top_k=2), topk_ids=None, topk_weights=None)
    call = problem.call(DirectVariant(), 1)
    fields = call[STRUCTS.index(struct)]
    assert fields is not None
    assert isinstance(fields, dict)
    name = "no_such_field" if change == "unknown" else list(fields)[-1]
    if change == "unknown":
        fields[name] = 1
    else:
        del fields[name]
    with pytest.raises(TypeError, match=f"{struct}: {change} field '{name}'"):
        emulator.module.cuda_run(*call, 0, 0, 1)
