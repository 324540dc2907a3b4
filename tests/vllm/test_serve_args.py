"""Every argument that a plan gives to `vllm serve` is taken by vLLM's own parser and EngineArgs; no engine starts."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import DoesNotFitError, UnsupportedError
from moe_optimizer.inspection.hardware_probe import load_hardware
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.passes.registry import resolve_wishes, switches
from moe_optimizer.plan.machine_commands import render_machines
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.planner import PlanRequest, make_plan
from moe_optimizer.profiles import load_profile, profile_names
from moe_optimizer.specs.hardware import HardwareSpec
from moe_optimizer.specs.model import ModelSpec
from tests.builders import profile_with, software
from tests.golden.stored import PLANS
from tests.vllm.conftest import ROOT

TINY_MOE = str(ROOT / "examples" / "tiny-moe")
"""EngineArgs look for the model; of it only the name matters here."""
CONFIGS = ROOT / "tests" / "data" / "model_configs"
# Published configurations, one of each way in which experts, attention or weights differ.
MODELS = (
    "qwen3_moe", "qwen3_next", "mixtral", "deepseek_v3", "kimi_k2", "gpt_oss", "glm4_moe", "llama4", "olmoe",
    "granitemoe", "hunyuan", "minimax_m2",
)  # fmt: skip
GPUS = (1, 2, 8, 16)
FEWEST = 5
"""Of the 16 plans of a model, so many at least must be possible: DeepSeek's needs eight GPUs and more."""


@pytest.fixture(scope="module")
def parse() -> Callable[[Sequence[str]], Any]:
    """vLLM's arguments as the engine gets them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # pyrefly: ignore[missing-import] - 0.26
    parser = make_arg_parser(FlexibleArgumentParser())

    def parse(arguments: Sequence[str]) -> Any:
        try:
            parsed: Any = parser.parse_args(["--model", TINY_MOE, *arguments])
        except SystemExit:
            pytest.fail(f"vLLM does not take {arguments}")
        return AsyncEngineArgs.from_cli_args(parsed)

    return parse


def inspected(name: str, folder: Path) -> ModelSpec:
    model = folder / name
    model.mkdir()
    shutil.copy(CONFIGS / f"{name}.json", model / "config.json")
    return ModelInspector(trust_remote_code=True).inspect(model)


def machines(count: int) -> tuple[HardwareSpec, int]:
    """H200s, at most eight in a machine; and how many machines."""
    return load_hardware("h200", min(count, 8)), -(-count // 8)


def argument_lists(plan: Plan) -> Iterator[ServeArguments]:
    yield plan.plain_args
    if plan.group is None:
        yield plan.serve_args
    else:
        yield from (server.serve_args for server in plan.group.servers)


def test_there_are_golden_plans() -> None:
    assert PLANS


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
@pytest.mark.parametrize("key", ["serve_args", "plain_args"])
def test_vllm_parses_the_arguments_of_a_golden_plan(
    path: Path, key: str, parse: Callable[[Sequence[str]], Any]
) -> None:
    parse(json.loads(path.read_text(encoding="utf-8"))[key])


@pytest.mark.parametrize("name", MODELS)
def test_vllm_takes_every_plan_of_a_model(name: str, tmp_path: Path, parse: Callable[[Sequence[str]], Any]) -> None:
    model, planned = inspected(name, tmp_path), 0
    for profile in profile_names():
        for count in GPUS:
            hardware, nodes = machines(count)
            request = PlanRequest(
                model=model, hardware=hardware, software=software(), profile=load_profile(profile), num_gpus=count,
                num_nodes=nodes, trust_remote_code=True,
            )  # fmt: skip
            try:
                plan = make_plan(request)
            except DoesNotFitError:
                continue
            planned += 1
            for arguments in argument_lists(plan):
                taken = parse(arguments.words)
                # What was planned is what the engine would be told, not only words that parse.
                assert taken.tensor_parallel_size == plan.parallelism.tensor_parallel_size
                assert taken.pipeline_parallel_size == plan.parallelism.pipeline_parallel_size
                asked = arguments.value("--max-num-seqs")
                assert asked is None or taken.max_num_seqs == int(asked)
    assert planned >= FEWEST, f"{name}: only {planned} of {len(GPUS) * len(profile_names())} plans are possible"


def test_vllm_starts_the_copies_of_each_of_two_machines(tmp_path: Path, parse: Callable[[Sequence[str]], Any]) -> None:
    profile = profile_with(passes={"parallelism": {"across_nodes": "data_parallel"}})
    request = PlanRequest(
        model=inspected("deepseek_v3", tmp_path), hardware=load_hardware("h100_sxm", 8), software=software(),
        profile=profile, num_gpus=16, num_nodes=2, trust_remote_code=True,
    )  # fmt: skip
    text = render_machines(make_plan(request)).replace("\\\n", " ")
    first, other = (parse(shlex.split(line)[3:]) for line in text.splitlines() if line.startswith("vllm serve"))
    assert first.data_parallel_size == other.data_parallel_size == 2 * first.data_parallel_size_local
    assert other.data_parallel_start_rank == first.data_parallel_size_local
    assert first.data_parallel_address == other.data_parallel_address == "HEAD"


def test_vllm_reads_the_fusion_of_norms_and_rope_as_a_field_of_its_compilation(
    tmp_path: Path, parse: Callable[[Sequence[str]], Any]
) -> None:
    request = PlanRequest(
        model=inspected("qwen3_moe", tmp_path), hardware=load_hardware("h100_sxm", 1), software=software(),
        profile=load_profile("balanced"), wishes=resolve_wishes(["norm-rope-fusion"], []),
    )  # fmt: skip
    taken = parse(make_plan(request).serve_args.words).compilation_config
    # On a CPU vLLM switches it off again when it has read it; that there is such a field is what it must say.
    assert "enable_qk_norm_rope_fusion" in vars(taken.pass_config)
    with pytest.raises(Exception, match="another"):
        type(taken.pass_config)(another=True)


DATA_AND_EXPERT_PARALLEL = {"parallelism": {"data_parallel_size": 2, "expert_parallel": "on"}}


@pytest.mark.parametrize("flag", [switch.flag for switch in switches()])
@pytest.mark.parametrize("side", ["enable", "disable"])
@pytest.mark.parametrize("passes", [{}, DATA_AND_EXPERT_PARALLEL], ids=["", "dp-ep"])
def test_vllm_takes_the_plan_of_every_switch(
    flag: str, side: str, passes: dict[str, Any], tmp_path: Path, parse: Callable[[Sequence[str]], Any]
) -> None:
    wishes = resolve_wishes([flag], []) if side == "enable" else resolve_wishes([], [flag])
    request = PlanRequest(
        model=inspected("qwen3_moe", tmp_path), hardware=load_hardware("h200", 8), software=software(),
        profile=profile_with(passes=passes), wishes=wishes,
    )  # fmt: skip
    try:
        plan = make_plan(request)
    except UnsupportedError as error:
        pytest.skip(f"no plan: {error}")
    for arguments in argument_lists(plan):
        parse(arguments.words)
