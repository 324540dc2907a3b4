"""What is seen after vLLM's load balancer (EPLB) has moved experts: its own state and its own copying, on CPU tensors.

One rank holds all slots, so experts move between its rows. The compiled CUDA kernels are replaced by their reference,
the events of a GPU and the thread of the asynchronous mode by what they come to in one thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.errors import RequiredNotAppliedError
from moe_optimizer.specs.kernel_speeds import TokenRange
from moe_optimizer.vllm_plugin.session import PluginSession
from moe_optimizer.vllm_plugin.worker.weights_changed import WatchedWorker
from tests.free_ports import free_port
from tests.vllm.cuda_class import Kernels, activated, modular_kernel, offered, stand_in_kernels
from tests.vllm.expert_layers import EXPERTS, HIDDEN, PASS, WIDTH

torch = pytest.importorskip("torch")

LAYERS = 3
SLOTS = EXPERTS + 4
STEPS_BETWEEN = 4
RANGES = (TokenRange(up_to=2, use="direct"), TokenRange(up_to=512, use="grouped-bf16-n16"))


@dataclasses.dataclass
class Served:
    """A worker whose balancer moves the experts of a model of ours."""

    session: PluginSession
    kernels: Kernels
    worker: Any
    layers: list[Any]

    @property
    def balancer(self) -> Any:
        return self.worker.model_runner.eplb_state

    @property
    def state(self) -> Any:
        (state,) = self.balancer.model_states.values()
        return state

    @property
    def canary(self) -> str:
        return self.session.proof.passes[PASS].canary

    def step(self, seed: int) -> None:
        """One forward's end: the load of another hot expert in each layer, then vLLM's own step."""
        generator = torch.Generator().manual_seed(seed)
        load = torch.randint(1, 50, (LAYERS, SLOTS), generator=generator, dtype=torch.int32)
        hot = torch.randint(SLOTS, (LAYERS,), generator=generator)
        load[torch.arange(LAYERS), hot] += 900
        self.state.expert_load_pass.copy_(load)
        self.balancer.step(False, False, log_stats=False)

    def rearrange(self, seed: int) -> None:
        """Steps until the balancer has rearranged once more."""
        for number in range(STEPS_BETWEEN):
            self.step(100 * seed + number)

    def rearrange_again(self) -> None:
        """Rearrangements until every layer has had its turn."""
        for number in range(10, 10 + 2 * LAYERS):
            self.rearrange(number)


def make_layer(index: int) -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    generator = torch.Generator().manual_seed(index)
    layer: Any = torch.nn.Module()
    for name, rows, columns in (("w13", 2 * WIDTH, HIDDEN), ("w2", HIDDEN, WIDTH)):
        weight = torch.randn(EXPERTS, rows, columns, generator=generator).to(torch.float8_e4m3fn)
        scale = torch.rand(EXPERTS, rows, 1, generator=generator) * 0.1 + 0.05
        # As vLLM loads them: replicas of the first experts come last.
        for suffix, values in (("weight", weight.view(torch.uint8)), ("weight_scale", scale)):
            held = torch.cat([values, values[: SLOTS - EXPERTS]])
            held = held.view(torch.float8_e4m3fn) if suffix == "weight" else held
            layer.register_parameter(f"{name}_{suffix}", torch.nn.Parameter(held, requires_grad=False))
    layer.layer_name = f"model.layers.{index}.mlp.experts"
    layer.expert_map, layer.activation, layer.global_num_experts = None, MoEActivation.SILU, SLOTS
    config = fp8_w8a8_moe_quant_config(layer.w13_weight_scale, layer.w2_weight_scale, per_out_ch_quant=True)
    kernel = modular_kernel(
        offered("fp8_cuda", "MoeOptimizerFp8CudaExperts"), config, num_experts=SLOTS, num_local_experts=SLOTS
    )
    kernel.fused_experts.process_weights_after_loading(layer)
    layer.quant_method = SimpleNamespace(moe_kernel=kernel, weight_scale_name="weight_scale")
    # Its first forward, in which our class meets it.
    x = torch.randn(12, HIDDEN, generator=generator).bfloat16()
    topk_weights, ids = torch.randn(12, SLOTS, generator=generator).softmax(-1).topk(4)
    kernel.apply(
        x, layer.w13_weight, layer.w2_weight, topk_weights, ids.int(), layer.activation, SLOTS, None, False
    )  # fmt: skip
    return layer


class Model(torch.nn.Module):
    """As much of a vLLM model as its balancer asks."""

    num_routed_experts = num_logical_experts = EXPERTS
    num_redundant_experts = SLOTS - EXPERTS
    num_physical_experts = num_local_physical_experts = SLOTS
    num_expert_groups = 1
    num_moe_layers = LAYERS

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.moe_layers: list[Any] = []
        self.expert_weights = [[each.data.view(SLOTS, -1) for each in layer.parameters()] for layer in layers]

    def set_eplb_state(self, *tables: Any) -> None:
        """Nothing: no router of this model reads them."""


class Event:
    """A GPU's event, on a machine that has none."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _end: Any) -> float:
        return 1.0


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's groups of one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.eplb import eplb_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        parallel_state.initialize_model_parallel(1)
    # vLLM makes the balancer a group of its own with the same ranks.
    monkeypatch.setattr(eplb_state, "get_eplb_group", parallel_state.get_ep_group)
    monkeypatch.setattr(torch, "Event", Event)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture(params=["in one go", "layer by layer"])
