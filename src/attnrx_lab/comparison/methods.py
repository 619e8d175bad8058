"""Parses compression methods from texts such as "qk=total_rank:{share}", and makes a compressor from each method."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from math import floor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.change.realization.realizing import fits_of, realize_and_fit
from attnrx.data import ImageSet
from attnrx.data.model_data import normalization_of
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.diagnostics import suited_diagnostics
from attnrx.decide.planning.cost_table import prescribed_costs
from attnrx.decide.rules import parse_rules, prescribe_maps, split_maps
from attnrx.decide.rules.prescribing import prescribe
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import TokenPrescription
from attnrx.support.arguments import user_code
from attnrx.support.errors import InvalidInput, NoOpPrescription
from attnrx.support.progress import Log
from attnrx.support.records import without_folders
from attnrx.support.registry import Registry
from attnrx.support.text_parsing import split_named
from attnrx.vit.costs import ModelCosts
from attnrx.vit.maps import FITS, TOKENS
from attnrx.vit.models import LIBRARIES, family_of, num_outputs
from attnrx.vit.models.boundary.working_copy import working_copy
from attnrx.vit.outputs import Embeddings, output_kind_of
from attnrx.vit.tokens import parse_policy
from attnrx.workflows.load import load
from attnrx_lab.baselines import (
    DECOMPOSED,
    FACTORS,
    PRESCRIBED,
    DiffRateBaseline,
    FactoringBaseline,
    GatedBaseline,
    LowerResolution,
    MapStatistics,
    ModelCompressor,
    PlanBaseline,
    SearchedBaseline,
    TorchPruningBaseline,
    TuckerBaseline,
    UnchangedModel,
    VendorInt8,
)
from attnrx_lab.baselines.compressor import GRID, largest_share
from attnrx_lab.comparison.record import Unreached
from attnrx_lab.rules import JointMoments, measure_divergence

SHARE = "{share}"


@dataclass(frozen=True)
class Template:
    """The rule texts of all maps, with the placeholder {share}, e.g. "qk=total_rank:{share} fc1=uniform_rank:{share}".

    All placeholders are replaced by the same share.
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
        """Returns the rule texts with this share inserted."""
        return {name: text.replace(SHARE, repr(share)) for name, text in self.texts.items()}


def least_share(model: nn.Module, template: Template) -> float:
    """Returns the smallest share that can be prescribed. For tokens, at least one patch must remain."""
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

    # `largest_share` returns the largest share that is too small, so the next step is the smallest possible share.
    largest = largest_share(is_too_small)
    return 1 / GRID if largest is None else largest + 1 / GRID


def costs_at(model: nn.Module, diagnosis: Diagnosis, template: Template, share: float) -> ModelCosts:
    """Returns the costs of the model if it is pruned to the share, or its own costs if the rules keep everything."""
    rules = parse_rules(template.at(share)).maps
    try:
        prescription = prescribe_maps(diagnosis, {**rules, TOKENS: token_policy(template, share, model)})
    # Near a share of 1 the rules may keep everything, and `prescribe_maps` refuses. The bisection still needs a cost.
    except NoOpPrescription:
        return family_of(model).costs(model)
    return prescribed_costs(model, prescription)


def token_policy(template: Template, share: float, model: nn.Module) -> TokenPrescription | None:
    """Returns a template's token policy at a share. Raises InvalidInput if the policy does not fit the model."""
    tokens = parse_rules({TOKENS: template.at(share).get(TOKENS)}).tokens
    if tokens is not None:
        family = family_of(model)
        tokens.policy.on(family.token_layout(model), len(family.attention(model)))  # for its errors
    return tokens


