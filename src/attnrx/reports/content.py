"""What a report can show: plain records, every part optional; a section appears when its data is there."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attnrx.costs import LatencyComparison, ModelCosts
from attnrx.diagnosis import Diagnosis
from attnrx.errors import FingerprintMismatch, InvalidInput
from attnrx.evidence import Evidence
from attnrx.prescription import Prescription
from attnrx.reports.comparison import ComparisonRecord
from attnrx.reports.ranks import PathwayRanks
from attnrx.shapes import Bool, Float, Tensor
from attnrx.tokens import TokenPolicy

Interval = tuple[float, float]


@dataclass(frozen=True)
class TradeOffPoint:
    """One realization at one retention ratio rho: what it removes and what that does.

    `kind` names the realization ("mask", "renormalized", "exact", "refit"), `discrepancy` is the relative logit
    discrepancy to the original (Eq. 46), and `accuracy_change` is in percentage points. Intervals are at 95 %.
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
    """Sample images in the unit range and, per model, the attention that each of their tokens receives.

    Received attention is the mean over the queries, so that it adds up to 1 over the tokens; where other
    tokens stand before the patches, it is that among the patches. `maps` is ordered, the original first, e.g.
    "original", "masked", "compressed", each [images, layers, heads, tokens]. The tokens are the patches of a square
    grid, row by row; a head that was removed holds not-a-number. `labels` say what the images show.
    """

    images: Float[Tensor, "images channels height width"]
    maps: Mapping[str, Tensor]
    labels: tuple[str, ...] = ()

    def __post_init__(self):
        count = self.images.shape[0]
        shapes = {name: tuple(maps.shape) for name, maps in self.maps.items()}
        if not shapes or count == 0:
            raise InvalidInput("attention samples without images or maps: leave the part out of the report instead.")
        if len(set(shapes.values())) != 1 or next(iter(shapes.values()))[0] != count:
            raise InvalidInput(
                f"maps of shapes {shapes} for {count} images: "
                f"every model needs [{count}, layers, heads, tokens], all of the same shape."
            )
        if math.isqrt(self.tokens) ** 2 != self.tokens:
            raise InvalidInput(f"{self.tokens} tokens are not a square grid of patches; leave class tokens out.")
        if self.labels and len(self.labels) != count:
            raise InvalidInput(f"{len(self.labels)} labels for {count} images: give one each, or none.")

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return next(iter(self.maps.values())).shape[-1]

    @property
    def side(self) -> int:
        """Patches in a row of an image."""
        return math.isqrt(self.tokens)


@dataclass(frozen=True)
class TokenSamples:
    """Sample images in the unit range, and what became of their patches.

    `left` says which patches are there after each stage of the `policy`; `tokens` how many tokens, all that are no
    patches among them, every layer of the model sees. The patches lie in `grid`, rows and columns, row by row. `given`
    is the relevance that the reducer gave to the patches that were there, not-a-number for all others; `by_layer` the
    relevance of all patches by each layer of the model from which nothing leaves. `labels` say what the images show.
    """

    images: Float[Tensor, "images channels height width"]
    left: Bool[Tensor, "images stages patches"]
    policy: TokenPolicy
    tokens: tuple[int, ...]
    grid: tuple[int, int]
    given: Float[Tensor, "images stages patches"] | None = None
    by_layer: Mapping[str, Float[Tensor, "images layers patches"]] | None = None
    labels: tuple[str, ...] = ()

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


@dataclass(frozen=True)
class ReportContent:
    """Everything one report may say about one candidate.

    `about` is free: the model, the data, the versions, the seed, the command. `history` holds the records of a training
    run, one per epoch. `costs` are those of the original and of the candidate; where they or `latency` are not given,
    they are taken from the evidence, and `ranks` from the prescription. A `comparison` is of several candidates.
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
    comparison: ComparisonRecord | None = None

    def __post_init__(self):
        samples = (self.attention, self.tokens)
        parts = (self.prescription, self.diagnosis, self.evidence, *samples, self.costs, self.comparison)
        lists = (self.trade_off, self.history, self.latency, self.ranks)
        if all(part is None for part in parts) and not any(lists):
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
