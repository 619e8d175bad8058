"""Costs: parameters and MACs before and after, in closed form and counted."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.nouns.evidence import Finding
from attnrx.show.checks.check import Check
from attnrx.show.checks.comparison import Comparison
from attnrx.support.shapes import Tensor
from attnrx.vit.costs import ModelCosts, count_product_macs
from attnrx.vit.models import (
    costs_by_image,
    costs_of_run,
    counted_by_spec,
    evaluating,
    family_of,
    recording_tokens,
    reduction_of,
)

# Images over which the mean MACs of a policy by image are computed.
MAX_IMAGES = 512


@dataclass(frozen=True)
class Costs(Check):
    """The savings in parameters and MACs, and claims that the closed forms equal the counts on both models.

    Parameters are counted with numel, MACs with torch's FLOP counter on the unpadded eager backend. With a token policy
    by image the MACs are the mean over at most MAX_IMAGES images.
    """

    name: ClassVar[str] = "costs"
    needs: ClassVar[tuple[str, ...]] = ("layers",)

    def __call__(self, comparison: Comparison) -> tuple[Finding, ...]:
        """Computes the closed-form costs of both models, then counts them on one image."""
        reference = family_of(comparison.reference).costs(comparison.reference)
        candidate = family_of(comparison.candidate).costs(comparison.candidate)
        spread = self._macs_by_image(comparison)
        mean_macs = spread.pop("mean", candidate.macs)
        # The counted MACs are per image, so one image is enough.
        batch = next(iter(comparison.data.take(1).batches(1, device=comparison.device)))
        return (
            self._saved("parameters", reference.params, candidate.params),
            self._saved("MACs", reference.macs, mean_macs, **spread),
            self._counted("reference", comparison.reference, reference, batch.images),
            self._counted("candidate", comparison.candidate, candidate, batch.images),
        )

    def _macs_by_image(self, comparison: Comparison) -> dict[str, Any]:
        """Returns the mean, the deviation and the range of the candidate's MACs; empty if all images have the same."""
        model, data = comparison.candidate, comparison.data
        reduction = reduction_of(model)
        if reduction is None or not reduction.policy.by_image:
            return {}
        batches = data.take(min(MAX_IMAGES, len(data))).batches(32, device=comparison.device)
        dtype = next(model.parameters()).dtype
        per_batch = [costs_by_image(model, family_of(model), batch.images.to(dtype)) for batch in batches]
        # In float64, which is exact for integers of this size.
        macs = torch.tensor([costs.macs for part in per_batch for costs in part], dtype=torch.float64)
        deviation = round(float(macs.std())) if len(macs) > 1 else None
        spread = {"standard_deviation": deviation, "least": int(macs.min()), "most": int(macs.max())}
        return {"mean": float(macs.mean()), **spread, "images": len(macs)}

    def _saved(self, what: str, before: int, after: int | float, **details: Any) -> Finding:
        amounts = {"reference": before, "candidate": round(after), **details}
        return self.finding(what, f"{what} saved by the candidate", 100 * (1 - after / before), "%", details=amounts)

    def _counted(self, role: str, model: nn.Module, closed: ModelCosts, images: Tensor) -> Finding:
        # All parameters, not only the trainable ones: the reference may be frozen.
        params = sum(parameter.numel() for parameter in model.parameters())
        with evaluating([model]), counted_by_spec(model, family_of(model)), recording_tokens(model) as runs:
            macs = count_product_macs(model, images.to(next(model.parameters()).dtype))
        reduction, products = reduction_of(model), closed.product_macs
        if reduction is not None and reduction.policy.by_image:
            # Those of the numbers of tokens in this pass, whose attention maps are uniform.
            products = costs_of_run(model, family_of(model), runs[-1])[0].product_macs
        details = {
            "model": role,
            "params": {"closed_form": closed.params, "counted": params},
            "macs_of_products": {"closed_form": products, "counted": macs},
            "parts": closed.to_record()["parts"],
        }
        # Both are exact integers, so the limit is 0.
        off = float(abs(params - closed.params) + abs(macs - products))
        claim = f"parameters and MACs of the {role} equal its closed form"
        return self.finding("counted costs", claim, off, "difference", n=1, limit=0.0, side="<=", details=details)
