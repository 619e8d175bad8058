"""The content of a report, of which every part is optional."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.prescription import Prescription
from attnrx.show.reports.samples import MapSamples, TokenSamples
from attnrx.support.display import Displayed
from attnrx.support.errors import FingerprintMismatch, InvalidInput


@dataclass(frozen=True, repr=False)
class ReportContent(Displayed):
    """The parts of one report about one candidate.

    `about` is a free record: the model, the data, the versions, the seed, the command. Costs and latency are those of
    the evidence.
    """

    title: str
    about: Mapping[str, Any] = field(default_factory=dict)
    prescription: Prescription | None = None
    diagnosis: Diagnosis | None = None
    evidence: Evidence | None = None
    tokens: TokenSamples | None = None
    outputs: MapSamples | None = None

    @property
    def measured(self) -> Evidence:
        """The evidence; without findings where there is none."""
        return self.evidence or Evidence((), {})

    def __post_init__(self):
        # By the fields themselves, so that a new part needs no change here.
        if all(part is None for name, part in vars(self).items() if name not in ("title", "about")):
            raise InvalidInput(
                f"the report {self.title!r} has nothing to show: "
                "give it evidence, a prescription, a diagnosis or another part."
            )
        if self.diagnosis is None or self.prescription is None:
            return
        if self.diagnosis.fingerprint != self.prescription.fingerprint:
            raise FingerprintMismatch(
                f"the diagnosis is of the model {self.diagnosis.fingerprint}, the prescription is for the model "
                f"{self.prescription.fingerprint}; report them with the diagnosis that the prescription was made from."
            )
