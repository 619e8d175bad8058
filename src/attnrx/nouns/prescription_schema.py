"""The fields of a prescription file, and which values of them are valid."""

from collections.abc import Mapping
from typing import Any

from attnrx.support import records as fields
from attnrx.support.records import Invalid, below
from attnrx.vit.maps import (
    HEADS,
    HIDDEN,
    LAYER_MAPS,
    OUTPUT_MAPS,
    REALIZATIONS,
    REALIZED_NORMS,
    TOKENS,
)
from attnrx.vit.tokens import parse_policy

KIND, SCHEMA = "attnrx prescription", 5


# A file may come from anywhere: these relations of fields are checked before a tensor of their size is allocated.
def _require_ranks(scores: Mapping[str, Any], where: str) -> None:
    """Checks that directions, strengths and ranks of the heads are consistent."""
    directions = scores["directions"]
    keep = fields.Items(fields.Integer(0, directions - 1), 0, directions, unique=True)  # indices, in any order
    strength = fields.Items(fields.Number(), directions, directions)
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
        fields.Items(fields.Number(), directions, directions).check(unit["strength"], below(path, "strength"))
        fields.Integer(0, directions).check(unit["rank"], below(path, "rank"))


def _require_kept(units: Mapping[str, Any], where: str) -> None:
    """Checks that the kept units exist."""
    most = len(units["strength"])
    fields.Items(fields.Integer(0, most - 1), 0, most, unique=True).check(units["keep"], below(where, "keep"))


# `then` checks the lengths and ranges of these lists, which depend on the number of directions.
RANK, LATER = fields.Integer(0, fields.MAX_DIRECTIONS), fields.Items(fields.ANYTHING, 0, fields.MAX_DIRECTIONS)
HEAD = fields.Record({"rank": RANK, "keep": LATER, "strength": LATER, "why": fields.Text()})
UNIT = fields.Record({"rank": RANK, "strength": LATER, "why": fields.Text()})
STAYING = {
    name: fields.Record(
        {"keep": LATER, "strength": fields.Items(fields.Number(), 0, most), "why": fields.Text()}, then=_require_kept
    )
    for name, most in ((HEADS, fields.MAX_HEADS), (HIDDEN, fields.MAX_DIRECTIONS))
}
OUTPUT = fields.Record({"units": fields.Items(UNIT, 1, fields.MAX_HEADS)}, then=_require_units)
SCORES = fields.Record(
    {"directions": fields.Integer(0, fields.MAX_DIRECTIONS), "heads": fields.Items(HEAD, 0, fields.MAX_HEADS)},
    {"basis": fields.Record({"shared": fields.FLAG}, {"blocks": fields.Items(RANK, 1, fields.MAX_HEADS)})},
    then=_require_ranks,
)
LAYER = fields.Record({"qk": SCORES}, {**dict.fromkeys(OUTPUT_MAPS, OUTPUT), **STAYING})
POLICY = fields.Record(
    {"reasons": fields.Items(fields.Text(), 1, fields.MAX_LAYERS), "seed": fields.Integer(), "trained": fields.FLAG}
)


# `rules` has the text of the policy, and `tokens` what the text does not state.
def _require_tokens(record: Mapping[str, Any], where: str) -> None:
    """Checks that `rules.tokens` and `tokens` are either both given or both absent."""
    if (TOKENS in record["rules"]) != (TOKENS in record):
        here, there = ("rules.tokens", "tokens") if TOKENS in record["rules"] else ("tokens", "rules.tokens")
        raise Invalid(below(where, there), f"is missing, and {here} is given")


# The parts of PLAN: predictions over images, and the timing of the plan with its conditions (`PlanTimer.of_model`).
MEAN = fields.Record({"value": fields.Number(), "spread": fields.Number(0.0), "images": fields.Integer(1)})
LATENCY = fields.Record(
    {
        "faster": fields.Number(1e-6),
        "batch": fields.Integer(1, 2**20),
        "threads": fields.Integer(1, 2**16),
        "precision": fields.Text(),
        "clock": fields.Text(),
    },
    {"in_subprocess": fields.FLAG},
    open=True,  # what the check does not use is for readers
)
# The predictions of a plan (`Plan.predictions`), which the check `promises` of `verify` compares with measurements.
PLAN = fields.Record(
    {
        "expected": fields.Record({"divergence": MEAN}, dict.fromkeys(("agreement", "change"), MEAN)),
        "measured": fields.Optional(LATENCY),
    },
    open=True,
)
# The settings of fits beside their steps (`realization.fits`).
SEED, COUNT, RATE = fields.Integer(), fields.Integer(1, 10**6), fields.Number(1e-12, 1.0)
FIT_SETTINGS = fields.Record(
    more={
        "refine": fields.Record(open=True),  # of earlier versions, as below
        "repair": fields.Record(
            more={
                "learning_rate": RATE,
                "images": COUNT,
                "tokens": COUNT,
                "ridge": fields.Number(1e-30),
                "seed": SEED,
                "macs": fields.Optional(fields.Number(1e-30)),
            }
        ),
        "distill": fields.Record(
            more={"learning_rates": fields.Items(RATE, 1, 100), "batch": fields.Integer(2, 10**6), "seed": SEED}
        ),
    }
)
# The options of `attnrx realize`, which are used for the matched controls too, and the classes into which the original
# puts the images of the repair, for the check `shift`.
REALIZED = fields.Record(
    {
        "by": fields.Choice(REALIZATIONS),
        "norms": fields.Choice(REALIZED_NORMS),
        "calibration_images": fields.Integer(1),
    },
    {
        "refine": fields.Integer(0, 10**6),
        "repair": fields.Integer(0, 10**6),
        "distill": fields.Integer(0, 10**6),
        "classes": fields.Items(fields.Integer(0, 2**31 - 1), 0, fields.MAX_DIRECTIONS),
        "settings": FIT_SETTINGS,
    },
)

# Open: it has whatever the diagnosis and the plan recorded, of which these two fields are read again.
ABOUT = fields.Record(more={"plan": PLAN, "realized": REALIZED}, open=True)
RECORD: fields.Field = fields.Record(
    {
        "fingerprint": fields.Text(),
        "rules": fields.Record(more={**dict.fromkeys(LAYER_MAPS, fields.Text()), TOKENS: fields.Text(parse_policy)}),
        "about": ABOUT,
        "removed_share": fields.Number(0.0, 1.0),
        "layers": fields.Items(LAYER, 0, fields.MAX_LAYERS),
    },
    {TOKENS: POLICY, "tensors_sha256": fields.Text()},
    then=_require_tokens,
)
