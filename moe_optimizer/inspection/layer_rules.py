"""Derives what each layer is, in the ways in which configurations say so.

A rule is called with the configuration and the number of layers and returns one entry for each layer. Kind
rules return the name of the layer's mixer, expert rules whether the layer has routed experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from moe_optimizer.inspection.config import Config, Names

P = ParamSpec("P")
T = TypeVar("T")
KindRule = Callable[[Config, int], tuple[str, ...]]
ExpertRule = Callable[[Config, int], tuple[bool, ...]]

LAYER_TYPE_KINDS: Mapping[str, str] = {
    "full_attention": "attention",
    "mlp": "none",
    "moe": "none",
    "attention": "attention",
    "global": "attention",
    "sliding_attention": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "mamba",
    "mamba2": "mamba",
    "conv": "conv",
    "hybrid": "hybrid",
    "recurrent": "recurrent",
}
"""Names that a `layer_types` array uses, and the kind each stands for."""


def _rule(
    function: Callable[Concatenate[Config, int, P], tuple[T, ...]],
) -> Callable[P, Callable[[Config, int], tuple[T, ...]]]:
    """Turn a function into one that takes its further arguments and returns the rule that they make."""

    def bound(*args: P.args, **kwargs: P.kwargs) -> Callable[[Config, int], tuple[T, ...]]:
        return lambda config, num_layers: function(config, num_layers, *args, **kwargs)

    return bound


def every(entry: T) -> Callable[[Config, int], tuple[T, ...]]:
    """All layers are of one kind, or all (or none) have routed experts."""
    return lambda _, num_layers: (entry,) * num_layers


all_layers: ExpertRule = every(True)


@_rule
def listed(
    config: Config,
    num_layers: int,
    fields: Names = "layer_types",
    *,
    otherwise: KindRule,
    names: Mapping[str, str] = LAYER_TYPE_KINDS,
) -> tuple[str, ...]:
    """An array names each layer's kind; without the array, another rule decides."""
    if config.items(fields) is None:
        return otherwise(config, num_layers)
    return _translated(config, fields, _entries(config, num_layers, fields), names)


@_rule
def where(config: Config, num_layers: int, layers: ExpertRule, kind: str, *, otherwise: str) -> tuple[str, ...]:
    """The layers that a rule for experts would choose are of one kind."""
    return tuple(kind if chosen else otherwise for chosen in layers(config, num_layers))


@_rule
def last_of(
    config: Config,
    num_layers: int,
    period: Names = (),
    kind: str = "attention",
    *,
    otherwise: str = "sliding",
    default: int | None = None,
) -> tuple[str, ...]:
    """Every period-th layer, counted from one, is of `kind`; so is the G in a repeated string of L and G."""
    letters = config.get(period)
    if isinstance(letters, str) and letters and set(letters) <= {"L", "G"}:
        return tuple(kind if letters[i % len(letters)] == "G" else otherwise for i in range(num_layers))
    every_n = config.integer(period, default)
    if not every_n:
        return (kind,) * num_layers
    return tuple(kind if (i + 1) % every_n == 0 else otherwise for i in range(num_layers))


@_rule
def windowed(
    config: Config, num_layers: int, window: Names = "sliding_window", *, flag: Names | bool = True, first: Names = ()
) -> tuple[str, ...]:
    """Layers from index `first` (0 without such a field) on are windowed when the flag is on and a window is given."""
    if not config.flag(flag) or not config.integer(window):
        return ("attention",) * num_layers
    start = config.integer(first, num_layers if first else 0) or 0
    return tuple("sliding" if i >= start else "attention" for i in range(num_layers))


@_rule
def pattern(config: Config, num_layers: int, field: Names, letters: Mapping[str, str]) -> tuple[str, ...]:
    """A string holds one letter for each layer."""
    name, text = config.name_of(field), config.text(field)
    if len(text) < num_layers:
        raise config.error(name, text, f"a letter for each of {num_layers} layers")
    return _translated(config, field, text[:num_layers], letters)


@_rule
def numbered(
    config: Config, num_layers: int, field: Names, kinds: Mapping[int, str], *, otherwise: KindRule
) -> tuple[str, ...]:
    """An array holds a number for each layer; without it (or when it is empty) another rule decides."""
    if not config.items(field):
        return otherwise(config, num_layers)
    return _translated(config, field, config.per_layer(field, num_layers) or (), kinds)


# --- layers with routed experts ---


@_rule
def after_first(
    config: Config, num_layers: int, first: Names, every_n: Names = (), *, default: int = 0
) -> tuple[bool, ...]:
    """The first layers, as many as the field says, are dense; of the others every n-th has experts, the first too."""
    start = config.integer(first, default) or 0
    step = config.integer(every_n, 1, minimum=1) or 1
    return tuple(i >= start and (i - start) % step == 0 for i in range(num_layers))


@_rule
def indices(
    config: Config, num_layers: int, field: Names, *, first: int = 0, have_experts: bool = True
) -> tuple[bool, ...]:
    """Only the layers whose indices, counted from `first`, are listed have experts, or else only those have none."""
    listed_ones = set(config.integers(field) or ())
    return tuple((i + first in listed_ones) is have_experts for i in range(num_layers))


