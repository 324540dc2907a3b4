from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.costs.comm import Group, all_reduce_us
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry
from moe_optimizer.specs.quantity import Source

H100 = load_catalog_entry("h100_sxm").gpu
L40S = load_catalog_entry("l40s").gpu


def test_one_gpu_needs_no_collective():
    assert all_reduce_us(1e6, H100, Group(1)).value == 0


def test_no_gpu_is_an_error():
    with pytest.raises(ValueError, match="got 0 GPUs"):
        all_reduce_us(1e6, H100, Group(0))


@pytest.mark.parametrize(
    ("gpus", "num_bytes", "us"),
    [(2, 2**12, 4.38), (2, 2**20, 12.4), (2, 2**26, 469), (4, 2**16, 5.8), (4, 2**20, 18.6), (4, 2**26, 619),
     (8, 2**12, 5.1), (8, 2**16, 7.9), (8, 2**18, 12.0), (8, 2**20, 19.4), (8, 2**26, 577)],
)  # fmt: skip
def test_an_all_reduce_takes_what_was_published_of_vllm_on_h100(gpus, num_bytes, us):
    assert all_reduce_us(num_bytes, H100, Group(gpus)).value == pytest.approx(us, rel=0.25)


def test_an_assumed_latency_makes_the_estimate_assumed():
    assert all_reduce_us(1.0, L40S, Group(2)).source is Source.ASSUMED


@given(st.floats(0, 1e10), st.integers(2, 64))
def test_pcie_is_never_faster_than_nvlink(num_bytes, gpus):
    assert all_reduce_us(num_bytes, L40S, Group(gpus)).value > all_reduce_us(num_bytes, H100, Group(gpus)).value


@given(st.floats(0, 1e10), st.integers(3, 64))
def test_an_all_reduce_is_never_longer_than_one_exchange_of_all_or_two_of_parts(num_bytes, gpus):
    start = all_reduce_us(0, H100, Group(gpus)).value
    one = start + (gpus - 1) * (all_reduce_us(num_bytes, H100, Group(2)).value - start)
    assert start <= all_reduce_us(num_bytes, H100, Group(gpus)).value <= one * (1 + 1e-9)


@given(st.floats(0, 1e10), st.integers(2, 64))
def test_another_machine_is_never_nearer(num_bytes, gpus):
    assert all_reduce_us(num_bytes, H100, Group(gpus, 2)).value > all_reduce_us(num_bytes, H100, Group(gpus)).value
