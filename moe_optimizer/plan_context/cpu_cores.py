"""Divides the cores of the CPU between processes of vLLM's CPU build."""

from __future__ import annotations

from collections.abc import Sequence

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's variable: the cores of each worker of a server, separated by "|". Its automatic choice wants one NUMA node for
each worker."""


def core_lists(core_ids: Sequence[int], num_processes: int) -> tuple[str, ...]:
    """Return the cores of each process: none is shared, or each would wait for the other's threads.

    Where they do not divide, the first processes have one more. Lists are as the kernel writes them: "0-1" where the
    cores follow each other, "0,2" where not.
    """
    each, more = divmod(len(core_ids), num_processes)
    starts = [index * each + min(index, more) for index in range(num_processes + 1)]
    return tuple(_in_words(core_ids[starts[i] : starts[i + 1]]) for i in range(num_processes))


def _in_words(core_ids: Sequence[int]) -> str:
    if len(core_ids) > 1 and core_ids[-1] - core_ids[0] == len(core_ids) - 1:
        return f"{core_ids[0]}-{core_ids[-1]}"
    return ",".join(map(str, core_ids))


def core_numbers(text: str) -> tuple[int, ...]:
    """Return the cores of a list such as "0-2,5", ascending; () where it is none."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            return ()
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))
