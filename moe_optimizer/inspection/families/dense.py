"""Dense decoders with rotary positions and, mostly, RMS norms."""

from __future__ import annotations

from moe_optimizer.inspection.attention import Attention
from moe_optimizer.inspection.config import Config
from moe_optimizer.inspection.families.common_parts import BIASED_NORMED, HEAD_NORMED, NO_BIAS, halves
from moe_optimizer.inspection.family import Family
from moe_optimizer.inspection.feed_forward import Dense
from moe_optimizer.inspection.layer_rules import every, last_of, listed, windowed

LLAMA_MLP = Dense(bias="mlp_bias")


def _one_for_all_queries(config: Config, heads: int) -> int:
    if not config.flag("multi_query_attention"):
        return heads
    return config.integer("multi_query_group_num", 1, minimum=1) or 1


FAMILIES = (
    # Nothing but fields that say what there is: the class defaults are those of the model_type, of no other here.
    Family(
        names=(
            "aquila",
            "baichuan",
            "cwm",
            "exaone",
            "granite",
            "internlm3",
            "iquestcoder",
            "llama",
            "ministral",
            "ministral3",
            "mistral",
            "nanbeige",
            "phi3",
            "phi3_v",
            "phi4-siglip",
            "phi4_multimodal",
            "phi4mm",
            "smollm3",
            "solar",
            "solar_pro",
            "step1",
            "telechat3",
            "teleflm",
            "AquilaModel",
        ),
        kinds=listed(otherwise=windowed()),
        dense=LLAMA_MLP,
    ),
    Family(
        names=("arcee",),
        dense=Dense(gated=False, bias="mlp_bias"),
    ),
    Family(
        names=("apertus",),
        mixers={"attention": Attention(qk_norm="head")},
        dense=Dense(gated=False, bias=False),
        layer_extra=lambda _: 2,  # the two learned slopes of xIELU
    ),
    Family(
        names=("seed_oss",),
        mixers={"attention": Attention(o_bias="attention_out_bias")},
        dense=LLAMA_MLP,
    ),
    Family(
        names=("exaone4", "exaone4_5_text"),
        kinds=listed(otherwise=last_of("sliding_window_pattern")),
        mixers={"attention": HEAD_NORMED},
    ),
    Family(
        names=("granite_swa",),
        kinds=listed(otherwise=every("attention")),
        mixers={"attention": Attention(sinks=True)},
        dense=LLAMA_MLP,
    ),
    Family(
        names=("hyperclovax",),
        norms=lambda config: 4 if config.flag("use_post_norm") else 2,
        dense=LLAMA_MLP,
    ),
    Family(names=("olmo",), norm="none"),
    Family(
        names=("olmo2", "olmo3"),
        kinds=listed(otherwise=every("attention")),
        mixers={"attention": Attention(qk_norm="width")},
    ),
    Family(
        names=("phi",),
        mixers={"attention": BIASED_NORMED},
        dense=Dense(gated=False, bias=True),
        norms=1,
        norm="layer",
        head_bias=True,
    ),
    Family(
        names=("stablelm", "stablelm_epoch"),
        mixers={
            "attention": Attention(
                qkv_bias="use_qkv_bias", o_bias=False, qk_norm="each_head", qk_norm_when="qk_layernorm"
            )
        },
        norms=lambda config: 1 if config.flag("use_parallel_residual") else 2,
        norm="layer",
    ),
    Family(
        names=("starcoder2",),
        kinds=windowed(),
        mixers={"attention": Attention(qkv_bias="use_bias", o_bias="use_bias")},
        dense=Dense(bias="use_bias", gated=False),
        norm="layer",
    ),
    Family(
        names=("cohere2", "cohere_compass_text", "cohere"),
        kinds=listed(otherwise=last_of("sliding_window_pattern", default=4)),
        mixers={"attention": Attention(qk_norm="each_head", qk_norm_when="use_qk_norm")},
        norms=1,
    ),
    Family(
        names=("glm", "helium"),
        mixers={"attention": Attention(o_bias=False)},
        dense=LLAMA_MLP,
    ),
    Family(
        names=("glm4", "glm4v_text", "glm_ocr_text"),
        mixers={"attention": Attention(o_bias=False)},
        norms=4,
    ),
    Family(
        names=("nemotron", "jais2"),
        dense=Dense(gated=False, bias="mlp_bias"),
        norm="layer",
    ),
    Family(
        names=("ernie4_5", "paddleocr_vl_text"),
        mixers={"attention": Attention(qkv_bias="use_bias", o_bias="use_bias")},
        dense=Dense(bias="use_bias"),
    ),
    Family(
        names=("hunyuan_v1_dense", "hunyuan_dense", "HunYuanDenseV1ForCausalLM"),
        mixers={"attention": Attention(qk_norm="head", qk_norm_when="use_qk_norm")},
        defaults={"use_qk_norm": True},
    ),
    Family(
        names=("mimo",),
        mixers={"attention": Attention(qkv_bias=True, o_bias=False)},
    ),
    Family(
        names=("internlm", "internlm2"),
        mixers={"attention": Attention(qkv_bias="bias", o_bias="bias")},
    ),
    Family(
        names=("OrionForCausalLM",),
        norm="layer",
        mixers={"attention": NO_BIAS},
    ),
    Family(
        names=("telechat", "telechat2"),
        mixers={"attention": Attention(qkv_bias=False, o_bias=True)},
    ),
    Family(
        names=("nanochat",),
        norm="none",
        dense=Dense(gated=False, bias=False),
    ),
    Family(
        names=("chatglm", "ChatGLMModel", "ChatGLMForConditionalGeneration"),
        mixers={
            "attention": Attention(
                kv_heads=_one_for_all_queries, qkv_bias=("add_qkv_bias", "add_bias_linear"), o_bias="add_bias_linear"
            )
        },
        dense=Dense(width=("ffn_hidden_size",), bias="add_bias_linear"),
    ),
    Family(
        names=("qwen", "QWenLMHeadModel"),
        mixers={"attention": Attention(qkv_bias=True, o_bias=False)},
        dense=Dense(bias=False, adjust=halves),
    ),
    Family(
        names=("PanguEmbedded", "pangu_embedded"),
        kinds=windowed("interleaved_sliding_window"),
        mixers={
            "attention": Attention(qkv_bias=("qkv_bias", "attention_bias", "bias"), o_bias=("attention_bias", "bias"))
        },
        dense=Dense(bias="mlp_bias"),
    ),
)
