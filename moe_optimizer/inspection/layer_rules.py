"""Which layers are what: the ways in which configurations say so.

A rule is called with the configuration and the number of layers and returns one entry for each layer. Kind
rules return the name of the layer's mixer, expert rules whether the layer has routed experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moe_optimizer.inspection.config import Config, Names

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


def every(kind: str) -> KindRule:
    """All layers are of one kind."""
    return lambda _, num_layers: (kind,) * num_layers


def listed(
    fields: Names = "layer_types", *, otherwise: KindRule, names: Mapping[str, str] = LAYER_TYPE_KINDS
) -> KindRule:
    """An array names each layer's kind; without the array, another rule decides."""

    def rule(config: Config, num_layers: int) -> tuple[str, ...]:
        entries = config.items(fields)
        if entries is None:
            return otherwise(config, num_layers)
        field = fields if isinstance(fields, str) else fields[0]
        if len(entries) < num_layers:
            raise config.error(field, f"{len(entries)} entries", f"one for each of {num_layers} layers")
        kinds: list[str] = []
        for i, entry in enumerate(entries[:num_layers]):
            kind = names.get(entry) if isinstance(entry, str) else None
            if kind is None:
                raise config.error(f"{field}[{i}]", entry, f"one of {', '.join(names)}")
            kinds.append(kind)
        return tuple(kinds)

    return rule


def indexed(field: Names, kind: str, *, otherwise: str, one_based: bool = False) -> KindRule:
    """An array holds the indices of the layers of one kind."""

    def rule(config: Config, num_layers: int) -> tuple[str, ...]:
        indices = set(config.integers(field) or ())
        return tuple(kind if i + one_based in indices else otherwise for i in range(num_layers))

    return rule


def periodic(period: Names, offset: Names | int, kind: str, *, otherwise: str) -> KindRule:
    """Layer i is of `kind` when i % period == offset."""

    def rule(config: Config, num_layers: int) -> tuple[str, ...]:
        every_n = config.required(period)
        first = offset if isinstance(offset, int) else config.integer(offset, 0) or 0
        return tuple(kind if i % every_n == first % every_n else otherwise for i in range(num_layers))

    return rule


def last_of(period: Names, kind: str, *, otherwise: str, default: int | None = None) -> KindRule:
    """Every period-th layer, counted from one, is of `kind`; so is the G in a repeated string of L and G."""

    def rule(config: Config, num_layers: int) -> tuple[str, ...]:
        letters = config.get(period)
        if isinstance(letters, str) and letters and set(letters) <= {"L", "G"}:
            return tuple(kind if letters[i % len(letters)] == "G" else otherwise for i in range(num_layers))
        every_n = config.integer(period, default)
        if not every_n:
            return (kind,) * num_layers
        return tuple(kind if (i + 1) % every_n == 0 else otherwise for i in range(num_layers))

    return rule


def windowed_when(flag: Names | bool, *, window: Names = "sliding_window") -> KindRule:
    """All layers are windowed when the flag is on and a window is given."""

    def rule(config: Config, num_layers: int) -> tuple[str, ...]:
        windowed = config.flag(flag) and bool(config.integer(window))
        return ("sliding" if windowed else "attention",) * num_layers

    return rule


def windowed_from(first: Names, *, flag: Names) -> KindRule:
    """Layers from index `first` on are windowed when the flag is on and the file names a window."""

    def rule(config: Config, num_layers: int) -> tuple[str, ...]:
        if not config.flag(flag) or not config.integer("sliding_window"):
            return ("attention",) * num_layers
        start = config.integer(first, num_layers) or 0
        return tuple("sliding" if i >= start else "attention" for i in range(num_layers))

    return rule


def pattern(field: Names, letters: Mapping[str, str]) -> KindRule:
    """A string holds one letter for each layer."""

    def rule(config: Config, num_layers: int) -> tuple[str, ...]:
        name = field if isinstance(field, str) else field[0]
        text = config.text(field)
        if len(text) < num_layers:
            raise config.error(name, text, f"a letter for each of {num_layers} layers")
        for i, letter in enumerate(text[:num_layers]):
            if letter not in letters:
                raise config.error(f"{name}[{i}]", letter, f"one of {' '.join(letters)}")
        return tuple(letters[letter] for letter in text[:num_layers])

    return rule


def numbered(field: Names, kinds: Mapping[int, str], *, otherwise: KindRule) -> KindRule:
    """An array holds a number for each layer; without it (or when it is empty) another rule decides."""

    def rule(config: Config, num_layers: int) -> tuple[str, ...]:
        name = field if isinstance(field, str) else field[0]
        if not config.items(field):
            return otherwise(config, num_layers)
        numbers = config.per_layer(field, num_layers) or ()
        for i, number in enumerate(numbers):
            if number not in kinds:
                raise config.error(f"{name}[{i}]", number, f"one of {', '.join(map(str, kinds))}")
        return tuple(kinds[number] for number in numbers)

    return rule


