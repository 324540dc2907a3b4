"""Holds the constants of the step model: what a kernel takes beside its bytes and operations.

Each is read from one ledger of a decode step (stock vLLM on one H100, batch sizes 1 to 128) or fitted to the tables of
kernel speeds; of the served records one at one client is used for REQUEST_US.
`scripts/model_error.py` compares all of them with the records.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEDGER = "benchmarks/records/2026-11-22_h100_decode_step.json"
SERVED = "benchmarks/records/2026-11-22_h100_served.json"
TABLES = "configs/kernel_speeds"

EXPERTS_IN_SERVER = 1.08
"""Time of the experts' kernels in a server over that in the tables of kernel speeds: mean over both sides of the
ledger at 1, 8, 64 and 128 sequences (0.99 to 1.22)."""
UNEVEN_PER_DOUBLING = 0.25
"""Tokens of the busiest of n ranks with whole experts over the mean, less 1, for each doubling of n: assumed for
traffic whose load nobody measured. Random weights route evenly."""
LOCK_STEP_PER_DOUBLING = 0.03
"""Share of a step that data parallel copies wait for the slowest of them, for each doubling of their number: assumed.
Their requests differ in number and length, and each layer's exchange needs all."""
MATRIX_CALL_US = 2.9
"""Start of one dense product: (1385 us - bytes at 3.0 TB/s) / 193 calls at batch 1. FP8 per channel adds nothing that a
served record at one client shows: its inputs are quantised by the kernels before."""
MATRIX_BANDWIDTH_SHARE = 0.90
"""Of the datasheet's bandwidth, for weights read by dense products."""
MATRIX_FLOP_SHARE = 0.65
"""Of the datasheet's rate, for dense products of thousands of tokens; assumed."""
ATTENTION_LAYER_US = 11.2
"""Attention and its combination of one layer at batch 1: (569 - 22) us / 48."""
CACHE_BANDWIDTH_SHARE = 0.667
"""Bandwidth at which keys and values are read: (3381 - 569) us against (1923 - 15) us at batch 128 and 1."""
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
    activation_share: float


VLLM_EXPERTS = ExpertConstants(
    start_us=20.1,
    bandwidth_share=0.973,
    four_bit_bytes_per_s=math.inf,
    flop_share=0.66,
    fp8_flop_share=0.284,
    activation_share=0.627,
)
OUR_EXPERTS = ExpertConstants(
    start_us=10.2,
    bandwidth_share=0.999,
    four_bit_bytes_per_s=2.3e12,
    flop_share=0.855,
    fp8_flop_share=0.657,
    activation_share=1.543,
)
