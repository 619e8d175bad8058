"""Methods: ways of compressing a model as text, and the compressors that make the model at any share."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from attnrx.api import prescribe, realize
from attnrx.costs import ModelCosts
from attnrx.data import ImageSet
from attnrx.diagnosis import Diagnosis
from attnrx.errors import InvalidInput, NoOpPrescription
from attnrx.models import family_of, shape_of
from attnrx.planning.budget import costs_at, least_share
from attnrx.realization import realize_tokens_
from attnrx.realization.refinement import Refinement, refine
from attnrx.rules import SHARE, Template
from attnrx_lab.baselines import MapStatistics, ModelCompressor, make_baseline, map_addresses, require_baseline

EXTRAS = re.compile(r"(?:^|\s+)(refine|maps)=(\S*)")


@dataclass(frozen=True)
class Method:
    """One way of compressing: the text of its rules, in which {share} is replaced by the kept share, or a baseline.

    `refined` is the number of steps of a refinement of the queries and keys on the calibration images afterwards. A
    `baseline` is one of BASELINES, and `maps` the linear maps that it factors (all by default).
    """

    name: str
    rules: str = ""
    refined: int = 0
    baseline: str | None = None
    maps: tuple[str, ...] = ()

    def __post_init__(self):
        if self.baseline is None:
            if self.maps:
                raise InvalidInput(f"{self.name}: maps={','.join(self.maps)} goes with a baseline, e.g. baseline:svd.")
            return
        if self.rules or self.refined:
            raise InvalidInput(
                f"{self.name}: a baseline takes no rules and no refinement; make them methods of their own."
            )
        require_baseline(self.baseline, self.maps)

    @classmethod
    def parse(cls, text: str) -> "Method":
        """Parses `NAME=RULES [refine=STEPS]`, with the RULES of `prescribe`, or `NAME=baseline:BASELINE
        [maps=MAP,MAP]`.
        """
        name, equals, rest = text.partition("=")
        if not equals or not name.strip() or not rest.strip():
            raise InvalidInput(f"the method {text!r} is not NAME=RULES, e.g. mix=qk=total_rank:{SHARE}.")
        found = EXTRAS.findall(rest)
        extras, rules = dict(found), EXTRAS.sub("", rest).strip()
        if len(extras) < len(found) or not all(extras.values()):
            raise InvalidInput(f"{text!r}: give refine=STEPS or maps=MAP,MAP once.")
        steps = extras.get("refine", "0")
        if not (steps.isascii() and steps.isdigit()):
            raise InvalidInput(f"refine={steps!r} in {text!r}: give a whole number of steps, e.g. 200.")
        maps = tuple(extras["maps"].split(",")) if "maps" in extras else ()
        if rules.startswith("baseline:"):
            baseline, _, rest = rules.removeprefix("baseline:").partition(" ")
            return cls(name.strip(), rest, int(steps), baseline, maps)
        made = cls(name.strip(), rules, int(steps), maps=maps)
        made.template  # noqa: B018, refuses maps that do not exist
        return made

    @property
    def template(self) -> Template:
        """Its rules, with the share still open."""
        return Template.parse(self.rules)

    @property
    def varies(self) -> bool:
        return self.baseline is not None or self.template.varies


@dataclass(frozen=True)
class MethodBench:
    """A model, its diagnosis, the images for fitting the methods, and the images for measuring them."""

    model: nn.Module
    diagnosis: Diagnosis
    calibration: ImageSet
    test: ImageSet
    seed: int = 0
    batch_size: int = 64

    def compressor(self, method: Method) -> ModelCompressor:
        """Returns the compressor of one method; baselines share their calibration statistics."""
        if method.baseline is None:
            return RuleCompressor(self, method)
        return make_baseline(self.model, method.baseline, method.maps, self.calibration, self._statistics)

    @cached_property
    def _statistics(self) -> MapStatistics:
        # Small batches: the inputs of every map are converted to float64.
        return MapStatistics(self.model, map_addresses(self.model), self.calibration, min(self.batch_size, 32))

    def describe(self, methods: Sequence[Method]) -> dict[str, Any]:
        return {
            "diagnosis": dict(self.diagnosis.about),
            "seed": self.seed,
            "methods": [asdict(method) for method in methods],
            "torch": torch.__version__,
        }


@dataclass(frozen=True)
class RuleCompressor(ModelCompressor):
    """Prescribes and realizes."""

    bench: MethodBench
    method: Method
    _known: dict[float, ModelCosts] = field(default_factory=dict)

    @property
    def least(self) -> float:
        return least_share(self.bench.model, self.method.template)

    def costs(self, share: float) -> ModelCosts:
        """Returns the costs of the prescription; computed once per share."""
        if share not in self._known:
            self._known[share] = costs_at(self.bench.model, self.bench.diagnosis, self.method.template, share)
        return self._known[share]

    def make(self, share: float) -> nn.Module:
        """Realizes the prescription, and refines it if requested.

        At a share that keeps everything the model itself is returned, as in `costs`; rules without a share that change
        nothing raise NoOpPrescription.
        """
        bench, method = self.bench, self.method
        try:
            found = prescribe(bench.diagnosis, method.template.at(share))
        except NoOpPrescription:
            if not method.varies:
                raise
            return bench.model
        if not method.refined:
            return realize(bench.model, found)
        candidate = realize(bench.model, replace(found, tokens=None))
        knobs = Refinement(steps=method.refined, seed=bench.seed)
        candidate = refine(candidate, bench.model, bench.calibration, knobs).model
        if found.tokens is not None:  # last, because refinement observes all tokens
            family = family_of(candidate)
            realize_tokens_(candidate, family, found.tokens, "compress", shape_of(bench.model, family).heads)
        return candidate
