"""What is kept of a start of stock vLLM, and for which starts of ours it is found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.launcher.server_info import ServerInfo
from moe_optimizer.launcher.stock_start import keep_stock_start, last_stock_start
from moe_optimizer.plan.plan import Plan
from moe_optimizer.resources import cache_dir
from tests.builders import cpu_machine, gpus, made_plan, qwen3_30b_a3b, tiny_moe

PHASES = {"vLLM answers": 40.5, "vLLM: weights": 3.0}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def info(seconds: float) -> ServerInfo:
    return ServerInfo(
        base_url="", pid=1, model="m", run_dir=Path(), log_path=Path(), servers=(), rows=(), proofs=(),
        start_up_s=seconds, phases_s=PHASES,
    )  # fmt: skip


@pytest.fixture
def plan() -> Plan:
    return made_plan(tiny_moe(), cpu_machine())


def test_the_last_start_is_found_by_another_profile_of_the_same_model_and_machine(plan: Plan) -> None:
    assert last_stock_start(plan) is None
    keep_stock_start(plan, info(50.0))
    keep_stock_start(plan, info(41.0))
    found = last_stock_start(made_plan(tiny_moe(), cpu_machine(), "aggressive"))
    assert found is not None
    assert (found.start_up_s, found.phases_s) == (41.0, PHASES)
    assert found.serve_args == plan.serve_args.words
    assert "41 s" in found.in_words()


def test_another_model_or_number_of_gpus_has_a_start_of_its_own() -> None:
    one, two = (made_plan(qwen3_30b_a3b(), gpus("h100_sxm", count)) for count in (1, 2))
    keep_stock_start(one, info(50.0))
    assert last_stock_start(two) is None
    assert last_stock_start(made_plan(qwen3_30b_a3b("other"), gpus("h100_sxm", 1))) is None


def test_a_file_that_is_no_start_is_none(plan: Plan) -> None:
    keep_stock_start(plan, info(50.0))
    (path,) = (cache_dir() / "start_up").glob("*.stock.json")
    path.write_text('{"date": 3}')
    assert last_stock_start(plan) is None


def test_a_cache_that_takes_no_file_ends_nothing(plan: Plan) -> None:
    cache_dir().parent.mkdir(parents=True, exist_ok=True)
    cache_dir().write_text("a file")
    keep_stock_start(plan, info(50.0))
    assert last_stock_start(plan) is None
