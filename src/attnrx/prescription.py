"""What a model can do without: plain data that can be read, compared, reviewed and stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnrx.errors import CheckpointError, FingerprintMismatch, InvalidInput
from attnrx.shapes import Bool, Float, Tensor
from attnrx.storage import check_schema, read_json, read_tensors_of, require_finite, write_with_tensors
from attnrx.tokens import TokenPolicy, parse_policy
from attnrx.validation import (
    MOST_DIRECTIONS,
    MOST_HEADS,
    MOST_LAYERS,
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
    shown,
    validated,
)

KIND, SCHEMA = "attnrx prescription", 4

LINEAR_MAPS = ("fc1", "fc2")
"""The two linear maps of an MLP, in their order."""

OUTPUT_MAPS = ("vo", *LINEAR_MAPS)
"""Maps that are reduced by their outputs: the value rows with the output projection, and those of the MLP."""

LAYER_MAPS = ("qk", *OUTPUT_MAPS)
"""The maps of a layer that rules decide about; "qk" are the query rows with the key rows of every head."""

TOKENS = "tokens"
MAPS = (*LAYER_MAPS, TOKENS)
"""Everything that a prescription holds a decision about, by the names of its text form."""


def _lay_out(part: Any, *fields: str) -> None:
    """Stores the tensors as a file would give them back: products of other layouts are rounded otherwise."""
    for field in fields:
        object.__setattr__(part, field, getattr(part, field).detach().double().contiguous())


@dataclass(frozen=True)
class Basis:
    """The directions that a decision is about, where they are not the model's own: combinations of its rows.

    New row r of owner h is left[h, r] @ the stored query rows, right[h, r] @ the stored key rows. Where every head owns
    its directions, the rows are those of head h; directions that all heads share (one owner) combine the rows of all
    heads, one head after the other. Before anything is removed the scores are those of the model, unless the basis
    says how near they are (`about` of the prescription).
    """

    left: Float[Tensor, "owners directions rows"]
    right: Float[Tensor, "owners directions rows"]
    shared: bool

    def __post_init__(self):
        if self.left.ndim != 3 or self.left.shape != self.right.shape or (self.shared and len(self.left) != 1):
            owners = "one owner, as the directions are shared" if self.shared else "one owner per head"
            raise InvalidInput(
                f"the basis has left {tuple(self.left.shape)} and right {tuple(self.right.shape)}: give both the same "
                f"shape [owners, directions, rows], with {owners}."
            )
        _lay_out(self, "left", "right")


@dataclass(frozen=True)
class OutputDecision:
    """The decision about one of OUTPUT_MAPS: its outputs y become decode @ encode @ (y - center) + center.

    For the values of a layer y is what its heads read out, one head after the other; for a map of the MLP it is the
    map's result, a single unit. `encode` holds the kept directions of every unit, `ranks[unit]` of them, one unit
    after the other; they see their own unit only, while `decode` may use all. `strength` are the strengths of all
    directions, kept or not, for whoever wants to see the spectrum.
    """

    ranks: tuple[int, ...]
    encode: Float[Tensor, "kept features"]
    decode: Float[Tensor, "outputs kept"]
    center: Float[Tensor, "outputs"]
    strength: Float[Tensor, "units directions"]
    reasons: tuple[str, ...]

    def __post_init__(self):
        kept = sum(self.ranks)
        if self.encode.shape[0] != kept or self.decode.shape != (len(self.center), kept):
            raise InvalidInput(
                f"encode {tuple(self.encode.shape)}, decode {tuple(self.decode.shape)} and center "
                f"{tuple(self.center.shape)} do not fit the ranks {self.ranks}."
            )
        _lay_out(self, "encode", "decode", "center")


@dataclass(frozen=True)
class ScoreDecision:
    """The decision about "qk": the directions that stay, their strengths, the heads that stay, and a reason per head.

    `strength` is what the kept directions get (their old one unless the rule changes it). A head that stays with no
    directions attends uniformly; a head that does not stay outputs nothing. The directions are the model's own, or
    those of a `basis`.
    """

    keep: Bool[Tensor, "heads directions"]
    strength: Float[Tensor, "heads directions"]
    heads: Bool[Tensor, "heads"]
    reasons: tuple[str, ...]
    basis: Basis | None = None

    def __post_init__(self):
        if self.keep.shape != self.strength.shape or self.heads.shape[0] != self.keep.shape[0]:
            raise InvalidInput(
                f"keep {tuple(self.keep.shape)}, strength {tuple(self.strength.shape)} and "
                f"heads {tuple(self.heads.shape)} disagree."
            )
        if len(self.reasons) != self.keep.shape[0]:
            raise InvalidInput(f"{len(self.reasons)} reasons for {self.keep.shape[0]} heads: give one each.")
        owners = 1 if self.is_shared else self.keep.shape[0]
        if self.basis is not None and self.basis.left.shape[:2] != (owners, self.keep.shape[1]):
            raise InvalidInput(
                f"a basis of shape {tuple(self.basis.left.shape)} does not fit keep {tuple(self.keep.shape)}, "
                f"whose directions have {owners} owners."
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The directions that each head keeps; a removed head keeps none."""
        return tuple((self.keep & self.heads[:, None]).sum(-1).tolist())

    @property
    def is_shared(self) -> bool:
        """Whether all heads use the same directions."""
        return self.basis is not None and self.basis.shared

    @property
    def directions(self) -> int:
        """The directions of the layer before anything is removed, padding of ragged heads included.

        Directions that all heads share replace those of all heads, whose rows they combine.
        """
        if self.basis is not None and self.basis.shared:
            return self.basis.left.shape[2]
        return self.keep.numel()

    @property
    def kept(self) -> int:
        """The directions that stay; one that several heads share is one direction."""
        staying = self.keep & self.heads[:, None]
        return int(staying.any(0).sum() if self.is_shared else staying.sum())


