"""Plans the memory of one device: weights, activations, workspace, and what is left for the key/value cache.

The terms follow vLLM's own start-up accounting: it may use gpu_memory_utilization * total, loads the weights,
measures the peak of one forward pass at max_num_batched_tokens and of one sampling step at max_num_seqs, and
subtracts what lies outside the tensor allocator and in CUDA graphs; the rest becomes the key/value cache. The
CUDA context itself is not in that budget: it lives in the share that the utilisation leaves free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moe_optimizer.costs.weights import device_weight_bytes, experts_on_device, kv_head_share, splits_over, weight_parts
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.specs.model import ModelSpec

MIB = 1024**2
GIB = 1024**3

MIN_KV_TOKENS = 2048
"""Cache tokens that a plan must leave when no sequence length is asked for (chosen: one short conversation)."""

# assumed: total memory that the driver reports minus what CUDA offers to a process, which is what vLLM multiplies
# by the utilisation. Public listings show 480 MiB (H100), 615 MiB (H200), 717 MiB (B200), up to 980 MiB (H100 NVL).
_DRIVER_RESERVE = 512 * MIB
# assumed: memory outside the tensor allocator. Public vLLM logs show 0.13 GiB on one GPU, 0.55 GiB with TP=2
# (NCCL channels and the custom all-reduce buffers).
_NON_TORCH_ONE = round(0.13 * GIB)
_NON_TORCH_GROUP = round(0.55 * GIB)
GRAPH_BYTES_PER_LAYER = 25 * MIB
"""Assumed: captured CUDA graphs. Public logs show 17 to 29 MiB a layer with vLLM's default sizes; an H100 took 13 MiB
for these, and 20 for those that plans add for prompts (benchmarks/records/2026-11-26_h100_balanced_chat.json)."""
# Seen on one worker of vLLM 0.32's CPU build after its warm-up: 0.69 GiB resident besides weights and cache.
_CPU_PROCESS = round(0.75 * GIB)
# Read from the source of vLLM 0.26 to 0.33: steps whose load EPLB keeps unless told otherwise, and the replicas of one
# expert that its tables have room for.
_EPLB_WINDOW = 1000
_EPLB_MOST_REPLICAS = 1024
_BLOCK_TOKENS = 16
"""vLLM's default size of a block of the cache on GPUs."""
# Read from vLLM 0.32's sampler: logits once in the model's dtype (half), and in FP32 the logits, the
# probabilities and the noise; half a copy more for the row buffers of its top-k kernel.
_SAMPLER_LOGIT_COPIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What `plan_memory` computes from."""

    model: ModelSpec
    device_bytes: int
    """Total memory of one device as the driver reports it; on the CPU build what one worker's NUMA node has,
    divided by the workers on that node."""
    num_devices: int
    """Devices that share one copy of the model (tensor parallel size)."""
    gpu_memory_utilization: float
    """Share of `device_bytes` that the server may use, in (0, 1]."""
    max_num_batched_tokens: int
    """Tokens of the largest forward pass."""
    max_num_seqs: int
    """Sequences sampled in one step."""
    max_model_len: int | None
    """Longest sequence that must fit the cache, as vLLM demands at start-up; None: MIN_KV_TOKENS must."""
    expert_bits: float | None = None
    """Bits of one routed-expert weight when converted at load time; None: as the checkpoint stores them."""
    linear_bits: float | None = None
    """The same for attention, dense MLP and shared-expert matrices."""
    kv_bits: float = 16
    """Bits of one cache element."""
    expert_parallel: bool = False
    """Whole experts on each device instead of a slice of every expert."""
    data_parallel_size: int = 1
    """Copies of everything but the routed experts, which the devices of all copies share, whole or in slices."""
    expert_copies: int | None = None
    """Further replicas of experts in each layer, all devices together; None: vLLM's load balancer (EPLB) is off."""
    pipeline_stages: int = 1
    """Groups of `num_devices` that hold successive layers (pipeline parallel size)."""
    draft_weight_bytes: int = 0
    """Weights of what drafts tokens, all devices together."""
    draft_kv_bytes_per_token: int = 0
    """Its cache, as `ModelSpec.kv_bytes_per_token`."""
    kernel_tokens: int = 0
    """Tokens of the largest forward that our CUDA kernels compute, whose buffers lie beside vLLM's own."""
    cuda_graphs: bool = True
    device: Literal["cuda", "cpu"] = "cuda"


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """Return the memory of the fullest device."""
    budget, weights = _budget(request), _weight_bytes(request)
    activations = activation_bytes(request)
    workspace = workspace_bytes(request)
    room = budget - weights - activations - workspace
    wanted = request.max_model_len if request.max_model_len is not None else MIN_KV_TOKENS
    splits, _ = splits_over(
        request.model,
        request.num_devices,
        expert_parallel=request.expert_parallel,
        data_parallel_size=request.data_parallel_size,
    )
    return MemoryPlan(
        total_bytes=request.device_bytes,
        budget_bytes=budget,
        weight_bytes=weights,
        activation_bytes=activations,
        workspace_bytes=workspace,
        kv_cache_bytes=max(0, room),
        kv_bytes_per_token=kv_bytes_per_token(request),
        kv_tokens=_kv_tokens(request, max(0, room)),
        fits=splits and room >= sequence_kv_bytes(request, wanted),
        num_devices=request.num_devices,
        ref=_ref(request),
    )


