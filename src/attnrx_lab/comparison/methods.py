"""Methods: ways of compressing a model as text, with one open share, and the compressors that make the model at any."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import floor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.change.realization.realizing import fits_of, realize_and_fit
from attnrx.data import ImageSet
from attnrx.data.model_data import normalization_of
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.decide.rules import parse_rules, prescribe_maps, split_maps
from attnrx.decide.rules.prescribing import prescribe
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import TokenPrescription
from attnrx.support.errors import InvalidInput, NoOpPrescription, UnknownName
from attnrx.support.text_parsing import split_named
from attnrx.vit.costs import ModelCosts
from attnrx.vit.maps import FITS, TOKENS
from attnrx.vit.models import family_of, num_outputs
from attnrx.vit.models.boundary.working_copy import working_copy
from attnrx.vit.tokens import parse_policy
from attnrx.workflows.load import load
from attnrx_lab.baselines import (
    BASELINES,
    DECOMPOSED,
    FACTORS,
    PRESCRIBED,
    DiffRateBaseline,
    FactoringBaseline,
    GatedBaseline,
    MapStatistics,
    ModelCompressor,
    TorchPruningBaseline,
    TuckerBaseline,
)
from attnrx_lab.baselines.compressor import GRID, largest_share
from attnrx_lab.comparison.record import Unreached

SHARE = "{share}"


@dataclass(frozen=True)
class Template:
    """The rule texts by map, with the placeholder {share} for one common share.

    For example "qk=total_rank:{share} fc1=uniform_rank:{share}".
    """

    texts: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Parses the rules of several maps from one text."""
        return cls(split_maps(text))

    @property
    def has_token_share(self) -> bool:
        """Whether the share also applies to the tokens."""
        return SHARE in self.texts.get(TOKENS, "")

    @property
    def varies(self) -> bool:
        """Whether any rule depends on the share."""
        return any(SHARE in text for text in self.texts.values())

    def at(self, share: float) -> dict[str, str]:
        """Returns the texts with one share inserted."""
        return {name: text.replace(SHARE, repr(share)) for name, text in self.texts.items()}


def least_share(model: nn.Module, template: Template) -> float:
    """Returns the smallest share that can be prescribed; a share of tokens must keep at least one patch."""
    if not template.has_token_share:
        return 1 / GRID
    family = family_of(model)
    layout, depth = family.token_layout(model), len(family.attention(model))
    token_policy(template, 1.0, model)  # raises for errors that do not depend on the share

    def is_too_small(share: float) -> bool:
        try:
            parse_policy(template.at(share)[TOKENS]).on(layout, depth)
        except InvalidInput:
            return True
        return False

    # Being too small is monotone like a cost: the smallest share that can be prescribed is one step above.
    largest = largest_share(is_too_small)
    return 1 / GRID if largest is None else largest + 1 / GRID


def costs_at(model: nn.Module, diagnosis: Diagnosis, template: Template, share: float) -> ModelCosts:
    """Returns the costs at one share of the template; for a no-op prescription the unchanged model's."""
    rules = parse_rules(template.at(share)).maps
    try:
        prescription = prescribe_maps(diagnosis, {**rules, TOKENS: token_policy(template, share, model)})
    # Near a share of 1 the rules may keep everything, which `prescribe_maps` refuses; the bisection needs a cost there.
    except NoOpPrescription:
        return family_of(model).costs(model)
    return prescribed_costs(model, prescription)


def token_policy(template: Template, share: float, model: nn.Module) -> TokenPrescription | None:
    """Returns the token policy of a template at a share; raises InvalidInput for one that does not fit the model."""
    tokens = parse_rules({TOKENS: template.at(share).get(TOKENS)}).tokens
    if tokens is not None:
        family = family_of(model)
        tokens.policy.on(family.token_layout(model), len(family.attention(model)))  # for its errors
    return tokens


