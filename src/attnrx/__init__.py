# ruff: noqa: F401, names imported for type checkers only
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

_OF_API = (
    "Budget adapt_preprocessing control_prescriptions diagnose export load measure_divergence plan prescribe "
    "prescribe_within push_to_hub realize refine save verify"
)
# Public name -> the module that defines it.
_HOMES = {
    "AttnrxError": "errors",
    "Diagnosis": "diagnosis",
    "Evidence": "evidence",
    "Finding": "evidence",
    "Prescription": "prescription",
    "Spectrum": "spectrum",
    "TrainingConfig": "training",
    "ViTConfig": "models",
    "load_data": "data",
    "shrink": "shrinking",
    "Shrunk": "shrinking",
    "train": "training",
    "use_backend": "models",
    "write_report": "reports",
    **dict.fromkeys(_OF_API.split(), "api"),
}
# Subpackages available as attributes, e.g. `attnrx.models.family_of`.
_PACKAGES = (
    "planning checks costs data diagnostics exporting losses models runtime realization reports rules serialization "
    "tokens training"
).split()

__all__ = sorted((*_HOMES, "__version__", "checks", "rules"))  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from attnrx import (
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
        export,
        load,
        measure_divergence,
        plan,
        prescribe,
        prescribe_within,
        push_to_hub,
        realize,
        refine,
        save,
        verify,
    )
    from attnrx.data import load_data
    from attnrx.diagnosis import Diagnosis
    from attnrx.errors import AttnrxError
    from attnrx.evidence import Evidence, Finding
    from attnrx.models import ViTConfig, use_backend
    from attnrx.prescription import Prescription
    from attnrx.reports import write_report
    from attnrx.shrinking import Shrunk, shrink
    from attnrx.spectrum import Spectrum
    from attnrx.training import TrainingConfig, train


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"attnrx.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'attnrx' has no attribute {name!r}; it offers {', '.join(sorted(__all__))}.")
    return getattr(importlib.import_module(f"attnrx.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