# --- layers with routed experts ---


def all_layers(config: Config, num_layers: int) -> tuple[bool, ...]:  # noqa: ARG001 the rules share a signature
    """Every layer has routed experts."""
    return (True,) * num_layers


def after_first(field: Names, *, default: int = 0) -> ExpertRule:
    """The first layers, as many as the field says, are dense."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        first = config.integer(field, default) or 0
        return tuple(i >= first for i in range(num_layers))

    return rule


def multiples(field: Names) -> ExpertRule:
    """Layer i has experts when i % field == 0 (a frequency that counts from layer zero)."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        frequency = config.integer(field, 1, minimum=1) or 1
        return tuple(i % frequency == 0 for i in range(num_layers))

    return rule


def sparse_step(field: Names, *, default: int = 1) -> ExpertRule:
    """Layer i has experts when (i + 1) % field == 0; a step of zero means none."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        step = config.integer(field, default)
        return tuple(bool(step) and (i + 1) % (step or 1) == 0 for i in range(num_layers))

    return rule


def every_offset(period: Names, offset: Names) -> ExpertRule:
    """Layer i has experts when i % period == offset."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        every_n, first = config.required(period), config.integer(offset, 0) or 0
        return tuple(i % every_n == first for i in range(num_layers))

    return rule


def within(start: Names, end: Names, interval: Names) -> ExpertRule:
    """From index `start` to index `end` (-1: the last), every interval-th layer counted from one."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        first, last, every_n = _scalar(config, start, 0), _scalar(config, end, -1), _scalar(config, interval, 1)
        last = num_layers - 1 if last == -1 else last
        return tuple(first <= i <= last and bool(every_n) and (i + 1) % (every_n or 1) == 0 for i in range(num_layers))

    return rule


def after_first_every(first: Names, frequency: Names, *, default_first: int) -> ExpertRule:
    """From layer `first` on, every frequency-th layer counted from there."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        start = config.integer(first, default_first) or 0
        step = config.integer(frequency, 1, minimum=1) or 1
        return tuple(i >= start and (i - start) % step == 0 for i in range(num_layers))

    return rule


def except_indices(field: Names) -> ExpertRule:
    """The layers whose indices are listed are dense."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        dense = set(config.integers(field) or ())
        return tuple(i not in dense for i in range(num_layers))

    return rule


def only_indices(field: Names) -> ExpertRule:
    """Only the layers whose indices are listed have experts."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        sparse = set(config.integers(field) or ())
        return tuple(i in sparse for i in range(num_layers))

    return rule


def flags(field: Names) -> ExpertRule:
    """An array of 0 and 1, or of booleans, says it for each layer."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        entries = config.get(field)
        if isinstance(entries, list) and len(entries) >= num_layers and all(type(entry) is bool for entry in entries):
            return tuple(entries[:num_layers])
        return tuple(bool(entry) for entry in config.per_layer(field, num_layers, 1) or ())

    return rule


def unless_off(*switches: str) -> ExpertRule:
    """No layer has experts when one of the switches is false."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        return (all(config.get(name) is not False for name in switches),) * num_layers

    return rule


def words(field: Names, word: str) -> ExpertRule:
    """An array of words says it for each layer; `word` is the one for experts."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        name = field if isinstance(field, str) else field[0]
        entries = config.items(field) or []
        if len(entries) < num_layers:
            raise config.error(name, f"{len(entries)} entries", f"one for each of {num_layers} layers")
        return tuple(entry == word for entry in entries[:num_layers])

    return rule


def first_given(*choices: tuple[Names, ExpertRule], otherwise: ExpertRule = all_layers) -> ExpertRule:
    """The first rule whose field is present decides."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        for field, choice in choices:
            if config.get(field) is not None:
                return choice(config, num_layers)
        return otherwise(config, num_layers)

    return rule


def both(*rules: ExpertRule) -> ExpertRule:
    """A layer has experts when all rules say so."""

    def rule(config: Config, num_layers: int) -> tuple[bool, ...]:
        return tuple(all(entry) for entry in zip(*(one(config, num_layers) for one in rules), strict=True))

    return rule


def _scalar(config: Config, field: Names, default: int) -> int:
    """Return an integer from -1 up; where an array gives one for each kind of experts, the first (text) counts."""
    if isinstance(config.get(field), list):
        values = config.integers(field, minimum=-1) or ()
        return min(values, default=default)
    value = config.integer(field, default, minimum=-1)
    return default if value is None else value
