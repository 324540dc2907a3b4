from __future__ import annotations

import pytest

from moe_optimizer.costs.estimate import add, derived, divide
from moe_optimizer.specs.quantity import Quantity, Source

MEASURED = Quantity(6.0, "bytes", Source.MEASURED, "record a")
DATASHEET = Quantity(2.0, "bytes/s", Source.DATASHEET, "datasheet b")
ASSUMED = Quantity(3.0, "bytes", Source.ASSUMED, "guess c")


def test_quotient_of_two_quantities_names_both_references():
    time = divide(MEASURED, DATASHEET, unit="s", ref="bytes / rate")
    assert time == Quantity(3.0, "s", Source.MODELLED, "bytes / rate (record a; datasheet b)")


def test_arithmetic_on_measurements_is_modelled_not_measured():
    assert add((MEASURED, MEASURED), ref="sum").source is Source.MODELLED


def test_result_with_an_assumed_input_is_assumed():
    assert add((MEASURED, ASSUMED), ref="sum") == Quantity(9.0, "bytes", Source.ASSUMED, "sum (record a; guess c)")


def test_same_reference_is_named_once():
    assert add((MEASURED, MEASURED), ref="twice").ref == "twice (record a)"


def test_a_number_over_a_quantity_is_divided_by_its_value():
    assert divide(8.0, DATASHEET, unit="s", ref="eight bytes").value == 4.0


def test_units_that_differ_do_not_add():
    with pytest.raises(ValueError, match=r"bytes.*bytes/s"):
        add((MEASURED, DATASHEET), ref="nonsense")


def test_a_sum_of_nothing_is_refused():
    with pytest.raises(ValueError, match="cannot add"):
        add((), ref="nothing")


def test_derived_without_inputs_is_modelled():
    assert derived(1.0, unit="ratio", ref="by definition", inputs=()) == Quantity(
        1.0, "ratio", Source.MODELLED, "by definition"
    )
