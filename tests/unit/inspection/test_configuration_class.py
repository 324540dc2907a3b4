"""Which configurations vLLM reads with built-in classes, from the text of its tables."""

from __future__ import annotations

import importlib.util

import pytest

from moe_optimizer.inspection.configuration_class import configuration_classes, parse_configuration_classes

VLLM = """
_CONFIG_REGISTRY: dict[str, type[PreTrainedConfig]] = LazyConfigDict(
    kimi_k2="DeepseekV3Config",  # a comment
    **{"unlimited-ocr": "UnlimitedOCRConfig"},
)
_ARCHITECTURE_TO_MODEL_TYPE: dict[str, str] = {
    "LongcatFlashForCausalLM": "longcat_flash",
}
_CONFIG_ATTRS_MAPPING = {"llm_config": "text_config"}
"""
TRANSFORMERS = """
CONFIG_MAPPING_NAMES = OrderedDict([("qwen3_moe", "Qwen3MoeConfig"), ("gpt2", "GPT2Config")])
CONFIG_MAPPING_NAMES.update({"mlcd": "MLCDVisionConfig"})
MODEL_NAMES_MAPPING = OrderedDict([("only_a_name", "Only A Name")])
"""


@pytest.mark.parametrize(
    ("model_type", "architectures", "answer"),
    [
        ("kimi_k2", (), True),
        ("unlimited-ocr", (), True),
        ("qwen3_moe", (), True),
        ("mlcd", (), True),
        ("only_a_name", (), False),
        ("llm_config", (), False),
        ("bailing_moe", ("LongcatFlashForCausalLM",), False),
        ("", ("LongcatFlashForCausalLM",), True),
        ("", ("OtherForCausalLM",), False),
        ("", (), False),
    ],
)
def test_a_class_is_found_by_model_type_or_by_architecture(
    model_type: str, architectures: tuple[str, ...], answer: bool
) -> None:
    classes = parse_configuration_classes(VLLM, TRANSFORMERS)
    assert classes is not None
    assert classes.has(model_type, architectures) is answer


@pytest.mark.parametrize(("vllm", "transformers"), [("", TRANSFORMERS), (VLLM, ""), ("", "")])
def test_tables_of_another_form_answer_nothing(vllm: str, transformers: str) -> None:
    assert parse_configuration_classes(vllm, transformers) is None


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("vllm", "transformers"))),
    reason="needs vllm and transformers, whose tables they are",
)
def test_the_installed_tables_are_of_the_known_form() -> None:
    classes = configuration_classes()
    assert classes is not None
    assert classes.has("kimi_k2", ())
    assert classes.has("qwen3_moe", ())
    assert classes.has("", ("LongcatFlashForCausalLM",))
    assert not classes.has("a_model_of_nobody", ())
