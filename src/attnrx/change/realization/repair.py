"""Repair: fits the remaining weights of a compressed model, block by block, to the outputs of the original's blocks."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from attnrx.change.decompositions.hidden_units import RIDGE
from attnrx.change.realization.descent import HELD_OUT, descend_
from attnrx.data import ImageData, ImageSet
from attnrx.data.model_data import images_for
from attnrx.support.arguments import (
    ANY,
    COUNT,
    MODEL,
    NATURAL,
    RATE,
    SEED,
    checked,
    instance,
    number,
    optional,
    require_fields,
)
from attnrx.support.errors import InvalidInput, NotSupported, ScaleWarning
from attnrx.support.modules import copy_module
from attnrx.support.progress import running, track
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.models import InputValidation, LowRankLinear, block_names, evaluating, family_of, require_all_tokens
from attnrx.vit.models.verbs import verb
from attnrx.vit.outputs import output_kind_of

# The importance of tokens is measured on so many images, and this share of it is the same for all tokens, because the
# outputs of a class-token model do not depend on the patches of its last block, while its dense features do.
IMPORTANCE_IMAGES, EVEN = 64, 0.1
# At most so many images of a user's data are read.
MOST_REPAIRED = 4096
# Images of a forward pass of one block.
CHUNK = 32


@dataclass(frozen=True)
class Repair:
    """The settings: the penalty of the least-squares fit, and steps of Adam per attention and per MLP.

    A step is on all tokens of `images` images for an attention, on `tokens` single tokens for an MLP, drawn from all
    images in proportion to their importance.

    `ridge` weights the squared change of the second map of an MLP, relative to the mean variance of its inputs. The
    learning rate is relative to the root mean square of each tensor, and decays to zero by a cosine.
    """

    steps: int = 300
    learning_rate: float = 0.015
    images: int = 4
    tokens: int = 512
    ridge: float = RIDGE
    seed: int = 0

    def __post_init__(self):
        require_fields(
            self, steps=NATURAL, learning_rate=RATE, images=COUNT, tokens=COUNT, ridge=number(0.0), seed=SEED
        )


@dataclass
class Repaired:
    """A repaired model, the relative squared error of the output of each block before and after, and notes on the
    images.

    The errors are those on the held-out images, after the repair of the blocks before.
    """

    model: nn.Module
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@checked(
    candidate=MODEL,
    reference=MODEL,
    calibration=ANY,
    settings=optional(instance("a Repair, e.g. attnrx.realization.repair.Repair(steps=300)", Repair)),
)
@verb
def repair(
    candidate: nn.Module, reference: nn.Module, calibration: ImageData, settings: Repair | None = None
) -> Repaired:
    """Returns a copy of the candidate whose blocks are fitted to those of the reference, without labels.

    Every block is fitted in turn, on what the repaired blocks before it give, to the output of the reference's block on
    what the reference's blocks before it give. So a block also corrects errors of earlier ones. First the maps of the
    attention are fitted by steps of Adam; then the second map of the MLP in closed form, by least squares with a
    penalty on its change; then both maps of the MLP by steps of Adam. The squared error of a token is weighted by its
    importance, the root mean square of the gradient of the reference's outputs with respect to the block's. A fit is
    kept if it reduces the error of the block's output on one image in eight, which is not fitted to.

    The tokens of all images are in memory about six times. Prune and merge tokens afterwards.

    Raises:
        InvalidInput: The models have different depths, or there are too few images.
        NotSupported: The candidate prunes or merges tokens, or its MLPs are not two linear maps.
        DataError: The images do not have the model's input shape, or contain NaN or infinity.
    """
    knobs = settings or Repair()
    images = images_for(reference, calibration, "calibration", limit=MOST_REPAIRED, seed=knobs.seed)
    for model, what in ((candidate, "repair"), (reference, "repair a candidate of")):
        require_all_tokens(model, what)
    result = Repaired(copy_module(candidate))
    _require_alike(reference, result.model, len(images))
    with evaluating((reference, result.model)):
        # Two streams of tokens run side by side, `base` through the reference and `tokens` through the repaired blocks:
        # the targets of a block are those of the reference's own inputs.
        weights = _importance(reference, images)
        base, notes = _first_tokens(reference, images)
        result.notes = [*images.notes, *notes]
        tokens, _ = _first_tokens(result.model, images)
        layers = zip(_blocks(reference, images), _blocks(result.model, images), weights, strict=True)
        for original, block, weight in track(list(layers), "repairing blocks"):
            without_mlp, base = original.run_all(base, mlp=False), original.run_all(base)
            before, after = _repair_block_(block, tokens, base, without_mlp, weight, knobs)
            result.before.append(before)
            result.after.append(after)
            tokens = block.run_all(tokens)  # again, because the block was changed
    return result


def _require_alike(reference: nn.Module, candidate: nn.Module, images: int) -> None:
    depths = [len(family_of(model).mlp(model)) for model in (reference, candidate)]
    if depths[0] != depths[1]:
        raise InvalidInput(
            f"the candidate has {depths[1]} MLPs of two linear maps, the reference {depths[0]}; repair a model "
            "that was made from the reference."
        )
    if not depths[0]:
        raise NotSupported("the MLPs of this model are not pairs of linear maps, which repair fits.")
    if images < 2 * HELD_OUT:
        raise InvalidInput(f"repair was given {images} images; give at least {2 * HELD_OUT}, better 512 or more.")


Tokens = Float[Tensor, "images tokens width"]


class _Block:
    """A block, the arguments that its model passes beside the tokens, its attention, and the two maps of its MLP."""

    def __init__(
        self,
        module: nn.Module,
        attention: nn.Module,
        maps: tuple[Any, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self.module, self.attention, self.maps, self.args, self.kwargs = module, attention, maps, args, kwargs

    def run(self, tokens: Tokens) -> Tokens:
        output = self.module(tokens, *self.args, **self.kwargs)
        return output if isinstance(output, Tensor) else output[0]

    def run_all(self, tokens: Tokens, mlp: bool = True) -> Tokens:
        """Returns the outputs for all images, optionally with zeros for the output of the MLP."""
        with nullcontext() if mlp else self._without_mlp():
            outputs = []
            for part in tokens.split(CHUNK):
                outputs.append(self.run(part))
                running()
            return torch.cat(outputs)

    @contextmanager
    def _without_mlp(self) -> Iterator[None]:
        # At the output of the second map, so that the block's own code still runs: residuals, norms, LayerScale.
        hook = self.maps[1].register_forward_hook(lambda _, given, output: torch.zeros_like(output))
        try:
            yield
        finally:
            hook.remove()

    def run_recorded(self, tokens: Tokens, branch: "_Branch") -> tuple[Tokens, Tensor, Tensor]:
        """Returns the outputs for all images, the inputs of the branch and its outputs."""
        inputs, outputs = [], []

        def keep(_: nn.Module, given: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs.append(given[0])
            branch.args, branch.kwargs = given[1:], kwargs

        hooks = (
            branch.first.register_forward_pre_hook(keep, with_kwargs=True),
            branch.last.register_forward_hook(lambda _, given, output: outputs.append(output)),
        )
        try:
            # For the attention without the MLP: its target is the stream before the MLP, whose errors are not its own.
            block_outputs = self.run_all(tokens, mlp=branch.last is not self.attention)
        finally:
            for hook in hooks:
                hook.remove()
        return block_outputs, torch.cat(inputs), torch.cat(outputs)

    def scale(self, tokens: Tokens, branch: "_Branch") -> Float[Tensor, "width"]:
        """Returns the factors between the output of a branch and its share of the block's output (LayerScale)."""
        # The slope of the block's output, summed over all entries, with respect to the branch's is the factor of every
        # feature, if the branch is added linearly; whether it is the same for all tokens is verified.
        outputs: list[Tensor] = []

        def record(_: nn.Module, given: object, output: Tensor) -> Tensor:
            outputs.append(output.detach().requires_grad_())
            return outputs[0]  # a leaf in place of the branch's output

        hook = branch.last.register_forward_hook(record)
        try:
            with torch.enable_grad():
                block_outputs = self.run_all(tokens, mlp=branch.last is not self.attention)
                (slope,) = torch.autograd.grad(block_outputs.sum(), outputs)
        finally:
            hook.remove()
        factors = slope.flatten(0, -2).mean(0)
        if not torch.allclose(slope, factors.expand_as(slope), rtol=1e-3) or not bool(factors.abs().min() > 0):
            raise NotSupported(
                "a block changes the output of its attention or MLP by more than a constant factor per feature before "
                "it is added (e.g. a norm after the MLP), so repair has no target for it."
            )
        return factors

    def between(self, tokens: Tokens) -> nn.Sequential:
        """Returns the modules between the two maps, which are called one after the other."""
        called: list[nn.Module] = []
        sides: list[Tensor] = []

        def begin(_: nn.Module, given: object, output: Tensor) -> None:
            sides.append(output)

        def end(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            sides.append(given[0])

        def record(part: nn.Module, given: object, output: object) -> None:
            if len(sides) == 1:
                called.append(part)

        # Leaf modules in the order of their calls between both maps: activation, dropout, norm. Functional calls have
        # no hook, so the sequence is compared with the block.
        inside = {id(part) for linear in self.maps for part in linear.modules()}
        leaves = [part for part in self.module.modules() if id(part) not in inside and not list(part.children())]
        handles = [self.maps[0].register_forward_hook(begin), self.maps[1].register_forward_pre_hook(end)]
        handles += [part.register_forward_hook(record) for part in leaves]
        try:
            self.run(tokens)
        finally:
            for handle in handles:
                handle.remove()
        sequence = nn.Sequential(*called)
        if not torch.allclose(sequence(sides[0]), sides[1], rtol=1e-4, atol=1e-5):
            raise NotSupported(
                "between the two linear maps of an MLP are not only modules that are called one after the other, so "
                "repair cannot compute the MLP alone."
            )
        return sequence


def _blocks(model: nn.Module, images: ImageSet) -> Iterator[_Block]:
    """Returns the blocks of a model, with the arguments that it passes to them."""
    # Two images suffice: the arguments (positions, masks) are those of every image.
    family, arguments = family_of(model), {}
    names = block_names(model, family)

    def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        arguments[block] = (args[1:], others)

    with _hooked([model.get_submodule(name) for name in names], keep):
        model(next(iter(images.take(2).batches(2, device=_weight(model).device))).images.to(_weight(model).dtype))
    for name, attention, maps in zip(names, family.attention(model), family.mlp(model), strict=True):
        block = model.get_submodule(name)
        yield _Block(block, attention, maps, *arguments[block])


@contextmanager
def _hooked(blocks: Sequence[nn.Module], keep: Any) -> Iterator[None]:
    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(keep, with_kwargs=True).remove)
        yield


