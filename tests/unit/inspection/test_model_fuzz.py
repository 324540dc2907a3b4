"""Whatever a configuration holds, the answer is a ModelSpec or an expected error."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_optimizer.errors import MoeOptimizerError
from moe_optimizer.inspection.model_inspector import ModelInspector

CONFIGS = {
    path.stem: json.loads(path.read_text())
    for path in (Path(__file__).parents[2] / "data/model_configs").glob("*.json")
}

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from([0, 1, -1, 2, 7, 64, 1e9, float("nan"), float("inf")])
    | st.text(max_size=8)
    | st.sampled_from(["fp8", "full_attention", "sparse", "M*-E", "1,2,x", "attention"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mutated_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A published configuration with some fields removed, exchanged with another's or replaced by junk."""
    config = copy.deepcopy(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    other = CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))]
    for _ in range(draw(st.integers(1, 4))):
        target = config
        nests = [key for key, value in config.items() if isinstance(value, dict)]
        if nests and draw(st.booleans()):
            target = config[draw(st.sampled_from(nests))]
        if not target:
            continue
        key = draw(st.sampled_from(sorted(target)))
        action = draw(st.sampled_from(["remove", "junk", "swap"]))
        if action == "remove":
            del target[key]
        elif action == "junk":
            target[key] = draw(JUNK)
        else:
            stolen = draw(st.sampled_from(sorted(other)))
            target[stolen] = copy.deepcopy(other[stolen])
    return config


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(config=mutated_configs())
def test_a_mutated_configuration_is_counted_consistently_or_refused_in_one_line(
    config: dict[str, Any], model_folder: Callable[..., Path]
) -> None:
    folder = model_folder(config)
    try:
        spec = ModelInspector().inspect(folder)
    except MoeOptimizerError as error:
        assert "\n" not in str(error)  # noqa: PT017 the type is what is tested
        return
    assert 0 <= spec.active_params <= spec.total_params
    assert spec.top_k <= spec.num_experts + 10_000
    assert spec.is_moe == (spec.num_experts > 0)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | JUNK.map(lambda v: json.dumps(v).encode())
)
def test_arbitrary_bytes_are_refused(data: bytes, model_folder: Callable[..., Path]) -> None:
    try:
        ModelInspector().inspect(model_folder(data))
    except MoeOptimizerError:
        return
    raise AssertionError(f"{data!r} was taken for a model")
