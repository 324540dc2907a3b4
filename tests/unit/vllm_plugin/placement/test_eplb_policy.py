"""Our solver behind vLLM's EPLB interface, on the interface and the policy of the installed vLLM."""

from __future__ import annotations

import importlib
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_optimizer.placement import place_experts, rank_loads
from tests.unit.placement.deepseek import default_policy

torch = pytest.importorskip("torch")


@pytest.fixture
def vllm_policies(monkeypatch):
    """vLLM's `distributed.eplb.policy` package, in a table of the test's own."""
    stock = default_policy()
    interface = importlib.import_module("vllm_eplb_policy.abstract").AbstractEplbPolicy
    return SimpleNamespace(EPLB_POLICIES={"default": stock}, AbstractEplbPolicy=interface)


@pytest.fixture
def noted(monkeypatch):
    """What the policy says to this process's proof."""
    said: dict[str, Any] = {"ran": [], "refused": [], "moved": [], "proof": SimpleNamespace(world_size=0)}
    active = SimpleNamespace(
        proof=said["proof"],
        ran=said["ran"].append,
        rearranged=lambda name, moved: said["moved"].append(moved),
        refused=lambda name, reason: said["refused"].append((name, reason)),
    )
    monkeypatch.setattr("moe_optimizer.vllm_plugin.placement.eplb_policy.current_session", lambda: active)
    return said


@pytest.fixture
def policy(vllm_policies, noted):
    from moe_optimizer.vllm_plugin.placement.eplb_policy import make_policy

    return make_policy(vllm_policies.AbstractEplbPolicy, vllm_policies.EPLB_POLICIES["default"])


def test_it_is_a_whole_policy_of_vllms_interface(policy, vllm_policies):
    assert issubclass(policy, vllm_policies.AbstractEplbPolicy)
    assert not policy.__abstractmethods__
    policy()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_it_answers_as_vllm_asks(policy, noted, dtype):
    load = torch.from_numpy(np.random.default_rng(0).integers(0, 1000, (6, 64))).to(dtype)
    first = policy.rebalance_experts(load, 72, 8, 2, 8, None)
    assert (first.dtype, first.device.type, tuple(first.shape)) == (torch.int64, "cpu", (6, 72))
    second = policy.rebalance_experts(load, 72, 8, 2, 8, first)
    assert torch.equal(first, second), "nothing moves when the load stays"
    assert (noted["ran"], noted["refused"]) == (["expert_placement"] * 2, [])
    assert noted["proof"].world_size == 1, "the process says that it holds a part of the model"


def test_the_answer_is_our_solvers_for_what_vllm_says(policy, vllm_policies):
    # Each of ranks, nodes, groups and the placement before makes it another one; vLLM's own is none of them.
    rng = np.random.default_rng(3)
    load = torch.from_numpy(rng.lognormal(0, 1, (4, 64)))
    before = torch.from_numpy(place_experts(load.numpy() * rng.lognormal(0, 0.1, load.shape), 8, 72, 2, 4))
    wanted = place_experts(load.numpy(), 8, 72, 2, 4, before.numpy())
    others = (
        place_experts(load.numpy(), 8, 72, 1, 1, before.numpy()),
        place_experts(load.numpy(), 8, 72, 2, 4),
        vllm_policies.EPLB_POLICIES["default"].rebalance_experts(load, 72, 4, 2, 8, before).numpy(),
    )
    assert not any((wanted == other).all() for other in others)
    assert (policy.rebalance_experts(load, 72, 4, 2, 8, before).numpy() == wanted).all()


def test_only_what_a_load_moved_counts_as_a_rearrangement(policy, noted):
    in_order = torch.arange(8).repeat(2, 1)
    policy.rebalance_experts(torch.zeros(2, 8), 8, 1, 1, 4, in_order)
    assert (noted["ran"], noted["moved"]) == (["expert_placement"], []), "vLLM's trial before it serves"
    load = torch.tensor([[9.0, 9, 1, 1, 1, 1, 1, 1], [1.0, 1, 1, 1, 1, 1, 1, 1]])
    placement = policy.rebalance_experts(load, 8, 1, 1, 4, in_order)
    assert noted["moved"] == [int((placement != in_order).sum())] != [0]


