"""The origin of a candidate: its prescription, the settings that realized it, and the masked model, each checked
against the reference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import attnrx as rx
from attnrx.cli.inputs import stored_folder
from attnrx.support.errors import InvalidInput

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class CandidateOrigin:
    """The prescription that made the candidate of the reference, the recorded settings `how`, and notes."""

    prescription: "rx.Prescription | None" = None
    how: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def origin_of(
    candidate: "nn.Module", source: str, reference: "nn.Module", prescription_file: str | None = None
) -> CandidateOrigin:
    """Returns the origin of the candidate that `source` names: by the prescription in its folder, or by a given file.

    A model that was realized twice has the prescription of its second step, which is for another model than the first
    original: against that it is not used, with a note.

    Raises:
        InvalidInput: The given prescription is for another reference, or decides otherwise than the candidate's own.
    """
    fingerprint, own, notes = rx.models.model_fingerprint(reference), _stored_prescription(source, candidate), ()
    if own is not None and own.fingerprint != fingerprint:
        notes = (
            f"the prescription in {source} is for the model {own.fingerprint}, and the reference is {fingerprint}: it "
            "is not used, so there are no comparison with a masked model and no bounds of the pruned directions.",
        )
        own = None
    how = {} if own is None else dict(own.about.get("realized", {}))
    if prescription_file is None:
        return CandidateOrigin(own, how, notes)
    given = rx.Prescription.load(prescription_file)
    if given.fingerprint != fingerprint:
        raise InvalidInput(
            f"--prescription {prescription_file} is for the model {given.fingerprint}, and --reference is "
            f"{fingerprint}; give the prescription that the candidate was made by, or omit it."
        )
    if own is not None and not _decides_alike(own, given):
        raise InvalidInput(
            f"--prescription {prescription_file} ({given}) is not the one that {source} was made by ({own}); omit it, "
            "or give the candidate that was made by it."
        )
    return CandidateOrigin(given, how, notes)


def masked_model(masked: "nn.Module", source: str, reference: "nn.Module", origin: CandidateOrigin) -> "nn.Module":
    """Returns a masked model that was given; raises InvalidInput for one that is not the reference with zeros.

    By the prescription in its folder, or, without one, by the shapes of its weights and by the patch embedding, which
    no mask changes.
    """
    own = _stored_prescription(source, masked)
    if own is None:
        problem = None if _has_same_patches(masked, reference) else "its weights are not those of --reference"
    elif own.fingerprint != rx.models.model_fingerprint(reference):
        problem = "it was made of another model than --reference"
    elif own.about.get("realized", {}).get("by") != "mask":
        problem = "it was made by compression"
    elif origin.prescription is not None and not _decides_alike(own, origin.prescription):
        problem = f"it was made by {own}, and the candidate by {origin.prescription}"
    else:
        problem = None
    if problem is not None:
        raise InvalidInput(
            f"--masked {source}: {problem}. Give the model that `attnrx realize --by mask` made of --reference by the "
            "candidate's prescription, or omit it."
        )
    return masked


def _stored_prescription(source: str, model: "nn.Module") -> "rx.Prescription | None":
    path = stored_folder(source, model) / "prescription.json"
    return rx.Prescription.load(path) if path.exists() else None


def _decides_alike(first: "rx.Prescription", second: "rx.Prescription") -> bool:
    """Whether two prescriptions keep as much of every map and head, and both or none have a token policy."""
    # Not equal tensors: refits and calibrated thresholds are written into the prescription of a realized model.
    return _decided(first) == _decided(second) and (first.tokens is None) == (second.tokens is None)


def _decided(prescription: "rx.Prescription") -> list[Any]:
    return [
        (
            layer.qk.ranks,
            layer.heads.tolist(),
            {name: output.ranks for name, output in layer.outputs.items()},
            None if layer.hidden is None else layer.hidden.keep.tolist(),
        )
        for layer in prescription.layers
    ]


def _has_same_patches(masked: "nn.Module", reference: "nn.Module") -> bool:
    shapes = [{name: tensor.shape for name, tensor in each.state_dict().items()} for each in (masked, reference)]
    if shapes[0] != shapes[1]:
        return False
    first, second = (rx.models.family_of(each).patch_embedding(each).state_dict() for each in (masked, reference))
    return all(bool((tensor == second[name].to(tensor)).all()) for name, tensor in first.items())
