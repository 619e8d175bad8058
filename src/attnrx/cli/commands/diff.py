"""attnrx diff: prints the differences of two diagnoses, two prescriptions or two pieces of evidence."""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.options import option
from attnrx.cli.outcome import Outcome, Table, as_percent, significant
from attnrx.cli.parser import Parser
from attnrx.support.errors import InvalidInput, UnknownName
from attnrx.support.progress import Log

if TYPE_CHECKING:
    from attnrx.nouns.prescription import TokenPrescription

SUMMARY = "compare two diagnoses, two prescriptions or two pieces of evidence"
EXAMPLE = "attnrx diff diagnosis.json diagnosis-slim.json --reading effective_rank"


def add(parser: Parser) -> None:
    parser.add_argument("before", metavar="A", help="a file written by attnrx")
    parser.add_argument("after", metavar="B", help="another of the same kind")
    option(parser, "--reading", "NAME", "for diagnoses: print this reading for every head")


def run(arguments: Namespace, log: Log) -> Outcome:
    compared: Mapping[str | None, Callable[[Namespace], Outcome]] = {
        "attnrx diagnosis": _diagnoses,
        "attnrx prescription": _prescriptions,
        "attnrx evidence": _evidences,
    }
    records = [rx.serialization.read_json(path) for path in (arguments.before, arguments.after)]
    kinds = [record.get("kind") if isinstance(record, dict) else None for record in records]
    if kinds[0] != kinds[1] or kinds[0] not in compared:
        raise InvalidInput(
            f"{arguments.before} is {kinds[0]!r} and {arguments.after} is {kinds[1]!r}; give two files of the same "
            f"kind, one of {', '.join(map(str, compared))}."
        )
    return compared[kinds[0]](arguments)


def _diagnoses(arguments: Namespace) -> Outcome:
    changes = rx.diagnostics.compare_diagnoses(rx.Diagnosis.load(arguments.before), rx.Diagnosis.load(arguments.after))
    record = {
        # None, of a head or a reading that one side lacks, differs from 0 too.
        "same": not any(change.difference != 0 for change in changes),
        "changes": [{**vars(change), "difference": change.difference} for change in changes],
    }
    by_reading: dict[str, list[rx.diagnostics.Change]] = defaultdict(list)
    for change in changes:
        by_reading[change.reading].append(change)
    if arguments.reading is None:
        rows = (_mean_row(reading, both) for reading, both in by_reading.items())
        columns = ("mean over heads", "A", "B", "largest B - A", "at")
        return Outcome(record, (Table(columns, tuple(row for row in rows if row)),))
    if arguments.reading not in by_reading:
        raise UnknownName("reading", arguments.reading, by_reading)
    rows = (
        (f"layer {change.layer}, head {change.head}", *map(_number, (change.before, change.after, change.difference)))
        for change in by_reading[arguments.reading]
    )
    return Outcome(record, (Table((arguments.reading, "A", "B", "B - A"), tuple(rows)),))


def _mean_row(reading: str, changes: "list[rx.diagnostics.Change]") -> tuple[str, ...]:
    """Returns the means of a reading over the heads that both models have, and the head that differs most."""
    # Heads of one side only have no counterpart, and would shift its mean.
    both = [change for change in changes if change.difference is not None]
    if not both:
        return ()
    most = max(both, key=lambda change: abs(change.difference or 0.0))
    means = (fmean(change.before or 0.0 for change in both), fmean(change.after or 0.0 for change in both))
    return (reading, *map(_number, (*means, most.difference)), f"layer {most.layer}, head {most.head}")


