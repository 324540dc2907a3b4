from __future__ import annotations

import pytest

from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan_context.cache_dtype import cache_bits, cache_dtype
from tests.builders import context, cpu_machine, deepseek_v3, gpus, profile_with, qwen3_30b_a3b, tiny_moe

ON = {"kv_cache": (Wish.ON, "flag --enable-kv-cache")}
OFF = {"kv_cache": (Wish.OFF, "flag --disable-kv-cache")}
FP8 = profile_with("aggressive")


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "auto"),
        ({"wishes": ON}, "fp8"),
        ({"profile": FP8}, "fp8"),
        ({"profile": FP8, "wishes": OFF}, "auto"),
        ({"profile": FP8, "pinned": {"--kv-cache-dtype": "bfloat16"}}, "bfloat16"),
        ({"wishes": OFF, "pinned": {"--kv-cache-dtype": "fp8_e5m2"}}, "fp8_e5m2"),
    ],
)
def test_the_users_own_type_goes_before_what_is_wished(changes, dtype):
    assert cache_dtype(context(qwen3_30b_a3b(), gpus("h100_sxm"), **changes)) == dtype


@pytest.mark.parametrize(("model", "machine"), [(deepseek_v3(), gpus("h200")), (qwen3_30b_a3b(), gpus("a100_80gb"))])
def test_a_cache_that_cannot_be_fp8_keeps_its_type(model, machine):
    assert cache_dtype(context(model, machine, wishes=ON)) == "auto"


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [(("avx2",), "auto"), (("avx2", "avx512f", "avx512bw", "avx512vl"), "fp8"), (("avx2", "amx_bf16"), "fp8")],
)
def test_on_a_cpu_an_fp8_cache_needs_avx_512_or_amx(isa, dtype):
    assert cache_dtype(context(tiny_moe(), cpu_machine(isa=isa), wishes=ON)) == dtype


@pytest.mark.parametrize(
    ("dtype", "served", "bits"),
    [("auto", "bfloat16", 16), ("auto", "float32", 32), ("float32", "float32", 32), ("fp8_e4m3", "float32", 8)],
)
def test_an_element_has_the_bits_of_its_type(dtype, served, bits):
    assert cache_bits(context(qwen3_30b_a3b(), gpus("h100_sxm"), dtype=served), dtype) == bits
