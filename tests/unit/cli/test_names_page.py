"""docs/names.md: every synonym of a switch is taken, and every flat profile key is told its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_optimizer import synonyms
from moe_optimizer.cli.app import TAKES_VLLM_ARGS, make_app
from moe_optimizer.cli.main import main
from moe_optimizer.cli.options import SWITCHES
from moe_optimizer.errors import InputError
from moe_optimizer.passes.registry import required_key
from moe_optimizer.profiles import load_profile
from moe_optimizer.profiles.schema import Profile

ROOT = Path(__file__).resolve().parents[3]
TINY_MOE = str(ROOT / "examples" / "tiny-moe")
Shown = Callable[..., tuple[int, str, str]]


def table(heading: str, index: int = 0) -> dict[str, str]:
    """Return the rows of the index-th table under a heading of docs/names.md: first column -> second."""
    page = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE)[index].splitlines()[2:]
    cells = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    return {first.strip("`"): second.strip("`") for first, second in cells}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Shown:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_the_page_lists_the_synonyms_of_switches() -> None:
    assert table("Switches") == synonyms.SWITCHES
    assert set(synonyms.SWITCHES.values()) <= set(SWITCHES)
    assert not set(synonyms.SWITCHES) & set(SWITCHES)


@pytest.mark.parametrize("synonym", synonyms.SWITCHES)
def test_a_synonym_is_the_switch(synonym: str, run: Shown) -> None:
    ours = synonyms.SWITCHES[synonym]
    key = required_key(ours)
    setting = f"passes.{key}" if "." in key else f"passes.{key}.mode"
    show = ("--model", TINY_MOE, "--show-config")
    for command in ("serve", "plan", "tune") if synonym == "dbo" else ("serve",):
        for word, mode in (("enable", "on"), ("disable", "off")):
            code, out, _ = run(command, *show, f"--{word}-{synonym}")
            assert code == 0
            assert re.search(rf"^{setting} +{mode}  \(flag --{word}-{ours}\)$", out, re.MULTILINE)
    code, out, _ = run("serve", *show, "--require", synonym)
    assert code == 0
    assert re.search(rf"^passes\.{key}\.required +yes", out, re.MULTILINE)


def test_two_names_of_one_switch_are_refused(run: Shown) -> None:
    for first, second in (
        ("--enable-dbo", "--disable-dual-batch-overlap"),
        ("--enable-dual-batch-overlap", "--disable-dbo"),
        ("--enable-dbo", "--disable-dbo"),
        ("--enable-dbo", "--enable-dual-batch-overlap"),
        ("--enable-sparsity-24", "--enable-structured-sparsity"),
        ("--enable-dbo", "--enable-dbo"),
    ):
        code, _, err = run("serve", "--model", TINY_MOE, first, second, "--dry-run")
        assert code == 2
        assert err.startswith("error: --")
        assert "contradict" in err or "more than once" in err


def test_a_command_without_switches_knows_no_synonyms(run: Shown) -> None:
    code, _, err = run("inspect", TINY_MOE, "--enable-dbo")
    assert (code, "--enable-dbo" in err) == (2, True)


@pytest.mark.parametrize("command", ["serve", "plan", "tune"])
def test_help_gives_synonyms_one_line(command: str, run: Shown) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert len([line for line in out.splitlines() if "ynonym" in line]) == 1
    assert not [name for name in synonyms.SWITCHES if f"--disable-{name}" in out]


def test_what_has_no_synonym_is_an_unknown_option(run: Shown) -> None:
    flags = {flag for names in table("Other flags") for flag in re.findall(r"--[a-z-]+", names)}
    assert len(flags) > 5
    for flag in flags:
        assert run("serve", "--model", TINY_MOE, flag, "1")[0] == 2, flag


def hint_of(key: str, folder: Path) -> str:
    path = folder / "flat.yaml"
    path.write_text(f"name: flat\n{key}: 2\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_profile(str(path))
    assert f"{path}:2" in str(caught.value)
    return caught.value.hint or ""


def test_a_flat_key_is_told_its_place(tmp_path: Path) -> None:
    places = table("Profile keys")
    assert len(places) > 20
    for key, place in places.items():
        assert f"`{place}`" in hint_of(key, tmp_path), key
        section: object = Profile(name="any")
        for part in place.split("."):
            section = getattr(section, part)


def test_a_flat_key_that_is_no_profile_key_is_told_where_it_is_said(tmp_path: Path) -> None:
    elsewhere = table("Profile keys", 1)
    assert len(elsewhere) > 3
    for key, said in elsewhere.items():
        assert (said if said.startswith("--") else "config.json") in hint_of(key, tmp_path), key


def test_a_misspelt_key_still_gets_the_nearest(tmp_path: Path) -> None:
    assert "max_model_len" in str(hint_of("max_model_ln", tmp_path))


def test_the_command_line_names_the_place_too(tmp_path: Path, run: Shown) -> None:
    (tmp_path / "flat.yaml").write_text("name: flat\nenable_cuda_graphs: true\n", encoding="utf-8")
    code, _, err = run("serve", "--model", TINY_MOE, "--dry-run", "--profile", str(tmp_path / "flat.yaml"))
    assert code == 2
    assert "`passes.graph_capture.mode`" in err.splitlines()[-1]


def test_the_inspector_can_be_imported_from_the_package() -> None:
    from moe_optimizer import ModelInspector

    assert ModelInspector().inspect(TINY_MOE).is_moe


def test_the_commands_with_switches_are_those_that_take_synonyms() -> None:
    import typer

    commands = typer.main.get_group(make_app()).commands
    switched = [name for name, each in commands.items() if any("--enable-fp8" in option.opts for option in each.params)]
    assert switched == [name for name in TAKES_VLLM_ARGS if " " not in name]
