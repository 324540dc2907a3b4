"""A step is launched before the tokens of the one before it are known, and every output stays as it was."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from moe_optimizer.engine import LLM, LLMEngine, RequestOutput, SamplingParams
from moe_optimizer.engine.beam_search import BeamSearchParams
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.model_runner import ModelRunner
from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.scheduler_output import SchedulerOutput
from moe_optimizer.errors import InputError
from tests.engine.paper_engine import assert_as_expected, paper_engine, params, run
from tests.engine.paper_executor import PaperExecutor, expected_output
from tests.engine.tiny_models import TINY_MOE

PROMPTS = [
    "def add(a, b):\n", "import os\n\n", "class Queue:\n    def put(self, item):\n        ", "x",
    "try:\n    import json", "def add(a, b):\n    return", "for index in range(10):\n    if index ",
]  # fmt: skip
GREEDY = {"temperature": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "ends of text": {**GREEDY, "max_tokens": None},
    "seed": {"seed": 3, "temperature": 0.8},
    "filters": {"seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "schedule": {"seed": 5, "temperature_schedule": [(0, 0.0), (3, 1.0), (6, 0.2)]},
    "penalties": {**GREEDY, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "log-probabilities": {**GREEDY, "logprobs": 3},
    "stop strings": {**GREEDY, "stop": ["self", "if", "\n\n", "("]},
    "stop tokens": {**GREEDY, "stop_token_ids": [10, 13, 200, 262, 300]},
    "least length": {**GREEDY, "stop": ["e"], "min_tokens": 5},
    "samples": {"seed": 6, "n": 3},
    "best of": {"seed": 7, "n": 1, "best_of": 3},
    "one token": {**GREEDY, "max_tokens": 1, "n": 2},
}


@cache
def make_llm(*, overlapped: bool, **arguments: Any) -> LLM:
    return LLM(
        str(TINY_MOE), dtype="float32", device="cpu", max_model_len=64, block_size=4, max_num_seqs=6,
        async_scheduling=overlapped, **arguments,
    )  # fmt: skip


def params_of(kind: dict[str, Any], *, max_tokens: int) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": max_tokens, **kind}
    return SamplingParams(**values)


def outputs(llm: LLM, several: list[SamplingParams]) -> list[Any]:
    found = llm.generate(PROMPTS, several, use_tqdm=False)
    llm.llm_engine.check_integrity()
    blocks = llm.llm_engine.scheduler.blocks
    assert blocks.num_available == blocks.num_blocks
    return [
        (sample.token_ids, sample.text, sample.logprobs, sample.finish_reason, sample.stop_reason)
        for output in found
        for sample in output.outputs
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_the_engine_that_waits(kind: str) -> None:
    several = [params_of(KINDS[kind], max_tokens=5 + 2 * number) for number in range(len(PROMPTS))]
    memory = {"num_gpu_blocks_override": 96}
    want = outputs(make_llm(overlapped=False, **memory), several)
    assert outputs(make_llm(overlapped=True, **memory), several) == want


# Room for a longest sequence and a half: some are preempted, in the middle of chunks and with a token under way.
@pytest.mark.parametrize("swap_space", [0.0, 0.01])
def test_outputs_stay_where_memory_is_short(swap_space: float) -> None:
    kinds = [{"seed": 6, "n": 2}, KINDS["penalties"], KINDS["stop strings"], *([GREEDY] * 4)]
    several = [params_of(kind, max_tokens=24) for kind in kinds]
    want = outputs(make_llm(overlapped=False, num_gpu_blocks_override=96), several)
    tight = make_llm(
        overlapped=True, num_gpu_blocks_override=24, swap_space=swap_space, max_num_batched_tokens=9,
        enable_prefix_caching=not swap_space,
    )  # fmt: skip
    assert outputs(tight, several) == want
    assert tight.llm_engine.scheduler.num_preemptions > 0


def test_beams_are_those_of_the_engine_that_waits() -> None:
    found = []
    for overlapped in (False, True):
        llm = make_llm(overlapped=overlapped, num_gpu_blocks_override=96)
        beams = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=3, max_tokens=6))
        found.append([(beam.tokens, beam.text) for output in beams for beam in output.sequences])
    assert found[0] == found[1]


class Watching(PaperExecutor):
    """Writes down when steps are launched and when their tokens are read."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.events: list[tuple[str, int]] = []

    def launch(self, step: SchedulerOutput) -> SampledTokens:
        number = sum(what == "launched" for what, _ in self.events)
        self.events.append(("launched", number))
        tokens, read = super().launch(step), SampledTokens.read
        events = self.events

        class Watched(SampledTokens):
            def read(self) -> Any:
                events.append(("read", number))
                return read(self)

        return Watched(tokens.token_ids_S)


