"""Prescriptions for attention: diagnose, prescribe, realize and verify smaller Vision Transformers.

    import attnrx as rx

    model = rx.load("runs/cifar10/train")
    splits = rx.adapt_preprocessing(rx.load_data("cifar10"), model)
    diagnosis = rx.diagnose(model, splits.validation)
    prescription = rx.prescribe(diagnosis, "energy_retention:0.90")
    slim = rx.realize(model, prescription, norms="refit", calibration=splits.train.take(512))
    evidence = rx.verify(slim, model, splits.test, prescription=prescription)
    rx.save(slim, "slim", prescription=prescription, evidence=evidence)

Public names are imported lazily, on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOMES = {
    "AttnrxError": "attnrx.support.errors",
    "Budget": "attnrx.verbs.api",
    "Diagnosis": "attnrx.nouns.diagnosis",
    "Evidence": "attnrx.nouns.evidence",
    "Finding": "attnrx.nouns.evidence",
    "Prescription": "attnrx.nouns.prescription",
    "Reader": "attnrx.vit.models",
    "Spectrum": "attnrx.vit.spectrum",
    "TrainingConfig": "attnrx.training",
    "ViTConfig": "attnrx.vit.models",
    "control_prescriptions": "attnrx.verbs.api",
    "diagnose": "attnrx.verbs.api",
    "distill": "attnrx.verbs.api",
    "elastic": "attnrx.verbs.shrinking",
    "export": "attnrx.verbs.api",
    "load": "attnrx.verbs.api",
    "load_data": "attnrx.data",
    "adapt_preprocessing": "attnrx.verbs.api",
    "measure_divergence": "attnrx.verbs.api",
    "plan": "attnrx.verbs.api",
    "prescribe": "attnrx.verbs.api",
    "prescribe_within": "attnrx.verbs.api",
    "push_to_hub": "attnrx.verbs.api",
    "realize": "attnrx.verbs.api",
    "refine": "attnrx.verbs.api",
    "repair": "attnrx.verbs.api",
    "save": "attnrx.verbs.api",
    "shrink": "attnrx.verbs.shrinking",
    "to_svda": "attnrx.verbs.api",
    "Shrunk": "attnrx.verbs.shrunk",
    "train": "attnrx.training",
    "use_backend": "attnrx.vit.models",
    "verify": "attnrx.verbs.api",
    "write_report": "attnrx.show.reports",
}

# Packages available as attributes, e.g. `rx.models.family_of` -> the package.
_PACKAGES = {
    "checks": "attnrx.show.checks",
    "costs": "attnrx.vit.costs",
    "data": "attnrx.data",
    "diagnostics": "attnrx.decide.diagnostics",
    "exporting": "attnrx.change.exporting",
    "losses": "attnrx.training.losses",
    "models": "attnrx.vit.models",
    "planning": "attnrx.decide.planning",
    "realization": "attnrx.change.realization",
    "reports": "attnrx.show.reports",
    "rules": "attnrx.decide.rules",
    "serialization": "attnrx.support.storage",
    "tokens": "attnrx.vit.tokens",
    "training": "attnrx.training",
}

__all__ = [
    "AttnrxError",
    "Budget",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Prescription",
    "Reader",
    "Shrunk",
    "Spectrum",
    "TrainingConfig",
    "ViTConfig",
    "__version__",
    "adapt_preprocessing",
    "checks",
    "control_prescriptions",
    "diagnose",
    "distill",
    "elastic",
    "export",
    "load",
    "load_data",
    "measure_divergence",
    "plan",
    "prescribe",
    "prescribe_within",
    "push_to_hub",
    "realize",
    "refine",
    "repair",
    "rules",
    "save",
    "shrink",
    "to_svda",
    "train",
    "use_backend",
    "verify",
    "write_report",
]

# The same names once more, because type checkers and editors do not evaluate `__getattr__`.
if TYPE_CHECKING:
    from attnrx import data, training  # noqa: F401
    from attnrx.change import exporting, realization  # noqa: F401
    from attnrx.data import load_data
    from attnrx.decide import diagnostics, planning, rules  # noqa: F401
    from attnrx.nouns.diagnosis import Diagnosis
    from attnrx.nouns.evidence import Evidence, Finding
    from attnrx.nouns.prescription import Prescription
    from attnrx.show import checks, reports  # noqa: F401
    from attnrx.show.reports import write_report
    from attnrx.support import storage as serialization  # noqa: F401
    from attnrx.support.errors import AttnrxError
    from attnrx.training import TrainingConfig, losses, train  # noqa: F401
    from attnrx.verbs.api import (
        Budget,
        adapt_preprocessing,
        control_prescriptions,
        diagnose,
        distill,
        export,
        load,
        measure_divergence,
        plan,
        prescribe,
        prescribe_within,
        push_to_hub,
        realize,
        refine,
        repair,
        save,
        to_svda,
        verify,
    )
    from attnrx.verbs.shrinking import elastic, shrink
    from attnrx.verbs.shrunk import Shrunk
    from attnrx.vit import costs, models, tokens  # noqa: F401
    from attnrx.vit.models import Reader, ViTConfig, use_backend
    from attnrx.vit.spectrum import Spectrum


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(_PACKAGES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'attnrx' has no attribute {name!r}; it offers {', '.join(sorted(__all__))}.")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
