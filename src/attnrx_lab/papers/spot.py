"""The SPOT experiment, which fine-tunes a token-pruning model with the paper's losses and measures the model."""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, Self

import torch
from torch import nn

from attnrx.data import Normalization, Splits
from attnrx.data.model_data import adapt_preprocessing
from attnrx.nouns.evidence import Evidence, Finding
from attnrx.show.checks import Accuracy, Fidelity
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log
from attnrx.support.shapes import Bool, Int, Tensor
from attnrx.training import TrainingConfig, train
from attnrx.training.losses import Distillation, Loss, Task
from attnrx.vit.models import attach_tokens_, build_model, family_of, model_fingerprint, reduction_of
from attnrx.vit.tokens import TokenPolicy, parse_policy
from attnrx.workflows.load import load
from attnrx_lab.clutter import STAGES, object_finding
from attnrx_lab.cluttered_digits import CLUTTERED, canvases, object_patches
from attnrx_lab.costs import NORM_MACS, predictor_norm_features
from attnrx_lab.papers import sources
from attnrx_lab.papers.experiment import (
    DATA_KNOBS,
    MODEL_KNOBS,
    comparison_with,
    evidence_at,
    evidence_by,
    first_images,
    measures,
    plain_measures,
)
from attnrx_lab.papers.plan import BACKWARD, Training, fewer, training_images
from attnrx_lab.papers.processes import shared_lock
from attnrx_lab.papers.similarity import TokenSimilarity
from attnrx_lab.tokens import KeepRatio, Random

DEVIATION = 0.02  # the default standard deviation of initial weights in attnrx models
BATCH = 64  # images per batch, for measuring

QUARTERS = (1, 2, 3)  # a pruning stage follows each of these quarters of the depth (SPOT, Section 6.2.1)


