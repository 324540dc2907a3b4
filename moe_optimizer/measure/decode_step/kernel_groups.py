"""Sorts the GPU kernels of a decode step into groups by their names."""

from __future__ import annotations

import re

EXPERTS, MATRICES, ATTENTION = "experts", "matrices", "attention"
OTHER = "other"
_GROUPS = (
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device|all2all"),
    ("gate top-k", r"topk_?gating|topk_?softmax|topk_?sigmoid|grouped_topk|moe_fused_gate"),
    # Before the dense products: the names of grouped products hold "gemm" too. What Inductor fuses in front of the op
    # `moe_forward` is named after it, and is none of it.
    (
        EXPERTS,
        r"fused_moe|moeopt(?!\W*\d*skinny)|moe_(?!forward)|expert|silu_and_mul|act_and_mul|swiglu|grouped_gemm|"
        r"m_grouped|group_quant",
    ),
    ("cache write", r"reshape_and_cache|concat_and_cache|cache_kernel"),
    (ATTENTION, r"flash|fmha|attention|attn|mla|paged"),
    ("RoPE", r"rotary|rope"),
    ("norms", r"rms_?norm|layer_?norm|rsqrt"),
    ("sampling", r"argmax|sampl|softmax|logit|gumbel|top_?k|top_?p|native::reduce"),
    (MATRICES, r"gemm|gemv|nvjet|cutlass|cublas|split_?k|xmma|matmul|_mm_"),
    ("copies", r"memcpy|memset|copy|concat|index|gather|scatter|fill|arange|slot_mapping|elementwise"),
    ("compiled", r"triton_"),
)
_PATTERNS = tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in _GROUPS)
GROUPS = (*(group for group, _ in _GROUPS), OTHER)
"""In the order in which a name is tried."""


def group_of(kernel: str) -> str:
    """Return the group of a kernel by its (demangled) name; "other" where no pattern fits."""
    return next((group for group, pattern in _PATTERNS if pattern.search(kernel)), OTHER)
