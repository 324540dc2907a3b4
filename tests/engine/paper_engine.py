"""An `LLMEngine` on a `PaperExecutor`: everything but the model."""

from __future__ import annotations

from typing import Any

from moe_optimizer.engine import LLMEngine, SamplingParams
from moe_optimizer.engine.block_manager import BlockManager
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.outputs import RequestOutput
from moe_optimizer.engine.scheduler import Scheduler
from tests.engine.paper_executor import PaperExecutor, expected_output
from tests.engine.tiny_models import TINY_MOE


def paper_engine(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    num_host_blocks: int = 0,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    chunked_prefill: bool = True,
    prefix_caching: bool = True,
    max_model_len: int = 64,
    async_scheduling: bool = False,
    continuous_batching: bool = True,
    kv_cache: bool = True,
) -> LLMEngine:
    args = EngineArgs(model=str(TINY_MOE), dtype="float32", skip_tokenizer_init=True, async_scheduling=async_scheduling)
    blocks = BlockManager(
        num_blocks,
        num_host_blocks=num_host_blocks,
        block_size=block_size,
        prefix_caching=prefix_caching and kv_cache,
    )
    scheduler = Scheduler(
        blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        chunked_prefill=chunked_prefill,
        continuous_batching=continuous_batching,
        kv_cache=kv_cache,
    )
    executor = PaperExecutor(num_blocks, block_size, num_host_blocks=num_host_blocks, max_model_len=max_model_len)
    executor.blocks = blocks.blocks
    return LLMEngine(args, executor=executor, scheduler=scheduler)


def params(max_tokens: int = 8, **values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **values)


def run(engine: LLMEngine, *, max_steps: int = 10_000) -> dict[str, RequestOutput]:
    """Compute until every request has finished, with the books checked after each step."""
    finished: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return finished
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        engine.check_integrity()
    raise AssertionError(f"not finished after {max_steps} steps")


def assert_as_expected(output: RequestOutput) -> None:
    for sample in output.outputs:
        want = expected_output(output.prompt_token_ids, len(sample.token_ids), sample.index)
        assert sample.token_ids == want, f"request {output.request_id}, sample {sample.index}"
