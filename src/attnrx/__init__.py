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
    "AttnrxError": "attnrx.errors",
    "Budget": "attnrx.api",
    "Diagnosis": "attnrx.diagnosis",
    "Evidence": "attnrx.evidence",
    "Finding": "attnrx.evidence",
    "Prescription": "attnrx.prescription",
    "Reader": "attnrx.models",
    "Spectrum": "attnrx.spectrum",
    "TrainingConfig": "attnrx.training",
    "ViTConfig": "attnrx.models",
    "control_prescriptions": "attnrx.api",
    "diagnose": "attnrx.api",
    "distill": "attnrx.api",
    "elastic": "attnrx.shrinking",
    "export": "attnrx.api",
    "load": "attnrx.api",
    "load_data": "attnrx.data",
    "adapt_preprocessing": "attnrx.api",
    "measure_divergence": "attnrx.api",
    "plan": "attnrx.api",
    "prescribe": "attnrx.api",
    "prescribe_within": "attnrx.api",
    "push_to_hub": "attnrx.api",
    "realize": "attnrx.api",
    "refine": "attnrx.api",
    "repair": "attnrx.api",
    "save": "attnrx.api",
    "shrink": "attnrx.shrinking",
    "to_svda": "attnrx.api",
    "Shrunk": "attnrx.shrunk",
    "train": "attnrx.training",
    "use_backend": "attnrx.models",
    "verify": "attnrx.api",
    "write_report": "attnrx.reports",
}

# Subpackages and modules available as attributes, e.g. `attnrx.models.family_of`.
_PACKAGES = (
    "planning",
    "checks",
    "costs",
    "data",
    "diagnostics",
    "exporting",
    "losses",
    "models",
    "runtime",
    "realization",
    "reports",
    "rules",
    "serialization",
    "tokens",
    "training",
)

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
    from attnrx import (  # noqa: F401, for type checkers; imported by `__getattr__` at run time
        checks,
        costs,
        data,
        diagnostics,
        exporting,
        losses,
        models,
        planning,
        realization,
        reports,
        rules,
        runtime,
        serialization,
        tokens,
        training,
    )
    from attnrx.api import (
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
    from attnrx.data import load_data
    from attnrx.diagnosis import Diagnosis
    from attnrx.errors import AttnrxError
    from attnrx.evidence import Evidence, Finding
    from attnrx.models import Reader, ViTConfig, use_backend
    from attnrx.prescription import Prescription
    from attnrx.reports import write_report
    from attnrx.shrinking import elastic, shrink
    from attnrx.shrunk import Shrunk
    from attnrx.spectrum import Spectrum
    from attnrx.training import TrainingConfig, train


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"attnrx.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'attnrx' has no attribute {name!r}; it offers {', '.join(sorted(__all__))}.")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