def _prescriptions(arguments: Namespace) -> Outcome:
    both = before, after = [rx.Prescription.load(path) for path in (arguments.before, arguments.after)]
    shapes = [[tuple(layer.qk.keep.shape) for layer in each.layers] for each in both]
    if shapes[0] != shapes[1]:
        raise InvalidInput(
            f"{arguments.before} is for layers of (heads, directions) {shapes[0]} and {arguments.after} for "
            f"{shapes[1]}; only prescriptions for models of one shape can be compared."
        )
    heads = [
        {
            "layer": index,
            "head": head,
            "ranks": [old.qk.ranks[head], new.qk.ranks[head]],
            "both_keep": int((old.qk.keep[head] & new.qk.keep[head]).sum()),
            # Layers without directions have no maximum.
            "strength_moves": max((old.qk.strength[head] - new.qk.strength[head]).abs().tolist(), default=0.0),
            "stays": [bool(old.heads[head]), bool(new.heads[head])],
        }
        for index, (old, new) in enumerate(zip(before.layers, after.layers, strict=True))
        for head in range(len(old.heads))
    ]
    different = [head for head in heads if _differs(head)]
    same_tokens = _same_tokens(before.tokens, after.tokens)
    tokens = [None if each.tokens is None else str(each.tokens.policy) for each in both]
    record = {
        "same": not different and same_tokens,
        "same_model": before.fingerprint == after.fingerprint,
        "rules": [dict(each.rules) for each in both],
        "removed_share": [each.removed_share for each in both],
        "tokens": tokens,
        "heads": heads,
    }
    rows = tuple(
        (f"layer {head['layer']}, head {head['head']}", *map(str, (*head["ranks"], head["both_keep"])))
        for head in different
    )
    removed = f"removed: {as_percent(before.removed_share)} in A, {as_percent(after.removed_share)} in B"
    lines = [f"{len(different)} of {len(heads)} heads differ; {removed}"]
    if not same_tokens:
        sides = ", ".join(f"{policy or 'all kept'} in {side}" for policy, side in zip(tokens, "AB", strict=True))
        lines.append(f"tokens: {sides}{'; other predictors' if tokens[0] == tokens[1] else ''}")
    return Outcome(record, (Table(("directions kept", "A", "B", "in both"), rows), *lines) if rows else tuple(lines))


def _same_tokens(before: "TokenPrescription | None", after: "TokenPrescription | None") -> bool:
    if before is None or after is None:
        return before is after
    # Predictors that are not stored are drawn from the seed.
    old, new = before.predictors or {}, after.predictors or {}
    same_weights = old.keys() == new.keys() and all(old[name].equal(new[name]) for name in old)
    return before.policy == after.policy and before.seed == after.seed and same_weights


def _differs(head: dict[str, Any]) -> bool:
    # As many directions on both sides, all of which both keep, are the same directions.
    same_directions = head["ranks"][0] == head["ranks"][1] == head["both_keep"]
    return not same_directions or head["stays"][0] != head["stays"][1] or head["strength_moves"] > 0


def _evidences(arguments: Namespace) -> Outcome:
    both = [rx.Evidence.load(path) for path in (arguments.before, arguments.after)]
    # Findings are matched by their claims, whatever their order and the other checks.
    before, after = ({(finding.check, finding.claim): finding for finding in each.findings} for each in both)
    claims = [
        {"check": key[0], "claim": key[1], "before": _described(before.get(key)), "after": _described(after.get(key))}
        for key in dict.fromkeys((*before, *after))
    ]
    rows = tuple(
        (
            claim["claim"],
            *(f"{claim[side]['text']} {claim[side]['outcome'] or ''}".strip() for side in ("before", "after")),
        )
        for claim in claims
        if claim["before"] != claim["after"]
    )
    record = {"same": not rows, "outcomes": [each.outcome for each in both], "claims": claims}
    lines = f"{len(rows)} of {len(claims)} findings differ"
    return Outcome(record, (Table(("finding", "A", "B"), rows), lines) if rows else (lines,))


def _described(finding: "rx.Finding | None") -> dict[str, Any]:
    if finding is None:
        return {"value": None, "outcome": None, "text": "-"}
    outcome = finding.outcome if finding.is_claim else None
    return {"value": finding.value, "outcome": outcome, "text": significant(finding.value, finding.unit)}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
