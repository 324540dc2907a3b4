"""Checkpoints of GPTQ, AWQ and compressed-tensors on a GPU: their integers by our CUDA kernels, in graphs, beside the
same weights in BF16 by vLLM's own kernel.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.plan import Plan
from tests.gpu.at_once import Seen, asked_at_once
from tests.gpu.plans import gpu_plan
from tests.int4_checkpoint import Form, write_int4
from tests.vllm.answers import assert_same_up_to_a_tie

pytestmark = pytest.mark.gpu

GROUP, EXPERTS, LAYERS, WEIGHTS = 64, 16, 4, 3 * 128 * 128
ARGUMENTS = ("--no-enable-prefix-caching", "--logprobs-mode", "raw_logits")
CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16")
# vLLM reads no other GPTQ than the symmetric kind.
ZERO_POINTS: dict[Form, bool] = {"gptq": False, "awq": True, "compressed-tensors": True}
Key = tuple[Form, bool]
"""How a server's checkpoint stores its experts, and whether they have zero points."""


@pytest.fixture(scope="module")
def servers(hopper: None, tmp_path_factory: pytest.TempPathFactory) -> dict[Key, Seen]:
    """Ask a server of each form, and one of each kind of weights in BF16."""
    folder = tmp_path_factory.mktemp("int4")
    keys: list[Key] = [*ZERO_POINTS.items(), ("dequantized", False), ("dequantized", True)]
    return asked_at_once({key: plan_of(folder, *key) for key in keys}, folder)


def plan_of(folder: Path, form: Form, zero_points: bool) -> Plan:
    """Return the plan of one server; vLLM's own kernel needs no graphs to say what the weights give."""
    ours = form != "dequantized"
    return gpu_plan(
        *ARGUMENTS, *(CAPTURE if ours else ("--enforce-eager",)),
        model=write_int4(folder / f"{form}-{zero_points}", form, group=GROUP, zero_points=zero_points),
        wishes={"flash_dmoe": (Wish.ON if ours else Wish.OFF, "test")},
        required=frozenset({"flash_dmoe"} if ours else ()), max_model_len=520, batch_size=16,
    )  # fmt: skip


@pytest.mark.parametrize("form", ZERO_POINTS)
def test_our_kernels_read_the_integers_of_the_checkpoint(form: Form, servers: dict[Key, Seen]) -> None:
    zero_points = ZERO_POINTS[form]
    wanted, got = servers["dequantized", zero_points], servers[form, zero_points]
    for want, answer in zip(wanted.answered(), got.answered(), strict=True):
        assert_same_up_to_a_tie(want, answer, spacings=2)
    entry = next(each.passes["flash_dmoe"] for each in got.proofs if each.passes["flash_dmoe"].layers)
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert entry.canary.startswith("passed")
    assert len(entry.layers) == LAYERS
    for layer in entry.layers:
        assert (layer.weight_format, layer.weight_dtype) == ("int4_stored", "uint8")
        assert layer.weight_bytes == EXPERTS * WEIGHTS * (4 + (24 if zero_points else 16) / GROUP) / 8
        # A prompt of the test has more than 64 tokens together with the others.
        assert set(layer.calls_by_kernel) == {"direct", "grouped-int4_weights"}
        assert layer.self_check_error is not None
