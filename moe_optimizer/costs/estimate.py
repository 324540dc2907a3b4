"""Arithmetic on quantities that keeps their origin: the weaker source, and both references.

A result of arithmetic is never stronger than MODELLED: it is what a formula says, not what was seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from moe_optimizer.specs.quantity import Quantity, Source


def divide(left: Quantity | float, right: Quantity, *, unit: str, ref: str) -> Quantity:
    """Return left / right in `unit`; `ref` names the formula, the inputs' references are appended.

    Raises:
        ZeroDivisionError: `right` is zero.
    """
    return derived(_value(left) / _value(right), unit=unit, ref=ref, inputs=_quantities(left, right))


def add(terms: Iterable[Quantity], *, ref: str) -> Quantity:
    """Return the sum of quantities of one unit.

    Raises:
        ValueError: no terms, or terms of different units.
    """
    terms = tuple(terms)
    units = {term.unit for term in terms}
    if len(units) != 1:
        raise ValueError(f"cannot add units {sorted(units)}")
    return derived(sum(term.value for term in terms), unit=units.pop(), ref=ref, inputs=terms)


def derived(value: float, *, unit: str, ref: str, inputs: Iterable[Quantity]) -> Quantity:
    """Return a computed value with the weakest source of its inputs, MODELLED at best.

    `ref` becomes "formula (input reference; input reference)", each reference once.
    """
    inputs = tuple(inputs)
    source = reduce(lambda weakest, term: weakest | term.source, inputs, Source.MODELLED)
    references = "; ".join(dict.fromkeys(term.ref for term in inputs))
    return Quantity(value, unit, source, f"{ref} ({references})" if references else ref)


def _value(term: Quantity | float) -> float:
    return term.value if isinstance(term, Quantity) else term


def _quantities(*terms: Quantity | float) -> tuple[Quantity, ...]:
    return tuple(term for term in terms if isinstance(term, Quantity))
