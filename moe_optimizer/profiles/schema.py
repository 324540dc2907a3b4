"""Defines what a profile may say. Every field is checked: an unknown key or a wrong type is an error.

A profile is a wish. The planner resolves it into a Plan, a second type; the profile itself never changes.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from moe_optimizer.yaml_model import Section

Mode = Literal["auto", "on", "off"]

_KEPT_PARTS = ("router", "embeddings", "lm_head", "attention", "shared_experts")


def _check_kept_part(text: str) -> str:
    if text in _KEPT_PARTS or re.fullmatch(r"layers\.(0|[1-9]\d{0,3})", text):
        return text
    expected = ", ".join(f"`{part}`" for part in _KEPT_PARTS)
    raise PydanticCustomError("kept_part", "one of {expected} or a layer as `layers.3`", {"expected": expected})


KeptPart = Annotated[str, AfterValidator(_check_kept_part)]
"""A part of the model that FP8 leaves alone."""


KeptLayer = Annotated[str, Field(pattern=r"^layers\.\d+$")]
"""A decoder layer that four bits leave alone."""


class Workload(Section):
    """The load to plan for."""

    batch_size: int = Field(default=64, ge=1, le=65_536)
    """Requests decoded at the same time."""
    input_tokens: int = Field(default=1024, ge=1, le=16_777_216)
    """Typical prompt length."""
    output_tokens: int = Field(default=512, ge=1, le=16_777_216)
    """Typical completion length."""
    clients: int | None = Field(default=None, ge=1, le=1_048_576)
    """Requests at the same time over all servers, those that wait included; null: the batch size."""
    ttft_ms: float | None = Field(default=None, gt=0)
    """Limit of the predicted mean time to first token; null: none."""
    tpot_ms: float | None = Field(default=None, gt=0)
    """Limit of the predicted time per output token; null: none."""


class PassSection(Section):
    """What every pass can be told."""

    mode: Mode = "auto"
    """auto: when it fits and pays; on: wished, refused with a reason where it cannot be; off: never."""
    required: bool = False
    """True: no plan is made without it, and the server does not count as started when it did not run."""


class FlashDmoeSection(PassSection):
    """Our expert kernels."""

    fused_router: Literal["auto", "on", "off"] = "auto"
    """auto, on: on GPUs one launch multiplies the gate and chooses the experts of up to 8 tokens, where our kernels
    compute them and vLLM's layer holds an unquantised gate; auto: on one GPU; on: on several too, with a warning where
    the build has no such kernel; off: vLLM does."""


class Fp8Section(PassSection):
    """8-bit floating point weights."""

    experts: Mode = "auto"
    """The routed experts' weights."""
    linears: Mode = "auto"
    """The other matrix weights."""
    granularity: Literal["block", "channel"] = "block"
    """Of the experts: one scale per 128x128 block, or per output channel. Linears have one per output channel."""
    quantizer: Literal["auto", "builtin", "transformer_engine"] = "auto"
    """auto: vLLM's own where vLLM converts (GPUs), else the built-in one. All have the same scales. transformer_engine
    is for GPUs and blocks; where it cannot be, the built-in one is used, with a warning."""
    keep_bf16_layers: Annotated[tuple[KeptPart, ...], Field(strict=False)] = ("router", "embeddings", "lm_head")
    """Parts that stay in the checkpoint's dtype: `attention`, `shared_experts`, or a decoder layer as `layers.3`.
    Router, embeddings and lm_head stay whether they are named or not."""
    max_layer_error: float | None = Field(default=0.08, gt=0, le=1)
    """A layer stays in the checkpoint's dtype when FP8 changes its experts' output by more than this share on
    calibration tokens; null: no layer stays for that. Chosen: well-behaved weights show 0.02 to 0.05."""
    sensitivity: str | None = None
    """File of that share for every layer, as measured on a text; null: on the CPU build each layer is measured on
    synthetic tokens while it is loaded, on GPUs none is."""


class ExpertPlacementSection(PassSection):
    """Which GPU holds which expert, and replicas of the busy ones."""

    load: str | None = Field(default=None, min_length=1)
    """File with the measured load of each expert (expert_load.json of a run); null: none."""
    load_check: str | None = Field(default=None, min_length=1)
    """Such a file of other traffic: the gain is stated on it. null: no gain is stated."""
    redundant_experts: int = Field(default=0, ge=0, le=1024)
    """Replicas per MoE layer, for vLLM's EPLB (CUDA only)."""


class TunedConfigsSection(PassSection):
    """Triton configurations of vLLM's own MoE kernel."""

    folder: str | None = Field(default=None, min_length=1)
    """Folder with tuned configurations to use; null: what VLLM_TUNED_CONFIG_FOLDER names, else the user's cache, which
    `moe-optimizer tune --only triton` writes to."""