def _weight(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def _first_tokens(model: nn.Module, images: ImageSet) -> tuple[Tokens, list[str]]:
    """Returns the tokens before the first block, and notes on the images."""
    tokens: list[Tensor] = []
    family = family_of(model)
    validation = InputValidation(model, family, "repair")

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens.append((args[0] if args else kwargs["hidden_states"]).detach())

    with _hooked([model.get_submodule(block_names(model, family)[0])], keep), warnings.catch_warnings():
        warnings.simplefilter("ignore", ScaleWarning)  # the notes have it
        for batch in images.batches(CHUNK, device=_weight(model).device):
            model(validation.take(batch.images))
            running()
        return torch.cat(tokens), validation.notes()


def _importance(model: nn.Module, images: ImageSet) -> list[Float[Tensor, "tokens"]]:
    """Returns the weights of the tokens after every block: the root mean square of the gradient of the outputs with
    respect to them, mean 1, mixed with EVEN.

    The gradient is that of the log-probability of an answer drawn from the outputs (`OutputKind.drawn`), e.g. of a
    class drawn from the predicted probabilities, so that its second moment is the Fisher information; of embeddings,
    that of a random projection of the normalized embedding.
    """
    # One sampled class per image estimates the diagonal of the Fisher matrix without a pass per class, and without
    # labels. Its root fits better than the square (docs/results/hidden.md).
    family, generator = family_of(model), torch.Generator().manual_seed(0)
    blocks = [model.get_submodule(name) for name in block_names(model, family)]
    outputs: list[Tensor] = []

    def keep(block: nn.Module, args: object, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    sums: list[Tensor] = []
    weight, chosen = _weight(model), images.take(min(IMPORTANCE_IMAGES, len(images)))
    for batch in chosen.batches(CHUNK // 2, device=weight.device):
        outputs.clear()
        with torch.enable_grad(), ExitStack() as hooks:
            for block in blocks:
                hooks.callback(block.register_forward_hook(keep).remove)
            answers = model(batch.images.to(weight.dtype).requires_grad_())  # a graph also for frozen weights
            drawn = output_kind_of(model).drawn(answers, generator)
            slopes = torch.autograd.grad(drawn, outputs)  # by block [batch, tokens, width]
        running()
        squares = [slope.square().sum((0, -1)) for slope in slopes]
        sums = squares if not sums else [total + square for total, square in zip(sums, squares, strict=True)]
    weights = []
    for total in sums:
        roots = total.new_zeros(len(sums[0]))
        roots[: len(total)] = total.sqrt()  # the last block of a class-token model may compute that token only
        weights.append((1 - EVEN) * roots / roots.mean().clamp_min(1e-30) + EVEN)
    return weights


class _Branch:
    """The attention or the MLP of a block: a module from the input of `first` to the output of `last`.

    `args` and `kwargs` are those that the block passes beside the tokens.
    """

    def __init__(self, module: nn.Module, first: nn.Module, last: nn.Module):
        self.module, self.first, self.last = module, first, last
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def run(self, inputs: Tensor) -> Tensor:
        return self.module(inputs, *self.args, **self.kwargs)


def _repair_block_(
    block: _Block,
    tokens: Tokens,
    targets: Tokens,
    without_mlp: Tokens,
    weight: Float[Tensor, "tokens"],
    knobs: Repair,
) -> tuple[float, float]:
    """Fits a block in place, and returns the relative error of its output before and after.

    `targets` and `without_mlp` are the outputs of the reference's block, with its MLP and without.
    """
    # Three fits after one another: the attention by Adam, to the stream before the MLP; the second map of the MLP in
    # closed form; then both maps by Adam from there. Each is kept only if it lowers the error of the block's output on
    # images that it was not fitted to.
    held_out = torch.arange(len(tokens)) % HELD_OUT == 0
    fitted, held_out_tokens, expected = (~held_out).nonzero()[:, 0], tokens[held_out], targets[held_out]
    size = (weight[:, None] * expected.square()).mean()

    def error() -> float:
        return float((weight[:, None] * (block.run_all(held_out_tokens) - expected).square()).mean() / size)

    def kept_if_better(before: float, fit_: Callable[..., None], module: Any, *arguments: Any) -> float:
        state = copy.deepcopy(module.state_dict())
        fit_(module, *arguments)
        after = error()
        if after < before:
            return after
        module.load_state_dict(state)
        return before

    adam = knobs.steps, knobs.learning_rate, knobs.seed
    before = after = error()
    if not before:
        return before, after
    branch = _Branch(block.attention, block.attention, block.attention)
    if knobs.steps and any(parameter.numel() for parameter in block.attention.parameters()):
        scale = block.scale(tokens[:2], branch)
        outputs, inputs, branch_outputs = block.run_recorded(tokens, branch)
        # The branch's output that would make the block's output equal to the target, [images, tokens, width].
        branch_targets = branch_outputs + (without_mlp - outputs) / scale

        def images_error(generator: torch.Generator) -> Float[Tensor, ""]:
            # Whole images, because attention mixes the tokens of one; few, because these are many tokens.
            images = fitted[torch.randint(len(fitted), (knobs.images,), generator=generator)]
            # Times the scale again: features that LayerScale hardly adds count as little as they do in the block.
            missed = (branch.run(inputs[images]) - branch_targets[images]) * scale
            return (weight[:, None] * missed.square()).mean()

        after = kept_if_better(after, descend_, branch.module, images_error, *adam)

    between = block.between(tokens[:2])
    mlp = nn.Sequential(block.maps[0], between, block.maps[1])
    scale = block.scale(tokens[:2], _Branch(mlp, *block.maps))
    outputs, inputs, branch_outputs = block.run_recorded(tokens, _Branch(mlp, *block.maps))
    branch_targets = branch_outputs + (targets - outputs) / scale
    shares = weight.cpu()

    def tokens_error(generator: torch.Generator) -> Float[Tensor, ""]:
        # An MLP treats tokens one by one. Sampling in proportion to the importance replaces its weights.
        # Single tokens of many images differ more than all tokens of a few.
        images = fitted[torch.randint(len(fitted), (knobs.tokens,), generator=generator)]
        drawn = torch.multinomial(shares, knobs.tokens, replacement=True, generator=generator)
        return ((mlp(inputs[images, drawn]) - branch_targets[images, drawn]) * scale).square().mean()

    after = kept_if_better(after, _fit_second_, mlp, inputs, branch_targets, fitted, weight, knobs.ridge)
    return before, kept_if_better(after, descend_, mlp, tokens_error, *adam)


def _fit_second_(
    mlp: nn.Sequential, inputs: Tensor, wanted: Tensor, fitted: Tensor, weight: Float[Tensor, "tokens"], ridge: float
) -> None:
    """Fits the second map, or the second factor of it, by least squares with a penalty on the change of its weight."""
    # Normal equations in float64, accumulated over chunks: memory does not grow with the number of tokens.
    first, between, second = mlp
    linear: Any = second.second if isinstance(second, LowRankLinear) else second
    features = nn.Sequential(first, between, *([second.first] if isinstance(second, LowRankLinear) else []))
    has_bias, size = linear.bias is not None, linear.in_features + 1
    moment = torch.zeros(size, size, dtype=torch.float64, device=inputs.device)
    joint = torch.zeros(size, linear.out_features, dtype=torch.float64, device=inputs.device)
    for part in fitted.split(CHUNK):
        rows = features(inputs[part])  # [images, tokens, units]
        rows = torch.cat([rows, torch.full_like(rows[..., :1], float(has_bias))], dim=-1)
        # The rest of the current map is fitted, so that the penalty is on its change.
        residuals = wanted[part] - linear(rows[..., :-1])
        weighted = (weight[:, None] * rows).flatten(0, -2)
        moment += (weighted.T @ rows.flatten(0, -2)).double()
        joint += (weighted.T @ residuals.flatten(0, -2)).double()
    total = float(weight.sum()) * len(fitted)
    moment, joint = moment / total, joint / total
    # The last column has the means, as the last feature is 1 (or 0 without a bias; the variance is then the mean
    # square).
    mean = moment[:-1, -1]
    variance = float((moment.diagonal()[:-1] - mean.square()).clamp_min(0).mean())
    # No penalty on the bias. Without one its row is zero, and a 1 on the diagonal keeps the matrix invertible.
    penalty = moment.new_full((size,), max(ridge * variance, 1e-30))
    penalty[-1] = 0.0 if has_bias else 1.0
    change = torch.linalg.solve(moment + penalty.diag(), joint).T
    linear.weight.add_(change[:, :-1].to(linear.weight.dtype))
    if has_bias:
        linear.bias.add_(change[:, -1].to(linear.bias.dtype))
