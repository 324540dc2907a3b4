"""`OutputProcessor`: takes sampled tokens in, decides when a sample ends, and gives outputs out."""

from heapq import nlargest
from operator import attrgetter
from typing import Any

from moe_optimizer.engine.detokenizer import Detokenizer
from moe_optimizer.engine.outputs import CompletionOutput, Logprob, RequestOutput
from moe_optimizer.engine.sampling_params import RequestOutputKind
from moe_optimizer.engine.sequence import Sequence, SequenceGroup


class OutputProcessor:
    """Args: a tokenizer of transformers, or None for token ids only."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer

    def accept(self, sequence: Sequence, token_id: int, logprobs: dict[int, Logprob] | None) -> None:
        """Add a token to its sequence, and set `finish_reason` if it is the last."""
        sequence.token_ids.append(token_id)
        if logprobs is not None:
            sequence.cumulative_logprob += logprobs[token_id].logprob
            if sequence.params.logprobs is not None:
                sequence.logprobs.append(self._named(logprobs))
        self._check_end(sequence, token_id)

    def output(self, group: SequenceGroup) -> RequestOutput | None:
        """Return what the request is to be told after a step; None if it is nothing."""
        params, sequences, finished = group.params, group.sequences, group.finished
        if not finished and (params.final_only or group.unread):
            return None
        if params.num_samples > params.n:
            sequences = nlargest(params.n, sequences, key=attrgetter("mean_logprob"))
        return RequestOutput(
            request_id=group.request_id, prompt=group.prompt, prompt_token_ids=group.prompt_token_ids,
            outputs=[self._completion(index, sequence) for index, sequence in enumerate(sequences)],
            finished=finished, num_cached_tokens=group.num_cached_tokens,
        )  # fmt: skip

    def _check_end(self, sequence: Sequence, token_id: int) -> None:
        group = sequence.group
        params, num_output_tokens = group.params, len(sequence.token_ids) - len(group.prompt_token_ids)
        may_stop = num_output_tokens >= params.min_tokens
        ends = may_stop and token_id in group.end_token_ids
        if ends:
            sequence.finish_reason = "stop"
            sequence.stop_reason = token_id if token_id in params.stop_token_ids else None
        if sequence.detokenizer is None and self.tokenizer is not None and params.detokenize:
            sequence.detokenizer = Detokenizer(self.tokenizer, group.prompt_token_ids, params)
        # The text of a token that ends the output is not part of it.
        shown = sequence.detokenizer is not None and (not ends or params.include_stop_str_in_output)
        if shown and (stop := sequence.detokenizer.append(token_id, may_stop=may_stop)) is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", stop
        if sequence.finish_reason is None and len(sequence.token_ids) == group.max_num_tokens:
            sequence.finish_reason = "length"

    def _completion(self, index: int, sequence: Sequence) -> CompletionOutput:
        """Return a sample: everything so far, or with DELTA what is new since the output before."""
        delta = sequence.params.output_kind is RequestOutputKind.DELTA
        begin, token_ids = sequence.num_reported if delta else 0, sequence.output_token_ids
        sequence.num_reported = len(token_ids)
        shows_logprobs, text = sequence.params.logprobs is not None, ""
        if detokenizer := sequence.detokenizer:
            detokenizer.num_shown = detokenizer.num_shown if delta else 0
            text = detokenizer.show(finished=sequence.finished)
        return CompletionOutput(
            index=index, text=text, token_ids=token_ids[begin:],
            cumulative_logprob=sequence.cumulative_logprob if shows_logprobs else None,
            logprobs=sequence.logprobs[begin:] if shows_logprobs else None,
            finish_reason=sequence.finish_reason, stop_reason=sequence.stop_reason,
        )  # fmt: skip

    def _named(self, logprobs: dict[int, Logprob]) -> dict[int, Logprob]:
        if self.tokenizer is None:
            return logprobs
        return {token: each._replace(decoded_token=self.tokenizer.decode([token])) for token, each in logprobs.items()}
