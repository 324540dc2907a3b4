"""Rooflines: no kernel is above the roof, and work is counted as the formulas say."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.costs.roofline import memory_bandwidth, peak_flops
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry
from moe_optimizer.inspection.kernel_speeds import read_tables, shipped_dir
from moe_optimizer.measure.report.roofline_figure import kernel_points, layer_work, roofline
from moe_optimizer.specs.kernel_speeds import KernelSpeeds, LayerShape

TABLES = [table for path in sorted(shipped_dir().glob("*.json")) for table in read_tables(path)]
GPUS = {"NVIDIA H100 80GB HBM3": "h100_sxm", "NVIDIA H200": "h200"}
SHAPE = LayerShape(hidden_size=64, intermediate_size=32, num_experts=8, num_global_experts=8, top_k=2)


def test_one_token_reads_its_experts_once():
    flop, read = layer_work(SHAPE, 1, weight_bits=16)
    assert flop == 2 * 2 * 3 * 64 * 32
    assert read == pytest.approx(2 * 3 * 64 * 32 * 2 + 2 * 64 * 2)


@given(st.integers(1, 10_000))
def test_more_tokens_never_read_less_and_never_more_than_every_expert(tokens: int):
    flop, read = layer_work(SHAPE, tokens, weight_bits=8)
    more_flop, more_read = layer_work(SHAPE, tokens + 1, weight_bits=8)
    assert more_flop > flop
    assert more_read >= read
    assert read <= 8 * 3 * 64 * 32 + tokens * 2 * 64 * 2 + 1e-6


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.device} {table.weights} {table.shape.num_experts}")
def test_no_measured_kernel_beats_the_data_sheet(table: KernelSpeeds):
    # Times are means over uniform and skewed routing; the bytes are of uniform routing, which hits more experts.
    gpu = load_catalog_entry(GPUS[table.device]).gpu
    peak = peak_flops(gpu, 8.0 if table.weights.startswith("fp8") else 16.0).value
    bandwidth = memory_bandwidth(gpu).value
    for point in kernel_points(table):
        assert point.flop_per_s <= 1.2 * min(peak, point.intensity * bandwidth), point


@pytest.mark.parametrize(
    ("weights", "words"), [("fp8_tensor", "FP8 per tensor weights"), ("int4_g64z", "INT4 g64 with zero points weights")]
)
def test_weights_that_no_shipped_table_has_are_drawn_too(weights: str, words: str):
    table = dataclasses.replace(TABLES[0], weights=weights)
    assert words in roofline(table, load_catalog_entry(GPUS[table.device]).gpu).markup()


def test_every_kernel_has_its_mark():
    table = TABLES[0]
    picture = roofline(table, load_catalog_entry(GPUS[table.device]).gpu).markup()
    assert all(f"{point.kernel}, {point.tokens} tokens" in picture for point in kernel_points(table))
