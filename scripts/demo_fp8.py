"""Compares a server with FP8 experts to one without for the demo: memory, tokens, perplexity."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perplexity import perplexity
from server_http import post_json

PROMPTS = (
    "def __init__(self, name):",
    "import os\nimport sys\n\n",
    "class Handler:\n    def ",
    "for i in range(10):\n",
)
MAX_TOKENS = 48


@dataclass(frozen=True)
class Measured:
    """Memory and answers of one server."""

    expert_bytes: int
    """Expert weights in all its workers, scales included, according to their proofs; 0 if the proofs lack them."""
    answers: tuple[tuple[str, ...], ...]
    """Tokens of the greedy completions of `PROMPTS`."""
    perplexity: float | None
    """On the model's held-out text; None if its folder has no such text."""


def measure(ready: dict[str, Any], heldout: Path) -> Measured:
    """Measure a running server.

    Args:
        ready: what the serve command printed when the server was ready.
        heldout: text that the model was not trained on; it need not exist.

    Raises:
        ServerError: the server does not answer as it should.
    """
    base_url, model = ready["base_url"], ready["model"]
    body = {"model": model, "prompt": list(PROMPTS), "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 0}
    choices = sorted(post_json(f"{base_url}/v1/completions", body)["choices"], key=lambda choice: choice["index"])
    text = heldout.read_text(encoding="utf-8") if heldout.is_file() else ""
    return Measured(
        expert_bytes=_expert_bytes(Path(ready["run_dir"])),
        answers=tuple(tuple(choice["logprobs"]["tokens"]) for choice in choices),
        perplexity=perplexity(base_url, model, text) if text else None,
    )


def _expert_bytes(run_dir: Path) -> int:
    proofs = [json.loads(path.read_text()) for path in (run_dir / "proof").glob("*.json")]
    experts = [proof["passes"]["flash_dmoe"] for proof in proofs if "flash_dmoe" in proof["passes"]]
    return sum(layer["weight_bytes"] for entry in experts for layer in entry["layers"])


def comparison(off: Measured, on: Measured) -> list[str]:
    """Return lines with the two servers side by side."""
    lines = [f"{'':16}{'off':>12}{'on':>12}"]
    if off.expert_bytes and on.expert_bytes:
        change = f"{on.expert_bytes / off.expert_bytes:.2f} times"
        lines.append(f"{'expert weights':16}{_mb(off.expert_bytes):>12}{_mb(on.expert_bytes):>12}  {change}")
    if off.perplexity is not None and on.perplexity is not None:
        change = f"{on.perplexity / off.perplexity - 1:+.2%} on held-out text"
        lines.append(f"{'perplexity':16}{off.perplexity:>12.3f}{on.perplexity:>12.3f}  {change}")
    same = sum(_same_tokens(one, other) for one, other in zip(off.answers, on.answers, strict=True))
    total = sum(map(len, off.answers))
    lines.append(f"{'greedy tokens':16}{total:>12}{same:>12}  the same until an answer differs")
    return lines


def _same_tokens(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f} MB"
