"""Which variant is chosen, why none is, and whose counters a stream gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_optimizer.ops import cuda_dispatch
from moe_optimizer.ops.cuda_dispatch import CounterBank
from moe_optimizer.ops.cuda_dispatch_calls import (
    ALIGNMENT,
    COUNTERS,
    direct_call,
    grouped_call,
    grouped_parts,
    sizes_of,
)
from moe_optimizer.ops.cuda_variants import DirectVariant, GroupedVariant, choose_variant
from moe_optimizer.ops.kernel_arguments import CudaProblem, Router
from moe_optimizer.ops.launch_geometry import GemmMode, MoeSizes, direct_geometry, grouped_geometry
from tests.kernel_emulator import Emulator, make_case
from tests.ops.moe_cases import make_case as ops_case


def why_not(problem: CudaProblem) -> str | None:
    return cuda_dispatch.why_not(problem, choose_variant(sizes_of(problem)))


SIZES = MoeSizes(num_tokens=1, top_k=8, num_experts=128, hidden_size=2048, intermediate_size=768, weight_bytes=2)


@pytest.mark.parametrize(
    ("tokens", "weight_bytes", "expected"),
    [
        (1, 2, DirectVariant()),
        (64, 1, DirectVariant()),
        (65, 2, GroupedVariant(GemmMode.BF16)),
        (65, 1, GroupedVariant(GemmMode.FP8_WEIGHTS)),
        (8192, 1, GroupedVariant(GemmMode.FP8_WEIGHTS)),
    ],
)
def test_small_batches_are_direct_and_activations_are_never_quantised_unasked(tokens, weight_bytes, expected):
    assert choose_variant(replace(SIZES, num_tokens=tokens, weight_bytes=weight_bytes)) == expected


def test_more_pairs_than_the_tables_of_the_direct_kernels_hold_go_to_the_grouped_kernels():
    assert choose_variant(replace(SIZES, num_tokens=64, top_k=9)) == GroupedVariant(GemmMode.BF16)


def test_other_activation_dtypes_are_refused_with_the_dtype():
    problem = make_case(1, 2, 4, 64, 32).problem
    refused = why_not(replace(problem, x=problem.x.half()))
    assert refused == "CUDA kernels take bfloat16 activations, got torch.float16"


def test_sizes_and_logits_beyond_the_kernels_are_refused_with_the_number_or_dtype():
    problem = make_case(1, 2, 4, 64, 32).problem
    many = replace(problem, w13=problem.w13[:1].expand(1025, -1, -1))
    assert why_not(many) == "at most 1024 experts and top-32, got 1025, top-2"
    wide = replace(problem, topk_ids=torch.zeros(1, 33, dtype=torch.int32))
    assert why_not(wide) == "at most 1024 experts and top-32, got 4, top-33"
    router = Router(logits=torch.zeros(1, 4).half(), top_k=2)
    refused = why_not(replace(problem, router=router))
    assert refused == "CUDA kernels take float32 or bfloat16 logits, got torch.float16"


def test_a_row_that_starts_off_16_bytes_is_refused_with_its_address_or_stride():
    problem = make_case(3, 2, 4, 64, 32).problem
    assert why_not(problem) is None
    wide = torch.zeros(3, 65).bfloat16()
    assert "x has a stride of 130 bytes in dim 0" in (why_not(replace(problem, x=wide[:, :64])) or "")
    shifted = torch.zeros(3 * 64 + 1).bfloat16()[1:].view(3, 64)
    assert "x starts at address" in (why_not(replace(problem, x=shifted)) or "")


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
    assert why_not(problem) == (
        f"CUDA kernels need E, k, H and I above 0, got E={experts}, k={top_k}, H={hidden}, I={width}"
    )


def test_a_stream_keeps_its_counters_and_no_two_share():
    bank = CounterBank(torch.device("cpu"))
    first = bank.get(111)
    assert bank.get(111).data_ptr() == first.data_ptr()
    seen = {bank.get(stream).data_ptr() for stream in range(CounterBank.SETS + 3)}
    assert first.data_ptr() not in seen
    assert len(seen) >= CounterBank.SETS
    assert not bank.get(10**6).any()


@pytest.mark.parametrize("router", [None, Router(logits=torch.zeros(5, 4), top_k=2)], ids=["ids", "logits"])
@pytest.mark.parametrize("mode", list(GemmMode))
def test_workspace_parts_are_aligned_and_do_not_overlap(mode, router):
    problem = replace(make_case(5, 2, 4, 64, 32, fp8=None if mode == GemmMode.BF16 else "block").problem, router=router)
    sizes = sizes_of(problem)
    geometry = grouped_geometry(sizes, mode, num_multiprocessors=2)
    call = grouped_call(problem, geometry, torch.zeros(COUNTERS, dtype=torch.int32))
    parts = grouped_parts(sizes, geometry, has_router=router is not None)
    end = call.buffer.data_ptr()
    for name, size in parts.items():
        if size == 0:
            assert call.workspace[name] == 0
            continue
        assert call.workspace[name] >= end
        assert (call.workspace[name] - call.buffer.data_ptr()) % ALIGNMENT == 0
        end = call.workspace[name] + size
    assert end <= call.buffer.data_ptr() + call.buffer.numel()


@pytest.mark.parametrize("change", ["missing", "unknown"])
@pytest.mark.parametrize("struct", ["experts", "router", "workspace", "launch"])
def test_a_missing_or_unknown_field_is_an_error_before_anything_is_launched(emulator: Emulator, struct, change):
    problem = make_case(1, 2, 4, 64, 32).problem
    problem = replace(problem, router=Router(logits=torch.zeros(1, 4), top_k=2), topk_ids=None, topk_weights=None)
    call = direct_call(problem, direct_geometry(sizes_of(problem), num_multiprocessors=1))
    fields = getattr(call, struct)
    name = "no_such_field" if change == "unknown" else list(fields)[-1]
    if change == "unknown":
        fields[name] = 1
    else:
        del fields[name]
    with pytest.raises(TypeError, match=f"{struct}: {change} field '{name}'"):
        emulator.module.cuda_direct(*call.structs, 1)