def cache_bytes(request: MemoryRequest) -> int:
    """Return the bytes that are left for the cache on the fullest device."""
    return max(0, _budget(request) - _weight_bytes(request) - activation_bytes(request) - workspace_bytes(request))


def sequence_kv_bytes(request: MemoryRequest, tokens: int, *, step_tokens: int | None = None) -> int:
    """Return the cache bytes that one sequence of `tokens` needs on one device, recurrent state included.

    A windowed layer keeps its window plus `step_tokens`, those of one forward pass that may all be of this sequence
    (None: the largest), as vLLM allocates them; all tokens of a model with chunks of attention, for which vLLM turns
    its hybrid cache manager off (read from vLLM 0.32's configuration).
    """
    attention = request.model.attention
    if not attention.num_attention_layers:
        return _state_bytes(request)
    windowed_tokens = tokens
    if attention.sliding_window is not None and not attention.chunked:
        step = request.max_num_batched_tokens if step_tokens is None else step_tokens
        windowed_tokens = min(tokens, attention.sliding_window + step)
    full_layers = attention.num_attention_layers - attention.num_windowed_layers
    layer_tokens = full_layers * tokens + attention.num_windowed_layers * windowed_tokens
    cache = math.ceil(kv_bytes_per_token(request) * layer_tokens / attention.num_attention_layers)
    return cache + _state_bytes(request)


def sequences_held(request: MemoryRequest, kv_cache_bytes: int, tokens: int) -> int:
    """Return how many decoding sequences of `tokens` a cache of one device holds."""
    return kv_cache_bytes // _decoding_kv_bytes(request, tokens)


def _decoding_kv_bytes(request: MemoryRequest, tokens: int) -> int:
    # Of a window vLLM keeps whole blocks, the first and the last of them in part.
    return max(1, sequence_kv_bytes(request, tokens, step_tokens=_BLOCK_TOKENS))


def kv_bytes_per_token(request: MemoryRequest) -> float:
    """Return the cache bytes of one token on one device, all layers together."""
    share = kv_head_share(request.model, request.num_devices) * _stage_share(request)
    both = request.model.kv_bytes_per_token + request.draft_kv_bytes_per_token
    return both * request.kv_bits / 16 * share


def activation_bytes(request: MemoryRequest) -> int:
    """Return the peak bytes of intermediate tensors on one device: the larger of forward pass and sampling.

    forward  = T * 2 bytes * (3 * hidden + the largest of
                 attention: 2 * (heads + 2 * kv_heads) * head_dim / n,
                 experts:   top_k * (max(2 * I / n, H) + I / n) + H, and beside it with our kernels
                            top_k * (I / n + H) + H for each token that they compute at once,
                 dense MLP: 3 * width / n)           with T = max_num_batched_tokens, n devices
    sampling = max_num_seqs * vocab * 4 bytes * 4
    """
    model, devices = request.model, request.num_devices
    element = 4 if model.dtype == "float32" else 2
    attention = model.attention
    heads = attention.num_heads / devices + 2 * attention.num_kv_heads * kv_head_share(model, devices)
    # With EP a device computes whole experts; the buffers still have a row for every (token, choice) pair.
    width = model.moe_intermediate_size / (1 if request.expert_parallel else devices * request.data_parallel_size)
    experts = model.top_k * (max(2 * width, model.expert_hidden_size) + width) + model.expert_hidden_size
    widest = max(2 * heads * attention.head_dim, experts, 3 * _dense_mlp_width(model) / devices)
    # vLLM reserves the buffers of its own experts for whoever computes a forward.
    own = min(request.kernel_tokens, request.max_num_batched_tokens) * element
    own *= model.top_k * (width + model.expert_hidden_size) + model.expert_hidden_size
    forward = request.max_num_batched_tokens * element * (3 * model.hidden_size + widest) + own
    sampling = request.max_num_seqs * model.vocab_size * 4 * _SAMPLER_LOGIT_COPIES
    return math.ceil(max(forward, sampling))


def workspace_bytes(request: MemoryRequest) -> int:
    """Return the bytes outside weights, activations and cache on one device."""
    if request.device == "cpu":
        return _CPU_PROCESS
    reserve = round(_DRIVER_RESERVE * request.gpu_memory_utilization)
    communication = _NON_TORCH_ONE if _alone(request) else _NON_TORCH_GROUP
    layers = math.ceil(request.model.num_layers * _stage_share(request))
    graphs = layers * GRAPH_BYTES_PER_LAYER if request.cuda_graphs else 0
    return reserve + communication + graphs + _load_balancer_bytes(request)


