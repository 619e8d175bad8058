"""Prescriptions: the pruning plan of a model with its reasons, as plain data that can be reviewed and stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnrx.display import Displayed
from attnrx.errors import CheckpointError, FingerprintMismatch, InvalidInput
from attnrx.maps import HEADS, LAYER_MAPS, OUTPUT_MAPS, TOKENS
from attnrx.serialization import validation as fields
from attnrx.serialization.storage import (
    check_schema,
    read_json,
    read_tensors_of,
    require_finite_tensors,
    write_with_tensors,
)
from attnrx.shapes import Bool, Float, Tensor
from attnrx.tokens import TokenPolicy, parse_policy

KIND, SCHEMA = "attnrx prescription", 5
OUTPUT_TENSORS = ("encode", "decode", "center")


def _lay_out(part: Any, *fields: str) -> None:
    """Converts the tensors to contiguous float64, as after saving and loading, so that products round identically."""
    for field in fields:
        object.__setattr__(part, field, getattr(part, field).detach().double().contiguous())


@dataclass(frozen=True, repr=False)
class Basis(Displayed):
    """New directions of a decision, as linear combinations of the model's rows.

    New row r of owner h is left[h, r] @ the stored query rows, and right[h, r] @ the stored key rows. If every head
    owns its directions, the rows are those of head h; shared directions (one owner) combine the rows of all heads,
    concatenated. Without pruning the scores equal those of the model, unless `about` of the prescription records an
    approximation error.
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


@dataclass(frozen=True, repr=False)
class OutputDecision(Displayed):
    """The decision about one of OUTPUT_MAPS: its outputs y become decode @ encode @ (y - center) + center.

    For "vo", y is the concatenation of the value outputs of the heads, one unit per head; for a map of the MLP it is
    the output of the map, a single unit. `encode` holds the kept directions of every unit, `ranks[unit]` rows each,
    concatenated; each row is nonzero on its own unit only, while `decode` may combine all. `strength` are the strengths
    of all directions, kept or pruned, for plots of the spectrum.
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
        _lay_out(self, *OUTPUT_TENSORS)


@dataclass(frozen=True, repr=False)
class ScoreDecision(Displayed):
    """The decision about "qk": the kept directions, their strengths, and a reason per head.

    `strength` is the new strength of the kept directions (unchanged for most rules). A head without directions has
    uniform attention. The directions are the model's own, or those of `basis`.
    """

    keep: Bool[Tensor, "heads directions"]
    strength: Float[Tensor, "heads directions"]
    reasons: tuple[str, ...]
    basis: Basis | None = None

    def __post_init__(self):
        if self.keep.shape != self.strength.shape or len(self.reasons) != self.keep.shape[0]:
            raise InvalidInput(
                f"keep {tuple(self.keep.shape)}, strength {tuple(self.strength.shape)} and {len(self.reasons)} reasons "
                "disagree: give one of each for every head."
            )
        owners = 1 if self.is_shared else self.keep.shape[0]
        if self.basis is not None and self.basis.left.shape[:2] != (owners, self.keep.shape[1]):
            raise InvalidInput(
                f"a basis of shape {tuple(self.basis.left.shape)} does not fit keep {tuple(self.keep.shape)}, "
                f"whose directions have {owners} owners."
            )

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
        """The number of directions of the layer before pruning, including the padding of ragged heads.

        Shared directions count once.
        """
        if self.basis is not None and self.basis.shared:
            return self.basis.left.shape[2]
        return self.keep.numel()

    @property
    def kept(self) -> int:
        """The number of kept directions; a shared direction counts once."""
        return int(self.keep.any(0).sum() if self.is_shared else self.keep.sum())


@dataclass(frozen=True, repr=False)
class HeadDecision(Displayed):
    """The decision about "heads": which heads stay, and their strengths. A removed head outputs zero.

    Where the removal is compensated, the layer also has a decision about "vo", which refits the output projection.
    """

    keep: Bool[Tensor, "heads"]
    strength: Float[Tensor, "heads"]
    reasons: tuple[str, ...]

    def __post_init__(self):
        if self.keep.shape != self.strength.shape or len(self.reasons) != 1:
            raise InvalidInput(
                f"heads: keep {tuple(self.keep.shape)} and strength {tuple(self.strength.shape)} disagree, or there "
                f"are {len(self.reasons)} reasons instead of one."
            )


Decision = ScoreDecision | OutputDecision | HeadDecision


@dataclass(frozen=True, repr=False)
class LayerPrescription(Displayed):
    """The decisions about one layer by map: always "qk", and the maps that are reduced; a removed head has no
    directions.
    """

    decisions: Mapping[str, Decision]

    def __post_init__(self):
        unknown = [name for name in self.decisions if name not in LAYER_MAPS]
        if unknown or "qk" not in self.decisions:
            raise InvalidInput(
                f"a layer was given decisions about {', '.join(self.decisions) or 'nothing'}: give one about qk, and "
                f"others about {', '.join(name for name in LAYER_MAPS if name != 'qk')}."
            )
        if self.heads.shape != self.qk.keep.shape[:1] or bool(self.qk.keep[~self.heads].any()):
            raise InvalidInput(
                f"{len(self.heads)} heads, of which {int(self.heads.sum())} stay, do not fit the ranks {self.qk.ranks} "
                "of qk: a removed head keeps no direction."
            )

    @property
    def heads(self) -> Bool[Tensor, "heads"]:
        """The kept heads."""
        found = self.decisions.get(HEADS)
        return found.keep if isinstance(found, HeadDecision) else torch.ones(len(self.qk.keep), dtype=torch.bool)

    @property
    def qk(self) -> ScoreDecision:
        """The decision about "qk"."""
        found = self.decisions["qk"]
        assert isinstance(found, ScoreDecision)
        return found

    def with_scores(self, decision: ScoreDecision) -> "LayerPrescription":
        """Returns the layer with another decision about "qk"."""
        return LayerPrescription({**self.decisions, "qk": decision})

    @property
    def outputs(self) -> dict[str, OutputDecision]:
        """The decisions about OUTPUT_MAPS."""
        return {name: found for name, found in self.decisions.items() if isinstance(found, OutputDecision)}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are stored in the safetensors file, by name."""
        basis = self.qk.basis
        found = {} if basis is None else {"qk.left": basis.left, "qk.right": basis.right}
        for name, output in self.outputs.items():
            found |= {f"{name}.{field}": getattr(output, field) for field in OUTPUT_TENSORS}
        return found


