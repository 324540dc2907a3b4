"""Warms up every server of a run, and counts by their proofs what they compile."""

from __future__ import annotations

from collections.abc import Callable

from moe_optimizer.errors import InputError
from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.warm_up import Shapes, WarmUpResult, warm_up
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.pass_params import GraphCaptureParams, SchedulerParams
from moe_optimizer.plan.plan import Plan
from moe_optimizer.proof.record import read_proofs


def warm_up_deployment(
    plan: Plan,
    deployment: Deployment,
    model: str,
    *,
    limit_s: float,
    pause: Callable[[float], None],
    say: Callable[[str], None],
) -> WarmUpResult:
    """Warm up the servers of a run, each for itself; prefill and decode servers together, through their router.

    Args: as `warm_up`.
    """
    together = plan.decision("disaggregation").status is Status.ON
    services = (deployment.front,) if together else deployment.servers
    steps = plan.decision("scheduler").params_as(SchedulerParams)
    shapes = Shapes(
        max_num_seqs=steps.max_num_seqs,
        max_num_batched_tokens=steps.max_num_batched_tokens,
        max_model_len=deployment.servers[0].client.max_model_len(),
        drafts=plan.decision("speculation").status is Status.ON,
        handed_over=together,
        captured=captured_up_to(plan),
    )
    clients = [service.client for service in services]
    return warm_up(clients, model, shapes, lambda: compilations(deployment), limit_s=limit_s, pause=pause, say=say)


def captured_up_to(plan: Plan) -> int:
    """Return the tokens up to which every step runs in a graph that vLLM captures at its start; 0: some do not."""
    mode = (plan.serve_args.json_object("--compilation-config") or {}).get("cudagraph_mode", "PIECEWISE")
    if "PIECEWISE" not in str(mode).upper():
        # Then steps with prompts run without one, or are captured apart.
        return 0
    return plan.decision("graph_capture").params_as(GraphCaptureParams).max_capture_size


def compilations(deployment: Deployment) -> int:
    """Return how much the workers of all servers have compiled so far, as their proofs say."""
    total = 0
    for server in deployment.servers:
        try:
            counts = [proof.compilations for proof in read_proofs(server.folder.path)]
        except InputError:
            continue
        total += sum(each.before_ready + each.after_ready for each in counts if each is not None)
    return total
