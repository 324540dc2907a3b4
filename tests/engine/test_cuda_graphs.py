"""What a replayed graph reads: the batch in the captured buffers, and padding behind it. Graphs are pretended here."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_optimizer.engine import LLMEngine
from moe_optimizer.engine.cuda_graphs import DecodeGraphs
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.model_runner import ModelRunner
from moe_optimizer.engine.packed_batch import PackedBatch, Prefill
from tests.engine.paper_engine import params, run
from tests.engine.tiny_models import TINY_MOE


class Compute:
    """Returns what it was given, one row for each token, and can do so again with what the buffers then hold."""

    def __init__(self) -> None:
        self.recording: Any = None
        self.fails = False

    def __call__(self, batch: PackedBatch) -> Tensor:
        if self.fails:
            raise RuntimeError("called a synchronizing CUDA operation")
        out = self._rows(batch)
        if self.recording is not None:
            self.recording.again = lambda: out.copy_(self._rows(batch))
        return out

    @staticmethod
    def _rows(batch: PackedBatch) -> Tensor:
        numbers = (
            batch.token_ids_T, batch.positions_T, batch.slots_T, batch.context_lengths_S, batch.query_starts_S1[1:],
        )  # fmt: skip
        return torch.cat((torch.stack(numbers, 1), batch.block_tables_SN), 1)


class Graph:
    """A graph that runs its function again."""

    replays = 0
    again: Callable[[], Any]

    def replay(self) -> None:
        Graph.replays += 1
        self.again()


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Compute:
    made = Compute()

    @contextlib.contextmanager
    def capture(graph: Graph, pool: Any) -> Iterator[None]:
        made.recording = graph
        yield
        made.recording = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    return made


def make_graphs(compute: Compute) -> DecodeGraphs:
    return DecodeGraphs(compute, [1, 2, 4], max_blocks=3, block_size=4, device=torch.device("cpu"))


def decodes(count: int, *, prefills: tuple[Prefill, ...] = ()) -> PackedBatch:
    numbers = torch.arange(1, count + 1)
    return PackedBatch(
        copies=[], token_ids_T=numbers * 10, positions_T=numbers + 3, slots_T=numbers * 4,
        context_lengths_S=numbers + 4, query_starts_S1=torch.arange(count + 1),
        block_tables_SN=torch.stack((numbers, numbers + 1), 1).int(), num_decodes=count, prefills=prefills,
        sampled=numbers - 1, block_size=4,
    )  # fmt: skip


def test_a_batch_is_read_whole_and_padding_is_stored_nowhere(compute: Compute) -> None:
    graphs = make_graphs(compute)
    for count in (3, 1, 4, 2):
        hidden = graphs.hidden(decodes(count))
        assert hidden is not None
        numbers = torch.arange(1, count + 1)
        want = torch.stack((numbers * 10, numbers + 3, numbers * 4, numbers + 4, numbers, numbers, numbers + 1), 1)
        assert torch.equal(hidden[:, :7], want)
    padded = graphs._graphs[4].hidden_SH
    graphs.hidden(decodes(3))
    # Its slot is -1 and its context is empty.
    assert padded[3, 2:4].tolist() == [-1, 0]


def test_prompts_and_larger_batches_have_no_graph(compute: Compute) -> None:
    graphs = make_graphs(compute)
    before = Graph.replays
    assert graphs.hidden(decodes(2, prefills=(Prefill(2, 5, 0),))) is None
    assert graphs.hidden(decodes(5)) is None
    assert Graph.replays == before


def test_tokens_under_way_reach_the_next_replay(compute: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(
        model=str(TINY_MOE), dtype="float32", device="cpu", num_gpu_blocks_override=64, max_num_seqs=4,
        max_model_len=256, skip_tokenizer_init=True, async_scheduling=True,
    )  # fmt: skip

    def generate(engine: LLMEngine) -> list[list[int]]:
        for number in range(4):
            engine.add_request(str(number), [7, 8, 9 + number], params(8 + 3 * number))
        outputs = run(engine)
        return [outputs[str(number)].outputs[0].token_ids for number in range(4)]

    want, engine = generate(LLMEngine(args)), LLMEngine(args)
    runner = engine.executor
    assert isinstance(runner, ModelRunner)

    def hidden(batch: PackedBatch) -> Tensor:
        # What is captured is padding alone, whose slots a CPU does not leave out.
        padding = torch.zeros(len(batch.token_ids_T), runner.config.hf_config.hidden_size)
        return runner._hidden(batch) if batch.context_lengths_S.all() else padding

    monkeypatch.setattr(compute, "_rows", hidden)
    runner.graphs = DecodeGraphs(compute, [1, 2, 3, 4], max_blocks=16, block_size=16, device=torch.device("cpu"))
    before = Graph.replays
    assert generate(engine) == want
    assert Graph.replays - before == 8 + 3 * 3 - 1


def test_a_slow_start_names_what_makes_it_faster(
    compute: Compute, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = LLMEngine(EngineArgs(model=str(TINY_MOE), dtype="float32", device="cpu", num_gpu_blocks_override=8))
    assert isinstance(engine.executor, ModelRunner)
    engine.executor.model = compute  # pyrefly: ignore[bad-assignment]
    clock = itertools.count(0, 60)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with caplog.at_level("WARNING"):
        engine.executor._capture()
    for word in ("60 s", "max_num_seqs", "enforce_eager=True", "compile_layers=False"):
        assert word in caplog.text


def test_what_cannot_be_captured_runs_without_graphs_and_says_so(
    compute: Compute, caplog: pytest.LogCaptureFixture
) -> None:
    compute.fails = True
    with caplog.at_level("WARNING"):
        graphs = make_graphs(compute)
    assert graphs.sizes == []
    assert graphs.hidden(decodes(1)) is None
    assert "synchronizing" in caplog.text