@dataclass(frozen=True, eq=False, repr=False)
class TokenPrescription(Displayed):
    """The token policy, one reason per stage, and the weights of trained predictors.

    `predictors` are the weights of the stages by name, as in `TokenReduction.stages`. Without them a learned token
    reducer is initialized from `seed` and must be trained.
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
        """Builds the prescription with the policy's reason for every stage."""
        learned = policy.reducer.learned
        state = "trained" if predictors is not None else f"fresh (seed {seed}), must be trained"
        describe = f"; its predictor is {state}" if learned else ""
        return cls(policy, tuple(reason + describe for reason in policy.describe()), predictors, seed)

    @property
    def must_be_trained(self) -> bool:
        """Whether the token reducer is learned and its predictors are untrained."""
        return self.policy.reducer.learned and self.predictors is None


@dataclass(frozen=True, repr=False)
class Prescription(Displayed):
    """The decisions about all layers of the model with this fingerprint, the rules, and in `about` the data.

    `rules` holds the rule of every prescribed map as text for `parse_rules`, including its metric. `tokens` is the
    prescribed token policy, or None.
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
        """The rules as one text, from which `prescribe` reproduces the decisions."""
        return " ".join(f"{name}={rule}" for name, rule in self.rules.items())

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Kept directions per layer and head."""
        return tuple(layer.qk.ranks for layer in self.layers)

    @property
    def removed_share(self) -> float:
        """The share of pruned score directions ("Dir. pruned" in the paper's tables).

        It measures the reduction of the query and key projections. A shared direction counts once although every head
        computes scores with it, so the query-key products may cost more than before: compare forms by their MACs
        (`Family.costs`).
        """
        total = sum(layer.qk.directions for layer in self.layers)
        return 1 - sum(layer.qk.kept for layer in self.layers) / total if total else 0.0

    def save(self, path: Path | str) -> Path:
        """Writes one JSON file whose floats round-trip exactly.

        Bases, output decisions and predictor weights are written to a safetensors file in the same folder
        (`storage.write_with_tensors`).
        """
        tensors = {
            f"layers.{index}.{name}": tensor
            for index, layer in enumerate(self.layers)
            for name, tensor in layer.tensors.items()
        }
        if self.tokens is not None:
            learned = self.tokens.predictors or {}
            tensors |= {f"tokens.{name}": tensor.detach().contiguous() for name, tensor in learned.items()}
        return write_with_tensors(path, self._record(), tensors)

    def _record(self) -> dict[str, Any]:
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
            trained = self.tokens.predictors is not None
            record[TOKENS] = {"reasons": list(self.tokens.reasons), "seed": self.tokens.seed, "trained": trained}
        return record

    @classmethod
    def load(cls, path: Path | str) -> "Prescription":
        """Reads a file written by `save`."""
        path = Path(path)
        record = read_json(path)
        check_schema(record, KIND, SCHEMA, path)
        fields.validated(record, RECORD, path)
        tensors = read_tensors_of(path, record)
        require_finite_tensors(tensors, f"the tensors of {path}")
        try:
            layers = tuple(
                _from_record(layer, _beginning_with(f"layers.{index}.", tensors))
                for index, layer in enumerate(record["layers"])
            )
            tokens = None
            if TOKENS in record["rules"]:
                found, policy = record[TOKENS], parse_policy(record["rules"][TOKENS])
                learned = _beginning_with("tokens.", tensors) if found["trained"] else None
                tokens = TokenPrescription(policy, tuple(found["reasons"]), learned, found["seed"])
            prescription = cls(layers, record["rules"], record["fingerprint"], record["about"], tokens)
        except KeyError as error:
            raise CheckpointError(f"{path} needs {error}, which is not in its folder; make it again.") from None
        except (InvalidInput, IndexError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path} and its tensors disagree: {error}") from error
        # Counts and shares are stored too, for readers.
        written = prescription._record()
        for name in ("layers", "removed_share", TOKENS):
            if written.get(name) != record.get(name):
                raise CheckpointError(
                    f"{path}: {name} holds ranks or shares that are not those of its kept directions. "
                    "The file was edited or damaged; make it again."
                )
        return prescription

    def require(self, fingerprint: str) -> None:
        """Raises FingerprintMismatch if the prescription belongs to another model."""
        if self.fingerprint != fingerprint:
            raise FingerprintMismatch(
                f"the prescription was made for the model {self.fingerprint}, this model is {fingerprint}; "
                "diagnose and prescribe this model, or realize the prescription on its own."
            )


