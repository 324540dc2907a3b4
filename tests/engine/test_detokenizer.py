"""Text token by token is the text of all tokens."""

from __future__ import annotations

import pytest

from moe_optimizer.engine import LLM, SamplingParams
from moe_optimizer.engine.detokenizer import Detokenizer

TEXTS = ["def add(a, b):\n    return a", "naïve café — 漢字 🎉🎉 end", "\n\n\n   \t x", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_whole(tiny_moe_llm: LLM, text: str) -> None:
    tokenizer = tiny_moe_llm.get_tokenizer()
    prompt, token_ids = tokenizer.encode("# a comment\n"), tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams())
    shown = ""
    for token_id in token_ids:
        assert detokenizer.append(token_id) is None
        shown += detokenizer.show(finished=False)
    assert shown + detokenizer.show(finished=True) == text


def test_the_beginning_of_a_stop_string_is_held_back(tiny_moe_llm: LLM) -> None:
    tokenizer = tiny_moe_llm.get_tokenizer()
    detokenizer = Detokenizer(tokenizer, [5], SamplingParams(stop=["return a"]))
    shown, found = "", None
    for token_id in tokenizer.encode("x = 1\nreturn b\nreturn a + b"):
        found = found or detokenizer.append(token_id)
        shown += detokenizer.show(finished=found is not None)
        assert "return a" not in shown
    assert (shown, found) == ("x = 1\nreturn b\n", "return a")