Decision = ScoreDecision | OutputDecision


@dataclass(frozen=True)
class LayerPrescription:
    """The decisions about one layer, by map: "qk" always, and those of OUTPUT_MAPS that are reduced."""

    decisions: Mapping[str, Decision]

    def __post_init__(self):
        unknown = [name for name in self.decisions if name not in LAYER_MAPS]
        if unknown or "qk" not in self.decisions:
            raise InvalidInput(
                f"a layer was given decisions about {', '.join(self.decisions) or 'nothing'}: give one about qk, and "
                f"others about {', '.join(OUTPUT_MAPS)}."
            )

    @property
    def qk(self) -> ScoreDecision:
        """The decision about the scores."""
        found = self.decisions["qk"]
        assert isinstance(found, ScoreDecision)
        return found

    def with_scores(self, decision: ScoreDecision) -> "LayerPrescription":
        """Returns the layer with another decision about qk."""
        return LayerPrescription({**self.decisions, "qk": decision})

    @property
    def outputs(self) -> dict[str, OutputDecision]:
        """The decisions about maps that are reduced by their outputs."""
        return {name: found for name, found in self.decisions.items() if isinstance(found, OutputDecision)}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is stored beside the JSON file, by name."""
        basis = self.qk.basis
        found = {} if basis is None else {"qk.left": basis.left, "qk.right": basis.right}
        for name, output in self.outputs.items():
            found |= {f"{name}.{field}": getattr(output, field) for field in ("encode", "decode", "center")}
        return found


@dataclass(frozen=True, eq=False)
class TokenPrescription:
    """Which tokens leave on their way through the model: the policy, one reason per stage, and what was learned.

    `predictors` are the weights of the stages by name, as `TokenReduction.stages` holds them; without any, a learned
    reducer begins with fresh ones, drawn from `seed`, which must be trained.
    """

    policy: TokenPolicy
    reasons: tuple[str, ...]
    predictors: Mapping[str, Tensor] | None = None
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "policy", self.policy.written)
        stages = len(self.policy.describe())
        if len(self.reasons) != stages:
            raise InvalidInput(f"{len(self.reasons)} reasons for {stages} stages: give one each.")
        if self.predictors is not None and not self.policy.reducer.learned:
            raise InvalidInput(f"{self.policy.reducer} learns nothing, and takes no weights of predictors.")

    @classmethod
    def of(
        cls, policy: TokenPolicy, predictors: Mapping[str, Tensor] | None = None, seed: int = 0
    ) -> "TokenPrescription":
        """Says why for every stage."""
        learned = policy.reducer.learned
        state = "trained" if predictors is not None else f"fresh (seed {seed}), must be trained"
        describe = f"; its predictor is {state}" if learned else ""
        return cls(policy, tuple(reason + describe for reason in policy.describe()), predictors, seed)

    @property
    def must_be_trained(self) -> bool:
        """Whether it decides with predictors that have learned nothing yet."""
        return self.policy.reducer.learned and self.predictors is None


@dataclass(frozen=True)
class Prescription:
    """Every layer of the model with this fingerprint, the rules that decided, and the data they decided on.

    `rules` holds the rule of every map that is prescribed, as the text from which `parse_rules` makes it, with the
    metric that it decided in. `tokens` is the prescribed token policy, or None.
    """

    layers: tuple[LayerPrescription, ...]
    rules: Mapping[str, str]
    fingerprint: str
    about: Mapping[str, Any]
    tokens: TokenPrescription | None = None

    def __post_init__(self):
        rules = {name: rule for name, rule in self.rules.items() if name != TOKENS}
        if self.tokens is not None:
            rules[TOKENS] = str(self.tokens.policy)
        object.__setattr__(self, "rules", rules)

    def __str__(self) -> str:
        """The rules as one text, from which `prescribe` decides the same again."""
        return " ".join(f"{name}={rule}" for name, rule in self.rules.items())

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Kept directions per layer and head."""
        return tuple(layer.qk.ranks for layer in self.layers)

    @property
    def removed_share(self) -> float:
        """The share of all score directions that is removed ("Dir. pruned" in the paper's tables).

        It says how much smaller the query and key projections become. A direction that all heads share counts once,
        though every head computes scores with it, so the products of queries and keys may cost more than before:
        compare forms by their MACs (`Family.costs`).
        """
        total = sum(layer.qk.directions for layer in self.layers)
        return 1 - sum(layer.qk.kept for layer in self.layers) / total if total else 0.0

    @property
    def is_rewritten(self) -> bool:
        """Whether any decision is about other directions than the model's own, or about another map than the scores."""
        return any(layer.tensors for layer in self.layers)

    def save(self, path: Path | str) -> Path:
        """Writes one JSON file; floats are written so that they read back bit for bit.

        Where there are bases, or weights of predictors, they go into a safetensors file beside it
        (`storage.write_with_tensors`).
        """
        record = {
            "kind": KIND,
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "rules": dict(self.rules),
            "about": dict(self.about),
            "removed_share": self.removed_share,
            "layers": [_to_record(layer) for layer in self.layers],
        }
        if self.tokens is not None:
            record[TOKENS] = _tokens_record(self.tokens)
        tensors = {
            f"layers.{index}.{name}": tensor
            for index, layer in enumerate(self.layers)
            for name, tensor in layer.tensors.items()
        }
        if self.tokens is not None:
            learned = self.tokens.predictors or {}
            tensors |= {f"tokens.{name}": tensor.detach().contiguous() for name, tensor in learned.items()}
        return write_with_tensors(path, record, tensors)

    @classmethod
    def load(cls, path: Path | str) -> "Prescription":
        """Reads what `save` wrote."""
        path = Path(path)
        record = read_json(path)
        check_schema(record, KIND, SCHEMA, path)
        validated(record, RECORD, path)
        tensors = read_tensors_of(path, record)
        require_finite(tensors, f"the tensors beside {path}")
        try:
            layers = tuple(
                _from_record(layer, _beginning_with(f"layers.{index}.", tensors))
                for index, layer in enumerate(record["layers"])
            )
            tokens = _tokens_from_record(record, tensors)
        except KeyError as error:
            raise CheckpointError(f"{path} needs the tensor {error}, which is not beside it; make it again.") from None
        except InvalidInput as error:
            raise CheckpointError(f"{path} and the tensors beside it disagree: {error}") from error
        found = cls(layers, record["rules"], record["fingerprint"], record["about"], tokens)
        if abs(found.removed_share - record["removed_share"]) > 1e-9:
            raise CheckpointError(
                f"{path}: removed_share is {record['removed_share']}, its layers give {found.removed_share}; the file "
                "was edited or damaged, make it again."
            )
        return found

    def require(self, fingerprint: str) -> None:
        """Refuses to be realized on another model."""
        if self.fingerprint != fingerprint:
            raise FingerprintMismatch(
                f"the prescription was made for the model {self.fingerprint}, this model is {fingerprint}; "
                "diagnose and prescribe this model, or realize the prescription on its own."
            )


