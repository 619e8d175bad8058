"""The content of a report: plain records. Every part is optional; a section is rendered if its data is given."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnrx.nouns.comparison import MethodComparison
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.plan import Plan
from attnrx.nouns.prescription import Prescription
from attnrx.show.reports.ranks import PathwayRanks
from attnrx.support.display import Displayed
from attnrx.support.errors import FingerprintMismatch, InvalidInput
from attnrx.support.shapes import Bool, Float, Int, Tensor
from attnrx.vit.costs import LatencyComparison, ModelCosts
from attnrx.vit.tokens import TokenPolicy

Interval = tuple[float, float]


@dataclass(frozen=True)
class TradeOffPoint:
    """The results of one realization at one retention ratio rho.

    `kind` is the realization ("mask", "renormalized", "exact", "refit"), `discrepancy` the relative logit discrepancy
    from the original (Eq. 46), and `accuracy_change` is in percentage points. Intervals are at 95 %.
    """

    rho: float
    kind: str
    removed_share: float
    discrepancy: float
    accuracy_change: float
    accuracy_interval: Interval | None = None
    discrepancy_interval: Interval | None = None


@dataclass(frozen=True)
class AttentionSamples:
    """Sample images in the unit range and, per model, the attention received by each patch.

    Received attention is the mean over the queries and sums to 1 over the patches; prefix tokens are excluded. `maps`
    is ordered, the original first, e.g. "original", "masked", "compressed", each [images, layers, heads, tokens]. The
    tokens are the patches of a square grid, row by row; a pruned head is NaN. `labels` are the classes of the images.
    """

    images: Float[Tensor, "images channels height width"]
    maps: Mapping[str, Tensor]
    labels: tuple[str, ...] = ()

    def __post_init__(self):
        count = self.images.shape[0]
        shapes = {name: tuple(maps.shape) for name, maps in self.maps.items()}
        if not shapes or count == 0:
            raise InvalidInput("attention samples without images or maps: omit the part from the report instead.")
        if len(set(shapes.values())) != 1 or next(iter(shapes.values()))[0] != count:
            raise InvalidInput(
                f"maps of shapes {shapes} for {count} images: "
                f"every model needs [{count}, layers, heads, tokens], all of the same shape."
            )
        if math.isqrt(self.tokens) ** 2 != self.tokens:
            raise InvalidInput(f"{self.tokens} tokens are not a square grid of patches; remove class tokens.")
        if self.labels and len(self.labels) != count:
            raise InvalidInput(f"{len(self.labels)} labels for {count} images: give one each, or none.")

    @property
    def tokens(self) -> int:
        return next(iter(self.maps.values())).shape[-1]

    @property
    def side(self) -> int:
        return math.isqrt(self.tokens)


@dataclass(frozen=True)
class TokenSamples:
    """Sample images in the unit range, and the patches kept by a token policy.

    `left` marks the patches kept after each stage of the `policy`; `tokens` is the number of tokens per layer, prefix
    tokens included. The patches form `grid` (rows, columns), row by row. `given` is the relevance assigned by the token
    reducer to the remaining patches, NaN for all others; `by_layer` is the relevance of all patches by each layer of
    the model without token reduction. For a token reducer that merges, `groups` holds the index of the patch whose
    token represents each patch after each stage. `labels` are the classes of the images.
    """

    images: Float[Tensor, "images channels height width"]
    left: Bool[Tensor, "images stages patches"]
    policy: TokenPolicy
    tokens: tuple[int, ...]
    grid: tuple[int, int]
    given: Float[Tensor, "images stages patches"] | None = None
    by_layer: Mapping[str, Float[Tensor, "images layers patches"]] | None = None
    labels: tuple[str, ...] = ()
    groups: Int[Tensor, "images stages patches"] | None = None

    def __post_init__(self):
        count, stages, patches = self.left.shape
        rows, columns = self.grid
        if not count or len(self.images) != count or (self.labels and len(self.labels) != count):
            raise InvalidInput(
                f"{len(self.images)} images, patches of {count} and {len(self.labels)} labels: give one each."
            )
        if stages != len(self.policy.layers) or rows * columns != patches:
            raise InvalidInput(
                f"{stages} stages and {patches} patches for a policy of {len(self.policy.layers)} stages and a grid "
                f"of {rows} x {columns}: they must agree."
            )


@dataclass(frozen=True, repr=False)
class ReportContent(Displayed):
    """The parts of one report about one candidate.

    `about` is a free record: the model, the data, the versions, the seed, the command. `history` holds the records of a
    training run, one per epoch. `costs` are those of the original and of the candidate. Missing `costs` and `latency`
    are taken from the evidence, missing `ranks` from the prescription. `comparison` is about several candidates, and
    the front of the `plan` has the plans that were measured on the way to this candidate.
    """

    title: str
    about: Mapping[str, Any] = field(default_factory=dict)
    prescription: Prescription | None = None
    diagnosis: Diagnosis | None = None
    evidence: Evidence | None = None
    trade_off: tuple[TradeOffPoint, ...] = ()
    attention: AttentionSamples | None = None
    tokens: TokenSamples | None = None
    history: tuple[Mapping[str, Any], ...] = ()
    costs: tuple[ModelCosts, ModelCosts] | None = None
    latency: tuple[LatencyComparison, ...] = ()
    ranks: tuple[PathwayRanks, ...] = ()
    comparison: MethodComparison | None = None
    plan: Plan | None = None

    def __post_init__(self):
        # By the fields themselves, so that a new part needs no change here.
        parts = [value for name, value in vars(self).items() if name not in ("title", "about")]
        if all(part is None or part == () for part in parts):
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
