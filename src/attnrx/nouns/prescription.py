"""Prescriptions, i.e. pruning plans with a reason for every decision, as plain data that you can review and store."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnrx.support import arguments as kinds
from attnrx.support.arguments import Invalid, below, checked
from attnrx.support.display import Displayed
from attnrx.support.errors import InvalidInput
from attnrx.support.records import MAX_DIRECTIONS, MAX_HEADS, MAX_LAYERS
from attnrx.support.shapes import Bool, Float, Int, Tensor
from attnrx.support.storage import (
    json_text,
    layer_tensors,
    read_with_tensors,
    require_fingerprint,
    tensors_below,
    write_with_tensors,
)
from attnrx.vit.maps import DEPTH, FITS, HEADS, HIDDEN, LAYER_MAPS, OUTPUT_MAPS, TOKENS, UNIT_MAPS
from attnrx.vit.spec import compression_of
from attnrx.vit.tokens import TokenPolicy, parse_policy

KIND, SCHEMA = "attnrx prescription", 5
# The fields in the safetensors file. The JSON file, which people read, has kept directions, ranks, strengths, reasons.
MATRICES = ("left", "right", "pairs", "encode", "decode", "center", "weight", "bias")


def _require(part: Displayed, fits: bool, rule: str) -> None:
    """Raises InvalidInput if `fits` is False. The message contains the rule and the shapes of all fields."""
    if not fits:
        raise InvalidInput(f"{part!r}: {rule}. Prescribe again, or correct the fields.")


def _lay_out(part: Any, *names: str) -> None:
    """Converts the named tensors to contiguous float64, so they are rounded in the same way as tensors from a file."""
    for name in names:  # the dataclass is frozen, so its own `__setattr__` raises an error
        object.__setattr__(part, name, getattr(part, name).detach().double().contiguous())


@dataclass(frozen=True, repr=False)
class Basis(Displayed):
    """New score directions of a layer, as linear combinations of the rows of its query and key projections.

    Direction r of owner h has the query row `left[h, r] @ query_rows` and the key row `right[h, r] @ key_rows`. If the
    heads have separate directions, owner h is head h. Shared directions have a single owner, and combine the
    concatenated rows of all heads. Neighbouring shared directions may form blocks, whose sizes are in `blocks`. A head
    keeps either all directions of a block or none, and all directions of a block have the same strength.

    If no direction is pruned, the attention scores equal the model's scores, unless the prescription's `about` records
    an approximation error. For rotary attention, `pairs` holds the index of the frequency that rotates each direction,
    or -1 for a direction that is not rotated. The unrotated directions come first, then the real parts of the pairs,
    then their imaginary parts.
    """

    left: Float[Tensor, "owners directions rows"]
    right: Float[Tensor, "owners directions rows"]
    shared: bool
    blocks: tuple[int, ...] | None = None
    pairs: Int[Tensor, "owners directions"] | None = None

    def __post_init__(self):
        divided = self.blocks is None or (self.shared and sum(self.blocks) == self.left.shape[1])
        _require(self, divided, "blocks must divide the shared directions among them")
        # Rows of query and key are paired, and direction r is the product of row r in both tables.
        paired = (
            self.left.ndim == 3 and self.left.shape == self.right.shape and (not self.shared or len(self.left) == 1)
        )
        rule = "left and right must have the same shape [owners, directions, rows], with one owner of shared directions"
        _require(self, paired, rule)
        _lay_out(self, "left", "right")


@dataclass(frozen=True, repr=False)
class OutputDecision(Displayed):
    """A low-rank decision, which replaces the outputs y of a map by decode @ encode @ (y - center) + center.

    The map is one of OUTPUT_MAPS. For "vo", y is the concatenation of all heads' value outputs, and every head is one
    unit. For an MLP map, y is the output of the map, and the map is the only unit. `encode` contains the kept
    directions of all units, with `ranks[unit]` rows for each unit. Each row of `encode` is nonzero only at the features
    of its own unit, but `decode` may combine all units. `strength` contains the strengths of all directions, kept or
    pruned, for plots of the spectrum.
    """

    ranks: tuple[int, ...]
    encode: Float[Tensor, "kept features"]
    decode: Float[Tensor, "outputs kept"]
    center: Float[Tensor, "outputs"]
    strength: Float[Tensor, "units directions"]
    reasons: tuple[str, ...]

    def __post_init__(self):
        kept = sum(self.ranks)
        fits = len(self.encode) == kept and self.decode.shape == (len(self.center), kept)
        _require(self, fits, f"encode, decode and center must fit the ranks, {kept} together")
        _lay_out(self, "encode", "decode", "center")


@dataclass(frozen=True, repr=False)
class ScoreDecision(Displayed):
    """The decision about "qk" (the query-key scores): the kept directions, their strengths, and a reason per head.

    `strength` holds the strengths after pruning. Most rules do not change them. A head that keeps no directions has
    uniform attention. The directions are the model's own, or the rows of `basis`.
    """

    keep: Bool[Tensor, "heads directions"]
    strength: Float[Tensor, "heads directions"]
    reasons: tuple[str, ...]
    basis: Basis | None = None

    def __post_init__(self):
        fits = self.keep.shape == self.strength.shape and len(self.reasons) == len(self.keep)
        _require(self, fits, "keep and strength must have the same shape, and every head one reason")
        if self.basis is None:
            return
        # `keep` always has a row per head, because heads may use different shared directions.
        owners = 1 if self.basis.shared else len(self.keep)
        fits = self.basis.left.shape[:2] == (owners, self.keep.shape[1])
        _require(self, fits, "the basis must have the directions of keep")
        # A block is one score map with one factor per head (mixed attention), so a part of it cannot be kept.
        if self.basis.blocks is not None:
            tables = self.keep, self.strength
            parts = [part for table in tables for part in table.split(self.basis.blocks, 1) if part.shape[1]]
            uniform = all(bool((part == part[:, :1]).all()) for part in parts)
            _require(self, uniform, "keep and strength must be the same within the blocks")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of kept directions per head."""
        return tuple(self.keep.sum(-1).tolist())

    @property
    def is_shared(self) -> bool:
        """Whether all heads use the same directions."""
        return self.basis is not None and self.basis.shared

    @property
    def directions(self) -> int:
        """The number of the layer's directions before pruning, including the padding of smaller heads.

        Shared directions count once.
        """
        if self.basis is not None and self.basis.shared:
            return self.basis.left.shape[2]
        return self.keep.numel()

    @property
    def kept(self) -> int:
        """The number of kept directions. A shared direction counts once."""
        return int(self.keep.any(0).sum() if self.is_shared else self.keep.sum())