def served(request: pytest.FixtureRequest, one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    from vllm.distributed.eplb.eplb_state import EplbState

    kernels = stand_in_kernels(monkeypatch)
    session = activated(tmp_path, monkeypatch, {"fp8_channel": RANGES})
    layers = [make_layer(index) for index in range(LAYERS)]
    model = Model(layers)
    config: Any = SimpleNamespace(
        enable_eplb=True,
        enable_elastic_ep=False,
        num_ubatches=0,
        eplb_config=SimpleNamespace(
            use_async=request.param == "layer by layer",
            window_size=2,
            step_interval=STEPS_BETWEEN,
            policy="default",
            communicator="torch_gloo",
            log_balancedness_interval=1,
        ),
    )
    balancer = EplbState(config, torch.device("cpu"))
    balancer.add_model(model, SimpleNamespace(model="bundled", compute_hash=lambda: "bundled"))  # pyrefly: ignore[bad-argument-type]
    if balancer.is_async:
        moved_in_turn(balancer)
    worker: Any = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model, eplb_state=balancer),
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=200), parallel_config=config
        ),
        compile_or_warm_up_model=lambda: 1.5,
        reload_weights=lambda: None,
    )
    WatchedWorker(session, worker).watch()
    worker.compile_or_warm_up_model()
    return Served(session, kernels, worker, layers)


def moved_in_turn(balancer: Any) -> None:
    """Do after each step what vLLM's thread does beside the forwards: copy one layer's new weights into the buffer."""
    from vllm.distributed import get_ep_group
    from vllm.distributed.eplb.rebalance_execute import AsyncEplbLayerResult, transfer_layer

    (state,) = balancer.model_states.values()
    step, planned = balancer.step, []

    def with_thread(*arguments: Any, **named: Any) -> None:
        step(*arguments, **named)
        if state.rebalanced and not planned:
            stats, old = state.eplb_stats, state.physical_to_logical_map.clone()
            new = balancer.policy.rebalance_experts(
                stats.global_expert_load_window, stats.num_replicas, stats.num_groups, stats.num_nodes,
                stats.num_gpus, old,
            )  # fmt: skip
            planned.extend((index, old[index], new[index]) for index in range(LAYERS))
            balancer.rearrange_event.wait()
        if planned:
            index, old, new = planned.pop(0)
            moved = transfer_layer(
                old, new, state.model.expert_weights[index], state.expert_buffer, get_ep_group().cpu_group,
                state.communicator, layer_idx=index,
            )  # fmt: skip
            state.pending_result = AsyncEplbLayerResult(index, new, moved, Event())  # pyrefly: ignore[bad-argument-type]

    balancer.step = with_thread


def test_many_rearrangements_raise_no_alarm_and_the_proof_counts_them(served: Served) -> None:
    before, calls = served.state.physical_to_logical_map.clone(), served.session.proof.passes[PASS].calls
    kernels = set()
    for number in range(30):
        served.kernels.runs.clear()
        served.rearrange(number)
        kernels |= {name for name, _ in served.kernels.runs}
    assert not torch.equal(served.state.physical_to_logical_map, before)
    found = re.match(
        r"passed after (\d+) rearr.* the last (\S+), worst error 0\.\d+ .*; passed before ready", served.canary
    )
    assert found, served.canary
    # Layer by layer, some of the 30 are not yet through.
    assert int(found[1]) >= 25
    assert kernels == {"direct", "grouped-bf16-n16"}
    assert served.session.proof.passes[PASS].calls == calls
    assert served.session.proof.passes[PASS].why_not == ""