def test_two_rearrangements_stay_valid_and_as_even_as_the_stock_policy(policy, vllm_policies):
    rng = np.random.default_rng(1)
    placement = policy.rebalance_experts(torch.zeros(4, 64), 80, 1, 1, 16, None)
    stock = vllm_policies.EPLB_POLICIES["default"]
    for _ in range(3):
        load = rng.lognormal(0, 1, (4, 64)).astype(np.float32)
        placement = policy.rebalance_experts(torch.from_numpy(load), 80, 1, 1, 16, placement)
        theirs = stock.rebalance_experts(torch.from_numpy(load), 80, 1, 1, 16, None)
        assert all(set(row) == set(range(64)) for row in placement.tolist())
        ours, limit = (rank_loads(load.astype(float), each.numpy(), 16).max(axis=1) for each in (placement, theirs))
        assert (ours <= limit * (1 + 1e-12)).all()


def test_after_a_change_of_ranks_the_old_placement_is_left_out(policy, noted):
    load = torch.ones(2, 16)
    placement = policy.rebalance_experts(load, 24, 1, 1, 4, torch.arange(16).repeat(2, 1))
    assert tuple(placement.shape) == (2, 24)
    assert not noted["refused"]


def test_what_our_solver_refuses_vllms_policy_answers_and_the_proof_says_so(policy, noted, vllm_policies):
    load = torch.tensor([[1.0, float("nan"), 2.0, 3.0]])
    placement = policy.rebalance_experts(load, 4, 1, 1, 2, None)
    stock = vllm_policies.EPLB_POLICIES["default"].rebalance_experts(load, 4, 1, 1, 2, None)
    assert torch.equal(placement, stock)
    ((name, reason),) = noted["refused"]
    assert name == "expert_placement"
    assert reason.startswith("fallback: InputError: load: ")
    assert not noted["ran"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda policies: policies.EPLB_POLICIES.update(other=object), "default, other, known"),
        (
            lambda policies: policies.EPLB_POLICIES.update(
                default=type("New", (), {"rebalance_experts": classmethod(lambda cls, load: load)})
            ),
            r"\(load\), known is \(weight",
        ),
    ],
)
def test_another_table_or_interface_is_left_alone(register, vllm_policies, change, why):
    change(vllm_policies)
    stock = vllm_policies.EPLB_POLICIES["default"]
    (said,) = register()
    assert re.search(why, said)
    assert vllm_policies.EPLB_POLICIES["default"] is stock


@pytest.fixture
def register(vllm_policies, monkeypatch):
    """Registers our policy in a worker whose vLLM has this configuration; returns what the proof was told."""
    from moe_optimizer.vllm_plugin.placement.eplb_policy import register_policy

    said: list[str] = []
    worker: Any = SimpleNamespace(
        proof=SimpleNamespace(role="worker"),
        applied=lambda name, *, kernel, isa: said.append("applied"),
        refused=lambda name, reason: said.append(reason),
    )

    def run(config=None) -> list[str]:
        fake_config = SimpleNamespace(get_current_vllm_config_or_none=lambda: config)
        monkeypatch.setitem(sys.modules, "vllm.config", fake_config)
        monkeypatch.setitem(sys.modules, "vllm.distributed.eplb", SimpleNamespace(policy=vllm_policies))
        register_policy(worker)
        return said

    return run


def test_a_vllm_without_its_load_balancer_is_said_to_be_one(register, vllm_policies):
    stock = vllm_policies.EPLB_POLICIES["default"]
    config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=False))
    (said,) = register(config)
    assert "--enable-eplb" in said
    assert vllm_policies.EPLB_POLICIES["default"] is stock


def test_it_takes_the_place_of_vllms_default_once(register, vllm_policies):
    said = register()
    ours = vllm_policies.EPLB_POLICIES["default"]
    assert issubclass(ours, vllm_policies.AbstractEplbPolicy)
    register()
    assert list(vllm_policies.EPLB_POLICIES.values()) == [ours]
    assert said == ["applied"]
