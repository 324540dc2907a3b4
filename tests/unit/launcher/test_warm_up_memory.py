"""A second start sends less where an earlier one like it has left its kernels."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.launcher import launch, warm_up
from moe_optimizer.launcher.warm_up import WarmUpResult
from moe_optimizer.launcher.warm_up_memory import WarmUpMemory
from moe_optimizer.plan.plan import Plan
from tests.builders import gpus, made_plan, tiny_moe
from tests.unit.launcher.stand_in import Fake

ENDED = WarmUpResult(
    seconds=1.0, compiled=2, settled=True, refused=0, requests=9, group_s={}, short=False, needed=frozenset({"a"})
)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The environment of a server whose caches hold one kernel, after which one warm-up has ended."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
    environ = {name: str(tmp_path / name) for name in names}
    (tmp_path / "TRITON_CACHE_DIR" / "ABCDE").mkdir(parents=True)
    memory(environ).keep(ENDED)
    return environ


def memory(environ: dict[str, str], *requests: str, vllm_args: tuple[str, ...] = (), **changes: Any) -> WarmUpMemory:
    plan = made_plan(tiny_moe(), gpus("h100_sxm"), vllm_args=vllm_args, **changes)
    return WarmUpMemory(plan, environ, requests or ("a", "b"))


def test_what_was_needed_is_known_to_a_start_of_the_same_plan_at_another_port(environ: dict[str, str]) -> None:
    assert memory(environ).known() == ({"a"}, "")
    assert memory(environ, port=4711, vllm_args=("--served-model-name", "m")).known() == ({"a"}, "")


def test_nothing_is_known_to_another_plan_environment_or_warm_up(environ: dict[str, str]) -> None:
    assert memory(environ, vllm_args=("--max-model-len", "64")).known()[0] is None
    assert memory(environ, batch_size=3).known()[0] is None
    assert memory(environ | {"VLLM_USE_DEEP_GEMM": "0"}).known()[0] is None
    assert memory(environ | {"HOSTNAME": "other"}).known() == ({"a"}, "")
    assert memory(environ | {"VLLM_API_KEY": "secret"}).known() == ({"a"}, "")
    assert memory(environ | {"CUDA_VISIBLE_DEVICES": "3"}).known() == ({"a"}, "")
    assert memory(environ, "a", "b", "c").known() == (None, "no start like it before")


def test_nothing_is_known_where_a_kernel_is_gone_that_was_there(environ: dict[str, str], tmp_path: Path) -> None:
    kernels = tmp_path / "TRITON_CACHE_DIR"
    (kernels / "FGHIJ").mkdir()
    assert memory(environ).known() == ({"a"}, "")
    (kernels / "ABCDE").rmdir()
    assert memory(environ).known() == (None, "1 kernels of the start before are gone, such as Triton kernel ABCDE")


def test_a_graph_that_every_start_compiles_anew_may_be_gone(environ: dict[str, str], tmp_path: Path) -> None:
    code = tmp_path / "TORCHINDUCTOR_CACHE_DIR" / "ab" / "cab.py"
    code.parent.mkdir(parents=True)
    code.touch()
    memory(environ).keep(ENDED)
    code.unlink()
    assert memory(environ).known() == ({"a"}, "")


def test_of_a_warm_up_that_did_not_settle_nothing_is_known(environ: dict[str, str]) -> None:
    memory(environ).keep(dataclasses.replace(ENDED, settled=False))
    assert memory(environ).known()[0] is None


@pytest.mark.parametrize("text", ["[]", "{", '{"needed": 3, "kernels": []}', '{"needed": []}', '{"kernels": 1}'])
def test_a_file_that_is_no_such_thing_is_passed_over(environ: dict[str, str], tmp_path: Path, text: str) -> None:
    (kept,) = tmp_path.rglob("*.warm.json")
    kept.write_text(text)
    assert memory(environ).known()[0] is None


def test_the_second_start_of_a_plan_is_short_and_says_so(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], tmp_path: Path
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(warm_up, "AHEAD_S", 0.0)
    plan = functools.partial(fake, "sampler", batch_size=4)
    assert [warmed_up(plan(), tmp_path / "run") for _ in range(2)] == ["whole", "short"]


def warmed_up(plan: Plan, run_dir: Path) -> str:
    with launch.running(plan, run_dir=run_dir, warm_up_s=600.0) as info:
        return info.warm_up