def _to_record(layer: LayerPrescription) -> dict[str, Any]:
    qk = layer.qk
    heads = zip(qk.ranks, qk.keep, qk.strength.tolist(), qk.reasons, strict=True)
    record: dict[str, Any] = {
        "qk": {
            "directions": qk.keep.shape[1],
            "heads": [
                {"rank": rank, "keep": _indices(keep), "strength": strength, "why": why}
                for rank, keep, strength, why in heads
            ],
        }
    }
    if qk.basis is not None:
        record["qk"]["basis"] = {"shared": qk.basis.shared}
    for name, output in layer.outputs.items():
        units = zip(output.ranks, output.strength.tolist(), output.reasons, strict=True)
        record[name] = {"units": [{"rank": rank, "strength": strength, "why": why} for rank, strength, why in units]}
    found = layer.decisions.get(HEADS)
    if isinstance(found, HeadDecision):
        record[HEADS] = {"keep": _indices(found.keep), "strength": found.strength.tolist(), "why": found.reasons[0]}
    return record


def _from_record(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LayerPrescription:
    scores, heads = record["qk"], record["qk"]["heads"]
    keep = torch.zeros(len(heads), scores["directions"], dtype=torch.bool)
    for row, head in zip(keep, heads, strict=True):
        row[head["keep"]] = True
    basis = Basis(tensors["qk.left"], tensors["qk.right"], **scores["basis"]) if "basis" in scores else None
    qk = ScoreDecision(keep, _column("strength", heads).reshape(keep.shape), _reasons(heads), basis)
    decisions: dict[str, Decision] = {"qk": qk}
    for name in OUTPUT_MAPS:
        if name in record:
            units = record[name]["units"]
            first, second, third = (tensors[f"{name}.{field}"] for field in OUTPUT_TENSORS)
            ranks, strength = tuple(unit["rank"] for unit in units), _column("strength", units)
            decisions[name] = OutputDecision(ranks, first, second, third, strength, _reasons(units))
    if HEADS in record:
        strength = torch.tensor(record[HEADS]["strength"], dtype=torch.float64)
        keep = torch.zeros(len(strength), dtype=torch.bool)
        keep[record[HEADS]["keep"]] = True
        decisions[HEADS] = HeadDecision(keep, strength, (record[HEADS]["why"],))
    return LayerPrescription(decisions)


def _indices(keep: Tensor) -> list[int]:
    return torch.nonzero(keep).flatten().tolist()


def _column(name: str, rows: list[Mapping[str, Any]]) -> Tensor:
    return torch.tensor([row[name] for row in rows], dtype=torch.float64)


def _reasons(rows: list[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(row["why"] for row in rows)


def _beginning_with(start: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


RANK, TEXT = fields.Integer(0, fields.MOST_DIRECTIONS), fields.Text()
KEEP, STRENGTH = fields.Items(RANK), fields.Items(fields.Number())
HEAD = fields.Record({"rank": RANK, "keep": KEEP, "strength": STRENGTH, "why": TEXT})
UNIT = fields.Record({"rank": RANK, "strength": STRENGTH, "why": TEXT})
STAYING = fields.Record({"keep": KEEP, "strength": STRENGTH, "why": TEXT})
OUTPUT = fields.Record({"units": fields.Items(UNIT, 1, fields.MOST_HEADS)})
SCORES = fields.Record(
    {"directions": RANK, "heads": fields.Items(HEAD, 0, fields.MOST_HEADS)},
    {"basis": fields.Record({"shared": fields.Flag()})},
)
LAYER = fields.Record({"qk": SCORES}, {**dict.fromkeys(OUTPUT_MAPS, OUTPUT), HEADS: STAYING})
POLICY = fields.Record({"reasons": fields.Items(TEXT, 1), "seed": fields.Integer(), "trained": fields.Flag()})
RECORD = fields.Record(
    {
        "kind": fields.Choice((KIND,)),
        "schema": fields.Choice((SCHEMA,)),
        "fingerprint": TEXT,
        "rules": fields.Record(more={**dict.fromkeys(LAYER_MAPS, TEXT), TOKENS: fields.Text(parse_policy)}),
        "about": fields.JSON_OBJECT,
        "removed_share": fields.Number(0.0, 1.0),
        "layers": fields.Items(LAYER, 0, fields.MOST_LAYERS),
    },
    {TOKENS: POLICY, "tensors_sha256": TEXT},
)