class ParallelismSection(PassSection):
    """How the model is split over GPUs."""

    tensor_parallel_size: int | None = Field(default=None, ge=1, le=1024)
    """GPUs that share each layer; null: as many as there are and the model's heads allow."""
    expert_parallel: Mode = "auto"
    """Whole experts on each GPU instead of a slice of every expert."""
    data_parallel_size: int | None = Field(default=None, ge=1, le=1024)
    """Copies of the attention part; null: 1."""
    max_gpus: int | None = Field(default=None, ge=1, le=4096)
    """Use at most so many GPUs of a machine; null: all."""
    across_nodes: Literal["auto", "replicas", "pipeline", "data_parallel"] = "auto"
    """Several machines: replicas: a whole server on each; pipeline: one server, each machine holds a part of the
    layers; data_parallel: one server, each machine has copies of the attention part and whole experts; auto: replicas
    where one machine holds the model, else the faster of the other two."""


class GraphCaptureSection(PassSection):
    """CUDA graphs. Mode off leaves vLLM's default."""

    eager: bool = False
    """Plain execution without compilation and graphs (--enforce-eager): slower, but starts quickly."""
    max_capture_size: int | None = Field(default=None, ge=1, le=8192)
    """Largest step with a captured graph, in tokens; null: chosen from the batch size and what prompts gain."""
    prompts: Literal["auto", "off"] = "auto"
    """Graphs for steps that read prompts too, of sizes that would wait for the launches of their kernels. off: only
    what covers the batch."""


class KvCacheSection(PassSection):
    """The key/value cache."""

    dtype: Literal["model", "fp8"] = "model"
    """Element type of the cache. fp8 holds twice the tokens and changes the output slightly."""
    tiering: Mode = "off"
    """Keep cache blocks that no request uses any more in host memory. auto: not without a measured gain."""
    tiering_backend: Literal["native", "lmcache"] = "native"
    """native: vLLM's own; lmcache: an LMCache server beside it, which must be installed and running."""


class DisaggregationSection(PassSection):
    """Prefill and decode in servers of their own, behind a router. Without numbers the search over layouts takes those
    that are best for the goal; where nothing is predicted, as on the CPU, it is one of each.
    """

    prefill_servers: int | None = Field(default=None, ge=1, le=64)
    """How many servers read prompts; null: see above."""
    decode_servers: int | None = Field(default=None, ge=1, le=64)
    """How many servers write answers; null: see above."""


class ReplicasSection(PassSection):
    """Whole servers behind a router."""

    count: int | None = Field(default=None, ge=2, le=64)
    """How many; null: as many as hold the model, on the CPU two."""


class DualBatchOverlapSection(PassSection):
    """Two half batches that overlap communication with computation."""

    all2all_backend: Literal["deepep_low_latency", "deepep_high_throughput"] = "deepep_low_latency"
    """DeepEP's kernels for few tokens a step (decode), or for many (prefill)."""


class SpeculationSection(PassSection):
    """Tokens that are drafted cheaply and checked together in one step."""

    method: Literal["auto", "mtp", "eagle3", "draft", "ngram", "suffix"] = "auto"
    """What drafts. mtp: the model's own further layers; eagle3, draft: the model named by `model`; ngram: what followed
    the same words in the prompt; suffix: what followed them in earlier answers too. auto: `model` if it is given, else
    the model's own layers, else ngram."""
    model: str | None = Field(default=None, min_length=1)
    """The drafting model: a hub id or a folder; null: none."""
    draft_tokens: int | None = Field(default=None, ge=1, le=32)
    """Tokens that a step drafts for each request, at most; null: chosen."""
    acceptance: float | None = Field(default=None, gt=0, lt=1)
    """Share of drafts that are accepted, given that all before them were, as measured on your own traffic
    (docs/passes/speculation.md says how); null: not known, and nothing is predicted. With it the pass goes on where
    the prediction wins, and the number of drafts follows the number of requests."""


class FourBitSection(PassSection):
    """Experts in four bits. Mode auto takes them where `quality` has judged the plan that has them."""

    format: Literal["mxfp4", "int4"] = "mxfp4"
    """mxfp4: E2M1 codes with one power of two per 32 weights; int4: integers with one BF16 scale per group, on the CPU
    only."""
    group: Literal[32, 64, 128] = 32
    """Weights that share a scale; mxfp4 has 32."""
    keep_bf16_layers: Annotated[tuple[KeptLayer, ...], Field(strict=False)] = ()
    """Decoder layers whose experts stay in the checkpoint's dtype, as `layers.3`."""
    max_layer_error: float | None = Field(default=0.25, gt=0, le=1)
    """A layer stays in the checkpoint's dtype when four bits change its experts' output by more than this share on
    calibration tokens; null: no layer stays for that. Chosen: the bundled model's layers show 0.14 to 0.18."""
    sensitivity: str | None = None
    """File of that share for every layer, as measured on a text; null: each layer is measured on synthetic tokens
    while it is loaded."""
    activations: Literal["bf16", "fp8"] = "bf16"
    """fp8: in steps of many tokens the experts' inputs are rounded to E4M3 too, on GPUs; of MXFP4 checkpoints too that
    our kernels read."""


