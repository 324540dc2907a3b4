"""Counting in a worker: which routers are given a counter, what a step does, what is written and shown."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.inspection.expert_load import read_expert_load, read_run_load
from moe_optimizer.plan.decision import Applier, Status, Wish
from moe_optimizer.plan.plan import Plan
from moe_optimizer.specs.expert_load import LOAD_FILE, ExpertLoad
from moe_optimizer.vllm_plugin.expert_load import capture as expert_load
from moe_optimizer.vllm_plugin.expert_load import writer as expert_load_writer
from moe_optimizer.vllm_plugin.expert_load.capture import LOAD_PASS, current_counting, start_counting
from moe_optimizer.vllm_plugin.expert_load.writer import part_path
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker import model_loaded
from moe_optimizer.vllm_plugin.worker.execute_model import WORKER_EXECUTE_MODEL
from moe_optimizer.vllm_plugin.worker.model_loaded import WORKER_MODEL_LOADED
from tests.builders import cpu_machine, made_plan, tiny_moe
from tests.eventually import eventually

EXPERTS = 4
IDS = torch.tensor([[0, 1], [1, 3], [2, 2]])


class Router:
    """As vLLM's: calls what it was given with the ids it chose."""

    def __init__(self) -> None:
        self.capture_fn: Callable[[torch.Tensor], None] | None = None

    def set_capture_fn(self, capture_fn: Callable[[torch.Tensor], None]) -> None:
        self.capture_fn = capture_fn

    def route(self, ids: torch.Tensor) -> None:
        if self.capture_fn is not None:
            self.capture_fn(ids)


class Layer(torch.nn.Module):
    """As vLLM's MoE runner, as far as counting looks at it."""

    def __init__(self, layer_id: int, *, is_monolithic: bool = False) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.layer_name = f"model.layers.{layer_id}.mlp.experts"
        self.router = Router()
        self.is_monolithic = is_monolithic


def worker_of(*layers: Layer, tensor_parallel_size: int = 1, **parallel: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), *layers)
    parallel_config = SimpleNamespace(
        **{
            "tensor_parallel_size": tensor_parallel_size,
            "data_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "use_ubatching": False,
        }
        | parallel
    )
    model_config = SimpleNamespace(
        get_num_experts=lambda: EXPERTS, enable_return_routed_experts=False, served_model_name="chat"
    )
    return SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        vllm_config=SimpleNamespace(
            model_config=model_config,
            parallel_config=parallel_config,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
        ),
        parallel_config=parallel_config,
        device=torch.device("cpu"),
    )


def plan(*, on: bool = True, required: bool = False) -> Plan:
    made = made_plan(tiny_moe(), cpu_machine())
    changed = [
        dataclasses.replace(
            decision,
            status=Status.ON if on else Status.OFF,
            wish=Wish.AUTO,
            applier=Applier.PLUGIN if on else Applier.NONE,
            required=required,
        )
        if decision.pass_name == LOAD_PASS
        else decision
        for decision in made.decisions
    ]
    return made.replace(decisions=tuple(changed))


def offered_by_vllm(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Have vLLM's module of that name, or what stands in for it, offer these functions; before 0.28 none."""
    capturer = SimpleNamespace(**functions)
    monkeypatch.setitem(
        sys.modules,
        "vllm.model_executor.layers.fused_moe",
        SimpleNamespace(routed_experts_capturer=capturer),  # all that is read
    )


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_load, "_counting", None)
    offered_by_vllm(monkeypatch)
    monkeypatch.setattr(expert_load_writer, "INTERVAL_S", 0.01)
    monkeypatch.setattr(expert_load_writer, "UNSEEN_INTERVAL_S", 0.01)


@pytest.fixture
def session(tmp_path: Path) -> PluginSession:
    return PluginSession(run_dir=tmp_path, plan=plan())


def step(num_tokens: int) -> Any:
    return SimpleNamespace(total_num_scheduled_tokens=num_tokens)


