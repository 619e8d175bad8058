"""Realizes the token policy of a prescription: predictors, and thresholds of policies by image."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from attnrx.data import ImageData
from attnrx.data.model_data import images_for
from attnrx.nouns.prescription import Prescription, TokenPrescription
from attnrx.support.errors import InvalidInput
from attnrx.support.shapes import Tensor
from attnrx.vit.models import Family, TokenReduction, attach_tokens_, evaluating, observing_calls, reduction_of

# Images on which the thresholds of a policy by image are found; they are in memory at once.
CALIBRATED = 256


def prescribed_tokens(model: nn.Module) -> TokenPrescription:
    """Returns the policy attached to a model as a prescription, with copies of its predictors where they are learned.

    Predictors trained in one model can thus be realized together with other ranks.

    Raises:
        InvalidInput: The model prunes and merges no tokens.
    """
    reduction = reduction_of(model)
    if reduction is None:
        raise InvalidInput("this model prunes and merges no tokens, so it has no policy to return.")
    learned = {name: tensor.detach().cpu().clone() for name, tensor in reduction.stages.state_dict().items()}
    return TokenPrescription.of(reduction.policy, learned if reduction.policy.reducer.learned else None)


def calibrated(prescription: Prescription, model: nn.Module) -> Prescription:
    """Returns the prescription with the thresholds that its token policy by image got in the realized model."""
    if prescription.tokens is None or not prescription.tokens.policy.must_be_calibrated:
        return prescription
    return replace(prescription, tokens=prescribed_tokens(model))


def realize_tokens_(
    model: nn.Module,
    family: Family,
    tokens: TokenPrescription,
    by: str,
    heads: int,
    calibration: ImageData | None = None,
) -> None:
    """Attaches the prescribed token policy to the model, in place, and finds its thresholds on calibration images.

    Raises:
        InvalidInput: The policy finds thresholds on calibration images, and there are none, or its predictors were made
            for another model.
    """
    # Fresh predictors depend on the seed of the prescription only, and the random numbers of the caller do not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tokens.seed)
        reduction = attach_tokens_(model, family, tokens.policy, by, heads)
    if tokens.policy.must_be_calibrated:
        if calibration is None:
            raise InvalidInput(
                f"{tokens.policy} gives every image its own number of tokens by thresholds that are found on data: "
                "pass calibration images, e.g. calibration=splits.train.take(256)."
            )
        weight, images = next(model.parameters()), images_for(model, calibration, "calibration", limit=CALIBRATED)
        chosen = images.take(min(CALIBRATED, len(images)))
        # One batch, because a threshold is a quantile over all images, and later stages see tokens that earlier ones
        # merged.
        batch = torch.cat([part.images.to(weight.dtype) for part in chosen.batches(32, device=weight.device)])
        # Observed, which disables chunks of images.
        with evaluating((model,)), reduction.calibrating(), observing_calls((model,), lambda call: None):
            model(batch)
    if tokens.predictors is not None:
        _load_(reduction, tokens.predictors)


def _load_(reduction: TokenReduction, predictors: Mapping[str, Tensor]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in reduction.stages.state_dict().items()}
    loaded = {name: tuple(tensor.shape) for name, tensor in predictors.items()}
    wrong = sorted(name for name in expected.keys() | loaded.keys() if expected.get(name) != loaded.get(name))
    if wrong:
        shape, first = reduction.shape, wrong[0]
        raise InvalidInput(
            f"the predictors of {reduction.policy} were made for another model: this one has width {shape.width} and "
            f"{shape.heads} heads, so {first} is {expected.get(first, 'absent')}, and the prescription's is "
            f"{loaded.get(first, 'absent')}. Train predictors for this model, or omit them for fresh ones."
        )
    reduction.stages.load_state_dict(dict(predictors))
