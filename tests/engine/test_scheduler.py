"""The scheduler and the block manager, on an engine without a model."""

from __future__ import annotations

import pytest

from moe_optimizer.engine import scheduler
from moe_optimizer.engine.llm_engine import LLMEngine
from moe_optimizer.engine.sequence import Status
from tests.engine.paper_engine import assert_as_expected, paper_engine, params, run
from tests.engine.paper_executor import PaperExecutor


def _computed(engine: LLMEngine) -> int:
    assert isinstance(engine.executor, PaperExecutor)
    return engine.executor.num_computed


def test_requests_of_different_lengths_share_the_steps() -> None:
    engine = paper_engine()
    for length in (1, 5, 17, 30):
        engine.add_request(str(length), list(range(length)), params(length))
    outputs = run(engine)
    assert len(outputs) == 4
    for output in outputs.values():
        assert_as_expected(output)
        assert len(output.outputs[0].token_ids) == len(output.prompt_token_ids)


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    engine = paper_engine(max_num_batched_tokens=8)
    engine.add_request("short", [1, 2], params(20))
    engine.step()
    engine.add_request("long", list(range(30)), params(1))
    step = engine.scheduler.schedule()
    assert [sequence.group.request_id for sequence in step.decodes] == ["short"]
    assert [(sequence.group.request_id, count) for sequence, count in step.prefills] == [("long", 7)]


def test_the_log_says_what_each_step_computes(caplog: pytest.LogCaptureFixture) -> None:
    engine = paper_engine(num_blocks=8, max_num_batched_tokens=8)
    caplog.set_level("DEBUG", logger=scheduler.__name__)
    for name in ("first", "second"):
        engine.add_request(name, [1, 2, 3], params(28))
    run(engine)
    lines = [record.getMessage() for record in caplog.records]
    assert "3 of request first, 3 of request second" in lines[0]
    assert "2 decodes" in lines[1]
    assert any("preempted: second" in line for line in lines)


def test_without_chunks_a_prompt_is_computed_whole() -> None:
    engine = paper_engine(max_num_batched_tokens=64, chunked_prefill=False)
    engine.add_request("first", list(range(40)), params(1))
    engine.add_request("second", list(range(40, 70))[:30], params(1))
    step = engine.scheduler.schedule()
    assert [count for _, count in step.prefills] == [40]


def test_without_a_cache_each_token_computes_the_whole_text() -> None:
    engine = paper_engine(kv_cache=False)
    for name, length in (("first", 10), ("second", 7), ("one token", 1)):
        engine.add_request(name, list(range(length)), params(4, n=2))
    for output in run(engine).values():
        assert_as_expected(output)
    texts = [[length + number for number in range(4)] * 2 for length in (10, 7, 1)]
    assert _computed(engine) == sum(map(sum, texts))


def test_without_continuous_batching_none_begins_before_all_have_ended() -> None:
    engine, ended = paper_engine(continuous_batching=False, max_num_seqs=2), list[str]()
    for name, length in (("long", 9), ("short", 2), ("next", 1)):
        engine.add_request(name, [1, 2, 3], params(length))
    while engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.step() if output.finished]
        assert len(engine.scheduler.running) < 2 or "short" not in ended
    assert ended == ["short", "long", "next"]


def test_the_second_of_two_equal_prompts_computes_its_end_only() -> None:
    engine = paper_engine()
    engine.add_request("first", list(range(19)), params(1))
    run(engine)
    before = _computed(engine)
    engine.add_request("second", list(range(19)), params(1))
    output = run(engine)["second"]
    assert output.num_cached_tokens == 16
    assert _computed(engine) - before == 3
    assert_as_expected(output)


def test_a_prompt_of_whole_blocks_computes_its_last_block_again() -> None:
    engine = paper_engine()
    for name in ("first", "second"):
        engine.add_request(name, list(range(16)), params(3))
        output = run(engine)[name]
        assert_as_expected(output)
    assert output.num_cached_tokens == 12


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    engine = paper_engine()
    engine.add_request("first", list(range(10)), params(10))
    answer = run(engine)["first"].outputs[0].token_ids
    engine.add_request("second", [*range(10), *answer, 7], params(1))
    assert run(engine)["second"].num_cached_tokens == 16


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = paper_engine(prefix_caching=False)
    for name in ("first", "second"):
        engine.add_request(name, list(range(19)), params(1))
        assert run(engine)[name].num_cached_tokens == 0


