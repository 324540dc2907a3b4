"""The table requested / applied / ran / why not, and what counts as running."""

from __future__ import annotations

import dataclasses
import re

import pytest

from moe_optimizer.plan.decision import Status, Wish
from moe_optimizer.plan.pass_params import Fp8Params
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import LayerProof, PassProof, Proof
from moe_optimizer.proof.table import Row, proof_rows, render_table
from moe_optimizer.proof.verdict import NO_WORKER, kernels_in_use, layers_left, not_running
from tests.builders import OURS, cpu_machine, dense_model, gpus, made_plan, profile_with, tiny_moe

PASS = "flash_dmoe"
PLAN = made_plan(tiny_moe(), cpu_machine(), wishes=OURS)


FP8_LAYER = LayerProof(
    name="", num_local_experts=8, hidden_size=4096, intermediate_size=1024, dtype="bfloat16", expert_map=False, calls=1
)


@pytest.fixture
def plan() -> Plan:
    return PLAN


def worker(rank: int, world: int = 2, *, applied: bool = True, ran: bool = True, why_not: str = "") -> Proof:
    layer = LayerProof(
        name="0", num_local_experts=8, hidden_size=4, intermediate_size=2, dtype="float32", expert_map=False, calls=3
    )
    entry = PassProof(requested="x", applied=applied, ran=ran, why_not=why_not, kernel="k", isa="avx2", layers=(layer,))
    return Proof(
        role="worker",
        rank=rank,
        pid=rank + 1,
        plan_digest=PLAN.digest,
        versions={},
        world_size=world,
        model_rank=rank,
        passes={PASS: entry},
    )


def frontend(why_not: str = "") -> Proof:
    entry = PassProof(requested="x", why_not=why_not)
    return Proof(role="frontend", rank=0, pid=9, plan_digest=PLAN.digest, versions={}, passes={PASS: entry})


def test_it_runs_when_every_worker_ran_it(plan: Plan) -> None:
    assert not_running(plan, [frontend(), worker(0), worker(1)], [PASS]) == {}


def test_every_copy_of_a_model_without_experts_is_an_engine_whose_workers_must_report() -> None:
    profile = profile_with(passes={"parallelism": {"data_parallel_size": 2}})
    plan = made_plan(dense_model(), gpus("h200", 2), profile)
    entry = PassProof(requested="DP=2", applied=True, ran=True)
    copy = dataclasses.replace(worker(0, 1), plan_digest=plan.digest, passes={"parallelism": entry})
    assert "1 of 2" in not_running(plan, [copy], ["parallelism"])["parallelism"]
    assert not_running(plan, [copy, dataclasses.replace(copy, pid=2)], ["parallelism"]) == {}


@pytest.mark.parametrize(
    ("proofs", "reason"),
    [
        ([], NO_WORKER),
        ([frontend()], "did not ask"),
        ([frontend("needs vLLM >= 0.26, found 0.20")], "needs vLLM >= 0.26"),
        ([worker(0)], "1 of 2 workers reported"),
        ([worker(0), worker(1, ran=False)], "no forward pass"),
        ([worker(0), worker(1, applied=False, ran=False, why_not="fallback: boom")], "fallback: boom"),
        ([worker(0), worker(1, why_not="GELU experts")], "GELU experts"),
    ],
)
def test_it_does_not_run_otherwise_and_says_why(plan: Plan, proofs: list[Proof], reason: str) -> None:
    assert reason in not_running(plan, proofs, [PASS])[PASS]


def test_a_worker_that_followed_another_plan_proves_nothing(plan: Plan) -> None:
    stranger = worker(1)
    stranger.plan_digest = "0123456789abcdef"
    reason = not_running(plan, [worker(0), stranger], [PASS])[PASS]
    assert all(word in reason for word in ("worker 1", "0123456789abcdef", plan.digest))


def test_a_pass_that_the_plan_has_off_is_not_running(plan: Plan) -> None:
    assert "off" in not_running(plan, [worker(0, 1)], ["sparsity_24"])["sparsity_24"]


def test_the_row_says_in_how_many_layers_one_launch_chose_the_experts_and_why_not_in_others(plan: Plan) -> None:
    proof = worker(0, 1)
    (layer,) = proof.passes[PASS].layers
    ours, left = dataclasses.replace(layer, router="gate_topk up to 32", router_calls=2), "vLLM: the gate has a bias"

    def ran(*layers: LayerProof) -> str:
        proof.passes[PASS].layers = layers
        return next(row.ran for row in proof_rows(plan, [proof]) if row.pass_name == PASS)

    assert ran(layer, layer) == "yes, 2 layers"
    assert ran(ours, ours) == "yes, 2 layers, gate_topk in 2"
    assert ran(ours, dataclasses.replace(layer, router=left)) == f"yes, 2 layers, gate_topk in 1 ({left})"


