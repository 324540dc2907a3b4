"""The sort of token-expert pairs and the gate, emulated, against torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moe_optimizer.ops.kernel_arguments import Router
from moe_optimizer.ops.topk_router import topk_router
from tests.kernel_emulator import Emulator, guarded, make_case


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 700),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 40),
    tile=st.sampled_from([16, 32, 128]),
    seed=st.integers(1, 10**6),
    skew=st.floats(0, 4),
)
def test_pairs_are_sorted_by_expert_and_stable(emulator: Emulator, tokens, top_k, experts, tile, seed, skew):
    g = torch.Generator().manual_seed(seed)
    # Skewed: most pairs on few experts, some on none; -1 is skipped.
    ids = (experts * torch.rand(tokens, top_k, generator=g) ** (1 + skew)).long() - (
        torch.rand(tokens, top_k, generator=g) < 0.1
    ).long() * (experts + 1)
    ids = ids.clamp(min=-1)
    case = make_case(tokens, top_k, experts, 16, 16, ids=ids)
    got = emulator.routing(case.problem, tile, seed=seed)

    flat = ids.flatten()
    active = (flat >= 0).nonzero().flatten()
    order = active[flat[active].sort(stable=True).indices].int()
    assert torch.equal(got["sorted_token"][: len(order)], order // top_k)
    positions = torch.full_like(flat, -1, dtype=torch.int32)
    positions[order.long()] = torch.arange(len(order), dtype=torch.int32)
    assert torch.equal(got["pair_position"], positions)
    counts = torch.bincount(flat[active], minlength=experts)
    offsets = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    assert torch.equal(got["expert_offsets"], offsets)
    tiles = []
    for e, count in enumerate(counts.tolist()):
        # Wide tiles share an expert's tokens evenly, in steps of 16; narrow ones are filled.
        even = -(-count // max(1, -(-count // tile)))
        share = tile if tile < 128 or not count else -(-even // 16) * 16
        tiles += [(e, int(offsets[e]) + at, min(share, count - at)) for at in range(0, count, share)]
        assert share <= tile
    assert [tuple(row) for row in got["tiles"].tolist()] == tiles


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 500), experts=st.integers(1, 40), tile=st.sampled_from([16, 32, 128]), skew=st.floats(0, 4)
)
@example(tokens=481, experts=1, tile=16, skew=0.0)  # 32 tiles, of which 31 hold all; 28, of which 27 do
@example(tokens=421, experts=1, tile=16, skew=0.0)
def test_the_tiles_of_an_expert_come_in_pairs_and_share_its_tokens_evenly(
    emulator: Emulator, tokens, experts, tile, skew
):
    g = torch.Generator().manual_seed(tokens)
    ids = (experts * torch.rand(tokens, 1, generator=g) ** (1 + skew)).long()
    tiles = emulator.routing(make_case(tokens, 1, experts, 16, 16, ids=ids).problem, tile, paired=True)["tiles"]
    counts = torch.bincount(ids.flatten(), minlength=experts).tolist()
    position = 0
    rows = iter(tiles.tolist())
    for expert, count in enumerate(counts):
        mine = [next(rows) for _ in range(2 * -(-count // (2 * tile)))]
        for row in mine:
            assert row[0] == expert
            assert row[2] == 0 or row[1] == position  # where an empty tile begins is nobody's business
            position += row[2]
        sizes = [row[2] for row in mine]
        assert sum(sizes) == count
        assert not sizes or max(sizes) == -(-count // len(sizes)) <= tile
    assert next(rows, None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("experts", "options"),
    [
        (128, {"top_k": 8}),
        (7, {"top_k": 7, "renormalize": False}),
        (1024, {"top_k": 32, "scoring": "sigmoid"}),
        (64, {"top_k": 6, "scoring": "sigmoid", "num_expert_group": 8, "topk_group": 3, "bias": True}),
        (64, {"top_k": 4, "num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    ],
    ids=["qwen3", "all-of-7", "most", "deepseek-v3", "deepseek-v2"],
)
def test_the_gate_chooses_what_torch_chooses(emulator: Emulator, experts, options, dtype):
    g = torch.Generator().manual_seed(experts)
    logits = (torch.randn(5, experts, generator=g) * 2).to(dtype)
    options = dict(options)
    bias = guarded(torch.randn(experts, generator=g) * 0.1) if options.pop("bias", False) else None
    router = Router(logits=guarded(logits), score_bias=bias, **options)
    case = make_case(5, options["top_k"], experts, 16, 16)
    ids, weights = emulator.router(replace(case.problem, router=router, topk_ids=None, topk_weights=None))
    want_weights, want_ids = topk_router(logits, score_bias=bias, **options)
    assert torch.equal(ids, want_ids)
    assert torch.allclose(weights, want_weights, rtol=1e-5, atol=1e-7)


def test_equal_logits_go_to_the_lowest_ids(emulator: Emulator):
    router = Router(logits=guarded(torch.zeros(2, 40)), top_k=5)
    case = make_case(2, 5, 40, 16, 16)
    ids, _ = emulator.router(replace(case.problem, router=router, topk_ids=None, topk_weights=None))
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000], ids=["nan", "-nan"])
def test_a_nan_of_either_sign_counts_as_the_largest_as_in_torch(emulator: Emulator, bits):
    logits = torch.zeros(1, 40)
    logits[0, 7] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    router = Router(logits=guarded(logits), top_k=2, scoring="sigmoid")
    case = make_case(1, 2, 40, 16, 16)
    ids, _ = emulator.router(replace(case.problem, router=router, topk_ids=None, topk_weights=None))
    assert ids[0, 0] == 7


def test_direct_from_logits_equals_direct_from_the_ids_they_give(emulator: Emulator):
    case = make_case(5, 3, 8, 80, 48)
    logits = guarded(torch.randn(5, 8, generator=torch.Generator().manual_seed(2)))
    weights, ids = topk_router(logits, top_k=3)
    problem = replace(case.problem, topk_ids=guarded(ids), topk_weights=guarded(weights))
    from_ids = emulator.direct(problem).clone()
    router = Router(logits=logits, top_k=3)
    from_logits = emulator.direct(replace(case.problem, router=router, topk_ids=None, topk_weights=None))
    assert torch.allclose(from_ids.float(), from_logits.float(), rtol=2**-7, atol=1e-6)
