"""The base class of training losses, the context that they receive, and cross-entropy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.support.arguments import BELOW_ONE, POSITIVE, Kind, require_fields
from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.models import TokenReduction, TokenRun, reduction_of

TeacherSource = tuple[str, str | None]
"""A folder or a name that `load_model` reads, and the file of its weights, if it needs one."""


@dataclass(frozen=True)
class LossContext:
    """The inputs of a loss at one training step.

    `model` is the bare module; a loss that runs it again does so through `model.forward`, which is never compiled.
    `logits` are in float32 or better. `shard` is (process, processes), and `seed` belongs to this step alone. For mixed
    images, an image has its own label with weight `share` and its `partners` label with the rest. `features` are the
    block outputs of the model, if a loss needs them; they have fewer tokens after a stage that removes some. `run` has
    the statistics of the model's tokens in the forward pass of this step (`models.recording_tokens`), where it has a
    policy. `progress` is the completed share of the training. `memory` is shared by the losses of this step. `teachers`
    are the models that losses compare with, if they are loaded already.
    """

    model: nn.Module
    images: Float[Tensor, "batch channels height width"]
    labels: Int[Tensor, "batch"]
    logits: Float[Tensor, "batch classes"]
    seed: int
    shard: tuple[int, int] = (0, 1)
    partners: Int[Tensor, "batch"] | None = None
    share: float = 1.0
    features: Sequence[Float[Tensor, "batch _ features"]] = ()
    run: TokenRun | None = None
    progress: float = 1.0
    memory: dict[Any, Any] = field(default_factory=dict)
    teachers: Mapping[TeacherSource, nn.Module] = field(default_factory=dict)

    def noise(self) -> Float[Tensor, "batch channels height width"]:
        """Returns standard normal noise for the images: drawn for all processes together, then cut.

        So N processes use the same noise as one process with the same global batch, and a repeated step repeats its
        noise.
        """
        process, processes = self.shard
        count = len(self.images)
        # On the CPU, because generators of devices give other numbers for the same seed.
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(count * processes, *self.images.shape[1:], generator=generator, dtype=self.images.dtype)
        return noise[count * process : count * (process + 1)].to(self.images.device)


class Loss(ABC):
    """One term of the training objective: a frozen dataclass of its options, whose call returns the unweighted value.

    Every loss is a mean over the images of its process, so that the average over processes is the mean over all images.
    """

    reads_labels: ClassVar[bool] = False
    reads_features: ClassVar[bool] = False
    kinds: ClassVar[Mapping[str, Kind]] = {}
    """The ranges of options, beside their types."""
    weight: float

    def __post_init__(self):
        require_fields(self, weight=POSITIVE, **self.kinds)

    @abstractmethod
    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        """Returns the value of the term, before its weight."""

    @classmethod
    def text_name(cls) -> str:
        """Returns the name in text: that of the class in snake case."""
        return "".join("_" + letter.lower() if letter.isupper() else letter for letter in cls.__name__)[1:]

    @property
    def name(self) -> str:
        """The name under which the term is logged."""
        return self.text_name()


def sampling_run(loss: Loss, context: LossContext) -> tuple[TokenReduction, TokenRun]:
    """Returns the token reduction and the run whose sampled masks a loss reads; raises NotSupported without samples."""
    reduction, run = reduction_of(context.model), context.run
    if reduction is None or run is None or not run.sampled:
        raise NotSupported(
            f"{type(loss).__name__} needs a learned token reducer (spot, dynamicvit) in training, and the run of the "
            "step in its context (recording_tokens); attach a policy or omit the loss."
        )
    return reduction, run


@dataclass(frozen=True)
class Task(Loss):
    """Cross-entropy against the labels; `label_smoothing` is spread evenly over all classes."""

    reads_labels: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, Kind]] = {"label_smoothing": BELOW_ONE}
    label_smoothing: float = 0.1
    weight: float = 1.0

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        loss = F.cross_entropy(context.logits, context.labels, label_smoothing=self.label_smoothing)
        if context.partners is None:
            return loss
        # Cross-entropy is linear in the target, so this is the loss of the mixed label.
        partner_loss = F.cross_entropy(context.logits, context.partners, label_smoothing=self.label_smoothing)
        return context.share * loss + (1 - context.share) * partner_loss
