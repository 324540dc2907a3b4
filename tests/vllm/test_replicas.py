"""Two whole vLLM servers behind the real router. Turns and deaths, with stand-ins: tests/contract/test_replicas.py."""

from __future__ import annotations

import importlib.util

import pytest

from moe_optimizer.proof.verdict import kernels_in_use
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import Served

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="needs the package vllm-router")


def test_every_server_took_a_request_before_they_counted_as_ready(ours_bf16: Served) -> None:
    assert ours_bf16.info is not None
    (row,) = [row for row in ours_bf16.info.rows if row.pass_name == "replicas"]
    assert (row.applied, row.ran, row.why_not) == ("by servers", "yes, 2 servers", "")


def test_both_servers_run_our_kernel(ours_bf16: Served) -> None:
    assert ours_bf16.info is not None
    assert [bool(kernels_in_use(server.proofs)) for server in ours_bf16.info.servers] == [True, True]


def test_both_answer_as_vllms_own_kernel_up_to_toss_ups(fallback_bf16: Served, ours_bf16: Served) -> None:
    for answers in (ours_bf16.answers, *ours_bf16.again):
        for stock, ours in zip(fallback_bf16.answers, answers, strict=True):
            assert_same_up_to_a_tie(stock, ours)
    assert len(ours_bf16.again) == 1