@dataclass(frozen=True, repr=False)
class HeadDecision(Displayed):
    """The decision about "heads": which heads stay, and their strengths. A removed head outputs zero.

    If other heads compensate for the removed heads, the layer also has a decision about "vo", which refits the output
    projection.
    """

    keep: Bool[Tensor, "heads"]
    strength: Float[Tensor, "heads"]
    reasons: tuple[str, ...]

    def __post_init__(self):
        fits = self.keep.shape == self.strength.shape and len(self.reasons) == 1
        _require(self, fits, "keep and strength must have the same shape, with one reason")


@dataclass(frozen=True, repr=False)
class HiddenDecision(Displayed):
    """The decision about "hidden": which hidden units of the MLP stay, and the refitted linear map after them."""

    keep: Bool[Tensor, "units"]
    strength: Float[Tensor, "units"]
    weight: Float[Tensor, "outputs kept"]
    bias: Float[Tensor, "outputs"]
    reasons: tuple[str, ...]

    def __post_init__(self):
        fits = self.keep.shape == self.strength.shape and len(self.reasons) == 1
        fits = fits and self.weight.shape == (len(self.bias), int(self.keep.sum()))
        _require(self, fits, "keep and strength must have the same shape, weight the kept units, with one reason")
        _lay_out(self, "weight", "bias")


Decision = ScoreDecision | OutputDecision | HeadDecision | HiddenDecision


