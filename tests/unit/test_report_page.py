"""A report shows what it was given, leaves out what it was not given, and is a file that stands alone."""

import base64
import hashlib
import json
import re
from dataclasses import asdict, replace
from functools import cache
from html.parser import HTMLParser

import pytest
import torch

from attnrx.change.realization import realize
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.nouns.prescription import LayerPrescription, Prescription, ScoreDecision, TokenPrescription
from attnrx.show.reports import ReportContent, model_card, summary_of, write_report
from attnrx.show.reports.numbers import TIMES
from attnrx.show.reports.page import render
from attnrx.show.reports.results import verdict
from attnrx.support.errors import InvalidInput
from attnrx.support.estimate import Estimate
from attnrx.vit.costs import LatencyComparison
from support import cases, report_content

EVERYTHING = [
    "verdict", "changes", "tokens", "prescription", "maps", "evidence",
    "costs", "provenance",
]  # fmt: skip
FOLDED = EVERYTHING[EVERYTHING.index("prescription") :]
VOID = {"meta", "img", "br", "input"}


class Page(HTMLParser):
    """The words, the sections and the addresses of a page; complains about tags that do not close."""

    def __init__(self, page: str):
        super().__init__()
        self.sections: list[str] = []
        self.addresses: list[str] = []
        self.folded: list[str] = []
        self.scripts: list[str] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section":
            self.sections.append(named["id"] or "")
        if tag == "details" and named.get("class") == "fold":
            self.folded.append(self.sections[-1])
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self._open[-1:] != ["style"]:
            self.words += data


def shown(content: ReportContent) -> Page:
    return Page(render(content))


@cache
def whole() -> str:
    return render(report_content.example())


def test_everything_given_is_shown_in_order():
    page = Page(whole())
    assert page.sections == EVERYTHING
    assert page.folded == FOLDED
    contents = [address for address in page.addresses if address.startswith("#")]
    assert contents[: 1 + len(EVERYTHING)] == ["#content", *(f"#{name}" for name in EVERYTHING)]


@pytest.mark.parametrize(
    ("part", "sections"),
    [
        ("prescription", ["changes", "prescription"]),
        ("diagnosis", ["maps"]),
        ("tokens", ["tokens"]),
        ("evidence", ["evidence", "costs"]),
    ],
)
def test_every_part_alone_makes_a_report(part, sections):
    content = ReportContent("one part", **{part: getattr(report_content.example(), part)})
    assert [name for name in shown(content).sections if name not in ("verdict", "provenance")] == sections


def test_the_page_needs_nothing_else():
    page = whole()
    addresses = Page(page).addresses
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in addresses)
    # The only address in the scripts is the name of SVG elements, which is not fetched.
    alone = page.replace('"http://www.w3.org/2000/svg"', "")
    assert not re.search(r"<link|<iframe|@import|url\(|https?://|fetch\(|import\(|XMLHttp", alone)


def test_only_the_script_of_the_page_may_run():
    page = whole()
    (script,) = Page(page).scripts
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'" == policy


def test_words_of_the_content_are_escaped():
    page = whole()
    assert "<script>alert" not in page
    assert page.count("<script") == 1
    assert page.count("&lt;script&gt;alert(") >= 2
    assert report_content.HOSTILE in Page(page).words


def test_the_verdict_of_a_good_candidate():
    good = Evidence((Finding("bounds", "it holds", 0.5, limit=1.0, outcome="holds"),), {})
    assert "Of 1 claim 1 holds." in shown(ReportContent("good", evidence=good)).words
    none = Evidence((Finding("accuracy", "accuracy", 90.0, "%"),), {})
    assert "No claim has a limit; 1 more quantity is reported" in shown(ReportContent("", evidence=none)).words


def test_the_page_begins_with_the_result():
    words = " ".join(Page(whole()).words.partition("All images")[0].split())
    minus = "\N{MINUS SIGN}"
    sentence = (
        f"1.06{TIMES} faster than the original at batch 32 on 2 threads [1.05, 1.07] = 1.03{TIMES} by attnrx's "
        f"kernels {TIMES} 1.03{TIMES} by compression, {minus}0.6 points of accuracy [{minus}2.0, +0.8], "
        f"10 % fewer MACs, 8 % fewer parameters, 360 images."
    )
    assert sentence in words
    assert words.index(sentence) < words.index("Of 5 claims 4 hold, 1 fails") < words.index("Latency at batch 32")
    rows = verdict(report_content.example().evidence, {})["rows"]
    assert rows[0] == ("Latency at batch 32", "43.7 ms", "41.2 ms", "1.06x faster [1.05, 1.07]")
    assert [text.replace("\N{NO-BREAK SPACE}", " ") for text in rows[1]] == [
        "Top-1 accuracy",
        "96.4 %",
        "95.8 %",
        f"{minus}0.6 points",
    ]
    assert "Speed: batch 32, 2 threads, float32, PyTorch 2.11.0, a quiet machine. Brackets" in words


KERNELS_ALONE = "its speed is that of attnrx's kernels alone; an exported file such as model.onnx gains nothing."


