"""Computes the perplexity of a running server on a text, through its HTTP API. Needs only the standard library."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from server_http import ServerError, post_json

START = "<|endoftext|>"
"""What every window begins with: the token that separated documents in training."""
_WINDOWS_PER_REQUEST = 8


def perplexity(base_url: str, model: str, text: str, *, context_length: int = 512, start: str = START) -> float:
    """Return exp of the mean negative log-likelihood of the text's tokens.

    The text is cut into windows of `context_length` - 1 tokens without overlap, each behind one `start` token: every
    token is predicted once, from what precedes it in its window. The server needs room for one token more.

    Args:
        base_url: for example "http://127.0.0.1:8000".
        model: the name that the server serves under.
        text: at least one token.

    Raises:
        ServerError: the server refused, or answered without the log-likelihood of every token.
    """
    tokens = _tokenize(base_url, model, text)
    first = _tokenize(base_url, model, start)
    if len(first) != 1 or not tokens:
        raise ServerError(f"got {len(first)} tokens for {start!r} and {len(tokens)} for the text, expected 1 and more")
    windows = windows_of(tokens, first, context_length=context_length)
    nats = 0.0
    for begin in range(0, len(windows), _WINDOWS_PER_REQUEST):
        nats -= _log_likelihood(base_url, model, windows[begin : begin + _WINDOWS_PER_REQUEST])
    return math.exp(nats / len(tokens))


def windows_of(tokens: list[int], first: list[int], *, context_length: int = 512) -> list[list[int]]:
    """Return the text cut into windows of `context_length` tokens at most, each behind `first`, one token."""
    size = context_length - 1
    return [[*first, *tokens[begin : begin + size]] for begin in range(0, len(tokens), size)]


def _tokenize(base_url: str, model: str, text: str) -> list[int]:
    return post_json(f"{base_url}/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})["tokens"]


def _log_likelihood(base_url: str, model: str, windows: list[list[int]]) -> float:
    """Return the sum over all tokens of the windows but their first ones."""
    body = {"model": model, "prompt": windows, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    choices = sorted(post_json(f"{base_url}/v1/completions", body)["choices"], key=lambda choice: choice["index"])
    total = 0.0
    for window, choice in zip(windows, choices, strict=True):
        given = choice.get("prompt_logprobs") or []
        if len(given) != len(window):
            raise ServerError(f"got log-likelihoods of {len(given)} prompt tokens, expected {len(window)}")
        total += sum(at[str(token)]["logprob"] for token, at in zip(window[1:], given[1:], strict=True))
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the perplexity of a server on a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("base_url", help="for example http://127.0.0.1:8000")
    parser.add_argument("model", help="name that the server serves under")
    parser.add_argument("text", type=Path, help="file of UTF-8 text")
    parser.add_argument("--context-length", type=int, default=512)
    options = parser.parse_args(arguments)
    try:
        text = options.text.read_text(encoding="utf-8")
        value = perplexity(options.base_url, options.model, text, context_length=options.context_length)
    except (OSError, UnicodeDecodeError, ServerError) as error:
        print(f"perplexity: {error}", file=sys.stderr)
        return 1
    print(f"{value:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
