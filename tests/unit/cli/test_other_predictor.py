"""The estimate of another package beside ours. Packages of these names stand in for the real ones."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from moe_optimizer.cli.other_predictor import with_other_estimate
from moe_optimizer.cli.plan import plan_output
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.layout_choice import LayoutChoice, OtherEstimate
from moe_optimizer.plan.layout_table import layout_lines
from tests.builders import (
    gpt_oss_120b,
    gpus,
    made_plan,
    profile_with,
    qwen3_30b_a3b,
    qwen3_30b_a3b_fp8,
    qwen3_30b_a3b_int4,
    software,
)

MODULES = {"aisimulate": "legacy_cli", "aiconfigurator": "cli"}
PLAN = made_plan(qwen3_30b_a3b(), gpus("h200", 4), layout="tp4", clients=64)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that installs a package which estimates what ours is times a factor."""

    def installed(package: str, *, factor: float = 1.0, raises: bool = False) -> None:
        folder = tmp_path / package / MODULES[package]
        folder.mkdir(parents=True)
        for each in (folder.parent, folder):
            (each / "__init__.py").write_text("")
        ours = _choice(PLAN.layouts).estimate
        told = f"R(tpot={ours.tpot_ms * factor!r}, tokens_per_second={ours.tokens_per_s / factor!r})"
        (folder / "api.py").write_text(
            "from types import SimpleNamespace as R\nasked = []\ndef cli_estimate(model, system, **sizes):\n"
            f"    asked.append((system, sizes))\n    {'raise KeyError(model)' if raises else f'return {told}'}\n"
        )
        about = tmp_path / f"{package}-9.1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.1\n")
        # A folder that was looked at before within the same tick of its clock would be taken for unchanged.
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield installed
    for name in [each for each in sys.modules if each.partition(".")[0] in MODULES]:
        del sys.modules[name]
    importlib.invalidate_caches()


def _choice(choice: LayoutChoice | None) -> LayoutChoice:
    assert choice is not None
    return choice


def _other() -> OtherEstimate | None:
    return _choice(with_other_estimate(PLAN).layouts).other


def test_without_a_package_nothing_stands_beside_ours(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert with_other_estimate(PLAN) is PLAN


@pytest.mark.parametrize(("factor", "differs"), [(1.2, False), (1.3, True), (0.7, True)])
def test_a_difference_of_more_than_a_quarter_is_said(install, factor, differs):
    install("aisimulate", factor=factor)
    plan = with_other_estimate(PLAN)
    other = _choice(plan.layouts).other
    assert other is not None
    assert other.differs is differs
    told = " ".join(layout_lines(_choice(plan.layouts), 79))
    assert "AISimulate 9.1" in told
    assert ("25 %" in told) is differs


def test_the_predecessor_is_asked_where_the_successor_is_not(install):
    install("aiconfigurator")
    other = _other()
    assert other is not None
    assert other.name == "AIConfigurator 9.1"


def test_of_both_the_successor_is_asked_for_the_planned_sizes(install):
    install("aiconfigurator", factor=2)
    install("aisimulate")
    other = _other()
    assert other is not None
    assert other.name == "AISimulate 9.1"
    ((system, sizes),) = sys.modules["aisimulate.legacy_cli.api"].asked
    assert (system, sizes["tp_size"], sizes["moe_tp_size"], sizes["moe_ep_size"]) == ("h200_sxm", 4, 4, 1)


def test_of_prefill_and_decode_servers_all_are_asked_for_together(install):
    install("aiconfigurator")
    plan = made_plan(qwen3_30b_a3b(), gpus("h200", 4), layout="tp1p1d3", clients=96)
    other = _choice(with_other_estimate(plan).layouts).other
    assert other is not None
    ((_, sizes),) = sys.modules["aiconfigurator.cli.api"].asked
    assert (sizes["mode"], sizes["prefill_num_workers"], sizes["decode_num_workers"]) == ("disagg", 1, 3)
    assert sizes["decode_batch_size"] == 32
    # What stands in tells the tokens/s of PLAN: they are of all servers, and of no server three times.
    assert other.tokens_per_s == pytest.approx(_choice(PLAN.layouts).estimate.tokens_per_s, rel=1e-3)


def test_what_it_has_no_data_of_is_said(install):
    install("aisimulate", raises=True)
    other = _other()
    assert other is not None
    assert (other.tpot_ms, other.differs) == (None, False)
    assert "Qwen3-30B-A3B" in other.why_none


FP8 = {"fp8": (Wish.ON, "--enable-fp8")}
FOUR_BIT = {"four_bit": (Wish.ON, "--enable-four-bit")}
FORMATS = {
    "as stored": (qwen3_30b_a3b(), {}, ("bfloat16", "bfloat16", "bfloat16")),
    "converted by block": (qwen3_30b_a3b(), {"wishes": FP8}, ("fp8_block", "fp8_block", "bfloat16")),
    "converted by channel": (
        qwen3_30b_a3b(),
        {"wishes": FP8, "profile": profile_with(passes={"fp8": {"granularity": "channel"}})},
        ("fp8", "fp8", "bfloat16"),
    ),
    "converted by vLLM's argument": (
        qwen3_30b_a3b(), {"vllm_args": ("--quantization", "fp8")}, ("fp8", "fp8", "bfloat16"),
    ),
    "stored in FP8": (qwen3_30b_a3b_fp8(), {}, ("fp8_block", "fp8_block", "bfloat16")),
    "with a cache in FP8": (
        qwen3_30b_a3b(), {"vllm_args": ("--kv-cache-dtype", "fp8")}, ("bfloat16", "bfloat16", "fp8"),
    ),
    "gpt-oss": (gpt_oss_120b(), {}, ("w4a16_mxfp4", "bfloat16", "bfloat16")),
    "stored in INT4": (qwen3_30b_a3b_int4(), {}, ("int4_wo", "int4_wo", "bfloat16")),
    "experts converted to four bits": (
        qwen3_30b_a3b(), {"wishes": FOUR_BIT, "software": software(cuda_ops=("fused_experts",))},
        ("w4a16_mxfp4", "bfloat16", "bfloat16"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "asked", "formats"), FORMATS.values(), ids=FORMATS)
def test_it_is_asked_for_the_decided_formats(install, model, asked, formats):
    install("aiconfigurator")
    with_other_estimate(made_plan(model, gpus("h200", 4), layout="tp1", clients=64, num_gpus=1, **asked))
    ((_, sizes),) = sys.modules["aiconfigurator.cli.api"].asked
    assert tuple(sizes[key] for key in ("moe_quant_mode", "gemm_quant_mode", "kvcache_quant_mode")) == formats


def test_formats_that_it_does_not_know_are_said_in_place_of_a_comparison(install):
    install("aiconfigurator")
    kept = profile_with(passes={"fp8": {"keep_bf16_layers": ["layers.0"]}})
    plan = with_other_estimate(made_plan(qwen3_30b_a3b(), gpus("h200", 4), kept, layout="tp4", wishes=FP8))
    other = _choice(plan.layouts).other
    assert other is not None
    assert other.tpot_ms is None
    assert "layers" in " ".join(layout_lines(_choice(plan.layouts), 79))


def test_a_dry_run_says_where_the_estimate_is_shown(install):
    before = plan_output(PLAN, as_json=False).notes
    install("aiconfigurator")
    (note,) = set(plan_output(PLAN, as_json=False).notes) - set(before)
    assert "plan --explain" in note
    assert set(plan_output(PLAN, as_json=True).notes) == set(before)
