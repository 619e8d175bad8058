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
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.diagnostics import suited_diagnostics
from attnrx.decide.rules import prescribe_maps
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.nouns.prescription import LayerPrescription, Prescription, ScoreDecision, TokenPrescription
from attnrx.show.reports import AttentionSamples, ReportContent, model_card, sample_attention, summary_of, write_report
from attnrx.show.reports.numbers import TIMES
from attnrx.show.reports.page import SECTIONS, render
from attnrx.show.reports.sections.layers import explored_spectra
from attnrx.show.reports.sections.verdict import verdict
from attnrx.support.errors import FingerprintMismatch, InvalidInput
from attnrx.vit.costs import LatencyComparison, Ratio, Timing
from attnrx.vit.models import family_of
from support import cases, report_content
from support.pictures import speckles

EVERYTHING = [
    "verdict", "front", "changes", "tokens", "attention", "prescription", "maps", "evidence",
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


def spectra_of(model):
    return tuple(layer.spectrum() for layer in family_of(model).attention(model))


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


def test_every_section_is_left_out_without_its_data():
    bare = ReportContent("bare", evidence=Evidence((), {}))
    assert [build.__name__ for build in SECTIONS if build(bare) is not None] == ["findings"]


@pytest.mark.parametrize(
    ("part", "sections"),
    [
        ("prescription", ["changes", "prescription"]),
        ("plan", ["front"]),
        ("diagnosis", ["maps"]),
        ("tokens", ["tokens"]),
        ("attention", ["attention"]),
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
    data, script = Page(page).scripts
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'" == policy
    assert sorted(json.loads(data)) == ["spectra"]
    assert "<" not in data


def test_words_of_the_content_are_escaped():
    page = whole()
    assert "<script>alert" not in page
    assert page.count("<script") == 2
    assert page.count("&lt;script&gt;alert(") >= 2
    assert report_content.HOSTILE in Page(page).words


def test_the_verdict_says_what_fails():
    words = " ".join(Page(whole()).words.split())
    assert "Of 5 claims 4 hold, 1 fails; 16 more quantities are reported without a limit." in words
    assert (
        "the candidate loses at most 1 points of accuracy: \N{MINUS SIGN}0.6 points [\N{MINUS SIGN}2.0, 0.8], limit"
        in words
    )


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
    assert words.index(sentence) < words.index("Of 5 claims 4 hold, 1 fails") < words.index("Latency % of")
    assert "Latency % of the original, 43.7 ms at batch 32 original 100 kernels alone 97.1 smaller 94.3" in words
    assert "Top-1 accuracy % original 96.4 smaller 95.8" in words
    assert "Speed: batch 32, 2 threads, float32, PyTorch 2.11.0, a quiet machine. Brackets" in words


def test_bars_are_shares_of_the_larger_model():
    content = report_content.example()
    assert content.evidence is not None
    bars = {pair.title: pair for pair in verdict(content).data["bars"]}
    assert list(bars) == ["Latency", "Top-1 accuracy", "Parameters", "MACs of one image"]
    latency = bars["Latency"].after
    assert (latency.share, latency.low, latency.high) == pytest.approx((0.943, 0.931, 0.956))
    before, after = (
        sum(part["params"] for part in finding.details["parts"].values()) for finding in content.evidence.of("costs")
    )
    assert bars["Parameters"].before.share == 1.0
    assert bars["Parameters"].after.share == pytest.approx(after / before)
    accuracy = bars["Top-1 accuracy"].after
    assert (accuracy.share, accuracy.low, accuracy.high) == pytest.approx((0.9583, 0.932, 0.975))
    slower = replace(report_content.latency(), faster=Ratio(0.8, 1 / 1.3, 1 / 1.2))
    content = replace(content, evidence=report_content.with_speed(content.evidence, slower))
    first = verdict(content).data["bars"][0]
    assert (first.before.share, first.after.share, first.after.high) == pytest.approx((0.8, 1.0, 1.3 / 1.25))
    assert f"0.80{TIMES} the speed" in shown(content).words


@pytest.mark.parametrize("milliseconds", [5, 41.2, 900])
def test_the_bars_and_the_sentence_are_one_measurement(milliseconds: float):
    """The ratio of the medians is another statistic, and differs where the load of the machine changes."""
    content, seconds = report_content.example(), milliseconds / 1000
    timing = replace(report_content.latency(), candidate=Timing(seconds, seconds, seconds))
    assert content.evidence is not None
    data = verdict(replace(content, evidence=report_content.with_speed(content.evidence, timing))).data
    latency = data["bars"][0]
    shares = [bar.share for _, _, bar in latency.bars]
    assert shares == pytest.approx([1, 1 / 1.03, 0.943])
    assert [bar.amount for _, _, bar in latency.bars] == ["100", "97.1", "94.3"]
    assert data["answer"][0][0] == f"1.06{TIMES} faster"


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
    timing = replace(report_content.latency(), faster=Ratio(1.6, 1.5, 1.7), by_compression=Ratio(1.0, 1.0, 1.0))
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
    bars = verdict(ReportContent("speed", evidence=evidence)).data["bars"]
    assert {name for pair in bars for name, _, _ in pair.bars} == {"original", "unchanged"}


def test_the_sentence_is_the_same_on_the_page_and_in_a_console():
    evidence = report_content.evidence()
    assert summary_of(evidence) == "-0.6 points of accuracy [-2.0, +0.8], 360 images"
    timing = replace(report_content.latency(), faster=Ratio(1.6, 1.5625, 1.6667), batch=32, threads=1)
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
    tokens = TokenPrescription.of(content.tokens.policy)
    of_tokens = Prescription(whole_layers, {}, content.prescription.fingerprint, {}, tokens)
    page = shown(ReportContent("tokens only", prescription=of_tokens, diagnosis=content.diagnosis))
    assert "attention_received before 2 layers" in " ".join(page.words.split())
    assert "Query and key" not in page.words and not re.search(r"(?<![\d.])0\s%", page.words)
    assert "changes" not in shown(ReportContent("same", prescription=replace(of_tokens, tokens=None))).sections


def test_sections_are_unfolded_where_they_are_the_content():
    assert '<details class="fold" open>' not in whole()
    page = render(ReportContent("evidence", evidence=report_content.evidence()))
    assert page.count('<details class="fold" open>') == page.count('<details class="fold"') == 2


def test_evidence_is_a_page_of_its_own():
    page = Page(render(ReportContent("evidence", evidence=report_content.evidence())))
    assert page.sections == ["verdict", "evidence", "provenance"]


def test_the_spectra_of_the_explorer_are_those_of_the_prescription():
    content = report_content.example()
    assert content.prescription is not None
    spectra = json.loads(Page(whole()).scripts[0])["spectra"]
    keys = set(re.findall(r'data-head="([^"]*)"', whole()))
    assert keys == set(spectra) == {f"qk-{layer}-{head}" for layer in range(3) for head in range(4)}
    for index, layer in enumerate(content.prescription.layers):
        for head, rank in enumerate(layer.qk.ranks):
            own = spectra[f"qk-{index}-{head}"]
            assert own["keep"].count("1") == rank and len(own["keep"]) == len(own["energy"]) == 16
            assert own["energy"][0] == 1.0 and own["energy"] == sorted(own["energy"], reverse=True)


def test_a_rewritten_head_shows_what_was_cut():
    model = cases.model(cases.CONFIGS["dense"])
    images = speckles(cases.CONFIGS["dense"])
    diagnosis = diagnose(model, images, diagnostics=suited_diagnostics(spectra_of(model), moments=True))
    given = prescribe_maps(diagnosis, "qk=uniform_rank:2,metric=mix vo=total_rank:0.5 fc1=uniform_rank:3")
    found = explored_spectra(ReportContent("rewritten", prescription=given, diagnosis=diagnosis))
    assert found["qk-1-0"]["keep"] == "1100" and all(energy > 0 for energy in found["qk-1-0"]["energy"])
    for layer, decided in enumerate(given.layers):
        ranks = decided.outputs["vo"].ranks
        assert [found[f"vo-{layer}-{head}"]["keep"].count("1") for head in range(len(ranks))] == list(ranks)
    assert found["fc1-0-0"]["keep"].count("1") == 3 and found["fc1-0-0"]["title"] == "Layer 0, fc1"


def test_reasons_and_kept_ranks_are_shown():
    content = report_content.example()
    assert content.prescription is not None
    words = Page(whole()).words
    for layer in content.prescription.layers:
        assert all(reason in words for reason in layer.qk.reasons)
    for index, ranks in enumerate(content.prescription.ranks):
        assert f"layer {index}, head 3: {ranks[3]} of 16" in words


def test_costs_show_parts_that_only_the_candidate_has():
    before = {"query_key": {"params": 10, "macs": 100}, "diagonal": {"params": 0, "macs": 0}}
    after = {
        "query_key": {"params": 5, "macs": 50},
        "diagonal": {"params": 3, "macs": 7},
        "new": {"params": 1, "macs": 0},
    }
    findings = tuple(
        Finding("costs", role, 0.0, details={"quantity": "counted costs", "model": role, "parts": parts})
        for role, parts in (("reference", before), ("candidate", after))
    )
    page = render(ReportContent("costs", evidence=Evidence(findings, {})))
    rows = [re.sub(r"<[^>]*>", " ", row).split()[:-4] for row in re.findall(r"<tr.*?</tr>", page, re.DOTALL)]
    assert ["diagonal", "0", "3"] in [row[:3] for row in rows]
    assert ["new", "0", "1"] in [row[:3] for row in rows]
    assert ["whole", "model", "10", "9"] in [row[:4] for row in rows]


def as_record(latency: LatencyComparison) -> dict:
    return json.loads(json.dumps(asdict(latency)))


def test_evidence_read_from_a_file_is_enough(tmp_path):
    report_content.evidence().save(tmp_path / "evidence.json")
    path = write_report(
        tmp_path / "report.html", ReportContent("from a file", evidence=Evidence.load(tmp_path / "evidence.json"))
    )
    page = Page(path.read_text(encoding="utf-8"))
    assert page.sections == ["verdict", "evidence", "provenance"]
    assert page.words.count("[\N{MINUS SIGN}2.0, 0.8]") == 2  # the failed claim, and the table
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["evidence.json", "report.html"]


def test_evidence_prescription_and_diagnosis_make_a_report(tmp_path):
    path = write_report(tmp_path / "slim.html", evidence=report_content.evidence())
    page = Page(path.read_text(encoding="utf-8"))
    assert page.sections == ["verdict", "evidence", "provenance"] and "slim" in page.words
    example = report_content.example()
    parts = {"evidence": example.evidence, "prescription": example.prescription, "diagnosis": example.diagnosis}
    both = Page(write_report(tmp_path / "both.html", **parts).read_text(encoding="utf-8"))
    assert set(page.sections) < set(both.sections)
    with pytest.raises(InvalidInput, match="got nothing to show: give evidence"):
        write_report(tmp_path / "none.html")
    with pytest.raises(InvalidInput, match="got content and evidence"):
        write_report(tmp_path / "two.html", example, evidence=example.evidence)
    assert not (tmp_path / "none.html").exists() and not (tmp_path / "two.html").exists()


def test_what_could_not_be_measured_is_shown_as_such():
    failed = Finding("controls", "not measurable", float("nan"), "units", low=float("nan"), high=float("inf"))
    words = shown(ReportContent("nan", evidence=Evidence((failed,), {}))).words
    assert "not measurable" in words
    assert words.count("nan") == 2  # the title, twice; "nan" is no number to a reader


def test_single_corruptions_are_in_the_file_alone():
    words = Page(render(ReportContent("corrupted", evidence=report_content.evidence()))).words
    assert "6 findings for single corruptions" in words and "noise of severity 1, candidate" not in words


def test_a_compressed_model_with_removed_heads_is_reported():
    model = report_content.spread_model()
    content = report_content.example()
    assert content.prescription is not None
    layers = list(content.prescription.layers)
    layers[1] = cases.with_heads(layers[1], [True, False, True, True])
    prescription = replace(content.prescription, layers=tuple(layers))
    slim = realize(model, prescription, by="compress")
    attention = sample_attention({"original": model, "compressed": slim}, torch.zeros(1, 1, 16, 16))
    assert bool(attention.maps["compressed"][0, 1, 1].isnan().all())
    words = shown(ReportContent("slim", diagnosis=report_content.diagnosed(slim), attention=attention)).words
    assert "layer 1, head 1: removed" in words
    assert "layer 1, head 1: removed" in shown(replace(content, prescription=prescription)).words


def test_exact_compression_attends_as_the_mask_does():
    model, content = report_content.spread_model().double(), report_content.example()
    prescription = report_content.prescribed(model)
    masked = realize(model, prescription, by="mask")
    exact = realize(model, prescription, by="compress", norms="exact")
    samples = sample_attention({"masked": masked, "exact": exact}, torch.randn(2, 1, 16, 16))
    assert torch.allclose(samples.maps["masked"], samples.maps["exact"], rtol=0, atol=1e-10)
    assert torch.allclose(samples.maps["masked"].sum(-1), torch.ones(2, 3, 4))
    assert content.attention is not None
    assert content.attention.images.min() >= 0 and content.attention.images.max() <= 1


def test_nothing_to_show_is_an_error():
    with pytest.raises(InvalidInput, match="nothing to show"):
        ReportContent("empty", {"model": "svda:digits"})


def test_parts_of_two_models_are_refused():
    content = report_content.example()
    assert content.diagnosis is not None
    with pytest.raises(FingerprintMismatch, match="another"):
        replace(content, diagnosis=replace(content.diagnosis, fingerprint="another"))


def test_patches_that_are_no_square_are_refused():
    with pytest.raises(InvalidInput, match="square grid"):
        AttentionSamples(torch.zeros(2, 1, 4, 4), {"original": torch.ones(2, 1, 1, 5)})


def test_uniform_attention_is_not_amplified():
    maps = torch.full((1, 1, 2, 4), 0.25) + 1e-9 * torch.randn(1, 1, 2, 4)
    words = shown(
        ReportContent("uniform", attention=AttentionSamples(torch.zeros(1, 1, 4, 4), {"original": maps}))
    ).words
    assert f"1.04{TIMES} less" in words
