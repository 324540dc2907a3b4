"""The connector over a shared folder, in one process: what it writes, when that is found, what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BLOCK = 4


@pytest.fixture
def connector(tmp_path: Path) -> Any:
    """Makes a connector of one kind, with what its base class would take from vLLM's configuration."""
    from moe_optimizer.vllm_plugin.kv_connectors.shared_folder_connector import SharedFolderConnector

    def make(*, writes: bool) -> Any:
        made = object.__new__(SharedFolderConnector)
        made._writes, made._unfinished = writes, {}
        made._block_size, made._storage_path = BLOCK, str(tmp_path)
        made._requests_need_load = {}
        return made

    return make


def step(prompt: list[int], *, read_now: int, read_before: int = 0) -> Any:
    """Return a scheduler's step with one new request."""
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    output = SchedulerOutput.make_empty()
    blocks = list(range(len(prompt) // BLOCK + 1))
    request = NewRequestData(
        req_id="r", prompt_token_ids=prompt, mm_features=[], sampling_params=None, pooling_params=None,
        block_ids=(blocks,), num_computed_tokens=read_before, lora_request=None,
    )  # fmt: skip
    output.scheduled_new_reqs.append(request)
    output.num_scheduled_tokens["r"] = read_now
    return output


def write(connector: Any, prompt: list[int]) -> list[str]:
    """Write a prompt's files as a worker does, up to the end of the step; return the folders it wrote into."""
    return write_files(connector, connector.build_connector_meta(step(prompt, read_now=len(prompt))))


def write_files(connector: Any, meta: Any) -> list[str]:
    names = [connector._generate_filename_debug("layer", each.token_ids, each.mm_hashes) for each in meta.requests]
    for name in names:
        Path(name).write_text("cache")
    return names


def matched(connector: Any, prompt: list[int], *, computed: int = 0) -> int:
    request = SimpleNamespace(prompt_token_ids=prompt, mm_features=[], request_id="r")
    return connector.get_num_new_matched_tokens(request, computed)[0]


def test_a_prompt_is_found_once_all_of_it_is_written(connector: Any) -> None:
    prefill, decode = connector(writes=True), connector(writes=False)
    prompt = list(range(10))
    assert write(prefill, prompt)
    assert matched(decode, prompt) == 0
    prefill.wait_for_save()
    assert matched(decode, prompt) == 8


def test_a_prompt_that_two_steps_write_stays_whole(connector: Any, tmp_path: Path) -> None:
    prefill = connector(writes=True)
    prompt = list(range(10))
    # vLLM plans the next step before the worker has ended this one.
    planned = [prefill.build_connector_meta(step(prompt, read_now=10)) for _ in range(2)]
    for meta in planned:
        assert write_files(prefill, meta)
        prefill.wait_for_save()
    assert matched(connector(writes=False), prompt) == 8
    assert [path.suffix for path in tmp_path.iterdir()] == [""]


def test_two_prefill_servers_that_read_one_prompt_at_once_never_show_what_one_of_them_still_writes(
    connector: Any, tmp_path: Path
) -> None:
    first, second, decode = connector(writes=True), connector(writes=True), connector(writes=False)
    prompt = list(range(10))
    whole = write(first, prompt)
    (unfinished,) = write(second, prompt)
    Path(unfinished).write_text("ca")
    first.wait_for_save()
    assert matched(decode, prompt) == 8
    shown = [path for path in tmp_path.rglob("layer*") if path.parent.suffix == ""]
    assert [path.read_text() for path in shown] == ["cache"] * len(whole)
    Path(unfinished).write_text("cache")
    second.wait_for_save()
    assert [path.suffix for path in tmp_path.iterdir()] == [""]


def test_a_prompt_that_is_read_in_several_steps_is_not_written(connector: Any) -> None:
    prefill = connector(writes=True)
    assert prefill.build_connector_meta(step(list(range(10)), read_now=6)).requests == []


def test_a_prompt_whose_beginning_was_in_the_prefix_cache_is_written(connector: Any) -> None:
    prefill = connector(writes=True)
    assert len(prefill.build_connector_meta(step(list(range(10)), read_now=6, read_before=4)).requests) == 1


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 2 * BLOCK + 1])
def test_what_has_no_unambiguous_folder_is_neither_written_nor_read(connector: Any, length: int) -> None:
    prefill, decode = connector(writes=True), connector(writes=False)
    write(prefill, list(range(2 * BLOCK)))  # its first block is the folder that a longer prompt would be looked up by
    prefill.wait_for_save()
    prompt = list(range(length))
    assert write(prefill, prompt) == []
    assert matched(decode, prompt) == 0


def test_decode_writes_nothing_and_prefill_reads_nothing(connector: Any) -> None:
    prefill, decode = connector(writes=True), connector(writes=False)
    prompt = list(range(10))
    assert write(decode, prompt) == []
    write(prefill, prompt)
    prefill.wait_for_save()
    assert matched(prefill, prompt) == 0


def test_more_in_the_own_prefix_cache_than_in_the_folder_is_nothing_to_read(connector: Any) -> None:
    prefill, decode = connector(writes=True), connector(writes=False)
    prompt = list(range(2 * BLOCK))
    write(prefill, prompt)
    prefill.wait_for_save()
    assert matched(decode, prompt) == BLOCK
    assert matched(decode, prompt, computed=2 * BLOCK) == 0
