"""What the comparison of a step with and without its CUDA graph sees, in both of vLLM's runners.

There is no GPU: a graph is a function that computes what was captured, or something else. Forward context, modes and
descriptions of graphs are vLLM's own. `tests/gpu/test_wrong_graphs.py` has real graphs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from tests.vllm.expert_layers import PASS
from tests.vllm.test_canary import Server, server

__all__ = ["server"]

torch = pytest.importorskip("torch")

HIDDEN = 32
PADDED = 8
"""Tokens of the only graph."""


def ranks(world_size: int = 1, **parallel: int) -> SimpleNamespace:
    """Return what vLLM says of the ranks that compute a step together."""
    sizes = {"data_parallel_size": 1, "pipeline_parallel_size": 1, "world_size": world_size}
    return SimpleNamespace(**{**sizes, **parallel}, enable_dbo=False)


RIGHT = SimpleNamespace(
    parallel_config=ranks(),
    kv_transfer_config=None,
    model_config=SimpleNamespace(is_hybrid=False, is_attention_free=False),
)

Forward = Callable[[Any], Any]


@dataclasses.dataclass
class FirstRunner:
    """A runner whose forward reads from the context whether it replays a graph."""

    model: Any
    plain: Forward
    replayed: Forward
    computed: int = 0
    """Forwards without a graph."""

    def __post_init__(self) -> None:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import BatchDescriptor

        self.graph = BatchDescriptor(num_tokens=PADDED)
        self.cudagraph_dispatcher = SimpleNamespace(cudagraph_keys={CUDAGraphMode.FULL: {self.graph}})

    def capture(self) -> None:
        """Nothing that is watched."""

    def get_model(self) -> Any:
        return self.model

    def execute_model(self, scheduler_output: Any) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import override_forward_context

        context: Any = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=self.graph)
        with override_forward_context(context):
            return self._model_forward(input_ids=scheduler_output.inputs)

    def _model_forward(self, input_ids: Any, inputs_embeds: Any = None) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        assert inputs_embeds is None
        if get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.FULL:
            return self.replayed(input_ids)
        self.computed += 1
        return self.plain(input_ids)


class _Captures:
    """The part of the second runner's manager that captures what it is given."""

    def capture(self, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
        from vllm.config import CUDAGraphMode

        manager: Any = self
        for graph in manager._capture_descs[CUDAGraphMode.FULL]:
            create_forward_fn(graph, True)(CUDAGraphMode.NONE)
            create_forward_fn(graph, False)(CUDAGraphMode.NONE)


class _Manager(_Captures):
    use_breakable_cg = False

    def __init__(self, runner: SecondRunner) -> None:
        from vllm.config import CUDAGraphMode

        self.runner = runner
        self._capture_descs = {CUDAGraphMode.FULL: [runner.graph]}

    def capture(self, model: Any) -> None:  # pyrefly: ignore[bad-override]
        def create(graph: Any, warmup: bool) -> Any:
            def forward(mode: Any) -> None:
                self.runner.computed += 1
                self.runner.hidden.copy_(self.runner.plain(self.runner.inputs))

            return forward

        super().capture(create, "capturing")

    def run_fullgraph(self, graph: Any) -> Any:
        self.runner.hidden.copy_(self.runner.replayed(self.runner.inputs))
        return self.runner.hidden

    def run_pw_graph(self, model: Any, inputs: Any) -> Any:
        raise AssertionError("no graph in pieces here")


@dataclasses.dataclass
class SecondRunner:
    """A runner whose graphs read and write buffers of its own."""

    model: Any
    plain: Forward
    replayed: Forward
    computed: int = 0

    def __post_init__(self) -> None:
        self.graph = dataclasses.make_dataclass("Graph", ["num_tokens"], frozen=True)(PADDED)
        self.inputs, self.hidden = torch.zeros(PADDED, HIDDEN), torch.zeros(PADDED, HIDDEN)
        self.cudagraph_manager = _Manager(self)

    def capture(self) -> None:
        self.cudagraph_manager.capture(self.model)
        self.computed = 0

    def get_model(self) -> Any:
        return self.model

    def execute_model(self, scheduler_output: Any) -> Any:
        self.inputs.copy_(scheduler_output.inputs)
        return self.cudagraph_manager.run_fullgraph(self.graph).clone()


def double(inputs: Any) -> Any:
    return 2 * inputs


RUNNERS = pytest.mark.parametrize("kind", [FirstRunner, SecondRunner])


@dataclasses.dataclass
class Checked:
    """A runner whose graphs are compared."""

    runner: Any
    check: Any
    server: Server

    def step(self, *, rows: int = PADDED, seed: int = 0) -> Any:
        inputs = torch.randn(PADDED, HIDDEN, generator=torch.Generator().manual_seed(seed))
        return self.runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=rows, inputs=inputs))

    @property
    def said(self) -> str:
        return self.server.canary


