"""Compares the layouts that the plan would choose with what AIConfigurator estimates of all of them.

    python benchmarks/compare_aiconfigurator.py --data FILE [--models HUB_ID,...] [--processes] [--write]

Needs the package `aiconfigurator` (0.12, its data for vLLM) in the environment; --data keeps its estimates, so that a
second run needs it no more. For each model, GPU, number of GPUs and clients (1024 tokens in, 512 out, steps of 8192
tokens) the question is what AIConfigurator gives to our choice as a share of its own best: tokens/s for the goal
throughput, time per output token for latency. Layouts that it has no data for, or that do not fit by its account, are
left out on both sides; so are cases of which nothing is left. AIConfigurator knows no process that GPUs wait for
(launches of steps without a CUDA graph, the API server), so on our side none counts either; with --processes those do
that plans count: they have graphs of prompts. GLM-4.5-Air, which AIConfigurator does not know, is estimated by a
stand-in (`STAND_INS`); our choices are of the model itself.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.record import head, host, parser_of, write_record  # noqa: E402
from moe_optimizer.costs.memory import MemoryRequest  # noqa: E402
from moe_optimizer.inspection.hardware_catalog import load_catalog_entry  # noqa: E402
from moe_optimizer.inspection.kernel_speeds import read_kernel_speeds  # noqa: E402
from moe_optimizer.inspection.model_inspector import ModelInspector  # noqa: E402
from moe_optimizer.layouts.question import STEP_TOKENS, LayoutQuestion  # noqa: E402
from moe_optimizer.layouts.search import Limits, rank  # noqa: E402
from moe_optimizer.specs.layout import Layout  # noqa: E402
from moe_optimizer.specs.model import ModelSpec  # noqa: E402

MODELS = (
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
    "mistralai/Mixtral-8x7B-v0.1",
    "openai/gpt-oss-120b",
    "deepseek-ai/DeepSeek-V3",
    "zai-org/GLM-4.5-Air",
)
STAND_INS = {"zai-org/GLM-4.5-Air": "glm4_moe"}
"""Models that no release of AIConfigurator knows -> their configuration in tests/data. Of the maker of GLM-4.5-Air 0.12
has GLM-5 to 5.3, with latent attention."""
STAND_IN = (
    "Step-3.7-Flash's architecture with the model's own sizes: grouped attention of all tokens in every layer, a dense "
    "first layer, a shared expert; the norms of q and k and the routing (power law of 1.01) are that architecture's. "
    "No experts of its width were timed: they count as the nearest timed ones do (mode HYBRID, transfer policy xshape)"
)
"""Of AIConfigurator's architectures the one that has all these parts, and which times it takes then."""
CONFIGS = ROOT / "tests" / "data" / "model_configs"
SYSTEMS = {"h100_sxm": "h100_sxm", "h200_sxm": "h200"}
"""AIConfigurator's name -> ours."""
MACHINES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2))
CLIENTS = (1, 32, 256, 1024)
PROMPT, ANSWER = 1024, 512
SHARE_OF_MEMORY = 0.92
"""vLLM's own default from 0.22 on, which AIConfigurator assumes."""
BATCHES = tuple(2**exponent for exponent in range(11))
GOALS: dict[Literal["throughput", "latency"], float] = {"throughput": 0.95, "latency": 1.05}
"""Goal -> the share of the best that still counts as well chosen."""
_WEIGHTS = {"dtype": "bf16", "fp8": "fp8_block", "mxfp4": "mxfp4"}


class Ratio(NamedTuple):
    """One of our predictions over AIConfigurator's of the same layout."""

    model: str
    gpus: int
    clients: int
    tpot: float
    tokens_per_s: float