@_rule
def sparse_step(
    config: Config, num_layers: int, field: Names, *, default: int = 1, zero_is_none: bool = False
) -> tuple[bool, ...]:
    """Layer i has experts when (i + 1) % field == 0. With `zero_is_none` no layer has when the field is zero, by which
    the classes of other architectures divide.
    """
    step = config.integer(field, default, minimum=0 if zero_is_none else 1)
    return tuple(bool(step) and (i + 1) % (step or 1) == 0 for i in range(num_layers))


@_rule
def every_offset(config: Config, num_layers: int, period: Names, offset: Names) -> tuple[bool, ...]:
    """Layer i has experts when i % period == offset."""
    every_n, first = config.required(period), config.integer(offset, 0) or 0
    return tuple(i % every_n == first for i in range(num_layers))


@_rule
def within(config: Config, num_layers: int) -> tuple[bool, ...]:
    """From the first index to the last (-1: of all layers), every interval-th layer counted from one.

    Raises:
        InputError: the interval is zero, by which the class would divide.
    """
    first, last = _scalar(config, "moe_layer_start_index", 0), _scalar(config, "moe_layer_end_index", -1)
    every_n = _scalar(config, "moe_layer_interval", 1)
    if every_n < 1:
        raise config.error("moe_layer_interval", every_n, "at least 1")
    last = num_layers - 1 if last == -1 else last
    return tuple(first <= i <= last and (i + 1) % every_n == 0 for i in range(num_layers))


@_rule
def flags(config: Config, num_layers: int, field: Names) -> tuple[bool, ...]:
    """An array of 0 and 1, or of booleans, says it for each layer."""
    entries = config.get(field)
    if isinstance(entries, list) and len(entries) >= num_layers and all(type(entry) is bool for entry in entries):
        return tuple(entries[:num_layers])
    return tuple(bool(entry) for entry in config.per_layer(field, num_layers, 1) or ())


@_rule
def unless_off(config: Config, num_layers: int, *switches: str) -> tuple[bool, ...]:
    """No layer has experts when one of the switches is false."""
    return (all(config.get(name) is not False for name in switches),) * num_layers


def _sparse_words(config: Config, num_layers: int) -> tuple[bool, ...]:
    """An array of words says it for each layer."""
    return tuple(entry == "sparse" for entry in _entries(config, num_layers, "mlp_layer_types"))


SPARSE_WORDS = ("mlp_layer_types", _sparse_words)
"""A choice of `first_given`."""


@_rule
def first_given(
    config: Config, num_layers: int, *choices: tuple[Names, ExpertRule], otherwise: ExpertRule = all_layers
) -> tuple[bool, ...]:
    """The first rule whose field is present decides."""
    for field, choice in choices:
        if config.get(field) is not None:
            return choice(config, num_layers)
    return otherwise(config, num_layers)


@_rule
def both(config: Config, num_layers: int, *rules: ExpertRule) -> tuple[bool, ...]:
    """A layer has experts when all rules say so."""
    return tuple(all(entry) for entry in zip(*(one(config, num_layers) for one in rules), strict=True))


def by_fields(*, first_dense: int = 0) -> ExpertRule:
    """The fields that most architectures share decide; where there is none, the first layers are dense, so many.

    Args:
        first_dense: what the architecture assumes for the number of dense layers before the first with experts.
    """
    one_list = first_given(
        SPARSE_WORDS,
        ("moe_layers_enum", indices("moe_layers_enum")),
        ("moe_layer_indices", indices("moe_layer_indices")),
        ("is_moe_layer", flags("is_moe_layer")),
        ("expert_layer_period", every_offset("expert_layer_period", "expert_layer_offset")),
        ("interleave_moe_layer_step", sparse_step("interleave_moe_layer_step", zero_is_none=True)),
        ("moe_layer_interval", within()),
        otherwise=both(
            indices("mlp_only_layers", have_experts=False),
            sparse_step("decoder_sparse_step"),
            after_first(("first_k_dense_replace", "num_dense_layers"), default=first_dense),
            after_first((), "moe_layer_freq"),
        ),
    )
    listed_frequency = flags("moe_layer_freq")
    return lambda config, num_layers: (
        listed_frequency if isinstance(config.get("moe_layer_freq"), list) else one_list
    )(config, num_layers)


def _entries(config: Config, num_layers: int, field: Names) -> list[object]:
    """Return an array's entries for the layers.

    Raises:
        InputError: there are fewer than layers.
    """
    entries = config.items(field) or []
    if len(entries) < num_layers:
        raise config.too_few(field, len(entries), num_layers)
    return entries[:num_layers]


def _translated(config: Config, field: Names, entries: Sequence[object], kinds: Mapping[Any, str]) -> tuple[str, ...]:
    """Return the kind of each layer by its entry.

    Raises:
        InputError: an entry stands for no kind.
    """
    for i, entry in enumerate(entries):
        if not isinstance(entry, (str, int)) or entry not in kinds:
            raise config.error(f"{config.name_of(field)}[{i}]", entry, f"one of {', '.join(map(str, kinds))}")
    return tuple(kinds[entry] for entry in entries)


def _scalar(config: Config, field: Names, default: int) -> int:
    """Return an integer from -1 up; where an array gives one for each kind of experts, the first (text) counts."""
    if isinstance(config.get(field), list):
        values = config.integers(field, minimum=-1) or ()
        return min(values, default=default)
    value = config.integer(field, default, minimum=-1)
    return default if value is None else value
