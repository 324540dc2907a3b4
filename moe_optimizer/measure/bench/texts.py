"""Turns the texts of a workload into the prompts of its requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.workload import CORPUS, RANDOM
from moe_optimizer.measure.corpus import prompts_of_lines, shipped_texts

NO_DRAFTS = "random tokens judge no draft: it needs a workload with text (prompts: corpus, or a .jsonl file)"
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What prompts are taken from."""

    texts: tuple[str, ...]
    whole: bool
    """Each text is a prompt, cut where it is longer than the request; else prompts are pieces of all together."""


def texts_of(prompts: str) -> Texts | None:
    """Return what `prompts` of a workload names; None for random tokens.

    Raises:
        InputError: the file cannot be read, or holds no prompts.
    """
    if prompts == RANDOM:
        return None
    if prompts == CORPUS:
        return Texts(texts=shipped_texts(), whole=False)
    return Texts(texts=prompts_of_lines(Path(prompts)), whole=True)


class Prompts:
    """Gives requests their tokens.

    Args:
        texts: to take them from.
        encode: of the model's tokenizer.

    Raises:
        InputError: the texts have no tokens.
    """

    def __init__(self, texts: Texts, encode: Encode) -> None:
        tokens = [found for each in texts.texts if (found := encode(each))]
        if not tokens:
            raise InputError("prompts: the texts have no tokens in this model's vocabulary")
        self._whole = texts.whole
        self._tokens: Sequence[Sequence[int]] = tokens if texts.whole else [[each for text in tokens for each in text]]

    def tokens(self, number: int, length: int) -> list[int]:
        """Return at most `length` tokens, equal for equal numbers; a corpus is read on from its beginning."""
        generator = random.Random(number)
        text = generator.choice(self._tokens)
        if self._whole:
            return list(text[:length])
        start = generator.randrange(len(text))
        return [text[(start + place) % len(text)] for place in range(length)]
