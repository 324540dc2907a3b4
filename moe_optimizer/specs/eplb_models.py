"""Lists the models whose class in vLLM has the interface of its load balancer (EPLB)."""

from __future__ import annotations

EPLB_ARCHITECTURES = frozenset(
    {
        "AXK1ForCausalLM",
        "AfmoeForCausalLM",
        "DeepseekForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV4ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "Glm4vMoeForConditionalGeneration",
        "GlmMoeDsaForCausalLM",
        "InternS1ProForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "K2HorizonForCausalLM",
        "KimiK25ForConditionalGeneration",
        "KimiLinearForCausalLM",
        "KimiVLForConditionalGeneration",
        "Lfm2MoeForCausalLM",
        "Llama4ForCausalLM",
        "Llama4ForConditionalGeneration",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MistralLarge3ForCausalLM",
        "MixtralForCausalLM",
        "NemotronHForCausalLM",
        "NemotronHPuzzleForCausalLM",
        "PanguProMoEV2ForCausalLM",
        "PanguUltraMoEForCausalLM",
        "Param2MoEForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3OmniMoeForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "SarvamMLAForCausalLM",
        "Step3p5ForCausalLM",
    }
)
"""Architectures whose class, or that of the language model inside it, implements vLLM's MixtureOfExperts in 0.26 and
0.32, wherever the version has the class; for others vLLM takes --enable-eplb and moves nothing. Source: vLLM's model
registry and models, compared with the installed ones in tests/vllm/test_eplb_models.py. Left out: classes that take
their language model from the checkpoint's configuration, and models run through Transformers."""
