"""The operations that IrrAtt and SPOT count, so that their numbers are reproduced exactly.

Inferred from IrrAtt's Table 1, which these rules reproduce in 53 of its 54 cells: besides the matrix products of
patches and layers, that of the classifier counts, and a LayerNorm as common FLOP counters count it; a fused
multiply-add is one FLOP, and the strengths of directions have parameters alone. `ModelCosts.macs` counts as SVDA (A.6)
does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from attnrx.vit.costs import LayerCosts, ModelCosts, PartCosts

NORM_MACS = 5  # of a LayerNorm, per feature

# The parts of a layer that are its attention (MHSA).
ATTENTION = ("query_key", "scores", "diagonal", "fusion", "value_output", "read_out")


@dataclass(frozen=True)
class Price:
    """The cost of a model as IrrAtt counts: its parts, and the MACs of the attention of every layer, for one image."""

    parts: Mapping[str, PartCosts]
    attention_macs: tuple[int, ...]

    @property
    def params(self) -> int:
        return sum(part.params for part in self.parts.values())

    @property
    def macs(self) -> int:
        return sum(part.macs for part in self.parts.values())

    @property
    def mhsa_macs_per_layer(self) -> int | list[int]:
        """MACs of the attention of a layer: one number if all layers agree, else one per layer."""
        macs = list(self.attention_macs)
        return macs[0] if len(set(macs)) == 1 else macs

    def percent_of(self, original: "Price") -> dict[str, float]:
        """Parameters, MACs and MACs of the attention in percent of the original's: the compression ratios (CR)."""
        attention, original_attention = sum(self.attention_macs), sum(original.attention_macs)
        return {
            "params_percent": 100 * self.params / max(original.params, 1),
            "macs_percent": 100 * self.macs / max(original.macs, 1),
            "mhsa_percent": 100 * attention / max(original_attention, 1),
        }


def priced(costs: ModelCosts) -> Price:
    """Returns the cost as IrrAtt counts; the parts add up to the whole."""
    layers = [_layer_parts(layer) for layer in costs.layers]
    parts = costs.parts
    for name in layers[0] if layers else ():
        parts[name] = sum((layer[name] for layer in layers), start=PartCosts())
    parts["predictors"] += PartCosts(0, NORM_MACS * costs.predictor_norm_features)
    parts["classifier"] += PartCosts(0, costs.classifier_macs + NORM_MACS * costs.final_norm_features)
    return Price(parts, tuple(sum(layer[name].macs for name in ATTENTION) for layer in layers))


def _layer_parts(layer: LayerCosts) -> dict[str, PartCosts]:
    norms = layer.layer_norms + PartCosts(0, NORM_MACS * layer.norm_features)
    return {**layer.parts, "diagonal": PartCosts(layer.diagonal.params), "layer_norms": norms}