def checked(server: Server, kind: Any, replayed: Forward = double, plain: Forward = double, **config: Any) -> Checked:
    from moe_optimizer.vllm_plugin.worker.graph_check import GraphCheck

    runner = kind(server.model, plain, replayed)
    worker = SimpleNamespace(model_runner=runner, vllm_config=SimpleNamespace(**{**vars(RIGHT), **config}))
    check = GraphCheck(server.session, worker)
    check.watch()
    runner.capture()
    server.check()
    check.begin("before ready")
    return Checked(runner, check, server)


@RUNNERS
@pytest.mark.parametrize(("world_size", "computed"), [(1, 1), (2, 4)])
def test_a_right_graph_is_compared_and_then_left_alone(
    server: Server, kind: Any, world_size: int, computed: int
) -> None:
    found = checked(server, kind, parallel_config=ranks(world_size))
    for seed in range(5):
        found.step(seed=seed)
    assert found.runner.computed == computed, "with others twice beside each of two replays"
    assert "passed before ready" in found.said
    assert "passed in 1 of 1 of vLLM's graphs" in found.said


def off_by(share: float) -> Forward:
    def replayed(inputs: Any) -> Any:
        noise = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(1))
        return double(inputs + share * noise)

    return replayed


MISTAKES: dict[str, Forward] = {
    "2 % in a seventh of the residual": off_by(0.02 / 7),
    "frozen inputs": torch.ones_like,
    "no number": lambda inputs: double(inputs) * float("nan"),
    "nothing": torch.zeros_like,
    "two rows swapped": lambda inputs: double(inputs).roll(1, dims=0),
}


@RUNNERS
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_graph_that_gives_something_else_ends_the_server(
    server: Server, kind: Any, mistake: str, world_size: int
) -> None:
    found = checked(server, kind, MISTAKES[mistake], parallel_config=ranks(world_size))
    found.step(seed=1)
    with pytest.raises(RequiredNotAppliedError, match="experts compute something else"):
        found.step(seed=2)
    assert found.said.startswith(f"failed before ready: vLLM's graph of {PADDED} tokens")
    assert server.session.proof.passes[PASS].why_not


