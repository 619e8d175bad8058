"""The terms of the training objective, which you can combine freely."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.data.model_data import normalization_of
from attnrx.support.arguments import BELOW_ONE, COUNT, POSITIVE, Kind, checked, optional, require_fields
from attnrx.support.errors import InvalidInput
from attnrx.support.registry import Registry, text_name
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.support.text_parsing import TextReader, knobs_of
from attnrx.vit.models import TokenRun, family_of, load_model, recording_blocks

TeacherSource = tuple[str, str | None]
"""Where a teacher is loaded from: a folder or a name that `load_model` accepts, and a file of weights or None."""


@dataclass(frozen=True)
class LossContext:
    """The inputs of a loss at one training step.

    `model` is the model without the wrappers for compilation and distributed training. A loss that runs the model again
    calls `model.forward`, which is never compiled. `logits` have float32 or a higher precision. `seed` is different in
    every step. The images of a step are divided into parts, and a loss gets one of them. `shard` contains the index of
    this part and the number of parts. `progress` is the completed fraction of the training.

    If a loss needs features, `features` contains the output tokens of each block of the model. Blocks after a stage
    that removes tokens have fewer output tokens. If the model has a token policy (rules for pruning or merging tokens),
    `run` contains token statistics from this step's forward pass. `teachers` contains the loaded teacher models. Losses
    can share intermediate results within a step through `memory`.
    """

    model: nn.Module
    images: Float[Tensor, "batch channels height width"]
    labels: Int[Tensor, "batch"]
    logits: Float[Tensor, "batch classes"]
    seed: int
    shard: tuple[int, int] = (0, 1)
    features: Sequence[Float[Tensor, "batch _ features"]] = ()
    run: TokenRun | None = None
    progress: float = 1.0
    memory: dict[Any, Any] = field(default_factory=dict)
    teachers: Mapping[TeacherSource, nn.Module] = field(default_factory=dict)


class Loss(ABC):
    """One term of the training objective. A loss is a frozen dataclass, and calling it returns the value of the term.

    The value is not yet multiplied by `weight`. Each process computes the mean over its own images. Averaged over the
    processes, these means give the mean over all images.
    """

    example: ClassVar[str] = "attnrx.training.losses.Task()"
    reads_labels: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False
    kinds: ClassVar[Mapping[str, Kind]] = {}
    """The allowed values of options, if they differ from the usual ones (positive numbers and counts)."""
    weight: float

    def __post_init__(self):
        require_fields(self, {float: POSITIVE, int | None: optional(COUNT)}, **self.kinds)

    @abstractmethod
    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Returns the value of the term, without its weight."""

    @property
    def name(self) -> str:
        """The name of the term in logs."""
        return text_name(type(self))


@dataclass(frozen=True)
class Task(Loss):
    """Cross-entropy with the labels. The probability `label_smoothing` is spread evenly over all classes."""

    reads_labels: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, Kind]] = {"label_smoothing": BELOW_ONE}
    label_smoothing: float = 0.1
    weight: float = 1.0

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        return F.cross_entropy(context.logits, context.labels, label_smoothing=self.label_smoothing)


class TeacherLoss(Loss):
    """A loss that compares the model with a teacher, which `load_model` loads from a folder or by a model name."""

    teacher: str
    weights: str | None

    def __post_init__(self):
        # The teacher is checked first, because a message that shows the loss would print all layers of a module.
        if not isinstance(self.teacher, str | os.PathLike):
            raise InvalidInput(
                f"{type(self).__name__}(teacher=...) was given a {type(self.teacher).__name__}: give the folder of a "
                "saved model (attnrx.save(model, folder)) or a name that attnrx.load reads, so that the run can be "
                "resumed."
            )
        object.__setattr__(self, "teacher", os.fspath(self.teacher))  # a text, as in files with settings
        super().__post_init__()

    @property
    def source(self) -> TeacherSource:
        return self.teacher, self.weights


@dataclass(frozen=True)
class Distillation(TeacherLoss):
    """KL(teacher || model), the KL divergence of the softened outputs, times temperature^2 (Hinton et al., 2015).

    The factor temperature^2 keeps the gradients at a similar scale for any temperature. `teacher` is a folder or a name
    that `load_model` accepts. If the teacher is a name such as timm:NAME, `weights` may be a local weights file. This
    loss does not use labels.
    """

    teacher: str
    temperature: float = 1.0
    weight: float = 0.5
    weights: str | None = None

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        teacher_logits, _ = teacher_outputs(context, self.source)
        if teacher_logits.shape != context.logits.shape:
            raise InvalidInput(
                f"the teacher {self.teacher} has {teacher_logits.shape[1]} classes and the model "
                f"{context.logits.shape[1]}; take a teacher of the same task."
            )
        # The targets are log-probabilities, which stay exact even if the teacher's probabilities round to 0.
        target = F.log_softmax(teacher_logits / self.temperature, dim=-1)
        predicted = F.log_softmax(context.logits / self.temperature, dim=-1)
        # With "mean" in place of "batchmean", the sum would also be divided by the number of classes.
        return F.kl_div(predicted, target, log_target=True, reduction="batchmean") * self.temperature**2


