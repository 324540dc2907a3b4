"""Holds the constants of the step model: what a kernel takes beside its bytes and operations.

Each is read from one ledger of a decode step (stock vLLM on one H100, batch sizes 1 to 128) or fitted to the tables of
kernel speeds; of the served records one at one client is used for REQUEST_US.
`scripts/model_error.py` compares all of them with the records.
"""

from __future__ import annotations

from dataclasses import dataclass

LEDGER = "benchmarks/records/2026-11-22_h100_decode_step.json"
SERVED = "benchmarks/records/2026-11-22_h100_served.json"
TABLES = "configs/kernel_speeds"
LAYOUTS = "benchmarks/records/2026-11-26_h200_x4_layouts.json"
LINEARS = "benchmarks/records/2026-11-22_h100_fp8_linears.json"

EXPERTS_IN_SERVER = 1.08
"""Time of the experts' kernels in a server over that in the tables of kernel speeds: mean over both sides of the
ledger at 1, 8, 64 and 128 sequences (0.99 to 1.22). A server of random weights routes nearly evenly; those tables
average even and uneven routing."""
FOUR_BIT_EXPERTS_IN_SERVER = 1.0
"""The same of experts in fewer than 8 bits, whose tables are of even routing."""
UNEVEN_PER_DOUBLING = 0.12
"""Tokens of the busiest of n ranks with whole experts over the mean, less 1, for each doubling of n: assumed for
traffic whose load nobody measured. With it kernels of DeepSeek-V3's experts on 8 and 16 ranks take what AIConfigurator
0.12 publishes for routing by power laws of 1.01 and 1.2. Random weights route evenly."""
LOCK_STEP_US = 500.0
"""Of a step, what data parallel copies wait for the slowest of them and agree on its size, for each doubling of their
number: four copies at 16 clients in LAYOUTS, whose other parts sum up to 1 ms less. That it grows so is assumed."""
MATRIX_CALL_US = 2.9
"""Start of one dense product: (1385 us - bytes at 3.0 TB/s) / 193 calls at batch 1. FP8 per channel adds nothing that a
served record at one client shows: its inputs are quantised by the kernels before."""
MATRIX_BANDWIDTH_SHARE = 0.90
"""Of the datasheet's bandwidth, for weights read by dense products."""
MATRIX_FLOP_SHARE = 0.78
"""Of the datasheet's rate, for dense products of 8192 tokens in BF16: 0.76 and 0.80 in LINEARS."""
FP8_MATRIX_FLOP_SHARE = 0.54
"""The same in FP8 with a scale for each channel, with the quantisation of the input: 0.49 and 0.59."""
FP8_BLOCK_MATRIX_FLOP_SHARE = 0.46
"""The same with a scale for each block: 0.41 and 0.52."""
FP8_BLOCK_CALL_US = 3.0
"""Of each dense product of a checkpoint in FP8 blocks: a kernel before it quantises its input (LINEARS)."""
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
LATENT_LAYER_US = 33.0
"""What a layer of latent attention takes beside its bytes and calls: its norms, rotary embedding and absorbed products.
Published with the above, batch 1, 16 to 128 heads, BF16 and FP8, on H100 and H200: 32 to 50 us, 33 to 36 of 16."""
PREFILL_ATTENTION_FLOP_SHARE = 0.45
"""Of the datasheet's rate, for attention over a prompt; assumed."""
SMALL_KERNELS_LAYER_US = 10.3
"""Router's top-k, norms, rotary embedding and cache write of one layer at batch 1: 494 us / 48."""
SMALL_KERNELS_PASSES = 14.0
"""Passes of those over a token's hidden state: (597 - 494) us / 127 tokens at the datasheet's bandwidth."""
SAMPLING_US = 179.0
"""Sampling, and copies of tokens and logits, at batch 1: 46 + 133 us."""
SAMPLING_PASSES = 14.1
"""Passes of those over a sequence's FP32 logits: (166 + 339 - 179) us / 127 at the datasheet's bandwidth."""
HOST_US = 400.0
"""Of a step, what no kernel accounts for at batch 1: gaps between kernels, scheduler, copies of tokens."""
HOST_SEQUENCE_US = 1.8
"""The same for each further sequence: (633 - 403) us / 127."""
PROMPT_TOKEN_US = 5.4
"""Of each token of a prompt, what no part of its step accounts for: time to first token at one client, (81.7 - 60.0)
ms / 4096 in benchmarks/records/2026-11-24_h100_kv_cache_served.json. It is the same in BF16, FP8 and four bits, so no
matrix explains it; a part is the tokenizer's. That slices share it is assumed."""
REQUEST_US = 10_000.0
"""HTTP, tokenizer and scheduling of one request: time to first token at one client less the step of its prompt."""
FRONT_END_PROMPT_TOKEN_US = 12.0
"""Of each token of a prompt, in the one process of an engine that takes requests in. With slices on four H200s 512
tokens took 9.4 ms (LAYOUTS, 128 clients), which would be 18 with those of the answers; but a server of gpt-oss-20b
took requests in faster than 15 and 50 us allow, so this and the next are what no record contradicts. vLLM starts one
such process, or as many as a server has copies on a machine (--api-server-count)."""
FRONT_END_TOKEN_US = 40.0
"""Of each token of an answer in the same process: LAYOUTS, slices at 512 clients, 14 to 18 ms a request in all, where
this and the former are 11."""
FRONT_END_SHARE_OF_ANSWERS = 0.6
"""Of a loop that this process bounds, what lies after the first token: 0.53 and 0.63 in the same two loops."""
READING_WAITED_US = 1_100_000.0
"""Of the reading of other prompts, what a request waits for at most on average: requests that end one after the other
let theirs in between, so the rest is read while it writes. Loops in which all are read in 1.9 to 4.5 s have times to
first token of 0.5 to 1.3 s in the served records; chosen from the two longest, 1.0 s."""


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
    activation_share=1.543,
)
