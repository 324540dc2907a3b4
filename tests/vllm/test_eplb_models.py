"""The table of models with vLLM's EPLB interface is what the installed vLLM has. No engine starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from moe_optimizer.specs.eplb_models import EPLB_ARCHITECTURES


def registered() -> dict[str, tuple[str, str]]:
    """Return architecture -> module and class of vLLM's own models."""
    from vllm.model_executor.models import registry

    tables = {**registry._TEXT_GENERATION_MODELS, **registry._MULTIMODAL_MODELS}
    return {
        name: (module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}", class_name)
        for name, (module, class_name) in tables.items()
    }


def has_interface(architecture: str) -> bool | None:
    """Return whether vLLM's class has it; None where the class cannot be imported here."""
    from vllm.model_executor.models.interfaces import MixtureOfExperts
    from vllm.model_executor.models.registry import ModelRegistry

    try:
        loaded = ModelRegistry.models[architecture].load_model_cls()
    except ImportError:
        return None
    return MixtureOfExperts in loaded.__mro__


def source_names_it(module: str) -> bool:
    """Return whether a module that cannot be imported here has such a class, or builds on one of the table."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text(encoding="utf-8")
    return "MixtureOfExperts" in source or any(name in source for name in EPLB_ARCHITECTURES)


def test_every_model_of_the_table_has_the_interface() -> None:
    modules, imported = registered(), 0
    for name in sorted(EPLB_ARCHITECTURES & modules.keys()):
        found = has_interface(name)
        imported += found is not None
        assert found or source_names_it(modules[name][0]), name
    assert imported >= 25, "too few could be imported to say anything"


def test_no_text_model_with_the_interface_is_missing_from_the_table() -> None:
    from vllm.model_executor.models import registry

    others = registry._TEXT_GENERATION_MODELS.keys() - EPLB_ARCHITECTURES
    assert [name for name in sorted(others) if has_interface(name)] == []
