"""Defines the params of each pass: what carries out its decision, and the passes after it, need to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moe_optimizer.specs.kernel_speeds import STOCK, SpeedQuestion, TokenRange, kernel_for
from moe_optimizer.specs.triton_shape import TritonShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationParams:
    """Prefill and decode in separate servers."""

    prefill_servers: int
    decode_servers: int
    connector: str
    """vLLM's name of the KV connector between them."""

    @property
    def num_servers(self) -> int:
        """Servers of both kinds."""
        return self.prefill_servers + self.decode_servers


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasParams:
    """Several whole servers."""

    num_servers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelismParams:
    """How the devices of one server share the model."""

    tensor_parallel_size: int
    """Devices that share each layer."""
    data_parallel_size: int
    """Copies of the attention part."""
    expert_parallel: bool
    """Whether experts are divided whole."""
    pipeline_parallel_size: int = 1
    """Machines that hold successive layers."""
    replicas: int = 1
    """Servers over several machines that know nothing of each other; the machines have equally many."""
    machines_of_copies: int = 1
    """Machines over which the copies of one server lie, equally many on each."""

    @property
    def num_devices(self) -> int:
        """Devices that hold every layer once; under expert parallelism the experts are divided between them."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def machines_of_server(self) -> int:
        """Machines of one server; 1 where it has a machine or a part of one."""
        return self.pipeline_parallel_size * self.machines_of_copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Params:
    """Weights that are converted to FP8 while loading."""

    weight_format: str | None
    """The plugin's format for the experts; None: vLLM converts."""
    granularity: Literal["block", "channel"]
    """Weights that share a scale."""
    quantizer: str
    excluded_layers: tuple[int, ...]
    """Decoder layers that stay as loaded."""
    max_layer_error: float | None
    """Change of a layer's output above which the plugin leaves the layer as loaded; None: it does not measure it."""
    expert_bits: int | None
    """Bits of a converted expert weight; None: the experts stay as loaded."""
    linear_bits: int | None
    """The same for the other matrices."""
    stored_expert_bits: float | None
    """Bits of an expert weight on average, with kept layers and padding; None: the experts stay as loaded."""
    stored_linear_bits: float | None
    """The same for the other matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparsity24Params:
    """Experts that are pruned while loading."""

    weight_format: str
    """The plugin's format for the experts."""
    stored_expert_bits: float
    activation_norms: str | None
    """Absolute path of the measured norms; None: the magnitude of a weight alone decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitParams:
    """Experts that are converted to four bits while loading."""

    weight_format: str
    """The plugin's format for the experts."""
    group: int
    """Columns that share a scale."""
    excluded_layers: tuple[int, ...]
    """Decoder layers whose experts stay as loaded."""
    max_layer_error: float | None
    """Change of a layer's output above which the plugin leaves the layer as loaded; None: it does not measure it."""
    stored_expert_bits: float
    """Bits of an expert weight on average, with scales and kept layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashDmoeParams:
    """Which kernel computes the experts."""

    kernel: Literal["cpu", "cuda"] | None
    """Ours for which device; None: vLLM's own."""
    dispatch: Mapping[str, tuple[TokenRange, ...]] = field(default_factory=dict)
    """On GPUs, how the weights are stored -> which kernel computes how many tokens."""
    measure: tuple[SpeedQuestion, ...] = ()
    """Questions about speed that no table answers, or not to the end; `serve` measures them before it starts."""
    fused_router: int = 0
    """On GPUs, tokens of a forward up to which one launch multiplies the gate and chooses the experts; 0: vLLM does."""
    threads: int | None = None
    """Threads of a CPU worker with which ours was measured to be faster; None: another reason decided."""
    cores: tuple[int, ...] = ()
    """Cores of the first CPU worker, on which `measure` is answered."""

    def leaves_to_vllm(self, tokens: int) -> bool:
        """Return whether vLLM's own kernel computes so many tokens."""
        return all(kernel_for(ranges, tokens) == STOCK for ranges in self.dispatch.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacementParams:
    """Which rank holds which expert."""

    mode: Literal["initial", "eplb"]
    """Placed by the plugin before the weights are loaded, or by vLLM's EPLB while it serves."""
    num_redundant_experts: int | None = None
    """Replicas of each layer under EPLB; None: without it."""
    num_ranks: int = 0
    num_experts: int = 0
    experts: Mapping[int, str] = field(default_factory=dict)
    """Decoder layer -> expert numbers in rank order, separated by spaces."""
    digest: str = ""
    """Of `experts`; the proof repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedConfigsParams:
    """The Triton configuration that vLLM looks for."""

    file: str
    shape: TritonShape
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DualBatchOverlapParams:
    """Half batches whose communication overlaps with computation."""

    all2all_backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Drafts that one step checks together."""

    method: str
    """vLLM's name of it: "mtp", "eagle3", "draft_model", "ngram", "suffix"."""
    draft_tokens: int
    """Tokens that a step drafts for each request, at most."""
    by_requests: tuple[tuple[int, int, int], ...] = ()
    """(from, to, draft tokens) for so many running requests; (): always `draft_tokens`."""
    weight_bytes: int = 0
    """Of what drafts, as stored, all devices together."""
    kv_bytes_per_token: int = 0
    """Cache of one token for what drafts, as `ModelSpec.kv_bytes_per_token`."""

    def step_tokens(self, requests: int) -> int:
        """Return the most tokens of a step that decodes for up to `requests`, their drafts included."""
        ranges = self.by_requests or ((1, requests, self.draft_tokens),)
        return max(min(last, requests) * (1 + drafts) for first, last, drafts in ranges if first <= requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParams:
    """The size of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCaptureParams:
    """CUDA graphs."""

    cuda_graphs: bool
    max_capture_size: int
    """Largest batch with a graph; 0: none is planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheParams:
    """The key/value cache."""

    dtype: str
    """vLLM's name of the element type."""
    kv_bits: int
    """Bits of one element."""
    wanted_model_len: int | None
    """Longest sequence that is wished for, None: unknown."""
    max_model_len: int | None
    """Longest sequence that the cache holds, None: left to vLLM."""
    host_cache_gib: int | None
    """Cache of one worker of vLLM's CPU build; None on GPUs."""
    offload_gib: int | None
    """Host memory for cold blocks, of one engine; None: they are not kept."""


PassParams = (
    DisaggregationParams
    | ReplicasParams
    | ParallelismParams
    | Fp8Params
    | FourBitParams
    | Sparsity24Params
    | FlashDmoeParams
    | ExpertPlacementParams
    | TunedConfigsParams
    | DualBatchOverlapParams
    | SpeculationParams
    | SchedulerParams
    | GraphCaptureParams
    | KvCacheParams
)
PARAMS_OF: Mapping[str, type[PassParams]] = {
    "disaggregation": DisaggregationParams,
    "replicas": ReplicasParams,
    "parallelism": ParallelismParams,
    "fp8": Fp8Params,
    "four_bit": FourBitParams,
    "sparsity_24": Sparsity24Params,
    "flash_dmoe": FlashDmoeParams,
    "expert_placement": ExpertPlacementParams,
    "tuned_configs": TunedConfigsParams,
    "dual_batch_overlap": DualBatchOverlapParams,
    "speculation": SpeculationParams,
    "scheduler": SchedulerParams,
    "graph_capture": GraphCaptureParams,
    "kv_cache": KvCacheParams,
}
"""Pass -> the class of its params; expert_load has none."""