def with_scheduler(rank: int, *, ran: bool, why_not: str = "") -> Proof:
    proof = worker(rank)
    proof.passes["scheduler"] = PassProof(requested="x", applied=ran, ran=ran, why_not=why_not)
    return proof


def test_a_pass_that_flags_carry_out_runs_where_every_worker_shows_it(plan: Plan) -> None:
    proofs = [with_scheduler(rank, ran=True) for rank in (0, 1)]
    assert not_running(plan, proofs, ["scheduler"]) == {}
    (row,) = [row for row in proof_rows(plan, proofs) if row.pass_name == "scheduler"]
    assert (row.applied, row.ran, row.why_not) == ("by flags", "yes, 2 workers", "")


@pytest.mark.parametrize(
    ("proofs", "reason"),
    [
        ([], NO_WORKER),
        ([worker(0), worker(1)], "no worker shows"),
        ([frontend()], "no worker shows"),
        ([with_scheduler(0, ran=True)], "1 of 2 workers reported"),
        ([with_scheduler(0, ran=True), with_scheduler(1, ran=False, why_not="runs with 8")], "runs with 8"),
    ],
)
def test_flags_that_no_worker_shows_or_that_vllm_changed_do_not_run(
    plan: Plan, proofs: list[Proof], reason: str
) -> None:
    missing = not_running(plan, proofs, ["scheduler"])
    assert list(missing) == ["scheduler"]
    assert missing["scheduler"].startswith(reason)


def test_nothing_is_said_of_flags_where_nobody_could_look_at_them(plan: Plan) -> None:
    (row,) = [row for row in proof_rows(plan, []) if row.pass_name == "scheduler"]
    assert (row.applied, row.ran) == ("by flags", "-")


def test_there_is_a_row_for_every_decision(plan: Plan) -> None:
    rows = proof_rows(plan, [worker(0), worker(1)])
    assert [row.pass_name for row in rows] == [decision.pass_name for decision in plan.decisions]


def test_the_row_counts_workers(plan: Plan) -> None:
    (row,) = [row for row in proof_rows(plan, [worker(0), worker(1, ran=False)]) if row.pass_name == PASS]
    assert row.applied == "yes, 2 workers"
    assert row.ran.startswith("1 of 2 workers")


FP8_PLAN = made_plan(tiny_moe(), cpu_machine(), wishes={"fp8": (Wish.ON, "test")})


def with_fp8(**why_plain: str) -> Proof:
    """A worker under a plan with FP8: which of its layers stayed as they are, and why."""
    size = 2 * FP8_LAYER.num_weights
    kept = tuple(
        dataclasses.replace(FP8_LAYER, name=name, why_plain=why, weight_bytes=size)
        for name, why in why_plain.items()
        if why
    )
    converted = tuple(dataclasses.replace(FP8_LAYER, name=name) for name, why in why_plain.items() if not why)
    both = PassProof(requested="x", applied=True, ran=True, kernel="k", layers=converted + kept)
    fp8 = PassProof(requested="x", applied=True, ran=bool(converted), kernel="k", layers=converted)
    passes = dict.fromkeys(("flash_dmoe", "expert_load"), both) | {"fp8": fp8}
    return dataclasses.replace(worker(0, 1), plan_digest=FP8_PLAN.digest, passes=passes)


def test_layers_that_were_not_converted_are_named_with_the_reason() -> None:
    rows = {row.pass_name: row for row in proof_rows(FP8_PLAN, [with_fp8(a="", b="kept", c="too large")])}
    assert rows["fp8"].ran == "yes, 1 layers"
    assert rows["fp8"].why_not.startswith("b ")
    assert rows["fp8"].why_not.partition("; ")[0].endswith(": kept")
    assert "; 1 more too;" in rows["fp8"].why_not
    assert rows["flash_dmoe"].why_not == ""
    assert not_running(FP8_PLAN, [with_fp8(a="", b="kept")], ["fp8"]) == {}


def test_a_conversion_of_no_layer_did_not_run() -> None:
    missing = not_running(FP8_PLAN, [with_fp8(a="too large")], ["fp8"])
    assert re.match("no layer.*: too large", missing["fp8"])


