"""Has the embedded engine say in float32 what a server should have said: the reference of `--against embedded`.

    python -m moe_optimizer.measure.quality.embedded REQUEST EVENTS

The engine is given the server's own tokens, so that one that differs does not make all that follow differ.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moe_optimizer.measure.process import OnStep, answer_request, run_measurement
from moe_optimizer.measure.quality.distributions import Distributions
from moe_optimizer.measure.quality.probes import Probe

if TYPE_CHECKING:
    import torch

_MODULE = "moe_optimizer.measure.quality.embedded"
_GRACE_S = 5.0
_LEAST_LENGTH = 64
"""Tokens: the prompts by which kinds of layers are suspected are shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedProbe:
    """Prompts, and what a server answered to them."""

    title: str
    prompts: tuple[tuple[int, ...], ...]
    generated: int
    """Tokens that the server generated from each at most; 0: none."""
    answers: str
    """Path of the server's distributions."""
    reference: str
    """Path to write the engine's to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedRequest:
    """What to compute."""

    model: str
    probes: tuple[EmbeddedProbe, ...]
    top_logprobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """Kinds of layers by how far rounding in them alone moves the logits, the farthest first."""

    layers: tuple[str, ...]


def compute_reference(
    model: str,
    asked: tuple[Probe, ...],
    *,
    top_logprobs: int,
    answers: Path,
    reference: Path,
    log: Path,
    on_step: OnStep,
) -> tuple[str, ...]:
    """Write the engine's distributions beside a server's, in a process of its own; return the kinds of layers by how
    much they matter.

    Raises:
        MoeOptimizerError: the engine cannot run the model.
    """
    rows = tuple(
        EmbeddedProbe(
            title=str(probe),
            prompts=probe.prompts,
            generated=probe.generated,
            answers=str(answers / f"{probe.key}.npz"),
            reference=str(reference / f"{probe.key}.npz"),
        )
        for probe in asked
    )
    request = EmbeddedRequest(model=model, probes=rows, top_logprobs=top_logprobs)
    found = run_measurement(_MODULE, request, on_step=on_step, log=log, grace_s=_GRACE_S)
    return tuple(found["layers"])


def compute(request: EmbeddedRequest, on_step: OnStep) -> Suspects:
    """Compute the distributions of all probes that have none yet."""
    from moe_optimizer.debug.oracle import logprobs_behind, suspects
    from moe_optimizer.engine import LLM

    needed = (len(prompt) + max(1, probe.generated) for probe in request.probes for prompt in probe.prompts)
    longest = max(_LEAST_LENGTH, *needed)
    llm = LLM(
        request.model, dtype="float32", device="cpu", max_num_seqs=1, enable_prefix_caching=False,
        enable_chunked_prefill=False, max_model_len=longest, max_num_batched_tokens=longest,
    )  # fmt: skip
    for number, probe in enumerate(request.probes):
        on_step(number / len(request.probes), f"embedded engine: {probe.title}")
        path = Path(probe.reference)
        if path.exists():
            continue
        theirs = Distributions.read(Path(probe.answers))
        rows = []
        for sequence, prompt in enumerate(probe.prompts):
            mine = theirs.at(np.flatnonzero(theirs.sequences == sequence))
            chosen = mine.next_ids.tolist() if probe.generated else []
            # Behind the last one nobody has said anything.
            logprobs = logprobs_behind(llm.llm_engine, [*prompt, *chosen][:-1])
            rows.append(logprobs[len(prompt) - 1 :] if probe.generated else logprobs)
        _beside(theirs, rows, request.top_logprobs, generated=bool(probe.generated)).write(path)
    return Suspects(layers=suspects(llm))


def _beside(theirs: Distributions, rows: list[torch.Tensor], top: int, *, generated: bool) -> Distributions:
    """Return the engine's likeliest tokens at a server's positions; of generated texts its own choice follows."""
    import torch

    logprobs = torch.cat(rows).double()
    values, ids = logprobs.topk(min(top, logprobs.shape[1]))
    given = torch.from_numpy(theirs.next_ids.astype(np.int64))
    following = ids[:, 0] if generated else given
    next_logprobs = logprobs.gather(1, following[:, None])[:, 0]
    return Distributions(
        token_ids=ids.numpy().astype(np.int32),
        logprobs=values.numpy(),
        next_ids=following.numpy().astype(np.int32),
        next_logprobs=next_logprobs.numpy(),
        sequences=theirs.sequences,
    )


if __name__ == "__main__":
    sys.exit(answer_request(EmbeddedRequest, sys.argv[1:], compute))
