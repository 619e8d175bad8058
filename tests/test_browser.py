"""The report in a real browser: nothing is asked of the network, nothing overflows, light and dark, and on paper."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import report_content
from attnrx.reports import write_report

pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SECTIONS = ["verdict", "prescription", "ranks", "maps", "spectra", "evidence", "controls", "robustness", "trade-off"]
SECTIONS += ["costs", "tokens", "attention", "training", "provenance"]

# Whatever reaches beyond the window without lying in a box that scrolls by itself.
OVERFLOWING = """() => [...document.querySelectorAll('main *, nav *')].filter(element => {
    if (element.closest('.scroll, .picture, .skip')) return false;
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.right > document.documentElement.clientWidth + 1;
}).map(element => element.tagName + '.' + element.getAttribute('class')).slice(0, 5)"""

# The contrast of all words with the page, by the formula of WCAG 2.
LEAST_CONTRAST = """() => {
    const channel = value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const light = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map(value => channel(value / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const page = light(getComputedStyle(document.body).backgroundColor);
    const words = "p, h2, td, th, small, .result, dd";
    const ratios = [...document.querySelector("main").querySelectorAll(words)]
        .map(element => light(getComputedStyle(element).color))
        .map(word => (Math.max(word, page) + 0.05) / (Math.min(word, page) + 0.05));
    return Math.min(...ratios);
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", report_content.example())


@pytest.fixture(scope="module")
def browser() -> Iterator:
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if executable is None:
        pytest.skip("there is no Chromium on this machine (Debian's package is called chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, report: Path, scheme: str, width: int) -> Iterator:
    """The page, opened with a list of everything that it said or asked for."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    heard: list[str] = []
    page.on("console", lambda message: heard.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.append(f"error: {error}"))
    page.on("request", lambda request: heard.append(request.url))
    page.goto(report.as_uri())
    yield page, heard
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.slow
def test_the_page_opens_alone_and_fits(opened, report: Path, scheme: str, width: int):
    page, heard = opened
    assert [line for line in heard if not line.startswith("data:image/png")] == [report.as_uri()]
    for name in SECTIONS:
        assert page.locator(f"#{name} > h2").is_visible(), name
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")


@pytest.mark.parametrize("width", [1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_words_stand_out_from_the_page(opened, scheme: str, width: int):
    page, _ = opened
    dark = scheme == "dark"
    red = int(re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[0])
    assert (red < 60) == dark
    assert page.evaluate(LEAST_CONTRAST) >= 4.5


@pytest.mark.parametrize("width", [1280])
@pytest.mark.parametrize("scheme", ["light"])
@pytest.mark.slow
def test_contents_and_reasons_open(opened, scheme: str, width: int):
    page, _ = opened
    reason = page.locator("#prescription td.words").first
    assert not reason.is_visible()
    page.locator("#prescription summary").first.click()
    assert reason.is_visible()
    page.locator("nav a", has_text="Evidence").click()
    assert page.url.endswith("#evidence")
    assert page.evaluate("document.querySelector('#evidence').getBoundingClientRect().top") < 450


@pytest.mark.parametrize("width", [690])  # A4 between its margins
@pytest.mark.parametrize("scheme", ["dark"])
def test_paper_is_light_and_shows_what_is_folded(opened, tmp_path: Path, scheme: str, width: int):
    page, _ = opened
    page.emulate_media(media="print")
    assert page.locator("#prescription td.words").first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth") == width
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF-")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 20
