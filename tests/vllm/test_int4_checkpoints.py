"""Checkpoints of GPTQ, AWQ and compressed-tensors in vLLM's engine, which has no kernel for them on this processor: our
kernel reads their integers, and the tokens are those of the same weights in BF16 by vLLM's own kernel.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moe_optimizer.cli.settings import resolve_wishes
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.verdict import model_holders
from tests.int4_checkpoint import Form, write_int4
from tests.shared_result import folder_of_all_workers, made_once
from tests.vllm.answers import assert_same_up_to_a_tie
from tests.vllm.conftest import Offline, answered_offline, plan_here

SYMMETRIC, WITH_ZEROS = 64, 32
"""Groups of the checkpoints without and with zero points."""
STORED: dict[Form, int] = {"gptq": SYMMETRIC, "awq": WITH_ZEROS, "compressed-tensors": WITH_ZEROS}
"""vLLM reads no other GPTQ than the symmetric kind."""
RELOADED: Form = "awq"
"""This engine is started on other weights, and gets those that are compared by `reload_weights`."""
WEIGHTS = 3 * 128 * 128
EXPERTS, LAYERS = 16, 4


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Offline]:
    folder = folder_of_all_workers(tmp_path_factory)
    return made_once(folder, "int4", lambda: _answered(tmp_path_factory.mktemp("int4")))


def _answered(folder: Path) -> dict[str, Offline]:
    plans = {form: _plan(folder / "models", form, group) for form, group in STORED.items()}
    plans |= {f"dense {group}": _plan(folder / "models", "dequantized", group) for group in (SYMMETRIC, WITH_ZEROS)}
    wanted = Path(plans[RELOADED].model.path)
    plans[RELOADED] = _plan(folder / "others", RELOADED, STORED[RELOADED], negated=True)
    return answered_offline(folder, plans, reloads={RELOADED: wanted})


def _plan(folder: Path, form: Form, group: int, **other: bool) -> Plan:
    model = write_int4(folder / f"{form}-{group}", form, group=group, zero_points=group == WITH_ZEROS, **other)
    # Of these, nothing is asked for: the plan takes our kernel by itself.
    wishes = resolve_wishes((), ("flash-dmoe",)) if form == "dequantized" else {}
    # One is compiled, as by default.
    eager = () if form == "gptq" else ("--enforce-eager",)
    return plan_here("--logprobs-mode", "raw_logits", *eager, model=model, wishes=wishes, dtype="bfloat16")


@pytest.fixture(params=STORED)
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


def test_the_tokens_are_those_of_the_dequantised_weights(engines: dict[str, Offline], form: Form) -> None:
    dense = engines[f"dense {STORED[form]}"]
    assert "flash_dmoe" not in model_holders(dense.proofs)[0].passes
    for want, got in zip(dense.answers, engines[form].answers, strict=True):
        # The reference rounds its activations between the products to BF16, ours keeps them.
        assert_same_up_to_a_tie(want, got, spacings=2)


def test_every_layer_is_read_as_stored_and_runs(engines: dict[str, Offline], form: Form) -> None:
    (holder,) = model_holders(engines[form].proofs)
    entry, group = holder.passes["flash_dmoe"], STORED[form]
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert entry.canary.startswith("passed after a reload" if form == RELOADED else "passed before ready")
    assert [layer.name for layer in entry.layers] == [f"model.layers.{index}.mlp.experts" for index in range(LAYERS)]
    bits = 4 + (16 + (8 if group == WITH_ZEROS else 0)) / group
    for layer in entry.layers:
        assert (layer.weight_format, layer.weight_dtype, layer.why_plain) == ("int4_stored", "uint8", "")
        assert layer.weight_bytes == layer.loaded_bytes == EXPERTS * WEIGHTS * bits / 8
        assert layer.calls > 0
        assert layer.self_check_error is not None


def test_the_table_of_the_launcher_shows_it(engines: dict[str, Offline], form: Form) -> None:
    zeros = "z" if STORED[form] == WITH_ZEROS else ""
    value = f"cpu kernel, int4_g{STORED[form]}{zeros} weights"
    shown = dataclasses.astuple(engines[form].row("flash_dmoe"))[:5]
    assert shown == ("flash_dmoe", value, "yes", f"yes, {LAYERS} layers", "")
