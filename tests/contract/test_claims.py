"""Measured numbers in documents are what their records say, and none is without a record."""

from __future__ import annotations

import dataclasses
import re

import pytest

from benchmarks.claims import fewer_bytes, gpt_oss, kernel_speeds, kernels, pages, passes, readme
from benchmarks.claims.claim import RECORDS, ROOT, Claim, Table, read
from benchmarks.claims.not_measured import NOT_MEASURED, SUMMED_UP

CLAIMS: list[Claim | Table] = [
    *readme.CLAIMS,
    *kernel_speeds.CLAIMS,
    *kernels.CLAIMS,
    *gpt_oss.CLAIMS,
    *fewer_bytes.CLAIMS,
    *passes.CLAIMS,
    *pages.CLAIMS,
]
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md"))
)
UNIT = re.compile(
    r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:x|\s?"
    r"(?:ms|us|ns|s|%|tokens/s|/s|[GMK]i?B(?:/s)?|TB/s|[GT]FLOP/s|J|W|MHz|GHz|times|seconds|minutes))(?![\w/])"
)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@pytest.mark.parametrize(
    "claim", CLAIMS, ids=lambda claim: f"{claim.document}: {getattr(claim, 'text', '') or claim.after}"
)
def test_a_number_is_what_its_record_says(claim: Claim | Table) -> None:
    claim.check()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_number_with_a_unit_is_claimed_or_said_to_be_no_measurement(document: str) -> None:
    text = CODE.sub(lambda code: " " * len(code[0]), read(document))
    covered = [claim.check() for claim in CLAIMS if claim.document == document]
    for other in NOT_MEASURED.get(document, {}):
        assert read(document).count(other) == 1, f"{document}: not there once: {other}"
        begin = read(document).index(other)
        covered.append((begin, begin + len(other)))
    for first, last, records in SUMMED_UP.get(document, []):
        assert all((RECORDS / f"{name}.json").is_file() for name in records), records
        begin = read(document).index(first)
        covered.append((begin, read(document).index(last, begin) + len(last)))
    loose = [
        f"line {text.count(chr(10), 0, found.start()) + 1}: ...{text[max(0, found.start() - 60) : found.end()]}"
        for found in UNIT.finditer(text)
        if not any(begin <= found.start() < end for begin, end in covered)
    ]
    assert not loose, "\n".join(loose)


def test_a_number_that_drifts_is_found() -> None:
    claim = readme.CLAIMS[0]
    drifted = dataclasses.replace(claim, values=lambda found: [*claim.values(found)[:2], 1.2])
    with pytest.raises(AssertionError, match=r"says 1\.19, the record 1\.2"):
        drifted.check()


def test_a_number_without_a_record_is_found() -> None:
    assert UNIT.findall("It is 1.3x as fast, takes 12 ms and 40 % of 3 GB/s.") == ["1.3x", "12 ms", "40 %", "3 GB/s"]
    assert UNIT.findall("a tile of 128 x 128, T = 16, vLLM 0.26, `512 MiB`"[:45]) == []
