"""Prescriptions in which nothing is lost."""

from dataclasses import replace

from attnrx.diagnosis import Diagnosis
from attnrx.prescription import LayerPrescription
from attnrx.rules.decisions import keep_only
from attnrx.rules.metrics import rewritten


def whole(found: Diagnosis, metric: str) -> tuple[LayerPrescription, ...]:
    """Every direction of every layer, told in a metric."""
    told, bases = rewritten(found, metric)
    return tuple(
        LayerPrescription({"qk": replace(keep_only(layer.spectrum, layer.spectrum.used), basis=basis)})
        for layer, basis in zip(told.layers, bases, strict=True)
    )