@RUNNERS
def test_of_vllms_own_kernels_a_wrong_graph_is_a_warning(
    server: Server, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = checked(dataclasses.replace(server, model=torch.nn.Sequential()), kind, MISTAKES["frozen inputs"])
    for seed in (1, 2):
        found.step(seed=seed)
    assert f"vLLM's own kernels: vLLM's graph of {PADDED} tokens" in caplog.text


@RUNNERS
def test_padding_may_hold_anything(server: Server, kind: Any) -> None:
    def garbage_behind(inputs: Any) -> Any:
        return torch.cat([double(inputs[:3]), torch.full_like(inputs[3:], float("inf"))])

    found = checked(server, kind, garbage_behind)
    for seed in range(2):
        found.step(rows=3, seed=seed)
    assert "passed in 1 of 1" in found.said


def test_a_step_goes_on_with_what_the_graph_gave(server: Server) -> None:
    found = checked(server, SecondRunner, lambda inputs: double(inputs) * 1.0001)
    assert torch.equal(found.step(), double(found.runner.inputs) * 1.0001)


def test_kernels_that_differ_from_run_to_run_are_no_finding(server: Server) -> None:
    generator = torch.Generator().manual_seed(3)

    def noisy(inputs: Any) -> Any:
        return double(inputs) * (1 + 0.01 * torch.randn(inputs.shape, generator=generator))

    found = checked(server, FirstRunner, noisy, noisy)
    for seed in range(2):
        found.step(seed=seed)
    assert "passed in 1 of 1" in found.said


def one_row_off(share: float) -> Forward:
    """Return a forward whose every run has another row off."""
    row = itertools.count()

    def forward(inputs: Any) -> Any:
        hidden = double(inputs)
        at = next(row) % 3
        hidden[at] += share * hidden[at].norm() * torch.nn.functional.normalize(torch.ones(HIDDEN), dim=0)
        return hidden

    return forward


def test_rows_that_differ_from_run_to_run_are_noise_though_most_rows_do_not(server: Server) -> None:
    """As rows do whose experts are summed up by how many experts the padding chose."""
    found = checked(server, FirstRunner, off_by(0.01), one_row_off(0.01))
    for seed in range(2):
        found.step(seed=seed)
    assert "passed in 1 of 1" in found.said


def test_what_rounding_changes_is_no_finding_where_padding_chooses_experts_too(server: Server) -> None:
    """Two runs without the graph may happen to have the same padding, and a replay another."""
    found = checked(server, FirstRunner, off_by(0.01))
    for seed in range(4):
        assert "passed in" not in found.said
        found.step(seed=seed, rows=PADDED - 1)
    assert "passed in 1 of 1" in found.said


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("padded", [1, 6])
def test_replays_without_padding_decide_however_many_had_some(server: Server, padded: int, world_size: int) -> None:
    mistake = MISTAKES["2 % in a seventh of the residual"]
    found = checked(server, FirstRunner, mistake, parallel_config=ranks(world_size))
    for rows in (*[PADDED - 1] * padded, PADDED):
        found.step(rows=rows)
    with pytest.raises(RequiredNotAppliedError, match="experts compute something else"):
        found.step()


@pytest.mark.parametrize("mistake", [each for each in MISTAKES if not each.startswith("2 %")])
def test_what_is_more_than_rounding_is_found_in_padded_replays_too(server: Server, mistake: str) -> None:
    found = checked(server, FirstRunner, MISTAKES[mistake])
    for seed in range(3):
        found.step(seed=seed, rows=PADDED - 1)
    with pytest.raises(RequiredNotAppliedError, match="experts compute something else"):
        found.step(seed=3, rows=PADDED - 1)


def test_a_row_with_other_experts_in_each_run_hides_no_wrong_graph(server: Server) -> None:
    found = checked(server, FirstRunner, MISTAKES["frozen inputs"], one_row_off(1.0))
    found.step(seed=1)
    with pytest.raises(RequiredNotAppliedError, match="experts compute something else"):
        found.step(seed=2)


def test_a_step_without_numbers_is_not_counted_as_compared(server: Server) -> None:
    """As with dummy weights: nothing can be told of the graph."""

    def lost(inputs: Any) -> Any:
        return double(inputs) * float("nan")

    found = checked(server, FirstRunner, lost, lost)
    for seed in range(3):
        found.step(seed=seed)
    assert found.runner.computed == 4, "twice beside each of two replays"
    assert "passed in" not in found.said
    assert "graphs not compared" in found.said


def test_one_replay_that_is_off_is_no_finding_and_the_log_says_which(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    replays = iter([1.1, 1.0])
    found = checked(server, FirstRunner, lambda inputs: double(inputs) * next(replays))
    for seed in range(2):
        found.step(seed=seed, rows=5)
    assert "passed in 1 of 1" in found.said
    (said,) = [each for each in caplog.messages if f"graph of {PADDED} tokens (FULL)" in each]
    assert "off by 0.1 of their size" in said
    assert "5 of them" in said


@RUNNERS
def test_graphs_are_compared_again_when_weights_have_changed(server: Server, kind: Any) -> None:
    found = checked(server, kind)
    for seed in range(2):
        found.step(seed=seed)
    found.runner.replayed = off_by(0.5)
    found.step()
    server.check()
    found.check.begin("after a reload")
    found.step(seed=3)
    with pytest.raises(RequiredNotAppliedError, match="after a reload"):
        found.step(seed=4)


@pytest.mark.parametrize(
    ("reason", "config"),
    [
        ("data parallelism", {"parallel_config": ranks(2, data_parallel_size=2)}),
        ("pipeline parallelism", {"parallel_config": ranks(2, pipeline_parallel_size=2)}),
        ("KV connector", {"kv_transfer_config": SimpleNamespace()}),
        ("keep a state", {"model_config": SimpleNamespace(is_hybrid=True, is_attention_free=False)}),
    ],
)
def test_steps_that_cannot_be_computed_twice_are_not_and_the_proof_says_why(
    server: Server, reason: str, config: dict[str, Any]
) -> None:
    found = checked(server, FirstRunner, off_by(0.5), **config)
    for seed in range(3):
        found.step(seed=seed)
    assert found.runner.computed == 0
    assert "graphs not compared" in found.said
    assert reason in found.said
