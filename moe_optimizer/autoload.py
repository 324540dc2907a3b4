"""The entry point that vLLM calls in each of its processes (group vllm.general_plugins).

vLLM swallows an exception while a plugin is imported and serves on as if the plugin were not there, so nothing
but the standard library is imported here, and everything that can fail is inside `register`. An exception in
there stops the process: that is wanted for a wrong plan, profile or variable, because the user asked for
something and would otherwise get stock vLLM in silence.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_optimizer.env import Environment
    from moe_optimizer.plan.plan import Plan
    from moe_optimizer.profiles import Profile
    from moe_optimizer.specs.hardware import HardwareSpec
    from moe_optimizer.vllm_plugin.server_facts import ServerFacts

_PREFIX = "MOE_OPTIMIZER_"
_DISABLE = "MOE_OPTIMIZER_DISABLE"
_NO = ("", "0", "false", "no", "off")


def register() -> None:
    """Apply the plan that the environment names, or one made from the profile it names. Harmless when repeated.

    With no MOE_OPTIMIZER_* variable, or with MOE_OPTIMIZER_DISABLE=1, it returns at once and vLLM is as stock.

    Raises:
        InputError: a variable, the plan file or the profile is wrong.
        RequiredNotAppliedError: the plan requires a pass that cannot be applied to this vLLM.
    """
    if os.environ.get(_DISABLE, "").strip().lower() not in _NO:
        return
    if not any(name.startswith(_PREFIX) for name in os.environ):
        return

    from moe_optimizer.env import read_environment
    from moe_optimizer.lifeline import watch_launcher
    from moe_optimizer.log import configure_inside_vllm

    configure_inside_vllm()
    watch_launcher()
    environment = read_environment()
    if environment.plan is not None:
        _apply_plan_file(environment.plan)
    elif environment.profile is not None:
        _plan_later(environment, environment.profile)


def _apply_plan_file(path: Path) -> None:
    from moe_optimizer.plan.plan import Plan
    from moe_optimizer.vllm_plugin.install import install_plan

    install_plan(Plan.load(path), run_dir=Path(os.path.realpath(path)).parent)


def _plan_later(environment: Environment, profile_name: str) -> None:
    """Have the plan made when vLLM builds its model: only then its configuration is known."""
    from moe_optimizer.env import PROFILE
    from moe_optimizer.errors import InputError
    from moe_optimizer.profiles import load_profile
    from moe_optimizer.vllm_plugin.install import install_later

    try:
        profile = load_profile(profile_name)
    except InputError as error:
        raise error.named_by(f"environment {PROFILE}") from None

    def make_plan(facts: ServerFacts) -> Plan:
        return plan_for_server(facts, profile, environment.hardware)

    install_later(make_plan, run_dir=_shared_run_dir(environment))


def _shared_run_dir(environment: Environment) -> Path:
    """Return the folder of this server's proofs; the first process names it for all that it starts."""
    if environment.run_dir is None:
        name = f"vllm-serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        os.environ["MOE_OPTIMIZER_RUN_DIR"] = str(Path("runs", name).resolve())
        return Path(os.environ["MOE_OPTIMIZER_RUN_DIR"])
    return Path(os.path.realpath(environment.run_dir))


def plan_for_server(facts: ServerFacts, profile: Profile, hardware: str | None) -> Plan:
    """Plan for a vLLM that is starting up, from what it says about itself.

    Raises:
        MoeOptimizerError: the model cannot be read or does not fit.
    """
    from moe_optimizer.inspection.activation_norms import read_activation_norms_file
    from moe_optimizer.inspection.expert_load import read_placement_load
    from moe_optimizer.inspection.hardware_probe import load_hardware, probe_hardware
    from moe_optimizer.inspection.layer_sensitivity import read_sensitivity_file
    from moe_optimizer.inspection.model_inspector import ModelInspector
    from moe_optimizer.inspection.software import read_software
    from moe_optimizer.plan.decision import Wish
    from moe_optimizer.plan.serve_args import ServeArguments
    from moe_optimizer.plan_context.request import PlanRequest
    from moe_optimizer.planner import make_plan

    software = read_software()
    if not software.tuned_configs_by_variable:
        # Only a variable makes vLLM look into a folder of the user's, and this server runs without.
        software = dataclasses.replace(software, tuned_configs=None)
    # What vLLM was started with is settled: the plan takes it as the user's own arguments.
    vllm_args = ["--tensor-parallel-size", str(facts.tensor_parallel_size)]
    vllm_args.append("--enable-expert-parallel" if facts.expert_parallel else "--no-enable-expert-parallel")
    model = ModelInspector(trust_remote_code=facts.trust_remote_code).inspect(facts.model)
    if facts.quantization is not None and model.quant_method is None:
        vllm_args += ["--quantization", facts.quantization]
    if facts.lora:
        vllm_args.append("--enable-lora")
    if facts.lora_targets is not None:
        vllm_args += ["--lora-target-modules", *facts.lora_targets]
    section = profile.passes.expert_placement
    num_gpus = facts.world_size if facts.device == "cuda" else None
    return make_plan(
        PlanRequest(
            model=model,
            hardware=load_hardware(hardware, num_gpus) if hardware else _of_all_workers(probe_hardware(), facts),
            software=software,
            profile=profile,
            num_gpus=num_gpus,
            # One server cannot become two, and none of the others may be planned for half of the machine.
            wishes=dict.fromkeys(("disaggregation", "replicas"), (Wish.OFF, "vllm serve, which is one server")),
            batch_size=facts.max_num_seqs,
            max_model_len=facts.max_model_len,
            any_model_len=True,
            inside_vllm=True,
            worker_threads=facts.worker_threads,
            vllm_args=ServeArguments(*vllm_args),
            trust_remote_code=facts.trust_remote_code,
            dtype=facts.dtype,
            expert_load=read_placement_load(section.load, section.load_check),
            fp8_sensitivity=read_sensitivity_file(profile.passes.fp8.sensitivity, "fp8"),
            four_bit_sensitivity=read_sensitivity_file(profile.passes.four_bit.sensitivity, "four_bit"),
            activation_norms=read_activation_norms_file(profile.passes.sparsity_24.activation_norms),
        )
    )


def _of_all_workers(probed: HardwareSpec, facts: ServerFacts) -> HardwareSpec:
    """Return the machine with at least one core per worker: vLLM binds each of its CPU workers to cores of its own, so
    a worker that looks around sees no others and would find its own server too large for the machine.
    """
    if probed.cpu is None or probed.cpu.cores >= facts.world_size:
        return probed
    # Which cores the others have is not known here, and nothing is bound to cores in a server that runs already.
    # Without its physical cores: with each worker's own, every worker would make another plan.
    core_ids = tuple(range(facts.world_size))
    cpu = dataclasses.replace(probed.cpu, cores=facts.world_size, core_ids=core_ids, physical_cores=())
    return dataclasses.replace(probed, cpu=cpu)
