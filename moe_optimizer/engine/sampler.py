"""`TorchSampler`: chooses the next token of each sequence, all of them at once, on the device of the logits.

Legend: S sequences, V vocabulary, K candidates.
"""

from typing import Any

import torch
from torch import Tensor

from moe_optimizer.engine.outputs import Logprob, SampledToken
from moe_optimizer.engine.sampling_params import SamplingParams
from moe_optimizer.engine.sequence import Sequence
from moe_optimizer.engine.upload import uploaded


class TorchSampler:
    """Greedy rows take the largest logit; the others the largest of logit / temperature + Gumbel noise.

    The second is a draw from the softmax, without computing it. The noise of a request with a seed comes from a
    generator of its own, so its samples do not depend on the batch; `seed` is that of the others.
    """

    def __init__(self, device: torch.device, seed: int, *, compiled: bool = False) -> None:
        self._largest = torch.compile(_largest, dynamic=True) if compiled else _largest
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def sample(self, logits_SV: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        if not any(sequence.params.adjusted for sequence in sequences):
            return [SampledToken(token_id, None, None) for token_id in self._choose(logits_SV, sequences).tolist()]
        logits_SV = logits_SV.float()
        reported = [row for row, sequence in enumerate(sequences) if sequence.params.reports_logprob]
        logprobs_RV = logits_SV[reported].log_softmax(-1) if reported else None
        for row, sequence in enumerate(sequences):
            params = sequence.params
            if params.min_tokens and sequence.num_output_tokens < params.min_tokens:
                logits_SV[row, sorted(sequence.group.end_token_ids)] = float("-inf")
            if params.penalized:
                _penalize(logits_SV[row], sequence)
        token_ids = self._choose(logits_SV, sequences).tolist()
        tokens = [SampledToken(token_id, None, None) for token_id in token_ids]
        if logprobs_RV is not None:
            params = [sequences[row].params for row in reported]
            chosen = _with_logprobs(logprobs_RV, [token_ids[row] for row in reported], params)
            for row, token in zip(reported, chosen, strict=True):
                tokens[row] = token
        return tokens

    def _choose(self, logits_SV: Tensor, sequences: list[Sequence]) -> Tensor:
        params = [sequence.params for sequence in sequences]
        if all(each.greedy for each in params):
            return logits_SV.float().argmax(-1)
        temperatures = [each.params.temperature_at(each.num_output_tokens) for each in sequences]
        temperature_S1 = _column(temperatures, logits_SV)
        if any(each.filtered for each in params):
            logits_SV, temperature_S1 = filtered(_scaled(logits_SV, temperature_S1), params), temperature_S1.sign()
        noise_SV = torch.empty_like(logits_SV, dtype=torch.float32).exponential_(generator=self._generator)
        for row, sequence in enumerate(sequences):
            if sequence.params.seed is not None:
                noise_SV[row].exponential_(generator=_generator_of(sequence, logits_SV.device))
        return self._largest(logits_SV, temperature_S1, noise_SV)


def filtered(scores_SV: Tensor, params: list[SamplingParams]) -> Tensor:
    """Return the scores with minus infinity for every token that top-k, top-p or min-p leaves out."""
    size = scores_SV.shape[-1]
    top_k = [min(each.top_k, size) if each.top_k > 0 else size for each in params]
    by_top_p = any(each.top_p < 1 for each in params)
    if any(each.min_p > 0 for each in params):
        floor_S1 = scores_SV.amax(-1, keepdim=True) + _column([float(each.min_p) for each in params], scores_SV).log()
        scores_SV = scores_SV.masked_fill(scores_SV < floor_S1, float("-inf"))
    if not by_top_p and min(top_k) == size:
        return scores_SV
    best_SK, ids_SK = scores_SV.topk(max(top_k), dim=-1)
    out_SK = torch.arange(max(top_k), device=scores_SV.device) >= _column(top_k, scores_SV)
    if by_top_p:
        top_p_S1 = _column([float(each.top_p) for each in params], scores_SV)
        probs_SK = best_SK.masked_fill(out_SK, float("-inf")).softmax(-1)
        # A token is left out if those before it reach top_p without it; the first never is.
        reached_SK = (probs_SK.cumsum(-1) - probs_SK >= top_p_S1) & (top_p_S1 < 1)
        reached_SK[:, 0] = False
        out_SK |= reached_SK
    return torch.full_like(scores_SV, float("-inf")).scatter(1, ids_SK, best_SK.masked_fill(out_SK, float("-inf")))


def _column(values: list[Any], like: Tensor) -> Tensor:
    return uploaded(torch.tensor(values), like.device)[:, None]


def _scaled(logits_SV: Tensor, temperature_S1: Tensor) -> Tensor:
    return logits_SV.float() / torch.where(temperature_S1 > 0, temperature_S1, 1.0)


def _largest(logits_SV: Tensor, temperature_S1: Tensor, exponential_SV: Tensor) -> Tensor:
    """Return the place of the largest score; in random rows with Gumbel noise, minus the log of exponential noise."""
    return (_scaled(logits_SV, temperature_S1) - exponential_SV.log() * (temperature_S1 > 0)).argmax(-1)


def _penalize(logits_V: Tensor, sequence: Sequence) -> None:
    params = sequence.params
    seen = torch.tensor(sequence.token_ids, device=logits_V.device)
    if params.repetition_penalty != 1:
        unique = seen.unique()
        values, penalty = logits_V[unique], params.repetition_penalty
        logits_V[unique] = torch.where(values > 0, values / penalty, values * penalty)
    generated, counts = seen[len(sequence.group.prompt_token_ids) :].unique(return_counts=True)
    logits_V[generated] -= params.presence_penalty + params.frequency_penalty * counts


def _generator_of(sequence: Sequence, device: torch.device) -> torch.Generator:
    if sequence.generator is None:
        seed = ((sequence.params.seed or 0) + sequence.index) % (1 << 63)
        sequence.generator = torch.Generator(device=device).manual_seed(seed)
    return sequence.generator


def _with_logprobs(logprobs_RV: Tensor, token_ids: list[int], params: list[SamplingParams]) -> list[SampledToken]:
    """Return the chosen tokens with their log-probabilities and those of the most likely ones."""
    values_R1 = logprobs_RV.gather(1, _column(token_ids, logprobs_RV))
    ranks, values = ((logprobs_RV > values_R1).sum(-1) + 1).tolist(), values_R1[:, 0].tolist()
    most = max(each.logprobs or 0 for each in params)
    best_values, best_ids = (each.tolist() for each in logprobs_RV.topk(min(most, logprobs_RV.shape[1]), dim=-1))
    tokens = []
    for row, (token_id, each) in enumerate(zip(token_ids, params, strict=True)):
        shown = None
        if each.logprobs is not None:
            pairs = zip(best_ids[row][: each.logprobs], best_values[row], strict=False)
            shown = {other: Logprob(value, rank) for rank, (other, value) in enumerate(pairs, 1)}
            shown.setdefault(token_id, Logprob(values[row], ranks[row]))
        tokens.append(SampledToken(token_id, values[row], shown))
    return tokens
