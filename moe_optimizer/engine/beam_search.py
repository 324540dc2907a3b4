"""Beam search: keeps the likeliest outputs at every token. Each round asks the engine for one token of every beam.

A beam is a request without an end. Those behind it are forked from it: they share its blocks, and copy one before they
write into it. Then it is aborted.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import count
from operator import attrgetter

from pydantic import Field

from moe_optimizer.arguments import Arguments
from moe_optimizer.engine.llm_engine import LLMEngine, Prompt
from moe_optimizer.engine.outputs import Logprob
from moe_optimizer.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from moe_optimizer.engine.sequence import SequenceGroup

_ids = count()


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
    request: SequenceGroup | None = field(default=None, repr=False)
    """That computes it, or of a new one the beam before it; None at the end."""


@dataclass(slots=True)
class BeamSearchOutput:
    """One prompt's outputs, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search(engine: LLMEngine, prompts: list[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
    """Return the `beam_width` best outputs of each prompt."""
    width = params.beam_width
    endless = SamplingParams(temperature=0, max_tokens=None, logprobs=2 * width, detokenize=False, ignore_eos=True)
    groups = [engine.make_group("", prompt, endless, 0) for prompt in prompts]
    ends = frozenset() if params.ignore_eos else engine.eos_ids
    live = [[BeamSearchSequence(group.prompt_token_ids)] for group in groups]
    complete: list[list[BeamSearchSequence]] = [[] for _ in groups]
    with ExitStack() as under_way:
        for _ in range(params.max_tokens):
            asked = [(number, beam) for number, beams in enumerate(live) for beam in beams]
            live = [[] for _ in groups]
            likely = _likely_tokens(engine, [beam for _, beam in asked], endless, under_way)
            for (number, beam), logprobs in zip(asked, likely, strict=True):
                for token_id, logprob in logprobs.items():
                    longer = BeamSearchSequence([*beam.tokens, token_id], beam.cum_logprob + logprob.logprob)
                    longer.request, longer.finish_reason = beam.request, "stop" if token_id in ends else "length"
                    closed = token_id in ends or len(longer.tokens) == engine.max_model_len
                    (complete if closed else live)[number].append(longer)
            live = [nlargest(width, beams, key=attrgetter("cum_logprob")) for beams in live]
    results = []
    for group, found in zip(groups, map(list.__add__, complete, live), strict=True):
        start = len(group.prompt_token_ids)
        score = {id(beam): beam.cum_logprob / (len(beam.tokens) - start) ** params.length_penalty for beam in found}
        best = nlargest(width, found, key=lambda beam, score=score: score[id(beam)])
        for beam in best:
            beam.request = None
            beam.text = engine.tokenizer and engine.tokenizer.decode(beam.tokens[start:], skip_special_tokens=True)
        results.append(BeamSearchOutput(best))
    return results


def _likely_tokens(
    engine: LLMEngine, beams: list[BeamSearchSequence], params: SamplingParams, under_way: ExitStack
) -> list[dict[int, Logprob]]:
    """Fork every beam from the one before it, and step until it has a token; return the likeliest in its place."""
    ids = [f"beam-{next(_ids)}" for _ in beams]
    with under_way.pop_all():
        for request_id, beam in zip(ids, beams, strict=True):
            parent, beam.request = beam.request, engine.make_group(request_id, beam.tokens, params, 0)
            engine.add_group(beam.request, parent=parent)
            under_way.callback(engine.abort_request, request_id)
    found: dict[str, dict[int, Logprob]] = {}
    while not found.keys() >= {*ids}:
        for output in engine.step():
            found.setdefault(output.request_id, (output.outputs[0].logprobs or [{}])[0])
            if output.request_id in ids and engine.scheduler.waiting:
                # Its seat is for a beam that waits; those behind it will be computed again.
                engine.abort_request(output.request_id)
    return [found[request_id] for request_id in ids]
