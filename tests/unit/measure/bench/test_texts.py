"""Prompts of a workload that are text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.texts import Prompts, Texts, texts_of
from moe_optimizer.measure.bench.workload import load_workload


def encode(text: str) -> list[int]:
    """One token a character."""
    return list(map(ord, text))


def test_a_piece_of_the_corpus_is_as_long_as_asked_and_reads_on_from_the_beginning() -> None:
    prompts = Prompts(Texts(texts=("abc", "", "de"), whole=False), encode)
    for number in range(20):
        piece = "".join(map(chr, prompts.tokens(number, 12)))
        assert len(piece) == 12
        assert piece in "abcde" * 4
        assert prompts.tokens(number, 12) == prompts.tokens(number, 12)
    assert len({tuple(prompts.tokens(number, 5)) for number in range(20)}) == 5


def test_a_users_prompt_is_sent_as_it_is_and_cut_where_it_is_too_long() -> None:
    prompts = Prompts(Texts(texts=("first", "the second"), whole=True), encode)
    assert {"".join(map(chr, prompts.tokens(number, 8))) for number in range(20)} == {"first", "the seco"}


def test_texts_without_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="no tokens"):
        Prompts(Texts(texts=("a",), whole=False), lambda _text: [])


def test_the_shipped_workload_of_text_takes_the_shipped_corpus() -> None:
    found = texts_of(load_workload("text").prompts)
    assert found is not None
    assert not found.whole
    assert any("Alice" in text for text in found.texts)
    assert texts_of(load_workload("chat").prompts) is None


def test_a_file_gives_its_prompts(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": each, "id": 1}) for each in ("one", "two")) + "\n\n")
    assert texts_of(str(file)) == Texts(texts=("one", "two"), whole=True)


@pytest.mark.parametrize(
    ("content", "place"),
    [("", ""), ("not json\n", ":1"), ('{"prompt": "a"}\n{"text": "b"}\n', ":2"), ('{"prompt": " "}\n', ":1")],
)
def test_a_file_of_something_else_is_refused_by_its_line(content: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=f"{file}{place}"):
        texts_of(str(file))
