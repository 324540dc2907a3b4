"""On which cores vLLM's CPU build runs a worker; tests/vllm compares with vLLM's own choice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe_optimizer.plan_context.cpu_cores import core_numbers
from moe_optimizer.plan_context.cpu_workers import worker_cores, worker_threads
from tests.builders import context, cpu_machine, decided_by, software, tiny_moe


def planned(*nodes: tuple[int, ...], binding: str = "auto", reserved: int | None = None, **changes: Any) -> Any:
    machine = cpu_machine(cores=sum(map(len, nodes)) or 4)
    assert machine.cpu is not None
    machine = dataclasses.replace(machine, cpu=dataclasses.replace(machine.cpu, physical_cores=nodes))
    installed = dataclasses.replace(software("cpu"), core_binding=binding, reserved_cores=reserved)
    return decided_by(context(tiny_moe(), machine, software=installed, **changes), "parallelism")


def test_a_worker_gets_the_physical_cores_of_its_node_but_one() -> None:
    assert worker_cores(planned((0, 2, 4, 6), (8, 10))) == (0, 2, 4)


def test_a_lone_core_is_not_left_to_the_scheduler() -> None:
    assert worker_cores(planned((1,))) == (1,)


def test_of_a_machine_that_does_not_say_every_core_is_a_physical_one() -> None:
    assert worker_cores(planned()) == (0, 1, 2)


@pytest.mark.parametrize(
    ("binding", "cores"), [("0-2,5", (0, 1, 2, 5)), ("3|1,2", (3,)), ("nobind", (0, 1, 2, 3)), ("?", (0, 1, 2, 3))]
)
def test_what_the_user_binds_goes_before(binding: str, cores: tuple[int, ...]) -> None:
    assert worker_cores(planned((0, 1, 2, 3), binding=binding)) == cores


def test_the_users_number_of_free_cores_goes_before() -> None:
    assert worker_cores(planned((0, 1, 2, 3), reserved=2)) == (0, 1)


def test_the_plans_own_binding_counts() -> None:
    assert worker_cores(planned((0, 1, 2, 3), pinned={"--tensor-parallel-size": "2"})) == (0, 1)


def test_a_worker_that_says_its_threads_is_believed() -> None:
    assert worker_threads(planned((0, 1, 2, 3))) == 3
    assert worker_threads(planned((0, 1, 2, 3), worker_threads=1)) == 1


@pytest.mark.parametrize(("text", "cores"), [("", ()), ("1", (1,)), ("3,0-1", (0, 1, 3)), ("a", ()), ("1-", (1,))])
def test_lists_of_cores(text: str, cores: tuple[int, ...]) -> None:
    assert core_numbers(text) == cores