def main() -> int:
    """Collect what is missing, compare, print the summary and write the record."""
    parser = parser_of(__doc__, write=True, commit=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--processes", action="store_true", help="count them on our side, as plans do")
    options = parser.parse_args()
    models = options.models.split(",")
    data = json.loads(options.data.read_text(encoding="utf-8")) if options.data.exists() else {}
    if any(f"{model}|h200_sxm|8|2|1|1" not in data for model in models):
        collect(models, data, options.data)
    cases, errors = [], []
    for model in models:
        spec = inspect(model)
        for system in SYSTEMS:
            for machine in MACHINES:
                for clients in CLIENTS:
                    found, ratios = compare(
                        data, model, spec, system, machine=machine, clients=clients, processes=options.processes
                    )
                    cases += found
                    errors += ratios
    record = {
        **head(
            "layouts that our search chooses, as AIConfigurator 0.12 (vLLM data) estimates them, as a share of its "
            "own best; a comparison of two predictions, nothing was measured"
            + ("; the processes that GPUs wait for count on our side" if options.processes else ""),
            options.commit,
        ),
        "environment": host(os.getloadavg()[0]),
        "workload": {"input_tokens": PROMPT, "output_tokens": ANSWER, "step_tokens": STEP_TOKENS},
        "stand_ins": {model: STAND_IN for model in models if model in STAND_INS},
        "summary": summary(cases, errors),
        "cases": cases,
    }
    print(json.dumps(record["summary"], indent=1))
    if options.write:
        write_record(record, "h100-h200", "layouts_compared" + "_processes" * options.processes)
    return 0


def collect(models: list[str], data: dict[str, Any], path: Path) -> None:
    """Add AIConfigurator's estimates of every shape of a server and batch size."""
    from aiconfigurator.cli import api
    from aiconfigurator.sdk import perf_database
    from aiconfigurator.sdk.backends.factory import get_backend
    from aiconfigurator.sdk.config import RuntimeConfig
    from aiconfigurator.sdk.inference_session import InferenceSession
    from aiconfigurator.sdk.models import get_model

    for system in SYSTEMS:
        version = perf_database.get_latest_database_version(system=system, backend="vllm")
        for model in models:
            mode, policy = ("HYBRID", "xshape") if model in STAND_INS else ("SILICON", None)
            tables = perf_database.get_database_view(
                system, "vllm", version, allow_missing_data=False, database_mode=mode, transfer_policy=policy
            )
            # As a folder: of some models it looks for a file on the hub although it has one.
            folder = str(stand_in_folder(model) if model in STAND_INS else config_folder(model))
            for layout in shapes():
                size = layout.devices_of_stage
                slices = 1 if layout.expert_parallel else size
                rows: dict[str, Any] = {}
                try:
                    config = api._build_model_config(
                        layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size,
                        slices, size // slices, *[None] * 5, forward_model=None, enable_encoder_dp=True,
                        attention_backend=None,
                    )  # fmt: skip
                    api._apply_nextn(config, 0)
                    api.resolve_context_fmha_by_data(config, folder, tables, "vllm", is_context_role=True)
                    session = InferenceSession(get_model(folder, config, "vllm"), tables, get_backend("vllm"))
                    for batch in BATCHES:
                        run = RuntimeConfig(isl=PROMPT, osl=ANSWER, batch_size=batch)
                        summed = session.run_agg(run, ctx_tokens=STEP_TOKENS)
                        found = summed.get_result_dict()
                        if found is not None:
                            values = [float(found[key]) for key in ("ttft", "tpot", "tokens/s")]
                            rows[f"{batch}|{STEP_TOKENS}"] = [*values, bool(summed.check_oom())]
                except Exception as error:  # noqa: BLE001 - whatever it has no data for
                    rows = {"error": repr(error)[:200]}
                data[key_of(model, system, layout)] = rows
            path.write_text(json.dumps(data), encoding="utf-8")


def shapes() -> list[Layout]:
    """Return the servers that are asked for."""
    found = [Layout(tensor_parallel_size=8, pipeline_parallel_size=2)]
    for tensor in (1, 2, 4, 8):
        for data in (1, 2, 4, 8, 16):
            for expert in (False, True):
                gpus = tensor * data
                # Two machines: with whole experts only.
                if (gpus <= 8 or (gpus == 16 and expert)) and (gpus > 1 or not expert):
                    shape = Layout(tensor_parallel_size=tensor, data_parallel_size=data, expert_parallel=expert)
                    found.append(shape)
    return found


def key_of(model: str, system: str, layout: Layout) -> str:
    """Return where an estimate is kept."""
    sizes = (layout.tensor_parallel_size, layout.data_parallel_size, int(layout.expert_parallel))
    return "|".join(map(str, (model, system, *sizes, layout.pipeline_parallel_size)))


def inspect(model: str) -> ModelSpec:
    """Return the model by its config.json."""
    return ModelInspector().inspect(str(config_folder(model)))


@cache
def config_folder(model: str) -> Path:
    """Return a folder that holds a model's config.json: AIConfigurator's copy, or ours of what it does not know."""
    if model in STAND_INS:
        return _folder_of((CONFIGS / f"{STAND_INS[model]}.json").read_text(encoding="utf-8"))
    import aiconfigurator_core

    configs = Path(str(aiconfigurator_core.__file__)).parent / "model_configs"
    return _folder_of((configs / f"{model.replace('/', '--')}_config.json").read_text(encoding="utf-8"))


@cache
def stand_in_folder(model: str) -> Path:
    """Return a folder that holds the config.json of a model's `STAND_IN`."""
    config = json.loads((CONFIGS / f"{STAND_INS[model]}.json").read_text(encoding="utf-8"))
    return _folder_of(json.dumps(stand_in(config)))


def stand_in(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a stand-in for a GLM-4.5 model, by the model's own."""
    same = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings", "torch_dtype", "moe_intermediate_size",
        "num_experts_per_tok", "first_k_dense_replace",
    )  # fmt: skip
    return {
        "architectures": ["Step3p7FlashForCausalLM"],
        "model_type": "step3p7",
        **{key: config[key] for key in same},
        "num_experts": config["n_routed_experts"],
        "share_expert_dim": config["n_shared_experts"] * config["moe_intermediate_size"],
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
    }


def _folder_of(config: str) -> Path:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(config, encoding="utf-8")
    return folder


def estimate(data: dict[str, Any], model: str, system: str, layout: Layout, clients: int) -> list[float] | None:
    """Return AIConfigurator's time to first token and per token (ms) and tokens/s of all servers; None: none."""
    row = data.get(key_of(model, system, layout), {})
    engines = layout.replicas * layout.data_parallel_size
    batch = 2 ** math.ceil(math.log2(max(1, clients / engines)))
    found = row.get(f"{batch}|{STEP_TOKENS}")
    if not isinstance(found, list) or found[0] is None or found[3]:
        return None
    active = min(clients, batch * engines) / (batch * layout.data_parallel_size)
    return [found[0], found[1], found[2] * active]


def compare(
    data: dict[str, Any],
    model: str,
    spec: ModelSpec,
    system: str,
    *,
    machine: tuple[int, int],
    clients: int,
    processes: bool,
) -> tuple[list[dict[str, Any]], list[Ratio]]:
    """Return both goals' cases of one question, and our predictions over AIConfigurator's, layout by layout."""
    gpu = load_catalog_entry(SYSTEMS[system]).gpu
    bits = spec.weight_bits if spec.quant_method else 16
    memory = MemoryRequest(
        model=spec, device_bytes=int(gpu.memory.value), num_devices=1, gpu_memory_utilization=SHARE_OF_MEMORY,
        max_num_batched_tokens=STEP_TOKENS, max_num_seqs=256, max_model_len=PROMPT + ANSWER,
    )  # fmt: skip
    question = LayoutQuestion(
        memory=memory, gpu=gpu, gpus_per_machine=machine[0], num_machines=machine[1], clients=clients,
        input_tokens=PROMPT, output_tokens=ANSWER, max_running=1024, expert_bits=bits,
        linear_bits=8 if spec.weights_are_fp8 else 16, weights=_WEIGHTS.get(spec.expert_format, ""),
        speeds=read_kernel_speeds(Path("/nonexistent")), processes=processes, more_api_servers=processes,
        prompt_graphs=processes,
    )  # fmt: skip
    cases: list[dict[str, Any]] = []
    ratios: list[Ratio] = []
    for goal, enough in GOALS.items():
        within = rank(question, goal, Limits(), allowed=_chosen_by_itself).within
        known = [(ours, theirs) for ours in within if (theirs := estimate(data, model, system, ours.layout, clients))]
        if not known:
            continue
        at = 2 if goal == "throughput" else 1
        best = (max if goal == "throughput" else min)(known, key=lambda pair: pair[1][at])
        ratio = known[0][1][at] / best[1][at]
        good = ratio >= enough if goal == "throughput" else ratio <= enough
        cases.append(
            {"model": model, "gpu": system, "gpus": machine[0] * machine[1], "clients": clients, "goal": goal,
             "chosen": known[0][0].layout.name, "best": best[0].layout.name, "ratio": round(ratio, 3), "good": good}
        )  # fmt: skip
        if goal == "throughput":
            gpus = machine[0] * machine[1]
            ratios += [Ratio(model, gpus, clients, o.tpot_ms / t[1], o.tokens_per_s / t[2]) for o, t in known]
    return cases, ratios


def _chosen_by_itself(layout: Layout) -> bool:
    copies = layout.data_parallel_size == 1 or layout.expert_parallel
    return copies and not layout.disaggregated


def differences(ratios: list[Ratio]) -> dict[str, float]:
    """Return by how much the two predictions differ on average."""
    return {
        "mean_difference_of_tpot": round(statistics.mean(abs(each.tpot - 1) for each in ratios), 3),
        "mean_difference_of_tokens_per_s": round(statistics.mean(abs(each.tokens_per_s - 1) for each in ratios), 3),
    }


def summary(cases: list[dict[str, Any]], errors: list[Ratio]) -> dict[str, Any]:
    """Return how many cases are well chosen, and the mean difference of the two predictions, by model and GPUs."""
    result: dict[str, Any] = {}
    for model in dict.fromkeys(case["model"] for case in cases):
        own = [case for case in cases if case["model"] == model]
        pairs = [each for each in errors if each.model == model]
        result[model] = {
            **{goal: f"{sum(c['good'] for c in own if c['goal'] == goal)} of {sum(c['goal'] == goal for c in own)}"
               for goal in GOALS},
            **differences(pairs),
            "from_32_clients_on": {
                gpus: differences([each for each in pairs if each.gpus == gpus and each.clients >= 32])
                for gpus in sorted({each.gpus for each in pairs})
            },
        }  # fmt: skip
    for goal in GOALS:
        own = [case for case in cases if case["goal"] == goal]
        result[goal] = f"{sum(case['good'] for case in own)} of {len(own)}"
    return result


if __name__ == "__main__":
    sys.exit(main())
