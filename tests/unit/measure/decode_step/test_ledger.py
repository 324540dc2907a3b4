"""The ledger of a decode step from a profile."""

from __future__ import annotations

import pytest

from moe_optimizer.measure.decode_step.ledger import ledger_of
from moe_optimizer.measure.decode_step.profiled_steps import KernelTime, StepProfile
from tests.builders import gpus, qwen3_30b_a3b

KERNELS = (
    KernelTime(name="fused_moe_kernel", calls=96.0, us=2200.0),
    KernelTime(name="nvjet_tst_64x8", calls=145.0, us=1100.0),
    KernelTime(name="moe_sum", calls=48.0, us=100.0),
    KernelTime(name="something_new", calls=1.0, us=5.0),
)


@pytest.fixture
def ledger():
    gpu = gpus("h100_sxm", 1).gpu
    assert gpu is not None
    profile = StepProfile(batch=1, context=512, step_us=4780.0, kernels=KERNELS)
    return ledger_of(profile, qwen3_30b_a3b(), gpu, expert_bits=16, linear_bits=16)


def test_kernels_of_a_group_are_added_up_and_the_longest_group_is_first(ledger) -> None:
    assert [(row.group, row.calls, row.us) for row in ledger.rows] == [
        ("experts", 144.0, 2300.0),
        ("matrices", 145.0, 1100.0),
        ("other", 1.0, 5.0),
    ]


def test_nothing_is_lost(ledger) -> None:
    assert ledger.kernels_us == pytest.approx(sum(kernel.us for kernel in KERNELS))


def test_a_groups_floor_is_its_bytes_over_the_bandwidth(ledger) -> None:
    # 48 layers x 8 experts x 3 matrices of 2048 x 768 in BF16, at the datasheet's or the measured rate of an H100.
    least = ledger.rows[0].least_us
    assert 48 * 8 * 3 * 2048 * 768 * 2 / 3.35e6 <= least * 1.001 <= 48 * 8 * 3 * 2048 * 768 * 2 / 2.5e6
    assert ledger.rows[2].least_us is None
