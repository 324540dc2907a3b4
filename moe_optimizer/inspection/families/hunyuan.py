"""Hunyuan: fields that may hold an array with one entry for each layer, and layers that share key/value caches."""

from __future__ import annotations

from dataclasses import replace

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Experts, Shared
from moe_optimizer.inspection.layer_rules import after_first

ATTENTION = Attention(qk_norm="head", qk_norm_when="use_qk_norm")


def _cache_sharing(config: Config, num_layers: int) -> tuple[str, ...]:
    """With cross-layer attention only the first layer of each group makes keys and values."""
    factor = (config.integer("cla_share_factor", 1) or 1) if config.flag("use_cla") else 1
    return tuple("attention" if i % factor == 0 else "borrowing" for i in range(num_layers))


FAMILIES = (
    Family(
        model_types=("hunyuan_v1_moe", "hunyuan", "hunyuan_moe"),
        architectures=("HunYuanMoEV1ForCausalLM", "HunYuanForCausalLM"),
        kinds=_cache_sharing,
        mixers={"attention": ATTENTION, "borrowing": replace(ATTENTION, borrows_cache=True)},
        experts=Experts(
            width=("moe_intermediate_size", "intermediate_size"),
            layers=after_first("moe_layer_num_skipped"),
            arrays=True,
            shared=Shared(),
        ),
        defaults={"use_qk_norm": True, "num_shared_expert": 1},
    ),
)
