"""Rules for directions that all heads share: CP SlimAtt and irregular attention, both from the IrrAtt paper."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from attnrx.decide.diagnostics import Diagnostic, query_grams
from attnrx.decide.rules.rule import Rule, keep_only, largest, learned_spectrum
from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.nouns.prescription import Basis, ScoreDecision
from attnrx.support.arguments import Kind, one_of, optional
from attnrx.support.errors import InvalidRule, NotSupported, UnknownName
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention import Observation
from attnrx_lab.decompositions import Canonical, FactoredTensor, als, block_terms, cpd_epc, fusion_ranks

AUGMENTED = "augmented"
JOINT_METRICS = ("weights", AUGMENTED, "centered")
SHARED_FORMS = ("cp", "epc", "literal")
# Singular values below this share of the largest one are rounding errors.
NOISE = 1e-12


def rank_among(value: int | float, total: int) -> int:
    """Returns `value` if it is an integer, or the share `value` of `total` (rounded, at least 1) if it is a float."""
    return value if isinstance(value, int) else max(1, round(value * total))


@dataclass(frozen=True)
class JointMoments(Diagnostic):
    """Returns the readings query_joint_gram and key_joint_covariance, both [heads, directions, heads * directions].

    The joint moments are computed like query_gram and key_covariance, but for the concatenated rows of all heads. Rules
    for shared directions need them for the metric "centered".
    """

    def measure(self, observation: Observation) -> dict[str, Tensor]:
        return {
            "query_joint_gram": _joint_grams(observation.query).mean(0),
            "key_joint_covariance": _joint_grams(observation.key - observation.key.mean(1, keepdim=True)).mean(0),
        }


def _joint_grams(
    rows: Float[Tensor, "batch tokens heads directions"],
) -> Float[Tensor, "batch heads directions features"]:
    """Returns every image's second moment of the concatenated rows of all heads, averaged over the tokens."""
    # Treats all heads as one head of `heads * directions` features, then splits the rows of its moment by head.
    heads = rows.shape[2:]
    return query_grams(rows.flatten(2).unsqueeze(2)).squeeze(1).unflatten(1, heads)


class JointForm:
    """A layer's query-key tensor Y[:, :, h] = query_h^T key_h in a metric. `basis` turns its factors into directions.

    With the metrics "weights" and "augmented", the first two modes of the tensor are the features of a token. The
    metric "augmented" appends a 1 to the query features to represent the query bias. The metric "centered" instead uses
    the square roots of two second moments: one of the queries of all heads, and one of the centred keys of all heads.
    If queries and keys are independent, the squared norm of this tensor equals the mean square of the centred scores.
    """

    def __init__(self, layer: LayerDiagnosis, metric: str):
        spectrum = layer.spectrum
        if metric not in JOINT_METRICS:
            raise UnknownName("metric of shared directions", metric, JOINT_METRICS)
        if spectrum.pairs is not None:
            raise InvalidRule("heads with rotated pairs (rotary positions) cannot share directions.")
        if spectrum.shared:
            raise InvalidRule(
                "the heads of this layer share their directions already; prescribe the original model, or remove some "
                "of the directions, e.g. qk=total_rank:0.5."
            )
        if spectrum.has_norms:
            raise InvalidRule("heads whose rows are divided by their norms (SVDA) cannot share directions.")
        if metric == "centered":
            self.query, self.key = (
                _rooted(layer.reading(name)) for name in ("query_joint_gram", "key_joint_covariance")
            )
        else:
            # The query rows include the strengths. The key bias is omitted, because it cancels in the softmax.
            query = spectrum.query if metric == AUGMENTED else spectrum.query[..., :-1]
            self.query, self.key = spectrum.strength[..., None] * query.double(), spectrum.key[..., :-1].double()
        self.tensor = FactoredTensor(self.query, self.key)

    def basis(
        self, left: Float[Tensor, "rows rank"], right: Float[Tensor, "columns rank"]
    ) -> tuple[Float[Tensor, "1 rank stacked"], Float[Tensor, "1 rank stacked"]]:
        """Returns the coefficients that express the factors as linear combinations of the stacked rows of all heads."""
        return _combination(self.query, left), _combination(self.key, right)


def _rooted(gram: Float[Tensor, "heads directions features"]) -> Float[Tensor, "heads directions features"]:
    """Returns the symmetric square root of a joint second moment, with its rows split by head."""
    square = gram.double().flatten(0, 1)
    values, vectors = torch.linalg.eigh((square + square.mT) / 2)
    return ((vectors * values.clamp_min(0).sqrt()) @ vectors.mT).reshape(gram.shape)


def _combination(rows: Float[Tensor, "heads directions features"], factor: Tensor) -> Float[Tensor, "1 rank stacked"]:
    # Least-squares factors lie in the span of the rows (`left_products`), which may be linearly dependent.
    stacked = rows.flatten(0, 1)
    return (torch.linalg.pinv(stacked.mT, rtol=NOISE) @ factor).mT[None].contiguous()