def watched(*, overlapped: bool, **arguments: Any) -> tuple[Watching, RequestOutput]:
    engine = paper_engine(async_scheduling=overlapped)
    executor = engine.executor = Watching()
    engine.add_request("0", [1, 2, 3], params(**arguments))
    return executor, run(engine)["0"]


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read() -> None:
    executor, output = watched(overlapped=True, max_tokens=4)
    assert_as_expected(output)
    # The last, of nothing, reads the last token.
    assert executor.events == [
        ("launched", 0), ("launched", 1), ("read", 0), ("launched", 2), ("read", 1), ("launched", 3), ("read", 2),
        ("launched", 4), ("read", 3),
    ]  # fmt: skip
    executor, output = watched(overlapped=False, max_tokens=2)
    assert_as_expected(output)
    assert executor.events == [("launched", 0), ("read", 0), ("launched", 1), ("read", 1)]


def test_an_end_by_length_computes_nothing_more_and_one_by_a_token_one_row() -> None:
    whole = expected_output([1, 2, 3], 8, 0)
    assert whole[4] not in whole[:4]
    computed = {
        (overlapped, stops): watched(overlapped=overlapped, max_tokens=8, stop_token_ids=stops)[0].num_computed
        for overlapped in (False, True)
        for stops in ((), (whole[4],))
    }
    # The prompt's three and each output token but the last.
    assert computed[False, ()] == computed[True, ()] == 3 + 7
    assert computed[False, (whole[4],)] == 3 + 4
    assert computed[True, (whole[4],)] == 3 + 5


def test_an_aborted_request_gets_the_tokens_that_are_known() -> None:
    engine = paper_engine(async_scheduling=True)
    for name in ("gone", "stays"):
        engine.add_request(name, [len(name), 2], params(6))
    for _ in range(4):
        engine.step()
    output = engine.abort_request("gone")
    assert output is not None
    assert_as_expected(output)
    # Four steps are launched, three read.
    assert len(output.outputs[0].token_ids) == 3
    engine.check_integrity()
    finished = run(engine)
    assert list(finished) == ["stays"]
    assert_as_expected(finished["stays"])


def test_tokens_under_way_when_all_requests_go_are_nobodys() -> None:
    engine = paper_engine(async_scheduling=True)
    engine.add_request("gone", [1, 2], params(6))
    engine.step()
    engine.abort_request("gone")
    assert not engine.has_unfinished_requests()
    engine.add_request("next", [3], params(6))
    assert_as_expected(run(engine)["next"])


def test_a_seat_is_free_once_the_last_token_of_a_request_is_under_way() -> None:
    engine = paper_engine(async_scheduling=True, max_num_seqs=1)
    for number in range(3):
        engine.add_request(str(number), [number], params(1))
    run(engine)
    assert isinstance(engine.executor, PaperExecutor)
    steps = 0
    engine.add_request("0", [1], params(2))
    engine.add_request("1", [2], params(2))
    while engine.has_unfinished_requests():
        steps += 1
        engine.step()
    # Two for each, none between them, and one behind the last.
    assert steps == 5


def test_the_host_can_be_told_to_wait_between_requests() -> None:
    engine = paper_engine(async_scheduling=True)
    for overlapped in (True, False, True):
        engine.async_scheduling = overlapped
        engine.add_request("0", [1, 2], params(5))
        assert_as_expected(run(engine)["0"])


def test_it_is_on_by_itself_on_one_gpu_only() -> None:
    def resolved(**arguments: Any) -> bool:
        args = EngineArgs(model=str(TINY_MOE), dtype="float32", num_gpu_blocks_override=8, **arguments)
        return LLMEngine(args).async_scheduling

    assert not resolved(device="cpu")
    assert resolved(device="cpu", async_scheduling=True)
    if torch.cuda.is_available():
        assert resolved(device="cuda")


def test_several_processes_are_refused() -> None:
    with pytest.raises(InputError, match="async_scheduling"):
        EngineArgs(model=str(TINY_MOE), async_scheduling=True, tensor_parallel_size=2)


def test_a_token_of_the_step_before_is_taken_from_the_device() -> None:
    llm = make_llm(overlapped=True, num_gpu_blocks_override=96)
    engine = llm.llm_engine
    runner = engine.executor
    assert isinstance(runner, ModelRunner)
    engine.add_request("0", [5, 6, 7], SamplingParams(**GREEDY, max_tokens=4, ignore_eos=True))
    engine.step()
    batch = runner.prepare(engine.scheduler.schedule())
    assert batch.token_ids_T.tolist() == [-1]
    sampled = torch.tensor([40, 41])
    assert batch.following(sampled).token_ids_T.tolist() == [40]
    engine.abort_request("0")
