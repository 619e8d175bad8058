"""Hostile names of classes, methods and models are plain text in every format that is written."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import attnrx as rx
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.reports import ReportContent, model_card, render
from attnrx.support.tables import aligned_table, markdown, markdown_code, markdown_table
from support import report_content

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "&lt;b&gt;",
    "a|b",
    "line\nbreak\r\n# heading",
    "`code` ``more``",
    "[x](javascript:alert(1))",
    "![x](http://example.invalid/a.png)",
    "**bold** _it_ ~~no~~ $x$",
    "=1+1",
    "\\input{/etc/passwd} 50% & #1 _a ^b ~c",
    "\x1b[31mred",
    "{{ 7*7 }}{% if 1 %}",
]


@pytest.fixture(params=HOSTILE, ids=ascii)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def evidence(name: str) -> Evidence:
    finding = Finding(name, f"{name} of {name}", -0.5, name, limit=-1.0, outcome="holds", low=-0.7, high=-0.3, n=4)
    return Evidence((finding,), {"data": name, name: name, "images": 4, "notes": [name]})


LINKS = ("href", "src")


class Elements(HTMLParser):
    """Counts the elements of a page, and collects the attributes that run code or load a file."""

    def __init__(self, page: str):
        super().__init__()
        self.count: dict[str, int] = {}
        self.suspect: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.suspect += [
            key for key, value in attrs if key.startswith("on") or (key in LINKS and "javascript:" in (value or ""))
        ]


def page(name: str) -> str:
    content = report_content.example()
    assert content.tokens is not None
    tokens = replace(content.tokens, labels=(name,) * len(content.tokens.images))
    return render(ReportContent(name, {"model": name, name: name}, tokens=tokens, evidence=evidence(name)))


def test_a_page_has_the_elements_of_one_with_plain_names(name: str) -> None:
    found, plain = Elements(page(name)), Elements(page("plain"))
    assert found.count == plain.count and not found.suspect
    assert "<script>" not in evidence(name)._repr_html_()


def test_a_card_has_the_lines_of_one_with_plain_names(name: str) -> None:
    def shape(card: str) -> list[str]:
        # What marks a line, and the cells of a table.
        return [line[:1] + "|" * len(re.findall(r"(?<!\\)\|", line)) for line in card.splitlines()]

    def card(name: str) -> str:
        return model_card({"name": name, name: name, "weights": name}, evidence(name))

    assert shape(card(name).partition("\n---\n")[2]) == shape(card("plain").partition("\n---\n")[2])
    body = card(name).partition("\n---\n")[2].replace("<!-- attnrx", "")
    assert not re.search(r"(?<!\\)<[a-z/!]", body) and not re.search(r"(?<!\\)\]\s*[(:\[]", body)


def test_a_cell_of_markdown_is_one_line(name: str) -> None:
    table = markdown_table(["method", name], [[name, 1.0]])
    assert len(table.splitlines()) == 3
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()} == {3}
    assert markdown(name) == " ".join(markdown(name).split())
    code = markdown_code(name)
    fence = re.match(r"`+", code)
    assert fence is not None and re.findall(r"`+", code).count(fence.group()) == 2
    assert len(aligned_table(["a", name], [[name, 1.0]]).splitlines()) == 2
    assert "\x1b" not in str(evidence(name))


def test_evidence_is_printed_as_a_table_with_a_row_per_finding() -> None:
    found = report_content.evidence()
    text = str(found)
    assert text.startswith(f"Evidence: {found.summary}") and len(text.splitlines()) == 2 + len(found.findings)
    assert "the candidate loses at most 1 points of accuracy" in text and "fails" in text and len(repr(found)) < 2000


def test_dir_lists_the_packages() -> None:
    assert {"losses", "models", "data", "training", "shrink"} <= set(dir(rx))
    assert all(getattr(rx, name) is not None for name in dir(rx))
