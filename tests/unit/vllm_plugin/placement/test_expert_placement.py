"""A layer gets its expert map on all ranks or on none, and only where weights follow the map.

Modules of vLLM and layers are stand-ins; what other ranks answer is put in the place of `all_ranks_can`.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.plan.pass_params import ExpertPlacementParams
from tests.builders import cpu_machine, made_plan, tiny_moe

torch = pytest.importorskip("torch")

from moe_optimizer.vllm_plugin.placement import expert_placement  # noqa: E402 - needs torch
from moe_optimizer.vllm_plugin.placement.expert_placement import passes_of_placed, place_layer  # noqa: E402

# Rank 0 has experts 1 and 3, rank 1 has 0 and 2; the plan may name them in any order within a rank.
PARAMS = ExpertPlacementParams(mode="initial", num_ranks=2, num_experts=4, experts={3: "3 1 0 2"}, digest="d1")
DECISION = made_plan(tiny_moe(), cpu_machine()).decision("expert_placement")


class OurExperts:
    """Stands in for our experts class, which needs vLLM."""


class FakeLayer:
    """What the code touches of vLLM's RoutedExperts: experts in order, two for each rank."""

    def __init__(self, rank: int, name: str = "model.layers.3.mlp.experts") -> None:
        self.layer_name = name
        self.expert_map_manager = SimpleNamespace(
            _expert_map=torch.tensor([0, 1, -1, -1] if rank == 0 else [-1, -1, 0, 1], dtype=torch.int32),
            ep_rank=rank,
            local_num_experts=2,
            placement_strategy="linear",
            num_fused_shared_experts=0,
            expert_mask=None,
        )
        parallel = SimpleNamespace(ep_size=2, use_all2all_kernels=False, enable_eplb=False)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel)
        manager = self.expert_map_manager
        manager.expert_map = manager._expert_map
        manager.map_global_to_local = lambda expert: int(manager._expert_map[expert])
        self.global_num_experts = 4
        self.quant_method = SimpleNamespace(process_weights_after_loading=lambda layer: None, experts_cls=OurExperts)
        self.update_expert_map_info()

    def update_expert_map_info(self) -> None:
        self.expert_map = self.expert_map_manager._expert_map

    def load(self, experts: range | list[int]) -> dict[int, int]:
        """Load experts as vLLM does: slot -> expert."""
        slots = {self.expert_map_manager.map_global_to_local(expert): expert for expert in experts}
        return {slot: expert for slot, expert in slots.items() if slot >= 0}


class FakeSession:
    def __init__(self, params: ExpertPlacementParams = PARAMS) -> None:
        self.params = params
        self.said: list[str] = []
        entry = SimpleNamespace(digest="", layers=())
        self.proof = SimpleNamespace(passes={"expert_placement": entry})

    def wanted(self, name: str) -> Any:
        return dataclasses.replace(DECISION, params=self.params)

    def applied(self, name: str, *, kernel: str, isa: str) -> None:
        self.said.append("applied")

    def ask_of_layers(self, passes_of: Any) -> None:
        pass

    def ran(self, name: str) -> None:
        self.said.append("ran")

    def refused(self, name: str, reason: str) -> None:
        self.said.append(reason)


@pytest.fixture(autouse=True)
def config(monkeypatch):
    """vLLM's configuration, in modules that stand in for its own; the other ranks agree."""
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"), parallel_config=SimpleNamespace())
    base = "moe_optimizer.vllm_plugin.experts.base"
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(get_current_vllm_config=lambda: config))
    monkeypatch.setitem(sys.modules, base, SimpleNamespace(MoeOptimizerExperts=OurExperts))
    monkeypatch.setattr(expert_placement, "all_ranks_can", lambda this_one: this_one)
    return config


def place(session: Any, layer: Any) -> None:
    """Stand-ins have what the code touches."""
    place_layer(session, layer)


@pytest.mark.parametrize(("rank", "mine"), [(0, [1, 3]), (1, [0, 2])])
def test_weights_are_loaded_into_the_slots_that_the_map_names(rank, mine):
    layer, session = FakeLayer(rank), FakeSession()
    place(session, layer)
    assert session.said == ["applied"]
    assert session.proof.passes["expert_placement"].digest == "d1"
    loaded = layer.load(range(4))
    assert loaded == dict(enumerate(mine)), "in ascending order: some of vLLM's loaders rely on it"
    assert {int(slot): expert for expert, slot in enumerate(layer.expert_map) if slot >= 0} == loaded
    assert passes_of_placed(layer) == ("expert_placement",)


def test_every_expert_lives_on_exactly_one_rank():
    layers = [FakeLayer(0), FakeLayer(1)]
    for layer in layers:
        place(FakeSession(), layer)
    held = [layer.expert_map >= 0 for layer in layers]
    assert torch.equal(held[0], ~held[1])


