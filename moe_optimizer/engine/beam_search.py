"""Beam search: keeps the likeliest outputs at every token. Each round asks the engine for one token of every beam.

A beam finds the blocks of its parent in the prefix cache, so only its last block is computed again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter

from pydantic import Field

from moe_optimizer.engine.arguments import Arguments
from moe_optimizer.engine.llm_engine import LLMEngine, Prompt
from moe_optimizer.engine.outputs import RequestOutput
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
    finish_reason: str = "length"
    text: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """One prompt's outputs, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search(
    engine: LLMEngine, generate: Generate, prompts: list[Prompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Return the `beam_width` best outputs of each prompt."""
    width = params.beam_width
    one_token = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, detokenize=False)
    groups = [engine.make_group("", prompt, one_token, 0) for prompt in prompts]
    ends = frozenset() if params.ignore_eos or not groups else groups[0].end_token_ids
    live = [[BeamSearchSequence(group.prompt_token_ids)] for group in groups]
    complete: list[list[BeamSearchSequence]] = [[] for _ in groups]
    for _ in range(params.max_tokens):
        for done, beams in zip(complete, live, strict=True):
            done += [beam for beam in beams if len(beam.tokens) == engine.max_model_len]
        asked = [
            (number, beam) for number, beams in enumerate(live) for beam in beams
            if len(beam.tokens) < engine.max_model_len
        ]  # fmt: skip
        live = [[] for _ in groups]
        outputs = generate([beam.tokens for _, beam in asked], one_token)
        for (number, beam), output in zip(asked, outputs, strict=True):
            for token_id, logprob in (output.outputs[0].logprobs or [{}])[0].items():
                longer = BeamSearchSequence([*beam.tokens, token_id], beam.cum_logprob + logprob.logprob)
                if token_id in ends:
                    longer.finish_reason = "stop"
                (complete if token_id in ends else live)[number].append(longer)
        live = [nlargest(width, beams, key=attrgetter("cum_logprob")) for beams in live]
    results = []
    for group, found in zip(groups, map(list.__add__, complete, live), strict=True):
        start = len(group.prompt_token_ids)
        score = {id(beam): beam.cum_logprob / (len(beam.tokens) - start) ** params.length_penalty for beam in found}
        best = nlargest(width, found, key=lambda beam, score=score: score[id(beam)])
        for beam in best if engine.tokenizer else ():
            beam.text = engine.tokenizer.decode(beam.tokens[start:], skip_special_tokens=True)
        results.append(BeamSearchOutput(best))
    return results
