"""The costs of the parts of a model, as exact integers that add up to the whole.

The convention is the paper's (A.6): parameters are all trainable tensors. A multiply-accumulate operation (MAC) is
counted for every matrix product of the patches and the layers, and one per token for every strength. Biases,
LayerNorm, row norms, softmax and GELU are not counted, nor is the classifier, whose MACs are listed separately. Other
conventions (`attnrx.costs.conventions`) follow from the same parts. Every layer counts all its tokens, although a model
may compute only the class token in the last block.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from attnrx.errors import InvalidInput
from attnrx.spec import AttentionSpec


@dataclass(frozen=True)
class PartCosts:
    """Trainable parameters, and the MACs of one image."""

    params: int = 0
    macs: int = 0

    def __add__(self, other: "PartCosts") -> "PartCosts":
        return PartCosts(self.params + other.params, self.macs + other.macs)


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one transformer block by part.

    `query_key` are the two projections of the score pathway, `scores` the products of queries and keys, `diagonal`
    the strengths, `fusion` a matrix that mixes the score maps of the heads, `value_output` the two projections of the
    other pathway, and `read_out` attention times values. `spec` and `tokens` are the inputs of the attention's costs.
    """

    query_key: PartCosts
    scores: PartCosts
    diagonal: PartCosts
    fusion: PartCosts
    value_output: PartCosts
    read_out: PartCosts
    mlp: PartCosts
    layer_norms: PartCosts
    directions: int
    direction: PartCosts
    """What each of the `directions` costs, which is what removing it saves."""
    spec: AttentionSpec
    tokens: int

    @property
    def parts(self) -> dict[str, PartCosts]:
        """Every part by its name; together they are the layer."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _FACTS}

    @property
    def total(self) -> PartCosts:
        """The whole layer."""
        return _sum(self.parts.values())

    @property
    def norm_features(self) -> int:
        """Features that the two LayerNorms divide for one image."""
        return 2 * self.tokens * self.spec.width


_FACTS = ("directions", "direction", "spec", "tokens")


@dataclass(frozen=True)
class Saving:
    """The absolute and relative saving of a smaller model; a mean over models may have fractions."""

    params: float
    macs: float
    params_share: float
    macs_share: float


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a whole model: patch embedding, layers, and the classifier with the norm before it.

    `embeddings` are the learned tokens and positions, which have no MACs; `predictors` are the modules that select
    tokens between layers, so that the layers have different numbers of tokens. `classifier_macs` and the norms are
    known but not part of `macs`, as in the paper.
    """

    patches: PartCosts
    layers: tuple[LayerCosts, ...]
    classifier: PartCosts
    classifier_macs: int
    embeddings: PartCosts = PartCosts()
    predictors: PartCosts = PartCosts()
    predictor_norm_features: int = 0
    """Features that the norms of the predictors divide for one image."""
    outer_norm_features: int | None = None
    """Features that the norms outside the layers divide for one image; None stands for one norm on all tokens."""

    @property
    def parts(self) -> dict[str, PartCosts]:
        """Every part by its name, summed over the layers; together they are the model."""
        names = self.layers[0].parts if self.layers else {}
        return {
            "patches": self.patches,
            "embeddings": self.embeddings,
            **{name: _sum(layer.parts[name] for layer in self.layers) for name in names},
            "predictors": self.predictors,
            "classifier": self.classifier,
        }

    @property
    def total(self) -> PartCosts:
        """The whole model."""
        return _sum(self.parts.values())

    @property
    def params(self) -> int:
        """All trainable parameters."""
        return self.total.params

    @property
    def macs(self) -> int:
        """MACs of one image, by the paper's convention."""
        return self.total.macs

    @property
    def product_macs(self) -> int:
        """MACs of every matrix product and convolution, including the classifier's: what a FLOP counter counts."""
        return self.macs + self.classifier_macs - sum(layer.diagonal.macs for layer in self.layers)

    @property
    def final_norm_features(self) -> int:
        """Features that the norms outside the layers divide for one image."""
        if self.outer_norm_features is not None:
            return self.outer_norm_features
        return self.layers[-1].tokens * self.layers[-1].spec.width if self.layers else 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of every layer."""
        return tuple(layer.tokens for layer in self.layers)

    @property
    def directions(self) -> int:
        """Score directions of all layers and heads."""
        return sum(layer.directions for layer in self.layers)

    def saving(self, smaller: "ModelCosts") -> Saving:
        """The saving of `smaller` against this model; negative if it costs more."""
        return self._saving(float(self.params - smaller.params), float(self.macs - smaller.macs))

    def saving_without(self, share: float) -> Saving:
        """The saving of removing this share of the directions: the same share in every layer, no head emptied.

        The saving is linear in the directions, so the share may be a mean over several models.
        """
        if not 0 <= share <= 1:
            raise InvalidInput(f"a share of {share} of the directions: give a share in [0, 1], e.g. 0.23 for 23 %.")
        params = sum(share * layer.directions * layer.direction.params for layer in self.layers)
        macs = sum(share * layer.directions * layer.direction.macs for layer in self.layers)
        return self._saving(params, macs)

    def to_record(self) -> dict[str, Any]:
        """Returns the totals and every part as JSON-ready values."""
        return {
            "params": self.params,
            "macs": self.macs,
            "classifier_macs": self.classifier_macs,
            "predictor_macs": self.predictors.macs,
            "tokens": list(self.tokens),
            "directions": self.directions,
            "parts": {name: {"params": part.params, "macs": part.macs} for name, part in self.parts.items()},
        }

    def _saving(self, params: float, macs: float) -> Saving:
        return Saving(params, macs, params / max(self.params, 1), macs / max(self.macs, 1))


def _sum(parts: Iterable[PartCosts]) -> PartCosts:
    return sum(parts, start=PartCosts())
