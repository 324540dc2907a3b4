"""Drafting models: EAGLE-3 heads in both layouts, language models, and what is neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.draft_model import read_draft

LAYER: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048,
    "num_hidden_layers": 1,
}  # fmt: skip
TINY_MOE = Path(__file__).resolve().parents[3] / "examples" / "tiny-moe"


def folder(path: Path, config: dict[str, Any]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLMEagle3"], **LAYER},
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "transformer_layer_config": LAYER},
    ],
)
def test_an_eagle3_head_is_read_in_both_layouts(tmp_path, config):
    draft = read_draft(folder(tmp_path, config), origin="profile p")
    assert draft is not None
    assert (draft.method, draft.vocab_size, draft.num_layers) == ("eagle3", 2048, 1)
    assert draft.kv_bytes_per_token == 2 * 2 * 64 * 2
    assert draft.weight_bytes == 0  # no files


def test_a_language_model_drafts_as_one():
    draft = read_draft(str(TINY_MOE), origin="profile p")
    assert draft is not None
    assert (draft.method, draft.vocab_size) == ("draft", 2048)
    assert draft.weight_bytes > 1_000_000


def test_no_name_no_draft():
    assert read_draft(None, origin="profile p") is None


@pytest.mark.parametrize("architecture", ["EagleLlamaForCausalLM", "MedusaModel"])
def test_other_ways_to_draft_are_left_to_vllm(tmp_path, architecture):
    with pytest.raises(InputError, match=r"^profile p: ") as caught:
        read_draft(folder(tmp_path, {"architectures": [architecture], **LAYER}), origin="profile p")
    assert "--speculative-config" in str(caught.value.hint)


def test_a_missing_model_is_named_with_who_named_it(tmp_path):
    with pytest.raises(InputError, match=r"^profile p: model "):
        read_draft(str(tmp_path / "none"), origin="profile p")
