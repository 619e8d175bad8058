"""Texts of rules, policies, targets, formats, checks, datasets and losses that differ from valid ones by an edit.

A text is read or refused by an error of attnrx, in no time; what is read, reads the same once it is written.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jaxtyping
import pytest

from attnrx.cli.options import parse_losses
from attnrx.data import Columns
from attnrx.data.loading import locate
from attnrx.decide.planning import Target
from attnrx.decide.rules import parse_rule, parse_rules
from attnrx.exporting import parse_format
from attnrx.show.checks import parse_checks
from attnrx.support.errors import AttnrxError
from attnrx.vit.tokens import parse_policy, parse_reducer
from support.time_limits import time_limit

# By language: what reads a text, whether what was read has a text of its own, and valid texts.
LANGUAGES: Mapping[str, tuple[Callable[[str], Any], bool, tuple[str, ...]]] = {
    "rule": (
        parse_rule,
        True,
        (
            "energy_retention:0.9",
            "threshold:0.1 & remove_heads",
            "random_matched(top_rank:32):seed=3",
            "total_rank:0.5,metric=weights,minimum=2",
            "by_layer(total_rank:0.5; uniform_rank:4)",
            "(shrinkage:0.3 | top_rank:3) & uniform_heads:0.2",
        ),
    ),
    "rules": (parse_rules, False, ("qk=total_rank:0.5 vo=total_rank:0.75 tokens=ward:0.7@4,7,10", "fc1=top_rank:8")),
    "policy": (
        parse_policy,
        True,
        ("evit:0.7@4,7,10", "tome:13@every", "spot(projected=5,mean=false):0.8/0.5@2,5"),
    ),
    "reducer": (parse_reducer, False, ("ward(relevance=0.3)", "tome", "spvit(scores=spot)")),
    "target": (Target.parse, False, ("latency=0.6x", "macs=50%", "size=4MB", "max-kl=0.05", "recall=98%")),
    "format": (parse_format, False, ("onnx(opset=18)", "int8(images=9)", "openvino(precision=bf16)")),
    "checks": (parse_checks, False, ("accuracy(most_drop=0.5),costs", "robustness(severities=3,corruptions=fog/snow)")),
    "losses": (
        lambda text: parse_losses([text]),
        False,
        ("task:0.1", "target_rank:16:0.1", "keep_ratio:weight=2", "perturbation_robustness:0.2:layers=3/4"),
    ),
    "dataset": (lambda text: locate(text, Columns()), False, ("t-{00..09}.tar", "hf:owner/name", "cifar10", "a/*.tar")),
}  # fmt: skip
PIECES = (
    "", " ", "-", "--", "+", "=", ":", ",", ";", "(", ")", "()", "((", "@", "/", "&", "|", "%", "x", "0", "-1",
    "9" * 30, "9" * 400, "1e999", "-1e-9", "nan", "inf", "None", "true", "é", "٣", "\0", "\n", "\ud800", "{share}",
    "{", "}", "..", "'", '"', "\\", "#", "$(ls)", "a" * 300, "(" * 60, "0x10", "1_0", "1.2.3",
)  # fmt: skip
EDITS, SECONDS = 120, 5  # of a text, and of a case


def edited(text: str, seed: int) -> Iterator[str]:
    """Yields texts with one edit: a piece inserted, deleted, replaced or repeated, or two of them."""
    draw = random.Random(f"{text} {seed}")
    for _ in range(EDITS):
        result = text
        for _ in range(draw.choice((1, 1, 2))):
            start = draw.randrange(len(result) + 1)
            end = min(len(result), start + draw.choice((0, 1, 1, 3)))
            kind = draw.random()
            middle = draw.choice(PIECES) if kind < 0.7 else result[start:end] * 2
            result = result[:start] + middle + result[end:]
        yield result


def faults(read: Callable[[str], Any], has_text: bool, texts: Iterator[str]) -> tuple[int, list[str]]:
    """Returns the number of texts, and those that end in another error, hang, or read differently once written."""
    count, found = 0, list[str]()
    for text in texts:
        count += 1
        try:
            with time_limit(SECONDS):
                value = read(text)
                if has_text and read(str(value)) != value:
                    found.append(f"{text[:80]!r} reads as {value}, which reads otherwise")
        except AttnrxError as error:
            if len(str(error)) > 6000:
                found.append(f"{text[:80]!r}: a message of {len(str(error))} characters")
        except Exception as error:
            found.append(f"{text[:80]!r}: {type(error).__name__}: {error}"[:300])
    return count, found


@pytest.mark.parametrize("language", LANGUAGES)
def test_an_edited_text_is_read_or_refused(language: str) -> None:
    read, has_text, texts = LANGUAGES[language]
    for text in texts if language != "dataset" else ():  # datasets that need not exist
        read(text)
    jaxtyping.config.update("jaxtyping_disable", True)  # as for a user
    try:
        count, found = faults(read, has_text, (each for text in texts for each in edited(text, 0)))
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert count == EDITS * len(texts)
    assert not found, f"{len(found)} of {count}:\n" + "\n".join(found)