def test_the_least_recently_used_blocks_are_evicted() -> None:
    # 12 blocks hold three prompts of 4: the fourth evicts the one used longest ago.
    engine = paper_engine(num_blocks=12, max_model_len=20)
    found = {}
    for name, start in (("a", 0), ("b", 100), ("a again", 0), ("c", 200), ("d", 300), ("a last", 0), ("b last", 100)):
        engine.add_request(name, list(range(start, start + 16)), params(1))
        found[name] = run(engine)[name].num_cached_tokens
    assert found == {"a": 0, "b": 0, "a again": 12, "c": 0, "d": 0, "a last": 12, "b last": 0}


@pytest.mark.parametrize("length", [1, 4, 15, 16, 17])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_share_the_prompt_and_differ_behind_it(length: int, prefix_caching: bool) -> None:
    engine = paper_engine(prefix_caching=prefix_caching)
    engine.add_request("0", list(range(length)), params(9, n=4))
    output = run(engine)["0"]
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert_as_expected(output)
    # The prompt once, its last token again for each sample behind the first, and nine tokens each but the last.
    assert _computed(engine) == length + 3 + 4 * 8


def test_samples_without_a_seat_wait() -> None:
    engine = paper_engine(max_num_seqs=2)
    engine.add_request("0", list(range(6)), params(5, n=5))
    output = run(engine)["0"]
    assert len(output.outputs) == 5
    assert_as_expected(output)


@pytest.mark.parametrize("num_host_blocks", [0, 3, 64])
def test_too_many_requests_for_the_memory_all_finish(num_host_blocks: int) -> None:
    # 8 blocks of 4 hold one longest sequence and no second one beside it.
    engine = paper_engine(num_blocks=8, num_host_blocks=num_host_blocks, max_model_len=32)
    for number in range(6):
        engine.add_request(str(number), [number, 1, 2, 3, 4], params(25))
    outputs = run(engine)
    assert len(outputs) == 6
    assert engine.scheduler.num_preemptions > 0
    for output in outputs.values():
        assert_as_expected(output)
        assert len(output.outputs[0].token_ids) == 25


def test_a_swapped_sequence_computes_nothing_twice() -> None:
    engine = paper_engine(num_blocks=8, num_host_blocks=32, max_model_len=32, prefix_caching=False)
    for number in range(3):
        engine.add_request(str(number), [number, 1, 2, 3], params(20))
    run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert _computed(engine) == 3 * (4 + 19)


def test_urgent_requests_take_the_place_of_others() -> None:
    engine = paper_engine(max_num_seqs=1)
    engine.add_request("calm", [1, 2, 3], params(10), priority=5)
    engine.step()
    engine.add_request("urgent", [4, 5], params(2), priority=-1)
    finished: list[str] = []
    while engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
        engine.check_integrity()
    assert finished == ["urgent", "calm"]


def test_requests_of_one_priority_are_served_in_their_order() -> None:
    engine = paper_engine(max_num_seqs=1)
    for number in range(4):
        engine.add_request(str(number), [number], params(2))
    assert list(run(engine)) == ["0", "1", "2", "3"]


def test_an_aborted_request_frees_its_blocks_wherever_it_is() -> None:
    engine = paper_engine(num_blocks=8, num_host_blocks=8, max_model_len=32, prefix_caching=False)
    for number in range(5):
        engine.add_request(str(number), [number, 1, 2, 3, 4, 5, 6], params(20, n=2))
    for _ in range(12):
        engine.step()
    statuses = {sequence.status for group in engine.groups.values() for sequence in group.sequences}
    assert {Status.RUNNING, Status.WAITING} <= statuses
    for request_id in list(engine.groups):
        output = engine.abort_request(request_id)
        assert output is not None
        assert {sample.finish_reason for sample in output.outputs} == {"abort"}
        engine.check_integrity()
    assert engine.scheduler.blocks.num_available == 8
    assert not engine.has_unfinished_requests()


def test_broken_books_are_noticed() -> None:
    engine = paper_engine()
    engine.add_request("0", [1, 2, 3], params(5))
    engine.step()
    engine.scheduler.blocks.blocks[0].ref_count += 1
    with pytest.raises(AssertionError, match="reference counts"):
        engine.check_integrity()
