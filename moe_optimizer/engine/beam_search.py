"""Beam search: keeps the likeliest outputs at every token. Each round asks the engine for one token of every beam.

A beam finds the blocks of its parent in the prefix cache, so only its last block is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import Field

from moe_optimizer.engine.arguments import Arguments
from moe_optimizer.engine.llm_engine import LLMEngine, Prompt
from moe_optimizer.engine.outputs import Logprob, RequestOutput
from moe_optimizer.engine.sampling_params import MAX_LOGPROBS, SamplingParams

Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]
"""Prompts as token ids, and one set of parameters, to their outputs."""


class BeamSearchParams(Arguments):
    """The arguments are named as vLLM names them."""

    beam_width: int = Field(ge=1, le=MAX_LOGPROBS // 2)
    max_tokens: int = Field(ge=1)
    ignore_eos: bool = False
    length_penalty: float = Field(default=1.0, ge=-10, le=10)
    """Beams are compared by log-probability / length ** this; above 1 prefers long ones."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One output."""

    tokens: list[int]
    """Prompt and output."""
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """One prompt's outputs, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class _Search:
    num_prompt: int
    beams: list[BeamSearchSequence]
    complete: list[BeamSearchSequence] = field(default_factory=list)


def beam_search(
    engine: LLMEngine, generate: Generate, prompts: list[Prompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Return the `beam_width` best outputs of each prompt."""
    one_token = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * params.beam_width, detokenize=False)
    groups = [engine.make_group("", prompt, one_token, 0) for prompt in prompts]
    ends = frozenset() if params.ignore_eos else groups[0].end_token_ids if groups else frozenset()
    searches = [_Search(len(group.prompt_token_ids), [BeamSearchSequence(group.prompt_token_ids)]) for group in groups]
    for _ in range(params.max_tokens):
        beams = [beam for search in searches for beam in search.beams if len(beam.tokens) < engine.max_model_len]
        if not beams:
            break
        outputs = generate([beam.tokens for beam in beams], one_token)
        found = {id(beam): _logprobs(output) for beam, output in zip(beams, outputs, strict=True)}
        for search in searches:
            _advance(search, found, params, ends)
    results = []
    for search in searches:
        for beam in search.beams:
            beam.finish_reason = "length"

        def score(beam: BeamSearchSequence, search: _Search = search) -> float:
            return beam.cum_logprob / max(1, len(beam.tokens) - search.num_prompt) ** params.length_penalty

        best = sorted(search.complete + search.beams, key=score, reverse=True)[: params.beam_width]
        for beam in best if engine.tokenizer else ():
            beam.text = engine.tokenizer.decode(beam.tokens[search.num_prompt :], skip_special_tokens=True)
        results.append(BeamSearchOutput(best))
    return results


def _logprobs(output: RequestOutput) -> dict[int, Logprob]:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None, "log-probabilities were asked for"
    return logprobs[0]


def _advance(
    search: _Search, found: dict[int, dict[int, Logprob]], params: BeamSearchParams, ends: frozenset[int]
) -> None:
    """Replace the beams by the likeliest of their continuations; those that end are complete."""
    continued = []
    for beam in search.beams:
        for token_id, logprob in found.get(id(beam), {}).items():
            longer = BeamSearchSequence([*beam.tokens, token_id], beam.cum_logprob + logprob.logprob)
            if token_id in ends:
                longer.finish_reason = "stop"
                search.complete.append(longer)
            else:
                continued.append(longer)
    continued.sort(key=lambda beam: beam.cum_logprob, reverse=True)
    search.beams = continued[: params.beam_width]
