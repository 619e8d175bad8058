"""Losses as text: `target_rank:16:0.1`, `distillation:runs/teacher:temperature=2`.

A teacher whose name contains a colon, such as timm:NAME, must be given with --teacher.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attnrx as rx
from attnrx.errors import InvalidInput, UnknownName
from attnrx.serialization.text_parsing import share


def parse_losses(
    texts: Sequence[str], shared: Mapping[str, str] | None = None, task: bool = True
) -> "tuple[rx.losses.Loss, ...]":
    """Returns the losses, preceded by the default task loss if `task` and no text contains one.

    `shared` are default knobs for every loss that has them: the teacher and its weights.
    """
    losses = tuple(parse_loss(text, shared or {}) for text in texts)
    has_task = any(isinstance(loss, rx.losses.Task) for loss in losses)
    if has_task and not task:
        raise InvalidInput("the losses contain the task, and --no-task excludes it; give one of the two.")
    unused = [knob for knob in shared or {} if not any(hasattr(loss, knob) for loss in losses)]
    if unused:
        raise InvalidInput(
            f"a {unused[0]} was given, and none of the losses uses one; add distillation or "
            "feature_distillation to the losses."
        )
    if not losses and not task:
        raise InvalidInput("without the task and without other losses there is nothing to learn; give --losses.")
    return losses if has_task or not task else (rx.losses.Task(), *losses)


def parse_loss(text: str, shared: Mapping[str, str]) -> "rx.losses.Loss":
    """Builds one loss from its name and its positional or named knobs, separated by colons."""
    name, *knobs = text.split(":")
    kinds = {snake_case(kind.__name__): kind for kind in rx.losses.LOSSES}
    if name not in kinds:
        raise UnknownName("loss", name, kinds)
    fields = {field.name: field for field in dataclasses.fields(kinds[name])}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    rest = {key: value for key, value in shared.items() if key in fields}
    for knob in knobs:
        key, separator, value = knob.partition("=")
        if not separator:
            free = [field for field in fields if field not in given and field not in rest]
            key, value = (free[0] if free else "one more"), knob
        if key not in fields or key in given:
            raise InvalidInput(f"the loss {text!r}: {name} takes {', '.join(fields)}, each once; found {knob!r}.")
        given[key] = value if fields[key].type in (str, str | None) else _number(value, fields[key].type, text)
    given = {**rest, **given}
    missing = [key for key, field in fields.items() if field.default is dataclasses.MISSING and key not in given]
    if missing:
        raise InvalidInput(f"the loss {text!r}: {name} needs {' and '.join(missing)}, as in {name}:{missing[0]}=...")
    return kinds[name](**given)


def snake_case(name: str) -> str:
    """Converts the name of a class to snake case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _number(value: str, kind: Any, text: str) -> int | float:
    try:
        return int(value) if kind == int | None else share(value)
    except ValueError:
        raise InvalidInput(
            f"the loss {text!r}: {value!r} is not a number. Losses read like target_rank:16:0.1."
        ) from None
