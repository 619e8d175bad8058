"""The methods of the IrrAtt paper's Table 1: their prescriptions, and their costs in closed form."""

from dataclasses import dataclass

from torch import nn

from attnrx.api import prescribe, realize
from attnrx.costs import IRRATT, Compression
from attnrx.diagnosis import Diagnosis
from attnrx.errors import UnknownName
from attnrx.models import family_of
from attnrx.prescription import Prescription
from attnrx.spec import AttentionSpec

# The rule text of each form of Compression for a number of directions: of each
# head for truncatt, of all heads together for the others. The constrained CP needs training, and has no rule.
RULES = {
    "truncatt": "uniform_rank:{rank},metric={metric}",
    "cp": "shared_rank:{rank},form=epc,joint={metric},seed={seed}",
    "irratt": "shared_rank:{rank},form=literal,joint={metric},seed={seed}",
}


@dataclass(frozen=True)
class IrrattMethod:
    """One line of the table: the form of queries and keys, and shares of the full ranks, so that it fits any model.

    `qk` is "full" or a form of `Compression`, `rank` the share of its directions, `vo` that of the value dimensions,
    `mlp` the rank of both maps of the MLP as a share of the width; None means unchanged. `by_training` marks a method
    whose
    ranks come from training with constraints (Eq. 7): its costs are computed, and it is not measured.
    """

    name: str
    qk: str = "full"
    rank: float = 1.0
    vo: float | None = None
    mlp: float | None = None
    by_training: bool = False

    def __post_init__(self):
        if self.qk not in ("full", *RULES):
            raise UnknownName("form of query and key", self.qk, ("full", *RULES))

    @property
    def changes(self) -> bool:
        """Whether it compresses anything; the original model does not."""
        return self.qk != "full" or self.vo is not None or self.mlp is not None

    def compression(self, spec: AttentionSpec) -> Compression:
        """The ranks for a layer of this shape."""
        directions = spec.original_rank if self.qk == "truncatt" else sum(spec.ranks)
        return Compression(
            self.qk if self.qk == "full" else f"{self.qk}:{_part(self.rank, directions)}",
            None if self.vo is None else _part(self.vo, spec.head_dim),
            None if self.mlp is None else _part(self.mlp, spec.width),
        )

    def prescription(self, diagnosis: Diagnosis, spec: AttentionSpec, metric: str, seed: int) -> Prescription:
        """Prescribes it for a model whose layers all have this shape."""
        ranks = self.compression(spec)
        form, _, rank = ranks.qk.partition(":")
        scores = RULES[form].format(rank=rank, metric=metric, seed=seed) if form in RULES else None
        vo, mlp = (None if own is None else f"uniform_rank:{own}" for own in (ranks.vo, ranks.mlp))
        return prescribe(diagnosis, {"qk": scores, "vo": vo, "fc1": mlp, "fc2": mlp})

    def candidate(self, model: nn.Module, diagnosis: Diagnosis, metric: str, seed: int) -> nn.Module:
        """Returns the smaller model; the original itself if nothing is compressed."""
        if not self.changes:
            return model
        spec = family_of(model).attention(model)[0].spec
        return realize(model, self.prescription(diagnosis, spec, metric, seed))


def paper_price(outline: nn.Module, method: IrrattMethod) -> dict[str, float]:
    """Returns the compression ratios in the paper's convention, in percent of the original; needs shapes only."""
    family = family_of(outline)
    specs = [layer.spec for layer in family.attention(outline)]
    compression = method.compression(specs[0])
    wanted = tuple(compression.spec(spec) for spec in specs)
    after = compression.as_written(family.costs(outline, wanted, compression.mlp_ranks(specs)))
    return IRRATT.price(after).percent_of(IRRATT.price(family.costs(outline)))


def realized_price(model: nn.Module, candidate: nn.Module) -> dict[str, float]:
    """Returns the same ratios of the realized model, whose IrrAtt is stored as shared directions."""
    prices = [IRRATT.price(family_of(each).costs(each)) for each in (candidate, model)]
    return prices[0].percent_of(prices[1])


def _part(share: float, whole: int) -> int:
    return max(1, round(share * whole))
