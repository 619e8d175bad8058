"""The origin of a candidate: its prescription, the settings that realized it, and the masked model, each checked
against the reference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from attnrx.change.realization import realize
from attnrx.change.realization.elastic import Elastic, is_elastic
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.prescription import Prescription
from attnrx.support.errors import InvalidInput
from attnrx.vit.maps import FITS, TOKENS
from attnrx.vit.models import described_tokens, model_fingerprint


@dataclass(frozen=True)
class CandidateOrigin:
    """The prescription that made the candidate of the reference, the recorded settings `how`, and notes."""

    prescription: Prescription | None = None
    how: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def realization(self) -> str | None:
        """The kind of realization in a few words; None if it is unknown."""
        words = zip(FITS, ("refined", "repaired", "distilled"), strict=True)
        fitted = [word for name, word in words if self.how.get(name)]
        # Weights that were fitted no longer follow from the kind of norms.
        if fitted:
            return " and ".join(fitted)
        return "mask" if self.how.get("by") == "mask" else self.how.get("norms")


def origin_of(
    candidate: nn.Module, source: str | Path, reference: nn.Module, prescription: Prescription | None = None
) -> CandidateOrigin:
    """Returns the origin of a candidate that was loaded from `source`: by the prescription in its folder, or a given
    one.

    A model that was realized twice has the prescription of its second step, which is for another model than the first
    original: against that it is not used, with a note.

    Raises:
        InvalidInput: The given prescription is for another reference, or decides otherwise than the candidate's own.
    """
    fingerprint, stored, notes = model_fingerprint(reference), stored_prescription(source, candidate), ()
    if stored is not None and stored.fingerprint != fingerprint:
        notes = (
            f"the prescription in {source} is for the model {stored.fingerprint}, and the reference is {fingerprint}: "
            "it is not used, so there are no comparison with a masked model and no bounds of the pruned directions.",
        )
        stored = None
    how = {} if stored is None else dict(stored.about.get("realized", {}))
    if prescription is None:
        return CandidateOrigin(stored, how, notes)
    if prescription.fingerprint != fingerprint:
        raise InvalidInput(
            f"the prescription {prescription} is for the model {prescription.fingerprint}, and the reference is "
            f"{fingerprint}; give the prescription that the candidate was made by, or omit it."
        )
    if stored is not None and not _decides_alike(stored, prescription):
        raise InvalidInput(
            f"the prescription {prescription} is not the one that {source} was made by ({stored}); omit it, or give "
            "the candidate that was made by it."
        )
    return CandidateOrigin(prescription, how, notes)


def masked_model(candidate: nn.Module, reference: nn.Module, origin: CandidateOrigin) -> nn.Module | None:
    """Returns the reference with the pruned directions set to zero; None for a candidate without prescription."""
    if origin.how.get("by") == "mask":
        return candidate
    return None if origin.prescription is None else realize(reference, origin.prescription, by="mask")


def stored_folder(source: str | Path, model: nn.Module) -> Path:
    """Returns the folder with the prescription and the evidence of a model: its source, or that of an elastic size.

    A budget between two sizes loads one with fewer tokens, which has no evidence of its own: its folder has no such
    files.
    """
    elastic_folder = str(source).rpartition("@")[0]
    if not elastic_folder or not is_elastic(elastic_folder):
        return Path(source)
    # By fingerprint and token policy, which is no weight.
    subject = {"candidate": model_fingerprint(model), "tokens": described_tokens(model)}
    for size in Elastic.read(elastic_folder).sizes:
        path = Path(elastic_folder) / size.name / "evidence.json"
        about = Evidence.load(path).about if path.exists() else {}
        if {name: about.get(name) for name in subject} == subject:
            return path.parent
    return Path(source)


def stored_prescription(source: str | Path, model: nn.Module) -> Prescription | None:
    path = stored_folder(source, model) / "prescription.json"
    return Prescription.load(path) if path.exists() else None


def _decides_alike(first: Prescription, second: Prescription) -> bool:
    """Whether two prescriptions have the same rules and ranks, and both or none a token policy."""
    # Not equal tensors: refits and calibrated thresholds are written into the prescription of a realized model.
    rules = [{name: rule for name, rule in each.rules.items() if name != TOKENS} for each in (first, second)]
    return rules[0] == rules[1] and first.ranks == second.ranks and (first.tokens is None) == (second.tokens is None)
