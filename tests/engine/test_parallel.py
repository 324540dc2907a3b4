"""Several processes that share a model give the outputs of one: tensor and expert parallelism, over gloo on the CPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from moe_optimizer.engine import LLMEngine, SamplingParams, parallel
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.layers.ranks import Ranks
from moe_optimizer.engine.parallel import ParallelExecutor
from moe_optimizer.errors import InputError, ServerFailedError, UnsupportedError
from tests.engine.tiny_models import TINY_MOE

PROMPTS = [list(range(1, 30)), [5, 3], [7] * 12]


@pytest.fixture(autouse=True, scope="module")
def _imported_once() -> Iterator[None]:
    """Ranks are forked from a process that has imported the engine, and what transformers imports with the first
    configuration (for its docstring); each import takes 5 s and 3 s of processor time.

    That process computes nothing and has no threads, so a fork is safe: OPENBLAS_NUM_THREADS=1 keeps numpy's away.
    """
    forks = multiprocessing.get_context("forkserver")
    engine = [f"moe_optimizer.engine.{name}" for name in ("parallel", "models.mixtral", "models.qwen3_moe")]
    forks.set_forkserver_preload([*engine, "transformers.models.auto.modeling_auto"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        forkserver.ensure_running()
        patch.setattr(multiprocessing, "get_context", lambda method: forks)
        yield


def generate(folder: Path, **arguments: Any) -> list[list[int]]:
    values: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "num_gpu_blocks_override": 32,
        "max_num_seqs": 4,
        **arguments,
    }
    engine = LLMEngine(EngineArgs(model=str(folder), skip_tokenizer_init=True, **values))
    try:
        for number, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
            engine.add_request(str(number), prompt, params)
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
            engine.check_integrity()
        return [found[str(number)] for number in range(len(PROMPTS))]
    finally:
        engine.shutdown()


# Slices of a dense model with biases and tied embeddings, fewer key/value heads than ranks, slices of experts.
@pytest.mark.parametrize("name", ["qwen3-even", "mixtral-even", "qwen3_moe-even"])
def test_two_ranks_give_the_tokens_of_one(name: str, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(name)
    assert generate(folder, tensor_parallel_size=2) == generate(folder)


def test_whole_experts_on_each_rank_give_the_tokens_of_one(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen3_moe-even")
    got = generate(folder, tensor_parallel_size=2, enable_expert_parallel=True)
    assert got == generate(folder)


def test_a_rank_that_died_ends_the_engine(tiny_model: Callable[..., Path]) -> None:
    args = EngineArgs(
        model=str(tiny_model("qwen3-even")), dtype="float32", device="cpu", skip_tokenizer_init=True,
        num_gpu_blocks_override=8, tensor_parallel_size=2,
    )  # fmt: skip
    engine = LLMEngine(args)
    executor = engine.executor
    assert isinstance(executor, ParallelExecutor)
    try:
        (rank,) = multiprocessing.active_children()
        rank.kill()
        rank.join()
        # The mailbox is empty: one step is taken by nobody.
        executor._taken[0].acquire()
        engine.add_request("0", [1, 2, 3])
        with pytest.raises(ServerFailedError, match=r"rank-1.*exit code -9"):
            engine.step()
    finally:
        executor.shutdown()


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="5 heads"):
        Ranks(0, 2).share(5, "heads")


def test_what_a_rank_refuses_is_said_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    args = EngineArgs(model=str(TINY_MOE), device="cpu", skip_tokenizer_init=True, tensor_parallel_size=3)
    mailbox = SharedMemory(create=True, size=64)
    codes: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        # It is alone: nobody joins.
        patch.setattr(parallel, "_join", lambda _config, rank, _store: Ranks(rank, 3))
        patch.setattr("os._exit", codes.append)
        parallel._serve_rank(args, 1, store.port, mailbox.name, (None, None))
    mailbox.close()
    mailbox.unlink()
    err = capfd.readouterr().err
    assert codes == [1]
    assert "rank 1: tensor_parallel_size: got 3" in err
    assert "Traceback" not in err


def test_ranks_share_a_slice_where_there_are_fewer_slices() -> None:
    tensor = torch.arange(4.0)[:, None]
    assert [Ranks(rank, 4).slice_of(tensor, 0, 2).flatten().tolist() for rank in range(4)] == [
        [0, 1], [0, 1], [2, 3], [2, 3],
    ]  # fmt: skip
    assert [Ranks(rank, 2).slice_of(tensor, 0, 2).flatten().tolist() for rank in range(2)] == [[0, 1], [2, 3]]


@pytest.mark.skipif(torch.cuda.device_count() > 7, reason="there are as many GPUs as the test says there are not")
def test_more_ranks_than_gpus_are_refused() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with pytest.raises(InputError, match="tensor_parallel_size: got 8"):
        LLMEngine(EngineArgs(model="examples/tiny-moe", tensor_parallel_size=8))
