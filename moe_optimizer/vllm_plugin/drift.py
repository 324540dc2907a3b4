"""Compares the places in vLLM that this package builds on (seams) with the installed one, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from moe_optimizer.vllm_plugin import compat
from moe_optimizer.vllm_plugin.experts.gpt_oss_choice import GPT_OSS_CHOICE, GPT_OSS_LOADED
from moe_optimizer.vllm_plugin.experts.int4_choice import INT4_CHOICE, INT4_LOADED
from moe_optimizer.vllm_plugin.experts.kernel_choice import FP8_ORACLE, UNQUANTIZED_ORACLE
from moe_optimizer.vllm_plugin.experts.layerwise_loading import LAYERWISE_LOADING
from moe_optimizer.vllm_plugin.experts.lora import MOE_LAYER_CONFIG
from moe_optimizer.vllm_plugin.experts.online_fp8_quantizer import ONLINE_FP8_QUANTIZER
from moe_optimizer.vllm_plugin.patch import Patch, probe
from moe_optimizer.vllm_plugin.placement.expert_placement import ROUTED_EXPERTS
from moe_optimizer.vllm_plugin.worker.compilations import JIT_EVENTS
from moe_optimizer.vllm_plugin.worker.draft_sampling import DRAFT_SAMPLING
from moe_optimizer.vllm_plugin.worker.execute_model import WORKER_EXECUTE_MODEL
from moe_optimizer.vllm_plugin.worker.half_batches import HALF_BATCH_METADATA
from moe_optimizer.vllm_plugin.worker.model_loaded import WORKER_MODEL_LOADED


class SeamStatus(Enum):
    """Whether a seam is as this package knows it."""

    PRESENT = "present"
    CHANGED = "changed"
    """It is there, but differs from every known version: what builds on it is not applied."""
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One place in vLLM that this package builds on, as found."""

    name: str
    status: SeamStatus
    detail: str
    why: str
    """What this package needs it for."""
    remove_when: str
    """When this package stops needing it."""


_Look = Callable[[Path], tuple[SeamStatus, str]]


@dataclass(frozen=True, slots=True)
class _Known:
    """A seam and how to look for it."""

    name: str
    look: _Look
    why: str
    remove_when: str = "stays: a public interface"


def probe_seams(root: Path | None = None) -> tuple[Seam, ...]:
    """Return every seam with its state in the vLLM package folder `root`; default: the installed one.

    Without vLLM every seam is gone.
    """
    root = compat.vllm_root() if root is None else root
    return tuple(_probe(known, root) for known in _SEAMS)


def _probe(known: _Known, root: Path | None) -> Seam:
    if root is None:
        status, detail = SeamStatus.GONE, "vLLM is not installed"
    else:
        try:
            status, detail = known.look(root)
        except FileNotFoundError as error:
            status, detail = SeamStatus.GONE, f"{Path(str(error.filename)).name} is gone"
        except (OSError, SyntaxError) as error:
            status, detail = SeamStatus.CHANGED, f"cannot be read: {error}"
    return Seam(name=known.name, status=status, detail=detail, why=known.why, remove_when=known.remove_when)


def _patched(patches: Sequence[Patch], root: Path) -> tuple[SeamStatus, str]:
    """Look for the source that the first patch whose module is there was written for: a target may have moved."""
    there = (patch for patch in patches if compat.module_path(root, patch.module).is_file())
    patch = next(there, patches[-1])
    path = compat.module_path(root, patch.module)
    source = compat.definition_source(path, patch.name)
    if source is None:
        return SeamStatus.GONE, f"{patch.name} is gone"
    mismatch = probe(patch, path)
    if mismatch:
        return SeamStatus.CHANGED, mismatch
    digest = compat.fingerprint(source)
    versions = [version for version, known in patch.fingerprints.items() if known == digest]
    return SeamStatus.PRESENT, f"source {digest}, as in vLLM {', '.join(versions)}"


def _abstract_methods(root: Path) -> tuple[SeamStatus, str]:
    """Look for abstract methods of the experts interface that our classes do not define."""
    path = compat.module_path(root, "vllm.model_executor.layers.fused_moe.modular_kernel")
    asked: set[str] = set()
    for name in ("FusedMoEExperts", "FusedMoEExpertsModular"):
        source = compat.definition_source(path, name)
        if source is None:
            return SeamStatus.GONE, f"{name} is gone"
        asked |= _abstract_names(source)
    unknown = asked - PROVIDED_METHODS
    if unknown:
        return SeamStatus.CHANGED, f"new abstract methods: {', '.join(sorted(unknown))}"
    return SeamStatus.PRESENT, f"{len(asked)} abstract methods, all provided"


PROVIDED_METHODS = frozenset(
    {
        "activation_format",
        "_supports_current_device",
        "_supports_no_act_and_mul",
        "_supports_quant_scheme",
        "_supports_activation",
        "_supports_parallel_config",
        "workspace_shapes",
        "finalize_weight_and_reduce_impl",
        "apply",
    }
)
"""The abstract methods of vLLM's experts interface that our experts classes define."""


def _abstract_names(class_source: str) -> set[str]:
    (definition,) = ast.parse(class_source).body
    assert isinstance(definition, ast.ClassDef), class_source[:80]
    return {
        method.name
        for method in definition.body
        if isinstance(method, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "abstractmethod" for mark in method.decorator_list)
    }


def _defined(target: str, *arguments: str) -> _Look:
    """Look for the name of "module:name", and for a function that it takes `arguments` first."""
    module, _, name = target.partition(":")

    def look(root: Path) -> tuple[SeamStatus, str]:
        source = compat.definition_source(compat.module_path(root, module), name)
        if source is None:
            return SeamStatus.GONE, f"{name} is gone from {module}"
        (definition,) = ast.parse(source).body
        if arguments and isinstance(definition, ast.FunctionDef):
            found = tuple(argument.arg for argument in definition.args.args)[: len(arguments)]
            if found != arguments:
                return SeamStatus.CHANGED, f"{name} takes ({', '.join(found)}), known is ({', '.join(arguments)})"
        return SeamStatus.PRESENT, target

    return look


