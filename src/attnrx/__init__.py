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
HOMES = {
    "AttnrxError": "attnrx.support.errors",
    "Diagnosis": "attnrx.nouns.diagnosis",
    "Evidence": "attnrx.nouns.evidence",
    "Finding": "attnrx.nouns.evidence",
    "Prescription": "attnrx.nouns.prescription",
    "Reader": "attnrx.vit.models",
    "Spectrum": "attnrx.vit.spectrum",
    "TrainingConfig": "attnrx.training",
    "diagnose": "attnrx.decide.diagnosing",
    "distill": "attnrx.change.realization.distillation",
    "elastic": "attnrx.verbs.elastic",
    "export": "attnrx.change.exporting",
    "load": "attnrx.verbs.load",
    "load_data": "attnrx.data",
    "adapt_preprocessing": "attnrx.data.model_data",
    "plan": "attnrx.decide.planning",
    "prescribe": "attnrx.verbs.prescribe",
    "push_to_hub": "attnrx.verbs.save",
    "realize": "attnrx.change.realization",
    "repair": "attnrx.change.realization.repair",
    "save": "attnrx.verbs.save",
    "shrink": "attnrx.verbs.shrink",
    "Shrunk": "attnrx.verbs.shrink",
    "train": "attnrx.training",
    "use_backend": "attnrx.vit.models",
    "verify": "attnrx.verbs.verify",
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
    "Diagnosis",
    "Evidence",
    "Finding",
    "Prescription",
    "Reader",
    "Shrunk",
    "Spectrum",
    "TrainingConfig",
    "__version__",
    "adapt_preprocessing",
    "checks",
    "diagnose",
    "distill",
    "elastic",
    "export",
    "load",
    "load_data",
    "plan",
    "prescribe",
    "push_to_hub",
    "realize",
    "repair",
    "rules",
    "save",
    "shrink",
    "train",
    "use_backend",
    "verify",
    "write_report",
]

# The same names once more, because type checkers and editors do not evaluate `__getattr__`.
if TYPE_CHECKING:
    from attnrx import data, training  # noqa: F401
    from attnrx.change import exporting, realization  # noqa: F401
    from attnrx.change.exporting import export
    from attnrx.change.realization import realize
    from attnrx.change.realization.distillation import distill
    from attnrx.change.realization.repair import repair
    from attnrx.data import load_data
    from attnrx.data.model_data import adapt_preprocessing
    from attnrx.decide import diagnostics, planning, rules  # noqa: F401
    from attnrx.decide.diagnosing import diagnose
    from attnrx.decide.planning import plan
    from attnrx.nouns.diagnosis import Diagnosis
    from attnrx.nouns.evidence import Evidence, Finding
    from attnrx.nouns.prescription import Prescription
    from attnrx.show import checks, reports  # noqa: F401
    from attnrx.show.reports import write_report
    from attnrx.support import storage as serialization  # noqa: F401
    from attnrx.support.errors import AttnrxError
    from attnrx.training import TrainingConfig, losses, train  # noqa: F401
    from attnrx.verbs.elastic import elastic
    from attnrx.verbs.load import load
    from attnrx.verbs.prescribe import prescribe
    from attnrx.verbs.save import push_to_hub, save
    from attnrx.verbs.shrink import Shrunk, shrink
    from attnrx.verbs.verify import verify
    from attnrx.vit import costs, models, tokens  # noqa: F401
    from attnrx.vit.models import Reader, use_backend
    from attnrx.vit.spectrum import Spectrum


# Names of earlier versions, and what to use now.
_FORMER = {
    "refine": "attnrx.repair, which fits queries and keys with the other maps of a block",
    "to_svda": "attnrx_lab.conversion.to_svda",
    "control_prescriptions": "attnrx_lab.rules.control_prescriptions",
    "measure_divergence": "attnrx_lab.rules.measure_divergence",
    "measure_sublayers": "heads=, hidden= or tokens=: linear maps in place of sublayers did not pay",
    "Budget": "attnrx.plan",
    "ViTConfig": "attnrx_lab.vision_transformer.ViTConfig",
    "prescribe_within": "attnrx.plan",
}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(_PACKAGES[name])
    if name in _FORMER:
        raise AttributeError(f"attnrx.{name} was removed; use {_FORMER[name]} (CHANGELOG.md).")
    if name not in HOMES:
        raise AttributeError(f"module 'attnrx' has no attribute {name!r}; it offers {', '.join(sorted(__all__))}.")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
