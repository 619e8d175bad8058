"""Costs: parameters and MACs before and after, in closed form and counted."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from attnrx.checks.check import Check
from attnrx.checks.comparison import Comparison
from attnrx.costs import ModelCosts, count_product_macs
from attnrx.evidence import Finding, judged
from attnrx.models import evaluating, family_of, unfused
from attnrx.shapes import Float, Tensor


@dataclass(frozen=True)
class Costs(Check):
    """What the candidate saves in parameters and MACs, and that the closed forms are what is counted on the models.

    Parameters are counted with numel, MACs by torch's counter of operations on the eager backend, which pads nothing.
    """

    name: ClassVar[str] = "costs"

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Prices both models, then counts."""
        reference = family_of(comparison.reference).costs(comparison.reference)
        candidate = family_of(comparison.candidate).costs(comparison.candidate)
        saving = reference.saving(candidate)
        batch = next(iter(comparison.data.take(1).batches(1, device=comparison.device)))
        return (
            self._saved("parameters", saving.params_share, (reference.params, candidate.params)),
            self._saved("MACs", saving.macs_share, (reference.macs, candidate.macs)),
            self._counted("reference", comparison.reference, reference, batch.images),
            self._counted("candidate", comparison.candidate, candidate, batch.images),
        )

    def _saved(self, what: str, share: float, amounts: tuple[int, int]) -> Finding:
        details = {"quantity": what, "reference": amounts[0], "candidate": amounts[1]}
        return Finding(self.name, f"{what} saved by the candidate", 100 * share, "%", details=details)

    def _counted(self, role: str, model: nn.Module, closed: ModelCosts, images: Tensor) -> Finding:
        # All of them, not only the trainable ones: a frozen reference has parameters too.
        params, macs = sum(parameter.numel() for parameter in model.parameters()), _counted_macs(model, images)
        details: dict[str, Any] = {
            "quantity": "counted costs",
            "model": role,
            "params": {"closed_form": closed.params, "counted": params},
            "macs_of_products": {"closed_form": closed.product_macs, "counted": macs},
            "parts": closed.to_record()["parts"],
        }
        off = abs(params - closed.params) + abs(macs - closed.product_macs)
        claim = f"parameters and MACs of the {role} are what its closed form says"
        return Finding(
            self.name, claim, float(off), "difference", **judged(float(off), 0.0, n=1, at_least=False), details=details
        )


def _counted_macs(model: nn.Module, images: Float[Tensor, "batch channels height width"]) -> int:
    with evaluating([model]), unfused(model, family_of(model)):
        return count_product_macs(model, images.to(next(model.parameters()).dtype))