@dataclass(frozen=True, repr=False)
class LayerPrescription(Displayed):
    """The decisions about one layer, keyed by map. There is always a key "qk", and a key for every other reduced map.

    A removed head keeps no score directions.
    """

    decisions: Mapping[str, Decision]

    def __post_init__(self):
        known = {"qk"} <= self.decisions.keys() <= {*LAYER_MAPS}
        _require(self, known, f"there must be a decision about qk, and others only about {', '.join(LAYER_MAPS)}")
        # Removed heads are recorded twice: in `heads`, and as empty rows of qk. The two must agree.
        fits = self.heads.shape == self.qk.keep.shape[:1] and not bool(self.qk.keep[~self.heads].any())
        _require(self, fits, "the heads must be those of qk, and a removed head keeps no direction")

    @property
    def heads(self) -> Bool[Tensor, "heads"]:
        """The kept heads."""
        decision = self.decisions.get(HEADS)
        return decision.keep if isinstance(decision, HeadDecision) else torch.ones(len(self.qk.keep), dtype=torch.bool)

    @property
    def hidden(self) -> HiddenDecision | None:
        """The decision about "hidden", if any."""
        decision = self.decisions.get(HIDDEN)
        return decision if isinstance(decision, HiddenDecision) else None

    @property
    def qk(self) -> ScoreDecision:
        """The decision about "qk"."""
        decision = self.decisions["qk"]
        assert isinstance(decision, ScoreDecision)
        return decision

    def with_scores(self, decision: ScoreDecision) -> "LayerPrescription":
        """Returns the layer with another decision about "qk"."""
        return LayerPrescription({**self.decisions, "qk": decision})

    @property
    def outputs(self) -> dict[str, OutputDecision]:
        """The decisions about OUTPUT_MAPS."""
        return {name: decision for name, decision in self.decisions.items() if isinstance(decision, OutputDecision)}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are stored in the safetensors file, by name."""
        parts: dict[str, Any] = {**self.decisions, "qk": self.qk.basis}
        named = {f"{name}.{field}": getattr(part, field, None) for name, part in parts.items() for field in MATRICES}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True, eq=False, repr=False)
class TokenPrescription(Displayed):
    """The token policy and, for a learned token reducer, the weights of its trained predictors.

    `predictors` holds the weights of the predictors in all stages, with the names that they have in
    `TokenReduction.stages`. Without these weights, a learned token reducer is initialized from `seed` and must be
    trained.

    Raises:
        InvalidInput: `predictors` were given for a token reducer that has no trainable weights.
    """

    policy: TokenPolicy
    predictors: Mapping[str, Tensor] | None = None
    seed: int = 0

    def __post_init__(self):
        # Policies with the same text compare equal, even if one of them was fitted to a model.
        object.__setattr__(self, "policy", self.policy.written)
        if self.predictors is not None and not self.policy.reducer.learned:
            raise InvalidInput(f"{self.policy.reducer} learns nothing, and takes no weights of predictors.")

    @property
    def reasons(self) -> tuple[str, ...]:
        """One text per stage: what the stage does, and whether its selection of tokens must be trained."""
        state = "trained" if self.predictors is not None else f"fresh (seed {self.seed}), must be trained"
        # The reason must say that training is needed, because an untrained predictor selects tokens at random.
        untrained = self.policy.reducer.untrained_reason
        more = "" if untrained is None else f"; must be trained: {untrained}"
        if self.policy.reducer.learned:
            more = f"; its predictor is {state}"
        return tuple(reason + more for reason in self.policy.describe())

    @property
    def must_be_trained(self) -> bool:
        """Whether tokens are selected arbitrarily, because the predictors or halting scores are still untrained."""
        return self.policy.reducer.untrained_reason is not None and self.predictors is None


@dataclass(frozen=True, repr=False)
class DepthPrescription(Displayed):
    """The transformer blocks that are removed entirely. The tokens skip these blocks unchanged.

    `removed` holds the numbers of the removed blocks, in ascending order. The blocks of the original model are counted
    from 1, as in a token policy. `reasons` holds one reason for each removed block.

    Raises:
        InvalidInput: `removed` is empty, is not in ascending order, or contains a number below 1.
    """

    removed: tuple[int, ...]
    reasons: tuple[str, ...] = ()

    def __post_init__(self):
        ordered = bool(self.removed) and min(self.removed) > 0 and list(self.removed) == sorted({*self.removed})
        if not ordered:
            raise InvalidInput(f"depth={self}: give every block once, from 1 on and in their order, e.g. without:5,9.")
        reasons = self.reasons or tuple(f"block {number} is removed, as requested" for number in self.removed)
        object.__setattr__(self, "reasons", reasons)
        _require(self, len(reasons) == len(self.removed), "every removed block must have one reason")

    def __str__(self) -> str:
        return f"without:{','.join(map(str, self.removed))}"


def parse_depth(text: str) -> DepthPrescription:
    """Parses a list of blocks to remove, e.g. `without:5,9`.

    Raises:
        InvalidInput: The text is not such a list.
    """
    read = re.fullmatch(r"\s*without\s*:\s*(\d{1,6}(?:\s*,\s*\d{1,6})*)\s*", text)
    if read is None:
        raise InvalidInput(f"depth={text!r:.100}: name the blocks to remove, counted from 1, e.g. depth=without:5,9.")
    return DepthPrescription(tuple(sorted({int(number) for number in read[1].split(",")})))


@dataclass(frozen=True, repr=False)
class Prescription(Displayed):
    """The pruning decisions about all layers of one model, and the rules from which they follow.

    `rules` contains the rule of every prescribed map as text for `parse_rules`, including its metric. `tokens` is the
    prescribed token policy, or None. `depth` holds the blocks that are removed entirely, or is None. Decisions about
    the layers of removed blocks have no effect. `fingerprint` identifies the model, and `about` records the data and
    the settings.
    """

    example = "attnrx.prescribe(diagnosis, rules)"

    layers: tuple[LayerPrescription, ...]
    rules: Mapping[str, str]
    fingerprint: str
    about: Mapping[str, Any]
    tokens: TokenPrescription | None = None
    depth: DepthPrescription | None = None

    def __post_init__(self):
        # The rules for tokens and depth come only from the fields `tokens` and `depth`. So
        # `replace(prescription, tokens=...)` changes the rule, too.
        rules = {name: rule for name, rule in self.rules.items() if name not in (DEPTH, TOKENS)}
        if self.depth is not None:
            most = len(self.layers)
            if self.depth.removed[-1] > most or len(self.depth.removed) == most:
                raise InvalidInput(f"depth={self.depth} of a model of {most} blocks: remove some of 1 to {most}.")
            rules[DEPTH] = str(self.depth)
        if self.tokens is not None:
            rules[TOKENS] = str(self.tokens.policy)
        if self.tokens is not None and self.depth is not None:
            raise InvalidInput(
                f"depth={self.depth} and tokens in one prescription: the stages would move. Realize depth first, then "
                "prescribe tokens for the result."
            )
        object.__setattr__(self, "rules", rules)

    def __str__(self) -> str:
        """The rules as one text, from which `prescribe` reproduces the decisions."""
        return " ".join(f"{name}={rule}" for name, rule in self.rules.items())

    @property
    def kept_blocks(self) -> tuple[int, ...]:
        """The indices of the layers whose blocks stay."""
        removed = () if self.depth is None else self.depth.removed
        return tuple(index for index in range(len(self.layers)) if index + 1 not in removed)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The number of kept directions per layer and head."""
        return tuple(layer.qk.ranks for layer in self.layers)

    @property
    def removed_share(self) -> float:
        """The share of pruned score directions ("Dir. pruned" in the paper's tables).

        The share measures how much smaller the query and key projections become. A shared direction counts once,
        although every head computes scores with it. The query-key products may therefore cost more than before, so
        compare costs by their MACs (`Family.costs`).
        """
        total = sum(layer.qk.directions for layer in self.layers)
        return 1 - sum(layer.qk.kept for layer in self.layers) / total if total else 0.0

    @checked()
    def save(self, path: Path | str) -> Path:
        """Writes one JSON file whose floats are read back exactly.

        The tensors of bases, decisions and predictors are written to a safetensors file in the same folder
        (`storage.write_with_tensors`). Returns the path of the JSON file.

        Raises:
            InvalidInput: `about` contains a plan or settings that `load` would refuse.
        """
        try:
            ABOUT.check(json.loads(json_text(dict(self.about))), "about")
        except Invalid as error:
            raise InvalidInput(f"{error}: correct `about` of the prescription, whose file could not be read.") from None
        record = {
            "kind": KIND,
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "rules": dict(self.rules),
            "about": dict(self.about),
            "removed_share": self.removed_share,  # for readers, and so that `load` can check the layers
            "layers": [_to_record(layer) for layer in self.layers],
        }
        if self.tokens is not None:
            is_trained = self.tokens.predictors is not None
            record[TOKENS] = {"reasons": list(self.tokens.reasons), "seed": self.tokens.seed, "trained": is_trained}
        if self.depth is not None:
            record[DEPTH] = {"reasons": list(self.depth.reasons)}
        return write_with_tensors(path, record, self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        """Returns the tensors to store, by their names in the safetensors file."""
        tensors = layer_tensors(layer.tensors for layer in self.layers)
        if self.tokens is not None:
            # safetensors stores only contiguous tensors.
            learned = self.tokens.predictors or {}
            tensors |= {f"tokens.{name}": tensor.detach().contiguous() for name, tensor in learned.items()}
        return tensors

    @classmethod
    @checked()
    def load(cls, path: Path | str) -> "Prescription":
        """Reads a JSON file written by `save`, and its tensors, if any, from the same folder.

        Raises:
            CheckpointError: A file is missing, damaged or edited, or is not a prescription.
        """
        return read_with_tensors(path, KIND, SCHEMA, RECORD, Prescription._of_file, Prescription._tensors)

    @classmethod
    def _of_file(cls, record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "Prescription":
        parts, tokens = (tensors_below(f"layers.{index}.", tensors) for index in range(len(record["layers"]))), None
        layers = tuple(map(_from_record, record["layers"], parts))
        if TOKENS in record:
            facts, policy = record[TOKENS], parse_policy(record["rules"][TOKENS])
            learned = tensors_below("tokens.", tensors) if facts["trained"] else None
            tokens = TokenPrescription(policy, learned, facts["seed"])
        depth = parse_depth(record["rules"][DEPTH]) if DEPTH in record else None
        if depth is not None:
            depth = DepthPrescription(depth.removed, tuple(record[DEPTH]["reasons"]))
        loaded = cls(layers, record["rules"], record["fingerprint"], record["about"], tokens, depth)
        # `removed_share` follows from the layers, so it reveals a layer that was edited by hand.
        if abs(loaded.removed_share - record["removed_share"]) > 1e-9:
            raise InvalidInput(
                f"removed_share is {record['removed_share']}, its layers give {loaded.removed_share}; the file "
                "was edited or damaged, make it again."
            )
        return loaded

    @checked()
    def require(self, fingerprint: str, what: str) -> None:
        """Checks that the prescription belongs to a model.

        Args:
            fingerprint: The fingerprint of the model.
            what: How the error message names the model.

        Raises:
            FingerprintMismatch: The prescription belongs to another model.
        """
        advice = "diagnose and prescribe that model, or realize the prescription on its own"
        require_fingerprint(self.fingerprint, fingerprint, "the prescription was made for", what, advice)


# The file format: fields, their valid values, and the conversion of layers --------------------------------------------


# A file may come from anyone. The sizes in its fields are checked before tensors of these sizes are allocated.
def _require_ranks(scores: Mapping[str, Any], where: str) -> None:
    """Checks that every head's kept directions, strengths and rank are consistent with each other."""
    directions = scores["directions"]
    keep = kinds.each(kinds.whole(0, directions - 1), most=directions, unique=True)  # indices, in any order
    strength = kinds.each(kinds.finite(), least=directions, most=directions)
    for index, head in enumerate(scores["heads"]):
        path = f"{below(where, 'heads')}[{index}]"
        keep.check(head["keep"], below(path, "keep"))
        strength.check(head["strength"], below(path, "strength"))
        if head["rank"] != len(head["keep"]):
            raise Invalid(below(path, "rank"), f"is {head['rank']}, and keep has {len(head['keep'])} directions")


def _require_units(output: Mapping[str, Any], where: str) -> None:
    """Checks that all units of a map have the same number of directions, and that no rank exceeds this number."""
    # The units become a table [units, directions], so all rows need the same length.
    directions = len(output["units"][0]["strength"])
    for index, unit in enumerate(output["units"]):
        path = f"{below(where, 'units')}[{index}]"
        kinds.each(kinds.finite(), least=directions, most=directions).check(unit["strength"], below(path, "strength"))
        kinds.whole(0, directions).check(unit["rank"], below(path, "rank"))


def _require_kept(units: Mapping[str, Any], where: str) -> None:
    """Checks that the kept units exist."""
    most = len(units["strength"])
    kinds.each(kinds.whole(0, most - 1), most=most, unique=True).check(units["keep"], below(where, "keep"))


# `then` checks the lengths and ranges of these lists, because they depend on the number of directions.
RANK, LATER = kinds.whole(0, MAX_DIRECTIONS), kinds.each(kinds.ANY, most=MAX_DIRECTIONS)
HEAD = kinds.record({"rank": RANK, "keep": LATER, "strength": LATER, "why": kinds.ANY_TEXT})
UNIT = kinds.record({"rank": RANK, "strength": LATER, "why": kinds.ANY_TEXT})
STAYING = {
    name: kinds.record(
        {"keep": LATER, "strength": kinds.each(kinds.finite(), most=most), "why": kinds.ANY_TEXT}, then=_require_kept
    )
    for name, most in ((HEADS, MAX_HEADS), (HIDDEN, MAX_DIRECTIONS))
}
OUTPUT = kinds.record({"units": kinds.each(UNIT, least=1, most=MAX_HEADS)}, then=_require_units)
SCORES = kinds.record(
    {"directions": kinds.whole(0, MAX_DIRECTIONS), "heads": kinds.each(HEAD, most=MAX_HEADS)},
    {"basis": kinds.record({"shared": kinds.FLAG}, {"blocks": kinds.each(RANK, least=1, most=MAX_HEADS)})},
    then=_require_ranks,
)
LAYER = kinds.record({"qk": SCORES}, {**dict.fromkeys(OUTPUT_MAPS, OUTPUT), **STAYING})
REMOVED = kinds.record({"reasons": kinds.each(kinds.ANY_TEXT, least=1, most=MAX_LAYERS)})
POLICY = kinds.record(
    {"reasons": kinds.each(kinds.ANY_TEXT, least=1, most=MAX_LAYERS), "seed": kinds.SEED, "trained": kinds.FLAG}
)


# `rules` holds the token policy and the removed blocks as text. The fields `tokens` and `depth` hold everything else.
def _require_both(record: Mapping[str, Any], where: str) -> None:
    """Checks that "tokens" and "depth" each appear both in `rules` and as a field of the record, or in neither."""
    for name in (TOKENS, DEPTH):
        if (name in record["rules"]) != (name in record):
            here, there = (f"rules.{name}", name) if name in record["rules"] else (name, f"rules.{name}")
            raise Invalid(below(where, there), f"is missing, and {here} is given")


# The parts of PLAN: predictions over images, and the timing of the plan with its conditions (`PlanTimer.timing`).
MEAN = kinds.record({"value": kinds.finite(), "spread": kinds.finite(0.0), "images": kinds.whole(1, kinds.LARGEST)})
LATENCY = kinds.record(
    {
        "faster": kinds.finite(1e-6),
        "batch": kinds.whole(1, 2**20),
        "threads": kinds.whole(1, 2**16),
        "precision": kinds.ANY_TEXT,
        "clock": kinds.ANY_TEXT,
    },
    {"in_subprocess": kinds.FLAG},
    open=True,  # other fields are for readers, and the check does not use them
)
# The predictions of a plan (`Plan.predictions`), which the check `promises` of `verify` compares with measurements.
PREDICTIONS = {
    "expected": kinds.record({"divergence": MEAN}, dict.fromkeys(("agreement", "change"), MEAN)),
    "measured": kinds.optional(LATENCY),
}
PLAN = kinds.record(PREDICTIONS, open=True)
# The settings of fits, in addition to their steps (`realization.realizing.fits_record`). The fits validate their
# settings themselves (`Repair`, `Distill`).
FIT_SETTINGS = kinds.record(more=dict.fromkeys(FITS, kinds.JSON_OBJECT))
# The options of `attnrx realize`, which the matched controls use, too. For the check `shift`, `classes` are the classes
# that the original predicts for the repair's images.
REALIZED = kinds.record(
    {"by": kinds.parsed(compression_of), "calibration_images": kinds.whole(1, kinds.LARGEST)},
    {
        "repair": kinds.whole(0, 10**6),
        "distill": kinds.whole(0, 10**6),
        "classes": kinds.each(kinds.whole(0, 2**31 - 1), most=MAX_DIRECTIONS),
        "settings": FIT_SETTINGS,
    },
)

# ABOUT is open, so it may contain all that the diagnosis and the plan recorded. Only two of its fields are read again.
RULE_TEXTS = dict.fromkeys(LAYER_MAPS, kinds.ANY_TEXT)
RULE_TEXTS |= {TOKENS: kinds.parsed(parse_policy), DEPTH: kinds.parsed(parse_depth)}
ABOUT = kinds.record(more={"plan": PLAN, "realized": REALIZED}, open=True)
RECORD = kinds.record(
    {
        "fingerprint": kinds.ANY_TEXT,
        "rules": kinds.record(more=RULE_TEXTS),
        "about": ABOUT,
        "removed_share": kinds.finite(0.0, 1.0),
        "layers": kinds.each(LAYER, most=MAX_LAYERS),
    },
    {TOKENS: POLICY, DEPTH: REMOVED, "tensors_sha256": kinds.ANY_TEXT},
    then=_require_both,
)


def _to_record(layer: LayerPrescription) -> dict[str, Any]:
    qk = layer.qk
    rows = zip(qk.ranks, qk.keep, qk.strength, qk.reasons, strict=True)
    # Kept directions and units are stored by index, which is shorter than a mask, and people can read it.
    heads = [
        {"rank": rank, "keep": torch.nonzero(keep).flatten().tolist(), "strength": strength.tolist(), "why": why}
        for rank, keep, strength, why in rows
    ]
    record: dict[str, Any] = {"qk": {"directions": qk.keep.shape[1], "heads": heads}}
    if qk.basis is not None:
        blocks = {} if qk.basis.blocks is None else {"blocks": list(qk.basis.blocks)}
        record["qk"]["basis"] = {"shared": qk.basis.shared, **blocks}
    for name, output in layer.outputs.items():
        units = zip(output.ranks, output.strength.tolist(), output.reasons, strict=True)
        record[name] = {"units": [{"rank": rank, "strength": strength, "why": why} for rank, strength, why in units]}
    for name in UNIT_MAPS:
        units = layer.decisions.get(name)
        if isinstance(units, HeadDecision | HiddenDecision):
            keep, strength = torch.nonzero(units.keep).flatten().tolist(), units.strength.tolist()
            record[name] = {"keep": keep, "strength": strength, "why": units.reasons[0]}
    return record


def _from_record(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LayerPrescription:
    decisions: dict[str, Decision] = {"qk": _scores(record["qk"], tensors)}
    for name in (name for name in OUTPUT_MAPS if name in record):
        units, parts = record[name]["units"], tensors_below(f"{name}.", tensors)
        ranks, reasons = (tuple(unit[field] for unit in units) for field in ("rank", "why"))
        strength = torch.tensor([unit["strength"] for unit in units], dtype=torch.float64)
        factors = parts["encode"], parts["decode"], parts["center"]
        decisions[name] = OutputDecision(ranks, *factors, strength, reasons)
    if HEADS in record:
        decisions[HEADS] = HeadDecision(*_units(record[HEADS]), (record[HEADS]["why"],))
    if HIDDEN in record:
        refit = tensors["hidden.weight"], tensors["hidden.bias"]
        decisions[HIDDEN] = HiddenDecision(*_units(record[HIDDEN]), *refit, (record[HIDDEN]["why"],))
    return LayerPrescription(decisions)


def _units(record: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns which units stay, and their strengths."""
    strength = torch.tensor(record["strength"], dtype=torch.float64)
    keep = torch.zeros(len(strength), dtype=torch.bool)
    keep[record["keep"]] = True
    return keep, strength


def _scores(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ScoreDecision:
    heads = record["heads"]
    keep = torch.zeros(len(heads), record["directions"], dtype=torch.bool)
    for row, head in zip(keep, heads, strict=True):
        row[head["keep"]] = True
    # JSON stores the shortest text of a float64, and reading it returns exactly the same float64.
    strength = torch.tensor([head["strength"] for head in heads], dtype=torch.float64)
    facts, basis = record.get("basis"), None
    if facts is not None:
        blocks = tuple(facts["blocks"]) if "blocks" in facts else None
        basis = Basis(tensors["qk.left"], tensors["qk.right"], facts["shared"], blocks, tensors.get("qk.pairs"))
    # If a layer has no heads or directions, the list is empty and has no shape, so the shape is restored.
    return ScoreDecision(keep, strength.reshape(keep.shape), tuple(head["why"] for head in heads), basis)
