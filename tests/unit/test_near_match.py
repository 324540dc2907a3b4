"""What is near to a mistyped word, and what is not."""

from __future__ import annotations

import pytest

from moe_optimizer.near_match import did_you_mean

FLAGS = (
    "--enable-fp8", "--disable-fp8", "--enable-flash-dmoe", "--disable-flash-dmoe", "--enable-kv-cache", "--gpus",
    "--model", "--port", "--batch-size", "--max-model-len", "--run-dir", "--render", "--require", "--dry-run",
)  # fmt: skip


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--enable-fp9", "--enable-fp8"),
        ("--disable-fp9", "--disable-fp8"),
        ("--enable_fp8", "--enable-fp8"),
        ("--enbale-fp8", "--enable-fp8"),
        ("--enable-flash-dome", "--enable-flash-dmoe"),
        ("--enable-kv", "--enable-kv-cache"),
        ("--modle", "--model"),
        ("--prot", "--port"),
        ("--gpu", "--gpus"),
        ("--batch", "--batch-size"),
        ("--dryrun", "--dry-run"),
        ("--gpus-per-node", "--gpus"),
        ("--model_path", "--model"),
    ],
)
def test_a_mistyped_flag_has_its_near_match(word: str, near: str) -> None:
    assert (did_you_mean(word, FLAGS) or "").split()[3:] == [f"{near}?"]


def test_a_word_with_the_same_digits_is_nearer_than_one_that_is_more_like_it() -> None:
    assert did_you_mean("h200_sxm", ("h100_sxm", "h200")) == "did you mean h200?"


def test_a_word_that_is_more_like_it_is_nearer_than_one_that_begins_it() -> None:
    assert did_you_mean("memory_bandwith", ("memory", "memory_bandwidth")) == "did you mean memory_bandwidth?"


@pytest.mark.parametrize(
    "word", ["--enable-nope", "--enable-everything", "--tensor-parallel-size", "--tp", "--foo", "--", "", "--e", "--x"]
)
def test_nonsense_has_none(word: str) -> None:
    assert did_you_mean(word, FLAGS) is None


def test_the_prefix_of_all_variables_makes_none_near() -> None:
    known = ("MOE_OPTIMIZER_PROFILE", "MOE_OPTIMIZER_PLAN", "MOE_OPTIMIZER_RUN_DIR")
    assert (did_you_mean("MOE_OPTIMIZER_PROFIL", known) or "").split()[3:] == ["MOE_OPTIMIZER_PROFILE?"]
    assert did_you_mean("MOE_OPTIMIZER_COLOUR", known) is None


def test_nothing_known_is_nothing_near() -> None:
    assert did_you_mean("x", ()) is None
