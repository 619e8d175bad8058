"""Contenders: ways of compressing a model as text, and as something that prices and makes the model at any share."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from attnrx.budget import costs_at, least_share
from attnrx.costs import ModelCosts
from attnrx.data import ImageSet
from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput, NothingChanged
from attnrx.experiments.peers import Maker, MapStatistics, make_peer, places, require_peer
from attnrx.flow import prescribe, realize
from attnrx.models import family_of, shape_of
from attnrx.realization import realize_tokens_
from attnrx.refinement import Refinement, refine
from attnrx.rules import SHARE, Template

KINDS = ("values", "mlp", "tokens", "refine", "maps")


@dataclass(frozen=True)
class Contender:
    """One way of compressing: the texts of its rules, in which {share} stands for the share that is kept, or a peer.

    `tokens` is the text of a policy, whose ratio may be {share} too.
    `refined` are the steps of a refinement of the queries and keys on the calibration images afterwards. A `peer` is
    one of PEERS, and `maps` the linear maps that it writes as two (all, if none is named).
    """

    name: str
    rule: str | None = None
    metric: str | None = None
    values: str | None = None
    mlp: str | None = None
    refined: int = 0
    peer: str | None = None
    maps: tuple[str, ...] = ()
    tokens: str | None = None

    def __post_init__(self):
        if self.peer is None:
            if self.maps:
                raise InvalidInput(f"{self.name}: maps={','.join(self.maps)} goes with a peer, e.g. peer:svd.")
            return
        if self.has_rules or self.refined:
            raise InvalidInput(
                f"{self.name}: a peer takes no rules and no refinement; make them contenders of their own."
            )
        require_peer(self.peer, self.maps)

    @classmethod
    def parse(cls, text: str) -> "Contender":
        """Reads `NAME=RULE[@METRIC][+values=RULE][+mlp=RULE][+tokens=POLICY][+refine=STEPS]`, or
        `NAME=peer:PEER[+maps=MAP,MAP]`.
        """
        name, equals, rest = text.partition("=")
        if not equals or not name or not rest:
            raise InvalidInput(f"the contender {text!r} is not NAME=RULE, e.g. mix=total_rank:{SHARE}.")
        parts: dict[str, str] = {}
        for part in rest.split("+"):
            kind, given, value = part.partition("=")
            if not given or kind not in KINDS:
                kind, value = "rule", part
            if kind in parts or not value:
                raise InvalidInput(
                    f"{part!r} in {text!r}: give one RULE, and after + values=, mlp=, tokens= or refine= once."
                )
            parts[kind] = value
        steps = parts.get("refine", "0")
        if not (steps.isascii() and steps.isdigit()):
            raise InvalidInput(f"refine={steps!r} in {text!r}: give a whole number of steps, e.g. 200.")
        rule, _, metric = parts.get("rule", "").partition("@")
        is_peer, peer = rule.startswith("peer:"), rule.removeprefix("peer:")
        maps = tuple(parts["maps"].split(",")) if "maps" in parts else ()
        return cls(
            name,
            None if is_peer else rule or None,
            metric or None,
            parts.get("values"),
            parts.get("mlp"),
            int(steps),
            peer if is_peer else None,
            maps,
            parts.get("tokens"),
        )

    @property
    def has_rules(self) -> bool:
        """Whether it has any rule."""
        return any(text is not None for text in (self.rule, self.metric, self.values, self.mlp, self.tokens))

    @property
    def template(self) -> Template:
        """Its rules, the share still open."""
        return Template(self.rule, self.metric, self.values, self.mlp, self.tokens)

    @property
    def varies(self) -> bool:
        """Whether it depends on the share at all."""
        return self.peer is not None or self.template.varies


@dataclass(frozen=True)
class Bench:
    """A model, what was diagnosed of it, the images that it is fitted on, and those that everything is measured on."""

    model: nn.Module
    diagnosis: Diagnosis
    calibration: ImageSet
    test: ImageSet
    seed: int = 0
    batch_size: int = 64

    def told(self, contenders: Sequence[Contender]) -> dict[str, Any]:
        """Tells what contenders were made from and with, as JSON-ready values."""
        return {
            "diagnosis": dict(self.diagnosis.about),
            "seed": self.seed,
            "contenders": [asdict(contender) for contender in contenders],
            "torch": torch.__version__,
        }


@dataclass(frozen=True)
class RuleMaker(Maker):
    """Prescribes and realizes."""

    bench: Bench
    contender: Contender
    _known: dict[float, ModelCosts] = field(default_factory=dict)

    @property
    def least(self) -> float:
        """The smallest share that can be prescribed."""
        return least_share(self.bench.model, self.contender.template)

    def costs(self, share: float) -> ModelCosts:
        """Prices what is prescribed; each share once."""
        if share not in self._known:
            self._known[share] = costs_at(self.bench.model, self.bench.diagnosis, self.contender.template, share)
        return self._known[share]

    def make(self, share: float) -> nn.Module:
        """Realizes what is prescribed, and refines it where that is asked for.

        At a share that keeps everything the model itself is returned, as `costs` prices it there; rules without a share
        that change nothing raise NothingChanged.
        """
        bench, contender = self.bench, self.contender
        try:
            found = prescribe(bench.diagnosis, **contender.template.at(share))
        except NothingChanged:
            if not contender.varies:
                raise
            return bench.model
        if not contender.refined:
            return realize(bench.model, found)
        candidate = realize(bench.model, replace(found, tokens=None))
        knobs = Refinement(steps=contender.refined, seed=bench.seed)
        candidate = refine(candidate, bench.model, bench.calibration, knobs).model
        if found.tokens is not None:  # last, as refinement watches all tokens
            family = family_of(candidate)
            realize_tokens_(candidate, family, found.tokens, "compress", shape_of(bench.model, family).heads)
        return candidate


class Makers:
    """The makers of a bench; peers share the statistics that they are calibrated on."""

    def __init__(self, bench: Bench):
        self.bench = bench

    def of(self, contender: Contender) -> Maker:
        """Gives the maker of one contender."""
        if contender.peer is None:
            return RuleMaker(self.bench, contender)
        bench = self.bench
        return make_peer(bench.model, contender.peer, contender.maps, bench.calibration, self._statistics)

    @cached_property
    def _statistics(self) -> MapStatistics:
        bench = self.bench
        return MapStatistics(bench.model, places(bench.model), bench.calibration, min(bench.batch_size, 32))
