"""Whether vLLM has an architecture and reads its configuration, from the text of its tables."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.inspection import servable
from moe_optimizer.inspection.servable import (
    configuration_classes,
    is_servable,
    parse_configuration_classes,
    parse_registry,
    runs_through_transformers,
    vllm_registry,
)
from moe_optimizer.specs.model import ModelSpec

REGISTRY = """
import something_that_is_not_here
_TEXT_GENERATION_MODELS = {"AForCausalLM": ("a", "A"), "BForCausalLM": ("b", "B")}
_MULTIMODAL_MODELS: dict[str, tuple[str, str]] = {"CForConditionalGeneration": ("c", "C")}
_SPECULATIVE_DECODING_MODELS = {"ADraft": ("a", "Draft")}
_PREVIOUSLY_SUPPORTED_MODELS = {"OldForCausalLM": "0.10.2"}
_OOT_SUPPORTED_MODELS = {"ElsewhereForCausalLM": "https://example.org"}
_VLLM_MODELS = {**_TEXT_GENERATION_MODELS, **_MULTIMODAL_MODELS}
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "registry.py"
    path.write_text(REGISTRY)
    parsed = parse_registry(path)
    assert parsed is not None
    monkeypatch.setattr(servable, "vllm_registry", lambda: parsed)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("architectures", "answer", "words"),
    [
        (("AForCausalLM",), True, "AForCausalLM"),
        (("Unknown", "CForConditionalGeneration"), True, "CForConditionalGeneration"),
        (("ADraft",), False, "the registry"),
        (("ElsewhereForCausalLM",), False, "the registry"),
        (("OldForCausalLM",), False, "vLLM 0.10.2"),
        ((), None, "names no architecture"),
    ],
)
def test_an_architecture_is_servable_when_vllms_registry_has_it(
    architectures: tuple[str, ...], answer: bool | None, words: str
) -> None:
    served, reason = is_servable(architectures)
    assert served is answer
    assert words in reason


@pytest.mark.parametrize(
    ("architecture", "model_type", "body", "answer"),
    [
        ("OldForCausalLM", "old", "_supports_attention_backend = True", True),
        ("OldForCausalLM", "old", "", False),
        ("OtherForCausalLM", "old", "_supports_attention_backend = True", False),
        ("OldForCausalLM", "../old", "_supports_attention_backend = True", False),
    ],
)
def test_transformers_runs_what_has_its_attention_interface(
    architecture: str, model_type: str, body: str, answer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "transformers" / "models" / "old"
    folder.mkdir(parents=True)
    (folder / "modeling_old.py").write_text(
        f"class OldPreTrainedModel(Base):\n    {body or 'pass'}\n\n\nclass OldForCausalLM(X):\n"
    )
    monkeypatch.setattr(servable, "package_folder", lambda name: tmp_path / name)
    served, reason = runs_through_transformers(architecture, model_type)
    assert served is answer
    assert not served or "Transformers backend" in reason


@pytest.mark.parametrize("text", ["", "x = (", "_TEXT_GENERATION_MODELS = load()"])
def test_registry_of_another_form_is_not_guessed_at(text: str, tmp_path: Path) -> None:
    (tmp_path / "registry.py").write_text(text)
    assert parse_registry(tmp_path / "registry.py") is None
    assert parse_registry(tmp_path / "missing.py") is None


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(servable, "package_folder", lambda name: None)
    cached = (vllm_registry, configuration_classes)
    for reader in cached:
        reader.cache_clear()
    yield
    for reader in cached:
        reader.cache_clear()


@pytest.mark.usefixtures("no_vllm")
def test_without_a_vllm_it_is_not_known_what_is_served(
    load_config: Callable[[str], dict[str, Any]], inspect_config: Callable[..., ModelSpec]
) -> None:
    spec = inspect_config({**load_config("qwen3_moe"), "auto_map": {"AutoConfig": "configuration.Config"}})
    assert spec.servable is None
    assert "no installed vLLM" in spec.servable_reason
    assert not spec.needs_remote_code


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


def test_a_quantisation_that_vllm_lacks_is_not_servable(
    load_config: Callable[[str], dict[str, Any]], inspect_config: Callable[..., ModelSpec]
) -> None:
    config = {**load_config("qwen3_moe"), "quantization_config": {"quant_method": "no_such_method", "bits": 4}}
    spec = inspect_config(config)
    assert spec.servable is False
    assert "'no_such_method'" in spec.servable_reason
    config["quantization_config"]["quant_method"] = "gptq"
    assert inspect_config(config).servable is True
