"""The environment is read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer import env
from moe_optimizer.errors import InputError


def test_nothing_set_gives_nothing() -> None:
    assert env.read_environment({}) == env.Environment(
        profile=None, plan=None, run_dir=None, disabled=False, hardware=None, calibrate_s=None, expert_series=False
    )


def test_other_packages_variables_are_not_ours() -> None:
    assert env.read_environment({"VLLM_PLUGINS": "x", "MOE_OPT": "y"}).profile is None


def test_every_variable_is_read() -> None:
    settings = env.read_environment(
        {
            env.PROFILE: "balanced",
            env.PLAN: "/p/plan.json",
            env.RUN_DIR: "/r",
            env.DISABLE: "1",
            env.HARDWARE: "h200",
            env.CALIBRATE: "2.5s",
            env.EXPERT_SERIES: "1",
        }
    )
    assert settings == env.Environment(
        profile="balanced",
        plan=Path("/p/plan.json"),
        run_dir=Path("/r"),
        disabled=True,
        hardware="h200",
        calibrate_s=2.5,
        expert_series=True,
    )


def test_a_misspelt_variable_is_an_error_with_its_near_match() -> None:
    with pytest.raises(InputError, match="MOE_OPTIMIZER_PROFIL,") as caught:
        env.read_environment({"MOE_OPTIMIZER_PROFIL": "balanced"})
    assert str(caught.value.hint).endswith(" MOE_OPTIMIZER_PROFILE?")


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("True", True), ("on", True), ("0", False), ("no", False), ("", False)]
)
def test_disable_takes_booleans(text: str, value: bool) -> None:
    assert env.read_environment({env.DISABLE: text}).disabled is value


def test_disable_refuses_anything_else() -> None:
    with pytest.raises(InputError, match=r"MOE_OPTIMIZER_DISABLE:.*'maybe',.* 1, true"):
        env.read_environment({env.DISABLE: "maybe"})


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf"])
def test_calibrate_takes_seconds(text: str) -> None:
    with pytest.raises(InputError, match=f"MOE_OPTIMIZER_CALIBRATE: .*'{text}', .*seconds"):
        env.read_environment({env.CALIBRATE: text})


@pytest.mark.parametrize("text", ["0", "1048577", "0000000001048577", "-1", "1.5", "many"])
def test_clients_are_bounded_as_those_of_flag_and_profile_are(text: str) -> None:
    assert env.read_environment({env.CLIENTS: "1048576"}).clients == 1_048_576
    with pytest.raises(InputError, match=env.CLIENTS):
        env.read_environment({env.CLIENTS: text})
