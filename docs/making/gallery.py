"""Makes the pictures in docs/gallery.md, which are light and dark screenshots of reports in Chromium.

To make them again, run in the root of a checkout:

make demo && .venv/bin/python docs/making/gallery.py
"""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

import attnrx as rx

ASSETS = Path(__file__).parents[1] / "assets" / "gallery"
MODEL, OUT = "runs/demo/train/cluttered-digits", Path("runs/gallery")
WIDTH = 860  # the width of the browser window in pixels
# Each picture's name, with its report page and the CSS selector of the element that it shows.
PICTURES = {"tokens": ("tokens.html", "#tokens .sample-stages .patches"), "maps": ("report.html", "#maps .figures")}


def make_pages() -> None:
    """Shrinks the model of `make demo` and writes two reports: one of the shrunk model, and one of merged tokens."""
    model = rx.load(MODEL)
    splits = rx.adapt_preprocessing(rx.load_data("cluttered-digits"), model)
    rx.shrink(model, splits, macs=0.4, folder=OUT).save(OUT, onnx=False)
    diagnosis = rx.diagnose(model, splits.train.take(256))
    images = next(iter(splits.test.take(1).batches(1))).images
    merged = rx.realize(model, rx.prescribe(diagnosis, "tokens=ward:0.5@2,3"))
    tokens = rx.reports.sample_tokens(merged, images)
    rx.write_report(OUT / "tokens.html", rx.reports.ReportContent("Tokens", tokens=tokens))


def take_pictures() -> None:
    """Writes a screenshot of every element in `PICTURES`, in both colour schemes."""
    ASSETS.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
            for name, (file, element) in PICTURES.items():
                page.goto((OUT / file).resolve().as_uri())
                page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
                page.locator(element).first.screenshot(path=ASSETS / f"{name}-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    make_pages()
    take_pictures()
