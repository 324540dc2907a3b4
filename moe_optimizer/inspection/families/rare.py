"""Families with rules that no other has: shared blocks, gated recurrences, searched layers, halved widths."""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.inspection.attention import MAX_HEADS, Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense, Experts, Shared, mlp_params
from moe_optimizer.inspection.layer_rules import after_first, every, listed, windowed_when
from moe_optimizer.inspection.recurrent import Mamba2
from moe_optimizer.inspection.shapes import NO_MIXER, Mixer, Site

ZAMBA_MAMBA = Mamba2(head_dim=("mamba_headdim",), bias="add_bias_linear", conv_bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlockSite:
    """A state-space layer in front of which one of a few shared attention blocks runs, with adapters of its own."""

    def shape(self, site: Site) -> Mixer:
        """Return the layer's own parameters; the shared blocks are counted once, outside the layers."""
        config, hidden_size = site.config, site.hidden_size
        state = ZAMBA_MAMBA.shape(site)
        heads = config.required("num_attention_heads", maximum=MAX_HEADS)
        kv_heads = config.integer("num_key_value_heads", heads, minimum=1, maximum=MAX_HEADS) or heads
        rank, width = config.required("adapter_rank"), _zamba_width(config, hidden_size)
        adapters = hidden_size * rank + rank * 2 * width
        if config.flag("use_shared_attention_adapter"):
            adapters += 3 * 2 * 2 * hidden_size * rank
        head_dim = 2 * hidden_size // heads
        return Mixer(
            kind="attention",
            params=state.params + hidden_size * hidden_size + adapters,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            cache_elements=2 * kv_heads * head_dim,
            state_elements=state.state_elements,
        )


def _zamba_width(config: Config, hidden_size: int) -> int:
    return config.integer("intermediate_size", 0) or 4 * hidden_size


def _zamba_shared(config: Config, hidden_size: int) -> int:
    """The shared blocks: attention over the states and the embeddings side by side, feed-forward, two norms."""
    heads = config.required("num_attention_heads", maximum=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, minimum=1) or heads
    head_dim = 2 * hidden_size // heads
    attention = 2 * hidden_size * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden_size
    width, bias = _zamba_width(config, hidden_size), config.flag("add_bias_linear")
    block = attention + mlp_params(hidden_size, width, gated=True, bias=bias) + 3 * hidden_size
    return block * config.required("num_mem_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedRecurrence:
    """A linear recurrence with input and decay gates for each block of channels, behind a short convolution."""

    def shape(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        config, hidden_size = site.config, site.hidden_size
        heads = config.required("num_attention_heads", maximum=MAX_HEADS)
        width = config.integer("lru_width", hidden_size) or hidden_size
        block, kernel = width // heads, config.required("conv1d_width")
        params = 3 * hidden_size * width + 2 * width + hidden_size + width * kernel + width
        params += width + 2 * heads * (block * block + block)
        return Mixer(kind="state", params=params, state_elements=width * kernel)


def _griffin_kinds(config: Config, num_layers: int) -> tuple[str, ...]:
    """The listed types, repeated."""
    types = config.items("block_types") or ["recurrent", "recurrent", "attention"]
    return tuple("sliding" if types[i % len(types)] == "attention" else "recurrent" for i in range(num_layers))


def _halves(_: Config, widths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(width // 2 for width in widths)


def _block(config: Config, layer: int, part: str) -> Config:
    """Return one part of one layer's settings in block_configs."""
    blocks = config.items("block_configs") or []
    entry = blocks[layer] if layer < len(blocks) else None
    inner = entry.get(part) if isinstance(entry, dict) else None
    if not isinstance(inner, dict):
        raise config.error(f"block_configs[{layer}].{part}", inner, "an object")
    return Config(inner, where=f"{config.where}block_configs[{layer}].{part}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedAttention:
    """Attention whose groups differ from layer to layer, or that a layer leaves out."""

    def shape(self, site: Site) -> Mixer:
        """Return the layer's shape."""
        block = _block(site.config, site.layer, "attention")
        if block.flag("no_op"):
            return NO_MIXER
        if block.flag("replace_with_linear"):
            return Mixer(kind="none", params=site.hidden_size * site.hidden_size)
        group = block.required("n_heads_in_group")
        return Attention(kv_heads=lambda _, heads: max(heads // group, 1)).shape(site)


def _searched_widths(config: Config, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Each layer's multiple of two thirds of the hidden size, rounded up to 256."""
    hidden_size = config.required("hidden_size")
    found: list[int] = []
    for layer in range(len(widths)):
        block = _block(config, layer, "ffn")
        if block.flag("no_op"):
            found.append(0)
            continue
        own = block.integer("intermediate_size", 0) or 0
        found.append(own or 256 * -(-int(2 * block.number("ffn_mult", 0.0) * hidden_size / 3) // 256))
    return tuple(found)


def _searched_norms(site: Site) -> int:
    """A norm for each part that the layer has."""
    parts = (_block(site.config, site.layer, name) for name in ("attention", "ffn"))
    return site.hidden_size * sum(not part.flag("no_op") for part in parts)


def _one_for_all_queries(config: Config, heads: int) -> int:
    if not config.flag("multi_query_attention"):
        return heads
    return config.integer("multi_query_group_num", 1, minimum=1) or 1


FAMILIES = (
    Family(
        model_types=("zamba2",),
        architectures=("Zamba2ForCausalLM",),
        kinds=listed(
            ("layers_block_type", "layer_types"),
            otherwise=every("mamba"),
            names={"mamba": "mamba", "linear_attention": "mamba", "hybrid": "shared", "m": "mamba", "g": "shared"},
        ),
        mixers={"mamba": ZAMBA_MAMBA, "shared": SharedBlockSite()},
        dense=None,
        norms=1,
        model_extra=_zamba_shared,
        defaults={"mamba_headdim": "auto"},
    ),
    Family(
        model_types=("recurrent_gemma",),
        architectures=("RecurrentGemmaForCausalLM",),
        kinds=_griffin_kinds,
        mixers={"attention": Attention(o_bias=True), "recurrent": GatedRecurrence()},
        window="attention_window_size",
        dense=Dense(bias=True, adjust=_halves),
        defaults={"tie_word_embeddings": True},
    ),
    Family(
        model_types=("nemotron-nas", "deci"),
        architectures=("DeciLMForCausalLM",),
        mixers={"attention": SearchedAttention()},
        norms=0,
        layer_extra=_searched_norms,
        dense=Dense(width=(), multiple_of_hidden=1, adjust=_searched_widths),
    ),
    Family(
        model_types=("chatglm",),
        architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
        mixers={
            "attention": Attention(
                kv_heads=_one_for_all_queries, qkv_bias=("add_qkv_bias", "add_bias_linear"), o_bias="add_bias_linear"
            )
        },
        dense=Dense(width=("ffn_hidden_size",), bias="add_bias_linear"),
    ),
    Family(
        model_types=("qwen",),
        architectures=("QWenLMHeadModel",),
        mixers={"attention": Attention(qkv_bias=True, o_bias=False)},
        dense=Dense(bias=False, adjust=_halves),
    ),
    Family(
        model_types=("minicpm",),
        architectures=("MiniCPMForCausalLM",),
        mixers={"attention": Attention(qkv_bias=False, o_bias=False)},
        experts=Experts(width=("intermediate_size",)),
        defaults={"tie_word_embeddings": True},
    ),
    Family(
        model_types=("PanguEmbedded", "pangu_embedded"),
        architectures=("PanguEmbeddedForCausalLM",),
        kinds=windowed_when(True, window="interleaved_sliding_window"),
        mixers={
            "attention": Attention(qkv_bias=("qkv_bias", "attention_bias", "bias"), o_bias=("attention_bias", "bias"))
        },
        dense=Dense(bias="mlp_bias"),
    ),
    Family(
        model_types=("skywork_moe",),
        architectures=("SkyworkForCausalLM",),
        mixers={"attention": Attention(qkv_bias=False, o_bias=False)},
        experts=Experts(
            width=("intermediate_size",),
            arrays=True,
        ),
    ),
    Family(
        model_types=("xverse",),
        architectures=("XverseForCausalLM", "XverseMoeForCausalLM"),
        mixers={"attention": Attention(qkv_bias=False, o_bias=False)},
        experts=Experts(
            width=("intermediate_size",),
            shared=Shared(),
        ),
    ),
    Family(
        model_types=("moondream3_text", "moondream3"),
        architectures=("Moondream3ForCausalLM", "HfMoondream"),
        mixers={"attention": Attention(heads=("n_heads",), kv_heads=("n_kv_heads",), qkv_bias=True, o_bias=True)},
        dense=Dense(width=("ff_dim",), gated=False, bias=True),
        norm="layer",
        norms=1,
        head_bias=True,
        experts=Experts(
            count=("moe.n_experts", "moe_num_experts"),
            top_k=("moe.n_experts_per_tok", "moe_experts_per_token"),
            width=("moe.expert_inner_dim", "moe_expert_inner_dim"),
            layers=after_first(("moe.start_layer", "moe_start_layer")),
            router_bias=True,
        ),
        # The published file names the class and no size at all; every model of this class has these experts.
        defaults={
            "dim": 2048,
            "ff_dim": 8192,
            "n_layers": 24,
            "n_heads": 32,
            "n_kv_heads": 32,
            "vocab_size": 51200,
            "max_context": 4096,
            "moe_start_layer": 4,
            "moe_num_experts": 64,
            "moe_experts_per_token": 8,
            "moe_expert_inner_dim": 1024,
            "tie_word_embeddings": False,
        },
    ),
)
