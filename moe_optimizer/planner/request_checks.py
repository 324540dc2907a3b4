"""Refuses requests for a plan that contradict themselves, or that no machine could satisfy."""

from __future__ import annotations

import re

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.passes.registry import required_key
from moe_optimizer.plan.decision import Wish
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan_context.request import PlanRequest
from moe_optimizer.plan_context.routed_servers import UNSAFE_FLAGS, UNSAFE_FLAGS_APART

ALLOW_LONG_MODEL_LEN = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""vLLM's own switch for lengths beyond the model's."""
_FP8_ISA = "amx_tile"
"""What vLLM's CPU kernels for FP8 weights ask of a processor (0.32)."""
_NOT_PLANNED = {
    "--model": "the model is given by --model before --",
    "--config": "a file would change what was planned; give its entries as flags after --",
    "--uds": "the server is watched and proven over --host and --port",
    "--headless": "a server without an address can be neither watched nor proven",
    "--grpc": "the server is watched and proven over HTTP",
    "--nnodes": "moe-optimizer plan --nodes N plans for several machines, and prints what starts them",
    "--node-rank": "moe-optimizer plan --nodes N plans for several machines, and prints what starts them",
    "--data-parallel-rank": "one server with all its replicas is planned, not one of several",
    "--data-parallel-size-local": "all replicas are planned on one machine",
    "--data-parallel-start-rank": "all replicas are planned on one machine",
    "--data-parallel-external-lb": "one server with all its replicas is planned, not one of several",
    "--data-parallel-hybrid-lb": "all replicas are planned on one machine",
    "--data-parallel-multi-port-external-lb": "one server with all its replicas is planned, not one of several",
    "--api-key": "every user of a machine can read its command lines; put the key into VLLM_API_KEY in the environment",
}
"""Arguments of `vllm serve` that would start another server than is planned, or put a secret into the plan."""


_GIVEN = r"(?!false$).*"
_NEGATED = r"false"
_ZERO = r"0"
_FP8 = r".*fp8.*"
_NOT_FP8 = r"(?!.*fp8).*"
_NOT_DEEP_EP = r"(?!deepep).*"
_NOT_TRITON = r"(?!(auto|triton)$).*"
_CONTRADICTING_ARGUMENTS: tuple[tuple[str, Wish, str, str], ...] = (
    ("graph_capture", Wish.ON, "--enforce-eager", _GIVEN),
    ("graph_capture", Wish.ON, "--optimization-level", _ZERO),
    ("graph_capture", Wish.ON, "--max-cudagraph-capture-size", _ZERO),
    ("kv_cache", Wish.OFF, "--kv-cache-dtype", _FP8),
    ("kv_cache", Wish.ON, "--kv-cache-dtype", _NOT_FP8),
    ("kv_cache.tiering", Wish.OFF, "--kv-offloading-size", _GIVEN),
    ("kv_cache.tiering", Wish.ON, "--enable-prefix-caching", _NEGATED),
    ("kv_cache.tiering", Wish.ON, "--kv-transfer-config", _GIVEN),
    ("parallelism", Wish.OFF, "--tensor-parallel-size", _GIVEN),
    ("parallelism", Wish.OFF, "--data-parallel-size", _GIVEN),
    ("parallelism.expert_parallel", Wish.OFF, "--enable-expert-parallel", _GIVEN),
    ("parallelism.expert_parallel", Wish.ON, "--enable-expert-parallel", _NEGATED),
    ("dual_batch_overlap", Wish.OFF, "--enable-dbo", _GIVEN),
    ("dual_batch_overlap", Wish.ON, "--enable-dbo", _NEGATED),
    ("dual_batch_overlap", Wish.ON, "--all2all-backend", _NOT_DEEP_EP),
    ("expert_placement", Wish.OFF, "--enable-eplb", _GIVEN),
    ("expert_placement", Wish.ON, "--enable-eplb", _NEGATED),
    ("expert_load", Wish.ON, "--enable-return-routed-experts", _GIVEN),
    ("expert_load", Wish.ON, "--enable-dbo", _GIVEN),
    ("flash_dmoe", Wish.ON, "--moe-backend", _NOT_TRITON),
    ("fp8", Wish.OFF, "--quantization", _FP8),
    ("fp8", Wish.ON, "--quantization", _GIVEN),
    ("fp8", Wish.ON, "--quantization-config", _GIVEN),
    ("four_bit", Wish.ON, "--quantization", _GIVEN),
    ("sparsity_24", Wish.ON, "--quantization", _GIVEN),
    *(("disaggregation", Wish.ON, flag, _GIVEN) for flag in UNSAFE_FLAGS_APART),
    *(("replicas", Wish.ON, flag, _GIVEN) for flag in UNSAFE_FLAGS),
)
"""A wish by flag, an argument of `vllm serve`, and the values of it that say the opposite."""


def check_request(request: PlanRequest) -> None:
    """Refuse what no machine could make a plan of.

    Raises:
        InputError: a value is wrong, or two of them contradict each other.
        UnsupportedError: this version or the model cannot do what is asked.
    """
    given = request.vllm_args
    if request.engine == "embedded" and request.num_nodes > 1:
        raise UnsupportedError(f"--nodes {request.num_nodes}: the embedded engine runs on one machine")
    if request.model.needs_remote_code and not (request.trust_remote_code or "--trust-remote-code" in given):
        raise UnsupportedError(
            f"{request.model.name}: its configuration wants to run code of its own (auto_map)",
            hint="read that code, then add --trust-remote-code",
        )
    if request.model.servable is False:
        raise UnsupportedError(f"{request.model.name}: {request.model.servable_reason}")
    _check_one_planned_server(given)
    _check_drafts(given)
    numbers = {"--gpus": request.num_gpus, "--batch-size": request.batch_size, "--max-model-len": request.max_model_len}
    for flag, value in numbers.items():
        if value is not None and value < 1:
            raise InputError(f"{flag}: got {value}, expected at least 1")
    _check_model_len(request)
    if not request.host.strip():
        raise InputError(f"--host: got {request.host!r}, expected an address")
    if not 0 < request.port < 2**16:
        raise InputError(f"--port: got {request.port}, expected 1 to {2**16 - 1}")
    if given.is_on("--enable-expert-parallel") and not request.model.is_moe:
        raise UnsupportedError(f"--enable-expert-parallel: {request.model.name} has no experts")
    _check_contradictions(request)
    _check_batch_size_is_used(request)


