"""Whether a group's decode server really takes the prompt's cache from its prefill server."""

from __future__ import annotations

import re

from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.proof.verdict import Observed

TRANSFER_PASS = "disaggregation"
_RECEIVED = "vllm:external_prefix_cache_hits_total"
"""vLLM's count of prompt tokens whose cache came from another process; every connector adds to it."""
_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{.*?\bblock_size="(\d+)"', re.MULTILINE)
_TIMEOUT_S = 60.0


def observed_transfer(deployment: Deployment) -> Observed:
    """Send one prompt through the router and look whether the decode server received a part of its cache."""
    assert deployment.router is not None, "one server hands nothing over"
    decode = deployment.servers[-1].client
    try:
        prompt, obstacle = _probe_prompt(decode)
        if obstacle:
            return Observed(ran="no", why_not=f"cannot be shown: {obstacle}")
        before = received_tokens(decode)
        deployment.router.client.complete(prompt, max_tokens=1, timeout_s=_TIMEOUT_S)
        received = received_tokens(decode) - before
    except OSError as error:
        return Observed(ran="no", why_not=f"a request through the router failed: {error}")
    if received <= 0:
        return Observed(ran="no", why_not="the decode server computed a prompt itself that prefill had read")
    return Observed(ran=f"yes, {received} tokens received")


def received_tokens(client: ServerClient) -> int:
    """Return how many prompt tokens' cache a server has received so far, as it counts them.

    Raises:
        OSError: it does not answer.
    """
    samples = (line.rpartition(" ") for line in client.metrics().splitlines())
    return sum(round(float(value)) for name, _, value in samples if name.partition("{")[0] == _RECEIVED)


def _probe_prompt(decode: ServerClient) -> tuple[list[int], str]:
    """Return token ids that fill a block of the cache and some more, or why there are none that would show anything."""
    metrics = decode.metrics()
    match = _BLOCK_SIZE.search(metrics)
    if match is None or _RECEIVED not in metrics:
        return [], "the decode server publishes no counts (--disable-log-stats)"
    block = int(match[1])
    length = block + block // 2 + 2
    longest = decode.max_model_len() - 1
    if length > longest:
        return [], f"prompts of at most {longest} tokens are too short to hand over a block of {block}"
    # Small ids, which every vocabulary has.
    return [1 + index % 7 for index in range(length)], ""
