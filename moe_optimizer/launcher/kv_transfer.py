"""Checks that every decode server of a group takes the cache of a prompt from a prefill server."""

from __future__ import annotations

import random
from collections.abc import Sequence

from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.metrics_page import samples, total
from moe_optimizer.launcher.replica_traffic import prompt_tokens
from moe_optimizer.launcher.service import Service
from moe_optimizer.proof.verdict import Observed
from moe_optimizer.specs.quantity import number_of

TRANSFER_PASS = "disaggregation"
_RECEIVED = "vllm:external_prefix_cache_hits_total"
"""vLLM's count of prompt tokens whose cache came from another process; every connector adds to it."""
_CACHE_CONFIG = "vllm:cache_config_info"
_TIMEOUT_S = 60.0


def observed_transfer(deployment: Deployment, *, prefill_servers: int) -> Observed:
    """Send prompts through the router, until each server has had its turn, and look whether every prefill server took
    one and every decode server received a part of its cache.

    Args:
        deployment: the servers, those that read prompts first.
        prefill_servers: how many do.
    """
    assert deployment.router is not None, "one server hands nothing over"
    prefill, decode = deployment.servers[:prefill_servers], deployment.servers[prefill_servers:]
    try:
        length, obstacle = _probe_length(deployment.servers)
        if obstacle:
            return Observed(ran="no", why_not=f"cannot be shown: {obstacle}")
        read = [prompt_tokens(server.client) for server in prefill]
        before = [received_tokens(server.client) for server in decode]
        for turn in range(max(len(prefill), len(decode))):
            deployment.router.client.complete(_probe_prompt(turn, length), max_tokens=1, timeout_s=_TIMEOUT_S)
        received = [received_tokens(server.client) - old for server, old in zip(decode, before, strict=True)]
        idle = [server.title for server, old in zip(prefill, read, strict=True) if prompt_tokens(server.client) == old]
    except OSError as error:
        return Observed(ran="no", why_not=f"a request through the router failed: {error}")
    if idle:
        return Observed(ran="no", why_not=f"the router gave no prompt to: {', '.join(idle)}")
    without = [server.title for server, tokens in zip(decode, received, strict=True) if tokens <= 0]
    if without:
        return Observed(ran="no", why_not=f"computed a prompt itself that prefill had read: {', '.join(without)}")
    servers = f"{number_of(len(decode), 'decode server')} from {len(prefill)} prefill"
    return Observed(ran=f"yes, {sum(received)} tokens received by {servers}")


def received_tokens(client: ServerClient) -> int:
    """Return for how many prompt tokens a server has received the cache so far, as it counts them.

    Raises:
        OSError: it does not answer.
    """
    return total(client.metrics(), _RECEIVED) or 0


def _probe_length(servers: Sequence[Service]) -> tuple[int, str]:
    """Return how many tokens fill one block of the cache and half of the next, or why no prompt can show a transfer."""
    pages = [server.client.metrics() for server in servers]
    config = next(iter(samples(pages[-1], _CACHE_CONFIG)), None)
    if config is None or any(total(page, _RECEIVED) is None for page in pages):
        return 0, "a server publishes no counts (--disable-log-stats)"
    block = int(config.labels["block_size"])
    length = block + block // 2 + 2
    longest = servers[-1].client.max_model_len() - 1
    if length > longest:
        return 0, f"prompts of at most {longest} tokens are too short to hand over a block of {block}"
    return length, ""


def _probe_prompt(turn: int, length: int) -> list[int]:
    """Return token ids that no other turn's prompt begins with: nothing is in a server's own cache."""
    # Small ids, which every vocabulary has.
    return random.Random(turn).choices(range(1, 8), k=length)
