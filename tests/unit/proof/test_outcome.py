"""What a run comes to: one row for a pass over all servers, and what is missing."""

from __future__ import annotations

import dataclasses

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.proof.outcome import judge
from moe_optimizer.proof.record import PassProof, Proof
from moe_optimizer.proof.verdict import NO_WORKER, Observed
from tests.builders import OURS, cpu_machine, made_plan, tiny_moe

PASS = "flash_dmoe"
PLAN = made_plan(tiny_moe(), cpu_machine(), wishes=OURS)
RAN = Proof(
    role="worker", rank=0, pid=1, plan_digest=PLAN.digest, versions={}, world_size=1, model_rank=0,
    passes={PASS: PassProof(requested="x", applied=True, ran=True, kernel="k", isa="avx2")},
)  # fmt: skip
REFUSED = dataclasses.replace(RAN, passes={PASS: PassProof(requested="x", why_not="cheese")})


def test_a_required_pass_that_runs_on_every_server_is_not_missing() -> None:
    outcome = judge(PLAN, {"a": [RAN], "b": [RAN]}, [PASS], absent=NO_WORKER, observed={})
    outcome.require(hint="the log")
    assert (outcome.missing, outcome.kernels) == ((), ("k, avx2",))


def test_the_server_on_which_a_required_pass_is_missing_is_named() -> None:
    outcome = judge(PLAN, {"a": [RAN], "b": [REFUSED]}, [PASS], absent=NO_WORKER, observed={})
    assert outcome.missing == (f"b: {PASS}: cheese",)
    with pytest.raises(RequiredNotAppliedError, match=f"b: {PASS}: cheese") as caught:
        outcome.require(hint="the log")
    assert caught.value.hint == "the log"


def test_only_a_worker_that_timed_a_pass_no_faster_may_leave_it() -> None:
    slower = PassProof(requested="x", why_not="2 us for 1", timed_no_faster=True)
    first, second = (dataclasses.replace(RAN, rank=rank, pid=rank, model_rank=rank, world_size=2) for rank in (0, 1))

    def missing(other: PassProof) -> tuple[str, ...]:
        workers = [first, dataclasses.replace(second, passes={PASS: other})]
        return judge(PLAN, {"server": workers}, [PASS], absent=NO_WORKER, observed={}, unless_no_faster=[PASS]).missing

    assert missing(slower) == ()
    assert missing(PassProof(requested="x", why_not="cheese")) == (f"{PASS}: cheese",)
    assert missing(PassProof(requested="x", applied=True)) != ()
    assert judge(
        PLAN, {"server": [dataclasses.replace(RAN, passes={PASS: slower})]}, [PASS], absent=NO_WORKER, observed={}
    ).missing == (f"{PASS}: 2 us for 1",)


def test_what_the_launcher_saw_not_happen_is_missing_although_workers_are_set_up_for_it() -> None:
    seen = {PASS: Observed(ran="no", why_not="no cheese came")}
    outcome = judge(PLAN, {"server": [RAN]}, [PASS], absent=NO_WORKER, observed=seen)
    assert outcome.missing == (f"{PASS}: no cheese came",)
    (row,) = [row for row in outcome.rows if row.pass_name == PASS]
    assert (row.ran, row.why_not) == ("no", "no cheese came")


def test_what_the_launcher_saw_stands_beside_what_workers_show() -> None:
    seen = {PASS: Observed(ran="yes, 7 cheeses")}
    outcome = judge(PLAN, {"server": [RAN]}, [PASS], absent=NO_WORKER, observed=seen)
    assert outcome.missing == ()
    (row,) = [row for row in outcome.rows if row.pass_name == PASS]
    assert (row.ran, row.why_not) == ("yes, 7 cheeses", "")


def test_the_only_server_needs_no_name_and_passes_are_in_order_of_their_names() -> None:
    outcome = judge(PLAN, {"server": [REFUSED]}, ["sparsity_24", PASS], absent=NO_WORKER, observed={})
    assert [line.partition(":")[0] for line in outcome.missing] == [PASS, "sparsity_24"]


def test_a_name_that_the_plan_does_not_have_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="flash_demo"):
        judge(PLAN, {"server": [RAN]}, ["flash_demo"], absent=NO_WORKER, observed={})


def test_the_text_has_the_table_and_each_kernel_between_empty_lines() -> None:
    lines = judge(PLAN, {"server": [RAN]}, [], absent=NO_WORKER, observed={}).lines(width=80)
    assert (lines[0], lines[-2], lines[-1]) == ("", "kernel: k, avx2", "")
    assert lines[1].startswith("pass")
