"""Prescriptions for attention: diagnose Vision Transformers, prescribe what to prune, realize and verify smaller ones.

    import attnrx as rx

    model = rx.load("runs/cifar10/train")
    splits = rx.adapt_preprocessing(rx.load_data("cifar10"), model)
    diagnosis = rx.diagnose(model, splits.validation)
    prescription = rx.prescribe(diagnosis, "energy_retention:0.90")
    slim = rx.realize(model, prescription)
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
    "Spectrum": "attnrx.vit.spec",
    "accelerate": "attnrx.vit.models.boundary.acceleration",
    "plain": "attnrx.vit.models.boundary.acceleration",
    "TrainingConfig": "attnrx.training",
    "diagnose": "attnrx.decide.diagnosing",
    "distill": "attnrx.change.realization.distillation",
    "elastic": "attnrx.workflows.elastic",
    "export": "attnrx.exporting",
    "figures": "attnrx.show.figures",
    "load": "attnrx.workflows.load",
    "load_data": "attnrx.data",
    "adapt_preprocessing": "attnrx.data.model_data",
    "plan": "attnrx.decide.planning",
    "prescribe": "attnrx.decide.rules.prescribing",
    "push_to_hub": "attnrx.workflows.save",
    "realize": "attnrx.change.realization",
    "repair": "attnrx.change.realization.repair",
    "save": "attnrx.workflows.save",
    "shrink": "attnrx.workflows.shrink",
    "Shrunk": "attnrx.workflows.shrunk",
    "train": "attnrx.training",
    "use_backend": "attnrx.vit.models",
    "verify": "attnrx.workflows.verify",
    "write_report": "attnrx.show.reports",
}

# Public attribute -> the package, e.g. for `rx.models.family_of`.
_PACKAGES = {
    "checks": "attnrx.show.checks",
    "costs": "attnrx.vit.costs",
    "data": "attnrx.data",
    "diagnostics": "attnrx.decide.diagnostics",
    "exporting": "attnrx.exporting",
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

# Type checkers and editors do not evaluate `__getattr__` or `__all__`. For them, the same names are imported again as
# explicit exports (`as`).
if TYPE_CHECKING:  # isort: off
    from attnrx import data as data, training as training
    from attnrx import exporting as exporting, realization as realization
    from attnrx.exporting import export as export
    from attnrx.change.realization import realize as realize
    from attnrx.change.realization.distillation import distill as distill
    from attnrx.change.realization.repair import repair as repair
    from attnrx.data import load_data as load_data
    from attnrx.data.model_data import adapt_preprocessing as adapt_preprocessing
    from attnrx.decide import diagnostics as diagnostics, planning as planning, rules as rules
    from attnrx.decide.diagnosing import diagnose as diagnose
    from attnrx.decide.planning import plan as plan
    from attnrx.nouns.diagnosis import Diagnosis as Diagnosis
    from attnrx.nouns.evidence import Evidence as Evidence, Finding as Finding
    from attnrx.nouns.prescription import Prescription as Prescription
    from attnrx.show import checks as checks, reports as reports
    from attnrx.show.figures import figures as figures
    from attnrx.show.reports import write_report as write_report
    from attnrx.support import storage as serialization  # noqa: F401
    from attnrx.support.errors import AttnrxError as AttnrxError
    from attnrx.training import TrainingConfig as TrainingConfig, losses as losses, train as train
    from attnrx.workflows.elastic import elastic as elastic
    from attnrx.workflows.load import load as load
    from attnrx.decide.rules.prescribing import prescribe as prescribe
    from attnrx.workflows.save import push_to_hub as push_to_hub, save as save
    from attnrx.workflows.shrink import shrink as shrink
    from attnrx.workflows.shrunk import Shrunk as Shrunk
    from attnrx.workflows.verify import verify as verify
    from attnrx.vit import costs as costs, models as models, tokens as tokens
    from attnrx.vit.models import Reader as Reader, use_backend as use_backend
    from attnrx.vit.models.boundary.acceleration import accelerate as accelerate, plain as plain
    from attnrx.vit.spec import Spectrum as Spectrum
else:
    __all__ = sorted(["__version__", "checks", "rules", *HOMES])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(_PACKAGES[name])
    if name not in HOMES:
        raise AttributeError(f"module 'attnrx' has no attribute {name!r}; it offers {', '.join(__dir__())}.")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({"__version__", *HOMES, *_PACKAGES})
