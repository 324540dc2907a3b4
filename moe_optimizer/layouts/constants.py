"""Holds the constants of the step model: what a kernel takes beside its bytes and operations.

Each is read from a ledger of a decode step (stock vLLM on one H100, batch sizes 1 to 128; of FP8 ours on one H200), one
of steps that read a prompt or a record of single kernels, or fitted to the tables of kernel speeds; of the served
records one at one client is used for REQUEST_US.
`scripts/model_error.py` compares all of them with the records.
"""

from __future__ import annotations

from dataclasses import dataclass

LEDGER = "benchmarks/records/2026-11-22_h100_decode_step.json"
FP8_LEDGER = "benchmarks/records/2026-11-28_h200_decode_step_four_bits.json"
PROMPT_LEDGER = "benchmarks/records/2026-11-26_h100_prompt_step.json"
SERVED = "benchmarks/records/2026-11-22_h100_served.json"
TABLES = "configs/kernel_speeds"
LAYOUTS = "benchmarks/records/2026-11-26_h200_x4_layouts.json"
ROUTER = "benchmarks/records/2026-11-26_h100_gate_topk.json"
LONG_PROMPTS = "benchmarks/records/2026-11-24_h100_kv_cache_served.json"
LINEARS = "benchmarks/records/2026-11-22_h100_fp8_linears.json"