def _tokens_record(tokens: TokenPrescription) -> dict[str, Any]:
    return {
        "reasons": list(tokens.reasons),
        "seed": tokens.seed,
        "trained": tokens.predictors is not None,
    }


def _tokens_from_record(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TokenPrescription | None:
    if TOKENS not in record:
        return None
    tokens, policy = record[TOKENS], parse_policy(record["rules"][TOKENS])
    learned = _beginning_with("tokens.", tensors) if tokens["trained"] else None
    return TokenPrescription(policy, tuple(tokens["reasons"]), learned, tokens["seed"])


def _to_record(layer: LayerPrescription) -> dict[str, Any]:
    outputs = {name: _output_record(output) for name, output in layer.outputs.items()}
    return {"qk": _score_record(layer.qk), **outputs}


def _score_record(decision: ScoreDecision) -> dict[str, Any]:
    record: dict[str, Any] = {
        "directions": decision.keep.shape[1],
        "heads": [
            {
                "stays": bool(stays),
                "rank": rank,
                "keep": torch.nonzero(keep).flatten().tolist(),
                "strength": strength.tolist(),
                "why": why,
            }
            for stays, rank, keep, strength, why in zip(
                decision.heads, decision.ranks, decision.keep, decision.strength, decision.reasons, strict=True
            )
        ],
    }
    return record if decision.basis is None else record | {"basis": {"shared": decision.basis.shared}}


def _output_record(output: OutputDecision) -> dict[str, Any]:
    strengths = output.strength.tolist()
    units = zip(output.ranks, strengths, output.reasons, strict=True)
    return {"units": [{"rank": rank, "strength": strength, "why": why} for rank, strength, why in units]}


def _beginning_with(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _from_record(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LayerPrescription:
    decisions: dict[str, Decision] = {"qk": _scores(record["qk"], tensors)}
    for name in OUTPUT_MAPS:
        if name in record:
            decisions[name] = _output(record[name], _beginning_with(f"{name}.", tensors))
    return LayerPrescription(decisions)


def _scores(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ScoreDecision:
    heads = record["heads"]
    keep = torch.zeros(len(heads), record["directions"], dtype=torch.bool)
    for row, head in zip(keep, heads, strict=True):
        row[head["keep"]] = True
    strength = torch.tensor([head["strength"] for head in heads], dtype=torch.float64)
    stays = torch.tensor([head["stays"] for head in heads], dtype=torch.bool)
    reasons = tuple(head["why"] for head in heads)
    basis = Basis(tensors["qk.left"], tensors["qk.right"], **record["basis"]) if "basis" in record else None
    return ScoreDecision(keep, strength.reshape(keep.shape), stays, reasons, basis)


def _output(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> OutputDecision:
    units = record["units"]
    return OutputDecision(
        tuple(unit["rank"] for unit in units),
        tensors["encode"],
        tensors["decode"],
        tensors["center"],
        torch.tensor([unit["strength"] for unit in units], dtype=torch.float64),
        tuple(unit["why"] for unit in units),
    )


def _require_ranks(scores: Mapping[str, Any], where: str) -> None:
    """Checks what the fields must agree on: directions, and the rank of every head."""
    directions = scores["directions"]
    keep = Items(Integer(0, directions - 1), 0, directions, unique=True)
    strength = Items(Number(), directions, directions)
    for index, head in enumerate(scores["heads"]):
        place = f"{below(where, 'heads')}[{index}]"
        keep.check(head["keep"], below(place, "keep"))
        strength.check(head["strength"], below(place, "strength"))
        rank = len(head["keep"]) if head["stays"] else 0
        if head["rank"] != rank:
            kept = f"keep has {len(head['keep'])} directions and stays is {shown(head['stays'])}"
            raise Invalid(below(place, "rank"), f"is {head['rank']}; {kept}, so it must be {rank}")


def _require_units(output: Mapping[str, Any], where: str) -> None:
    """Checks that all units of a map have as many directions, and no rank above that."""
    directions = len(output["units"][0]["strength"])
    for index, unit in enumerate(output["units"]):
        place = f"{below(where, 'units')}[{index}]"
        Items(Number(), directions, directions).check(unit["strength"], below(place, "strength"))
        Integer(0, directions).check(unit["rank"], below(place, "rank"))


# How long lists are and how large their numbers, `then` checks: it depends on the number of directions.
RANK, LATER = Integer(0, MOST_DIRECTIONS), Items(Anything(), 0, MOST_DIRECTIONS)
HEAD = Record({"stays": Flag(), "rank": RANK, "keep": LATER, "strength": LATER, "why": Text()})
UNIT = Record({"rank": RANK, "strength": LATER, "why": Text()})
OUTPUT = Record({"units": Items(UNIT, 1, MOST_HEADS)}, then=_require_units)
SCORES = Record(
    {"directions": Integer(0, MOST_DIRECTIONS), "heads": Items(HEAD, 0, MOST_HEADS)},
    {"basis": Record({"shared": Flag()})},
    then=_require_ranks,
)
LAYER = Record({"qk": SCORES}, dict.fromkeys(OUTPUT_MAPS, OUTPUT))
POLICY = Record({"reasons": Items(Text(), 1, MOST_LAYERS), "seed": Integer(), "trained": Flag()})


def _require_tokens(record: Mapping[str, Any], where: str) -> None:
    """Checks that a policy comes with its reasons, and reasons with their policy."""
    if (TOKENS in record["rules"]) != (TOKENS in record):
        here, there = ("rules.tokens", "tokens") if TOKENS in record["rules"] else ("tokens", "rules.tokens")
        raise Invalid(below(where, there), f"is missing, and {here} is given")


MEAN = Record({"value": Number(), "spread": Number(0.0), "images": Integer(1)})
LATENCY = Record(
    {
        "ratio": Number(1e-6),
        "batch": Integer(1, 2**20),
        "threads": Integer(1, 2**16),
        "precision": Text(),
        "clock": Text(),
    },
    {"in_subprocess": Flag()},
    open=True,
)
# What a plan predicted (`Plan.promises`), which the check `promises` of `verify` compares with what it measures.
PLAN = Record(
    {
        "expected": Record(dict.fromkeys(("divergence", "agreement"), MEAN), {"change": MEAN}),
        "measured": Optional(LATENCY),
    },
    open=True,
)
# The options of `attnrx realize`, with which the matched controls are realized.
REALIZED = Record(
    {
        "by": Choice(("compress", "mask")),
        "norms": Choice(("renormalized", "exact", "refit")),
        "refine": Integer(0, 10**6),
        "calibration_images": Integer(1),
    }
)

RECORD: Field = Record(
    {
        "kind": Choice((KIND,)),
        "schema": Choice((SCHEMA,)),
        "fingerprint": Text(),
        "rules": Record(more={**dict.fromkeys(LAYER_MAPS, Text()), TOKENS: Text(parse_policy)}),
        "about": Record(more={"plan": PLAN, "realized": REALIZED}, open=True),
        "removed_share": Number(0.0, 1.0),
        "layers": Items(LAYER, 0, MOST_LAYERS),
    },
    {TOKENS: POLICY, "tensors_sha256": Text()},
    then=_require_tokens,
)
