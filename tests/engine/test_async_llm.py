"""The engine in its thread: streams, aborts, backpressure, failure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_optimizer.engine import AsyncLLM, LLMEngine, RequestOutput
from moe_optimizer.engine.async_llm import QueueFullError
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.sampling_params import RequestOutputKind
from moe_optimizer.errors import DoesNotFitError, InputError, ServerFailedError
from tests.engine.paper_engine import assert_as_expected, paper_engine, params
from tests.engine.paper_executor import expected_output
from tests.engine.tiny_models import TINY_MOE

DELTA = {"output_kind": RequestOutputKind.DELTA}


def start(engine: LLMEngine, **arguments: Any) -> AsyncLLM:
    args = EngineArgs(model=str(TINY_MOE), dtype="float32", max_num_seqs=4, **arguments)
    return AsyncLLM(args, engine=engine)


@pytest.fixture(params=[False, True], ids=["waiting", "overlapped"])
def llm(request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    llm = start(paper_engine(async_scheduling=request.param))
    yield llm
    llm.shutdown()


def test_a_stream_is_the_output_in_pieces(llm: AsyncLLM) -> None:
    async def collect() -> list[RequestOutput]:
        return [output async for output in llm.generate([1, 2, 3], sampling_params=params(12, **DELTA))]

    pieces = asyncio.run(collect())
    token_ids = [token for piece in pieces for token in piece.outputs[0].token_ids]
    assert token_ids == expected_output([1, 2, 3], 12, 0)
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_slow_reader_gets_everything(llm: AsyncLLM) -> None:
    async def collect() -> list[int]:
        token_ids: list[int] = []
        async for output in llm.generate([1, 2, 3], params(30, **DELTA)):
            token_ids += output.outputs[0].token_ids
            await asyncio.sleep(0.01)
        return token_ids

    assert asyncio.run(collect()) == expected_output([1, 2, 3], 30, 0)


def test_a_slow_reader_of_whole_outputs_sees_each_token_once(llm: AsyncLLM) -> None:
    async def collect() -> list[list[int]]:
        seen = []
        async for output in llm.generate([1, 2, 3], params(30)):
            seen.append(output.outputs[0].token_ids)
            await asyncio.sleep(0.01)
        return seen

    want = expected_output([1, 2, 3], 30, 0)
    seen = asyncio.run(collect())
    assert all(each == want[: len(each)] for each in seen)
    assert seen[-1] == want


def test_what_a_reader_has_not_taken_is_not_kept_for_it(llm: AsyncLLM) -> None:
    async def count() -> int:
        stream = llm.generate([1, 2, 3], params(40, **DELTA))
        await anext(stream)
        await llm.get_output([1], params(60))
        return 1 + len([output async for output in stream])

    # What was under way when the reader stopped, what came until it went on, and the end.
    assert asyncio.run(count()) <= 3


def test_outputs_at_once_come_to_those_who_asked(llm: AsyncLLM) -> None:
    async def ask() -> list[RequestOutput]:
        return await asyncio.gather(*(llm.get_output([number], params(5 + number)) for number in range(20)))

    for number, output in enumerate(asyncio.run(ask())):
        assert output.prompt_token_ids == [number]
        assert len(output.outputs[0].token_ids) == 5 + number
        assert_as_expected(output)


def test_leaving_a_stream_frees_its_blocks(llm: AsyncLLM) -> None:
    async def leave() -> None:
        stream = llm.generate([1, 2, 3], params(50, **DELTA))
        await anext(stream)
        await stream.aclose()
        # The abort is carried out before what is asked for later.
        await llm.get_output([1], params(1))

    asyncio.run(leave())
    assert not llm.engine.groups
    assert llm.engine.scheduler.blocks.num_available == llm.engine.scheduler.blocks.num_blocks


def test_wrong_input_is_raised_where_it_came_from(llm: AsyncLLM) -> None:
    with pytest.raises(InputError, match="prompt"):
        asyncio.run(llm.get_output([], params(1)))
    assert asyncio.run(llm.get_output([1], params(1))).finished


def test_more_requests_than_may_wait_are_refused() -> None:
    llm = start(paper_engine(), max_waiting_requests=1)

    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(llm.get_output([number], params(40)) for number in range(50)), return_exceptions=True
        )

    results = asyncio.run(ask())
    llm.shutdown()
    refused = [result for result in results if isinstance(result, QueueFullError)]
    assert refused
    assert all(isinstance(result, (RequestOutput, QueueFullError)) for result in results)


def test_a_request_that_finds_no_room_is_refused_before_its_text_is_cut_into_tokens(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "_max_requests", 0)
    monkeypatch.setattr(llm.engine, "make_group", None)
    with pytest.raises(QueueFullError):
        asyncio.run(llm.add_request([1], params(1), deliver=lambda _: None))


def test_a_failing_engine_ends_every_request() -> None:
    engine = paper_engine()
    llm = start(engine)

    def fail(step: object) -> Any:
        raise RuntimeError("the device is gone")

    engine.executor.launch = fail
    with pytest.raises(ServerFailedError, match="is gone"):
        asyncio.run(llm.get_output([1], params(5)))
    with pytest.raises(ServerFailedError):
        llm.check_health()


def test_out_of_memory_names_what_to_lower() -> None:
    def fail(step: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine = paper_engine()
    engine.executor.launch = fail
    engine.add_request("0", [1], params(5))
    with pytest.raises(DoesNotFitError) as error:
        engine.step()
    assert "max_num_seqs" in (error.value.hint or "")
    llm = start(engine)
    with pytest.raises(ServerFailedError, match="max_num_seqs"):
        asyncio.run(llm.get_output([1], params(5)))


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_thousand_streams_with_random_departures_lose_nothing(overlapped: bool) -> None:
    engine = paper_engine(num_blocks=200, max_num_seqs=32, async_scheduling=overlapped)
    llm = start(engine)
    rng = random.Random(0)

    async def client(number: int, leaves_after: int | None) -> bool:
        prompt, token_ids = [number % 7, number % 5, number], []
        stream = llm.generate(prompt, params(20, **DELTA))
        async for output in stream:
            token_ids += output.outputs[0].token_ids
            if leaves_after is not None and len(token_ids) >= leaves_after:
                await stream.aclose()
                break
        want = expected_output(prompt, 20, 0)
        return token_ids == (want if leaves_after is None else want[: len(token_ids)])

    async def everybody() -> list[bool]:
        leaving = [rng.randint(1, 19) if rng.random() < 0.4 else None for _ in range(1000)]
        results = await asyncio.gather(*(client(number, after) for number, after in enumerate(leaving)))
        await llm.get_output([1], params(1))
        return results

    assert all(asyncio.run(everybody()))
    llm.shutdown()
    engine.check_integrity()
    assert not engine.groups
    assert engine.scheduler.blocks.num_available == 200
