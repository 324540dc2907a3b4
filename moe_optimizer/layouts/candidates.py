"""Lists the layouts that heads, experts, layers and machines allow; which of them fit is asked of the memory plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moe_optimizer.costs.weights import splits_over
from moe_optimizer.layouts.question import LayoutQuestion
from moe_optimizer.specs.layout import Layout

_FEW_MACHINES = 8
"""Chosen: of so many each number is tried."""


def candidates(question: LayoutQuestion) -> Iterator[Layout]:
    """Yield every layout, the smallest server first; of each shape as many replicas as there are GPUs for, and the ways
    to divide as many servers between prompts and answers.

    TP stays inside a machine, because every layer waits for it; pipeline stages and data parallel copies may lie on
    several. A server takes whole machines or a part of one; one that only reads prompts or writes answers has a part.
    """
    total, each = question.num_gpus, question.gpus_per_machine
    for tensor in range(1, each + 1):
        for data in range(1, total // tensor + 1):
            stage = tensor * data
            if not _fills_machines(stage, each):
                continue
            for expert in (False, True):
                if why_not_shape(question, tensor, data, expert=expert):
                    continue
                for stages in _stage_counts(question, stage, data):
                    yield from _of_shape(question, tensor, data, stages, expert=expert)


def fewer_servers(question: LayoutQuestion, layout: Layout) -> Iterator[Layout]:
    """Yield a layout with fewer servers, the most first, which leave GPUs of the only machine unused, or machines.

    So many may keep limits that more do not: with fewer of them more clients wait for room, and those that run have
    their tokens sooner. Of more than `_FEW_MACHINES` the number that is left out doubles each time.
    """
    machines, servers = question.num_machines, layout.replicas
    if layout.disaggregated:
        return
    each, units = (1, servers) if machines == 1 or servers < machines else (servers // machines, machines)
    step = 1
    while units > step:
        units -= step
        step *= 1 if machines <= _FEW_MACHINES else 2
        yield replace(layout, replicas=units * each)


def why_not_shape(question: LayoutQuestion, tensor: int, data: int, *, expert: bool) -> str:
    """Return why the model does not divide so, or ""."""
    model, devices = question.model, tensor * data
    if expert and not model.is_moe:
        return "the model has no experts"
    if expert and devices == 1:
        return "one GPU holds all experts"
    if expert and model.num_experts % devices:
        return f"{model.num_experts} experts do not divide by {devices}"
    if data > 1 and not model.is_moe:
        return "copies of a dense model share nothing: they are replicas"
    block = model.weight_block if model.weights_are_fp8 and model.is_moe and not expert else None
    if block is not None and devices > 1 and model.moe_intermediate_size // devices % block[0]:
        return f"expert width {model.moe_intermediate_size} / {devices} is not a whole number of FP8 blocks"
    splits, why = splits_over(model, tensor, expert_parallel=expert, data_parallel_size=data)
    return "" if splits else why


def _fills_machines(devices: int, each: int) -> bool:
    return devices % each == 0 if devices > each else True


def _stage_counts(question: LayoutQuestion, stage: int, data: int) -> Iterator[int]:
    """Yield 1, and the numbers of machines that may hold successive layers: a stage then has a whole machine."""
    yield 1
    if data == 1 and stage == question.gpus_per_machine:
        yield from range(2, min(question.num_machines, question.model.num_layers) + 1)


def _of_shape(question: LayoutQuestion, tensor: int, data: int, stages: int, *, expert: bool) -> Iterator[Layout]:
    each = question.gpus_per_machine
    server = tensor * data * stages
    # A server lies in one machine, or has whole ones; then machines may be left over, which stay unused.
    in_machine = min(each // server, question.servers_per_machine or each)
    count = question.num_machines * in_machine if server <= each else question.num_machines // (server // each)
    shape = {
        "tensor_parallel_size": tensor,
        "data_parallel_size": data,
        "expert_parallel": expert,
        "pipeline_parallel_size": stages,
    }
    if count:
        yield Layout(**shape, replicas=count)
    if stages == 1 and server <= each:
        for prefill, decode in _splits(question, each // server):
            yield Layout(**shape, replicas=decode, prefill_servers=prefill)


def _splits(question: LayoutQuestion, each: int) -> Iterator[tuple[int, int]]:
    """Yield how many servers read prompts and how many write answers, where a machine has room for `each`.

    Where nobody says how many, the servers fill the machines, and those are all alike, or each has servers of one kind.
    That leaves out uneven splits of many machines, which are near one of these.
    """
    machines = question.num_machines
    most = each * machines
    prefill, decode = question.split
    if prefill is None and decode is None:
        for count in sorted({*range(machines, most, machines), *range(each, most, each)}):
            yield count, most - count
        return
    prefill = most - (decode or 0) if prefill is None else prefill
    decode = most - prefill if decode is None else decode
    if prefill > 0 and decode > 0 and machines <= prefill + decode <= most:
        yield prefill, decode
