from __future__ import annotations

from moe_optimizer.costs.estimate import derived, divide
from moe_optimizer.specs.quantity import Quantity, Source

MEASURED = Quantity(6.0, "bytes", Source.MEASURED, "record a")
DATASHEET = Quantity(2.0, "bytes/s", Source.DATASHEET, "datasheet b")
ASSUMED = Quantity(3.0, "bytes", Source.ASSUMED, "guess c")


def test_a_quotient_names_the_reference_of_what_it_is_divided_by():
    time = divide(6.0, DATASHEET, unit="s", ref="bytes / rate")
    assert (time.value, time.unit, time.source) == (3.0, "s", Source.MODELLED)
    assert time.ref.endswith("(datasheet b)")


def test_arithmetic_on_measurements_is_modelled_not_measured():
    assert derived(12.0, unit="bytes", ref="sum", inputs=(MEASURED, MEASURED)).source is Source.MODELLED


def test_result_with_an_assumed_input_is_assumed():
    total = derived(9.0, unit="bytes", ref="sum", inputs=(MEASURED, ASSUMED))
    assert (total.value, total.unit, total.source) == (9.0, "bytes", Source.ASSUMED)
    assert "; guess c" in total.ref
    assert "record a" in total.ref


def test_same_reference_is_named_once():
    assert derived(12.0, unit="bytes", ref="twice", inputs=(MEASURED, MEASURED)).ref == "twice (record a)"


def test_derived_without_inputs_is_modelled():
    assert derived(1.0, unit="ratio", ref="by definition", inputs=()) == Quantity(
        1.0, "ratio", Source.MODELLED, "by definition"
    )