@dataclass(frozen=True)
class Method:
    """A compression method: rules, a baseline, or a trained model.

    In `rules`, {share} is replaced by the share to keep. After applying the rules, the method may fit weights to the
    calibration images. `repaired` is the number of repair steps per block, and `distilled` is the number of
    distillation passes over these images. `baseline` is one of BASELINES. `folder` is the folder of a trained model,
    which is measured unchanged. `folder` may also be anything else that `load` accepts without further arguments, e.g.
    timm:NAME.
    """

    name: str
    rules: str = ""
    repaired: int = 0
    distilled: int = 0
    baseline: str | None = None
    folder: str | None = None

    def __post_init__(self):
        if self.has_rules:
            parse_rules(self.template.at(1.0))  # raises for maps and rules that do not exist
            return
        if self.baseline is not None:
            BASELINES[self.baseline]  # raises UnknownName
        if self.rules or self.repaired or self.distilled:
            what = "a baseline" if self.folder is None else "a trained model"
            raise InvalidInput(f"{self.name}: {what} takes no rules and no fits; make them methods.")

    @classmethod
    def parse(cls, text: str) -> "Method":
        """Parses the text of a method, which has one of three forms.

        `NAME=RULES [repair=STEPS] [distill=EPOCHS]` applies rules in the syntax of `prescribe`.
        `NAME=baseline:BASELINE` uses one of BASELINES. `NAME=FOLDER` uses the trained model in a folder. Instead of a
        folder you can pass a model's name, e.g. `NAME=timm:vit_tiny_patch16_224`.

        Raises:
            InvalidInput: The text has none of these forms.
        """
        name, _, rest = text.partition("=")  # only at the first "=", because the rules contain more
        is_named = rest.strip().partition(":")[0] in (*LIBRARIES, "hub", "hf")
        if name.strip() and rest.strip() and (is_named or Path(rest.strip()).is_dir()):
            return cls(name.strip(), folder=rest.strip())
        before, parts = split_named(rest)
        fits = [(fit, steps) for fit, steps in parts if fit in FITS]
        rules = " ".join(filter(None, (before, *(f"{map_}={rule}" for map_, rule in parts if map_ not in FITS))))
        steps = dict(fits)  # shorter than `fits` if a fit appears twice
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
        """Whether the method consists of rules, and is not a baseline or a trained model."""
        return self.baseline is None and self.folder is None

    @property
    def template(self) -> Template:
        """The rules with the placeholder {share}."""
        return Template.parse(self.rules)

    @property
    def varies(self) -> bool:
        """Whether the method has an adjustable share. Other methods have one fixed cost."""
        if self.baseline is not None:
            return BASELINES[self.baseline].varies
        return self.has_rules and self.template.varies

    @property
    def text(self) -> str:
        """The method in the syntax of `parse`, without its name. A folder's path is shortened to its last part."""
        fits = zip(FITS, (self.repaired, self.distilled), strict=True)
        source = self.folder and without_folders(self.folder)
        rules = self.rules if self.baseline is None else f"baseline:{self.baseline}"
        return " ".join((source or rules, *(f"{fit}={steps}" for fit, steps in fits if steps)))


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """Parses several methods. Their names must differ, because results are listed by name.

    Raises:
        InvalidInput: Two methods have the same name.
    """
    methods = [Method.parse(text) for text in texts]
    names = [method.name for method in methods]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InvalidInput(f"the name {repeated!r} was given to {names.count(repeated)} methods; give each its own.")
    return methods


def diagnosed(
    model: nn.Module, methods: Sequence[Method], calibration: ImageSet, batch_size: int, seed: int, log: Log
) -> Diagnosis:
    """Returns a diagnosis with all measurements that the methods need."""
    # The diagnosis includes moments for every kind of model, because rules for values, heads and MLP need them.
    spectra = tuple(layer.spectrum() for layer in family_of(model).attention(model))
    diagnostics = suited_diagnostics(spectra, moments=True)
    if any("joint=centered" in method.rules for method in methods):
        diagnostics = (*diagnostics, JointMoments())
    log(f"diagnosing on {len(calibration):,} images")
    diagnosis = diagnose(model, calibration, diagnostics=diagnostics, batch_size=min(batch_size, 32), seed=seed)
    # Only these rules need another pass over the images, which computes the attention at every rank.
    if any("divergence_rank" in method.rules for method in methods):
        priced = calibration.take(min(len(calibration), 24))
        log(f"measuring the divergence at every rank on {len(priced)} images")
        diagnosis = measure_divergence(model, diagnosis, priced)
    return diagnosis


