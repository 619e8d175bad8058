"""The model card is plain Markdown that says what was measured, and nothing else."""

import re

from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.reports import model_card
from support import report_content


def tables(card: str) -> list[list[str]]:
    blocks = re.findall(r"(?:^\|.*\|$\n?)+", card, re.MULTILINE)
    return [block.strip().splitlines() for block in blocks]


def cells(row: str) -> int:
    return len(re.split(r"(?<!\\)\|", row)) - 2


def test_a_card_says_what_was_done_and_what_failed():
    content = report_content.example()
    card = model_card({"name": "slim digits", "parameters": 138273}, content.evidence, content.prescription)
    assert card.startswith("---\nlibrary_name: attnrx\n")
    assert "# slim digits" in card
    assert "Of 5 claims 4 hold, 1 fails" in card
    assert "| ✗ **fails** | accuracy | the candidate loses at most 1 points of accuracy |" in card
    assert "Rules: `qk=energy_retention:0.9`." in card
    assert "| parameters | 138,273 |" in card


def test_every_table_has_as_many_cells_as_columns():
    content = report_content.example()
    nasty = Finding("a|b", "pipes | and\nlines [link](x) <b>", 1.0)
    card = model_card({"name": "x"}, Evidence((nasty,), {}), content.prescription)
    assert len(tables(card)) == 2
    for table in tables(card):
        assert {cells(row) for row in table} == {cells(table[0])}
    assert "<b>" not in card.replace("\\<b\\>", "")


def test_a_card_without_evidence_admits_it():
    card = model_card({"name": "fresh", "seed": 42})
    assert "Nothing was verified" in card
    assert "## Evidence" not in card
    assert "## Prescription" not in card