def test_the_layers_take_turns(served: Served) -> None:
    names = []
    for number in range(4 * LAYERS * STEPS_BETWEEN):
        served.step(number)
        names.append(served.canary.partition("the last ")[2].partition(",")[0])
    in_order = [layer.layer_name for layer in served.layers]
    assert [name for name, _ in itertools.groupby(filter(None, names))][:LAYERS] == in_order[::-1]


def swapped(layer: Any) -> None:
    """Two experts change places, scales and all: every kernel computes what these weights say."""
    for tensor in layer.parameters():
        bits = tensor.data.view(torch.uint8)
        bits[[2, 9]] = bits[[9, 2]]


def weights_alone(layer: Any) -> None:
    """Rows of the weights moved, and not their scales."""
    bits = layer.w13_weight.data.view(torch.uint8)
    bits[[2, 9]] = bits[[9, 2]]


def stale_scale(layer: Any) -> None:
    layer.w2_weight_scale.data[5] *= 1.02


def not_a_number(layer: Any) -> None:
    layer.w2_weight_scale.data[7, 3] = float("nan")


@pytest.mark.parametrize("fault", [swapped, weights_alone, stale_scale, not_a_number])
def test_experts_that_are_not_where_the_map_says_end_the_server(served: Served, fault: Any) -> None:
    served.rearrange(1)
    served.rearrange(2)
    for layer in served.layers:
        fault(layer)
    with pytest.raises(RequiredNotAppliedError, match="after a rearr"):
        served.rearrange_again()
    assert served.canary.startswith("failed after a rearrangement: model.layers.")
    assert "canary after a rearr" in served.session.proof.passes[PASS].why_not


def test_tokens_that_are_sent_where_their_expert_was_end_the_server(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.eplb import eplb_state

    right = eplb_state.compute_logical_maps

    def stale(*arguments: Any) -> Any:
        slots, replicas = right(*arguments)
        return slots.roll(1, dims=-2), replicas.roll(1, dims=-1)

    served.rearrange(1)
    monkeypatch.setattr(eplb_state, "compute_logical_maps", stale)
    with pytest.raises(RequiredNotAppliedError, match="tokens of expert"):
        served.rearrange_again()


def test_a_kernel_that_keeps_an_old_scale_ends_the_server(served: Served) -> None:
    served.rearrange(1)
    served.kernels.change = lambda problem: dataclasses.replace(problem, w2_scale=problem.w2_scale * 1.02)
    with pytest.raises(RequiredNotAppliedError, match="factor"):
        served.rearrange_again()


def test_after_new_weights_the_old_ones_are_not_compared_and_the_proof_says_so(served: Served) -> None:
    served.rearrange(1)
    for layer in served.layers:
        for name in ("w13_weight_scale", "w2_weight_scale"):
            getattr(layer, name).data *= 2
    served.worker.reload_weights()
    for number in range(2, 8):
        served.rearrange(number)
    assert re.match("passed after.*not compared.*; passed after a reload", served.canary)


def test_a_balancer_that_is_not_as_known_serves_on_without_a_canary(tmp_path: Path, monkeypatch: Any) -> None:
    session = activated(tmp_path, monkeypatch, {"fp8_channel": RANGES})
    steps: list[bool] = []
    balancer = SimpleNamespace(step=steps.append, model_states={})
    worker: Any = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=torch.nn.Module, eplb_state=balancer),
        vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=200)),
        compile_or_warm_up_model=lambda: 1.5,
    )
    WatchedWorker(session, worker).watch()
    assert worker.compile_or_warm_up_model() == 1.5
    worker.model_runner.eplb_state.step(True)
    assert steps == [True]


def test_what_vllm_asks_of_a_layer_that_is_not_as_known_is_no_alarm(served: Served) -> None:
    for layer in served.layers:
        del layer.activation
    for number in range(6):
        served.rearrange(number)
    assert re.match("not run after a rearr.*AttributeError", served.canary)
