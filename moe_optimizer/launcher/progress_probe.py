"""A liveness probe by progress: `python -m moe_optimizer.launcher.progress_probe PORT`, in a server's own container.

Exit code 1: the server does not answer, or has requests while no worker has begun a step for a minute. /health would
say 200 of an engine that stands still.
"""

from __future__ import annotations

import sys

from moe_optimizer.launcher.http_client import ServerClient, api_key
from moe_optimizer.launcher.metrics_page import samples, total
from moe_optimizer.proof.record import UNFINISHED_METRIC
from moe_optimizer.proof.step_count import AGE_METRIC

_STALLED_S = 60.0
"""Chosen: as `serve --stall-timeout`; a step takes milliseconds on GPUs."""
_TIMEOUT_S = 8.0


def main(port: int) -> int:
    """Ask the server once; return the exit code."""
    client = ServerClient(f"http://127.0.0.1:{port}", api_key())
    try:
        page = client.metrics(timeout_s=_TIMEOUT_S)
    except OSError as error:
        print(f"no answer: {error}")
        return 1
    known = (total(page, "vllm:num_requests_running") or 0) + (total(page, "vllm:num_requests_waiting") or 0)
    unfinished = max(known, total(page, UNFINISHED_METRIC) or 0)
    ages = [sample.value for sample in samples(page, AGE_METRIC)]
    # The least: a copy of the model without requests makes no steps.
    if not unfinished or not ages or min(ages) < _STALLED_S or client.paused():
        return 0
    print(f"{unfinished} unfinished requests, and no step for {min(ages):.0f} s")
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
