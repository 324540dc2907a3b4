"""`Detokenizer`: the text of a sample, token by token."""

from typing import Any

from tokenizers.decoders import DecodeStream

from moe_optimizer.engine.sampling_params import SamplingParams

_NUM_BEFORE = 5
"""Chosen: prompt tokens decoded before the output, so that a first token keeps its leading space."""


class Detokenizer:
    """Text that later tokens do not change, and where it ends. The tokenizer is a fast one of transformers."""

    def __init__(self, tokenizer: Any, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.text = ""
        self.num_shown = 0
        """Characters given out so far."""
        self._backend = tokenizer.backend_tokenizer
        self._params = params
        self._longest_stop = max((len(text) for text in params.stop), default=1)
        self._stream = DecodeStream(prompt_token_ids[-_NUM_BEFORE:], params.skip_special_tokens)

    def append(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Add a token; return the stop string that it completes, at which the text now ends."""
        before = len(self.text)
        self.text += self._step(token_id)
        for stop in self._params.stop if may_stop else ():
            found = self.text.find(stop, max(0, before - self._longest_stop + 1))
            if found >= 0:
                self.text = self.text[: found + (len(stop) if self._params.include_stop_str_in_output else 0)]
                return stop
        return None

    def show(self, *, finished: bool) -> str:
        """Return what is new since the last call, without what may turn out to be a stop string."""
        end = len(self.text) if finished else max(self.num_shown, len(self.text) - self._longest_stop + 1)
        new, self.num_shown = self.text[self.num_shown : end], end
        return new

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # A token that changes the text before it, in some byte-fallback vocabularies: begin again behind it.
            self._stream = DecodeStream([], self._params.skip_special_tokens)
            return self._stream.step(self._backend, token_id) or ""
