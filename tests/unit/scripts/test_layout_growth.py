"""The growth table of docs/layout_accuracy.md is what the model predicts today."""

from __future__ import annotations

from scripts import layout_growth


def test_the_page_has_the_table_that_the_script_prints(capsys):
    assert layout_growth.main() == 0
    page = layout_growth.ROOT / "docs" / "layout_accuracy.md"
    assert capsys.readouterr().out in page.read_text(encoding="utf-8")
