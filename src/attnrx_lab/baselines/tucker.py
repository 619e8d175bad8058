"""Baselines that decompose a layer's query-key tensor into Tucker terms. The heads share each term's factors."""

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.nouns.diagnosis import Diagnosis
from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention import Attention
from attnrx.vit.attention.head_linear import HeadLinear
from attnrx.vit.costs import ModelCosts, PartCosts
from attnrx.vit.models import family_of
from attnrx.vit.spec import AttentionSpec
from attnrx_lab.baselines.compressor import ModelCompressor
from attnrx_lab.decompositions import Tucker, tucker_terms
from attnrx_lab.rules.shared import AUGMENTED, JointForm, rank_among

TUCKER, TUCKER_TERMS = "tucker", "tucker_terms"


class CoreQueries(HeadLinear):
    """Computes queries by one shared projection, followed by a matrix [features, rows] per head and Tucker term."""

    def __init__(self, width: int, heads: int, terms: int, rank: int, bias: bool):
        # The inherited weight, [heads * terms * rank, rank], contains the matrices. Each head orders its rows by term.
        super().__init__(rank, (terms * rank,) * heads, bias)
        self.heads, self.terms = heads, terms
        self.first = nn.Linear(width, terms * rank, bias=False)

    def forward(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens rows"]:
        features = self.first(tokens).unflatten(-1, (self.terms, -1))
        cores = self.weight.view(self.heads, self.terms, *(self.weight.shape[1],) * 2)
        rows = torch.einsum("bntl,html->bnhtm", features, cores).flatten(2)
        return rows if self.bias is None else rows + self.bias

    def padded(
        self, tokens: Float[Tensor, "batch tokens width"], rows: tuple[int, ...], factor: float = 1.0
    ) -> Float[Tensor, "batch tokens rows"]:
        return _padded(self(tokens) * factor, self.rows, rows)


class SharedKeys(HeadLinear):
    """Computes one set of keys, which all heads share."""

    def __init__(self, width: int, heads: int, rank: int):
        super().__init__(width, (rank,), bias=False)
        self.rows = (rank,) * heads

    def forward(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens rows"]:
        return F.linear(tokens, self.weight).repeat(1, 1, len(self.rows))

    def padded(
        self, tokens: Float[Tensor, "batch tokens width"], rows: tuple[int, ...], factor: float = 1.0
    ) -> Float[Tensor, "batch tokens rows"]:
        return _padded(self(tokens) * factor, self.rows, rows)


def _padded(features: Tensor, own: tuple[int, ...], rows: tuple[int, ...]) -> Tensor:
    """Pads each head's features with zeros up to the head's size in `rows`. All heads must have the same size there."""
    if rows == own:
        return features
    return F.pad(features.unflatten(-1, (len(own), own[0])), (0, rows[0] - own[0])).flatten(-2)


class TuckerBaseline(ModelCompressor):
    """Decomposes the query-key tensor of every layer, [features, features, heads], into Tucker terms.

    The kind `tucker` uses one term (IrrAtt, Appendix A.2). `tucker_terms` uses one term per head, which is the general
    block-term decomposition. Together, the first factors of all terms have about as many columns as the number of
    directions that the rule `shared_rank` would keep. The second factors have the same number of columns. The third
    mode, which indexes the heads, is not compressed. The tensor includes the query bias. It omits the key bias, because
    the key bias cancels in the softmax. The value projections and the MLP do not change.

    Raises:
        NotSupported: The attention scores of a layer use rotations, biases per pair of tokens, or norms.
    """

    def __init__(self, model: nn.Module, diagnosis: Diagnosis, kind: str):
        self.model, self.diagnosis, self.kind = model, diagnosis, kind
        self.attention = family_of(model).attention(model)
        if not all(layer.spec.is_plain for layer in self.attention):
            raise NotSupported(f"the baseline {kind} needs plain dot products in every layer.")

    def costs(self, share: float) -> ModelCosts:
        family, layers = family_of(self.model), []
        specs = [self._spec(layer.spec, share) for layer in self.attention]
        costs = family.costs(self.model, attention=tuple(specs))
        for layer, spec, own in zip(costs.layers, specs, self.attention, strict=True):
            terms, rank = self._shape(own.spec, share)
            heads, rows = len(spec.heads), terms * rank
            # `family.costs` counts the rows of queries and keys once per head. But all heads share their features, so
            # `change` corrects the count.
            change = rows * (spec.width + heads * rank) + rows * spec.width - 2 * heads * rows * spec.width
            layers.append(replace(layer, query_key=layer.query_key + PartCosts(change, layer.tokens * change)))
        return replace(costs, layers=tuple(layers))

    def make(self, share: float) -> nn.Module:
        changed = copy.deepcopy(self.model)
        family = family_of(changed)
        for index, attention in enumerate(family.attention(changed)):
            terms, rank = self._shape(attention.spec, share)
            tensor = JointForm(self.diagnosis.layers[index], AUGMENTED).tensor
            found = tucker_terms(tensor, terms, (rank, rank, len(attention.spec.heads)))
            family.set_attention_(changed, index, self._decomposed(attention, found, share))
        return changed

    def _shape(self, spec: AttentionSpec, share: float) -> tuple[int, int]:
        """Returns a layer's number of Tucker terms, and the number of columns in the first two factors of each term."""
        terms = 1 if self.kind == TUCKER else len(spec.heads)
        columns = rank_among(share, sum(spec.ranks))
        # The size of a mode limits the columns of its factor. Of the first two modes, the mode of the keys is smaller.
        return terms, min(max(1, columns // terms), spec.width)

    def _spec(self, spec: AttentionSpec, share: float) -> AttentionSpec:
        terms, rank = self._shape(spec, share)
        rows, biases = terms * rank, tuple(bias for bias in spec.biases if bias != "key")
        return replace(
            spec, ranks=(rows,) * len(spec.heads), original_rank=max(rows, spec.original_rank), biases=biases
        )

    @torch.no_grad()
    def _decomposed(self, attention: Attention, terms: tuple[Tucker, ...], share: float) -> Attention:
        spec, weight = self._spec(attention.spec, share), attention.value.weight
        count, rank, has_bias = len(terms), terms[0].core.shape[0], spec.has_bias("query")
        result = Attention(spec, attention.backend).to(weight)
        result.value.load_state_dict(attention.value.state_dict())
        result.output.load_state_dict(attention.output.state_dict())
        result.kept_patches = attention.kept_patches
        result.inner_norms.update(copy.deepcopy(dict(attention.inner_norms.items())))
        query = CoreQueries(spec.width, len(spec.heads), count, rank, has_bias).to(weight)
        key = SharedKeys(spec.width, len(spec.heads), count * rank).to(weight)
        # score_h = (x, 1) left core_h right^T y for each term. The last row of `left` belongs to the bias.
        query.first.weight.copy_(torch.cat([term.left[:-1] for term in terms], 1).mT)
        cores = torch.stack([term.slice_cores for term in terms], 1)  # [heads, terms, left, right]
        query.weight.copy_(cores.mT.flatten(0, 2))
        if query.bias is not None:
            bias = torch.stack([term.left[-1] for term in terms])  # [terms, left]
            query.bias.copy_(torch.einsum("tl,htlm->htm", bias, cores).flatten())
        key.weight.copy_(torch.cat([term.right for term in terms], 1).mT)
        result.scores.query, result.scores.key = query, key
        return result.train(attention.training)
