"""Refinement: optimizes the query and key rows of compressed layers to match the attention of the original."""

import copy
import warnings
from dataclasses import dataclass

import torch
from torch import nn

from attnrx.change.realization.descent import Fitted, descend_
from attnrx.data import ImageData, ImageSet
from attnrx.data.model_data import images_for
from attnrx.support.arguments import ANY, COUNT, MODEL, RATE, SEED, checked, instance, optional, require_fields
from attnrx.support.errors import InvalidInput, ScaleWarning
from attnrx.support.modules import copy_module
from attnrx.support.progress import track
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.attention import Attention, AttentionContext, Eager, Positions
from attnrx.vit.attention.backends.backend import scores
from attnrx.vit.models import InputValidation, evaluating, family_of, recording_calls
from attnrx.vit.models.verbs import verb

# At most so many images of a user's data are read.
MOST_REFINED = 4096


@dataclass(frozen=True)
class Refinement:
    """The settings: `steps` of Adam per layer on `batch` images each; the learning rate decays linearly to zero.

    The learning rate is relative to the root mean square of each refined tensor.
    """

    steps: int = 200
    learning_rate: float = 3e-3
    batch: int = 8
    seed: int = 0

    def __post_init__(self):
        require_fields(self, steps=COUNT, learning_rate=RATE, batch=COUNT, seed=SEED)


@checked(
    candidate=MODEL,
    reference=MODEL,
    calibration=ANY,
    refinement=optional(instance("a Refinement, e.g. Refinement(steps=200)", Refinement)),
)
@verb
def refine(
    candidate: nn.Module, reference: nn.Module, calibration: ImageData, refinement: Refinement | None = None
) -> Fitted:
    """Returns a copy of the candidate whose query and key rows minimise KL(reference attention || candidate attention).

    Every layer is refined independently on the inputs of the reference layer; no labels are used. A layer whose
    divergence does not decrease keeps its rows. Both models must have the same layers, and the candidate's heads must
    be among the reference's. The inputs of a layer are held in memory for all calibration images, so give few, e.g. 64.

    Args:
        candidate: The compressed model, with all its tokens.
        reference: The original.
        calibration: Images, normalized for the model.
        refinement: The steps and rate of the fit.

    Returns:
        The refined copy with the divergence of every layer before and after.

    Raises:
        InvalidInput: The models have different depths or heads, or there are no images.
        DataError: The images do not have the model's input shape, or contain NaN or infinity.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> images = torch.randn(64, 3, 32, 32)  # normalized as the model expects them
        >>> model = rx.load(vit)
        >>> small = rx.realize(model, rx.prescribe(rx.diagnose(model, images), "qk=total_rank:0.5"))
        >>> refined = rx.refine(small, model, images)
        >>> sum(refined.after) < sum(refined.before)  # divergence of every layer, in nats
        True
    """
    knobs = refinement or Refinement()
    images = images_for(reference, calibration, "calibration", limit=MOST_REFINED, seed=knobs.seed)
    result = Fitted(copy_module(candidate))
    pairs = list(
        zip(family_of(reference).attention(reference), family_of(result.model).attention(result.model), strict=False)
    )
    _require_alike(reference, result.model)
    # Layer by layer on the inputs of the reference: one layer's inputs in memory at a time, and no error of one
    # refinement is an input of the next.
    for teacher, student in track(pairs, "refining layers"):
        input_validation = InputValidation(reference, family_of(reference), "refine")
        with warnings.catch_warnings(), evaluating((reference, result.model)):
            if result.before:  # the first layer has warned
                warnings.simplefilter("ignore", ScaleWarning)
            inputs, positions = _layer_inputs(reference, teacher, images, input_validation)
            result.notes = [*images.notes, *input_validation.notes()]
        before, after = _refine_layer_(student, teacher, inputs, positions, knobs)
        result.before.append(before)
        result.after.append(after)
    return result