@dataclass(frozen=True)
class Method:
    """One way of compressing: the text of its rules, in which {share} is replaced by the kept share, a baseline, or a
    trained model in a `folder`, which is measured as it is.

    `repaired` is the number of steps of a repair per block on the calibration images afterwards, and `distilled` the
    number of passes of a distillation over those images. A `baseline` is one of BASELINES.
    """

    name: str
    rules: str = ""
    repaired: int = 0
    distilled: int = 0
    baseline: str | None = None
    folder: str | None = None

    def __post_init__(self):
        if self.has_rules:
            parse_rules(self.template.at(1.0))  # refuses maps and rules that do not exist
            return
        if self.baseline is not None and self.baseline not in BASELINES:
            raise UnknownName("baseline", self.baseline, BASELINES)
        if self.rules or self.repaired or self.distilled:
            what = "a baseline" if self.folder is None else "a trained model"
            raise InvalidInput(f"{self.name}: {what} takes no rules and no fits; make them methods.")

    @classmethod
    def parse(cls, text: str) -> "Method":
        """Parses `NAME=RULES [repair=STEPS] [distill=EPOCHS]`, with the RULES of `prescribe`, `NAME=baseline:NAME`, or
        `NAME=FOLDER` of a trained model.

        Raises:
            InvalidInput: The text has another form.
        """
        name, _, rest = text.partition("=")  # at the first sign: the rules have others
        if name.strip() and rest.strip() and Path(rest.strip()).is_dir():
            return cls(name.strip(), folder=rest.strip())
        before, parts = split_named(rest)
        fits = [(fit, steps) for fit, steps in parts if fit in FITS]
        rules = " ".join(filter(None, (before, *(f"{map_}={rule}" for map_, rule in parts if map_ not in FITS))))
        steps = dict(fits)  # shorter than `fits` if one is given twice
        if not name.strip() or not rules or len(steps) < len(fits) or not all(map(str.isdecimal, steps.values())):
            raise InvalidInput(
                f"the method {text!r} is not NAME=RULES [repair=STEPS] [distill=EPOCHS], e.g. "
                f"mix=qk=total_rank:{SHARE}."
            )
        repaired, distilled = (int(steps.get(fit, 0)) for fit in FITS)
        if rules.startswith("baseline:"):
            baseline, _, rules = rules.removeprefix("baseline:").partition(" ")
            return cls(name.strip(), rules, repaired, distilled, baseline)
        return cls(name.strip(), rules, repaired, distilled)

    @property
    def has_rules(self) -> bool:
        """Whether the method is rules, and neither a baseline nor a trained model."""
        return self.baseline is None and self.folder is None

    @property
    def template(self) -> Template:
        """Its rules, with the share still open."""
        return Template.parse(self.rules)

    @property
    def varies(self) -> bool:
        return self.baseline is not None or (self.has_rules and self.template.varies)


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """Parses several methods of different names, which distinguish their results.

    Raises:
        InvalidInput: Two methods have one name.
    """
    methods = [Method.parse(text) for text in texts]
    names = [method.name for method in methods]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InvalidInput(f"the name {repeated!r} was given to {names.count(repeated)} methods; give each its own.")
    return methods


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
        if method.folder is not None:
            return TrainedModel(self.model, method.folder)
        if method.baseline is None:
            return RuleCompressor(self, method)
        model = self._working
        if method.baseline in FACTORS:
            return FactoringBaseline(model, method.baseline, self._statistics)
        if method.baseline in DECOMPOSED:
            return TuckerBaseline(model, self.diagnosis, method.baseline)
        if method.baseline in PRESCRIBED:
            return PRESCRIBED[method.baseline](model, self.diagnosis, self.calibration, self.seed)
        if method.baseline == "diffrate":
            return DiffRateBaseline(model, self.calibration, self.seed)
        if method.baseline == "wdpruning":
            return GatedBaseline(model, self.calibration, self.seed)
        return TorchPruningBaseline(model, self.calibration)

    @cached_property
    def _working(self) -> nn.Module:
        """The model in attnrx's own parts, which baselines read and replace."""
        return working_copy(self.model)

    # A cached property writes into the instance's __dict__, which a frozen dataclass allows.
    @cached_property
    def _statistics(self) -> MapStatistics:
        # Small batches: the inputs of every map are converted to float64.
        return MapStatistics(self._working, self.calibration, min(self.batch_size, 32))

    def describe(self, methods: Sequence[Method]) -> dict[str, Any]:
        described = [asdict(method) for method in methods]
        about = dict(self.diagnosis.about)
        return {"diagnosis": about, "seed": self.seed, "methods": described, "torch": torch.__version__}


