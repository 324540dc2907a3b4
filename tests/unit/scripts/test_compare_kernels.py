"""Which sources count as the same kernels."""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.inspection.kernel_speeds import read_tables, shipped_dir

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


def test_names_labels_lines_and_numbers_of_registers_do_not_count() -> None:
    for same in (
        RENAMED,
        KERNEL.replace("%r1", "%r7").replace("%rd1", "%rd3"),
        KERNEL.replace("{\n", "{\n\t.reg .b32 %r<9>;\n"),
    ):
        assert compare_kernels.digests(KERNEL) == compare_kernels.digests(same)


@pytest.mark.parametrize(
    "changed",
    [
        KERNEL.replace("ld.global.u32", "ld.global.cg.u32"),
        KERNEL.replace("u32 \t%r1, [%rd1]", "u32 \t%r1, [%rd2]"),
        KERNEL.replace("\tbra", "\tmembar.gl;\n\tbra"),
    ],
)
def test_every_instruction_counts(changed: str) -> None:
    assert compare_kernels.digests(KERNEL) != compare_kernels.digests(changed)


FIELDS = """
.visible .entry _ZN6moeopt11load_kernelE4Args(
\t.param .align 8 .b8 _ZN6moeopt11load_kernelE4Args_param_0[64]
)
{
\tmov.b64 \t%rd9, _ZN6moeopt11load_kernelE4Args_param_0;
\tadd.s64 \t%rd1, %rd9, 40;
\tld.param.u64 \t%rd2, [%rd1+-8];
\tld.param.v2.u32 \t{%r1, %r2}, [_ZN6moeopt11load_kernelE4Args_param_0+16];
\tld.param.u64 \t%rd3, [%rd1+-8];
\tadd.s64 \t%rd4, %rd2, 40;
}
"""


def test_a_field_that_moves_the_others_does_not_count() -> None:
    moved = FIELDS.replace("[64]", "[80]").replace("%rd9, 40", "%rd9, 56").replace("+16]", "+32]").replace("-8", "-16")
    assert compare_kernels.digests(FIELDS) == compare_kernels.digests(moved)
    other_field = FIELDS.replace("%rd3, [%rd1+-8]", "%rd3, [%rd1+8]")
    assert compare_kernels.digests(FIELDS) != compare_kernels.digests(other_field)
    other_sum = FIELDS.replace("%rd2, 40", "%rd2, 56")
    assert compare_kernels.digests(FIELDS) != compare_kernels.digests(other_sum)