@dataclass(frozen=True)
class MethodBench:
    """A model with its diagnosis, the calibration images that methods are fitted to, and the test images.

    `prepare` converts a method's trained model to the same kind as `model`, e.g. a classifier to an image tower.
    """

    model: nn.Module
    diagnosis: Diagnosis
    calibration: ImageSet
    test: ImageSet
    seed: int = 0
    batch_size: int = 64
    prepare: Callable[[nn.Module], nn.Module] | None = None

    def compressor(self, method: Method) -> ModelCompressor:
        """Returns the compressor of one method. The factoring baselines share their calibration statistics."""
        if method.folder is not None:
            return TrainedModel(self.model, method.folder, self.prepare)
        return RuleCompressor(self, method) if method.baseline is None else BASELINES[method.baseline].compressor(self)

    @cached_property
    def working(self) -> nn.Module:
        """The model rebuilt from attnrx's own modules, which baselines read and replace."""
        return working_copy(self.model)

    # A cached property writes into the instance's __dict__, which a frozen dataclass allows.
    @cached_property
    def statistics(self) -> MapStatistics:
        """The statistics of all linear maps, which the factoring baselines share."""
        # The batches are small, because the inputs of every map are converted to float64.
        return MapStatistics(self.working, self.calibration, min(self.batch_size, 32))

    def describe(self, methods: Sequence[Method]) -> dict[str, Any]:
        described = [without_folders(asdict(method)) for method in methods]
        about = dict(self.diagnosis.about)
        return {"diagnosis": about, "seed": self.seed, "methods": described, "torch": torch.__version__}


@dataclass(frozen=True)
class Baseline:
    """A method that is selected by `baseline:NAME`. If `varies` is false, the cost is the same for all shares."""

    name: str
    compressor: Callable[[MethodBench], ModelCompressor]
    varies: bool = True


def _factored(kind: str, bench: MethodBench) -> ModelCompressor:
    return FactoringBaseline(bench.working, kind, bench.statistics)


def _decomposed(kind: str, bench: MethodBench) -> ModelCompressor:
    return TuckerBaseline(bench.working, bench.diagnosis, kind)


def _prescribed(name: str, bench: MethodBench) -> ModelCompressor:
    return PRESCRIBED[name](bench.working, bench.diagnosis, bench.calibration, bench.seed)


BASELINES = Registry[Baseline](
    "baseline",
    *(Baseline(kind, partial(_factored, kind)) for kind in FACTORS),
    *(Baseline(kind, partial(_decomposed, kind)) for kind in DECOMPOSED),
    *(Baseline(name, partial(_prescribed, name)) for name in PRESCRIBED),
    Baseline("wdpruning", lambda bench: GatedBaseline(bench.working, bench.calibration, bench.seed)),
    Baseline("diffrate", lambda bench: DiffRateBaseline(bench.working, bench.calibration, bench.seed)),
    Baseline("torch_pruning", lambda bench: TorchPruningBaseline(bench.working, bench.calibration)),
    Baseline("plan", lambda bench: PlanBaseline(bench.working, bench.diagnosis, bench.calibration, bench.seed)),
    Baseline("resolution", lambda bench: LowerResolution(bench.model)),
    Baseline("int8", lambda bench: VendorInt8(bench.model, bench.calibration), varies=False),
    Baseline("unchanged", lambda bench: UnchangedModel(bench.model), varies=False),
)
Made = Callable[[nn.Module, ImageSet, float], nn.Module]


