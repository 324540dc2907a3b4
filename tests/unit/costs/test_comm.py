from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.costs.comm import Group, all_reduce_us, gather_us
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry
from moe_optimizer.specs.quantity import Source

H100 = load_catalog_entry("h100_sxm").gpu
L40S = load_catalog_entry("l40s").gpu


def test_one_gpu_needs_no_collective():
    assert all_reduce_us(1e6, H100, Group(1)).value == 0


def test_no_gpu_is_an_error():
    with pytest.raises(ValueError, match="got 0 GPUs"):
        all_reduce_us(1e6, H100, Group(0))


def test_all_reduce_of_a_gigabyte_is_bound_by_the_link():
    # 2 * 7/8 GB over three quarters of 450 GB/s one way.
    assert all_reduce_us(1e9, H100, Group(8)).value == pytest.approx(2 * 7 / 8 / 337.5 * 1e6, rel=0.01)


def test_assumed_latency_makes_the_estimate_assumed():
    assert all_reduce_us(1.0, H100, Group(2)).source is Source.ASSUMED


@given(st.floats(0, 1e10), st.integers(2, 64))
def test_pcie_is_never_faster_than_nvlink(num_bytes, gpus):
    assert all_reduce_us(num_bytes, L40S, Group(gpus)).value > all_reduce_us(num_bytes, H100, Group(gpus)).value


@given(st.floats(1e5, 1e10), st.integers(2, 64))
def test_a_gather_moves_half_of_what_an_all_reduce_does(num_bytes, gpus):
    start = gather_us(0, H100, Group(gpus)).value
    reduced = all_reduce_us(num_bytes, H100, Group(gpus)).value - all_reduce_us(0, H100, Group(gpus)).value
    assert gather_us(num_bytes, H100, Group(gpus)).value - start == pytest.approx(reduced / 2)


@given(st.floats(0, 1e10), st.integers(2, 64))
def test_another_machine_is_never_nearer(num_bytes, gpus):
    assert all_reduce_us(num_bytes, H100, Group(gpus, 2)).value > all_reduce_us(num_bytes, H100, Group(gpus)).value
