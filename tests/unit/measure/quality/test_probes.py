"""What servers are asked reaches every kernel of a plan, and fits into them."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_optimizer.measure.quality.probes import Extent, probes, step_sizes
from moe_optimizer.plan.pass_params import FlashDmoeParams
from moe_optimizer.specs.kernel_speeds import TokenRange
from tests.builders import cpu_machine, made_plan, tiny_moe

EXTENT = Extent(positions=1024, generated=8)
TEXT = list(range(100, 5100))


@settings(max_examples=40)
@given(
    st.sets(st.integers(1, 20_000), min_size=1, max_size=6),
    st.integers(1, 512),
    st.integers(4, 40_000),
)
def test_no_request_is_too_long_and_no_batch_too_large(sizes: set[int], seqs: int, length: int) -> None:
    asked = probes(TEXT, sorted(sizes), extent=EXTENT, max_num_seqs=seqs, max_model_len=length)
    assert len({probe.key for probe in asked}) == len(asked)
    for probe in asked:
        assert all(len(prompt) + max(1, probe.generated) <= length for prompt in probe.prompts)
        if probe.kind == "decode":
            assert probe.tokens <= seqs
            assert not probe.together or len(probe.prompts) == probe.tokens
        else:
            assert {len(prompt) for prompt in probe.prompts} == {probe.tokens}


def test_the_first_prompts_of_every_batch_are_those_that_are_also_sent_alone() -> None:
    asked = [
        probe
        for probe in probes(TEXT, (1, 8, 64, 256), extent=EXTENT, max_num_seqs=64, max_model_len=2048)
        if probe.kind == "decode"
    ]
    assert [probe.tokens for probe in asked] == [1, 8, 64]
    assert all(probe.prompts[:4] == asked[0].prompts[:4] for probe in asked)


def test_distributions_of_very_long_prompts_are_only_asked_for_at_their_end() -> None:
    asked = probes(TEXT, (1, 512, 16_384), extent=EXTENT, max_num_seqs=8, max_model_len=32_768)
    assert [(probe.kind, probe.tokens, probe.generated) for probe in asked if probe.kind != "decode"] == [
        ("prefill", 512, 0),
        ("long prefill", 16_384, 1),
    ]


def test_both_ends_of_every_planned_range_are_asked_for() -> None:
    plan = made_plan(tiny_moe(), cpu_machine())
    ranges = (TokenRange(up_to=4, use="direct"), TokenRange(up_to=256, use="grouped"))
    kernels = dataclasses.replace(
        plan.decision("flash_dmoe"), params=FlashDmoeParams(kernel="cuda", dispatch={"bf16": ranges})
    )
    others = (each for each in plan.decisions if each.pass_name != "flash_dmoe")
    assert {1, 4, 5, 256, 257} <= set(step_sizes(plan.replace(decisions=(*others, kernels))))
