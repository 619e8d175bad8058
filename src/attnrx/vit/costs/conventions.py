"""Counting conventions: which operations each paper counts, so that its numbers are reproduced exactly.

Parameters are the same in all of them, every trainable tensor; only the counted MACs differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from attnrx.vit.costs.model_costs import LayerCosts, ModelCosts, PartCosts, Saving

# The parts of a layer that are its attention (MHSA).
ATTENTION = ("query_key", "scores", "diagonal", "fusion", "value_output", "read_out")


@dataclass(frozen=True)
class Price:
    """The cost of a model by one convention: its parts, and the MACs of the attention of every layer, for one image."""

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

    def saving(self, smaller: "Price") -> Saving:
        """The saving of `smaller` against this; negative if it costs more."""
        params, macs = float(self.params - smaller.params), float(self.macs - smaller.macs)
        return Saving(params, macs, params / max(self.params, 1), macs / max(self.macs, 1))

    def percent_of(self, original: "Price") -> dict[str, float]:
        """Parameters, MACs and MACs of the attention in percent of the original's: the compression ratios (CR)."""
        attention, original_attention = sum(self.attention_macs), sum(original.attention_macs)
        return {
            "params_percent": 100 * self.params / max(original.params, 1),
            "macs_percent": 100 * self.macs / max(original.macs, 1),
            "mhsa_percent": 100 * attention / max(original_attention, 1),
        }


@dataclass(frozen=True)
class Convention:
    """The counted operations besides the matrix products of patches and layers, which always count.

    `strengths`: one MAC per token and strength. `norms`: this many MACs per feature of a LayerNorm. `classifier`: its
    product.
    """

    name: str
    source: str
    strengths: bool
    norms: int
    classifier: bool

    def price(self, costs: ModelCosts) -> Price:
        """Returns the cost by this convention; the parts add up to the whole."""
        layers = [self._layer(layer) for layer in costs.layers]
        parts = costs.parts
        for name in layers[0] if layers else ():
            parts[name] = sum((layer[name] for layer in layers), start=PartCosts())
        head = costs.classifier_macs if self.classifier else 0
        parts["predictors"] += PartCosts(0, self.norms * costs.predictor_norm_features)
        parts["classifier"] += PartCosts(0, head + self.norms * costs.final_norm_features)
        return Price(parts, tuple(sum(layer[name].macs for name in ATTENTION) for layer in layers))

    def _layer(self, layer: LayerCosts) -> dict[str, PartCosts]:
        # Strengths are parameters in every convention; only their MACs are not always counted.
        diagonal = layer.diagonal if self.strengths else PartCosts(layer.diagonal.params)
        norms = layer.layer_norms + PartCosts(0, self.norms * layer.norm_features)
        return {**layer.parts, "diagonal": diagonal, "layer_norms": norms}


# The SVDA paper's accounting (A.6), which is also that of ModelCosts.macs.
SVDA = Convention("svda", "SVDA, A.6", strengths=True, norms=0, classifier=False)

# Inferred from the IrrAtt paper's Table 1, which these rules reproduce in 53 of its 54 cells: a fused multiply-add is
# one FLOP, and a LayerNorm is counted as common FLOP counters do, at five per feature.
IRRATT = Convention("irratt", "IrrAtt, Table 1", strengths=False, norms=5, classifier=True)

CONVENTIONS: dict[str, Convention] = {convention.name: convention for convention in (SVDA, IRRATT)}


def paper_convention(family: str) -> Convention:
    """Returns the convention of a family's paper: SVDA for attnrx's own models, IrrAtt for pre-trained ones."""
    return SVDA if family == "vit" else IRRATT
