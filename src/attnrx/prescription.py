"""What a model can do without: plain data that can be read, compared, reviewed and stored."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnrx.errors import CheckpointError, FingerprintMismatch, InvalidInput
from attnrx.shapes import Bool, Float, Tensor
from attnrx.storage import check_schema, read_json, write_json

KIND, SCHEMA = "attnrx prescription", 1


@dataclass(frozen=True)
class LayerPrescription:
    """One layer: the directions that stay, their strengths, the heads that stay, and one reason per head.

    `strength` is what the kept directions get (their old one unless the rule changes it). A head that stays with no
    directions attends uniformly; a head that does not stay outputs nothing.
    """

    keep: Bool[Tensor, "heads directions"]
    strength: Float[Tensor, "heads directions"]
    heads: Bool[Tensor, "heads"]
    reasons: tuple[str, ...]

    def __post_init__(self):
        if self.keep.shape != self.strength.shape or self.heads.shape[0] != self.keep.shape[0]:
            raise InvalidInput(
                f"keep {tuple(self.keep.shape)}, strength {tuple(self.strength.shape)} and "
                f"heads {tuple(self.heads.shape)} disagree."
            )
        if len(self.reasons) != self.keep.shape[0]:
            raise InvalidInput(f"{len(self.reasons)} reasons for {self.keep.shape[0]} heads: give one each.")

    @property
    def ranks(self) -> tuple[int, ...]:
        """The directions that each head keeps; a removed head keeps none."""
        return tuple((self.keep & self.heads[:, None]).sum(-1).tolist())


@dataclass(frozen=True)
class Prescription:
    """Every layer of the model with this fingerprint, the rule that decided, and the data it decided on."""

    layers: tuple[LayerPrescription, ...]
    rule: Mapping[str, Any]
    fingerprint: str
    about: Mapping[str, Any]

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Kept directions per layer and head."""
        return tuple(layer.ranks for layer in self.layers)

    @property
    def removed_share(self) -> float:
        """The share of all score directions that is removed ("Dir. pruned" in the paper's tables)."""
        total = sum(layer.keep.numel() for layer in self.layers)
        return 1 - sum(sum(ranks) for ranks in self.ranks) / total

    def save(self, path: Path | str) -> Path:
        """Writes one JSON file; floats are written so that they read back bit for bit."""
        record = {
            "kind": KIND,
            "schema": SCHEMA,
            "fingerprint": self.fingerprint,
            "rule": dict(self.rule),
            "about": dict(self.about),
            "removed_share": self.removed_share,
            "layers": [_to_record(layer) for layer in self.layers],
        }
        return write_json(path, record)

    @classmethod
    def load(cls, path: Path | str) -> "Prescription":
        """Reads what `save` wrote."""
        record = read_json(path)
        check_schema(record, KIND, SCHEMA, path)
        try:
            layers = tuple(_from_record(layer) for layer in record["layers"])
            return cls(layers, record["rule"], record["fingerprint"], record["about"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"{path} is not a whole prescription ({error}); it was edited or truncated."
            ) from error

    def require(self, fingerprint: str) -> None:
        """Refuses to be realized on another model."""
        if self.fingerprint != fingerprint:
            raise FingerprintMismatch(
                f"the prescription was made for the model {self.fingerprint}, this model is {fingerprint}; "
                "diagnose and prescribe this model, or realize the prescription on its own."
            )


def _to_record(layer: LayerPrescription) -> dict[str, Any]:
    return {
        "directions": layer.keep.shape[1],
        "heads": [
            {
                "stays": bool(stays),
                "rank": rank,
                "keep": torch.nonzero(keep).flatten().tolist(),
                "strength": strength.tolist(),
                "why": why,
            }
            for stays, rank, keep, strength, why in zip(
                layer.heads, layer.ranks, layer.keep, layer.strength, layer.reasons, strict=True
            )
        ],
    }


def _from_record(record: Mapping[str, Any]) -> LayerPrescription:
    heads = record["heads"]
    keep = torch.zeros(len(heads), record["directions"], dtype=torch.bool)
    for row, head in zip(keep, heads, strict=True):
        row[head["keep"]] = True
    strength = torch.tensor([head["strength"] for head in heads], dtype=torch.float64)
    stays = torch.tensor([head["stays"] for head in heads], dtype=torch.bool)
    return LayerPrescription(keep, strength.reshape(keep.shape), stays, tuple(head["why"] for head in heads))
