"""The proof of an adoption: two models have the same parts, and the same outputs for random images."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
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
        with evaluating(models):
            outputs = [_outputs_of_blocks(model, blocks(model), attention, images) for model in models]
        where, reason = _first_difference(outputs[0], outputs[1], because)
        raise NotSupported(
            f"{first.origin.architecture} cannot be adopted: {reason}. On random images the logits differ by "
            f"{difference:.3g}; rounding explains at most {limit:.3g}. {where}"
        )


def _outputs(model: Adopted, images: Tensor, because: str) -> Float[Tensor, "images features"]:
    """Returns the outputs for the images; raises NotSupported with the reason `because` if the forward pass fails."""
    try:
        return model(images)
    except AttnrxError as error:
        part, returns_nothing = _failing_part(model, images)
        if returns_nothing:
            raise NotSupported(f"{model.origin.architecture} cannot be adopted: {part} returns None.") from error
        raise
    except Exception as error:  # the code of a model raises errors of any type
        raise NotSupported(
            f"{model.origin.architecture} cannot be adopted: {because}. On random images of shape "
            f"{tuple(images.shape)} {_failing_part(model, images)[0]} raises {type(error).__name__}: {error}"
        ) from error


def _failing_part(model: Adopted, images: Tensor) -> tuple[str, bool]:
    """Returns the path of the innermost part that returns None or raises an error, and whether one returns None."""
    active: list[str] = []
    nothing: list[str] = []

    def enter(name: str, *_: object) -> None:
        active.append(name)

    def leave(part: nn.Module, args: object, output: object) -> None:
        name = active.pop()
        if output is None:
            nothing.append(name)

    with ExitStack() as hooks:
        for name, part in model.source.named_modules():
            hooks.enter_context(part.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(part.register_forward_hook(leave))
        with suppress(Exception):  # the error that is reported
            model(images)
    return (nothing or active[-1:] or [""])[0] or "the model itself", bool(nothing)


def _outputs_of_blocks(
    model: Adopted, blocks: Sequence[nn.Module], attention: str, images: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Returns the output of the attention of every block, and that of the block."""
    parts = [(block.get_submodule(attention), block) for block in blocks]
    # Recording also switches the last-layer class-token shortcut off, so that both models process all tokens.
    with recording_calls(sum(parts, ()), lambda call: (call.module, call.output_tokens)) as calls:
        model(images)
    outputs = dict(calls)
    return [(outputs[part], outputs[block]) for part, block in parts]


def _first_difference(
    expected: Sequence[tuple[Tensor, Tensor]], actual: Sequence[tuple[Tensor, Tensor]], because: str
) -> tuple[str, str]:
    """Returns where the outputs of the blocks first differ by more than rounding, and why."""
    for number, pairs in enumerate(zip(expected, actual, strict=False), 1):
        attention, block = (
            (float((one - other).abs().max()), rounding_limit(one)) for one, other in zip(*pairs, strict=True)
        )
        if not block[0] <= block[1]:  # also true for NaN
            size = f"by {block[0]:.3g}, and its largest output is {float(pairs[0][1].abs().max()):.3g}"
            where = f"The first block that differs is block {number} of {len(expected)}, {size}."
            if not attention[0] <= attention[1]:
                return where, because
            return where, "the MLP or a norm of a block computes something else, while its attention is equal"
    return (
        f"The outputs of all {len(expected)} blocks are equal.",
        "the parts after the blocks differ, or the head uses other tokens",
    )
