"""Comparisons for the tests of the checks: tiny models, random pixels, a prescription realized in the way asked for."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import attnrx as rx
from attnrx.change.realization import realize
from attnrx.data import ImageSet
from attnrx.decide.rules.metrics import rewritten
from attnrx.decide.rules.rule import keep_only
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import LayerPrescription, Prescription
from attnrx.show.checks import Comparison
from attnrx.vit.models import answer
from attnrx_lab.vision_transformer import VisionTransformer
from support import cases
from support.cases import pixels


def weakest_removed(vit: VisionTransformer, count: int) -> Prescription:
    """A prescription that removes the `count` weakest directions of every head, as a threshold would."""
    full = cases.prescription(vit, cases.PATTERNS["full"])
    layers = []
    for layer in full.layers:
        weakest = layer.qk.strength.abs().argsort(-1)[:, :count]
        layers.append(layer.with_scores(replace(layer.qk, keep=layer.qk.keep.scatter(1, weakest, False))))
    return replace(full, layers=tuple(layers))


@dataclass(frozen=True)
class Setting:
    """A reference, a prescription, and its realizations."""

    reference: VisionTransformer
    prescription: Prescription

    @classmethod
    def of(cls, config: str = "svda", pattern: str = "half", spread: float = 1.0) -> "Setting":
        """Takes both from the case table."""
        vit = cases.model(cases.CONFIGS[config], spread=spread)
        return cls(vit, cases.prescription(vit, cases.PATTERNS[pattern]))

    @property
    def masked(self) -> nn.Module:
        """The prescription as zeros."""
        return realize(self.reference, self.prescription, by="mask")

    @property
    def compressed(self) -> nn.Module:
        """The paper's smaller model."""
        return realize(self.reference, self.prescription, by="renormalized")

    def comparison(self, candidate: nn.Module, images: int = 40, batch_size: int = 64) -> Comparison:
        """Compares a candidate on random pictures."""
        return Comparison(
            candidate,
            self.reference,
            pixels(self.reference.config, images),
            prescription=self.prescription,
            batch_size=batch_size,
        )


def logits(model: nn.Module, images: ImageSet) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([answer(model, batch.images.double()) for batch in images.batches(8)])


def whole(found: Diagnosis, metric: str) -> tuple[LayerPrescription, ...]:
    """A prescription in which nothing is lost: every direction of every layer, in a metric."""
    diagnosis, bases = rewritten(found, metric)
    return tuple(
        LayerPrescription({"qk": replace(keep_only(layer.spectrum, layer.spectrum.used), basis=basis)})
        for layer, basis in zip(diagnosis.layers, bases, strict=True)
    )


def assert_text_and_files_give_the_same_model(
    model: nn.Module, diagnosis: Diagnosis, given: Prescription, images: Tensor, folder: Path
) -> None:
    """The text of a prescription, its file and that of its diagnosis are realized as the prescription itself is."""
    expected = realize(model, given)(images)
    again = rx.prescribe(Diagnosis.load(diagnosis.save(folder / "diagnosis.json")), str(given))
    read = Prescription.load(given.save(folder / "prescription.json"))
    for other in (again, read):
        assert str(other) == str(given)
        torch.testing.assert_close(realize(model, other)(images), expected, rtol=0, atol=0)


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float = 0.0) -> None:
    """Asserts that two answers have the same names, and tensors that differ by at most `limit`."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=limit)