def _check_one_planned_server(given: ServeArguments) -> None:
    for flag, reason in _NOT_PLANNED.items():
        if flag in given:
            raise InputError(f"vllm arguments: {flag}: {reason}")
    for flag, kind in (("--pipeline-parallel-size", "pipeline"), ("--prefill-context-parallel-size", "context")):
        if given.value(flag) not in (None, "1"):
            raise UnsupportedError(f"{flag}: {kind} parallelism is not available in this version")


def _check_drafts(given: ServeArguments) -> None:
    """Refuse what vLLM would end on only after minutes: it reads this configuration late."""
    flag = "--speculative-config"
    text = given.value(flag)
    if text not in (None, "None") and given.json_object(flag) is None:
        raise InputError(
            f"{flag}: got {text!r:.80}, expected a JSON object",
            hint='for example {"method": "ngram", "num_speculative_tokens": 4}',
        )


def _check_model_len(request: PlanRequest) -> None:
    """Refuse a length with which vLLM would end at once; its overrides may change the model's own."""
    most, given = request.model.max_model_len, request.vllm_args
    if not most or request.any_model_len or "--hf-overrides" in given or "--rope-scaling" in given:
        return
    asked = request.max_model_len
    if given.value("--max-model-len") not in (None, "auto", "-1"):
        asked = given.count("--max-model-len")
    if asked is not None and asked > most:
        way = f"{ALLOW_LONG_MODEL_LEN}=1 in the environment lets vLLM go beyond what the model was made for"
        raise InputError(
            f"--max-model-len: got {asked}, expected at most the {most} tokens of {request.model.name}",
            hint=None if request.engine == "embedded" else way,
        )


def _check_contradictions(request: PlanRequest) -> None:
    for name in request.required:
        wish, origin = request.wishes.get(required_key(name), (Wish.AUTO, ""))
        if wish is Wish.OFF:
            raise InputError(f"{name} is required, and {origin} switches it off", hint="give one of them")
    for name, section in request.profile.passes:
        wish, origin = request.wishes.get(name, (Wish(section.mode), f"profile {request.profile.name}"))
        if section.required and wish is Wish.OFF:
            raise InputError(f"profile {request.profile.name} requires {name}, and {origin} switches it off")


def check_arguments(request: PlanRequest) -> None:
    """Refuse arguments of `vllm serve` that say the opposite of a flag.

    Args:
        request: with the wishes of a pinned layout.

    Raises:
        InputError: with both.
    """
    for key, wanted, flag, opposite in _CONTRADICTING_ARGUMENTS:
        wish, origin = request.wishes.get(key, (None, ""))
        # The kill switch in the environment switches this package off, not the user's own arguments.
        value = request.vllm_args.value(flag)
        if (
            wish is wanted
            and origin.startswith("flag ")
            and value is not None
            and re.fullmatch(opposite, value, re.DOTALL)
        ):
            asked = f"--no-{flag.removeprefix('--')}" if value == "false" else f"{flag} {value}".rstrip()
            raise InputError(
                f"{origin.removeprefix('flag ')} and {asked:.80} after -- contradict each other",
                hint="give one of them",
            )


def _check_batch_size_is_used(request: PlanRequest) -> None:
    profile = (Wish(request.profile.passes.scheduler.mode), f"profile {request.profile.name}")
    wish, origin = request.wishes.get("scheduler", profile)
    # The kill switch in the environment switches this package off, and with it what the batch size is for.
    if request.batch_size is not None and wish is Wish.OFF and origin.startswith(("flag ", "profile ")):
        raise InputError(
            f"--batch-size {request.batch_size} and {origin.removeprefix('flag ')} contradict each other: the "
            "scheduler pass is what gives vLLM the batch size",
            hint="give one of them, or --enable-scheduler",
        )


def check_for_device(request: PlanRequest, device: str) -> None:
    """Refuse a checkpoint and arguments with which vLLM's build for this device would end.

    Raises:
        UnsupportedError: with what it is.
    """
    if device != "cpu" or request.engine != "vllm":
        return
    quantization = request.vllm_args.value("--quantization") or ""
    if "fp8" in quantization:
        raise UnsupportedError(
            f"--quantization {quantization}: vLLM's CPU build has no FP8 kernels, the server would end",
            hint="leave it out; --enable-fp8 is this package's own way",
        )
    model, isa = request.model, request.hardware.cpu.isa if request.hardware.cpu else ()
    if model.weights_are_fp8 and (model.weight_block is None or _FP8_ISA not in isa):
        found = "scales of another kind" if model.weight_block is None else f"a processor without {_FP8_ISA}"
        raise UnsupportedError(
            f"{model.name}: vLLM's CPU build reads FP8 checkpoints with scales per block on processors with "
            f"{_FP8_ISA} only, found {found}; the server would end",
            hint="serve the checkpoint in BF16; --enable-fp8 converts its experts",
        )
