"""Matched controls: prescriptions that keep as much of every prescribed map as another one, chosen otherwise."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput, NotSupported
from attnrx.prescription import Prescription, TokenPrescription
from attnrx.rules.largest_matched import LargestMatched
from attnrx.rules.parsing import parse_text
from attnrx.rules.prescribing import prescribe
from attnrx.rules.random_matched import RandomMatched
from attnrx.rules.rule import Rule
from attnrx.rules.uniform_matched import UniformMatched
from attnrx.shapes import Tensor
from attnrx.tokens import Random, TokenPolicy
from attnrx.tokens.soft import Soft

CONTROLS = ("random", "largest", "uniform")


def control_prescriptions(
    diagnosis: Diagnosis,
    prescription: Prescription,
    kinds: Sequence[str] | None = None,
    draws: int = 10,
    seed: int = 0,
) -> dict[str, tuple[Prescription, ...]]:
    """Returns controls by kind: `draws` random ones, and one of each other kind.

    A control decides anew about every map that the prescription has a rule for (scores, values, MLP). It keeps as many
    directions of each head and map as the prescription, "uniform" as many of each layer and map, so every layer has the
    same MACs and parameters as exact integers. Removed heads and the token policy are the same.

    Where the prescription has no rule, the tokens are controlled: as many random patches stay at every stage, beside
    the token for the others where the policy has one. Every layer then costs the same; the predictors of the policy,
    which random tokens do not need, do not count.

    Without `kinds` these are all that exist. "largest" and "uniform" do not for tokens, for directions that all heads
    share, and for strengths that rank nothing (dense attention in its own directions), and "uniform" does not where it
    is the prescription itself, as for the MLP alone.

    Raises:
        InvalidInput: for unknown kinds, and for no draw.
        NotSupported: for a kind that was named and does not exist.
    """
    named = CONTROLS if kinds is None else tuple(kinds)
    if set(named) - set(CONTROLS) or draws < 1:
        raise InvalidInput(f"kinds={named}, draws={draws}: choose kinds from {CONTROLS}, and at least one draw.")
    found: dict[str, tuple[Prescription, ...]] = {}
    for kind in named:
        try:
            made = tuple(_of_kind(kind, diagnosis, prescription, draws, seed))
        except NotSupported:
            if kinds is not None or kind == "random":
                raise
            continue
        if kinds is not None or kind != "uniform" or not _same(made[0], prescription):
            found[kind] = made
    return found


def _of_kind(
    kind: str, diagnosis: Diagnosis, prescription: Prescription, draws: int, seed: int
) -> Iterator[Prescription]:
    if not prescription.rules:
        yield from _of_tokens(kind, prescription, draws, seed)
        return
    from attnrx.rules import RULES

    rules = {of: parse_text(own["rule"], RULES) for of, own in prescription.rules.items()}
    for draw in range(draws if kind == "random" else 1):
        controls = {of: _control(kind, rule, seed + draw) for of, rule in rules.items()}
        scores = controls.pop("scores", None)
        metric = prescription.rules["scores"]["metric"] if scores is not None else None
        yield prescribe(diagnosis, scores, metric, tokens=prescription.tokens, **controls)


def _control(kind: str, rule: Rule, seed: int) -> Rule:
    if kind == "random":
        return RandomMatched(rule, seed)
    return LargestMatched(rule) if kind == "largest" else UniformMatched(rule)


def _of_tokens(kind: str, prescription: Prescription, draws: int, seed: int) -> Iterator[Prescription]:
    tokens = prescription.tokens
    if tokens is None:
        raise InvalidInput("controls of a prescription without rules and tokens: there is nothing to match.")
    if kind != "random":
        raise NotSupported(f"the control {kind!r} does not exist for tokens; use 'random'.")
    for draw in range(draws):
        policy = _random_policy(tokens.policy, seed + draw)
        yield replace(prescription, tokens=TokenPrescription.of(policy))


def _random_policy(policy: TokenPolicy, seed: int) -> TokenPolicy:
    """Random scores in place of the policy's own; what becomes of the other patches stays the same."""
    reducer = policy.reducer
    return replace(policy, reducer=replace(reducer, scores=Random(seed)) if isinstance(reducer, Soft) else Random(seed))


def _same(one: Prescription, other: Prescription) -> bool:
    """Whether two prescriptions keep the same directions of every map."""
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        if mine.keep.shape != theirs.keep.shape or not bool((mine.keep == theirs.keep).all()):
            return False
        outputs = zip((mine.values, *mine.mlp), (theirs.values, *theirs.mlp), strict=True)
        if any(not _equal(a and a.encode, b and b.encode) for a, b in outputs):
            return False
    return True


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and bool((one == other).all())
