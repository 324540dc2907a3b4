from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.costs.comm import Group, all_reduce_us, gather_us
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry
from moe_optimizer.specs.links import Links, LinkTimes
from moe_optimizer.specs.quantity import Source

RECORDS = Path(__file__).resolve().parents[3] / "benchmarks" / "records"
H100 = load_catalog_entry("h100_sxm").gpu
L40S = load_catalog_entry("l40s").gpu
MEASURED = Links(
    tables=(
        LinkTimes(
            device=L40S.name,
            num_devices=2,
            versions="",
            all_reduce_us={2**12: 40.0, 2**16: 90.0},
            gather_us={2**12: 50.0, 2**16: 60.0},
            source="measured here",
        ),
    )
)


def test_one_gpu_needs_no_collective():
    assert all_reduce_us(1e6, H100, Group(1)).value == 0


def test_no_gpu_is_an_error():
    with pytest.raises(ValueError, match="got 0 GPUs"):
        all_reduce_us(1e6, H100, Group(0))


@pytest.mark.parametrize(
    ("gpus", "num_bytes", "us"),
    [(4, 2**17, 5.8), (4, 2**21, 18.6), (4, 2**23, 53.5), (4, 2**27, 619),
     (8, 2**13, 5.1), (8, 2**17, 7.9), (8, 2**19, 12.0), (8, 2**21, 19.4), (8, 2**23, 50.7)],
)  # fmt: skip
def test_an_all_reduce_takes_what_was_published_of_vllm_on_more_than_two_h100(gpus, num_bytes, us):
    assert all_reduce_us(num_bytes, H100, Group(gpus)).value == pytest.approx(us, rel=0.25)


@pytest.mark.parametrize(("record", "gpus"), [("2026-11-22_h100_x2", 2), ("2026-11-26_h100_x4", 4)])
def test_an_all_reduce_takes_what_was_measured_on_two_and_four_h100(record, gpus):
    found = json.loads((RECORDS / f"{record}_collectives.json").read_text(encoding="utf-8"))
    for num_bytes, each in found["times"]["vllm_all_reduce"].items():
        assert all_reduce_us(int(num_bytes), H100, Group(gpus)).value == pytest.approx(each["us"], rel=0.25)


NCCL_CHANGES_ITS_WAY = 2**22
"""Bytes, of which NCCL takes 1.8 times as long as a line through the sizes around them says."""


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_gather_takes_what_was_measured_on_four_h100(kind):
    found = json.loads((RECORDS / "2026-11-26_h100_x4_collectives.json").read_text(encoding="utf-8"))
    for num_bytes, each in found["times"][kind].items():
        if int(num_bytes) != NCCL_CHANGES_ITS_WAY:
            assert gather_us(int(num_bytes), H100, Group(4)).value == pytest.approx(each["us"], rel=0.25)


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


@given(st.floats(1e6, 1e10), st.sampled_from([1, 2, 4]))
def test_gpus_of_a_machine_share_what_comes_from_others(num_bytes, each):
    start, few = (gather_us(size, H100, Group(2 * each, 2)).value for size in (0, num_bytes))
    again, many = (gather_us(size, H100, Group(4 * each, 2)).value for size in (0, num_bytes))
    assert many - again < few - start


@pytest.mark.parametrize(("num_bytes", "us"), [(2**12, 40.0), (2**14, 60.0), (2**16, 90.0)])
def test_what_was_measured_of_these_gpus_counts_also_between_two_sizes(num_bytes, us):
    found = all_reduce_us(num_bytes, L40S, Group(2), MEASURED)
    assert found.value == pytest.approx(us)
    assert found.source is Source.MEASURED
    assert "measured here" in found.ref
    assert gather_us(2**12, L40S, Group(2), MEASURED).value == 50.0


@pytest.mark.parametrize(("num_bytes", "nearest"), [(2**10, 2**12), (2**20, 2**16)])
def test_beyond_the_measured_sizes_a_time_grows_as_modelled(num_bytes, nearest):
    found, there = (all_reduce_us(size, L40S, Group(2), MEASURED) for size in (num_bytes, nearest))
    modelled, modelled_there = (all_reduce_us(size, L40S, Group(2)) for size in (num_bytes, nearest))
    assert found.value / there.value == pytest.approx(modelled.value / modelled_there.value)
    assert found.source is modelled.source


@pytest.mark.parametrize(("gpu", "group"), [(L40S, Group(4)), (L40S, Group(2, 2)), (H100, Group(2)), (L40S, Group(1))])
def test_of_other_gpus_or_numbers_of_them_nothing_was_measured(gpu, group):
    assert all_reduce_us(2**14, gpu, group, MEASURED) == all_reduce_us(2**14, gpu, group)
