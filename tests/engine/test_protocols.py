"""Each part of the engine can be swapped."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_optimizer.engine import LLM, LLMEngine, SamplingParams
from moe_optimizer.engine.attention.sdpa import SdpaAttention
from moe_optimizer.engine.block_manager import BlockManager
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.model_runner import ModelRunner
from moe_optimizer.engine.packed_batch import PackedBatch
from moe_optimizer.engine.protocols import Executor
from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.scheduler import Scheduler
from moe_optimizer.engine.scheduler_output import SchedulerOutput
from moe_optimizer.engine.sequence import Sequence
from tests.engine.paper_engine import assert_as_expected, params, run
from tests.engine.paper_executor import PaperExecutor
from tests.engine.tiny_models import TINY_MOE

PROMPT = "def add(a, b):\n"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ARGS = EngineArgs(model=str(TINY_MOE), dtype="float32", num_gpu_blocks_override=64, max_num_seqs=4)


def generate(engine: LLMEngine) -> list[int]:
    engine.add_request("0", PROMPT, GREEDY)
    return run(engine)["0"].outputs[0].token_ids


def test_the_executor() -> None:
    class Counting:
        """Passes every step on to a runner."""

        def __init__(self, inner: Executor) -> None:
            self.inner, self.cache_size, self.steps = inner, inner.cache_size, 0

        def launch(self, step: SchedulerOutput) -> SampledTokens:
            self.steps += 1
            return self.inner.launch(step)

    executor = Counting(LLMEngine(ARGS).executor)
    assert generate(LLMEngine(ARGS, executor=executor)) == generate(LLMEngine(ARGS))
    assert executor.steps == 6


def test_the_sampler() -> None:
    class Always:
        def sample(self, logits_SV: Tensor, sequences: list[Sequence]) -> SampledTokens:
            return SampledTokens.of([7 for _ in sequences])

    assert generate(LLMEngine(ARGS, sampler=Always())) == [7] * 6


def test_the_attention_backend(tiny_moe_llm: LLM) -> None:
    class Padded(SdpaAttention):
        """Decodes one sequence at a time."""

        def attend(
            self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, cache_2BSKd: Tensor, batch: PackedBatch
        ) -> Tensor:
            self.called = True
            return super().attend(q_THd, k_TKd, v_TKd, cache_2BSKd, batch)

    engine = LLMEngine(ARGS)
    assert isinstance(engine.executor, ModelRunner)
    backend = Padded()
    for layer in engine.executor.model.attention_layers():
        layer.backend = backend
    assert generate(engine) == generate(LLMEngine(ARGS))
    assert backend.called


def test_the_scheduler() -> None:
    class OneByOne(Scheduler):
        """No batching: the next request starts when the one before has finished."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options["max_num_seqs"] = 1
            super().__init__(*arguments, **options)
            self.sizes: set[int] = set()

        def schedule(self) -> SchedulerOutput:
            step = super().schedule()
            self.sizes.add(len(step.sampled))
            return step

    scheduler = OneByOne(BlockManager(16, block_size=4), max_num_seqs=4, max_num_batched_tokens=64)
    swapped = LLMEngine(
        EngineArgs(model=str(TINY_MOE), dtype="float32", skip_tokenizer_init=True),
        executor=PaperExecutor(16, 4),
        scheduler=scheduler,
    )
    for number in range(3):
        swapped.add_request(str(number), [number], params(4))
    for output in run(swapped).values():
        assert_as_expected(output)
    assert scheduler.sizes == {1}


def test_the_block_manager() -> None:
    class Counted(BlockManager):
        """Counts what it hands out."""

        handed_out = 0

        def make_room(self, sequence: Sequence, num_tokens: int) -> bool:
            self.handed_out += 1
            return super().make_room(sequence, num_tokens)

    blocks = Counted(16, block_size=4)
    scheduler = Scheduler(blocks, max_num_seqs=4, max_num_batched_tokens=64)
    swapped = LLMEngine(
        EngineArgs(model=str(TINY_MOE), dtype="float32", skip_tokenizer_init=True),
        executor=PaperExecutor(16, 4),
        scheduler=scheduler,
    )
    swapped.add_request("0", [1, 2, 3], params(10))
    assert_as_expected(run(swapped)["0"])
    # Twelve tokens are computed, in blocks of 4.
    assert blocks.handed_out == 3
