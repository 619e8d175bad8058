"""Matched controls, which keep the same number of directions per map as a prescription, but different directions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from attnrx.decide.rules.prescribing import prescribe_maps
from attnrx.decide.rules.rule import Rule, parse_rules
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import Prescription, TokenPrescription
from attnrx.support.arguments import NATURAL, checked, each, one_of, optional, whole
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.shapes import Tensor
from attnrx.vit.maps import DEPTH, HEADS, TOKENS
from attnrx_lab.rules.matched import LargestMatched, RandomMatched, UniformMatched
from attnrx_lab.tokens import Random, Soft

CONTROLS = ("random", "largest", "uniform")


@checked(kinds=optional(each(one_of(*CONTROLS), f"some of {', '.join(CONTROLS)}")), draws=whole(1, 1000), seed=NATURAL)
def control_prescriptions(
    diagnosis: Diagnosis, prescription: Prescription, kinds: Sequence[str] | None = None, draws: int = 10, seed: int = 0
) -> dict[str, tuple[Prescription, ...]]:
    """Returns matched controls by kind: `draws` random controls, and one control of every other kind.

    A control selects new directions for every map (e.g. "qk" or "fc1") that has a rule in the prescription. It keeps
    the same number of directions as the prescription in each head and map ("uniform": in each layer and map). So every
    layer has exactly the same MACs and parameters. The token policy stays the same. If a map other than "heads" has a
    rule, the control removes the same heads as the prescription. If only "heads" has a rule, the control removes the
    same number of heads, but selects other heads. If the prescription consists only of a token policy, the control
    keeps the same number of patches at every stage, but selects them at random. If the policy adds a fused token, the
    control also adds one. So every layer has the same costs as with the prescription. The control has no predictors,
    because random selection does not need them.

    The kinds "largest" and "uniform" do not exist for tokens, nor for directions that all heads share. They also need
    strengths that rank the directions. Dense attention has such strengths only if the rule rewrites the scores. By
    default, "uniform" is also omitted if it equals the prescription, e.g. if only fc1 and fc2 have rules.

    Args:
        diagnosis: The diagnosis of the model.
        prescription: The prescription to match.
        kinds: The kinds of controls. By default, all kinds that exist for this prescription.
        draws: The number of random controls.
        seed: The seed of the random controls.

    Returns:
        The controls by kind.

    Raises:
        InvalidInput: The name of a kind is unknown, or `draws` is not between 1 and 1000.
        NotSupported: A requested kind does not exist for this prescription.

    Examples:
        >>> from attnrx_lab.rules import control_prescriptions
        >>> diagnosis = rx.diagnose(rx.load("svda:digits"), torch.randn(64, 1, 16, 16))
        >>> controls = control_prescriptions(diagnosis, rx.prescribe(diagnosis, "total_rank:0.5"), draws=3)
        >>> {kind: len(prescriptions) for kind, prescriptions in controls.items()}
        {'random': 3, 'largest': 1, 'uniform': 1}
    """
    requested_kinds = CONTROLS if kinds is None else tuple(kinds)
    controls_by_kind: dict[str, tuple[Prescription, ...]] = {}
    for kind in requested_kinds:
        try:
            controls = tuple(_of_kind(kind, diagnosis, prescription, draws, seed))
        except NotSupported:  # a default kind that does not exist is omitted, but a random control always exists
            if kinds is not None or kind == "random":
                raise
            continue
        # Omit a control that equals the prescription, because it would be compared with itself.
        if kinds is not None or kind != "uniform" or not _same(controls[0], prescription):
            controls_by_kind[kind] = controls
    return controls_by_kind


def _of_kind(
    kind: str, diagnosis: Diagnosis, prescription: Prescription, draws: int, seed: int
) -> Iterator[Prescription]:
    rules = parse_rules(prescription.rules).maps
    if not rules:
        yield from _of_tokens(kind, prescription, draws, seed)
        return
    for draw in range(draws if kind == "random" else 1):
        fixed = {HEADS} if rules.keys() != {HEADS} else set()  # the other maps depend on the kept heads
        control_of: dict[str, Callable[[Rule], Rule]] = {
            "random": partial(RandomMatched, seed=seed + draw),
            "largest": LargestMatched,
            "uniform": UniformMatched,
        }
        controls = {name: rule if name in fixed else control_of[kind](rule) for name, rule in rules.items()}
        yield prescribe_maps(diagnosis, {**controls, DEPTH: prescription.depth, TOKENS: prescription.tokens})


def _of_tokens(kind: str, prescription: Prescription, draws: int, seed: int) -> Iterator[Prescription]:
    tokens = prescription.tokens
    if tokens is None:
        raise InvalidInput("controls of a prescription without rules and tokens: there is nothing to match.")
    if kind != "random":
        raise NotSupported(f"the control {kind!r} does not exist for tokens; use 'random'.")
    reducer = tokens.policy.reducer
    for draw in range(draws):
        scores = Random(seed + draw)
        # Only the scores become random. A policy that fuses pruned patches still fuses them, so the costs are the same.
        policy = replace(
            tokens.policy, reducer=replace(reducer, scores=scores) if isinstance(reducer, Soft) else scores
        )
        yield replace(prescription, tokens=TokenPrescription(policy))


def _same(one: Prescription, other: Prescription) -> bool:
    """Returns whether two prescriptions keep the same directions in every map."""

    def kept(prescription: Prescription) -> Iterator[Tensor]:
        for layer in prescription.layers:
            yield from (layer.qk.keep, layer.heads)
            if layer.hidden is not None:
                yield layer.hidden.keep
            yield from (layer.outputs[name].encode for name in sorted(layer.outputs))

    first, second = list(kept(one)), list(kept(other))
    return len(first) == len(second) and all(map(torch.equal, first, second))
