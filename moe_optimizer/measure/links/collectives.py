"""Times collectives in the processes of one group, one for each device; on GPUs from CUDA graphs, as in vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

SIZES = [2**exponent for exponent in range(12, 29, 2)]
"""Bytes of the whole tensor: 4 KiB to 256 MiB."""
CALLS, ROUNDS, WARM_UP = 20, 15, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCollective:
    """One kind."""

    call: Callable[[Any], Callable[[], Any]]
    """Takes a tensor, returns what is measured."""
    capturing: Callable[[], AbstractContextManager[Any]]
    """Around the capture of a graph; makes the stream current that is captured."""
    bytes_sent: int
    """Of each GPU, over the share (n - 1) / n of the tensor's bytes."""


def plain_collectives(size: int, device: str) -> dict[str, TimedCollective]:
    """Return those of torch.distributed: NCCL's on GPUs, Gloo's on a processor."""
    import torch
    import torch.distributed as dist

    def gather(tensor: Any) -> Callable[[], Any]:
        part = tensor[: tensor.numel() // size].clone()
        whole = torch.empty(part.numel() * size, device=device, dtype=tensor.dtype)
        return lambda: dist.all_gather_into_tensor(whole, part)

    def scatter(tensor: Any) -> Callable[[], Any]:
        part = torch.empty(tensor.numel() // size, device=device, dtype=tensor.dtype)
        whole = tensor[: part.numel() * size]
        return lambda: dist.reduce_scatter_tensor(part, whole)

    def other_stream() -> AbstractContextManager[Any]:
        return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()

    return {
        "all_reduce": TimedCollective(
            call=lambda tensor: lambda: dist.all_reduce(tensor), capturing=other_stream, bytes_sent=2
        ),
        "all_gather": TimedCollective(call=gather, capturing=other_stream, bytes_sent=1),
        "reduce_scatter": TimedCollective(call=scatter, capturing=other_stream, bytes_sent=1),
    }


def vllm_all_reduce(rank: int, size: int, local: int) -> TimedCollective:
    """Return vLLM's all-reduce of a tensor parallel group (custom, symmetric memory or NCCL, whichever it picks by
    size); its graphs register the buffers that its kernel reads.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import get_tp_group

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(size, rank, local_rank=local)
        initialize_model_parallel(size)
    group = get_tp_group()

    def call(tensor: Any) -> Callable[[], Any]:
        shaped = tensor.view(-1, min(2048, tensor.numel()))
        return lambda: group.all_reduce(shaped)

    return TimedCollective(call=call, capturing=group.graph_capture, bytes_sent=2)


def sample_us(kind: TimedCollective, num_bytes: int, device: str) -> list[float]:
    """Return the times of one call on a tensor of BF16 in us, of each round, on the slowest rank."""
    import torch
    import torch.distributed as dist

    tensor = torch.randn(num_bytes // 2, device=device, dtype=torch.bfloat16)
    one_round = (_of_a_graph if device == "cuda" else _of_calls)(kind.call(tensor), kind.capturing)
    samples: list[float] = []
    for _ in range(WARM_UP + ROUNDS):
        slowest = torch.tensor([one_round()], device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        samples.append(round(slowest.item(), 3))
    return samples[WARM_UP:]


def _of_a_graph(call: Callable[[], Any], capturing: Callable[[], AbstractContextManager[Any]]) -> Callable[[], float]:
    """Return what times one call, replayed from a graph of `CALLS`."""
    import torch
    import torch.distributed as dist

    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog asks for its events in a thread of its own meanwhile.
    with (
        capturing(),
        torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"),
    ):
        for _ in range(CALLS):
            call()

    def one_round() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / CALLS

    return one_round


def _of_calls(call: Callable[[], Any], _: Callable[[], AbstractContextManager[Any]]) -> Callable[[], float]:
    """Return what times one call on a processor."""
    import torch.distributed as dist

    def one_round() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - start) * 1e6 / CALLS

    return one_round
