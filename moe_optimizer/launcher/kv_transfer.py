"""Checks that a group's decode server takes the cache of a prompt from its prefill server."""

from __future__ import annotations

from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.metrics_page import samples, total
from moe_optimizer.proof.verdict import Observed

TRANSFER_PASS = "disaggregation"
_RECEIVED = "vllm:external_prefix_cache_hits_total"
"""vLLM's count of prompt tokens whose cache came from another process; every connector adds to it."""
_CACHE_CONFIG = "vllm:cache_config_info"
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
    """Return for how many prompt tokens a server has received the cache so far, as it counts them.

    Raises:
        OSError: it does not answer.
    """
    return total(client.metrics(), _RECEIVED) or 0


def _probe_prompt(decode: ServerClient) -> tuple[list[int], str]:
    """Return token ids that fill one block of the cache and half of the next, or why no prompt can show a transfer."""
    metrics = decode.metrics()
    config = next(iter(samples(metrics, _CACHE_CONFIG)), None)
    if config is None or total(metrics, _RECEIVED) is None:
        return [], "the decode server publishes no counts (--disable-log-stats)"
    block = int(config.labels["block_size"])
    length = block + block // 2 + 2
    longest = decode.max_model_len() - 1
    if length > longest:
        return [], f"prompts of at most {longest} tokens are too short to hand over a block of {block}"
    # Small ids, which every vocabulary has.
    return [1 + index % 7 for index in range(length)], ""
