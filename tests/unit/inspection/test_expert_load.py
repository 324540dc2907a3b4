"""The expert load file: written, read back, merged, and refused with the field that is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.expert_load import parse_expert_load, read_expert_load, read_run_load
from moe_optimizer.specs.expert_load import PARTS_DIR, ExpertLoad, LayerLoad, merge_expert_loads

SINCE = "2026-11-20T10:00:00+00:00"


def load_of(*layers: tuple[int, tuple[int, ...]], model: str = "m", since: str = SINCE, steps: int = 1) -> ExpertLoad:
    return ExpertLoad(
        model=model,
        num_experts=len(layers[0][1]),
        layers=tuple(LayerLoad(index=index, name=f"layers.{index}", tokens=tokens) for index, tokens in layers),
        since=since,
        steps=steps,
    )


@st.composite
def loads(draw: Callable[..., Any]) -> ExpertLoad:
    size = draw(st.integers(1, 5))
    indices = sorted(draw(st.sets(st.integers(0, 100), max_size=4)))
    tokens = st.lists(st.integers(0, 2**63 - 1), min_size=size, max_size=size).map(tuple)
    return ExpertLoad(
        model=draw(st.text(max_size=5)),
        num_experts=size,
        layers=tuple(LayerLoad(index=index, name=draw(st.text(max_size=3)), tokens=draw(tokens)) for index in indices),
        since=SINCE,
        steps=draw(st.integers(0, 2**63 - 1)),
    )


@given(load=loads())
def test_what_was_written_is_read_back(load: ExpertLoad) -> None:
    assert parse_expert_load(load.to_json(), origin="text") == load


@given(text=st.text(max_size=40) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_other_text_is_refused_with_its_origin(text: str) -> None:
    with pytest.raises(InputError, match=r"^here: "):
        parse_expert_load(text, origin="here")


def changed(path: tuple[str | int, ...], value: Any) -> str:
    data = json.loads(load_of((0, (1, 2)), (3, (0, 4))).to_json())
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("schema_version",), 2, "schema_version: got 2, expected 1"),
        (("num_experts",), 0, "num_experts: got 0"),
        (("num_experts",), True, "num_experts: got bool"),
        (("layers",), {}, "layers: got dict"),
        (("layers", 1, "tokens"), [1], "layers[1].tokens: got 1 "),
        (("layers", 1, "tokens", 0), -1, "layers[1]: tokens: got -1"),
        (("layers", 1, "tokens", 0), 1.5, "layers[1].tokens[0]: got float 1.5"),
        (("layers", 1, "index"), 0, "index 0 after 0"),
        (("layers", 0, "name"), None, "layers[0].name: got NoneType"),
        (("layers", 0, "nmae"), "x", "field 'nmae'"),
        (("since",), "yesterday", "since: got 'yesterday'"),
        (("since",), "2026-11-20T10:00:00", "ISO 8601"),
        (("steps",), "9", "steps: got str '9'"),
        (("extra",), 1, "unknown field 'extra'"),
    ],
)
def test_a_wrong_field_is_named(path: tuple[str | int, ...], value: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_expert_load(changed(path, value), origin="load.json")
    assert str(caught.value).startswith("load.json: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["model", "num_experts", "layers", "since", "steps"])
def test_a_missing_field_is_named(name: str) -> None:
    data = json.loads(load_of((0, (1,))).to_json())
    del data[name]
    with pytest.raises(InputError, match=f"'{name}' is missing"):
        parse_expert_load(json.dumps(data), origin="x")


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_expert_load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_expert_load(tmp_path / "binary.json")


def test_a_pipe_or_a_device_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(InputError, match="regular file"):
            read_expert_load(path)


def test_equal_layers_are_added_and_other_ones_collected() -> None:
    first = load_of((0, (1, 2)), (1, (3, 4)), steps=7)
    second = load_of((1, (10, 20)), (2, (5, 6)), since="2026-11-20T09:59:00+00:00", steps=5)
    merged = merge_expert_loads([first, second])
    assert {layer.index: layer.tokens for layer in merged.layers} == {0: (1, 2), 1: (13, 24), 2: (5, 6)}
    assert (merged.since, merged.steps) == ("2026-11-20T09:59:00+00:00", 7)


def test_the_earliest_moment_counts_whatever_its_offset() -> None:
    early, late = "2026-11-20T11:30:00+02:00", "2026-11-20T10:00:00+00:00"
    merged = merge_expert_loads([load_of((0, (1,)), since=late), load_of((0, (1,)), since=early)])
    assert merged.since == early


def test_counts_of_two_models_are_not_merged() -> None:
    with pytest.raises(InputError, match="two models"):
        merge_expert_loads([load_of((0, (1,)), model="a"), load_of((0, (1,)), model="b")])


def test_the_files_of_a_run_are_read_together(tmp_path: Path) -> None:
    (tmp_path / PARTS_DIR).mkdir()
    for rank, tokens in enumerate([(1, 2), (3, 4)]):
        (tmp_path / PARTS_DIR / f"{rank}.json").write_text(load_of((0, tokens)).to_json())
    assert read_run_load(tmp_path).layers[0].tokens == (4, 6)


def test_a_run_without_counts_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_run_load(tmp_path)
    assert "--enable-expert-load" in str(caught.value.hint)


def test_the_servers_of_a_group_are_added_where_their_run_folder_has_nothing_itself(tmp_path: Path) -> None:
    for name, tokens in (("replica-0", (1, 2)), ("replica-1", (3, 4))):
        folder = tmp_path / name / PARTS_DIR
        folder.mkdir(parents=True)
        (folder / "0.json").write_text(load_of((0, tokens)).to_json())
    assert read_run_load(tmp_path).layers[0].tokens == (4, 6)
    assert read_run_load(tmp_path / "replica-1").layers[0].tokens == (3, 4)
