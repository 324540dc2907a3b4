"""Maps the names that other MoE optimizers use for switches and profile keys to ours; docs/names.md lists them."""

from __future__ import annotations

from collections.abc import Mapping

SWITCHES: Mapping[str, str] = {
    "cuda-graphs": "graph-capture",
    "dbo": "dual-batch-overlap",
    "flash-dmoe-cuda": "flash-dmoe",
    "fp8-quantization": "fp8",
    "kv-cache-tiering": "kv-tiering",
    "pd-disaggregation": "disaggregation",
    "prefill-decode-disaggregation": "disaggregation",
    "sparsity-24": "sparsity",
    "structured-sparsity": "sparsity",
}
"""X of --enable-X, --disable-X and --require X elsewhere -> X here."""

PROFILE_KEYS: Mapping[str, str] = {
    "enforce_eager": "passes.graph_capture.eager",
    "kv_cache_dtype": "passes.kv_cache.dtype",
    "kv_tiering": "passes.kv_cache.tiering",
    "max_batch_size": "workload.batch_size",
    "max_num_seqs": "workload.batch_size",
    "num_gpus": "passes.parallelism.max_gpus",
    "quantization": "passes.fp8.mode",
    "sparsity": "passes.sparsity_24.mode",
    "transformer_engine": "passes.fp8.quantizer",
}
"""Key of a flat profile -> its place in ours, where neither the name of a pass nor of a setting says it."""

FLAG_KEYS = ("model", "host", "port", "dtype")
"""Keys of a flat profile that are flags here."""
MODEL_KEYS = ("num_experts", "top_k")
"""Keys of a flat profile that are read from the model's config.json here."""
