"""Which settings are tried for a plan."""

from __future__ import annotations

from moe_optimizer.measure.tune.settings import UNCHANGED, arguments_of, settings_of
from tests.builders import cpu_machine, made_plan, tiny_moe
from tests.builders.machines import gpus
from tests.builders.models import qwen3_30b_a3b


def test_the_first_value_changes_nothing_and_no_value_comes_twice() -> None:
    for plan in (
        made_plan(tiny_moe(), cpu_machine()),
        made_plan(qwen3_30b_a3b(), gpus("h200", 2)),
    ):
        for values in settings_of(plan, {}).values():
            assert values[0] == UNCHANGED
            assert len(set(values)) == len(values) > 1


def test_what_the_user_has_given_stays() -> None:
    plan = made_plan(tiny_moe(), cpu_machine())
    assert "--max-num-seqs" not in settings_of(plan, {"--max-num-seqs": "8"})


def test_graphs_cache_and_layout_are_tried_where_there_are_gpus() -> None:
    on_gpus = settings_of(made_plan(qwen3_30b_a3b(), gpus("h200", 2)), {})
    assert {"--kv-cache-dtype", "--max-cudagraph-capture-size", "--tensor-parallel-size"} <= set(on_gpus)
    assert not {"--kv-cache-dtype", "--tensor-parallel-size"} & set(
        settings_of(made_plan(tiny_moe(), cpu_machine()), {})
    )


def test_an_unchanged_setting_is_no_argument() -> None:
    assert arguments_of({"--a": UNCHANGED, "--b": "1"}) == {"--b": "1"}
