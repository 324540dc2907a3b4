"""The report in a real browser: no complaints, every plot drawn, light and dark, on a phone and on a wide screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from moe_optimizer.measure.report.page import render_page
from tests.builders.reports import full_inputs
from tests.headless_browser import NAMES, Page, Scheme, find_browser, opened_browser

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed: {', '.join(NAMES)}")
LOOKS = [(width, scheme) for width in (400, 1600) for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_page(full_inputs()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with opened_browser(cast("str", BROWSER), tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_a_browser_shows_it_whole(width: int, scheme: Scheme, report: Path, page: Page) -> None:
    page.load(report, width=width, scheme=scheme)
    assert page.problems == []
    assert page.requests == [report.as_uri()]
    assert page.value("document.documentElement.scrollWidth") == width
    sizes = page.value(
        "[...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect())"
        ".map(box => [box.width, box.height, box.left])"
    )
    assert len(sizes) == 16
    assert all(shown > 200 and high > 100 and left >= 0 for shown, high, left in sizes)
    outside = page.value(
        "[...document.querySelectorAll('svg')].flatMap(svg => [...svg.querySelectorAll('text, .mark')]"
        ".filter(part => part.getBoundingClientRect().right > svg.getBoundingClientRect().right + 1)"
        ".map(part => part.textContent))"
    )
    assert outside == [], "text or marks stand outside of their picture"


def test_a_wide_screen_shows_every_table_whole(report: Path, page: Page) -> None:
    page.load(report, width=1600, scheme="light")
    wider = page.value(
        "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth)"
        ".map(each => each.getAttribute('aria-label'))"
    )
    assert wider == []


@pytest.mark.parametrize("section", ["plan", "tuning", "proof", "quality"])
def test_a_phone_shows_tables_of_words_without_scrolling_sideways(section: str, report: Path, page: Page) -> None:
    page.load(report, width=400, scheme="light")
    outside = page.value(
        f"[...document.querySelectorAll('#{section} caption, #{section} table.stacks td')]"
        ".filter(part => part.getBoundingClientRect().right > 400).map(part => part.textContent)"
    )
    assert outside == []
    assert page.value(f"document.querySelectorAll('#{section} table.stacks').length") > 0


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_colours_follow_the_reader(scheme: Scheme, dark: bool, report: Path, page: Page) -> None:
    page.load(report, width=1600, scheme=scheme)
    brightness = "(getComputedStyle({}).{}.match(/\\d+/g).slice(0, 3).reduce((sum, each) => sum + +each, 0) / 765)"
    paper = page.value(brightness.format("document.body", "backgroundColor"))
    ink = page.value(brightness.format("document.querySelector('svg .heading')", "fill"))
    assert (paper < 0.3, ink > 0.7) == (dark, dark)
