"""Whether vLLM has an architecture, read from the text of its registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_optimizer.inspection import servable
from moe_optimizer.inspection.servable import (
    TABLE,
    is_servable,
    parse_registry,
    runs_through_transformers,
    vllm_registry,
)

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
        (("ADraft",), False, "not in the registry"),
        (("ElsewhereForCausalLM",), False, "not in the registry"),
        (("OldForCausalLM",), False, "last served by vLLM 0.10.2"),
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


def test_shipped_table_answers_where_no_vllm_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servable.importlib.util, "find_spec", lambda name: None)
    vllm_registry.cache_clear()
    try:
        served, reason = is_servable(("Qwen3MoeForCausalLM",))
    finally:
        vllm_registry.cache_clear()
    assert served
    assert "shipped table" in reason


def test_shipped_table_is_the_registry_of_the_vllm_it_names() -> None:
    vllm_version = pytest.importorskip("vllm.version").__version__
    table = json.loads(TABLE.read_text())
    if not vllm_version.startswith(f"{table['version']}."):
        pytest.skip(f"vLLM {vllm_version} is installed, the table is of {table['version']}")
    assert vllm_registry().served == set(table["served"])
    assert vllm_registry().removed == table["removed"]
