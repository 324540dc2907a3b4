"""Checks that every server of a group copies cache blocks to host memory, beside the cache that travels."""

from __future__ import annotations

import time

from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.metrics_page import total
from moe_optimizer.launcher.replica_traffic import prompt_tokens
from moe_optimizer.proof.verdict import Observed

TIER_PASS = "kv_cache"
WAIT_S = 10.0
"""Chosen: vLLM copies a block in the step after the one that filled it."""
_STORED = "vllm:kv_offload_store_bytes_total"
"""vLLM's count of bytes that its OffloadingConnector has copied to host memory; absent before the first."""
_POLL_S = 0.2


def observed_tier(deployment: Deployment) -> Observed:
    """Look whether each server copies to host memory; to be asked after a prompt of a whole block went through them."""
    deadline = time.monotonic() + WAIT_S
    try:
        if any(prompt_tokens(server.client) is None for server in deployment.servers):
            return Observed(ran="no", why_not="cannot be shown: a server publishes no counts (--disable-log-stats)")
        while True:
            stored = {server.title: total(server.client.metrics(), _STORED) or 0 for server in deployment.servers}
            without = [title for title, size in stored.items() if not size]
            if not without:
                return Observed(ran=f"yes, {min(stored.values())} bytes or more in each host tier")
            if time.monotonic() > deadline:
                return Observed(ran="no", why_not=f"no block of a prompt went to host memory: {', '.join(without)}")
            time.sleep(_POLL_S)
    except OSError as error:
        return Observed(ran="no", why_not=f"a server did not answer: {error}")