class Sparsity24Section(PassSection):
    """Experts pruned to two of four weights. Mode auto is off: no quality gate has allowed it."""

    activation_norms: str | None = Field(default=None, min_length=1)
    """File of the norms of what the experts' matrices read, as measured on a text; of every four weights those with
    the largest magnitude x norm stay. null: magnitude alone decides."""


class SchedulerSection(PassSection):
    """How many requests and tokens one step takes."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    """Tokens in one step; null: sized from memory."""
    api_servers: Literal["auto", "off"] = "auto"
    """More processes that take requests in and send tokens out, where those that vLLM starts by itself would be busy
    for most of a decode step. off: vLLM's own number."""


class Passes(Section):
    """One section per pass; a section that is left out has its defaults."""

    flash_dmoe: FlashDmoeSection = FlashDmoeSection()
    fp8: Fp8Section = Fp8Section(mode="off")
    expert_load: PassSection = PassSection()
    expert_placement: ExpertPlacementSection = ExpertPlacementSection()
    tuned_configs: TunedConfigsSection = TunedConfigsSection()
    parallelism: ParallelismSection = ParallelismSection()
    graph_capture: GraphCaptureSection = GraphCaptureSection()
    kv_cache: KvCacheSection = KvCacheSection()
    disaggregation: DisaggregationSection = DisaggregationSection()
    replicas: ReplicasSection = ReplicasSection()
    dual_batch_overlap: DualBatchOverlapSection = DualBatchOverlapSection()
    four_bit: FourBitSection = FourBitSection(mode="off")
    sparsity_24: Sparsity24Section = Sparsity24Section(mode="off")
    speculation: SpeculationSection = SpeculationSection()
    norm_rope_fusion: PassSection = PassSection()
    skinny_gemm: PassSection = PassSection()
    scheduler: SchedulerSection = SchedulerSection()


class Quality(Section):
    """How far the server's answers may be from those of stock vLLM; `moe-optimizer quality` judges. null: any."""

    kl_mean: float | None = Field(default=0.0004, gt=0, le=100)
    """Mean KL divergence of the next-token distributions, nats a token; or twice that between stock vLLM alone and in a
    batch, where that is more. Chosen: for kernels that round in another order, and no more."""
    kl_p99: float | None = Field(default=0.005, gt=0, le=100)
    """The same at the 99th percentile of positions."""
    top1_agreement: float | None = Field(default=0.97, gt=0, le=1)
    """Least share of positions with the same likeliest token."""
    perplexity_ratio: float | None = Field(default=1.01, ge=1, le=100)
    """Perplexity over that of stock vLLM on the same text."""
    greedy_match_tokens: float | None = Field(default=None, ge=0, le=1_000_000)
    """Least mean number of greedily generated tokens before the first difference."""
    batch_kl_mean: float | None = Field(default=0.0004, gt=0, le=100)
    """Mean KL divergence between a prompt alone and in a batch, on the same server; or twice that of stock vLLM, where
    that is more. Chosen: as `kl_mean`."""
    task_drop: float | None = Field(default=0.01, ge=0, le=1)
    """Most that the score of a task may be below that of stock vLLM, as a share of questions. A task fails where the
    whole 95 % interval of the paired difference is beyond it. Chosen: about 99 % of a score that is near 1."""
    top_logprobs: int = Field(default=64, ge=1, le=1_000_000)
    """Tokens of each distribution that are compared one by one; all others are compared as one."""


class Profile(Section):
    """A wish: what the server is for and how far optimization may go."""

    name: str = Field(min_length=1, max_length=64)
    description: str = Field(default="", max_length=1000)
    gpu_memory_utilization: float = Field(default=0.90, ge=0.1, le=0.99)
    """Share of each GPU's memory that the server may use."""
    max_model_len: int | None = Field(default=None, ge=1, le=16_777_216)
    """Longest prompt plus completion; null: the model's own, as far as memory allows."""
    workload: Workload = Workload()
    goal: Literal["latency", "balanced", "throughput"] = "balanced"
    """What the layout over the GPUs is chosen for: the least time per output token, the most tokens a second, or the
    best product of both."""
    performance: Literal["balanced", "interactivity", "throughput"] = "balanced"
    """vLLM's own --performance-mode."""
    passes: Passes = Passes()
    quality: Quality = Quality()
