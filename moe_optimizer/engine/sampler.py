"""`TorchSampler`: chooses the next token of each sequence, all of them at once, on the device of the logits.

Legend: S sequences, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_optimizer.engine.outputs import Logprob, SampledToken
from moe_optimizer.engine.sampling_filters import SamplingFilters
from moe_optimizer.engine.sampling_params import SamplingParams
from moe_optimizer.engine.sequence import Sequence


class TorchSampler:
    """Greedy rows take the largest logit; the others the largest of logit / temperature + Gumbel noise.

    The second is a draw from the softmax, without computing it. The noise of a request with a seed comes from a
    generator of its own, so its samples do not depend on the batch.

    Args:
        device: of the logits.
        seed: of the requests that have none.
        compiled: join the operations on the logits by torch.compile.
    """

    def __init__(self, device: torch.device, seed: int, *, compiled: bool = False) -> None:
        self._largest = torch.compile(_largest, dynamic=True) if compiled else _largest
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._filters: tuple[list[SamplingParams], SamplingFilters] | None = None

    def sample(self, logits_SV: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        """Return a token for each row."""
        params = [sequence.params for sequence in sequences]
        reported = [row for row, each in enumerate(params) if _reports_logprob(each)]
        logprobs_RV = logits_SV[reported].log_softmax(-1) if reported else None
        for logits_V, sequence in zip(logits_SV, sequences, strict=True):
            if sequence.num_output_tokens < sequence.params.min_tokens:
                logits_V[sorted(sequence.group.end_token_ids)] = float("-inf")
            if sequence.params.penalized:
                _penalize(logits_V, sequence)
        token_ids = self._choose(logits_SV, sequences, params).tolist()
        tokens = [SampledToken(token_id, None, None) for token_id in token_ids]
        if logprobs_RV is not None:
            chosen = _with_logprobs(
                logprobs_RV, [token_ids[row] for row in reported], [params[row] for row in reported]
            )
            for row, token in zip(reported, chosen, strict=True):
                tokens[row] = token
        return tokens

    def _choose(self, logits_SV: Tensor, sequences: list[Sequence], params: list[SamplingParams]) -> Tensor:
        if all(each.greedy for each in params):
            return logits_SV.argmax(-1)
        filters = self._filters_of(params, logits_SV.device)
        temperature_S1 = filters.temperature_S1
        if filters.scheduled:
            values = [sequence.params.temperature_at(sequence.num_output_tokens) for sequence in sequences]
            temperature_S1 = torch.tensor(values, device=logits_SV.device)[:, None]
        random_S1 = temperature_S1 > 0
        scores_SV = filters.apply(logits_SV / torch.where(random_S1, temperature_S1, 1.0))
        return self._largest(scores_SV, self._exponential(scores_SV, sequences), random_S1)

    def _filters_of(self, params: list[SamplingParams], device: torch.device) -> SamplingFilters:
        """Return the filters as tensors; those of the step before, if the batch is the same."""
        if self._filters is None or self._filters[0] != params:
            self._filters = (params, SamplingFilters.of(params, device))
        return self._filters[1]

    def _exponential(self, like_SV: Tensor, sequences: list[Sequence]) -> Tensor:
        noise = torch.empty_like(like_SV).exponential_(generator=self._generator)
        for row, sequence in enumerate(sequences):
            if sequence.params.seed is not None:
                noise[row].exponential_(generator=_generator_of(sequence, like_SV.device))
        return noise


def _largest(scores_SV: Tensor, exponential_SV: Tensor, random_S1: Tensor) -> Tensor:
    """Return the place of the largest score; in random rows with Gumbel noise, minus the log of exponential noise."""
    return (scores_SV - exponential_SV.log() * random_S1).argmax(-1)


def _penalize(logits_V: Tensor, sequence: Sequence) -> None:
    params = sequence.params
    seen = torch.tensor(sequence.token_ids, device=logits_V.device)
    if params.repetition_penalty != 1:
        unique = seen.unique()
        values = logits_V[unique]
        logits_V[unique] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    generated, counts = seen[len(sequence.group.prompt_token_ids) :].unique(return_counts=True)
    logits_V[generated] -= params.presence_penalty + params.frequency_penalty * counts


def _generator_of(sequence: Sequence, device: torch.device) -> torch.Generator:
    if sequence.generator is None:
        assert sequence.params.seed is not None, "a request without seed has no generator of its own"
        seed = (sequence.params.seed + sequence.index) % (1 << 63)
        sequence.generator = torch.Generator(device=device).manual_seed(seed)
    return sequence.generator


def _reports_logprob(params: SamplingParams) -> bool:
    return params.logprobs is not None or params.num_samples > params.n


def _with_logprobs(logprobs_RV: Tensor, token_ids: list[int], params: list[SamplingParams]) -> list[SampledToken]:
    """Return the chosen tokens with their log-probabilities and those of the most likely ones."""
    chosen_R1 = torch.tensor(token_ids, device=logprobs_RV.device)[:, None]
    values_R1 = logprobs_RV.gather(1, chosen_R1)
    ranks = ((logprobs_RV > values_R1).sum(-1) + 1).tolist()
    most = max(each.logprobs or 0 for each in params)
    best = logprobs_RV.topk(min(most, logprobs_RV.shape[1]), dim=-1)
    best_values, best_ids, values = best.values.tolist(), best.indices.tolist(), values_R1[:, 0].tolist()
    tokens = []
    for row, (token_id, each) in enumerate(zip(token_ids, params, strict=True)):
        if each.logprobs is None:
            tokens.append(SampledToken(token_id, values[row], None))
            continue
        pairs = zip(best_ids[row][: each.logprobs], best_values[row], strict=False)
        shown = {other: Logprob(value, rank) for rank, (other, value) in enumerate(pairs, 1)}
        shown.setdefault(token_id, Logprob(values[row], ranks[row]))
        tokens.append(SampledToken(token_id, values[row], shown))
    return tokens
