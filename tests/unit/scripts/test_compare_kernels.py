"""Which sources count as the same kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import compare_kernels  # noqa: E402
import write_kernel_speeds  # noqa: E402

KERNEL = """
.visible .entry _ZN6moeopt11load_kernelEPKv(
\t.param .u64 _ZN6moeopt11load_kernelEPKv_param_0
)
{
\t.loc 1 10 3
\tld.param.u64 \t%rd1, [_ZN6moeopt11load_kernelEPKv_param_0];
$L__BB0_1:
\tld.global.u32 \t%r1, [%rd1];
\tbra \t$L__BB0_1;
}
"""
RENAMED = KERNEL.replace("11load_kernel", "13ld_u32_kernel").replace("BB0_", "BB7_").replace("1 10 3", "1 99 3")


def test_names_labels_and_lines_do_not_count() -> None:
    assert compare_kernels.digests(KERNEL) == compare_kernels.digests(RENAMED)


@pytest.mark.parametrize(
    "changed",
    [
        KERNEL.replace("ld.global.u32", "ld.global.cg.u32"),
        KERNEL.replace("%r1", "%r2"),
        KERNEL.replace("\tbra", "\tmembar.gl;\n\tbra"),
    ],
)
def test_every_instruction_counts(changed: str) -> None:
    assert compare_kernels.digests(KERNEL) != compare_kernels.digests(changed)


def test_every_kernel_of_a_file_has_a_digest_of_its_own() -> None:
    other = KERNEL.replace("ld.global.u32", "ld.global.cg.u32")
    assert len(set(compare_kernels.digests(KERNEL + other))) == 2


def test_tables_of_earlier_sources_hold_for_the_last_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for date, hashes in (("2026-01-01", ["b", "a"]), ("2026-02-01", ["c", "b"]), ("2026-03-01", ["z", "y"])):
        record = {"trees": [{"commit": None, "cuda_sources": each} for each in hashes]}
        (tmp_path / f"{date}_same_kernels.json").write_text(json.dumps(record))
    monkeypatch.setattr(write_kernel_speeds, "RECORDS", tmp_path)
    write_kernel_speeds.same_kernels.cache_clear()
    try:
        assert write_kernel_speeds.same_kernels() == {"a": "c", "b": "c", "y": "z"}
    finally:
        write_kernel_speeds.same_kernels.cache_clear()