@pytest.mark.parametrize(
    ("why_plain", "more"),
    [
        ({"model.layers.0.mlp": "too large", "model.layers.2.mlp": "too large"}, "201 MB"),
        ({"model.layers.0.mlp": "too large", "model.layers.1.mlp": "kept"}, "101 MB"),
    ],
    ids=["found while loading", "one planned"],
)
def test_layers_left_against_the_plan_are_shown_with_the_memory_it_does_not_count(
    why_plain: dict[str, str], more: str
) -> None:
    decision = FP8_PLAN.decision("fp8")
    params = dataclasses.replace(decision.params_as(Fp8Params), excluded_layers=(1,))
    planned = dataclasses.replace(decision, params=params)
    assert f"; {more} more than" in layers_left(planned, [with_fp8(**why_plain)])


def test_layers_that_the_plan_keeps_are_in_its_memory() -> None:
    decision = FP8_PLAN.decision("fp8")
    params = dataclasses.replace(decision.params_as(Fp8Params), excluded_layers=(1,))
    planned = dataclasses.replace(decision, params=params)
    kept = layers_left(planned, [with_fp8(**{"model.layers.1.mlp": "kept"})])
    assert kept.startswith("model.layers.1.mlp ")
    assert kept.endswith(": kept"), "no memory beyond the plan's"


def test_the_kernel_in_use_is_named_once(plan: Plan) -> None:
    assert kernels_in_use([frontend(), worker(0), worker(1)]) == ("k, avx2, float32",)


def test_a_kernel_that_reads_converted_weights_is_named_once_with_their_format() -> None:
    plain = worker(0, 1).passes[PASS]
    converted = dataclasses.replace(plain.layers[0], weight_format="fp8", weight_dtype="float8_e4m3fn")
    passes = {
        PASS: dataclasses.replace(plain, layers=(converted, *plain.layers)),
        "fp8": dataclasses.replace(plain, layers=(converted,)),
    }
    in_use = kernels_in_use([dataclasses.replace(worker(0, 1), passes=passes)])
    assert in_use == ("k, avx2, float32, float32 with fp8 weights",)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_the_terminal(plan: Plan, width: int) -> None:
    why = "a reason that is long enough to be wrapped over several lines of the last column \x1b[31m"
    text = render_table(proof_rows(plan, [worker(0, 1, ran=False, why_not=why)]), width=width)
    assert max(map(len, text.splitlines())) <= max(width, 70)
    assert "\x1b" not in text
    assert "off: " in text


def test_a_pass_that_is_off_has_a_line_with_the_reason(plan: Plan) -> None:
    why = "measured 2.6x faster"
    row = Row(pass_name="flash_dmoe", requested="off", applied="-", ran="-", why_not=why)
    long = dataclasses.replace(row, pass_name="fp8", why_not="a reason of many words " * 9)
    *_, first, second = render_table([row, long], width=80).splitlines()
    assert first == f"flash_dmoe off: {why}"
    assert second.startswith("fp8 off: ")
    assert len(second) <= 80


def test_a_pass_that_is_on_has_a_line_with_the_reason_too(plan: Plan) -> None:
    lines = render_table(proof_rows(plan, [worker(0), worker(1)]), width=400).splitlines()
    said = {decision.pass_name: decision for decision in plan.decisions}
    shown = {line.partition(": ")[0]: line.partition(": ")[2] for line in lines if " on: " in line or " off: " in line}
    for name, decision in said.items():
        if decision.status in (Status.ON, Status.OFF):
            assert shown[f"{name} {decision.status.value}"] == decision.reason


@pytest.mark.parametrize("why", ["", "a reason of several words"])
def test_the_longest_words_of_every_column_fit_eighty_columns(why: str) -> None:
    row = Row(
        pass_name="dual_batch_overlap",
        requested="prefill + decode, SharedFolderConnector",
        applied="by servers",
        ran="yes, 128 tokens received",
        why_not=why,
    )
    lines = render_table([row], width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert "dual_batch_overlap" in lines[2]


def test_the_canarys_outcome_is_below_the_table_once_for_all_workers() -> None:
    proofs = [worker(0), worker(1)]
    for proof in proofs:
        proof.passes[PASS].canary = "passed before ready: 2 layers, 1 to 64 tokens, worst error 0.31 of the allowed"
    rows = proof_rows(PLAN, proofs)
    (row,) = [row for row in rows if row.pass_name == PASS]
    assert row.canary == f"{proofs[0].passes[PASS].canary}; 1 more workers passed"
    text = render_table(rows, width=80)
    assert text.count(f"canary of {PASS}: passed ") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_a_canary_that_failed_on_one_worker_is_what_is_shown() -> None:
    proofs = [worker(0), worker(1)]
    proofs[0].passes[PASS].canary, proofs[1].passes[PASS].canary = "passed before ready", "failed before ready"
    (row,) = [row for row in proof_rows(PLAN, proofs) if row.pass_name == PASS]
    assert row.canary == "failed before ready"
