"""The fields of a prescription file, and which values of them are valid."""

from collections.abc import Mapping
from typing import Any

from attnrx.support.validation import (
    MAX_DIRECTIONS,
    MAX_HEADS,
    MAX_LAYERS,
    Anything,
    Choice,
    Field,
    Flag,
    Integer,
    Invalid,
    Items,
    Number,
    Optional,
    Record,
    Text,
    below,
)
from attnrx.vit.maps import HEADS, HIDDEN, LAYER_MAPS, OUTPUT_MAPS, REALIZATIONS, REALIZED_NORMS, TOKENS
from attnrx.vit.tokens import parse_policy

KIND, SCHEMA = "attnrx prescription", 5


# A file may come from anywhere: these relations of fields are checked before a tensor of their size is allocated.
def _require_ranks(scores: Mapping[str, Any], where: str) -> None:
    """Checks that directions, strengths and ranks of the heads are consistent."""
    directions = scores["directions"]
    keep = Items(Integer(0, directions - 1), 0, directions, unique=True)  # indices, in any order
    strength = Items(Number(), directions, directions)
    for index, head in enumerate(scores["heads"]):
        path = f"{below(where, 'heads')}[{index}]"
        keep.check(head["keep"], below(path, "keep"))
        strength.check(head["strength"], below(path, "strength"))
        if head["rank"] != len(head["keep"]):
            raise Invalid(below(path, "rank"), f"is {head['rank']}, and keep has {len(head['keep'])} directions")


def _require_units(output: Mapping[str, Any], where: str) -> None:
    """Checks that all units of a map have the same number of directions, and ranks up to that number."""
    # A table of [units, directions] is made of them, so all rows need one length.
    directions = len(output["units"][0]["strength"])
    for index, unit in enumerate(output["units"]):
        path = f"{below(where, 'units')}[{index}]"
        Items(Number(), directions, directions).check(unit["strength"], below(path, "strength"))
        Integer(0, directions).check(unit["rank"], below(path, "rank"))


def _require_kept(units: Mapping[str, Any], where: str) -> None:
    """Checks that the kept units exist."""
    most = len(units["strength"])
    Items(Integer(0, most - 1), 0, most, unique=True).check(units["keep"], below(where, "keep"))


# `then` checks the lengths and ranges of these lists, which depend on the number of directions.
RANK, LATER = Integer(0, MAX_DIRECTIONS), Items(Anything(), 0, MAX_DIRECTIONS)
HEAD = Record({"rank": RANK, "keep": LATER, "strength": LATER, "why": Text()})
UNIT = Record({"rank": RANK, "strength": LATER, "why": Text()})
STAYING = {
    name: Record({"keep": LATER, "strength": Items(Number(), 0, most), "why": Text()}, then=_require_kept)
    for name, most in ((HEADS, MAX_HEADS), (HIDDEN, MAX_DIRECTIONS))
}
OUTPUT = Record({"units": Items(UNIT, 1, MAX_HEADS)}, then=_require_units)
SCORES = Record(
    {"directions": Integer(0, MAX_DIRECTIONS), "heads": Items(HEAD, 0, MAX_HEADS)},
    {"basis": Record({"shared": Flag()}, {"blocks": Items(RANK, 1, MAX_HEADS)})},
    then=_require_ranks,
)
LAYER = Record({"qk": SCORES}, {**dict.fromkeys(OUTPUT_MAPS, OUTPUT), **STAYING})
POLICY = Record({"reasons": Items(Text(), 1, MAX_LAYERS), "seed": Integer(), "trained": Flag()})


# `rules` has the text of the policy, and `tokens` what the text does not state.
def _require_tokens(record: Mapping[str, Any], where: str) -> None:
    """Checks that `rules.tokens` and `tokens` are either both given or both absent."""
    if (TOKENS in record["rules"]) != (TOKENS in record):
        here, there = ("rules.tokens", "tokens") if TOKENS in record["rules"] else ("tokens", "rules.tokens")
        raise Invalid(below(where, there), f"is missing, and {here} is given")


# The parts of PLAN: predictions over images, and the timing of the plan with its conditions (`PlanTimer.of_model`).
MEAN = Record({"value": Number(), "spread": Number(0.0), "images": Integer(1)})
LATENCY = Record(
    {
        "faster": Number(1e-6),
        "batch": Integer(1, 2**20),
        "threads": Integer(1, 2**16),
        "precision": Text(),
        "clock": Text(),
    },
    {"in_subprocess": Flag()},
    open=True,  # what the check does not use is for readers
)
# The predictions of a plan (`Plan.predictions`), which the check `promises` of `verify` compares with measurements.
PLAN = Record(
    {
        "expected": Record({"divergence": MEAN}, dict.fromkeys(("agreement", "change"), MEAN)),
        "measured": Optional(LATENCY),
    },
    open=True,
)
# The settings of fits beside their steps (`realization.fits`).
SEED, COUNT, RATE = Integer(), Integer(1, 10**6), Number(1e-12, 1.0)
FIT_SETTINGS = Record(
    more={
        "refine": Record(more={"learning_rate": RATE, "batch": COUNT, "seed": SEED}),
        "repair": Record(
            more={
                "learning_rate": RATE,
                "images": COUNT,
                "tokens": COUNT,
                "ridge": Number(1e-30),
                "seed": SEED,
                "macs": Optional(Number(1e-30)),
            }
        ),
        "distill": Record(more={"learning_rates": Items(RATE, 1, 100), "batch": Integer(2, 10**6), "seed": SEED}),
    }
)
# The options of `attnrx realize`, which are used for the matched controls too, and the classes into which the original
# puts the images of the repair, for the check `shift`.
REALIZED = Record(
    {
        "by": Choice(REALIZATIONS),
        "norms": Choice(REALIZED_NORMS),
        "refine": Integer(0, 10**6),
        "calibration_images": Integer(1),
    },
    {
        "repair": Integer(0, 10**6),
        "distill": Integer(0, 10**6),
        "classes": Items(Integer(0, 2**31 - 1), 0, MAX_DIRECTIONS),
        "settings": FIT_SETTINGS,
    },
)

# Open: it has whatever the diagnosis and the plan recorded, of which these two fields are read again.
ABOUT = Record(more={"plan": PLAN, "realized": REALIZED}, open=True)
RECORD: Field = Record(
    {
        "kind": Choice((KIND,)),
        "schema": Choice((SCHEMA,)),
        "fingerprint": Text(),
        "rules": Record(more={**dict.fromkeys(LAYER_MAPS, Text()), TOKENS: Text(parse_policy)}),
        "about": ABOUT,
        "removed_share": Number(0.0, 1.0),
        "layers": Items(LAYER, 0, MAX_LAYERS),
    },
    {TOKENS: POLICY, "tensors_sha256": Text()},
    then=_require_tokens,
)