def written(run_dir: Path, steps: int) -> ExpertLoad | None:
    path = run_dir / LOAD_FILE
    load = read_expert_load(path) if path.exists() else None
    return load if load is not None and load.steps == steps else None


def test_tokens_of_a_step_are_counted_and_written(session: PluginSession, tmp_path: Path) -> None:
    layers = Layer(1), Layer(4)
    start_counting(session, worker_of(*layers))
    counting = current_counting()
    assert counting is not None
    with counting.step(step(2)):
        layers[0].router.route(IDS)
        layers[1].router.route(IDS.flip(0))
    load = eventually(lambda: written(tmp_path, steps=1))
    assert [(layer.index, layer.name, layer.tokens) for layer in load.layers] == [
        (1, "model.layers.1.mlp.experts", (1, 2, 0, 1)),
        (4, "model.layers.4.mlp.experts", (0, 1, 2, 1)),
    ]
    assert (load.model, load.num_experts) == ("tiny-moe", EXPERTS)
    assert read_run_load(tmp_path) == load
    entry = session.proof.passes[LOAD_PASS]
    assert (entry.applied, eventually(lambda: entry.ran), entry.why_not) == (True, True, "")


def test_what_runs_before_the_first_step_is_not_counted_but_proves_that_it_would_be(
    session: PluginSession, tmp_path: Path
) -> None:
    layer = Layer(0)
    start_counting(session, worker_of(layer))
    layer.router.route(IDS)
    eventually(lambda: session.proof.passes[LOAD_PASS].ran)
    assert not (tmp_path / LOAD_FILE).exists()
    counting = current_counting()
    assert counting is not None
    with counting.step(step(0)):
        layer.router.route(IDS)
    with counting.step(step(3)):
        layer.router.route(IDS)
    assert eventually(lambda: written(tmp_path, steps=1)).layers[0].tokens == (1, 2, 2, 1)


def test_steps_of_as_many_tokens_and_of_others_are_all_counted(session: PluginSession, tmp_path: Path) -> None:
    layer = Layer(0)
    start_counting(session, worker_of(layer))
    counting = current_counting()
    assert counting is not None
    for num_tokens in (3, 3, 1, 0, 3):
        with counting.step(step(num_tokens)):
            layer.router.route(IDS)
    whole, first = (1, 2, 2, 1), tuple(IDS[0].tolist().count(expert) for expert in range(EXPERTS))
    want = tuple(3 * all_of + one for all_of, one in zip(whole, first, strict=True))
    assert eventually(lambda: written(tmp_path, steps=4)).layers[0].tokens == want


@pytest.mark.parametrize(("rank", "writes"), [(0, True), (1, False), (2, True), (3, False)])
def test_one_rank_of_a_tensor_parallel_group_writes(
    rank: int, writes: bool, session: PluginSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("moe_optimizer.vllm_plugin.server_facts.world", lambda: (rank, 4))
    layer = Layer(0)
    start_counting(session, worker_of(layer, tensor_parallel_size=2))
    counting = current_counting()
    assert counting is not None
    with counting.step(step(3)):
        layer.router.route(IDS)
    eventually(lambda: session.proof.passes[LOAD_PASS].ran)
    if writes:
        assert eventually(lambda: written(tmp_path, steps=1)).layers[0].total == 6
    assert part_path(tmp_path, rank).exists() == writes
    assert (session.proof.model_rank, session.proof.world_size) == (rank, 4)


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (worker_of(Layer(0), data_parallel_size=2), "data parallelism"),
        (worker_of(Layer(0), prefill_context_parallel_size=2), "prefill context parallelism"),
        (worker_of(Layer(0), use_ubatching=True), "dual batch overlap"),
        (worker_of(), "no tokens"),
        (worker_of(Layer(0), Layer(0)), "have the number 0"),
        (worker_of(Layer(0), Layer(1, is_monolithic=True)), "routes tokens itself"),
        (SimpleNamespace(), "fallback: AttributeError"),
    ],
)
def test_a_model_that_cannot_be_counted_is_left_alone_with_the_reason(
    worker: Any, said: str, session: PluginSession
) -> None:
    start_counting(session, worker)
    assert current_counting() is None
    assert said in session.proof.passes[LOAD_PASS].why_not
    assert not session.proof.passes[LOAD_PASS].applied


