"""`TorchSampler`: chooses the next token of each sequence, all of them at once, on its device.

Where that is the device of the logits, nothing waits for it: with asynchronous scheduling it computes the step before.
Legend: S sequences, R those that report log-probabilities, V vocabulary, K candidates, B blocks of C tokens.
"""

from operator import is_
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.sampling_params import SamplingParams
from moe_optimizer.engine.sequence import Sequence
from moe_optimizer.engine.upload import uploaded

_ALL, _COLDEST = 1 << 62, 1e-30  # divided by a temperature below 1e-37 a logit is infinite, as others are
_BLOCK = 1024
"""Chosen: tokens whose scores one program of a GPU holds; noise is drawn for as many, and for each block of them."""


class TorchSampler:
    """Greedy rows take the largest logit; the others the largest of logit / temperature + Gumbel noise.

    The second is a draw from the softmax, without computing it. The noise of a request with a seed comes from a
    generator of its own, so its samples do not depend on the batch; `seed` is that of the others.
    """

    def __init__(self, device: torch.device, seed: int, *, compiled: bool = False) -> None:
        self._largest = torch.compile(_largest, dynamic=True) if compiled else _largest
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._device = device
        self._rows = _Rows([], device)
        self._sampled_S = torch.empty(0)
        """Of the step before."""

    def sample(self, logits_SV: Tensor, sequences: list[Sequence]) -> SampledTokens:
        logits_SV, params = logits_SV.to(self._device), [sequence.group.params for sequence in sequences]
        # Most steps are of the requests of the one before.
        if len(params) != len(self._rows.params) or not all(map(is_, params, self._rows.params)):
            self._rows = _Rows(params, self._device)
        rows = self._rows
        if rows.adjusted or rows.reported:
            logits_SV = logits_SV.float()
        logprobs_RV = logits_SV[rows.reported_R].log_softmax(-1) if rows.reported else None
        for row in rows.adjusted:
            self._adjust(logits_SV[row], sequences[row])
        token_ids_S = self._sampled_S = self._choose(logits_SV, sequences)
        if logprobs_RV is None:
            return SampledTokens(token_ids_S)
        values_R1 = logprobs_RV.gather(1, token_ids_S[rows.reported_R, None])
        ranks_R = (logprobs_RV > values_R1).sum(-1)
        most = max(count for _, count in rows.reported)
        likeliest = logprobs_RV.topk(min(most, logprobs_RV.shape[1]), dim=-1)
        return SampledTokens(token_ids_S, rows.reported, (values_R1[:, 0], ranks_R, *likeliest))

    def _choose(self, logits_SV: Tensor, sequences: list[Sequence]) -> Tensor:
        rows = self._rows
        if rows.greedy:
            return logits_SV.float().argmax(-1)
        temperature_S1 = rows.temperature_S1
        if rows.scheduled:
            temperatures = [each.params.temperature_at(each.num_output_tokens) for each in sequences]
            temperature_S1 = _column(temperatures, self._device)
        if rows.filtered:
            logits_SV, temperature_S1 = rows.kept(_scaled(logits_SV, temperature_S1)), temperature_S1.sign()
        count = _BLOCK - (-logits_SV.shape[1] // _BLOCK)
        noise_SN = torch.empty((len(sequences), count), device=self._device).exponential_(generator=self._generator)
        for row in rows.seeded:
            sequence = sequences[row]
            if sequence.generator is None:
                seed = ((sequence.params.seed or 0) + sequence.index) % (1 << 63)
                sequence.generator = torch.Generator(device=self._device).manual_seed(seed)
            noise_SN[row].exponential_(generator=sequence.generator)
        return self._largest(logits_SV, temperature_S1, noise_SN)

    def _adjust(self, logits_V: Tensor, sequence: Sequence) -> None:
        """Forbid the end before its time, and lower what was seen."""
        params = sequence.params
        if sequence.num_output_tokens < params.min_tokens:
            logits_V.index_fill_(0, self._ids(sequence.group.end_token_ids), float("-inf"))
        if not params.penalized:
            return
        seen = self._ids(sequence.token_ids)
        if len(sequence.token_ids) < sequence.num_tokens:
            seen = torch.cat((seen, self._sampled_S[sequence.row, None]))
        if params.repetition_penalty != 1:
            was_seen_V = torch.zeros_like(logits_V, dtype=torch.bool).index_fill_(0, seen, value=True)
            penalty = params.repetition_penalty
            penalized_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
            logits_V.copy_(torch.where(was_seen_V, penalized_V, logits_V))
        generated = seen[len(sequence.group.prompt_token_ids) :]
        counts_V = torch.zeros_like(logits_V).index_add_(0, generated, torch.ones_like(generated, dtype=logits_V.dtype))
        logits_V -= params.presence_penalty * (counts_V > 0) + params.frequency_penalty * counts_V

    def _ids(self, token_ids: Any) -> Tensor:
        return uploaded(torch.tensor([*token_ids], dtype=torch.int64), self._device)


class _Rows:
    """What the parameters of a step's sequences say: of all of them, by row, and as columns on the device."""

    def __init__(self, params: list[SamplingParams], device: torch.device) -> None:
        self.params = params
        self.greedy = all(each.temperature == 0 and not each.temperature_schedule for each in params)
        self.scheduled = any(each.temperature_schedule for each in params)
        self.seeded = [row for row, each in enumerate(params) if each.seed is not None]
        self.adjusted = [row for row, each in enumerate(params) if each.penalized or each.min_tokens]
        # To be shown, or to compare samples by.
        needed = [each.logprobs is not None or each.num_samples > each.n for each in params]
        self.reported = [(row, each.logprobs or 0) for row, each in enumerate(params) if needed[row]]
        self.reported_R = uploaded(torch.tensor([row for row, _ in self.reported], dtype=torch.int64), device)
        self.temperature_S1 = _column([each.temperature for each in params], device)
        self._by_min_p = any(each.min_p > 0 for each in params)
        self._by_top_k = any(each.top_k > 0 for each in params)
        self._by_top_p = any(each.top_p < 1 for each in params)
        self.filtered = self._by_min_p or self._by_top_k or self._by_top_p
        top_k = [each.top_k if each.top_k > 0 else _ALL for each in params]
        self._most_k, self._top_k_S1 = max(top_k, default=_ALL), _column(top_k, device)
        self._top_p_S1 = _column([float(each.top_p) for each in params], device)
        self._min_p_S1 = _column([float(each.min_p) for each in params], device)

    def kept(self, scores_SV: Tensor) -> Tensor:
        """Return the scores with minus infinity for every token that top-k, top-p or min-p leaves out."""
        if self._by_min_p:
            floor_S1 = scores_SV.amax(-1, keepdim=True) + self._min_p_S1.log()
            scores_SV = scores_SV.masked_fill(scores_SV < floor_S1, float("-inf"))
        if not self._by_top_p and not self._by_top_k:
            return scores_SV
        num_candidates = min(self._most_k, scores_SV.shape[-1])
        best_SK, ids_SK = scores_SV.topk(num_candidates, dim=-1)
        out_SK = torch.arange(num_candidates, device=scores_SV.device) >= self._top_k_S1
        if self._by_top_p:
            probs_SK = best_SK.masked_fill(out_SK, float("-inf")).softmax(-1)
            # A token is left out if those before it reach top_p without it; the first never is.
            reached_SK = (probs_SK.cumsum(-1) - probs_SK >= self._top_p_S1) & (self._top_p_S1 < 1)
            reached_SK[:, 0] = False
            out_SK |= reached_SK
        return torch.full_like(scores_SV, float("-inf")).scatter(1, ids_SK, best_SK.masked_fill(out_SK, float("-inf")))


def _column(values: list[Any], device: torch.device) -> Tensor:
    return uploaded(torch.tensor(values), device)[:, None]


def _scaled(logits_SV: Tensor, temperature_S1: Tensor) -> Tensor:
    return logits_SV.float() / torch.where(temperature_S1 > 0, temperature_S1.clamp(min=_COLDEST), 1.0)


def _largest(logits_SV: Tensor, temperature_S1: Tensor, exponential_SN: Tensor) -> Tensor:
    """Return the place of the largest score; in random rows with Gumbel noise, minus the log of exponential noise.

    The largest of a block's scores with noise is distributed as the log of the sum of their exponentials with noise. So
    the block is chosen first and then one of its tokens, with noise for B blocks and C tokens, not for all V.
    """
    scores_SV = _scaled(logits_SV, temperature_S1)
    noise_SN = torch.where(temperature_S1 > 0, -exponential_SN.log(), 0.0)
    scores_SBC = F.pad(scores_SV, (0, -scores_SV.shape[1] % _BLOCK), value=float("-inf")).unflatten(1, (-1, _BLOCK))
    blocks_SB = torch.where(temperature_S1 > 0, scores_SBC.logsumexp(-1), scores_SBC.amax(-1))
    first_S1 = (blocks_SB + noise_SN[:, :-_BLOCK]).argmax(-1, keepdim=True) * _BLOCK
    places_SC = first_S1 + torch.arange(_BLOCK, device=first_S1.device)
    last = scores_SV.shape[1] - 1
    inside_SC = scores_SV.gather(1, places_SC.clamp(max=last)).where(places_SC <= last, float("-inf"))
    return (inside_SC + noise_SN[:, -_BLOCK:]).argmax(-1) + first_S1[:, 0]
