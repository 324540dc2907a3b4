"""Computes with quantities and keeps their origin: the weaker source, and both references.

A result of arithmetic is never stronger than MODELLED: it is what a formula says, not what was seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from moe_optimizer.specs.quantity import Quantity, Source


def divide(left: float, right: Quantity, *, unit: str, ref: str) -> Quantity:
    """Return left / right in `unit`; `ref` names the formula, the reference of `right` is appended.

    Raises:
        ZeroDivisionError: `right` is zero.
    """
    return derived(left / right.value, unit=unit, ref=ref, inputs=(right,))


def derived(value: float, *, unit: str, ref: str, inputs: Iterable[Quantity]) -> Quantity:
    """Return a computed value with the weakest source of its inputs, MODELLED at best.

    `ref` becomes "formula (input reference; input reference)", each reference once.
    """
    inputs = tuple(inputs)
    source = reduce(lambda weakest, term: weakest | term.source, inputs, Source.MODELLED)
    references = "; ".join(dict.fromkeys(term.ref for term in inputs))
    return Quantity(value, unit, source, f"{ref} ({references})" if references else ref)
