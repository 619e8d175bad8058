"""The site: built strictly, asks nothing of the network, and leaves out nothing that the code offers."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import attnrx as rx
from attnrx.cli.commands import COMMANDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# Copies: other tests register parts of their own.
REGISTRIES = {
    "rules": dict(rx.rules.RULES),
    "checks": dict(rx.checks.CHECKS),
    "tokens": dict(rx.tokens.REDUCERS),
    "diagnostics": dict(rx.diagnostics.DIAGNOSTICS),
}


class Page(HTMLParser):
    """What a page loads, where it links to, and what can be linked to in it."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.text = path, path.read_text()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.add(given.get("id") or given.get("name") or "")
        address = given.get("href") or given.get("src")
        if address:
            (self.links if tag == "a" else self.loaded).append(address)


def test_the_table_of_methods_states_what_its_pages_measured() -> None:
    """A number that is measured again on a page of results must change in the table too."""
    page = ROOT / "docs" / "how-to" / "choosing.md"
    rows = re.findall(r"^\| (?!you have|---)(.*) \|$", page.read_text(), re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        *_, measured, link = row.split(" | ")
        (results,) = re.findall(r"\]\(([^#)]+)", link)
        known = set(re.findall(r"\d+(?:\.\d+)?", (page.parent / results).read_text()))
        numbers = set(re.findall(r"\d+(?:\.\d+)?", measured))
        assert numbers and numbers <= known, (row, numbers - known)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # Whoever asks for a page of the network is sent to a port where nobody answers.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {path.relative_to(site).as_posix(): Page(path) for path in sorted(site.rglob("*.html"))}


def test_nothing_is_asked_of_the_network(site: Path, pages: dict[str, Page]):
    assert len(pages) > 25
    for name, page in pages.items():
        foreign = [address for address in (*page.loaded, *page.links) if re.match(r"(https?:)?//", address)]
        assert foreign == [], name
    for path in site.rglob("*.css"):
        assert re.findall(r"url\(['\"]?(?:https?:)?//|@import", path.read_text()) == [], path.name


def test_every_link_leads_somewhere(site: Path, pages: dict[str, Page]):
    broken = defaultdict(list)
    for name, page in pages.items():
        for address in (*page.loaded, *page.links):
            parts = urlsplit(address)
            if parts.scheme or name == "404.html":
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            known = pages.get(target.relative_to(site.resolve()).as_posix()) if target.suffix == ".html" else None
            if not target.exists() or (parts.fragment and known and unquote(parts.fragment) not in known.anchors):
                broken[name].append(address)
    assert dict(broken) == {}


def test_every_marker_was_replaced(pages: dict[str, Page]):
    assert [name for name, page in pages.items() if "<!-- make:" in page.text] == []


def test_every_public_name_is_in_the_reference(pages: dict[str, Page]):
    anchors = {anchor for name, page in pages.items() if name.startswith("api/") for anchor in page.anchors}
    packages = {name for name in rx.__all__ if f"api/{name}.html" in pages}
    named = {name for name in rx.__all__ if not name.startswith("__")} - packages
    assert packages == {"checks", "rules"}
    assert [name for name in sorted(named) if f"attnrx.{name}" not in anchors] == []
    assert all(
        f"attnrx.change.decompositions.{name}" in anchors
        for name in importlib.import_module("attnrx.change.decompositions").__all__
    )


@pytest.mark.parametrize("package", REGISTRIES)
def test_every_part_is_in_the_table_of_its_kind(pages: dict[str, Page], package: str):
    page = pages[f"api/{package}.html"]
    for name, part in REGISTRIES[package].items():
        if part.__module__ == "attnrx_lab.clutter":  # a testbed, which registers a reducer when it is imported
            continue
        assert f">{name}</code>" in page.text, name
        assert any(anchor.endswith(f".{part.__name__}") for anchor in page.anchors), name


def test_every_loss_is_in_the_reference(pages: dict[str, Page]):
    page = pages["api/training.html"]
    assert [
        loss.__name__ for loss in rx.losses.LOSSES.values() if f"{loss.__module__}.{loss.__name__}" not in page.anchors
    ] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_the_reference(pages: dict[str, Page], name: str):
    page = pages["command-line.html"]
    parser = COMMANDS[name].parser()
    _, _, section = page.text.partition(f'<h2 id="attnrx-{name}">')
    section = section.partition("<h2 ")[0]
    options = [option for option in parser._option_string_actions if option not in ("-h", "--help")]
    shown = re.findall(r"<code>([^<]*)</code>", section)
    words = {word.rstrip(",") for text in shown for word in text.split()}
    assert [option for option in options if option not in words] == []


def test_how_tos_show_their_code_and_their_file(site: Path, pages: dict[str, Page]):
    files = [path for path in (ROOT / "docs" / "how-to").glob("*.py") if "# %%" in path.read_text()]
    assert len(files) >= 5
    for path in files:
        assert f"{path.name}" in pages[f"how-to/{path.stem}.html"].links
        assert (site / "how-to" / path.name).read_text() == path.read_text()


SHOWN = ["index", "gallery", "idea", "how-to/compare", "api/rules", "results/spot", "command-line"]


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light")])
def test_pages_fit_and_are_read_from_a_disk(browser, site: Path, width: int, scheme: str):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: requested.append(f"error: {error}"))
    for name in SHOWN:
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == width, name
        red = int(re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[0])
        assert (red < 60) == (scheme == "dark"), name
    context.close()
    assert [address for address in requested if not address.startswith(("file:", "data:", "about:"))] == []


@pytest.mark.browser
def test_the_search_finds_without_a_server(browser, site: Path):
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.locator("input.md-search__input").click()
    page.locator("input.md-search__input").press_sequentially("water-filling")
    page.locator(".md-search-result__link").first.wait_for(timeout=20_000)
    assert "irratt.html" in " ".join(
        link.get_attribute("href") for link in page.locator(".md-search-result__link").all()
    )
    page.close()


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("segmentation", "how-to/dense.html"),
        ("detector", "how-to/detection.html"),
        ("batch 1", "how-to/batch_1.html"),
        ("fine-tuned", "how-to/fine_tuned.html"),
        ("OpenVINO", "how-to/openvino_file.html"),
        ("reproduce", "how-to/reproduce.html"),
        ("embedding", "how-to/embeddings.html"),
        ("int8", "how-to/deploy.html"),
        ("pipeline", "how-to/huggingface.html"),
    ],
)
def test_a_search_finds_the_page_of_a_task_by_its_title(site: Path, words: str, page: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    titles = {entry["location"]: entry["title"] for entry in index["docs"]}
    assert words.lower() in titles[page].lower()
