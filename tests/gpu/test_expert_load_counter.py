"""Tokens per expert on a GPU: replays of CUDA graphs count, whole ones and those of vLLM's pieces."""

from __future__ import annotations

import threading

import pytest
import torch

from moe_optimizer.vllm_plugin.expert_load.counter import StepwiseCounter

pytestmark = pytest.mark.gpu
LAYERS, EXPERTS, ROWS, TOP_K = (3, 4, 9), 16, 64, 4


def counted(ids_LTK: torch.Tensor, limit: int) -> torch.Tensor:
    flat = ids_LTK[:, :limit].reshape(len(LAYERS), -1).cpu().to(torch.int64)
    counts = torch.zeros(len(LAYERS), EXPERTS, dtype=torch.int64)
    return counts.scatter_add_(1, flat, torch.ones_like(flat))


def random_ids(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, EXPERTS, (len(LAYERS), ROWS, TOP_K), generator=generator, dtype=torch.int32).cuda()


@pytest.mark.parametrize("pieces", [1, len(LAYERS)])
def test_replays_count_what_is_in_the_graphs_memory_then(pieces: int) -> None:
    counter = StepwiseCounter(LAYERS, EXPERTS, torch.device("cuda"), max_rows=ROWS)
    routed = random_ids(0)

    def forward(positions: range) -> None:
        for position in positions:
            # A new tensor in every layer, as a router makes it: its memory is free for others once nobody holds it.
            counter.capture(LAYERS[position], routed[position] + 0)
            torch.ones(ROWS, TOP_K, dtype=torch.int32, device="cuda").mul_(EXPERTS - 1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward(range(len(LAYERS)))
    graphs: list[torch.cuda.CUDAGraph] = []
    per_piece = len(LAYERS) // pieces
    for first in range(0, len(LAYERS), per_piece):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs[0].pool() if graphs else None, stream=stream):
            forward(range(first, first + per_piece))
        graphs.append(graph)
    expected = torch.zeros(len(LAYERS), EXPERTS, dtype=torch.int64)
    for seed, limit in ((1, ROWS), (2, 5), (3, 0), (4, 1)):
        ids = random_ids(seed)
        routed.copy_(ids)
        counter.count_rows(limit)
        for graph in graphs:
            graph.replay()
        counter.count_rows(0)
        for graph in graphs:
            graph.replay()
        expected += counted(ids, limit)
    assert counter.table()[:, 1:-1].tolist() == expected.tolist()


def test_the_table_read_by_another_thread_has_every_step_before_it() -> None:
    counter = StepwiseCounter(LAYERS, EXPERTS, torch.device("cuda"), max_rows=ROWS)
    ids, read = random_ids(5), []
    counter.count_rows(ROWS)
    for _ in range(200):
        for position, layer_id in enumerate(LAYERS):
            counter.capture(layer_id, ids[position])
    thread = threading.Thread(target=lambda: read.append(counter.table()))
    thread.start()
    thread.join()
    assert read[0][:, 1:-1].tolist() == (200 * counted(ids, ROWS)).tolist()
