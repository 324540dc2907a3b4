"""Predicts every load that the records measured, and compares: case by case, pass by pass, layout by layout."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.jobs import JOBS, Jobs, make_models  # noqa: E402
from benchmarks.serving.dummy_model import published_shapes, write_published_shape  # noqa: E402
from benchmarks.serving.layout_entries import CACHE  # noqa: E402
from moe_optimizer.costs.memory import MemoryRequest  # noqa: E402
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_tables, shipped_dir  # noqa: E402
from moe_optimizer.inspection.model_inspector import ModelInspector  # noqa: E402
from moe_optimizer.layouts.question import LayoutQuestion  # noqa: E402
from moe_optimizer.layouts.search import Goal, ordered  # noqa: E402
from moe_optimizer.layouts.serving import Prediction, memory_of, predict  # noqa: E402
from moe_optimizer.measure.bench.api_servers import SATURATED  # noqa: E402
from moe_optimizer.specs.expert_load import ExpertLoad, LayerLoad  # noqa: E402
from moe_optimizer.specs.front_end import FrontEnd, FrontEndTime  # noqa: E402
from moe_optimizer.specs.kernel_speeds import SpeedTables  # noqa: E402
from moe_optimizer.specs.layout import Layout, parse_layout  # noqa: E402
from moe_optimizer.specs.model import ModelSpec  # noqa: E402
from moe_optimizer.specs.quantity import Source  # noqa: E402
from moe_optimizer.yaml_model import read_section  # noqa: E402
from scripts.measured_loads import QWEN3_30B, TRIAL, Load, served_loads  # noqa: E402
from tests.builders import qwen3_30b_a3b  # noqa: E402

_FP8 = {"expert_bits": 8, "linear_bits": 8, "weights": "fp8_block"}
_FOUR_BIT = {"expert_bits": 4.25, "linear_bits": 16, "weights": "mxfp4", "our_kernels": True}
SIDES = {
    "stock": {},
    "flash_dmoe": {"our_kernels": True},
    "fp8": _FP8,
    "fp8 again": _FP8,
    "marlin": {"expert_bits": 4.125, "linear_bits": 4.125, "weights": ""},
    "mxfp4": {"expert_bits": 4.25, "linear_bits": 16, "weights": "mxfp4"},
    "mxfp4+flash_dmoe": _FOUR_BIT,
    "fp8+flash_dmoe": {**_FP8, "our_kernels": True},
    "fp8+flash_dmoe+kv_cache": {**_FP8, "our_kernels": True, "kv_bits": 8},
    "four_bit+flash_dmoe": _FOUR_BIT,
    "four_bit+flash_dmoe+kv_cache": {**_FOUR_BIT, "kv_bits": 8},
    "four_bit+fp8+flash_dmoe": {**_FOUR_BIT, "linear_bits": 8},
    "four_bit+fp8+flash_dmoe+kv_cache": {**_FOUR_BIT, "linear_bits": 8, "kv_bits": 8},
}
"""What a server holds, as the model is asked, by the passes that decide it."""
READER_TOKEN_US = 33.5
"""Of each token, in the process of `moe-optimizer bench` that reads all answers: with 512 clients copies of a
DeepSeek-like shape on two H100 have 17 ms between two tokens of a request, and four other layouts 17 to 19."""
READER_REQUEST_US = 1000.0
"""Of each request of those that come at once, in the same process, before it reads what comes back: 512 clients wait
0.4 to 0.6 s longer than the reading of their prompts lets them in all records of layouts, of one API server as of
four."""
_CLIENTS_OF_FRONT_END = 512
"""The load that tells what an API server takes, where no record says how busy it was: with fewer clients one that is
behind sends tokens in pairs.
"""
SAME_HOST = {"2026-11-28_h200_x2_layouts_front_end": "2026-11-28_h200_front_end_one"}
"""Record -> the one that was measured before on the same host, and tells what its API servers take."""
ONE_ROUTE = ("deepseek_v2",)
"""Models whose random weights send every token to the same experts."""
FORESEEN: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("mixtral", "tp2ep", {"memory_share": 0.9}),
    ("mixtral", "tp2x2", {"memory_share": 0.9}),
    (QWEN3_30B, "tp2", {"memory_share": 0.9}),
    (QWEN3_30B, "tp1x2", {"memory_share": 0.9}),
    (QWEN3_30B, "tp4", {"memory_share": 0.45, "api_servers": 4, "prompt_graphs": True}),
    ("deepseek_v2", "tp2", {"memory_share": 0.45, "api_servers": 4}),
)
"""Models, layouts of H100s and how they are served: what bench_layouts.py is to measure next."""
FITTED = {
    ("2026-11-22_h100_fp8_served", "stock vLLM", "tp1", 1): "HOST_US",
    ("2026-11-22_h100_served", "stock", "tp1", 1): "HOST_US, REQUEST_US",
    ("2026-11-22_h100_stock_served", "stock vLLM", "tp1", 1): "HOST_US",
    ("2026-11-24_h100_profiles_served", "conservative", "tp1", 1): "HOST_US",
    ("2026-11-26_h100_layouts_graphs", "stock", "tp1", 1): "HOST_US",
    ("2026-11-26_h100_layouts_graphs", "stock", "tp1, graphs of prompts", 1): "HOST_US",
    ("2026-11-24_h100_kv_cache_served", "aggressive", "tp1", 1): "LAUNCH_LAYER_US",
    ("2026-11-24_h100_kv_cache_served", "fp8+flash_dmoe", "tp1", 1): "LAUNCH_LAYER_US",
    ("2026-11-26_h100_x2_layouts_deepseek_v2", "stock", "tp2", 1): "latent attention without a constant of its own",
    ("2026-11-26_h100_x2_layouts_deepseek_v2", "stock", "tp2", 16): "ONE_ROUTE",
    ("2026-11-26_h100_x4_layouts", "stock", "tp4", 16): "LAUNCH_EXCHANGE_US",
    ("2026-11-26_h100_x4_layouts", "stock", "tp4", 512): "READER_REQUEST_US",
    ("2026-11-26_h200_x4_layouts", "stock", "tp4", 16): "LAUNCH_EXCHANGE_US",
    ("2026-11-26_h100_x2_layouts_deepseek_v2", "stock", "tp2", 512): "FRONT_END_PROMPT_TOKEN_US",
    ("2026-11-26_h100_x2_layouts_deepseek_v2", "stock", "tp1dp2ep", 512): "READER_TOKEN_US",
    ("2026-11-26_h100_x2_layouts_deepseek_v2", "stock", "tp1dp2ep", 16): "LAUNCH_LATENT_US",
    ("2026-11-26_h100_x2_layouts_deepseek_v2_rest", "stock", "tp2ep", 16): "LAUNCH_LATENT_US",
    ("2026-11-26_h100_x2_layouts_deepseek_v2_rest", "stock", "tp1x2", 16): "LAUNCH_LATENT_US",
    ("2026-11-26_h200_x4_layouts", "stock", "tp4ep", 512): "FRONT_END_TOKEN_US of 512 clients",
    ("2026-11-27_h100_x2_layouts_tp2", "stock", "tp2", 512): "FRONT_END_TOKEN_US of 512 clients",
    ("2026-11-28_h200_front_end", "conservative", "tp1", 128): "FRONT_END_TOKEN_US of 128 clients",
    ("2026-11-26_h200_x4_layouts", "stock", "tp1dp4ep", 16): "LOCK_STEP_US",
    ("an independent trial", "marlin", "tp1", 64): "VLLM_EXPERTS in four bits",
}
"""Cases that a constant was read from; the errors of all others are of predictions."""
PAIRS = {
    "stock": {
        "flash_dmoe": "flash_dmoe",
        "fp8": "fp8",
        "fp8+flash_dmoe": "fp8 and flash_dmoe",
        "fp8+flash_dmoe+kv_cache": "fp8, flash_dmoe and kv_cache",
        "four_bit+flash_dmoe+kv_cache": "four_bit, flash_dmoe and kv_cache",
        "four_bit+fp8+flash_dmoe+kv_cache": "four_bit, fp8, flash_dmoe and kv_cache",
    },
    "flash_dmoe": {"fp8+flash_dmoe": "fp8"},
    "fp8": {"fp8+flash_dmoe": "flash_dmoe"},
    "mxfp4": {"mxfp4+flash_dmoe": "flash_dmoe"},
    "marlin": {
        "four_bit+fp8+flash_dmoe": "four_bit, fp8 and flash_dmoe instead of INT4 of GPTQ",
        "four_bit+fp8+flash_dmoe+kv_cache": "four_bit, fp8, flash_dmoe and kv_cache instead of INT4 of GPTQ",
    },
    "fp8+flash_dmoe": {"fp8+flash_dmoe+kv_cache": "kv_cache", "four_bit+flash_dmoe": "four_bit instead of fp8"},
}
"""What a server holds without a pass -> what servers of the same record hold with it -> the pass. Other passes change
nothing that the model holds.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load of one record beside its prediction."""

    load: Load
    prediction: Prediction
    rate: float
    """Predicted tokens/s of the run as it was, from its first request to its last."""

    @property
    def fitted(self) -> bool:
        """Whether a constant was read from it."""
        return (self.load.record, self.load.side, self.load.served_as, self.load.clients) in FITTED

    @property
    def in_brackets(self) -> bool:
        """Whether its host did other work at the same time."""
        return self.load.shared_host and not self.fitted

    @property
    def judged(self) -> bool:
        """Whether its errors count in the means."""
        return not self.fitted and not self.in_brackets

    @property
    def tpot_error(self) -> float:
        """Of the time per output token."""
        return self.prediction.tpot_ms / self.load.tpot_ms - 1

    @property
    def ttft_error(self) -> float | None:
        """Of the mean time to first token; None: the record has none."""
        measured = self.load.ttft_ms
        return None if measured is None else self.prediction.ttft_ms / measured - 1

    @property
    def rate_error(self) -> float | None:
        """Of the tokens a second; None: not judged."""
        measured = None if self.load.why_no_rate else self.load.tokens_per_s
        return None if measured is None else self.rate / measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCase:
    """What one pass gains in time per output token under one load: above 1 is better."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """What is chosen, and what was measured to be best, of the layouts of one record under one load."""

    goal: Goal
    chosen: Case
    best: Case

    @property
    def ratio(self) -> float:
        """Measured of the chosen one over that of the best: tokens/s, or time per output token."""
        if self.goal == "latency":
            return self.chosen.load.tpot_ms / self.best.load.tpot_ms
        return (self.chosen.load.tokens_per_s or 0.0) / (self.best.load.tokens_per_s or 1.0)


def cases() -> Iterator[Case]:
    """Yield every load of the served records, each with its prediction."""
    return map(predicted, (*served_loads(), *TRIAL))


def told() -> Iterator[tuple[Case, Case]]:
    """Yield loads whose API server took what another load of the host tells: as the model has it, and as that tells.

    `moe-optimizer bench` keeps what it finds so for later plans of a machine.
    """
    loads = list(served_loads())
    telling = _telling(loads)
    for load in loads:
        tellers = telling.get(SAME_HOST.get(load.record, load.record), [])
        if load in tellers:
            continue
        times = sorted(map(front_end_time, tellers), key=lambda each: each.clients)
        plain, known = predicted(load), predicted(load, front_end=FrontEnd(times=tuple(times)))
        one = known.prediction.front_end_us.source is Source.MEASURED and known.prediction.api_servers == 1
        if one and known.rate != plain.rate and not plain.fitted:
            yield plain, known


def _telling(loads: list[Load]) -> dict[str, list[Load]]:
    """Return the loads of each record that tell what an API server of its host takes, the first of each number of
    clients.
    """
    telling: dict[str, list[Load]] = {}
    for load in loads:
        told = telling.get(load.record, ())
        if load.clients not in (each.clients for each in told) and _waited_for_its_front_end(load):
            telling.setdefault(load.record, []).append(load)
    return telling


def front_end_time(load: Load) -> FrontEndTime:
    """Return what one API server took for a token at most: the gap between two tokens of a request over the clients."""
    assert load.gap_ms is not None, load
    return FrontEndTime(clients=load.clients, us_per_token=1000 * load.gap_ms / load.clients, found=load.record)


def _waited_for_its_front_end(load: Load) -> bool:
    """Whether one API server answered all, and tokens waited for it: its share of a core says so, or, in records that
    lack that, that a step as modelled is shorter than the tokens of all clients took.
    """
    if not load.gap_ms or load.api_servers is not None or parse_layout(load.layout).num_engines > 1:
        return False
    if load.front_end_share is not None:
        return load.front_end_share >= SATURATED
    if load.clients != _CLIENTS_OF_FRONT_END:
        return False
    return predicted(load, front_end=FrontEnd(times=(front_end_time(load),))).prediction.front_end_share >= 1


def foreseen() -> Iterator[Case]:
    """Yield predictions of loads that no record has: when one does, the history has what was said before."""
    measured = {_key(load) for load in served_loads()}
    for model, layout, served in FORESEEN:
        for clients in (1, 16, 128, 512):
            load = Load(
                record="not measured", side="stock", holds="stock", layout=layout, clients=clients, requests=clients,
                input_tokens=512, output_tokens=128, tpot_ms=math.nan, tokens_per_s=None, model=model, **served,
            )  # fmt: skip
            if _key(load) in measured:
                continue
            planned = memory_of(_question(load), parse_layout(layout)).kv_cache_bytes
            yield predicted(dataclasses.replace(load, cache_bytes=int(planned * CACHE)))


def _key(load: Load) -> tuple[str, ...]:
    return hardware_of(load), load.model, load.served_as, str(load.clients)


def by_pass(found: list[Case]) -> dict[str, list[PassCase]]:
    """Return what each pass was measured and predicted to gain, wherever a record has the side without it too.

    Not where a constant was read from either.
    """
    groups: dict[str, list[PassCase]] = {}
    judged = [case for case in found if case.judged]
    for base in judged:
        for case in judged:
            name = _pass_between(base.load, case.load)
            if name:
                predicted = base.prediction.tpot_ms / case.prediction.tpot_ms
                one = PassCase(name=name, measured=base.load.tpot_ms / case.load.tpot_ms, predicted=predicted)
                groups.setdefault(name, []).append(one)
    return dict(sorted(groups.items()))


def _pass_between(base: Load, load: Load) -> str:
    """Return the pass that one load has and another one of the same record, all else equal, has not; "": none."""
    if (base.record, base.clients) != (load.record, load.clients):
        return ""
    if base.layout == load.layout:
        if base.side == load.side and base.api_servers is None and load.api_servers is not None:
            return "more API servers"
        if base.side == load.side and load.prompt_graphs and not base.prompt_graphs:
            return "graph_capture: steps that read prompts"
        return PAIRS.get(base.holds, {}).get(load.holds, "")
    slices, other = parse_layout(base.layout), parse_layout(load.layout)
    plain = Layout(tensor_parallel_size=slices.num_devices)
    same = base.side == load.side and base.api_servers == load.api_servers
    if not same or slices != plain or other.num_devices != slices.num_devices:
        return ""
    if other.replicas > 1:
        return "replicas instead of slices"
    copies = "copies with " if other.data_parallel_size > 1 else ""
    return f"parallelism: {copies}experts instead of slices" if other.expert_parallel else ""


def choices(found: list[Case]) -> list[LayoutChoice]:
    """Return how well is chosen wherever layouts of as many GPUs of a kind were measured under the same load, in one
    record or in several; a layout that several have, by the mean of them.
    """
    groups: dict[tuple[Any, ...], list[Case]] = {}
    for case in found:
        load, gpus = case.load, case.prediction.layout.num_devices
        # vLLM alone with more API servers than it starts by itself is no layout of its own; a plan's servers have those
        # that the plan gives them. On a host that others had too nothing is told of its layout.
        if (load.side == "stock" and load.api_servers is not None) or load.shared_host:
            continue
        same = (hardware_of(load), load.model, load.side, load.prompt_graphs, gpus, load.clients, load.requests)
        groups.setdefault((*same, load.input_tokens, load.output_tokens), []).append(case)
    chosen = []
    for group in groups.values():
        judged = [case for case in group if case.rate_error is not None]
        for goal, measured in (("throughput", judged), ("latency", group)):
            known = _of_all_records(measured)
            if len(known) > 1:
                first = ordered([case.prediction for case in known], goal)[0]
                taken = next(case for case in known if case.prediction is first)
                best = max(known, key=lambda case: _score(case.load, goal))
                chosen.append(LayoutChoice(goal=goal, chosen=taken, best=best))
    return chosen


def _of_all_records(found: list[Case]) -> list[Case]:
    """Return one case of each layout: its first, with the mean of what all records of it measured."""
    layouts: dict[str, list[Case]] = {}
    for case in found:
        layouts.setdefault(case.load.layout, []).append(case)
    means = []
    for first, *others in layouts.values():
        loads = [case.load for case in (first, *others)]
        rates = [load.tokens_per_s for load in loads if load.tokens_per_s is not None]
        load = dataclasses.replace(
            first.load, tpot_ms=statistics.mean(load.tpot_ms for load in loads),
            tokens_per_s=statistics.harmonic_mean(rates) if rates else None,
        )  # fmt: skip
        means.append(dataclasses.replace(first, load=load))
    return means


def _score(load: Load, goal: str) -> float:
    return 1 / load.tpot_ms if goal == "latency" else load.tokens_per_s or 0.0


def predicted(load: Load, *, front_end: FrontEnd | None = None) -> Case:
    """Return a load beside its prediction, which may be told what API servers took for a token."""
    question, layout = _question(load), parse_layout(load.layout)
    question = dataclasses.replace(question, front_end=front_end or FrontEnd())
    memory = memory_of(question, layout)
    if load.cache_bytes is not None:
        memory = dataclasses.replace(memory, kv_cache_bytes=load.cache_bytes)
    prediction = predict(question, layout, memory)

    def wave_s(clients: int) -> float:
        served = predict(dataclasses.replace(question, clients=clients), layout, memory)
        return clients * load.output_tokens / served.tokens_per_s

    places = min(load.clients, prediction.running * layout.replicas * layout.data_parallel_size)
    waves, rest = divmod(load.requests, places)
    wall_s = waves * wave_s(places) + (wave_s(rest) if rest else 0.0)
    return Case(load=load, prediction=prediction, rate=load.requests * load.output_tokens / wall_s)


def _question(load: Load) -> LayoutQuestion:
    gpu = load_catalog_entry(hardware_of(load)).gpu
    fields: dict[str, Any] = {"expert_bits": 16, "linear_bits": 16, "weights": "bf16", **SIDES[load.holds]}
    kv_bits = fields.pop("kv_bits", 16)
    memory = MemoryRequest(
        model=_model(load.model), device_bytes=int(gpu.memory.value), num_devices=1,
        max_num_batched_tokens=load.step_tokens, gpu_memory_utilization=load.memory_share, max_num_seqs=256,
        max_model_len=load.input_tokens + load.output_tokens, expert_bits=fields["expert_bits"],
        linear_bits=fields["linear_bits"], kv_bits=kv_bits,
    )  # fmt: skip
    files = sorted(shipped_dir().glob("*.json"))
    return LayoutQuestion(
        memory=memory, gpu=gpu, gpus_per_machine=parse_layout(load.layout).num_devices, clients=load.clients,
        input_tokens=load.input_tokens, output_tokens=load.output_tokens,
        max_running=load.max_running, even_routing=True, api_servers=load.api_servers,
        prompt_graphs=load.prompt_graphs, fused_router_tokens=load.fused_router_tokens,
        rounds=load.requests / load.clients, load=_routing(load),
        reader_token_us=READER_TOKEN_US, reader_request_us=READER_REQUEST_US,
        speeds=SpeedTables(tables=tuple(each for path in files for each in read_tables(path))), **fields,
    )  # fmt: skip


def hardware_of(load: Load) -> str:
    """Return the GPU's entry in the catalog."""
    return "h200" if "_h200_" in load.record else "h100_sxm"


