"""The table of families as a whole."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from moe_optimizer.inspection import families
from moe_optimizer.inspection.servable import vllm_registry

ROOT = Path(__file__).parents[3]
DEFAULTS = Path(families.__file__).with_name("class_defaults.json")


def test_no_model_type_or_architecture_is_listed_twice() -> None:
    names = [name for family in families.all_families() for name in family.names]
    assert sorted(names) == sorted(set(names))
    # Nor in two families by names that are found as one.
    folded = [
        name for family in families.all_families() for name in {each.lower().replace("_", "") for each in family.names}
    ]
    assert sorted(folded) == sorted(set(folded))


def test_an_architecture_is_found_by_its_model_type_unless_it_is_of_another_kind() -> None:
    assert families.find_family("Qwen3MoeForCausalLM") is families.find_family("qwen3_moe")
    assert families.find_family("LLaMAForCausalLM") is families.find_family("llama")
    assert families.find_family("Qwen3MoeForSequenceClassification", "Qwen3Moe") is None


def test_every_family_can_be_found() -> None:
    for family in families.all_families():
        assert all(families.find_family(name) is family for name in family.names)


# Mixture-of-experts architectures in vLLM 0.32 whose language model has rules of its own here. Wrappers for other
# modalities are found through the nested configuration's model_type.
SERVED_MIXTURES = [
    "AXK1",
    "Afmoe",
    "BailingMoe",
    "BailingMoeV2",
    "BailingMoeV2_5",
    "BailingMoeV3",
    "Cohere2Moe",
    "Dbrx",
    "Deepseek",
    "DeepseekV2",
    "DeepseekV3",
    "DeepseekV32",
    "DeepseekV4",
    "Dots3Note",
    "Ernie4_5_Moe",
    "ExaoneMoe",
    "Gemma4",
    "Glm4Moe",
    "Glm4MoeLite",
    "GlmMoeDsa",
    "Glm5Next",
    "GptOss",
    "GraniteMoe",
    "GraniteMoeHybrid",
    "GraniteMoeShared",
    "GraniteMoeSWA",
    "HYV3",
    "HYV4",
    "Inkling",
    "Jamba",
    "K2Horizon",
    "KimiLinear",
    "Laguna",
    "Lfm2Moe",
    "Llama4",
    "LongcatFlash",
    "MiMoV2Flash",
    "MiMoV2",
    "MiniCPM",
    "MiniMaxM2",
    "MiniMaxM3Sparse",
    "Mixtral",
    "NemotronH",
    "Olmoe",
    "PanguUltraMoE",
    "Param2MoE",
    "PhiMoE",
    "Qwen2Moe",
    "Qwen3Moe",
    "Qwen3Next",
    "Qwen3_5Moe",
    "SarvamMLA",
    "SarvamMoE",
    "Step3Text",
    "Step3p5",
    "FlexOlmo",
    "HunYuanMoEV1",
    "Mellum",
]


@pytest.mark.parametrize("name", SERVED_MIXTURES)
def test_served_mixture_has_rules(name: str) -> None:
    architecture = f"{name}ForCausalLM"
    registry = vllm_registry()
    assert registry is None or architecture in registry.served
    family = families.find_family(architecture)
    assert family is not None
    assert family.experts is not None


def test_defaults_never_hold_an_expert_count() -> None:
    table = json.loads(DEFAULTS.read_text())
    counts = {"num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"}
    assert not [name for name, row in table.items() if counts & set(row)]
    # Moondream3's published file states no size whatever: there the class is the model.
    assert [family.names[0] for family in families.all_families() if counts & set(family.defaults)] == [
        "moondream3_text"
    ]


@pytest.mark.thorough
def test_defaults_are_those_of_the_transformers_they_name() -> None:
    transformers = pytest.importorskip("transformers")
    named = json.loads(DEFAULTS.read_text())["(transformers)"]["version"]
    if transformers.__version__ != named:
        pytest.skip(f"transformers {transformers.__version__} is installed, the table is of {named}")
    script = load_script("update_class_defaults")
    assert script.to_json(script.class_defaults()) == DEFAULTS.read_text()


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