def _load_balancer_bytes(request: MemoryRequest) -> int:
    """Return what vLLM's EPLB keeps on a device besides replicas: room for the experts of one layer, which it moves
    through there, the load of its last steps, and where every replica is.
    """
    if request.expert_copies is None:
        return 0
    model, layers = request.model, request.model.num_moe_layers
    slots = model.num_experts + request.expert_copies
    parts = weight_parts(model, expert_bits=request.expert_bits, linear_bits=request.linear_bits)
    held = experts_on_device(model, request.num_devices * request.data_parallel_size, request.expert_copies)
    on_device = parts.experts * held / model.num_experts
    window = _EPLB_WINDOW * layers * slots * 4
    places = layers * model.num_experts * _EPLB_MOST_REPLICAS * 8
    return math.ceil(on_device / layers) + window + places


def _budget(request: MemoryRequest) -> int:
    return math.floor(request.device_bytes * request.gpu_memory_utilization)


def _weight_bytes(request: MemoryRequest) -> int:
    """Return the weights of the fullest device."""
    model = request.model
    parts = weight_parts(model, expert_bits=request.expert_bits, linear_bits=request.linear_bits)
    weights = device_weight_bytes(
        model,
        parts,
        num_devices=request.num_devices,
        expert_parallel=request.expert_parallel,
        data_parallel_size=request.data_parallel_size,
        expert_copies=request.expert_copies or 0,
    )
    # The first stage holds the embedding beside its layers, the last the head; each is counted on the fullest.
    vocabulary = parts.vocabulary / request.num_devices
    weights = math.ceil(vocabulary + (weights - vocabulary) * _stage_share(request))
    # What drafts is split like the model, and lies on the last stage.
    return weights + math.ceil(request.draft_weight_bytes / request.num_devices)


def _kv_tokens(request: MemoryRequest, kv_cache_bytes: int) -> int:
    # Recurrent state comes out of the same pool, once for each sequence that runs.
    held = kv_cache_bytes / _decoding_kv_bytes(request, request.max_model_len or MIN_KV_TOKENS)
    left = kv_cache_bytes - min(request.max_num_seqs, held) * _state_bytes(request)
    per_token = kv_bytes_per_token(request)
    return max(0, math.floor(left / per_token)) if per_token else 0


def _state_bytes(request: MemoryRequest) -> int:
    return math.ceil(request.model.state_bytes_per_sequence * _stage_share(request) / request.num_devices)


def _alone(request: MemoryRequest) -> bool:
    """Return whether a device serves without others that it exchanges anything with."""
    return request.num_devices * request.pipeline_stages * request.data_parallel_size == 1


def _stage_share(request: MemoryRequest) -> float:
    """Return the share of the layers that the fullest pipeline stage holds."""
    layers = request.model.num_layers
    return math.ceil(layers / request.pipeline_stages) / layers if layers else 1.0


def _dense_mlp_width(model: ModelSpec) -> float:
    """Return the width of the widest feed-forward part outside the routed experts, taken as one gated MLP a layer."""
    dense_layers = model.num_layers - model.num_moe_layers or model.num_layers
    dense = model.dense_params / dense_layers if dense_layers else 0.0
    shared = model.shared_expert_params / model.num_moe_layers if model.num_moe_layers else 0.0
    return max(dense, shared) / (3 * model.hidden_size)


def _ref(request: MemoryRequest) -> str:
    split, kind = f"weights split {request.num_devices} ways", "EP" if request.expert_parallel else "TP"
    if request.data_parallel_size > 1:
        split = "weights whole" if request.num_devices == 1 else split
        split = f"{split}, experts {request.num_devices * request.data_parallel_size} ways ({kind})"
    else:
        split = "weights on one device" if request.num_devices == 1 else f"{split} ({kind})"
    stages = f" in each of {request.pipeline_stages} pipeline stages" if request.pipeline_stages > 1 else ""
    if request.device == "cpu":
        workspace = "0.75 GiB for the worker process"
    else:
        group = "0.13 GiB" if _alone(request) else "0.55 GiB"
        graphs = "25 MiB a layer of CUDA graphs" if request.cuda_graphs else "no CUDA graphs"
        balancer = "" if request.expert_copies is None else ", EPLB's tables and one layer's experts on their way"
        workspace = f"driver reserve 0.5 GiB, {group} outside the allocator, {graphs}{balancer}"
    copies = "" if request.expert_copies is None else f" with {request.expert_copies} replicas of experts in each layer"
    return (
        f"modelled after vLLM's start-up accounting: "
        f"{split}{stages}{copies}; "
        f"activations = max(forward at {request.max_num_batched_tokens} tokens, "
        f"sampling {request.max_num_seqs} x vocabulary in FP32 x {_SAMPLER_LOGIT_COPIES}); "
        f"workspace assumed: {workspace}"
    )
