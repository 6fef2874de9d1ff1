"""The page of a sweep in a real browser."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from oscine.extensions.bench.serve import pareto, report

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.mark.long
def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser: "Browser", tmp_path: Path) -> None:
    row = {"model": "oscine-nano", "median_intvty": 100.0, "output_tput_per_gpu": 500.0, "conc": 8, "note": "x" * 500}
    line = ["8 at once", *(f"{i},000.0" for i in range(len(report.columns(None)) - 1))]
    pareto.write(tmp_path, f"http://127.0.0.1:8000/{'path' * 40}, oscine-nano", [row], [], [line], None)
    page = browser.new_page(viewport={"width": 390, "height": 844}, is_mobile=True)
    page.goto((tmp_path / "index.html").as_uri())
    page.locator("summary").click()
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    assert page.evaluate("document.querySelector('img').currentSrc") != page.evaluate(
        "document.querySelector('img').src"
    )
    assert page.locator("td[data-name='out tok/s']").count() == 1
    assert page.locator("td[data-name='per GPU']").count() == 0
    page.close()