@pytest.mark.parametrize(
    ("of_commit", "of_mxfp4", "status", "without"),
    [
        ("ab", "m", 0, []),
        ("a", "", 0, []),
        ("abb", "m", 1, []),
        ("abc", "m", 1, []),
        ("ab", "n", 0, ["mxfp4 in E4M3"]),
        ("ab", "mm", 0, ["mxfp4 in E4M3"]),
        ("abc", "n", 1, []),
    ],
)
def test_what_the_tree_lacks_of_some_weights_leaves_out_their_tables_and_of_all_every_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_commit: str, of_mxfp4: str, status: int, without: list[str]
) -> None:
    sources = SimpleNamespace(device_sources=lambda _, folder: f"hash of {folder.name}", nvcc_version=lambda: "13.0")
    monkeypatch.setattr(compare_kernels, "build_info", lambda: sources)
    monkeypatch.setattr(compare_kernels, "extracted", lambda commit, folder: folder / commit)

    def kernels_of(csrc: Path, _: object) -> dict[str, Counter[str]]:
        everybodys, mxfp4 = ("ab", "m") if csrc.name == "csrc" else (of_commit, of_mxfp4)
        return {"direct_experts.cu": Counter(everybodys), "grouped_gemm_sm90_mxfp4.cu": Counter(mxfp4)}

    monkeypatch.setattr(compare_kernels, "kernels_of", kernels_of)
    monkeypatch.setattr(compare_kernels, "RECORDS", tmp_path)
    monkeypatch.setattr(compare_kernels, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare_kernels.py", "abc123"])
    assert compare_kernels.main() == status
    written = [json.loads(path.read_text())["trees"] for path in tmp_path.glob("*_same_kernels.json")]
    tree = {"commit": "abc123", "cuda_sources": "hash of abc123"} | ({"without": without} if without else {})
    trees = [{"commit": None, "cuda_sources": "hash of csrc"}, tree]
    assert written == ([] if status else [trees])


def test_a_record_of_the_same_day_loses_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"{datetime.now(UTC):%Y-%m-%d}_same_kernels.json"
    before = json.dumps({"trees": [{"commit": None, "cuda_sources": "b"}, {"commit": "abc123", "cuda_sources": "a"}]})
    path.write_text(before)
    monkeypatch.setattr(compare_kernels, "RECORDS", tmp_path)
    monkeypatch.setattr(compare_kernels, "kernels_of", lambda *_: {"a.cu": Counter("ab")})
    monkeypatch.setattr(sys, "argv", ["compare_kernels.py", "def456"])
    with pytest.raises(SystemExit) as ended:
        compare_kernels.main()
    assert ended.value.code == 2
    assert path.read_text() == before


def test_kernels_whose_times_no_table_holds_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(compare_kernels, "compiled", lambda source, *_: compiled.append(source.name) or b"")
    compare_kernels.kernels_of(ROOT / "csrc")
    assert "direct_experts.cu" in compiled
    assert "router.cu" in compiled
    for name in ("gate_topk.cu", "skinny_gemm.cu"):
        assert name not in compiled
        assert (ROOT / "csrc/launch" / name).exists()


def test_every_kernel_of_a_file_has_a_digest_of_its_own() -> None:
    other = KERNEL.replace("ld.global.u32", "ld.global.cg.u32")
    assert len(set(compare_kernels.digests(KERNEL + other))) == 2


def test_tables_of_earlier_sources_hold_for_the_last_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for date, hashes in (("2026-01-01", ["b", "a"]), ("2026-02-01", ["c", "b"]), ("2026-03-01", ["z", "y"])):
        trees: list[dict[str, Any]] = [{"commit": None, "cuda_sources": each} for each in hashes]
        if date == "2026-02-01":
            trees[1]["without"] = ["int4_g128", "mxfp4"]
        (tmp_path / f"{date}_same_kernels.json").write_text(json.dumps({"trees": trees}))
    monkeypatch.setattr(write_kernel_speeds, "RECORDS", tmp_path)
    write_kernel_speeds.same_kernels.cache_clear()
    try:
        assert write_kernel_speeds.same_kernels("bf16") == {"a": "c", "b": "c", "y": "z"}
        for weights in ("mxfp4", "int4_g128", "int4_g128z"):  # zero points are in the same kernels
            assert write_kernel_speeds.same_kernels(weights) == {"a": "b", "y": "z"}
    finally:
        write_kernel_speeds.same_kernels.cache_clear()


MACHINE_CODE = """
\t\tFunction : _ZN6moeopt11load_kernelE4Args
        /*0000*/                   UIADD3 UR9, UR17, 0x4, URZ ;              /* 0x000 */
        /*0010*/              @!P1 LEA R14, R14, UR8, 0x3 ;                  /* 0x000 */
        /*0020*/                   ULDC.U8 UR9, c[0x0][0x2c8] ;              /* 0x000 */
"""


def test_machine_code_is_compared_by_its_instructions_and_their_order() -> None:
    same = MACHINE_CODE.replace("UR9", "UR7").replace("0x2c8", "0x2d8").replace("11load", "9copy")
    assert compare_kernels.machine_digests(MACHINE_CODE) == compare_kernels.machine_digests(same)
    lines = MACHINE_CODE.splitlines(keepends=True)
    swapped = "".join([*lines[:2], lines[3], lines[2], lines[4]])
    for other in (MACHINE_CODE.replace("ULDC.U8", "ULDC"), MACHINE_CODE.replace("0x4,", "0x8,"), swapped):
        assert compare_kernels.machine_digests(MACHINE_CODE) != compare_kernels.machine_digests(other)
    assert len(compare_kernels.machine_digests(MACHINE_CODE + MACHINE_CODE)) == 2


def test_the_tables_that_ship_are_of_the_kernels_that_ship() -> None:
    sources = write_kernel_speeds.build_info().device_sources("cuda")
    tables = [table for path in sorted(shipped_dir().glob("*.json")) for table in read_tables(path)]
    assert tables
    assert {table.kernel_hash for table in tables} == {sources}, (
        "plans ignore them all: compare_kernels.py with the commit of the tables, then write_kernel_speeds.py"
    )
