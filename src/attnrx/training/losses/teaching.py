"""Learning from a teacher: another, frozen model that runs on the images of a step."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from attnrx.data.model_data import normalization_of
from attnrx.support.arguments import COUNT, POSITIVE, Kind, optional
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.training.losses.loss import Loss, LossContext, TeacherSource
from attnrx.vit.models import family_of, load_model, recording_blocks, reduction_of


class TeacherLoss(Loss):
    """A loss that compares the model with a teacher: a folder or a name that `load_model` reads, with its weights."""

    teacher: str
    weights: str | None

    def __post_init__(self):
        # Before any message with the loss, which would hold all layers of a module.
        if not isinstance(self.teacher, str | os.PathLike):
            raise InvalidInput(
                f"{type(self).__name__}(teacher=...) was given a {type(self.teacher).__name__}: give the folder of a "
                "saved model (attnrx.save(model, folder)) or a name that attnrx.load reads, so that the run can be "
                "resumed."
            )
        object.__setattr__(self, "teacher", os.fspath(self.teacher))  # a text, as in a file of the settings
        super().__post_init__()

    @property
    def source(self) -> TeacherSource:
        return self.teacher, self.weights


@dataclass(frozen=True)
class Distillation(TeacherLoss):
    """The divergence KL(teacher || model) of the softened outputs, times temperature^2 (Hinton et al., 2015).

    The factor keeps the size of the gradient. `teacher` is a folder or a name that `load_model` reads, such as
    timm:NAME, then with `weights`, a local file. Labels are not used: with this loss alone, training needs none.
    """

    kinds: ClassVar[Mapping[str, Kind]] = {"temperature": POSITIVE}
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
        # Targets as logarithms, which are exact where the teacher's probabilities round to 0.
        target = F.log_softmax(teacher_logits / self.temperature, dim=-1)
        predicted = F.log_softmax(context.logits / self.temperature, dim=-1)
        # batchmean: "mean" would divide by the number of classes as well
        return F.kl_div(predicted, target, log_target=True, reduction="batchmean") * self.temperature**2


@dataclass(frozen=True)
class FeatureDistillation(TeacherLoss):
    """The mean squared difference between the output tokens of the model's blocks and the teacher's.

    Every token is first centred and scaled to unit variance over its features, as a LayerNorm without weights does
    (whitened targets: Wei et al., 2022, arXiv 2205.14141): a few features of a ViT's tokens are a hundred times larger
    than the rest and would dominate. 0 is equal, 2 is unrelated. `last` is the number of blocks, from the last one;
    None means all. The teacher must have equal depth, width and tokens.
    """

    reads_features: ClassVar[bool] = True
    kinds: ClassVar[Mapping[str, Kind]] = {"last": optional(COUNT)}
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
        # A mean of means: every block counts the same.
        pairs = zip(features[selected], teacher_features[selected], strict=True)
        return torch.stack([F.mse_loss(_whitened(tokens), _whitened(target)) for tokens, target in pairs]).mean()


def _whitened(tokens: Float[Tensor, "batch tokens features"]) -> Float[Tensor, "batch tokens width"]:
    exact = tokens.to(torch.promote_types(tokens.dtype, torch.float32))  # bfloat16 rounds away small differences
    return F.layer_norm(exact, exact.shape[-1:])


@dataclass(frozen=True)
class TokenSimilarity(TeacherLoss):
    """One minus the cosine between the last layer's tokens and the teacher's, over the kept patches (Eq. 14).

    The teacher must have equal patches and width. SPOT uses it with weight 10 for LV-ViT and without it for DeiT.
    """

    reads_features: ClassVar[bool] = True
    teacher: str
    weight: float = 10.0
    weights: str | None = None

    def __call__(self, context: LossContext) -> Float[Tensor, ""]:
        reduction, run = reduction_of(context.model), context.run
        if reduction is None or run is None or run.sizes is None or run.patch_indices is None:
            raise NotSupported(
                "TokenSimilarity needs token pruning, and the run of the step in its context (recording_tokens); "
                "attach a policy or omit the loss."
            )
        _, teacher_features = teacher_outputs(context, self.source)
        target, tokens = teacher_features[-1], context.features[-1]
        if target.shape != tokens.shape:
            raise InvalidInput(
                f"the teacher {self.teacher} ends with (tokens, width) {tuple(target.shape[1:])}, the model with "
                f"{tuple(tokens.shape[1:])}; take the model that this one was made from, and a reducer that is learned."
            )
        prefix = reduction.shape.layout.prefix
        # An added (fused) token has no counterpart in the teacher.
        mask = ((run.sizes[:, prefix:] > 0) & (run.patch_indices >= 0)).to(tokens.dtype)
        cosines = F.cosine_similarity(tokens[:, prefix:], target[:, prefix:].to(tokens.dtype), dim=-1)
        return (((1 - cosines) * mask).sum(1) / mask.sum(1).clamp_min(1)).mean()  # an image may keep no patch


Answer = tuple[Float[Tensor, "batch classes"], Sequence[Float[Tensor, "batch tokens features"]]]


def load_teachers(losses: Iterable[Loss]) -> dict[TeacherSource, nn.Module]:
    """Returns the teachers of the losses, as their files are now."""
    sources = {loss.source for loss in losses if isinstance(loss, TeacherLoss)}
    return {(name, weights): load_model(name, weights=weights) for name, weights in sorted(sources, key=str)}


def teacher_outputs(context: LossContext, source: TeacherSource) -> Answer:
    """Runs the teacher on the images of the step, once for all losses that need it.

    Returns its logits, and the outputs of its blocks where the step needs features. A teacher trained with another
    normalization receives the images on its own scale.
    """
    if source not in context.memory:
        device, dtype = context.images.device, context.images.dtype
        teacher = context.teachers.get(source)
        if teacher is None:
            teacher = _load(*source, _versions(source))
        context.memory[source] = _run(teacher.to(device, dtype).eval().requires_grad_(False), context)
    return context.memory[source]


@torch.no_grad()
def _run(teacher: nn.Module, context: LossContext) -> Answer:
    scale, teacher_scale = normalization_of(context.model), normalization_of(teacher)
    images = context.images if scale == teacher_scale else teacher_scale.apply(scale.invert(context.images))
    # Outputs of blocks are stored only in steps whose losses need them.
    recording = recording_blocks(teacher, family_of(teacher)) if context.features else nullcontext(())
    with recording as features:
        logits = teacher(images).to(context.logits.dtype)
    return logits, tuple(features)


@lru_cache(maxsize=2)  # a frozen loss holds no model; loading it again for every step would be slow
def _load(teacher: str, weights: str | None, versions: tuple[tuple[str, int, int, int], ...]) -> nn.Module:
    return load_model(teacher, weights=weights)


def _versions(source: TeacherSource) -> tuple[tuple[str, int, int, int], ...]:
    """Returns what changes with the files of a teacher: path, inode, size and time of each; empty for a name."""
    paths = [Path(path) for path in source if path is not None and Path(path).exists()]
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    stats = [(file, file.stat()) for file in files if file.is_file()]
    return tuple((str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in stats)