def _word(module: str, word: str, found: str, root: Path) -> tuple[SeamStatus, str]:
    """Look for a quoted word in a module's source."""
    if f'"{word}"' in compat.module_path(root, module).read_text(encoding="utf-8"):
        return SeamStatus.PRESENT, found
    return SeamStatus.GONE, f"not in {module}"


def _patch(name: str, *versions: Patch) -> _Known:
    return _Known(name, partial(_patched, versions), versions[-1].why, versions[-1].remove_when)


def _flag(flag: str, why: str) -> _Known:
    return _Known(flag, partial(_word, "vllm.engine.arg_utils", flag, "argument of vllm serve"), why)


_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
_CACHE_KEY = "vLLM's compile cache key covers the experts class"
_SEAMS = (
    _Known(
        "general plugins",
        _defined("vllm.plugins:load_general_plugins"),
        "vLLM loads this package in each of its processes",
    ),
    _patch("unquantized kernel choice", UNQUANTIZED_ORACLE),
    _patch("fp8 kernel choice", FP8_ORACLE),
    _patch("MoE layers with LoRA adapters", MOE_LAYER_CONFIG),
    _patch("gpt-oss kernel choice", GPT_OSS_CHOICE),
    _patch("gpt-oss loaded weights", GPT_OSS_LOADED),
    _patch("INT4 kernel choice", INT4_CHOICE),
    *(_patch(f"INT4 loaded weights ({method})", *versions) for method, versions in INT4_LOADED.items()),
    _patch("unquantized experts' weights", LAYERWISE_LOADING),
    _Known(
        "layerwise loading",
        _defined(f"{_LAYERWISE}:initialize_online_processing", "layer"),
        "a layer whose experts are converted is finished while the next ones are loaded",
    ),
    _Known(
        "new weights in place",
        _defined(f"{_LAYERWISE}:_copy_and_restore_kernel_tensors"),
        "new weights of converted experts are copied into the parameters that compiled graphs read",
    ),
    _Known(
        "a worker's weights change",
        _defined("vllm.v1.worker.gpu_worker:Worker.reload_weights"),
        "the experts are tried again after it, and scales that they keep in another form are rewritten",
        remove_when="vLLM tells a plugin when weights have changed",
    ),
    _patch("online FP8 quantiser", ONLINE_FP8_QUANTIZER),
    _Known(
        "routed experts callback",
        _defined(f"{_FUSED_MOE}.router.base_router:BaseRouter.set_capture_fn", "self", "capture_fn"),
        "tokens are counted per expert in it",
    ),
    _patch("a worker's model is loaded", WORKER_MODEL_LOADED),
    _patch("a worker's step", WORKER_EXECUTE_MODEL),
    _patch("sampling of drafts on the CPU build", DRAFT_SAMPLING),
    _patch("metadata of half batches", HALF_BATCH_METADATA),
    _patch("monitor of compilations", JIT_EVENTS),
    _patch("a layer's expert map", ROUTED_EXPERTS),
    _Known("experts interface", _abstract_methods, "the experts classes implement it"),
    _Known(
        "Triton experts",
        _defined(f"{_FUSED_MOE}.experts.triton_moe:TritonExperts"),
        "compute the batch sizes at which our CUDA kernels do not win",
    ),
    _Known(
        "output of the experts",
        _defined(
            f"{_FUSED_MOE}.topk_weight_and_reduce:TopKWeightAndReduceNoOP.apply",
            "self",
            "output",
            "fused_expert_output",
        ),
        "our CUDA kernels write there instead of into vLLM's workspace",
    ),
    _Known(
        "FP8 activations",
        _defined(
            f"{_FUSED_MOE}.utils:moe_kernel_quantize_input",
            "A",
            "A_scale",
            "quant_dtype",
            "per_act_token_quant",
            "block_shape",
        ),
        "quantises the activations for vLLM's FP8 experts where our class hands them a forward",
    ),
    _Known(
        "compile cache factors",
        _defined("vllm.envs:compile_factors"),
        "keeps compiled graphs with our kernel apart from those of stock vLLM",
        _CACHE_KEY,
    ),
    _Known(
        "environment table",
        _defined("vllm.envs:environment_variables"),
        "the compile cache factors are read from it",
        _CACHE_KEY,
    ),
    _flag("--moe-backend", "vLLM's choice of a MoE backend"),
    _flag("--kv-cache-dtype", "key/value cache in FP8"),
    _flag("--enable-eplb", "expert load balancing"),
    _flag("--eplb-config", "expert load balancing"),
    _flag("--expert-placement-strategy", "where experts live"),
    _flag("--enable-dbo", "dual batch overlap"),
    _flag("--kv-offloading-size", "key/value cache tiering"),
    _flag("--performance-mode", "scheduler defaults"),
    _flag("--all2all-backend", "expert parallel communication"),
    _flag("--shutdown-timeout", "requests are finished before a stop"),
    _Known(
        "VLLM_TUNED_CONFIG_FOLDER",
        partial(_word, "vllm.envs", "VLLM_TUNED_CONFIG_FOLDER", "environment variable"),
        "tuned Triton configurations",
    ),
    _Known(
        "EPLB policies",
        _defined("vllm.distributed.eplb.policy:EPLB_POLICIES"),
        "our expert placement takes the place of the default policy",
        remove_when="vLLM's flag takes policies from outside, also while experts are moved in the background",
    ),
)