def _require_alike(reference: nn.Module, candidate: nn.Module) -> None:
    first, second = (family_of(model).attention(model) for model in (reference, candidate))
    heads = [[set(layer.spec.heads) for layer in layers] for layers in (first, second)]
    if len(first) != len(second) or any(not new <= old for old, new in zip(*heads, strict=True)):
        raise InvalidInput(
            f"the candidate has {len(second)} layers of heads {heads[1]}, the reference {len(first)} of {heads[0]}; "
            "refine a model that was made from the reference."
        )


def _layer_inputs(
    model: nn.Module, layer: Attention, images: ImageSet, input_validation: InputValidation
) -> tuple[Float[Tensor, "images tokens width"], Positions | None]:
    """Returns the tokens that enter a layer, and their positions, which are those of every image."""
    weight = next(model.parameters())
    # The third argument of `Attention.forward` are the positions, where the model has any.
    with recording_calls((layer,), lambda call: (call.tokens.detach(), call.args[1] if call.args else None)) as calls:
        for batch in images.batches(64, device=weight.device):
            model(input_validation.take(batch.images))
    if not calls:
        raise InvalidInput("refine was given no calibration image; give a few, e.g. splits.train.take(64).")
    return torch.cat([tokens for tokens, _ in calls]), calls[0][1]


def _refine_layer_(
    student: Attention, teacher: Attention, inputs: Tensor, positions: Positions | None, knobs: Refinement
) -> tuple[float, float]:
    """Refines one layer in place, and returns its divergence before and after."""
    # The teacher's heads in the storage order of the student, which may have fewer.
    order = [teacher.spec.heads.index(head) for head in student.spec.heads]
    parts = list(inputs.split(knobs.batch))
    with torch.no_grad():
        # Computed once, as steps return to the same parts: [batch, heads, queries, keys] each.
        targets = [_log_attention(teacher, part, positions)[:, order].exp() for part in parts]
        before = _mean_divergence(student, parts, targets, positions)
    # Nothing to optimize: no directions, or an exact layer, whose rows would only move by rounding.
    if before == 0 or not any(row.numel() for row in student.scores.parameters()):
        return before, before
    original_state = copy.deepcopy(student.scores.state_dict())

    def error(generator: torch.Generator) -> Float[Tensor, ""]:
        chosen = int(torch.randint(len(parts), (), generator=generator))
        return _divergence(student, parts[chosen], targets[chosen], positions)

    descend_(student.scores, error, knobs.steps, knobs.learning_rate, knobs.seed, lambda progress: 1 - progress)
    with torch.no_grad():
        after = _mean_divergence(student, parts, targets, positions)
    if not after < before:  # also true for NaN
        student.scores.load_state_dict(original_state)
        return before, before
    return before, after


def _log_attention(
    layer: Attention, tokens: Tensor, positions: Positions | None
) -> Float[Tensor, "batch heads queries keys"]:
    """Returns the log-attention of the layer; a head without directions has uniform attention."""
    # The backend without padding, of which the logits are taken; a fused kernel returns no logits.
    eager = Eager()
    buckets, _ = eager.layout(layer.spec, AttentionContext.of(tokens))
    by_bucket = {part.bucket: scores(part) for part in layer.factors(tokens, buckets, positions)}
    length = tokens.shape[1]
    flat = tokens.new_zeros(tokens.shape[0], 1, length, length)
    logits = [by_bucket.get(bucket, flat.expand(-1, bucket.stop - bucket.start, -1, -1)) for bucket in buckets]
    return torch.log_softmax(torch.cat(logits, dim=1), dim=-1)


def _divergence(layer: Attention, tokens: Tensor, target: Tensor, positions: Positions | None) -> Float[Tensor, ""]:
    logs = _log_attention(layer, tokens, positions)
    # xlogy is 0 for a target that underflowed to 0. The entropy is constant, but makes the value a divergence.
    terms = torch.xlogy(target, target) - target * logs
    return terms.sum(-1).mean()


def _mean_divergence(
    layer: Attention, parts: list[Tensor], targets: list[Tensor], positions: Positions | None
) -> float:
    total = sum(
        # Weighted by images: the last part may have fewer.
        float(_divergence(layer, part, target, positions)) * len(part)
        for part, target in zip(parts, targets, strict=True)
    )
    return total / sum(len(part) for part in parts)
