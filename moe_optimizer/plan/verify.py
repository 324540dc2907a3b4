"""Checks that a Plan is whole. A plan that fails here is our bug, so every check is an assertion with its values."""

from __future__ import annotations

from collections.abc import Sequence

from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.memory_plan import MemoryPlan
from moe_optimizer.plan.plan import Plan
from moe_optimizer.plan.serve_args import ServeArguments
from moe_optimizer.plan.server_group import ServerGroup


def verify_plan(plan: Plan, *, pass_names: Sequence[str], user_args: ServeArguments) -> None:
    """Check that the parts of a plan agree with each other.

    Args:
        plan: the finished plan.
        pass_names: every pass, in planning order; each must have exactly one decision.
        user_args: the user's own arguments, which stand last in `serve_args`.

    Raises:
        AssertionError: they do not; the message carries the values.
    """
    names = [decision.pass_name for decision in plan.decisions]
    assert names == list(pass_names), f"decisions {names} are not the passes {list(pass_names)}"
    for decision in plan.decisions:
        _verify_decision(decision)
    verify_memory(plan.memory)
    assert plan.memory.fits, f"a plan that does not fit: {plan.memory}"
    _verify_arguments(plan, user_args)
    if plan.group is not None:
        _verify_group(plan, plan.group)
    if plan.num_gpus:
        there = plan.hardware.num_gpus * plan.num_nodes
        assert plan.num_gpus <= there, f"{plan.num_gpus} GPUs of {there}"


def verify_memory(memory: MemoryPlan) -> None:
    """Check that the terms of a memory plan add up.

    Raises:
        AssertionError: they do not; the message carries the values.
    """
    terms = (memory.weight_bytes, memory.activation_bytes, memory.workspace_bytes, memory.kv_cache_bytes)
    assert all(term >= 0 for term in terms), f"negative term: {memory}"
    assert 0 < memory.budget_bytes <= memory.total_bytes, f"budget {memory.budget_bytes} of {memory.total_bytes}"
    if memory.fits:
        assert memory.unused_bytes >= 0, f"fits, but {memory.unused_bytes} bytes are unused: {memory}"
    held = memory.kv_tokens * memory.kv_bytes_per_token
    assert held <= memory.kv_cache_bytes, f"{memory.kv_tokens} tokens take {held} of {memory.kv_cache_bytes} bytes"


def _verify_decision(decision: Decision) -> None:
    name, status = decision.pass_name, decision.status
    assert decision.reason, f"{name}: no reason"
    assert decision.value, f"{name}: no value"
    if decision.wish is Wish.OFF:
        assert status is Status.OFF, f"{name}: wished off, decided {status}"
    if status is Status.REFUSED:
        assert decision.wish is Wish.ON, f"{name}: refused, but the wish is {decision.wish}"
    if status is not Status.ON:
        assert decision.applier in (Applier.NONE, Applier.FLAGS), f"{name}: {status}, applied by {decision.applier}"
    if decision.required and status is not Status.PENDING:
        assert status is Status.ON, f"{name}: required, decided {status}"
    if decision.applier is Applier.NONE:
        assert not decision.vllm_args, f"{name}: no applier, yet {decision.vllm_args}"
        assert not decision.env, f"{name}: no applier, yet {decision.env}"
    if decision.gain is not None:
        assert decision.gain.ratio.value > 0, f"{name}: gain {decision.gain}"
    stated = decision.gain is not None or bool(decision.no_gain)
    assert status is not Status.ON or stated, f"{name}: neither a gain nor why none is modelled"
    for key, value in decision.env.items():
        assert key.isidentifier(), f"{name}: environment {key!r}={value!r}"
        assert "\0" not in value, f"{name}: environment {key!r}={value!r}"


def _verify_arguments(plan: Plan, user_args: ServeArguments) -> None:
    users = user_args.arguments
    for each in (plan.serve_args, plan.plain_args):
        count = len(each.arguments) - len(users)
        planned = each.arguments[:count]
        assert all(word and "\0" not in word for argument in planned for word in argument.words), f"{each}"
        assert each.arguments[count:] == users, f"{each} does not end with {user_args}"
        flags = [argument.flag for argument in planned]
        assert len(set(flags)) == len(flags), f"a flag is given twice: {flags}"
        both = set(flags) & user_args.values.keys()
        assert not both, f"planned and given by the user: {both}"
    for decision in plan.decisions:
        for argument in decision.vllm_args.arguments:
            assert argument in plan.serve_args.arguments, f"{decision.pass_name}: {argument} not in serve_args"
        for key, value in decision.env.items():
            assert plan.serve_env.get(key) == value, f"{decision.pass_name}: {key}={value} not in {plan.serve_env}"


def _verify_group(plan: Plan, group: ServerGroup) -> None:
    names = [server.name for server in group.servers]
    assert len(set(names)) == len(names) > 1, f"servers {names}"
    of_machines = [[each for each in group.servers if each.machine == machine] for machine in range(plan.num_nodes)]
    placed = sum(map(len, of_machines))
    assert all(of_machines), f"a machine of {plan.num_nodes} has no server: {group.servers}"
    assert placed == len(names), f"{len(names) - placed} servers lie on no machine of {plan.num_nodes}"
    for machine, servers in enumerate(of_machines):
        ports = [server.serve_args.value("--port") for server in servers]
        ports += [group.router_args.value("--port")] if machine == 0 else []
        assert len(set(ports)) == len(ports), f"two parts of machine {machine} listen on one port: {ports}"
        gpus = [gpu for server in servers for gpu in server.gpus]
        assert sorted(gpus) == list(range(len(gpus))), f"the servers of machine {machine} have GPUs {gpus}"
        assert len(gpus) <= plan.hardware.num_gpus, f"{len(gpus)} GPUs of {plan.hardware.num_gpus} on machine {machine}"
    used = sum(len(server.gpus) for server in group.servers)
    assert used == plan.num_gpus, f"{plan.num_gpus} GPUs are used, the servers have {used}"
    for server in group.servers:
        asked = group.router_args.words.count(server.url)
        assert asked == 1, f"the router is told {asked} times of {server.url}: {group.router_args}"
        for decision in plan.decisions:
            for argument in decision.vllm_args.arguments:
                assert argument in server.serve_args.arguments, f"{decision.pass_name}: {argument}, {server}"