@dataclass(frozen=True)
class SharedRank(Rule):
    """Expresses a layer's scores by `rank` directions that all heads share (IrrAtt, Eqs. 3 and 4).

    `rank` is an integer, or a share of the number of directions in the layer. `form` selects how the query-key tensor
    is decomposed. "cp" uses alternating least squares. "epc" adds an error-preserving correction, which limits the size
    of the terms (CPD-EPC). "cp" and "epc" first run least squares from two starts: water-filling, and random terms
    (drawn with `seed`). They continue from the result with the smaller error. The terms are realized in the shared form
    (CP SlimAtt). "literal" computes a block-term decomposition, BTD-(L, L, 1), exactly as printed in IrrAtt's
    Algorithms 1 to 3. The directions then form blocks, and each block has one strength per head. Block terms are
    realized in the mixed form (IrrAtt). `joint` is the metric (one of JOINT_METRICS). "centered" needs the diagnostic
    `JointMoments`. The rule keeps all `rank` directions.
    """

    applies_to: ClassVar[tuple[str, ...]] = ("qk",)
    kinds: ClassVar[Mapping[str, Kind]] = {"form": one_of(*SHARED_FORMS), "joint": one_of(*JOINT_METRICS)}

    rank: int | float
    form: str = "epc"
    joint: str = AUGMENTED
    sweeps: int = 100
    seed: int = 0

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = diagnosis.layers[layer].spectrum
        form = JointForm(diagnosis.layers[layer], self.joint)
        rank = rank_among(self.rank, int(spectrum.used.sum()))
        terms, blocks = self._decompose(form.tensor, rank)
        left, right = form.basis(terms.left, terms.right)
        error, heads = form.tensor.relative_error(*terms.factors), len(spectrum.heads)
        groups = "" if blocks is None else f" in {len(blocks)} blocks"
        why = f"shares {rank} directions{groups} with all heads of the layer; relative error of the form {error:.3g}"
        keep = torch.ones(heads, rank, dtype=torch.bool)
        return ScoreDecision(keep, terms.mix, (why,) * heads, Basis(left, right, shared=True, blocks=blocks))

    def _decompose(self, tensor: FactoredTensor, rank: int) -> tuple[Canonical, tuple[int, ...] | None]:
        """Returns the terms of the decomposition. For block terms, also returns the number of terms in every block."""
        if self.form == "cp":
            return als(tensor, rank, sweeps=self.sweeps, seed=self.seed), None
        if self.form == "epc":
            # The terms become weights of the model. `finish` makes them less sensitive to rounding and easier to train.
            return cpd_epc(tensor, rank, sweeps=self.sweeps, finish=True, seed=self.seed), None
        terms = block_terms(tensor, rank, sweeps=self.sweeps, seed=self.seed)
        return terms.canonical, terms.ranks


@dataclass(frozen=True)
class FusionRank(Rule):
    """Keeps as many directions in each head as the fusion matrix of a CP decomposition assigns to this head.

    CPD-EPC decomposes the query-key tensor into `rank` terms. Every term is assigned to the head that uses it most
    (IrrAtt, Algorithm 1). If a head gets r terms, it keeps its own r strongest directions, or all if it has fewer. The
    result equals a block-term decomposition with the identity as fusion matrix, so the model needs no fusion layer.
    `sweeps` and `seed` control the decomposition, as in `shared_rank`. The metric is "augmented" (the default) or
    "weights".
    """

    kinds: ClassVar[Mapping[str, Kind]] = {"metric": optional(one_of("weights", AUGMENTED))}
    default_metric: ClassVar[str | None] = AUGMENTED
    applies_to: ClassVar[tuple[str, ...]] = ("qk",)

    rank: int | float
    sweeps: int = 100
    seed: int = 0

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = learned_spectrum(self, diagnosis, layer)
        total = rank_among(self.rank, int(spectrum.used.sum()))
        # The tensor determines only the ranks. Every head keeps the strongest of its own directions in the metric.
        tensor = JointForm(diagnosis.layers[layer], self.metric or AUGMENTED).tensor
        fusion = fusion_ranks(cpd_epc(tensor, total, sweeps=self.sweeps, seed=self.seed))
        outside = float(fusion.off_block.mean())
        notes = [
            f"owns {rank} of {total} shared directions, {100 * outside:.1f} % of whose energy lies in other heads"
            for rank in fusion.ranks
        ]
        ranks = torch.tensor(fusion.ranks, dtype=torch.long)
        return keep_only(spectrum, largest(spectrum.strength.abs(), spectrum.used, ranks), notes)


@dataclass(frozen=True)
class FusionOwner(Rule):
    """Converts a CP SlimAtt layer, trained or not, into irregular attention (IrrAtt, Section 3.1, Eqs. 5 and 6).

    Every shared direction is assigned to the head in which its |strength| is largest, and is removed from all other
    heads. The conversion is exact if every column of the fusion matrix has only one nonzero value. Training under the
    paper's constraint (Eq. 7) leads to such columns. The query and key rows of the directions do not change.

    Raises:
        NotSupported: The heads of the layer do not share directions (raised by `decide`).
    """

    applies_to: ClassVar[tuple[str, ...]] = ("qk",)

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum = diagnosis.layers[layer].spectrum
        heads = len(spectrum.heads)
        if not spectrum.shared or heads < 2:
            raise NotSupported(
                f"{self} divides directions that several heads share, and layer {layer + 1} has {heads} heads with "
                f"{'shared' if spectrum.shared else 'their own'} directions; use fusion_rank, total_rank or "
                "uniform_rank."
            )
        # Each shared direction has one owner. The factors are [features, directions].
        left, right = (table[0].double().mT for table in (spectrum.query, spectrum.key))
        fusion = fusion_ranks(Canonical(left, right, spectrum.strength.double()))
        keep = fusion.owner == torch.arange(heads)[:, None]
        # With the clamp, the share of a head without directions is 0.
        outside = (keep * fusion.off_block).sum(-1) / keep.sum(-1).clamp_min(1)
        notes = [f"owns those, {100 * share:.1f} % of whose energy lies in other heads" for share in outside.tolist()]
        return keep_only(spectrum, keep, notes)
