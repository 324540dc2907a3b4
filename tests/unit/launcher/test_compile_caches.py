"""Where servers keep what they compile."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.launcher.compile_caches import compile_caches
from tests.builders import cpu_machine, gpus, made_plan, qwen3_30b_a3b, tiny_moe

PLAN = made_plan(qwen3_30b_a3b(), gpus("h200", 1))


def test_caches_lie_beside_ours_under_the_versions_they_are_of(tmp_path: Path) -> None:
    found = compile_caches(PLAN, {"XDG_CACHE_HOME": str(tmp_path)})
    assert set(found) == {"TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR"}
    for path in map(Path, found.values()):
        assert path.is_relative_to(tmp_path / "moe-optimizer" / "compiled")
        assert f"vllm-{PLAN.vllm_version}" in path.parent.name


def test_what_the_user_sets_stays(tmp_path: Path) -> None:
    found = compile_caches(PLAN, {"XDG_CACHE_HOME": str(tmp_path), "TRITON_CACHE_DIR": "/mine"})
    assert set(found) == {"DG_JIT_CACHE_DIR"}


def test_the_cpu_build_compiles_with_neither() -> None:
    assert compile_caches(made_plan(tiny_moe(), cpu_machine()), {}) == {}