@pytest.mark.parametrize(
    ("about", "runtime", "words"),
    [
        ({"nothing_removed": True}, None, KERNELS_ALONE),
        ({"nothing_removed": True}, "OpenVINO in bfloat16", "its speed is that of OpenVINO in bfloat16 alone."),
        ({"nothing_removed": False}, None, None),
        ({}, None, None),  # earlier files do not state it
    ],
)
def test_a_result_from_which_nothing_was_removed_says_so_first(about: dict, runtime: str | None, words: str | None):
    timing = replace(report_content.latency(), faster=Estimate(1.6, 1.5, 1.7), by_compression=Estimate(1.0, 1.0, 1.0))
    record = as_record(timing) | ({} if runtime is None else {"runtime": runtime})
    speed = Finding("latency", "speed", 1.6, "x", details={"quantity": "speed", **record})
    evidence = Evidence((*report_content.evidence().findings, speed), about)
    summary, page = summary_of(evidence), shown(ReportContent("speed", evidence=evidence))
    card = model_card({"name": "vit"}, evidence)
    if words is None:
        assert not any("NOTHING" in each for each in (summary, page.words, card))
        assert "smaller" in page.words
        return
    for text in (summary, page.words, card):
        assert "NOTHING WAS REMOVED: this is the unchanged model" in text
        assert words in text.replace("\\_", "_")
    assert verdict(evidence, {})["after"] == "unchanged"


def test_the_sentence_is_the_same_on_the_page_and_in_a_console():
    evidence = report_content.evidence()
    assert summary_of(evidence) == "-0.6 points of accuracy [-2.0, +0.8], 360 images"
    timing = replace(report_content.latency(), faster=Estimate(1.6, 1.5625, 1.6667), batch=32, threads=1)
    promised = {"faster": 1.59, "batch": 32, "threads": 1, "precision": "float32", "torch": "2.1", "hardware": "a CPU"}
    details = {"quantity": "promised speed", "promised": promised, "within": 0.1, "measured": as_record(timing)}
    speed = Finding("promises", "speed of a pass", 1.6, "x", low=1.5625, high=1.6667, details=details)
    timed = replace(evidence, findings=(*evidence.findings, speed))
    assert summary_of(timed).startswith(
        "1.60x faster than the original at batch 32 on 1 thread [1.56, 1.67] = 1.03x by attnrx's kernels x 1.03x by "
        "compression, -0.6 points"
    )
    page = shown(
        ReportContent("speed", evidence=replace(evidence, findings=(replace(speed, limit=1.5, outcome="holds"),)))
    )
    row = " ".join(page.words.split())
    assert "speed of a pass" in row and "[1.56, 1.67]" in row


def test_only_what_changed_is_shown():
    content = report_content.example()
    assert content.prescription is not None and content.tokens is not None
    whole_layers = tuple(
        LayerPrescription({"qk": ScoreDecision(torch.ones_like(qk.keep), qk.strength, qk.reasons)})
        for qk in (layer.qk for layer in content.prescription.layers)
    )
    tokens = TokenPrescription(content.tokens.policy)
    of_tokens = Prescription(whole_layers, {}, content.prescription.fingerprint, {}, tokens)
    page = shown(ReportContent("tokens only", prescription=of_tokens, diagnosis=content.diagnosis))
    assert "attention_received before 2 layers" in " ".join(page.words.split())
    assert "Query and key" not in page.words and not re.search(r"(?<![\d.])0\s%", page.words)
    assert "changes" not in shown(ReportContent("same", prescription=replace(of_tokens, tokens=None))).sections


def as_record(latency: LatencyComparison) -> dict:
    return json.loads(json.dumps(asdict(latency)))


def test_evidence_prescription_and_diagnosis_make_a_report(tmp_path):
    path = write_report(tmp_path / "slim.html", evidence=report_content.evidence())
    page = Page(path.read_text(encoding="utf-8"))
    assert page.sections == ["verdict", "evidence", "provenance"] and "slim" in page.words
    example = report_content.example()
    parts = {"evidence": example.evidence, "prescription": example.prescription, "diagnosis": example.diagnosis}
    both = Page(write_report(tmp_path / "both.html", **parts).read_text(encoding="utf-8"))
    assert set(page.sections) < set(both.sections)
    with pytest.raises(InvalidInput, match="has nothing to show: give it evidence"):
        write_report(tmp_path / "none.html")
    with pytest.raises(InvalidInput, match="got content and evidence"):
        write_report(tmp_path / "two.html", example, evidence=example.evidence)
    assert not (tmp_path / "none.html").exists() and not (tmp_path / "two.html").exists()


def test_a_compressed_model_with_removed_heads_is_reported():
    model = report_content.spread_model()
    content = report_content.example()
    assert content.prescription is not None
    layers = list(content.prescription.layers)
    layers[1] = cases.with_heads(layers[1], [True, False, True, True])
    prescription = replace(content.prescription, layers=tuple(layers))
    slim = realize(model, prescription, by="compress")
    of_diagnosis = ReportContent("slim", diagnosis=report_content.diagnosed(slim))
    for each in (of_diagnosis, replace(content, prescription=prescription)):
        assert '<td class="absent" title="layer 2, head 2: removed">removed</td>' in render(each)
