"""The report in a real browser: no request, no overflow, light and dark, on paper, and the explorer by keyboard."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnrx.show.reports import write_report
from support import report_content

pytestmark = pytest.mark.browser

OPEN = ["changes", "tokens"]
FOLDED = ["prescription", "maps", "evidence", "costs", "provenance"]

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
    const words = "p, h2, h3, h4, td, th, small, .result, dd, dt, button, .answer span";
    const behind = element => {
        const own = getComputedStyle(element).backgroundColor;
        return own !== "rgba(0, 0, 0, 0)" ? light(own) : element.parentElement ? behind(element.parentElement) : page;
    };
    const ratios = [...document.querySelector("main").querySelectorAll(words)]
        .filter(element => !element.disabled)
        .map(element => [light(getComputedStyle(element).color), behind(element)])
        .map(([word, under]) => (Math.max(word, under) + 0.05) / (Math.min(word, under) + 0.05));
    return Math.min(...ratios);
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report") / "report.html", report_content.example())


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
@pytest.mark.parametrize("width", [360, 1280, 1600])
@pytest.mark.slow
def test_the_page_opens_alone_and_fits(opened, report: Path, scheme: str, width: int):
    page, heard = opened
    for name in OPEN:
        assert page.locator(f"#{name} > h2").is_visible(), name
    for name in FOLDED:
        assert page.locator(f"#{name} > details > summary").is_visible(), name
    assert page.locator(".answer").bounding_box()["y"] < 500 and page.locator(".totals").first.is_visible()
    fits(page, width)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    fits(page, width)
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert [line for line in heard if not line.startswith("data:image/png")] == [report.as_uri()]


def fits(page, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(OVERFLOWING) == []


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
    page.locator("#prescription details details summary").first.click()
    assert reason.is_visible()
    assert not page.locator("#evidence table").is_visible()
    page.locator("nav a", has_text="Evidence").click()
    page.locator("#evidence table").wait_for(state="visible")
    assert page.url.endswith("#evidence")
    assert page.evaluate("document.querySelector('#evidence').getBoundingClientRect().top") < 450


@pytest.mark.parametrize("width", [420])
@pytest.mark.parametrize("scheme", ["light"])
@pytest.mark.slow
def test_an_image_shows_its_tokens_layer_by_layer(opened, scheme: str, width: int):
    page, _ = opened
    viewer = page.locator("#viewer")
    state, image = viewer.locator(".state"), viewer.locator("[data-sample]").nth(1)
    assert "before layer 3" in state.inner_text() and viewer.locator(".stage .veil").count() == 1
    image.focus()
    page.keyboard.press("Enter")
    assert state.inner_text().startswith("eight, before layer 3") and image.get_attribute("aria-pressed") == "true"
    drawn = viewer.locator(".stage .veil").get_attribute("d")
    page.keyboard.press("ArrowLeft")
    assert "before layer 2" in state.inner_text() and viewer.locator(".stage .veil").get_attribute("d") != drawn
    page.keyboard.press("ArrowLeft")
    assert "64 patches" in state.inner_text() and viewer.locator(".stage .veil").count() == 0
    assert viewer.get_by_role("button", name="Earlier").is_disabled()
    viewer.get_by_role("button", name="Later").press("Enter")
    assert "before layer 2" in state.inner_text()
    viewer.get_by_role("slider").press("ArrowRight")
    assert "before layer 3" in state.inner_text()
    assert page.evaluate("new Set([...document.querySelectorAll('[id]')].map(each => each.id)).size") == page.evaluate(
        "document.querySelectorAll('[id]').length"
    )


@pytest.mark.slow
def test_the_page_is_complete_without_scripts(browser, report: Path):
    context = browser.new_context(viewport={"width": 1280, "height": 900}, java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    assert not page.locator("#viewer").is_visible()
    assert not page.locator(".with-script").first.is_visible()
    assert page.locator("#tokens .patches figure").count() == 6 and page.locator("#tokens .patches").first.is_visible()
    context.close()


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
    assert page.locator("#tokens .patches").first.is_visible()
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 20


@pytest.mark.parametrize("width", [420, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_bars_are_as_long_as_their_values_and_the_change_is_seen(opened, scheme: str, width: int):
    page, _ = opened
    bars = page.evaluate(
        """() => [...document.querySelectorAll('.times tr')].map(row => [
            row.querySelector('.bar').getBoundingClientRect().width,
            row.querySelector('.track').getBoundingClientRect().width,
            parseFloat(row.lastElementChild.innerText)])"""
    )
    longest = max(value for _, _, value in bars)
    assert len(bars) == 3 and len({value for _, _, value in bars}) > 1
    for drawn, _, value in bars:
        assert drawn == pytest.approx(bars[0][0] * value / bars[0][2], rel=0.03)
    assert all(drawn <= track for drawn, track, _ in bars) and max(bars)[2] == longest
    change = page.locator(".totals tbody tr").first.locator("td").last
    box = change.bounding_box()
    assert change.inner_text().strip() and 0 <= box["x"] and box["x"] + box["width"] <= width
    fits(page, width)
