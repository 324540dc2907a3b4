"""Links are measured by processes that really exchange tensors, here over Gloo."""

from __future__ import annotations

from pathlib import Path

from moe_optimizer.inspection.links import read_links
from moe_optimizer.measure.links.measurement import LinkRequest
from moe_optimizer.measure.links.tables import measure_links


def test_two_processes_are_timed_and_what_they_took_is_kept(tmp_path: Path):
    request = LinkRequest(device="cpu", name="a processor", groups=(2,), most_bytes=2**14)
    steps: list[float] = []
    (table,) = measure_links(request, on_step=lambda share, _: steps.append(share), cache=tmp_path)
    assert list(table.all_reduce_us) == list(table.gather_us) == [2**12, 2**14]
    assert all(us > 0 for us in (*table.all_reduce_us.values(), *table.gather_us.values()))
    assert steps == [1.0]
    assert read_links(tmp_path).find("a processor", 2) == table
