"""The IrrAtt experiment, which compresses a pre-trained model in several ways and measures costs and quality."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from attnrx.change.realization import realize
from attnrx.data import ImageSet, Splits
from attnrx.data.model_data import adapt_preprocessing
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.rules.prescribing import prescribe
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.prescription import Prescription
from attnrx.show.checks import Accuracy, Fidelity
from attnrx.support.progress import Log
from attnrx.support.records import to_dict
from attnrx.training import TrainingConfig, train
from attnrx.training.losses import Task
from attnrx.vit.costs import ModelCosts
from attnrx.vit.models import family_of
from attnrx.vit.spec import AttentionSpec
from attnrx.workflows.load import load
from attnrx_lab.costs import Compression, outer_norm_features, priced
from attnrx_lab.papers import sources
from attnrx_lab.papers.experiment import (
    DATA_KNOBS,
    MODEL_KNOBS,
    MeasureKey,
    comparison_with,
    evidence_at,
    evidence_by,
    first_images,
    measures,
    plain_measures,
)
from attnrx_lab.papers.ownership import FusionOwnership, nonnegative_fusion
from attnrx_lab.papers.plan import BACKWARD, Training, training_images
from attnrx_lab.papers.spot import ORIGINALS, outline_for

# timm's decay for the running mean of a DeiT's weights, because the paper does not state its decay.
EMA = 0.99996

METRIC = "augmented"  # the scores are decomposed with their biases
BATCH = 50  # images per batch, for measuring and diagnosing

NOTES = ("the query's bias is decomposed with the weights; the paper does not state its treatment",)

Factors = Literal["weights", "data"]
# The metric of the rules for values and MLP, for each kind of factors.
FACTORS: Mapping[Factors, str] = {"weights": "weights", "data": "centered"}

EQ_7 = (
    "rows marked by a dagger: S S^T = I of Eq. 7 is a penalty, and the columns of S have length one in place of its "
    "rows; both let every direction have one head, and its length moves into the query"
)

# The rule text of each form of Compression. For truncatt, {rank} is the number of directions per head. For the other
# forms, {rank} is the number of directions of all heads together.
RULES: Mapping[str, str] = {
    "truncatt": f"uniform_rank:{{rank}},metric={METRIC}",
    "cp": f"shared_rank:{{rank}},form=epc,joint={METRIC},seed={{seed}}",
    "irratt": f"shared_rank:{{rank}},form=literal,joint={METRIC},seed={{seed}}",
}


@dataclass(frozen=True)
class IrrattMethod:
    """One compression method of the table. Ranks are shares, so that the method applies to models of any size.

    `qk` is the form of the queries and keys without its rank (see `Compression`), and `rank` is the share of the
    directions to keep. `vo` is the share of the value dimensions to keep. `mlp` is the rank of both linear layers in
    the MLP, as a share of the width. None means unchanged. With `by_training` the method trains a CP SlimAtt under
    constraints that divide its directions among the heads (IrrAtt, Eq. 7). If the experiment trains nothing
    (`epochs=0`), only the costs of such a method are computed.
    """

    name: str
    qk: str = "full"
    rank: float = 1.0
    vo: float | None = None
    mlp: float | None = None
    by_training: bool = False

    @property
    def changes(self) -> bool:
        return self.qk != "full" or self.vo is not None or self.mlp is not None

    def compression(self, spec: AttentionSpec) -> Compression:
        """Returns this method's compression of a layer of this shape, with the shares converted to ranks."""
        # The rank of TruncAtt is per head. The ranks of CP SlimAtt and IrrAtt are totals per layer (Section 3.4).
        directions = spec.original_rank if self.qk == "truncatt" else sum(spec.ranks)
        return Compression(
            self.qk if self.qk == "full" else f"{self.qk}:{_part(self.rank, directions)}",
            None if self.vo is None else _part(self.vo, spec.head_dim),
            None if self.mlp is None else _part(self.mlp, spec.width),
        )

    def prescription(self, model: nn.Module, diagnosis: Diagnosis, seed: int, factors: Factors) -> Prescription:
        """Returns this method's prescription for a model. All layers of the model must have the same shape."""
        ranks = self.compression(family_of(model).attention(model)[0].spec)
        form, _, rank = ranks.qk.partition(":")
        scores = RULES[form].format(rank=rank, seed=seed) if form in RULES else None
        metric = FACTORS[factors]
        vo, mlp = (None if own is None else f"uniform_rank:{own},metric={metric}" for own in (ranks.vo, ranks.mlp))
        return prescribe(diagnosis, {"qk": scores, "vo": vo, "fc1": mlp, "fc2": mlp})

    def candidate(self, model: nn.Module, diagnosis: Diagnosis, seed: int, factors: Factors = "weights") -> nn.Module:
        """Returns the compressed model, or the original model if the method changes nothing."""
        return realize(model, self.prescription(model, diagnosis, seed, factors)) if self.changes else model


