"""`oracle`: a server's outputs, token by token, beside what the embedded engine computes in float32."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_optimizer.engine import LLM, LLMEngine
from moe_optimizer.engine.model_runner import ModelRunner
from moe_optimizer.engine.sampling_params import SamplingParams
from moe_optimizer.errors import InputError

PROMPTS = ("def fibonacci(n):\n", "import os\n\n", "class Stack:\n", "The capital of France is")
_TIMEOUT_S = 120.0
_MOST_SAID = 400
"""Bytes of a refusal that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One token of the server's."""

    prompt: int
    place: int
    """Among the output's tokens."""
    token_id: int
    theirs: float
    """Log-probability that the server reports."""
    ours: float
    rank: int
    """Of the token in the engine's distribution; 1 is the likeliest."""
    gap: float
    """How much less likely than the engine's likeliest token, as a difference of log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleReport:
    """The output of `debug oracle --json`."""

    url: str
    tolerance: float
    tokens: int
    same: bool
    mean_difference: float
    """Of the log-probabilities, without sign."""
    largest_difference: float
    first_difference: Compared | None
    """The first token beyond the tolerance."""
    layers: tuple[str, ...]
    """Behind that token: how much each kind of layer changes the hidden state, the likeliest causes first."""


def oracle(url: str, folder: Path, *, max_tokens: int = 32, tolerance: float = 0.1) -> OracleReport:
    """Compare the server at `url` with the engine on greedy outputs.

    The engine is given the server's own tokens, so that one that differs does not make all that follow differ.

    Raises:
        InputError: the server does not answer, or serves another vocabulary.
    """
    model = _asked(f"{url}/v1/models", None)["data"][0]["id"]
    llm = LLM(str(folder), dtype="float32", device="cpu", max_num_seqs=1, enable_prefix_caching=False)
    compared: list[Compared] = []
    for number, prompt in enumerate(PROMPTS):
        prompt_ids = llm.get_tokenizer().encode(prompt)
        body = {
            "model": model, "prompt": prompt_ids, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        logprobs = _asked(f"{url}/v1/completions", body)["choices"][0]["logprobs"]
        token_ids = [_token_id(token) for token in logprobs["tokens"]]
        ours = logprobs_behind(llm.llm_engine, prompt_ids + token_ids)[len(prompt_ids) - 1 : -1]
        for place, (token_id, theirs, row) in enumerate(zip(token_ids, logprobs["token_logprobs"], ours, strict=True)):
            value = float(row[token_id])
            compared.append(
                Compared(
                    prompt=number, place=place, token_id=token_id, theirs=theirs, ours=value,
                    rank=int((row > value).sum()) + 1, gap=float(row.max()) - value,
                )
            )  # fmt: skip
    differences = [abs(each.theirs - each.ours) for each in compared]
    beyond = [each for each in compared if max(abs(each.theirs - each.ours), each.gap) > tolerance]
    return OracleReport(
        url=url,
        tolerance=tolerance,
        tokens=len(compared),
        same=not beyond,
        mean_difference=sum(differences) / max(1, len(differences)),
        largest_difference=max(differences, default=0.0),
        first_difference=beyond[0] if beyond else None,
        layers=suspects(llm) if beyond else (),
    )


def logprobs_behind(engine: LLMEngine, token_ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities behind every token ([tokens, vocabulary], float32), in one step."""
    runner = engine.executor
    assert isinstance(runner, ModelRunner), f"got {type(runner).__name__}"
    engine.add_request("oracle", token_ids, SamplingParams(max_tokens=1))
    try:
        with torch.inference_mode():
            batch = runner.prepare(engine.scheduler.schedule()).to(runner.config.device)
            return runner.model.logits(runner.model(batch)).float().log_softmax(-1)
    finally:
        engine.abort_request("oracle")


def suspects(llm: LLM) -> tuple[str, ...]:
    """Return the kinds of layers by how far bfloat16 in them alone moves the logits, the farthest first."""
    from moe_optimizer.engine.layers.attention import Attention
    from moe_optimizer.engine.layers.mlp import MLP
    from moe_optimizer.engine.layers.moe import MoE
    from moe_optimizer.engine.layers.norm import RMSNorm

    engine: Any = llm.llm_engine
    model, token_ids = engine.executor.model, llm.get_tokenizer().encode(PROMPTS[0])
    exact, moved = logprobs_behind(engine, token_ids), []
    for kind in (Attention, MoE, MLP, RMSNorm):
        modules = [module for module in model.modules() if isinstance(module, kind)]
        if not modules:
            continue
        # A norm is called by its method that adds, so a hook of torch would not see it.
        name = "add" if kind is RMSNorm else "forward"
        for module in modules:
            setattr(module, name, _rounded(getattr(module, name)))
        moved.append((float((logprobs_behind(engine, token_ids) - exact).abs().max()), kind.__name__))
        for module in modules:
            delattr(module, name)
    return tuple(
        f"{name}: rounding its outputs moves a log-probability by {by:.2g}" for by, name in sorted(moved)[::-1]
    )


def _rounded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with its output in bfloat16's precision, the first if it has several."""

    def rounded(*arguments: Any) -> Any:
        output = method(*arguments)
        first, *others = output if isinstance(output, tuple) else (output,)
        first = first.bfloat16().to(first.dtype)
        return (first, *others) if others else first

    return rounded


def _token_id(token: str) -> int:
    if token.startswith("token_id:"):
        return int(token.removeprefix("token_id:"))
    raise InputError(f"oracle: got the token {token!r:.40}, expected one as token_id:N", hint="serve with vLLM")


def _asked(url: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        said = error.read(_MOST_SAID).decode(errors="replace")
        raise InputError(f"{url}: {error}: {said}", hint="the oracle asks a vLLM server of the same model") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{url}: {error}", hint="is the server up, and is this its base URL?") from None
