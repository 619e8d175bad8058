"""Costs: parameters and MACs before and after, in closed form and counted."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check
from attnrx.show.checks.comparison import Comparison
from attnrx.support.shapes import Tensor
from attnrx.vit.costs import ModelCosts, count_product_macs
from attnrx.vit.models import counted_by_spec, evaluating, family_of


@dataclass(frozen=True)
class Costs(Check):
    """The savings in parameters and MACs, and claims that the closed forms equal the counts on both models.

    Parameters are counted with numel, MACs with torch's FLOP counter on the unpadded eager backend.
    """

    name: ClassVar[str] = "costs"
    needs: ClassVar[tuple[str, ...]] = ("layers",)

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Computes the closed-form costs of both models, then counts them on one image."""
        reference = family_of(comparison.reference).costs(comparison.reference)
        candidate = family_of(comparison.candidate).costs(comparison.candidate)
        # The counted MACs are per image, so one image is enough.
        batch = next(iter(comparison.data.take(1).batches(1, device=comparison.device)))
        return (
            self._saved("parameters", reference.params, candidate.params),
            self._saved("MACs", reference.macs, candidate.macs),
            self._counted("reference", comparison.reference, reference, batch.images),
            self._counted("candidate", comparison.candidate, candidate, batch.images),
        )

    def _saved(self, what: str, before: int, after: int) -> Finding:
        amounts = {"reference": before, "candidate": after}
        return self.finding(what, f"{what} saved by the candidate", 100 * (1 - after / before), "%", details=amounts)

    def _counted(self, role: str, model: nn.Module, closed: ModelCosts, images: Tensor) -> Finding:
        # All parameters, not only the trainable ones: the reference may be frozen.
        params = sum(parameter.numel() for parameter in model.parameters())
        with evaluating([model]), counted_by_spec(model, family_of(model)):
            macs = count_product_macs(model, images.to(next(model.parameters()).dtype))
        details = {
            "model": role,
            "params": {"closed_form": closed.params, "counted": params},
            "macs_of_products": {"closed_form": closed.product_macs, "counted": macs},
            "parts": closed.to_record()["parts"],
        }
        # Both are exact integers, so the limit is 0.
        off = float(abs(params - closed.params) + abs(macs - closed.product_macs))
        claim = f"parameters and MACs of the {role} equal its closed form"
        return self.finding("counted costs", claim, off, "difference", n=1, limit=0.0, side="<=", details=details)
