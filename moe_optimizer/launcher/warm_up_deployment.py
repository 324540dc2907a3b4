"""Warms up every server of a run, and counts by their proofs what they compile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.compiler_caches import UNSEEN, cache_folders, cached_kernels
from moe_optimizer.launcher.deployment import Deployment
from moe_optimizer.launcher.warm_up import Kernels, WarmUp, WarmUpResult
from moe_optimizer.launcher.warm_up_memory import WarmUpMemory
from moe_optimizer.launcher.warm_up_requests import Shapes, groups_for
from moe_optimizer.plan.decision import Status
from moe_optimizer.plan.pass_params import DisaggregationParams, GraphCaptureParams, ParallelismParams, SchedulerParams
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
    """Warm up the servers of a run, each for itself; prefill and decode servers together, through their router: it
    deals in turns, so each request is sent to it as often as brings it to every server.

    One server alone is spared what an earlier start of its plan has left.

    Args: as `WarmUp`.
    """
    split = plan.decision("disaggregation").params
    services = deployment.servers
    if together := isinstance(split, DisaggregationParams):
        services = (deployment.front,) * max(split.prefill_servers, split.decode_servers)
    steps = plan.decision("scheduler").params_as(SchedulerParams)
    shapes = Shapes(
        max_num_seqs=steps.max_num_seqs,
        max_num_batched_tokens=steps.max_num_batched_tokens,
        max_model_len=deployment.servers[0].client.max_model_len(),
        drafts=plan.decision("speculation").status is Status.ON,
        handed_over=together,
        copies=plan.decision("parallelism").params_as(ParallelismParams).data_parallel_size,
        captured=captured_up_to(plan),
    )
    warm_up = WarmUp(
        [service.client for service in services],
        model,
        shapes,
        lambda: needed_kernels(deployment),
        limit_s=limit_s,
        pause=pause,
        say=say,
        counted=_nothing_new(plan, deployment),
    )
    if plan.group is not None or plan.num_nodes > 1:
        return warm_up.run()
    requests = [each.what for each in chain.from_iterable(groups_for(shapes, seed=0).values())]
    memory = WarmUpMemory(plan, deployment.servers[0].environment, requests)
    result = warm_up.run(*memory.known())
    memory.keep(result)
    return result


def _nothing_new(plan: Plan, deployment: Deployment) -> Callable[[], bool]:
    """Return what says whether no kernel has appeared since now of those that only a cache shows."""
    folders = cache_folders(deployment.servers[0].environment)
    unseen = {name: folders[name] for name in UNSEEN}
    before = set(cached_kernels(unseen))
    # Those of other machines cannot be looked at.
    return lambda: plan.num_nodes == 1 and before.issuperset(cached_kernels(unseen))


def captured_up_to(plan: Plan) -> int:
    """Return the tokens up to which every step runs in a graph that vLLM captures at its start; 0: some do not."""
    mode = (plan.serve_args.json_object("--compilation-config") or {}).get("cudagraph_mode", "PIECEWISE")
    if "PIECEWISE" not in str(mode).upper():
        # Then steps with prompts run without one, or are captured apart.
        return 0
    return plan.decision("graph_capture").params_as(GraphCaptureParams).max_capture_size


def needed_kernels(deployment: Deployment) -> Kernels:
    """Return what the workers of all servers have compiled and loaded so far, as their proofs say."""
    compiled = loaded = 0
    for server in deployment.servers:
        try:
            counts = [proof.compilations for proof in read_proofs(server.folder.path)]
        except InputError:
            continue
        compiled += sum(each.before_ready + each.after_ready for each in counts if each is not None)
        loaded += sum(each.loaded for each in counts if each is not None)
    return Kernels(compiled, loaded)
