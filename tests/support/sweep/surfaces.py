"""The surfaces, and how many of their cases there are."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attnrx.support.storage import fingerprint
from support.sweep import arguments, command_line, data, environment, files, models, records, texts
from support.sweep.case import Case, Verdict, judged
from support.sweep.workshop import WORKSHOP

Draw = Callable[[int, Path], Case]


@dataclass(frozen=True)
class Surface:
    """A part of what a user touches: its cases are drawn by their numbers below `count`, for a folder of the case."""

    draw: Draw
    count: int


SURFACES = {
    "arguments": Surface(arguments.draw, 850),
    "texts": Surface(texts.draw, 450),
    "records": Surface(records.draw, 700),
    "files": Surface(files.draw, 300),
    "data": Surface(data.draw, 250),
    "models": Surface(models.draw, 150),
    "environment": Surface(environment.draw, 50),
    "command_line": Surface(command_line.draw, 250),
}


def tried(surface: str, number: int, folder: Path) -> tuple[Case, Verdict]:
    """Draws a case and judges it."""
    case = SURFACES[surface].draw(number, folder)
    models = WORKSHOP.model, WORKSHOP.slim, WORKSHOP.loaded
    before = [fingerprint(each.state_dict()) for each in models]
    verdict = judged(case, folder)
    if verdict.fault is None and [fingerprint(each.state_dict()) for each in models] != before:
        verdict = Verdict(fault="a model that was given was changed")
    return case, verdict
