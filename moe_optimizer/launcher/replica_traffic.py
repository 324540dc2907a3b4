"""Checks that the router gives requests to every replica."""

from __future__ import annotations

from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.launcher.metrics_page import total
from moe_optimizer.proof.verdict import Observed

REPLICAS_PASS = "replicas"
_PROMPT_TOKENS = "vllm:prompt_tokens_total"
"""vLLM's count of prompt tokens that it has taken."""
_TIMEOUT_S = 60.0


def observed_traffic(deployment: Deployment) -> Observed:
    """Send one request per server through the router and look which servers took one."""
    assert deployment.router is not None, "replicas have a router"
    try:
        before = [prompt_tokens(server.client) for server in deployment.servers]
        for _ in deployment.servers:
            deployment.router.client.complete("a", max_tokens=1, timeout_s=_TIMEOUT_S)
        after = [prompt_tokens(server.client) for server in deployment.servers]
    except OSError as error:
        return Observed(ran="no", why_not=f"a request through the router failed: {error}")
    if any(count is None for count in (*before, *after)):
        return Observed(ran="no", why_not="cannot be shown: a server publishes no counts (--disable-log-stats)")
    idle = [s.title for s, old, new in zip(deployment.servers, before, after, strict=True) if old == new]
    if idle:
        return Observed(ran="no", why_not=f"the router gave no request to: {', '.join(idle)}")
    return Observed(ran=f"yes, {len(after)} servers")


def prompt_tokens(client: ServerClient) -> int | None:
    """Return how many prompt tokens a server has taken so far, as it counts them; None: it publishes no counts.

    Raises:
        OSError: it does not answer.
    """
    return total(client.metrics(), _PROMPT_TOKENS)