@dataclass(frozen=True)
class FeatureDistillation(TeacherLoss):
    """The mean squared difference between the output tokens of the model's blocks and of the teacher's blocks.

    Every token is first normalized to zero mean and unit variance over its features, as in a LayerNorm without weights
    (whitened targets, Wei et al., 2022, arXiv 2205.14141). In a ViT, a few features are a hundred times larger than the
    others, and would dominate the loss without this normalization. The loss is 0 for equal tokens and 2 for unrelated
    tokens. Only the last `last` blocks are compared, or all blocks if `last` is None. The teacher must have the same
    depth, width and number of tokens.
    """

    reads_features: ClassVar[bool] = True
    teacher: str
    last: int | None = None
    weight: float = 1.0
    weights: str | None = None

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        (_, teacher_features), features = teacher_outputs(context, self.source), context.features
        shapes = [[tuple(tokens.shape[1:]) for tokens in outputs] for outputs in (features, teacher_features)]
        if shapes[0] != shapes[1]:
            raise InvalidInput(
                f"the blocks of the teacher {self.teacher} have (tokens, width) {shapes[1]} and those of the model "
                f"{shapes[0]}; take the model that this one was made from, or learn from its logits alone."
            )
        if self.last is not None and self.last > len(features):
            raise InvalidInput(f"{self}: the model has {len(features)} blocks only.")
        selected = slice(None) if self.last is None else slice(-self.last, None)
        # The result is a mean of the blocks' means, so every block has the same weight.
        pairs = zip(features[selected], teacher_features[selected], strict=True)
        return torch.stack([F.mse_loss(_whitened(tokens), _whitened(target)) for tokens, target in pairs]).mean()


def _whitened(tokens: Float[Tensor, "batch tokens features"]) -> Float[Tensor, "batch tokens width"]:
    exact = tokens.to(torch.promote_types(tokens.dtype, torch.float32))  # bfloat16 would round small differences away
    return F.layer_norm(exact, exact.shape[-1:])


Answer = tuple[Float[Tensor, "batch classes"], Sequence[Float[Tensor, "batch tokens features"]]]


def load_teachers(losses: Iterable[Loss]) -> dict[TeacherSource, nn.Module]:
    """Loads every teacher that the losses use, and returns the teachers by their sources."""
    sources = {loss.source for loss in losses if isinstance(loss, TeacherLoss)}
    return {(name, weights): load_model(name, weights=weights) for name, weights in sorted(sources, key=str)}


@torch.no_grad()
def teacher_outputs(context: LossContext, source: TeacherSource) -> Answer:
    """Runs a teacher on the images of the step. The outputs are computed once and shared by all losses of the step.

    Returns the teacher's logits and, if a loss of this step needs features, the outputs of the teacher's blocks. If the
    teacher and the model use different image normalizations, the images are converted to the teacher's normalization.
    """
    if source not in context.memory:
        teacher = context.teachers.get(source)
        if teacher is None:
            teacher = load_model(source[0], weights=source[1])
        teacher = teacher.to(context.images.device, context.images.dtype).eval().requires_grad_(False)
        scale, teacher_scale = normalization_of(context.model), normalization_of(teacher)
        images = context.images if scale == teacher_scale else teacher_scale.apply(scale.invert(context.images))
        # Outputs of blocks are only stored if a loss of this step needs them.
        recording = recording_blocks(teacher, family_of(teacher)) if context.features else nullcontext(())
        with recording as features:
            logits = teacher(images).to(context.logits.dtype)
        context.memory[source] = logits, tuple(features)
    return context.memory[source]


LOSSES = Registry[type[Loss]]("loss", Distillation, FeatureDistillation, Task)


class _Reader(TextReader):
    noun, plural, signs = "loss", "Losses", "():,=/"
    examples = "target_rank:16:0.1 or distillation(runs/teacher,temperature=2)"


@checked()
def parse_loss(text: str, shared: Mapping[str, Any] | None = None) -> Loss:
    """Creates a loss from a string with its name in snake case and its options, e.g. `target_rank:16:0.1`.

    `shared` contains default values for options, e.g. the teacher. If a value in the string has no option name, it is
    assigned to an option that is not in `shared`.

    Raises:
        UnknownName: The loss or one of the options does not exist.
        InvalidInput: The string does not follow the syntax of losses, or a required option is missing.
    """
    reader = _Reader(text)
    name, kind = reader.read_name(LOSSES)
    defaults = {knob: value for knob, value in (shared or {}).items() if knob in knobs_of(kind)}
    knobs = reader.read_knobs(name, kind, is_short=True, filled=defaults)
    reader.expect("end", "the end")
    return reader.build(name, kind, {**defaults, **knobs})