@dataclass(frozen=True)
class TokenMethod:
    """A token reduction method that has the same keep ratio in all three stages. `reducer=None` keeps all tokens.

    As in the paper, a stage runs after each of the first three quarters of the depth. In a model with 12 layers, the
    stages run before layers 4, 7 and 10. With 16 layers, they run before layers 5, 9 and 13. If `trained` is false, the
    method is measured without fine-tuning.
    """

    name: str
    reducer: str | None = None
    ratio: float = 0.7
    trained: bool = True

    @property
    def learned(self) -> bool:
        policy = self.policy(4)  # any depth, because only the policy's reducer matters
        return policy is not None and policy.reducer.learned

    def policy(self, depth: int, seed: int = 0) -> TokenPolicy | None:
        """Returns the token policy for a model of this depth. Reducers that select random patches use the seed."""
        if self.reducer is None:
            return None
        # The policy is parsed from text, so that reducers and options are the same as on the command line.
        stages = ",".join(str(depth * quarter // 4 + 1) for quarter in QUARTERS)
        policy = parse_policy(f"{self.reducer}:{self.ratio}@{stages}")
        reducer = policy.reducer
        return replace(policy, reducer=replace(reducer, seed=seed)) if isinstance(reducer, Random) else policy

    def attach_(self, model: nn.Module, seed: int) -> None:
        """Attaches the token policy to the model in place, with new predictors initialized from the seed."""
        attach_policy_(model, self.policy(len(family_of(model).attention(model)), seed), seed)


ORIGINAL = TokenMethod("all-tokens", trained=False)


def attach_policy_(model: nn.Module, policy: TokenPolicy | None, seed: int) -> None:
    if policy is not None:
        # The predictors are initialized from the global generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            attach_tokens_(model, family_of(model), policy)


def token_price(outline: nn.Module, method: TokenMethod) -> dict[str, float]:
    """Computes a method's costs for one image in the paper's convention, from shapes only.

    `gmacs`, which the paper prints as GFLOPS, counts every matrix product, including the classifier's product.
    `gmacs_change` is the change of `gmacs`, computed as in the paper from numbers rounded to one decimal. `predictors`
    is the cost of the token predictors in GMACs, with five MACs per feature of a LayerNorm. `percent` is the remaining
    share of the MACs. `patches_N` is the number of patches after stage N, and `tokens` is the mean number of tokens
    over the layers.
    """
    family = family_of(outline)
    layout, depth = family.token_layout(outline), len(family.attention(outline))
    policy = method.policy(depth)
    before, after = family.costs(outline), family.costs(outline, tokens=policy)
    # `ModelCosts.macs` omits the classifier, as the SVDA paper does.
    whole, remaining = (costs.macs + costs.classifier_macs for costs in (before, after))
    counts = (layout.patches,) * len(QUARTERS) if policy is None else policy.counts(layout.patches)
    tokens = (layout.tokens,) * depth if policy is None else policy.tokens(layout, depth)
    norms = 0 if policy is None else predictor_norm_features(policy, family.token_shape(outline))
    return {
        "gmacs": remaining / 1e9,
        "gmacs_change": round(remaining / 1e9, 1) - round(whole / 1e9, 1),
        # Five MACs per feature of a LayerNorm, as in the IrrAtt paper, reproduce the printed overheads.
        "predictors": (after.predictors.macs + NORM_MACS * norms) / 1e9,
        "percent": 100 * remaining / whole,
        "tokens": fmean(tokens),
        **{f"patches_{stage}": float(count) for stage, count in enumerate(counts, 1)},
    }


@dataclass(frozen=True)
class SmallOriginal:
    """A small original model with a class token, which is not pre-trained. It is trained once for all rows of a table.

    The model is an LV-ViT without token labels, because its convolutional stem learns faster than a plain patch
    embedding. The standard deviation of its initial weights is 1 / sqrt(inputs). The usual value of 0.02 is meant for
    wide models, and makes narrow models learn more slowly.
    """

    image_size: int = 32
    classes: int = 10
    width: int = 64
    depth: int = 12
    heads: int = 4
    stem_channels: int = 32
    epochs: int = 2
    batch_size: int = 32
    learning_rate: float = 1e-3

    def build(self, scale: Normalization | None = None) -> nn.Module:
        model = self._initialized(scale)
        # Every matrix is rescaled from the default deviation to 1 / sqrt(inputs).
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim in (2, 4):  # matrices and convolutions
                    parameter.mul_(parameter[0].numel() ** -0.5 / DEVIATION)
        return model

    def training(self) -> TrainingConfig:
        return TrainingConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            precision="fp32",
            seed=0,
            checkpoint_every=200,
        )

    def trained(self, splits: Splits, place: Path, log: Log) -> nn.Module:
        """Returns the trained model from the folder, and trains it there first if necessary."""
        with shared_lock(place):  # several methods and seeds may need it at the same time
            log(f"the original, {place}")
            trained = train(self.build(splits.normalization), splits, self.training(), place, log=log)
        return load(trained.folder).eval()

    def _initialized(self, scale: Normalization | None) -> nn.Module:
        names = ("image_size", "classes", "width", "depth", "heads", "stem_channels")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        if scale is not None:
            settings |= {"mean": scale.mean, "std": scale.std}
        return build_model("lvvit:t", classifies_patches=False, patch_size=4, mlp_ratio=3.0, seed=0, **settings)


@dataclass(frozen=True)
class PlainOriginal(SmallOriginal):
    """A plain timm ViT for grey images, which embeds every patch from the pixels of this patch alone.

    So if a model prunes the patches of an object, it cannot recover the object from the embeddings of neighbouring
    patches. With a convolutional stem, it could.
    """

    def _initialized(self, scale: Normalization | None) -> nn.Module:
        scale = scale or Normalization.half(1)
        shape: dict[str, Any] = {"img_size": self.image_size, "patch_size": 4, "in_chans": 1, "mlp_ratio": 2.0}
        shape |= {"embed_dim": self.width, "depth": self.depth, "num_heads": self.heads, "num_classes": self.classes}
        # The images were resized without a crop.
        preprocessing = {"mean": scale.mean, "std": scale.std, "crop_pct": 1.0, "interpolation": "bilinear"}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build_model("timm:vit_tiny_patch16_224", pretrained_cfg_overlay=preprocessing, **shape)


SMALL = SmallOriginal()
# The originals of subjects without a pre-trained model. Eight epochs on the clutter take 2 to 4 minutes on a CPU core.
ORIGINALS: Mapping[str, SmallOriginal] = {
    "cifar10_small": SMALL,
    "cluttered_digits": PlainOriginal(40, width=32, depth=4, heads=2, epochs=8, batch_size=64, learning_rate=2e-3),
}
# The original of tiny runs. Its four layers are enough for three stages, and its images have sixteen patches.
TINY = SmallOriginal(16, 4, width=8, depth=4, heads=2, stem_channels=4, epochs=1)


def outline_for(model: str | None, subject: str) -> nn.Module:
    """Returns a named model without weights, or the subject's small original if `model` is None."""
    if model is not None:
        return sources.outline_of(model)
    with torch.device("meta"):
        return ORIGINALS[subject].build()


def accuracy_by_group(correct: Bool[Tensor, "images"], groups: Int[Tensor, "images"]) -> Finding:
    """Returns a finding with every group's top-1 accuracy, in the order of group numbers, and their mean."""
    _, numbers = groups.unique(return_inverse=True)  # 0, 1, ... in the order of the groups' numbers
    totals = torch.zeros(int(numbers.max()) + 1, dtype=torch.float64)
    hits = totals.scatter_add(0, numbers, correct.double())
    samples = 100 * hits / totals.scatter_add(0, numbers, torch.ones(len(numbers), dtype=torch.float64))
    details = {"quantity": "accuracy by group", "samples": [round(value, 4) for value in samples.tolist()]}
    claim = "top-1 accuracy of the candidate, the mean over groups of images"
    return Finding("accuracy", claim, float(samples.mean()), "%", n=len(samples), details=details)


@dataclass(frozen=True)
class FineTuning:
    """Settings for fine-tuning a model that prunes tokens. The loss is SPOT's Eq. 15 with the paper's loss weights.

    The optimizer is AdamW with a cosine schedule. With `task`, the loss also uses the labels. `similarity` is the
    weight of Eq. 14, which is 0 for DeiT and 10 for LV-ViT. Predictors learn at `predictor_factor` times the learning
    rate. By default labels are not smoothed and gradients are not clipped, because the paper mentions neither. `images`
    is the largest number of training images, or None to use all of them.
    """

    learning_rate: float = 1e-3
    predictor_factor: float = 10.0
    weight_decay: float = 0.05
    task: bool = True
    keep_ratio: float = 2.0
    distillation: float = 0.5
    similarity: float = 0.0
    label_smoothing: float = 0.0
    gradient_clip: float | None = None
    precision: Literal["bf16", "fp32"] = "bf16"
    images: int | None = None


@dataclass(frozen=True)
class SpotExperiment(sources.DatasetExperiment):
    """Prunes the tokens of one model by one method, fine-tunes the model if the method is trained, and measures it.

    A small original is trained once for all methods and seeds of the subject. The seed determines the initial
    predictors, the order of the images and the sampled masks in training. The set of images is the same for all seeds.
    The model is compared with the original on the same `test_images` test images. If the data state which patches
    contain the object, the experiment also measures how many of these patches remain. Costs are always computed for the
    named model, even if a `tiny` model is measured.
    """

    kind: ClassVar[str] = "spot"
    knobs: ClassVar[tuple[str, ...]] = (*MODEL_KNOBS, *DATA_KNOBS, "epochs", "batch_size", "accumulate", "test_images")

    method: TokenMethod
    seed: int = field(default=42, kw_only=True)
    tuning: FineTuning = FineTuning()
    epochs: int = 80
    batch_size: int = 512
    accumulate: int = 1
    validation_images: int | None = None

    @property
    def name(self) -> str:
        return f"{self.subject}{' (tiny)' if self.tiny else ''}, {self.method.name}, seed {self.seed}"

    @property
    def place(self) -> Path:
        """The run's path relative to the folder of all runs. Each method has a separate folder."""
        kind, subject, seed = super().place.parts
        return Path(kind, subject, self.method.name, seed)

    def as_tiny(self) -> Self:
        """Returns the same experiment on a tiny model, which takes a second or two."""
        tuning = replace(self.tuning, precision="fp32", images=None)
        smaller = {"epochs": 1, "batch_size": 32, "test_images": None, "validation_images": None}
        return replace(self, tiny=True, tuning=tuning, **smaller)

    @property
    def made(self) -> SmallOriginal | None:
        """The small original that this experiment trains, or None if the original is pre-trained."""
        if self.tiny:
            return TINY
        return ORIGINALS[self.subject] if self.model is None else None

    def splits(self) -> Splits:
        """Loads the images at the model's input size, or generates images for a tiny run."""
        if self.tiny:
            return sources.generated_splits(self.subject, 3, TINY.classes, TINY.image_size)
        splits = self.data_for(outline_for(self.model, self.subject))
        return replace(
            splits,
            validation=first_images(splits.validation, self.validation_images),
            test=first_images(splits.test, self.test_images),
        )

    def trainings(self) -> tuple[Training, ...]:
        if self.tiny:
            return ()
        outline, made = outline_for(self.model, self.subject), self.made
        price = token_price(outline, self.method)
        whole = 1e9 * token_price(outline, ORIGINAL)["gmacs"]
        images = training_images(self.dataset, self.held_out)
        trainings: list[Training] = []
        if made:
            name = f"{self.subject}, the original of all rows"
            trainings.append(Training(name, made.epochs, images, made.batch_size, BACKWARD * whole, "fp32"))
        if self.method.trained:
            # In training, learned reducers only mask tokens, so they save no time. Other reducers remove the tokens.
            student = whole + 1e9 * price["predictors"] if self.method.learned else 1e9 * price["gmacs"]
            own = (fewer(images, self.tuning.images), self.batch_size, BACKWARD * student + whole)  # and the teacher
            trainings.append(Training(self.name, self.epochs, *own, self.tuning.precision))
        return tuple(trainings)

    def training(self, teacher: str) -> TrainingConfig:
        """Returns the settings of the fine-tuning, with the original as teacher.

        The losses in SPOT's Eqs. 12 and 14 need sampled masks, so only learned reducers are trained with them.
        """
        # If this experiment trained the teacher, `teacher` is a folder that contains the weights.
        tuning, weights = self.tuning, None if self.made else self.weights
        losses: list[Loss] = [Task(tuning.label_smoothing)] if tuning.task else []
        losses.append(Distillation(teacher, weight=tuning.distillation, weights=weights))
        if self.method.learned:
            losses.append(KeepRatio(tuning.keep_ratio))
            if tuning.similarity:
                losses.append(TokenSimilarity(teacher, tuning.similarity, weights))
        return TrainingConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            learning_rate=tuning.learning_rate,
            predictor_learning_rate=tuning.predictor_factor,  # a multiple of the rate of the other weights
            weight_decay=tuning.weight_decay,
            gradient_clip=tuning.gradient_clip,
            precision=tuning.precision,
            losses=tuple(losses),
            seed=self.seed,
        )

    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Trains the original if necessary, prunes tokens, fine-tunes and measures.

        Raises:
            InvalidInput: The original has no weights.
        """
        splits = self.splits()
        original, teacher = self.original(splits, folder, log)
        self.claim(folder)
        log(f"{self.name}: {folder}")
        evidence = evidence_at(folder / "evidence.json", lambda: self._evidence(original, teacher, splits, folder))
        numbers = measures(evidence)
        log(f"{self.name}: top-1 {numbers['accuracy']['value']:.2f} %")
        price = plain_measures(token_price(outline_for(self.model, self.subject), self.method))
        return {
            "data": {
                "name": splits.name,
                "images": evidence.about["images"],
                "test": evidence.about["data"],
                "notes": [*splits.notes, *self._notes()],
            },
            "model": {"fingerprint": model_fingerprint(original)},
            "rules": {self.method.name: {"paper": price, "measured": numbers}},
        }

    def original(self, splits: Splits | None, folder: Path, log: Log) -> tuple[nn.Module, str]:
        """Returns the original model, and the name or folder from which the losses load this model as teacher.

        If the original is not pre-trained, it is trained once on `splits`, or on newly loaded data if `splits` is None.

        Raises:
            InvalidInput: The original has no weights.
        """
        if self.made is None:
            assert self.model is not None
            if self.weights is None and self.model.startswith("lvvit:"):
                raise InvalidInput(
                    f"{self.model} has no weights of its own, and {self.name} needs a trained original; give the "
                    "published file with --weights."
                )
            return self.pretrained(), self.model
        # All runs of a subject share the original: runs/spot/SUBJECT/METHOD/seed-SEED -> runs/spot/originals/SUBJECT.
        place = folder.parents[2] / "originals" / self.place.parts[1]
        return self.made.trained(splits or self.splits(), place, log), str(place)

    def _evidence(self, original: nn.Module, teacher: str, splits: Splits, folder: Path) -> Evidence:
        """Fine-tunes the model if the method is trained, then measures accuracy and fidelity against the original."""
        adapted = adapt_preprocessing(splits, original)
        candidate = copy.deepcopy(original)  # the original stays the reference
        self.method.attach_(candidate, self.seed)
        if self.method.trained:
            # Training must not see the test images, so it evaluates on the validation images instead.
            splits = replace(adapted, train=first_images(adapted.train, self.tuning.images), test=adapted.validation)
            candidate = load(train(candidate, splits, self.training(teacher), folder / "train").folder)
        comparison = comparison_with(original, adapted.test, seed=self.seed, batch_size=BATCH)
        comparison = replace(comparison, candidate=candidate.to(comparison.device))
        evidence = evidence_by([Accuracy(most_drop=None), Fidelity()], comparison, self)
        correct = comparison.predictions.correct("candidate")
        if self.dataset != CLUTTERED:
            findings = [accuracy_by_group(correct, torch.arange(len(correct)))]
        else:
            if self.tiny:
                objects = sources.generated_objects("test", TINY.classes, TINY.image_size // 4)
                digits = torch.arange(len(objects))
            else:
                objects, digits = object_patches("test"), canvases("test").digits
            # Images of one digit are alike, so an interval over images would be too narrow. Group images by digit.
            index = torch.cat([batch.index for batch in adapted.test.batches(BATCH)])
            findings = [accuracy_by_group(correct, digits[index])]
            findings += [object_finding(candidate, adapted.test, objects, "object_patches", stage) for stage in STAGES]
        return replace(evidence, findings=(*evidence.findings, *findings))

    def _notes(self) -> list[str]:
        """Returns notes for the table's readers about how the model was trained."""
        notes = []
        if self.method.trained and not self.tuning.task:
            notes.append("fine-tuned by the answers of the original alone, without labels")
        if self.method.trained and self.tuning.images is not None:
            steps = self.epochs * (self.tuning.images // self.batch_size)
            notes.append(f"fine-tuned for {steps} steps of {self.batch_size} images, the same for all seeds")
        if self.made:
            epochs = self.made.epochs
            notes.append(f"the original is not pre-trained: a small model, trained here for {epochs} epochs")
        return notes


@dataclass(frozen=True)
class DerivedExperiment(SpotExperiment):
    """An experiment on the model of a SPOT run, without further training. A run that does not exist is executed first.

    `tuned` is the folder of a fine-tuned model to use instead of the run's model.
    """

    tuned: str | None = None

    @classmethod
    def of(cls, clean: SpotExperiment, **settings: Any) -> Self:
        return cls(**{each.name: getattr(clean, each.name) for each in fields(SpotExperiment)}, **settings)

    @property
    def clean(self) -> SpotExperiment:
        """The SPOT run that makes the model (SPOT, Table 1)."""
        return SpotExperiment(**{each.name: getattr(self, each.name) for each in fields(SpotExperiment)})

    @property
    def name(self) -> str:
        return f"{self.scenario}{' (tiny)' if self.tiny else ''}, {self.method.name}, seed {self.seed}"

    def trainings(self) -> tuple[Training, ...]:
        return self.clean.trainings() if self.tuned is None else ()

    def models(self, folder: Path, log: Log, splits: Splits | None = None) -> tuple[nn.Module, nn.Module]:
        """Returns the original and the run's model. Pass the run's `splits` if they are already loaded.

        Raises:
            InvalidInput: The `tuned` model prunes no tokens, or the original has no weights.
        """
        clean = self.clean
        # runs/KIND/SCENARIO/METHOD/seed-SEED -> runs/spot/SUBJECT/METHOD/seed-SEED
        place = folder.parents[len(self.place.parts) - 1] / clean.place
        candidate = None if self.tuned is None else load(self.tuned).eval()
        if candidate is None:
            clean.run(place, log)
        elif reduction_of(candidate) is None:
            raise InvalidInput(
                f"tuned={self.tuned!r}: this model prunes no tokens; give the folder of a model that was fine-tuned "
                "with a token policy, e.g. by `attnrx train MODEL --tokens spot:0.7@4,7,10`."
            )
        original, _ = clean.original(splits, place, log)
        if candidate is not None:
            return original, candidate
        if self.method.trained:
            return original, load(place / "train")
        candidate = copy.deepcopy(original)
        self.method.attach_(candidate, self.seed)
        return original, candidate
