"""Parses a server's /metrics page, which is in Prometheus' text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.samples import Sample


def samples(page: str, prefix: str) -> list[Sample]:
    """Return the samples of the metrics whose names begin with `prefix`.

    Raises:
        ValueError: a line that begins with it is not a sample.
    """
    from prometheus_client.parser import text_string_to_metric_families

    # Only these lines are parsed: a page holds what others publish too, and a large model has 100,000 samples.
    lines = (line for line in page.splitlines() if line.startswith(prefix))
    return [sample for family in text_string_to_metric_families("\n".join(lines)) for sample in family.samples]


def total(page: str, name: str) -> int | None:
    """Return a counter summed over all its labels; None where the page does not have it.

    Raises:
        ValueError: a line that begins with the name is not a sample.
    """
    values = [sample.value for sample in samples(page, name) if sample.name == name]
    return round(sum(values)) if values else None
