"""The plots in docs/images are what their records give."""

from __future__ import annotations

import pytest

from scripts import draw_figures


@pytest.mark.parametrize("name", list(draw_figures.figures()))
def test_a_committed_picture_is_drawn_from_its_records(name: str) -> None:
    drawn = draw_figures.figures()[name].markup(standalone=True)
    assert (draw_figures.FOLDER / name).read_text(encoding="utf-8") == drawn, "run: python scripts/draw_figures.py"


def test_readme_shows_two_of_them() -> None:
    readme = (draw_figures.ROOT / "README.md").read_text(encoding="utf-8")
    assert sum(f"docs/images/{name}" in readme for name in draw_figures.figures()) == 2
