"""Whether the router of replicas really gives every one of them requests."""

from __future__ import annotations

from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.http_client import ServerClient
from moe_optimizer.proof.verdict import Observed

REPLICAS_PASS = "replicas"
_PROMPT_TOKENS = "vllm:prompt_tokens_total"
"""vLLM's count of prompt tokens that it has taken."""
_TIMEOUT_S = 60.0


def observed_turns(deployment: Deployment) -> Observed:
    """Send one request per server through the router and look which of them took one."""
    assert deployment.router is not None, "one server has no turns"
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
    """Return how many prompt tokens a server has taken so far, as it counts them; None: it does not publish it.

    Raises:
        OSError: it does not answer.
    """
    samples = (line.rpartition(" ") for line in client.metrics().splitlines())
    counts = [float(value) for name, _, value in samples if name.partition("{")[0] == _PROMPT_TOKENS]
    return round(sum(counts)) if counts else None
