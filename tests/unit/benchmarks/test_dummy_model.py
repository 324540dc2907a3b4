from __future__ import annotations

import json

import pytest

from benchmarks.serving.dummy_model import published_shapes, write_draft_model, write_published_shape


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2", "qwen3_moe"])
def test_a_published_shape_has_a_tokenizer_of_one_word_for_each_token(name, tmp_path):
    from tokenizers import Tokenizer

    assert name in published_shapes()
    folder = write_published_shape(tmp_path / "models" / name, name)
    config = json.loads((folder / "config.json").read_text())
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [0, 5, config["vocab_size"] - 1]
    text = words.decode(ids)
    assert words.encode(text).ids == ids
    assert words.get_vocab_size() == config["vocab_size"]


def test_it_names_no_code_of_its_publisher(tmp_path):
    folder = write_published_shape(tmp_path / "model", "bailing_moe")
    assert "auto_map" not in json.loads((folder / "config.json").read_text())


def test_a_draft_has_the_vocabulary_and_the_cache_of_what_it_drafts_for(tmp_path):
    target = write_published_shape(tmp_path / "target", "qwen3_moe")
    draft = write_draft_model(tmp_path / "models" / "draft", target)
    of_target, of_draft = (json.loads((folder / "config.json").read_text()) for folder in (target, draft))
    for field in ("vocab_size", "num_key_value_heads", "head_dim"):
        assert of_draft[field] == of_target[field]
    assert (draft / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