def method_costs(outline: nn.Module, method: IrrattMethod) -> ModelCosts:
    """Returns the costs of the model after compression by a method, computed from shapes only."""
    family = family_of(outline)
    specs = family.specs(outline)
    compression = method.compression(specs[0])
    smaller = tuple(compression.spec(spec) for spec in specs)
    return family.costs(outline, smaller, compression.mlp_ranks(specs))


def paper_price(outline: nn.Module, method: IrrattMethod) -> dict[str, float]:
    """Computes the compression ratios that the paper prints, in percent of the original's costs, from shapes only."""
    after = method_costs(outline, method)
    norms = outer_norm_features(outline, after)  # the same for both, because they have the same number of tokens
    return priced(after, norms).percent_of(priced(family_of(outline).costs(outline), norms))


def realized_price(model: nn.Module, candidate: nn.Module) -> dict[str, float]:
    """Returns the compression ratios of a realized model, in percent of the original."""
    costs = [family_of(each).costs(each) for each in (candidate, model)]
    norms = outer_norm_features(model, costs[1])
    return priced(costs[0], norms).percent_of(priced(costs[1], norms))


def _part(share: float, whole: int) -> int:
    return max(1, round(share * whole))


@dataclass(frozen=True)
class IrrattExperiment(sources.DatasetExperiment):
    """Compresses one pre-trained model by each method, fine-tunes each result for `epochs`, and measures it.

    By default, as in the paper, only the weights determine how scores, values and MLPs are factored. `seed` seeds the
    initial terms for the scores. With `factors="data"`, values and MLPs keep the directions that matter most on
    `calibration_images` training images. `seed` also determines which training images are held out for validation. By
    default the models are not fine-tuned. If the data have only some of the model's classes, a fine-tuned model forgets
    the other classes, so every method would seem to gain accuracy. A constrained CP SlimAtt is trained for `epochs`
    before its fine-tuning. `ema` is the decay of the moving average of the weights. Costs are always computed for the
    named model, even if a `tiny` model is measured.
    """

    kind: ClassVar[str] = "irratt"
    knobs: ClassVar[tuple[str, ...]] = (
        *MODEL_KNOBS,
        *DATA_KNOBS,
        *("epochs", "batch_size", "accumulate", "factors", "calibration_images", "test_images"),
    )

    methods: tuple[IrrattMethod, ...]
    epochs: int = 0
    batch_size: int = 256
    accumulate: int = 1
    calibration_images: int = 96
    learning_rate: float = 5e-5
    gradient_clip: float | None = None
    ema: float | None = EMA
    factors: Factors = "weights"

    @property
    def differences(self) -> tuple[str, ...]:
        return (EQ_7,) if any(method.by_training for method in self.methods) else ()

    def as_tiny(self) -> "IrrattExperiment":
        """Returns the same methods on a tiny model, without fine-tuning. The experiment then takes seconds."""
        return replace(self, tiny=True, epochs=0, batch_size=16, calibration_images=32)

    def original(self, folder: Path, log: Log) -> nn.Module:
        """Loads the pre-trained original, or trains one original that all runs share in a common folder."""
        if self.tiny:
            return sources.tiny_twin(self._outline(), self.seed)
        if self.model is not None:
            return self.pretrained()
        splits = self.data_for(self._outline())  # divided by seed 0, because all runs share the original
        return ORIGINALS[self.subject].trained(splits, folder.parents[1] / "originals" / self.subject, log)

    def _outline(self) -> nn.Module:
        return outline_for(self.model, self.subject)

    def splits(self, model: nn.Module) -> Splits:
        """Loads the images with the model's image size and normalization, or generates images for a tiny run."""
        if self.tiny:
            splits = sources.generated_splits(self.subject, 3, sources.TINY_CLASSES, sources.TINY_SIDE)
        else:
            splits = self.data_for(model, self.seed)
        return adapt_preprocessing(splits, model)

    def training(self) -> TrainingConfig:
        """Returns the settings of IrrAtt's fine-tuning (Table 3), without weight decay and with averaged weights.

        The learning rate warms up from 1e-6, then decays to 1e-6 by a cosine schedule.
        """
        return TrainingConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            learning_rate=self.learning_rate,
            min_learning_rate=1e-6,
            warmup_learning_rate=1e-6,
            weight_decay=0.0,
            # The paper warms up for five of sixty epochs. A shorter training warms up for less.
            warmup_epochs=min(5.0, self.epochs / 10),
            gradient_clip=self.gradient_clip,
            ema=self.ema,
            seed=self.seed,
        )

    def trainings(self) -> tuple[Training, ...]:
        if self.tiny:
            return ()
        outline, images = self._outline(), training_images(self.dataset, self.held_out)

        def planned(name: str, method: IrrattMethod) -> Training:
            costs = method_costs(outline, method)
            macs = BACKWARD * (costs.macs + costs.classifier_macs)
            return Training(f"{self.name}, {name}", self.epochs, images, self.batch_size, macs)

        trainings: list[Training] = []
        if self.model is None:
            made, costs = ORIGINALS[self.subject], family_of(outline).costs(outline)
            macs = BACKWARD * (costs.macs + costs.classifier_macs)
            name = f"{self.subject}, the original of all rows"
            trainings.append(Training(name, made.epochs, images, made.batch_size, macs, "fp32"))
        for method in self.methods if self.epochs else ():
            if method.by_training:
                trainings.append(planned(f"{method.name}, the constrained CP", replace(method, qk="cp")))
            if method.changes:
                trainings.append(planned(method.name, method))
        return tuple(trainings)

    def stages(self, keys: Collection[MeasureKey] | None = None) -> frozenset[str]:
        """Returns the names of the methods."""
        if keys is None:
            return frozenset(method.name for method in self.methods)
        return frozenset(rule for rule, _, _ in keys)

    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Computes the costs of the requested methods, and measures all that need no training or can be trained."""
        model = self.original(folder, log)
        splits = self.splits(model)
        calibration = first_images(splits.train, self.calibration_images)
        diagnosis = diagnose(model, calibration, batch_size=BATCH, seed=self.seed)
        test = first_images(splits.test, self.test_images)
        comparison = comparison_with(model, test, seed=self.seed, diagnosis=diagnosis, batch_size=BATCH)
        self.claim(folder)

        def evidence(method: IrrattMethod) -> Evidence:
            """Measures a method's accuracy, its fidelity to the original, and the costs of its realized model."""
            if method.by_training:
                candidate = self._constrained(method, model, diagnosis, splits, calibration, folder)
            else:
                candidate = method.candidate(model, diagnosis, self.seed, self.factors)
            if self.epochs and method.changes:  # the original is never trained
                trained = train(candidate, splits, self.training(), folder / "train" / method.name, log=log)
                candidate = load(trained.folder)
            # If nothing changes, the reference itself is compared, because its predictions are cached.
            placed = candidate.to(comparison.device) if method.changes else comparison.reference
            about = {"method": to_dict(method), "realized": realized_price(model, candidate)}
            compared = replace(comparison, candidate=placed)
            return evidence_by([Accuracy(most_drop=None), Fidelity()], compared, self, **about)

        outline, rules, notes = self._outline(), {}, [*splits.notes, *NOTES]
        if self.factors == "data":
            notes.append(f"values and MLP keep what matters most on n = {len(calibration)} calibration images")
        for method in (method for method in self.methods if method.name in stages):
            # Costs are computed for the paper's shapes, also in a tiny run and for methods that would need training.
            rules[method.name] = {"paper": plain_measures(paper_price(outline, method))}
            if self.epochs or not method.by_training:
                log(f"{self.name}: {method.name}")
                stored = evidence_at(folder / "evidence" / f"{method.name}.json", partial(evidence, method))
                rules[method.name]["measured"] = measures(stored)
                rules[method.name]["realized"] = plain_measures(stored.about["realized"])
        if not self.epochs and any(method.by_training for method in self.methods):
            notes.append("ranks from training with constraints (Eq. 7) are priced and not measured: give --epochs")
        return {
            "data": {"name": splits.name, "images": len(test), "test": test.fingerprint, "notes": notes},
            "model": {"fingerprint": diagnosis.fingerprint},
            "rules": rules,
        }

    def _constrained(
        self,
        method: IrrattMethod,
        model: nn.Module,
        diagnosis: Diagnosis,
        splits: Splits,
        calibration: ImageSet,
        folder: Path,
    ) -> nn.Module:
        """Trains a CP SlimAtt towards one head per direction (IrrAtt, Eq. 7), then splits it by head (Eqs. 5 and 6)."""
        # IrrAtt, Section 3.3: train on the task with non-negative fusion weights and at most one head per direction.
        joint = replace(method, qk="cp").candidate(model, diagnosis, self.seed, self.factors)
        settings = replace(self.training(), losses=(Task(), FusionOwnership()))
        with nonnegative_fusion(joint):
            run = train(joint, splits, settings, folder / "train" / f"{method.name}-constraints")
        trained = load(run.folder)
        # The trained model is diagnosed again, because its fusion weights decide which head owns a direction.
        owned = diagnose(trained, calibration, batch_size=BATCH, seed=self.seed)
        return realize(trained, prescribe(owned, "qk=fusion_owner"))