def test_vllms_own_capture_keeps_its_place(session: PluginSession) -> None:
    worker = worker_of(Layer(0))
    worker.vllm_config.aux_output_config = SimpleNamespace(enable_return_routed_experts=True)
    start_counting(session, worker)
    assert current_counting() is None
    assert "--enable-return-routed-experts" in session.proof.passes[LOAD_PASS].why_not


def test_what_vllm_says_of_a_kernel_that_routes_itself_is_the_reason(
    session: PluginSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bind(model: Any, capturer: Any) -> None:
        raise ValueError("not supported with monolithic MoE kernel X")

    offered_by_vllm(monkeypatch, bind_routed_experts_capturer=bind)
    start_counting(session, worker_of(Layer(0)))
    assert session.proof.passes[LOAD_PASS].why_not.endswith(" kernel X")


def test_a_required_pass_that_cannot_be_applied_stops_the_start(tmp_path: Path) -> None:
    session = PluginSession(run_dir=tmp_path, plan=plan(required=True))
    with pytest.raises(RequiredNotAppliedError, match="data parallelism"):
        start_counting(session, worker_of(Layer(0), data_parallel_size=2))


def test_a_plan_that_has_it_off_changes_nothing(tmp_path: Path) -> None:
    layer = Layer(0)
    session = PluginSession(run_dir=tmp_path, plan=plan(on=False))
    start_counting(session, worker_of(layer))
    assert current_counting() is None
    assert layer.router.capture_fn is None
    assert LOAD_PASS not in session.proof.passes


def test_a_failure_while_serving_ends_the_counting_and_not_the_step(session: PluginSession) -> None:
    start_counting(session, worker_of(Layer(0)))
    counting = current_counting()
    assert counting is not None
    forwards = []
    with counting.step(SimpleNamespace()):
        forwards.append(1)
    assert forwards == [1]
    assert current_counting() is None
    assert "AttributeError" in session.proof.passes[LOAD_PASS].why_not


class Executor:
    """As vLLM's worker wrapper."""

    def execute_model(self, scheduler_output: Any) -> Any:
        return ("ran", scheduler_output.total_num_scheduled_tokens)


def test_the_patched_step_counts_and_returns_what_vllm_returned(session: PluginSession, tmp_path: Path) -> None:
    layer = Layer(0)

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        layer.router.route(IDS)
        return Executor().execute_model(scheduler_output)

    patched = WORKER_EXECUTE_MODEL.replacement(execute_model)
    assert patched(None, step(3)) == ("ran", 3)
    start_counting(session, worker_of(layer))
    assert patched(None, step(3)) == ("ran", 3)
    assert eventually(lambda: written(tmp_path, steps=1)).layers[0].tokens == (1, 2, 2, 1)


def test_an_error_of_vllm_in_a_step_is_vllms(session: PluginSession) -> None:
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        raise RuntimeError("vLLM's own")

    start_counting(session, worker_of(Layer(0)))
    with pytest.raises(RuntimeError, match="vLLM's own"):
        WORKER_EXECUTE_MODEL.replacement(execute_model)(None, step(1))
    assert session.proof.passes[LOAD_PASS].why_not == ""


def test_the_model_is_counted_when_vllm_asks_for_its_cache(
    session: PluginSession, monkeypatch: pytest.MonkeyPatch
) -> None:

    patched = WORKER_MODEL_LOADED.replacement(lambda worker: "the cache")
    assert patched(worker_of(Layer(0))) == "the cache"
    assert current_counting() is None
    monkeypatch.setattr(model_loaded, "current_session", lambda: session)
    assert patched(worker_of(Layer(0))) == "the cache"
    assert current_counting() is not None