class TrainedModel(ModelCompressor):
    """A model of a folder, e.g. one that was trained with SPOT: nothing is compressed, and it has no share.

    Raises:
        InvalidInput: It takes other images, or returns other outputs, than the model that it is compared with.
        CheckpointError: The folder has no model of attnrx.
    """

    def __init__(self, model: nn.Module, folder: str):
        self.model = load(folder)
        pairs = {
            "images": tuple(family_of(each).input_shape(each) for each in (model, self.model)),
            "a scale of pixels": tuple(normalization_of(each) for each in (model, self.model)),
            "outputs": tuple(num_outputs(*family_of(each).heads(each)) for each in (model, self.model)),
        }
        for what, (expected, found) in pairs.items():
            if found != expected:
                raise InvalidInput(
                    f"{folder} cannot be compared: its model has {what} of {found}, and the original of {expected}. "
                    "Give a model that was made from the original, or trained like it."
                )

    def costs(self, share: float) -> ModelCosts:
        return family_of(self.model).costs(self.model)

    def make(self, share: float) -> nn.Module:
        return self.model


class RuleCompressor(ModelCompressor):
    """Prescribes and realizes."""

    def __init__(self, bench: MethodBench, method: Method):
        self.bench, self.method = bench, method

    @property
    def least(self) -> float:
        return least_share(self.bench.model, self.method.template)

    def costs(self, share: float) -> ModelCosts:
        # In closed form: the search for a share makes no model.
        return costs_at(self.bench.model, self.bench.diagnosis, self.method.template, share)

    def make(self, share: float) -> nn.Module:
        """Realizes the prescription, and fits the weights if requested.

        At a share that keeps everything the model itself is returned, as in `costs`; rules without a share that change
        nothing raise NoOpPrescription.
        """
        bench, method = self.bench, self.method
        try:
            prescription = prescribe(bench.diagnosis, method.template.at(share))
        except NoOpPrescription:
            if not method.varies:
                raise
            return bench.model
        steps: dict[str, int] = dict(zip(FITS, (method.repaired, method.distilled), strict=True))
        return realize_and_fit(bench.model, prescription, bench.calibration, fits_of(steps, bench.seed))


def require_points(shares: Sequence[float], targets: Sequence[float]) -> None:
    """Raises InvalidInput unless there is a share, or a share of the MACs, and all are in (0, 1]."""
    if not (*shares, *targets) or any(not 0 < share <= 1 for share in (*shares, *targets)):
        raise InvalidInput(f"the shares {shares} and the MACs {targets}: give at least one, all shares in (0, 1].")


def points(
    method: Method, compressor: ModelCompressor, before: ModelCosts, shares: Sequence[float], targets: Sequence[float]
) -> Iterator[tuple[float, float | None] | Unreached]:
    """Returns every share to try with the target that it was selected for; a method without a share is tried once."""
    if not method.varies:
        yield 1.0, None  # the share is not used
        return
    # One that is given twice is tried once: else a method would be compared with itself.
    yield from ((share, None) for share in dict.fromkeys(shares))
    for target in dict.fromkeys(targets):
        share = compressor.share_within(floor(target * before.macs))
        if share is None:
            yield Unreached(method.name, target, compressor.costs(compressor.least).macs / before.macs)
        else:
            yield share, target
