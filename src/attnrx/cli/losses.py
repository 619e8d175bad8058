"""Losses as text: `target_rank:16:0.1`, `distillation:runs/teacher:temperature=2`."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import attnrx as rx
from attnrx.errors import InvalidInput, UnknownName


def parse_losses(texts: Sequence[str]) -> "tuple[rx.losses.Loss, ...]":
    """Gives the task, as it is by default unless it is among the texts, and the other losses."""
    losses = tuple(parse_loss(text) for text in texts)
    has_task = any(isinstance(loss, rx.losses.Task) for loss in losses)
    return losses if has_task else (rx.losses.Task(), *losses)


def parse_loss(text: str) -> "rx.losses.Loss":
    """Builds one loss: its name, then its knobs in their order or by name, all set apart by colons."""
    name, *knobs = text.split(":")
    kinds = {snake_case(kind.__name__): kind for kind in rx.losses.LOSSES}
    if name not in kinds:
        raise UnknownName("loss", name, kinds)
    fields = {field.name: field for field in dataclasses.fields(kinds[name])}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for knob in knobs:
        key, separator, value = knob.partition("=")
        if not separator:
            free = [field for field in fields if field not in given]
            key, value = (free[0] if free else "one more"), knob
        if key not in fields or key in given:
            raise InvalidInput(f"the loss {text!r}: {name} takes {', '.join(fields)}, each once; found {knob!r}.")
        given[key] = value if fields[key].type is str else _number(value, text)
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in given]
    if missing:
        raise InvalidInput(f"the loss {text!r}: {name} needs {' and '.join(missing)}, as in {name}:{missing[0]}=...")
    return kinds[name](**given)


def snake_case(name: str) -> str:
    """Writes the name of a class as it is written in text."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _number(value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidInput(
            f"the loss {text!r}: {value!r} is not a number. Losses read like target_rank:16:0.1."
        ) from None
