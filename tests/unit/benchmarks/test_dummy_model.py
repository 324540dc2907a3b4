from __future__ import annotations

import json

import pytest

from benchmarks.serving.dummy_model import published_shapes, write_published_shape


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v2", "qwen3_moe"])
def test_a_published_shape_has_a_tokenizer_of_one_word_for_each_token(name, tmp_path):
    from tokenizers import Tokenizer

    assert name in published_shapes()
    folder = write_published_shape(tmp_path / name, name)
    config = json.loads((folder / "config.json").read_text())
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [0, 5, config["vocab_size"] - 1]
    text = words.decode(ids)
    assert words.encode(text).ids == ids
    assert words.get_vocab_size() == config["vocab_size"]


def test_it_names_no_code_of_its_publisher(tmp_path):
    folder = write_published_shape(tmp_path / "model", "bailing_moe")
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
