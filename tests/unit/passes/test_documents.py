from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.passes.registry import PASS_NAMES, all_passes

DOCUMENTS = Path(__file__).parents[3] / "docs" / "passes"


def test_every_pass_has_a_page_and_every_page_a_pass():
    assert sorted(path.stem for path in DOCUMENTS.glob("*.md")) == sorted(PASS_NAMES)


@pytest.mark.parametrize("each", all_passes(), ids=lambda each: each.name)
def test_a_page_says_claim_evidence_limits_and_how_to_switch_it_off(each):
    text = (DOCUMENTS / f"{each.name}.md").read_text()
    assert "**Claim.**" in text or "**What it is.**" in text
    for part in ("**Evidence.**", "**Limits.**", "**Off.**", f"--disable-{each.flag}"):
        assert part in text, part