def baseline(function: Made) -> Made:
    """Registers the decorated function as the method `baseline:NAME`, where NAME is the function's name.

    Your function receives the model, the calibration images and a share of the MACs. It must return a model that costs
    at most this share. The model may be of any kind that `load` accepts. Before each call, PyTorch's random generator
    is seeded with the comparison's seed.

    Raises:
        InvalidInput: Another method has this name.
    """
    name = getattr(function, "__name__", "")
    BASELINES.register(Baseline(name, partial(MadeByFunction, name, function)))
    return function


class MadeByFunction(SearchedBaseline):
    """A baseline that calls a user's function once for every target share of the model's MACs."""

    def __init__(self, name: str, function: Made, bench: MethodBench):
        super().__init__(bench.model, bench.calibration, bench.seed)
        self.name, self.function = name, function

    def searched(self, share: float) -> nn.Module:
        """Calls the user's function for one share and checks the result.

        Raises:
            UserCodeError: The function raises an exception.
            InvalidInput: The returned model has more than this share of the MACs.
        """
        with torch.random.fork_rng(devices=[]), user_code(f"the method {self.name}"):
            torch.manual_seed(self.seed)
            model = load(self.function(self.model, self.calibration, share)).eval()
        cost = family_of(model).costs(model).macs / self._macs
        if cost > share:
            raise InvalidInput(
                f"the method {self.name} returned a model of {100 * cost:.1f} % of the MACs, and was asked for "
                f"{100 * share:.1f} %: remove more."
            )
        return model


class TrainedModel(ModelCompressor):
    """A trained model from a folder, e.g. a model trained with SPOT, which is measured without compression.

    Raises:
        InvalidInput: The trained model's input size, normalization or number of outputs differs from the original's.
        CheckpointError: The folder does not contain an attnrx model.
    """

    def __init__(self, model: nn.Module, folder: str, prepare: Callable[[nn.Module], nn.Module] | None = None):
        self.model = load(folder) if prepare is None else prepare(load(folder))
        pairs = {
            "images": tuple(family_of(each).input_shape(each) for each in (model, self.model)),
            "a scale of pixels": tuple(normalization_of(each) for each in (model, self.model)),
        }
        if not isinstance(output_kind_of(model), Embeddings):  # neighbours can be compared between different widths
            pairs["outputs"] = tuple(num_outputs(*family_of(each).heads(each)) for each in (model, self.model))
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
    """Compresses a model to a share by rules, and fits the remaining weights if requested."""

    def __init__(self, bench: MethodBench, method: Method):
        self.bench, self.method = bench, method

    @property
    def least(self) -> float:
        return least_share(self.bench.model, self.method.template)

    def costs(self, share: float) -> ModelCosts:
        # The costs follow from the prescription, so the search for a share does not build models.
        return costs_at(self.bench.model, self.bench.diagnosis, self.method.template, share)

    def make(self, share: float) -> nn.Module:
        """Returns the pruned model, with fitted weights if requested.

        If nothing is pruned at this share, the method returns the original model. If rules without {share} prune
        nothing, the method raises NoOpPrescription.
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
    """Raises InvalidInput unless there is at least one share or MACs target, and all of them are in (0, 1]."""
    if not (*shares, *targets) or any(not 0 < share <= 1 for share in (*shares, *targets)):
        raise InvalidInput(f"the shares {shares} and the MACs {targets}: give at least one, all shares in (0, 1].")


def points(
    method: Method, compressor: ModelCompressor, before: ModelCosts, shares: Sequence[float], targets: Sequence[float]
) -> Iterator[tuple[float, float | None] | Unreached]:
    """Yields each share to measure and its MACs target, or `Unreached` if the method cannot reach the target.

    For the requested `shares`, the target is None. A method without {share} is measured once.
    """
    if not method.varies:
        yield 1.0, None  # the share is not used
        return
    # Repeated shares are tried only once, because otherwise the method would be compared with itself.
    yield from ((share, None) for share in dict.fromkeys(shares))
    for target in dict.fromkeys(targets):
        share = compressor.share_within(floor(target * before.macs))
        if share is None:
            yield Unreached(method.name, target, compressor.costs(compressor.least).macs / before.macs)
        else:
            yield share, target
