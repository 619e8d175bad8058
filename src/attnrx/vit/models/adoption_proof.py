"""The proof of an adoption: two models have the same parts, and the same outputs for random images."""

from collections.abc import Callable, Sequence
from itertools import zip_longest

from torch import nn

from attnrx.support.errors import AttnrxError, InvalidInput, NotSupported
from attnrx.support.modules import random_images, rounding_limit
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.models.adopted import Adopted
from attnrx.vit.models.observation_hooks import evaluating, recording_calls


def difference_in_structure(model: nn.Module, rebuilt: nn.Module) -> str:
    """Returns which part of a model differs from the rebuilt one, in its text or the shape of a tensor; "" for none."""
    found, expected = (
        {
            # The text of a module shows what weights do not: activations, epsilons, rates of dropout.
            **{name: f"{type(part).__name__}({part.extra_repr()})" for name, part in each.named_modules()},
            **{name: f"of shape {tuple(tensor.shape)}" for name, tensor in each.state_dict().items()},
        }
        for each in (model, rebuilt)
    )
    for name in {**found, **expected}:
        own, other = found.get(name, "nothing"), expected.get(name, "nothing")
        if own != other:
            return f"Its {name.removeprefix('source.')} is {own}, and that of the rebuilt one {other}."
    # A module may describe itself in a way of its own.
    lines = zip_longest(str(model).splitlines(), str(rebuilt).splitlines(), fillvalue="nothing")
    differing = next((pair for pair in lines if pair[0] != pair[1]), None)
    return f"It has {differing[0].strip()}, and the rebuilt one has {differing[1].strip()}." if differing else ""


def require_equal_logits(
    models: tuple[Adopted, Adopted], because: str, blocks: Callable[[Adopted], Sequence[nn.Module]], attention: str
) -> None:
    """Raises NotSupported unless both models return the same logits for the same random images, up to rounding.

    The message names the first block whose output differs; `blocks` returns those of a model, and `attention` is the
    path of the attention in a block. `because` is the reason where the outputs of the attention differ too.

    Raises:
        InvalidInput: The model has no weights.
    """
    first, second = models
    parameter = next(first.parameters())
    if parameter.is_meta:
        raise InvalidInput(f"{first.origin.architecture} has no weights; load them before adopting the model.")
    images = random_images(first, first.origin.input_shape)
    with evaluating(models):
        expected = _outputs(first, images, "it cannot be run on images of its input shape")
        actual = _outputs(second, images, because)
    limit = rounding_limit(expected)
    difference = float((expected - actual).abs().max())
    if not difference <= limit:  # also true for NaN
        where, reason = _first_difference(models, blocks, attention, images, because)
        raise NotSupported(
            f"{first.origin.architecture} cannot be adopted: {reason}. On random images the logits differ by "
            f"{difference:.3g}; rounding explains at most {limit:.3g}. {where}"
        )


def _outputs(model: Adopted, images: Tensor, because: str) -> Float[Tensor, "images features"]:
    """Returns the outputs for the images; raises NotSupported with the reason `because` if the forward pass fails."""
    try:
        return model(images)
    except AttnrxError:
        raise
    except Exception as error:  # the code of a model raises errors of any type
        names, part, trace = {id(part): name for name, part in model.source.named_modules()}, "", error.__traceback__
        while trace is not None:  # the innermost part of the model that was called
            part, trace = names.get(id(trace.tb_frame.f_locals.get("self"))) or part, trace.tb_next
        raise NotSupported(
            f"{model.origin.architecture} cannot be adopted: {because}. On random images of shape "
            f"{tuple(images.shape)} {part or 'the model itself'} raises {type(error).__name__}: {error}"
        ) from error


def _first_difference(
    models: tuple[Adopted, Adopted],
    blocks: Callable[[Adopted], Sequence[nn.Module]],
    attention: str,
    images: Tensor,
    because: str,
) -> tuple[str, str]:
    """Returns where the outputs of the blocks first differ by more than rounding, and why."""
    outputs: list[list[Tensor]] = []
    for model in models:
        parts = [part for block in blocks(model) for part in (block.get_submodule(attention), block)]
        # Recording also switches the last-layer class-token shortcut off, so that both models process all tokens.
        with evaluating((model,)), recording_calls(parts, lambda call: (call.module, call.output_tokens)) as calls:
            model(images)
        outputs.append([dict(calls)[part] for part in parts])
    # Also true for NaN.
    pairs = zip(*outputs, strict=False)
    differs = [not float((one - other).abs().max()) <= rounding_limit(one) for one, other in pairs]
    index = next((index for index, is_other in enumerate(differs) if is_other and index % 2), None)
    if index is None:
        return (
            f"The outputs of all {len(outputs[0]) // 2} blocks are equal.",
            "the parts after the blocks differ, or the head uses other tokens",
        )
    expected, actual = outputs[0][index], outputs[1][index]
    where = (
        f"The first block that differs is block {index // 2 + 1} of {len(outputs[0]) // 2}, by "
        f"{float((expected - actual).abs().max()):.3g}, and its largest output is {float(expected.abs().max()):.3g}."
    )
    of_mlp = "the MLP or a norm of a block computes something else, while its attention is equal"
    return where, because if differs[index - 1] else of_mlp