def _routing(load: Load) -> ExpertLoad | None:
    """Return how a model with random weights routes, where that is not evenly.

    vLLM takes the softmax of DeepSeek-V2's router in BF16, in which the scores of random weights are equal, so every
    token goes to the same experts, the first ones. With 16 clients a step of slices on two H100 takes 0.6 ms more than
    with one; the weights of the experts that even routing would reach take 3 ms to read.
    """
    if load.model not in ONE_ROUTE:
        return None
    model = _model(load.model)
    tokens = tuple(int(expert < model.top_k) for expert in range(model.num_experts))
    return ExpertLoad(
        model=load.model, num_experts=model.num_experts, since="2026-11-26T00:00:00+00:00", steps=1,
        layers=tuple(LayerLoad(index=index, name=str(index), tokens=tokens) for index in model.moe_layers),
    )  # fmt: skip


@cache
def _model(name: str) -> ModelSpec:
    """Return a published model, or one of benchmarks/jobs.yaml, as it is inspected."""
    if name == QWEN3_30B:
        return qwen3_30b_a3b()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / name
        if name in published_shapes():
            write_published_shape(folder, name)
        else:
            make_models(read_section(Jobs, JOBS, origin=JOBS.name, what="jobs"), [f"$models/{name}"], folder.parent)
        return ModelInspector().inspect(folder)
