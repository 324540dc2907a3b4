"""Requests of a workload, and traces in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.trace import CHUNK_TOKENS, Load, draw, loads_of, moved, read_trace, write_trace
from moe_optimizer.measure.bench.workload import RequestKind, SharedPrefix, TokenRange, Workload


def workload(**changes) -> Workload:
    kinds = (RequestKind(prompt=TokenRange(least=40, most=90), output=TokenRange(least=3, most=9)),)
    fields: dict[str, Any] = {"description": "a test", "requests": kinds, "clients": (1, 4)} | changes
    return Workload(**fields)


@given(st.integers(0, 50), st.integers(0, 50), st.sampled_from([Load(clients=1), Load(clients=4)]))
def test_equal_arguments_draw_equal_requests_and_rounds_share_no_prompt(first, second, load):
    one, other = (draw(workload(), load, round_number=each) for each in (first, second))
    if first == second:
        assert one == other
    else:
        ids = [{chunk for request in requests for chunk in request.hash_ids} for requests in (one, other)]
        assert not ids[0] & ids[1]


def test_a_closed_loop_has_its_requests_for_each_client_within_the_lengths():
    requests = draw(workload(requests_per_client=3), Load(clients=4), round_number=0)
    assert len(requests) == 12
    assert all(40 <= each.input_length <= 90 and 3 <= each.output_length <= 9 for each in requests)
    assert all(len(each.hash_ids) == -(-each.input_length // CHUNK_TOKENS) for each in requests)


def test_an_open_loop_arrives_at_its_rate_and_in_bursts():
    calm = draw(workload(clients=(), rates=(50.0,), seconds=40.0), Load(rate=50.0), round_number=0)
    assert len(calm) == 2000
    assert calm[-1].timestamp == pytest.approx(40.0, rel=0.15)
    burst = draw(workload(clients=(), rates=(50.0,), seconds=40.0, burst=8), Load(rate=50.0), round_number=0)
    assert [each.timestamp for each in burst[:8]] == [0.0] * 8
    assert burst[8].timestamp > 0


def test_a_shared_prefix_is_shared_by_requests_and_rounds_and_nothing_else_is():
    shared = workload(shared_prefix=SharedPrefix(tokens=32, prefixes=2))
    rounds = [draw(shared, Load(clients=4), round_number=each) for each in (0, 1)]
    first = {each.hash_ids[:2] for requests in rounds for each in requests}
    assert len(first) == 2
    rest = [chunk for requests in rounds for each in requests for chunk in each.hash_ids[2:]]
    assert len(rest) == len(set(rest))


def test_kinds_come_as_often_as_their_shares_say():
    kinds = tuple(
        RequestKind(share=share, prompt=TokenRange(least=tokens, most=tokens), output=TokenRange(least=1, most=1))
        for share, tokens in ((3.0, 50), (1.0, 100))
    )
    drawn = draw(workload(requests=kinds, requests_per_client=400), Load(clients=4), round_number=0)
    assert sum(each.input_length == 50 for each in drawn) / len(drawn) == pytest.approx(0.75, abs=0.05)


def test_the_loads_of_a_workload():
    assert [str(each) for each in loads_of(workload())] == ["1 client", "4 clients"]
    assert [str(each) for each in loads_of(workload(clients=(), rates=(0.5,)))] == ["0.5 requests/s"]


def test_a_trace_that_was_written_is_read_back(tmp_path: Path):
    requests = draw(workload(clients=(), rates=(5.0,), seconds=4.0), Load(rate=5.0), round_number=2)
    write_trace(requests, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl") == requests


def test_a_replayed_trace_keeps_what_it_shares_and_shares_nothing_with_its_next_round(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 5 + at, "input_length": 32, "output_length": 2, "hash_ids": [7, at]} for at in range(2)]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path)
    assert [each.timestamp for each in trace] == [0.0, 1.0]
    one, two = moved(trace, 0), moved(trace, 1)
    assert one[0].hash_ids[0] == one[1].hash_ids[0]
    assert not {chunk for each in one for chunk in each.hash_ids} & {chunk for each in two for chunk in each.hash_ids}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "input_length"),
        ('{"timestamp": 0, "input_length": 4, "output_length": true}', "output_length"),
        ('{"timestamp": -1, "input_length": 4, "output_length": 1}', "timestamp"),
        ('{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1]}', "hash_ids"),
        ("", "no requests"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, named: str):
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=named) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_times_that_go_back_are_refused(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 4, "output_length": 1}
    path.write_text("\n".join(json.dumps({**row, "timestamp": at}) for at in (1, 0)))
    with pytest.raises(InputError, match="timestamp"):
        read_trace(path)
