"""Flag over environment over profile over default, and who said what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.cli import planning
from moe_optimizer.cli.options import SWITCHES, PlanOptions, ServeOptions
from moe_optimizer.cli.settings import resolve
from moe_optimizer.cli.show_config import effective_settings
from moe_optimizer.env import Environment, read_environment
from moe_optimizer.errors import InputError
from moe_optimizer.passes.registry import PASS_NAMES, switches
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.profiles import load_profile
from tests.builders import placement_load, tiny_moe

TINY_MOE = Path(__file__).resolve().parents[3] / "examples" / "tiny-moe"
NOTHING_SET = read_environment({})


def environment(**variables: str) -> Environment:
    return read_environment({f"MOE_OPTIMIZER_{name.upper()}": value for name, value in variables.items()})


def options(**values: Any) -> PlanOptions:
    return PlanOptions(model="m", **values)


@pytest.mark.parametrize(
    ("flag", "variable", "want"),
    [
        ("aggressive", "conservative", ("aggressive", "flag --profile")),
        (None, "conservative", ("conservative", "environment MOE_OPTIMIZER_PROFILE")),
        (None, "", ("balanced", "default")),
    ],
)
def test_a_flag_wins_over_the_environment_and_that_over_the_default(
    flag: str | None, variable: str, want: tuple[str, str]
) -> None:
    setting = resolve(options(profile=flag), environment(profile=variable)).values["profile"]
    assert (setting.value, setting.origin) == want


def test_a_switch_becomes_a_wish_with_its_origin() -> None:
    wishes = resolve(options(switches={"fp8": True, "sparsity": False}), NOTHING_SET).wishes
    assert wishes == {
        "fp8": (Wish.ON, "flag --enable-fp8"),
        "sparsity_24": (Wish.OFF, "flag --disable-sparsity"),
    }


@pytest.mark.parametrize("name", ["flash-dmoe", "flash_dmoe"])
def test_a_pass_may_be_required_by_flag_or_by_name(name: str) -> None:
    assert resolve(options(require=[name]), NOTHING_SET).required == {"flash_dmoe"}


def test_requiring_what_is_disabled_is_a_contradiction() -> None:
    with pytest.raises(InputError, match=r"--require fp8 .*--disable-fp8 "):
        resolve(options(require=["fp8"], switches={"fp8": False}), NOTHING_SET)


def test_an_unknown_pass_in_require_names_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        resolve(options(require=["flash-moe"]), NOTHING_SET)
    assert "flash-dmoe" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("values", "variables", "begin"),
    [
        ({"profile": "nope"}, {}, "--profile: unknown profile"),
        ({}, {"profile": "nope"}, "environment MOE_OPTIMIZER_PROFILE: unknown "),
        ({"profile": ""}, {}, "--profile: unknown profile ''"),
        ({"profile": "/nope.yaml"}, {}, "--profile: profile /nope.yaml: "),
        ({"hardware": "nope"}, {}, "--hardware: unknown hardware"),
        ({"hardware": ""}, {}, "--hardware: unknown hardware ''"),
        ({}, {"hardware": "nope"}, "environment MOE_OPTIMIZER_HARDWARE: unknown "),
        ({"require": ["nope"]}, {}, "--require: got 'nope'"),
        ({"expert_load": "/nope"}, {}, "--expert-load: /nope: "),
        ({"expert_load": ""}, {}, "--expert-load: got ''"),
        ({"expert_load_check": "/nope"}, {}, "--expert-load-check '/nope': "),
    ],
)
def test_an_error_begins_with_the_flag_or_variable_that_named_what_is_wrong(
    values: dict[str, Any], variables: dict[str, str], begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"MOE_OPTIMIZER_{name.upper()}", value)
    with pytest.raises(InputError) as caught:
        planning.make(PlanOptions(model=str(TINY_MOE), **values))
    assert str(caught.value).startswith(begin)


def test_every_switch_of_the_passes_is_an_option_and_no_other() -> None:
    assert {switch.flag: switch.title for switch in switches()} == SWITCHES


def test_the_kill_switch_turns_every_pass_off_but_the_number_of_gpus() -> None:
    settings = resolve(options(), environment(disable="1"))
    assert settings.disabled
    assert set(settings.wishes) == {*PASS_NAMES, "parallelism.expert_parallel"} - {"parallelism"}
    assert set(settings.wishes.values()) == {(Wish.OFF, "environment MOE_OPTIMIZER_DISABLE")}


@pytest.mark.parametrize("asked", [{"switches": {"fp8": True}}, {"require": ["fp8"]}])
def test_asking_for_a_pass_contradicts_the_kill_switch(asked: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="contradicts MOE_OPTIMIZER_DISABLE=1"):
        resolve(options(**asked), environment(disable="1"))


def test_the_effective_batch_size_is_the_flags_else_the_profiles() -> None:
    profile = load_profile("balanced")
    from_flag = effective_settings(resolve(options(batch_size=3), NOTHING_SET), profile)["batch_size"]
    from_profile = effective_settings(resolve(options(), NOTHING_SET), profile)["batch_size"]
    assert (from_flag.value, from_flag.origin) == (3, "flag --batch-size")
    assert (from_profile.value, from_profile.origin) == (profile.workload.batch_size, "profile balanced")


def test_what_a_profile_leaves_out_is_shown_as_default() -> None:
    shown = effective_settings(resolve(options(), NOTHING_SET), load_profile("balanced"))
    assert shown["passes.fp8.granularity"].origin == "default"
    assert shown["passes.fp8.mode"].origin == "profile balanced"


def test_a_flag_replaces_the_profiles_mode_of_a_pass() -> None:
    shown = effective_settings(resolve(options(switches={"fp8": True}), NOTHING_SET), load_profile("balanced"))
    assert (shown["passes.fp8.mode"].value, shown["passes.fp8.mode"].origin) == ("on", "flag --enable-fp8")


@pytest.mark.parametrize(
    ("flags", "vllm_args", "said"),
    [
        ({"port": 8001}, ["--port", "9000"], ("--port 8001", "--port 9000")),
        ({"dtype": "bfloat16"}, ["--dtype=float16"], ("--dtype bfloat16", "--dtype float16")),
        ({"batch_size": 4}, ["--max_num_seqs", "8"], ("--batch-size 4", "--max-num-seqs 8")),
        ({"max_model_len": 64}, ["--max-model-len", "128"], "--max-model-len 64"),
        ({"host": "127.0.0.1"}, ["--host", "::"], "--host 127.0.0.1"),
    ],
)
def test_a_flag_and_an_argument_for_vllm_that_contradict_are_refused(
    flags: dict[str, Any], vllm_args: list[str], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        resolve(options(**flags, vllm_args=ServeArguments(*vllm_args)), NOTHING_SET)
    assert all(words in str(caught.value) for words in said)


@pytest.mark.parametrize(("flags", "vllm_args"), [({}, ["--port", "9000"]), ({"port": 9000}, ["--port", "9000"])])
def test_an_argument_for_vllm_alone_or_of_the_same_value_is_taken(flags: dict[str, Any], vllm_args: list[str]) -> None:
    assert resolve(options(**flags, vllm_args=ServeArguments(*vllm_args)), NOTHING_SET)["vllm_args"] == vllm_args


@pytest.mark.parametrize("counts", ["expert_load.json", "decode/expert_load.json", "expert_load/worker-0.json"])
def test_a_load_that_the_run_itself_would_remove_is_refused(tmp_path: Path, counts: str) -> None:
    """The run folder's counts are removed when a run starts there."""
    file = tmp_path / "run" / counts
    file.parent.mkdir(parents=True)
    file.write_text(placement_load(tiny_moe()).placed_by.load.to_json())
    with pytest.raises(InputError, match="its own counts") as caught:
        planning.make(ServeOptions(model=str(TINY_MOE), expert_load=str(file), run_dir=str(tmp_path / "run")))
    assert str(caught.value).startswith("--expert-load: ")
    assert file.exists()
    planning.make(ServeOptions(model=str(TINY_MOE), expert_load=str(file), run_dir=str(tmp_path / "another")))