@pytest.mark.parametrize("this_rank_can", [True, False])
def test_no_rank_is_placed_unless_all_can(monkeypatch, this_rank_can):
    monkeypatch.setattr(expert_placement, "all_ranks_can", lambda this_one: False)
    layer, session = FakeLayer(0), FakeSession()
    layer.moe_config.moe_parallel_config.use_all2all_kernels = not this_rank_can
    place(session, layer)
    assert layer.expert_map.tolist() == [0, 1, -1, -1]
    assert passes_of_placed(layer) == ()
    (said,) = session.said
    assert ("another rank" if this_rank_can else "sent to ranks") in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda layer: setattr(layer.quant_method, "experts_cls", object), "object computes"),
        (lambda layer: setattr(layer.moe_config.moe_parallel_config, "ep_size", 4), "on 4 ranks"),
        (lambda layer: setattr(layer, "global_num_experts", 8), "8 experts"),
        (lambda layer: setattr(layer.moe_config.moe_parallel_config, "enable_eplb", True), "EPLB"),
        (lambda layer: setattr(layer.expert_map_manager, "placement_strategy", "round_robin"), "round_robin"),
        (lambda layer: setattr(layer.expert_map_manager, "num_fused_shared_experts", 1), "another kind"),
    ],
    ids=["kernel", "ranks", "experts", "EPLB", "strategy", "shared experts"],
)
def test_a_layer_whose_experts_would_not_follow_the_map_is_refused(change, said):
    layer, session = FakeLayer(0), FakeSession()
    change(layer)
    place(session, layer)
    assert said in session.said[0]
    assert layer.expert_map.tolist() == [0, 1, -1, -1]


def test_a_loader_that_leaves_out_weights_by_expert_number_is_refused(config):
    config.parallel_config.enable_ep_weight_filter = True
    session = FakeSession()
    place(session, FakeLayer(0))
    assert "--enable-ep-weight-filter" in session.said[0]


def test_an_exception_is_a_no_that_the_other_ranks_hear(monkeypatch):
    answers = []
    monkeypatch.setattr(expert_placement, "all_ranks_can", lambda this_one: answers.append(this_one) or False)
    session = FakeSession(dataclasses.replace(PARAMS, experts={3: "0 1 2 2"}))
    place(session, FakeLayer(0))
    assert answers == [False]
    assert "fallback: AssertionError" in session.said[0]


def test_ranks_that_cannot_agree_leave_the_layer_alone(monkeypatch):
    def broken(this_one: bool) -> bool:
        raise RuntimeError("no group")

    monkeypatch.setattr(expert_placement, "all_ranks_can", broken)
    layer, session = FakeLayer(0), FakeSession()
    place(session, layer)
    assert layer.expert_map.tolist() == [0, 1, -1, -1]
    assert "RuntimeError: no group" in session.said[0]


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (PARAMS, "model.layers.4.mlp.experts"),
        (PARAMS, "draft.experts"),
        (ExpertPlacementParams(mode="eplb"), "model.layers.3.mlp.experts"),
    ],
)
def test_layers_that_are_not_in_the_plan_stay_as_they_are(monkeypatch, params, name):
    # The other ranks may have a plan with the layer: they must hear a no, not wait.
    answers = []
    monkeypatch.setattr(expert_placement, "all_ranks_can", lambda this_one: answers.append(this_one) or False)
    layer, session = FakeLayer(1, name), FakeSession(params)
    place(session, layer)
    assert layer.expert_map.tolist() == [-1, -1, 0, 1]
    assert (session.said, answers) == ([], [False])


def test_without_expert_parallelism_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(expert_placement, "all_ranks_can", lambda this_one: pytest.fail("asked"))
    layer = FakeLayer(0)
    layer.expert_map_manager.expert_map = None
    place(FakeSession(), layer)


def test_weights_that_were_loaded_without_the_map_stop_the_server():
    layer = FakeLayer(0)
    place(FakeSession(), layer)
    layer.load([0, 1])
    with pytest.raises(RequiredNotAppliedError, match="1 of 2 experts"):
        passes_of_placed(layer)


def test_what_was_loaded_is_checked_when_vllm_is_done_with_the_layer():
    layer, session = FakeLayer(0), FakeSession()
    place(session, layer)
    with pytest.raises(RequiredNotAppliedError, match="2 of 2 experts"):
        layer.quant_method.process_weights_after_loading(layer)
    layer.load(range(4))
    layer.quant_method.process_weights_after_loading(layer)
    assert session.said == ["applied", "ran"]


def test_a_layer_whose_calls_are_counted_has_not_run_before_its_first_call():
    layer, session = FakeLayer(0), FakeSession()
    place(session, layer)
    layer.load(range(4))
    session.proof.passes["expert_placement"].layers = (SimpleNamespace(name=layer.layer_name),)
    layer.quant_method.process_weights_after_loading(layer)
    assert session.said == ["applied"]


def test_dummy_weights_need_no_loading(config):
    config.load_config.load_format = "dummy"
    layer = FakeLayer(0)
    place(FakeSession(), layer)
    assert passes_of_placed(layer) == ("expert_placement",)


def test_a_map_that_was_replaced_after_loading_stops_the_server():
    layer = FakeLayer(0)
    place(FakeSession(), layer)
    layer.load(range(4))
    layer.expert_map = torch.tensor([0, 1, -1, -1])
    with pytest.raises(RequiredNotAppliedError, match="was replaced"):
        passes_of_placed(layer)