UNEVEN_PER_DOUBLING = 0.12
"""Tokens of the busiest of n ranks with whole experts over the mean, less 1, for each doubling of n: assumed for
traffic whose load nobody measured. With it kernels of DeepSeek-V3's experts on 8 and 16 ranks take what AIConfigurator
0.12 publishes for routing by power laws of 1.01 and 1.2. Random weights route evenly."""
LOCK_STEP_US = 500.0
"""Of a step, what data parallel copies wait for the slowest of them and agree on its size, for each doubling of their
number: four copies at 16 clients in LAYOUTS, whose other parts sum up to 1 ms less. That it grows so is assumed."""
MATRIX_CALL_US = 2.9
"""Start of one dense product: (1385 us - bytes at 3.0 TB/s) / 193 calls at batch 1."""
MATRIX_BANDWIDTH_SHARE = 0.90
"""Of the datasheet's bandwidth, for weights read by dense products."""
MATRIX_FLOP_SHARE = 0.78
"""Of the datasheet's rate, for dense products of 8192 tokens in BF16: 0.76 and 0.80 in LINEARS."""
FP8_MATRIX_FLOP_SHARE = 0.54
"""The same in FP8 with a scale for each channel, with the quantisation of the input: 0.49 and 0.59."""
FP8_BLOCK_MATRIX_FLOP_SHARE = 0.46
"""The same with a scale for each block: 0.41 and 0.52."""
FP8_CALL_US = 1.5
"""Of each dense product in FP8 with a scale for each channel, for the quantisation of its input: beside a norm 1.2 us
more than the norm alone, after attention 1.7 for a kernel (FP8_LEDGER, 1 request)."""
FP8_BLOCK_CALL_US = 3.0
"""The same with a scale for each block: a kernel of its own, 3.0 us for 1 to 16 tokens (LINEARS)."""
READ_AND_MULTIPLY_POWER = 1.5
"""Bytes and operations of a dense product overlap in part: the time is the root of the sum of both to this power. Of
products in BF16 published in AIConfigurator 0.12 (vLLM 0.24, H100), 128 to 512 tokens are met within 15 %."""
ATTENTION_LAYER_US = 11.2
"""Attention and its combination of one layer at batch 1: (569 - 22) us / 48."""
ATTENTION_SEQUENCE_US = 0.031
"""Of each sequence and head of its cache in a layer: tiles in turn on the GPU's processors. Published in AIConfigurator
0.12 for vLLM 0.24 on H100 and H200, contexts of 2 tokens, 128 to 512 sequences, 1 to 8 heads."""
CACHE_BANDWIDTH_SHARE = 0.95
"""Of the datasheet's bandwidth, for keys and values: published with the above, contexts of 2048 and 4096 tokens. Both
together give the ledger's 41.1 and 70.4 us a layer at batch 64 and 128 within 2 %."""
DECODE_ATTENTION_FLOP_SHARE = 0.74
"""Of the datasheet's rate, for attention of one token, which bounds latent attention of many heads only: published
with the above for DeepSeek-V3 with 128 heads on an H200."""
PREFILL_ATTENTION_FLOP_SHARE = 0.57
"""Of the datasheet's rate, for attention over a prompt: 0.57 and 0.58 of 4096 and 8192 tokens (PROMPT_LEDGER)."""
SMALL_KERNELS_LAYER_US = 10.3
"""Router's top-k, norms, rotary embedding and cache write of one layer at batch 1: 494 us / 48."""
SMALL_KERNELS_PASSES = 14.0
"""Passes of those over a token's hidden state: (597 - 494) us / 127 tokens at the datasheet's bandwidth."""
FUSED_ROUTER_US = 4.4
"""Of a layer, what one launch of ours for the gate and the choice of experts saves of two: 4.6 us for 1 token and 4.1
for 8 (ROUTER)."""
SAMPLING_US = 179.0
"""Sampling, and copies of tokens and logits, at batch 1: 46 + 133 us."""
SAMPLING_PASSES = 14.1
"""Passes of those over a sequence's FP32 logits: (166 + 339 - 179) us / 127 at the datasheet's bandwidth."""
HOST_US = 280.0
"""Of a step on one GPU, what no kernel accounts for: on H100s 4.70 ms a token at one client in records of three days,
less the 4.43 of the kernels in LEDGER. With slices or stages, whose workers are processes of their own, the next step
is prepared meanwhile: slices on two and four H100 show none (benchmarks/records/2026-11-26_h100_x4_layouts.json), nor
does one H200 in the records of 2026-11-26."""
CAPTURED_TOKENS = 512
"""vLLM captures CUDA graphs of steps up to so many tokens, and up to twice the requests that may run at once; of steps
that only decode, a plan has all captured."""
LAUNCH_LAYER_US = 1500.0
"""At least, of each layer of a step without a CUDA graph, for launching its kernels. PROMPT_LEDGER: 1024 and 2048
tokens take 91 and 107 ms, of which kernels 31 and 42, and 36 and 48 ms with a graph of that size
(benchmarks/records/2026-11-26_h100_prompt_step_graphs.json): 1.8 and 2.1 ms a layer. 4096 tokens take 85 ms, which is
1.8 at most. In a server a prompt of 4096 tokens takes 72 ms in BF16 as in four bits (LONG_PROMPTS, one client, 82 ms
less REQUEST_US): 1.5."""
LAUNCH_EXCHANGE_US = 700.0
"""The same, where GPUs exchange tokens in each layer: the step that reads 15 prompts of 512 tokens takes 100 to 113 ms
with slices on four H100 and H200, whose kernels take 70."""
LAUNCH_LATENT_US = 1900.0
"""The same, where attention is latent (MLA), whose prompts take more launches: first tokens of a DeepSeek-like shape on
two H100 came after 130 ms with 16 clients of two servers, after 148 and 127 with whole experts and copies, where 67,
112 and 103 would be without (benchmarks/records/2026-11-26_h100_x2_layouts_deepseek_v2.json, _rest.json). With slices
they came after 118, which 114 would be without and 134 are with it. No ledger has its steps."""
PROMPT_TOKEN_US = 1.6
"""Of each token of a prompt, beyond its matrices, experts and attention: 0.7 us of small kernels that
SMALL_KERNELS_PASSES does not have, and 0.9 of no kernel (PROMPT_LEDGER, 8192 tokens). That slices share it is
assumed."""
REQUEST_US = 10_000.0
"""HTTP, tokenizer and scheduling of one request: time to first token at one client less the step of its prompt."""
FRONT_END_TOKEN_US = ((128, 40.0), (512, 60.0))
"""Of each token of an answer, in the one process of an engine (API server) that sends tokens out: of so many clients
that it answers, so many us. That is the median time between two tokens of a request over the clients, where they waited
for it. With 512 it is 43 us on one host (slices with whole experts in LAYOUTS) and 88 on another
(benchmarks/records/2026-11-27_h100_x2_layouts_tp2.json), and this is about their geometric mean; eleven other starts
lie between. With 128 it is 40 us on a host that took 67 of 512 (benchmarks/records/2026-11-28_h200_front_end.json),
the least that was seen: 45 and 64 on others. vLLM starts one such process, or as many as a server has copies on a
machine (--api-server-count)."""
FRONT_END_BUSY = 0.45
"""Chosen: the share of a decode step that an API server may be busy before a plan starts more of them. Hosts took up to
1.5 times FRONT_END_TOKEN_US of 512 clients and 1.6 times that of 128. With slices on four H100 and 128 clients one is
busy for 0.49 of a step by the model, and four had 8 % more tokens/s
(benchmarks/records/2026-11-26_h100_x4_layouts.json)."""
MOST_API_SERVERS = 4
"""Chosen: the most that a plan gives a server with fewer copies; more were not measured."""
FRONT_END_REQUEST_US = 1000.0
"""Of each request in the same process, besides its prompt: chosen, with the next. Prompts of 128 tokens are read as
fast as their steps (benchmarks/records/2026-11-26_h200_balanced_served.json), so both take 2 ms of one at most.
No record tells whether hosts that send tokens out slower take requests in slower too: the same counts for all."""
FRONT_END_PROMPT_TOKEN_US = 6.8
"""Of each token of a prompt there. Slices of a DeepSeek-like shape on two H100 read the 512 prompts of 512 tokens that
come at once in 2.7 s, though 128 of them at 59 ms a step, which would be 1.9 s; copies, which have two such processes,
read them no slower. 2.7 s less the tokens sent meanwhile are 4.5 ms for each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConstants:
    """Time of one layer's experts where no table answers: start + bytes + operations + activations, each at a share
    of the datasheet's rate. Fitted to all tables of a kernel.
    """

    start_us: float
    bandwidth_share: float
    four_bit_bytes_per_s: float
    """At most, of weights in four bits: they are widened by instructions, of which an H200 has as many as an H100."""
    flop_share: float
    fp8_flop_share: float
    four_bit_flop_share: float
    """Of the rate in BF16."""
    tile: int
    """A slice of an expert takes the time of whole tiles of its width; 1: the kernels have none."""
    four_bit_tile: int
    """The same of weights in four bits."""
    activation_share: float


VLLM_EXPERTS = ExpertConstants(
    start_us=20.1,
    bandwidth_share=0.973,
    # In four bits our tables alone give 2.7e12 and 0.28; an independent trial's server was faster.
    four_bit_bytes_per_s=2.9e12,
    flop_share=0.66,
    fp8_flop_share=0.284,
    four_bit_flop_share=0.31,
    # Not in our tables, whose widths are whole tiles: published in AIConfigurator 0.12, widths 96, 160, 176 and 352
    # of Triton's kernels in BF16 on H100 and H200, beside the undivided expert, take 0.95 to 1.07 times what this says.
    tile=64,
    # vLLM fills slices up to it for Marlin; the blocks of triton_kernels are as wide.
    four_bit_tile=128,
    activation_share=0.627,
)
OUR_EXPERTS = ExpertConstants(
    start_us=10.2,
    bandwidth_share=0.999,
    four_bit_bytes_per_s=2.3e12,
    flop_share=0.855,
    fp8_flop_share=0.657,
    four_bit_flop_share=0.855,
    tile=1,
    four_bit_tile=1,
    activation_share=1.543,
)
