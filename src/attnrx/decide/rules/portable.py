"""Rules for portable models: only hidden units and heads are removed, the same number in every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from attnrx.decide.rules.rule import Rule
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import InvalidRule, NotSupported
from attnrx.vit.maps import HEADS, HIDDEN


def portable_rules(rules: Mapping[str, Rule], others: Sequence[str], multiple: int) -> dict[str, Rule]:
    """Checks and completes rules for a portable model. A rule for hidden units that sets no multiple gets `multiple`.

    Raises:
        NotSupported: `others` names a map that no library class can represent after pruning.
    """
    if others:
        raise NotSupported(
            f"portable=True with {', '.join(others)}: the classes of libraries hold other numbers of hidden units and "
            "blocks, and some of heads, and nothing else that is pruned. Prescribe hidden=..., e.g. "
            "hidden=total_rank:0.5, or depth=..., e.g. depth=without:9."
        )
    return {name: _rounded(rule, multiple) if name == HIDDEN else rule for name, rule in rules.items()}


def _rounded(rule: Any, multiple: int) -> Rule:
    is_open = any(field.name == "multiple" for field in fields(rule)) and rule.multiple == 1
    return replace(rule, multiple=multiple) if is_open else rule


def require_uniform(prescription: Prescription, multiple: int) -> None:
    """Raises InvalidRule unless all layers keep the same number of heads and the same number of hidden units.

    The number of hidden units must also be divisible by `multiple`.
    """
    for name, unit in ((HIDDEN, multiple), (HEADS, 1)):
        decisions = [layer.decisions.get(name) for layer in prescription.layers]
        # None means that all units or heads stay. A dict keeps the layers' counts in order, without repetitions.
        counts = dict.fromkeys(None if each is None else int(each.keep.sum()) for each in decisions)  # type: ignore[union-attr]
        if len(counts) > 1 or any(count is not None and count % unit for count in counts):
            kept = " and ".join("all" if count is None else str(count) for count in counts)
            raise InvalidRule(
                f"{name}={prescription.rules[name]} keeps {kept} of {name} in the layers, and a portable model has the "
                f"same number in all layers{f', a multiple of {unit}' if unit > 1 else ''}: use {name}=total_rank:0.5."
            )
