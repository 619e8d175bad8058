"""Repair: fits the remaining weights of a compressed model to the original's block outputs, block by block."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from attnrx.change.decompositions import RIDGE, gram
from attnrx.change.realization.distillation import HELD_OUT, Fitted, descend_, improve_
from attnrx.data import ImageData, ImageSet
from attnrx.data.model_data import images_for
from attnrx.nouns.effort import MIN_REPAIR_IMAGES
from attnrx.support.arguments import (
    COUNT,
    NATURAL,
    POSITIVE,
    RATE,
    SEED,
    checked,
    each,
    optional,
    require_fields,
    whole,
)
from attnrx.support.errors import InvalidInput, NotSupported, ScaleWarning
from attnrx.support.hardware import bfloat16_products, has_fast_bfloat16
from attnrx.support.modules import copy_module, evaluating, rows_of, trainable
from attnrx.support.progress import track
from attnrx.support.rounding import rounded
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.models import (
    InputValidation,
    LowRankLinear,
    ModuleCall,
    blocks_of,
    family_of,
    recording_calls,
    replacing_forward,
    require_all_tokens,
    tokens_in,
)
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.outputs import output_kind_of

# IMPORTANCE_IMAGES is how many images measure the importance of tokens. If a budget limits the repair, a quarter of its
# images are used. EVEN is the share of the importance that all tokens get equally. In a class-token model, the outputs
# do not depend on the last block's patches, but dense features do.
IMPORTANCE_IMAGES, EVEN = 64, 0.1
# The largest number of images that are read from a user's data.
MOST_REPAIRED = 4096
# How many images a forward pass of one block takes at once.
CHUNK = 32
# How many images set the ranges of activations with `bits=8`. Passes over all images would take a third of the time.
RANGE_IMAGES = 2 * CHUNK
# The most multiply-accumulates per gradient computation, which limits memory. This number allows 16 images for a ViT-B
# and 4 for a ViT-L, where 16 would need 5 GB.
GRAPH_MACS = 2.9e11


@dataclass(frozen=True)
class Repair:
    """The settings of a repair: the number of Adam steps, the data per step, the budget, and the penalty.

    Each attention module and each MLP is fitted in `steps` steps of Adam. A step for an attention module uses all
    tokens of `images` images. A step for an MLP uses `tokens` single tokens, drawn from all images in proportion to
    their importance. `learning_rate` is relative to the root mean square of each tensor, and decays to zero along a
    cosine.

    `macs` limits the multiply-accumulates of the whole repair, which are estimated beforehand. To stay within this
    limit, a large model is repaired on fewer images, but on at least MIN_REPAIR_IMAGES. If the repair still exceeds the
    limit, the number of steps is reduced, but at most by half. None sets no limit.

    With `bfloat16`, both models compute matrix products in bfloat16, if the device is faster with bfloat16.

    `removed` lists the reference's blocks that the candidate lacks, counted from 1. The block before the missing blocks
    is fitted to the output of the last missing block.

    With `bits=8`, the candidate's blocks compute their linear maps as an exported 8-bit file would.

    `ridge` is the penalty on changes of an MLP's second map, relative to the mean variance of this map's inputs.
    """

    example = "attnrx.realization.repair.Repair(steps=300)"

    steps: int = 300
    learning_rate: float = 0.015
    images: int = 4
    tokens: int = 512
    ridge: float = RIDGE
    seed: int = 0
    macs: float | None = None
    bfloat16: bool = False
    removed: tuple[int, ...] = ()
    bits: int | None = None

    def __post_init__(self):
        positive = {"ridge": POSITIVE, "macs": optional(POSITIVE), "bits": optional(whole(8, 8))}
        require_fields(
            self, {int: COUNT}, steps=NATURAL, learning_rate=RATE, seed=SEED, removed=each(COUNT, "blocks"), **positive
        )


@checked()
@verb
def repair(
    candidate: nn.Module, reference: nn.Module, calibration: ImageData, settings: Repair | None = None
) -> Fitted:
    """Returns a copy of the candidate whose blocks are fitted to the reference's blocks, without labels.

    Blocks are fitted one after the other. A block's input comes from the repaired blocks before it, and its target is
    the reference block's output. So the fit also corrects errors of earlier blocks. Each block is fitted in three
    stages:

    1. The linear maps of the attention, with Adam.
    2. The second linear map of the MLP, in closed form, by least squares with a penalty on its change.
    3. Both linear maps of the MLP, with Adam.

    A token's squared error is weighted by the token's importance. The importance is the root mean square of the
    gradient of the reference's outputs with respect to the token. One image in eight is held out. A stage is kept only
    if it reduces the error of the block's output on the held-out images. A block with unchanged weights is not fitted.

    The repair needs enough memory for about seven copies of the tokens of all images. Prune or merge tokens after the
    repair.

    Args:
        candidate: The compressed model, before tokens are pruned or merged. It is not changed.
        reference: The original model, whose block outputs are the targets.
        calibration: Images to fit to, normalized for the model. Labels are not used.
        settings: Steps, learning rate and budget of the fit. None uses the defaults of `Repair`.

    Returns:
        The repaired copy, with the errors of every block before and after.

    Raises:
        InvalidInput: The models have different depths, or there are too few images.
        NotSupported: The candidate prunes or merges tokens, its MLPs are not two linear maps, or bfloat16 was requested
            and a part of a model does not accept bfloat16 products.
        DataError: The images do not have the model's input shape, or contain NaN or infinity.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> images = torch.randn(64, 3, 32, 32)  # normalized as the model expects them
        >>> model = rx.load(vit)
        >>> diagnosis = rx.diagnose(model, images, moments=True)
        >>> small = rx.realize(model, rx.prescribe(diagnosis, "hidden=total_rank:0.5"))
        >>> small = rx.repair(small, model, images).model
    """
    requested = settings or Repair()
    images = images_for(reference, calibration, "calibration", limit=MOST_REPAIRED, seed=requested.seed)
    for model, what in ((candidate, "repair"), (reference, "repair a candidate of")):
        require_all_tokens(model, what)
    result = Fitted(copy_module(candidate))
    _require_alike(reference, result.model, len(images), requested.removed)
    knobs, count = within_budget(reference, result.model, requested, len(images))
    if count < len(images) or knobs.steps < requested.steps:
        result.notes.append(
            f"repair: {count} of {len(images)} images and {knobs.steps} steps, within {knobs.macs:.3g} "
            "multiply-accumulates"
        )
    importance = images.take(min(IMPORTANCE_IMAGES, count // 4 if count < len(images) else count))
    images = images.take(count)
    device = _weight(reference).device
    precision = bfloat16_products(device, knobs.bfloat16 and has_fast_bfloat16(device.type))
    with evaluating((reference, result.model)), trainable(result.model), precision:
        # `base` holds the tokens in the reference, and `tokens` the tokens in the repaired model. A block's targets are
        # the reference's outputs for the reference's own inputs.
        weights = token_importance(reference, importance)
        blocks, own = (blocks_of(model, family_of(model)) for model in (reference, result.model))
        kept = [index for index in range(len(blocks)) if index + 1 not in requested.removed]
        base, notes = _tokens_before(reference, blocks[kept[0]], images)
        result.notes = [*result.notes, *images.notes, *notes]
        tokens, _ = _tokens_before(result.model, own[0], images)
        is_chain, originals = _are_chained(reference, images), list(_blocks(reference, images))
        layers = zip(kept, [*kept[1:], len(originals)], _blocks(result.model, images), strict=True)
        for index, following, block in track(list(layers), "repairing blocks"):
            original = originals[index]
            if not is_chain and index != kept[0]:
                base, _ = _tokens_before(reference, original.module, images)
                tokens, _ = _tokens_before(result.model, block.module, images)
            without_mlp, base = original.run_both(base)
            for missing in originals[index + 1 : following]:  # `block` is fitted to the output after all of these
                base = missing.run_all(base if is_chain else _tokens_before(reference, missing.module, images)[0])
            fit = _BlockFit(block, tokens, base, weights[following - 1], knobs)
            # An unchanged block only passes on the errors of earlier blocks. Fitting it would not reduce them
            # (docs/results/plan.md).
            is_whole = following == index + 1 and _are_equal(original.module, block.module)
            is_fitted = fit.before > 0 and not is_whole
            tokens = fit.run(without_mlp) if is_fitted else fit.run_all(tokens)
            del without_mlp  # free it before the next block creates its own
            result.before.append(fit.before)
            result.after.append(fit.error)
    return result


def _require_alike(reference: nn.Module, candidate: nn.Module, images: int, removed: Sequence[int]) -> None:
    depths = [len(family_of(model).mlp(model)) for model in (reference, candidate)]
    if depths[0] - len({*removed} & {*range(1, depths[0] + 1)}) != depths[1]:
        raise InvalidInput(
            f"the candidate has {depths[1]} MLPs of two linear maps, the reference {depths[0]}, and the repair names "
            f"{len(removed)} removed blocks; repair a model that was made from the reference, and name the blocks that "
            "it lost, e.g. Repair(removed=(5, 9))."
        )
    if not depths[0] or not family_of(reference).reads_attention(reference):
        raise NotSupported(
            "repair fits blocks whose attention has a reader, with MLPs of two linear maps, and this model has none; "
            "the second maps of MLPs are those of the least-squares refit."
        )
    if images < 2 * HELD_OUT:
        raise InvalidInput(f"repair was given {images} images; give at least {2 * HELD_OUT}, better 512 or more.")


def within_budget(reference: nn.Module, candidate: nn.Module, knobs: Repair, images: int) -> tuple[Repair, int]:
    """Returns the repair's settings and number of images, reduced if the MAC budget requires it."""
    if knobs.macs is None:
        return knobs, images
    original, layers = (family_of(model).costs(model).layers for model in (reference, candidate))
    whole = sum(layer.total.macs for layer in original)
    mlps = sum(layer.mlp.macs for layer in layers)
    attentions = sum(layer.total.macs for layer in layers) - mlps
    maps = family_of(candidate).mlp(candidate)
    units: list[Any] = [second for _, second in maps]
    moments = sum(layer.tokens * second.in_features**2 for layer, second in zip(layers, units, strict=True))
    # Each image takes one pass of the reference, two of the candidate (before and after its attention is fitted), and
    # the products for the closed form. A gradient takes two more passes. Token importance takes one gradient per image.
    per_image = whole + 2 * (attentions + mlps) + moments
    per_step = 3 * (knobs.images * attentions + knobs.tokens * mlps / layers[0].tokens)
    left = knobs.macs - 3 * whole * min(IMPORTANCE_IMAGES, images)
    count = min(images, max(int((left - knobs.steps * per_step) / per_image), MIN_REPAIR_IMAGES))
    steps = max(int((left - count * per_image) / per_step), 0)
    return replace(knobs, steps=min(knobs.steps, max(steps, knobs.steps // 2))), count


Tokens = Float[Tensor, "images tokens width"]


@dataclass(frozen=True)
class _Layout:
    """How a block expects an image's tokens: as `windows` sequences, or as a grid.

    For a grid, `width_axis` is the axis of the features, and `sides` is the grid's size: (rows, columns).
    """

    windows: int
    width_axis: int | None
    sides: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> "_Layout":
        family = family_of(model)
        return cls(family.windows(model), family.grid_axis(model))

    def at(self, tokens: Tensor) -> "_Layout":
        """Returns this layout with `sides` set to the grid size of these tokens."""
        return self if self.width_axis is None else replace(self, sides=tokens.movedim(self.width_axis, -1).shape[1:3])

    def by_image(self, tokens: Tensor) -> Tokens:
        """Converts tokens from the block's layout to one sequence per image."""
        if self.width_axis is not None:
            return tokens.movedim(self.width_axis, -1).flatten(1, 2)
        return tokens if self.windows == 1 else tokens.unflatten(0, (-1, self.windows)).flatten(1, 2)

    def of_block(self, tokens: Tokens) -> Tensor:
        if self.width_axis is not None:
            return tokens.unflatten(1, self.sides).movedim(-1, self.width_axis)
        return tokens if self.windows == 1 else tokens.unflatten(1, (self.windows, -1)).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class _Block:
    """A block with its attention, the two maps of its MLP, and all arguments that it receives besides the tokens.

    The methods take and return one sequence of tokens per image, and convert it to the `layout` that the block expects.
    """

    module: nn.Module
    attention: nn.Module
    maps: tuple[Any, Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    layout: _Layout

    def run(self, tokens: Tokens) -> Tokens:
        output = self.module(self.layout.of_block(tokens), *self.args, **self.kwargs)
        return self.layout.by_image(output if isinstance(output, Tensor) else output[0])

    def run_all(self, tokens: Tokens) -> Tokens:
        """Runs the block on all images, in chunks, and returns its outputs."""
        return torch.cat([self.run(part) for part in tokens.split(CHUNK)])

    def run_both(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """Runs the block on all images. Returns its outputs without the MLP's contribution, and its full outputs."""
        scale = self.scale(tokens[:2])
        without_mlp, outputs = [], []
        # One pass is enough. The MLP's recorded output is subtracted, because the block adds it to the stream.
        with recording_calls(self.maps[1:], lambda call: call.output) as added:
            for part in tokens.split(CHUNK):
                outputs.append(self.run(part))
                without_mlp.append(outputs[-1] - added.pop().reshape_as(outputs[-1]) * scale)
        return torch.cat(without_mlp), torch.cat(outputs)

    @contextmanager
    def without_mlp(self) -> Iterator[None]:
        """Inside the context, the MLP's two linear maps are not computed, and the MLP returns zeros."""
        # The rest of the block's code still runs: residual sums, norms, LayerScale.
        with ExitStack() as stack:
            for linear in self.maps:
                stack.enter_context(replacing_forward(linear, partial(_zeros, linear.out_features)))
            yield

    def scale(self, tokens: Tokens) -> Float[Tensor, "width"]:
        """Returns the factors by which the block multiplies each feature of the MLP's output (LayerScale)."""
        # If the MLP is added linearly, the factor is the derivative of the block's summed output with respect to the
        # MLP's output. This derivative must be the same for all tokens, which is checked below.
        outputs: list[Tensor] = []

        def record(_: nn.Module, given: object, output: Tensor) -> Tensor:
            outputs.append(output.detach().requires_grad_())
            return outputs[0]  # a leaf of the graph replaces the MLP's output

        hook = self.maps[1].register_forward_hook(record)
        try:
            with torch.enable_grad():
                block_outputs = self.run_all(tokens)
                (slope,) = torch.autograd.grad(block_outputs.sum(), outputs)
        finally:
            hook.remove()
        factors = slope.flatten(0, -2).mean(0)
        if not torch.allclose(slope, factors.expand_as(slope), rtol=1e-3) or not bool(factors.abs().min() > 0):
            raise NotSupported(
                "a block changes the output of its MLP by more than a constant factor per feature before it is added "
                "(e.g. a norm after the MLP), so repair has no target for it."
            )
        return factors

    def features(self, tokens: Tokens) -> nn.Module:
        """Returns a module that computes the second map's input from the first map's input.

        If the modules between the maps are called one after another, the result is their sequence. Otherwise the result
        is the module around both maps.
        """
        # The leaf modules between the two maps, in the order of their calls: activation, dropout, norm. Hooks miss
        # functional calls, so the sequence's output is compared with the recorded input of the second map.
        inside = {id(part) for linear in self.maps for part in linear.modules()}
        leaves = [part for part in self.module.modules() if id(part) not in inside and not list(part.children())]
        with recording_calls((*self.maps, *leaves), lambda call: call) as calls:
            self.run(tokens)
        modules = [call.module for call in calls]
        first, last = (modules.index(linear) for linear in self.maps)
        called, inputs, units = modules[first + 1 : last], calls[first].tokens, calls[last].tokens
        candidates: list[nn.Module] = [nn.Sequential(self.maps[0], *called)]
        around = [part for part in self.module.modules() if {*self.maps} <= {*part.modules()}]
        if len(around) > 1:  # the smallest module around both, e.g. a gated MLP
            candidates.append(_UpTo(around[-1], self.maps[1]))
        for candidate in candidates:
            with suppress(RuntimeError):  # e.g. a part of a gate gets different inputs
                if torch.allclose(candidate(inputs), units, rtol=1e-4, atol=1e-5):
                    return candidate
        raise NotSupported(
            "between the two linear maps of an MLP are not only modules that are called one after the other, so repair "
            "cannot compute the MLP alone."
        )


def _blocks(model: nn.Module, images: ImageSet) -> Iterator[_Block]:
    """Yields a model's blocks, together with the arguments that the model passes to them."""
    # Two images are enough, because arguments such as positions and masks are the same for every image.
    family, blocks = family_of(model), blocks_of(model, family_of(model))
    layout = _Layout.of(model)
    with recording_calls(blocks, lambda call: (call.module, (call.args, call.kwargs, layout.at(call.tokens)))) as calls:
        model(next(iter(images.take(2).batches(2, device=_weight(model).device))).images.to(_weight(model).dtype))
    arguments = dict(calls)
    for block, attention, maps in zip(blocks, family.attention(model), family.mlp(model), strict=True):
        yield _Block(block, attention, maps, *arguments[block])


def _are_equal(block: nn.Module, other: nn.Module) -> bool:
    """Whether two blocks have the same weights."""
    ones, others = block.state_dict(), other.state_dict()
    return ones.keys() == others.keys() and all(
        one.dtype == others[name].dtype and torch.equal(one, others[name]) for name, one in ones.items()
    )


def _zeros(features: int, tokens: Tensor) -> Tensor:
    """Returns zeros with `features` features for every token. Only one number is stored in memory."""
    return tokens.new_zeros(()).expand(*tokens.shape[:-1], features)


def _weight(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def _are_chained(model: nn.Module, images: ImageSet) -> bool:
    """Returns whether every block receives the previous block's exact output. Some models add positions in between."""
    blocks, weight = blocks_of(model, family_of(model)), _weight(model)

    # The tokens are copied, because a module may overwrite the outputs of its blocks.
    def copies(call: ModuleCall) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        return call.module, (call.tokens.clone(), call.output_tokens.clone())

    with recording_calls(blocks, copies) as calls:
        model(next(iter(images.take(1).batches(1, device=weight.device))).images.to(weight.dtype))
    first = dict(reversed(calls))
    return all(torch.equal(first[block][1], first[after][0]) for block, after in pairwise(blocks))


def _tokens_before(model: nn.Module, block: nn.Module, images: ImageSet) -> tuple[Tokens, list[str]]:
    """Returns the tokens that a block receives in its first call, and notes on the images."""
    family, weight = family_of(model), _weight(model)
    validation = InputValidation(model, family, "repair")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ScaleWarning)  # the notes say the same
        batches = (validation.take(batch.images) for batch in images.batches(CHUNK, device=weight.device))
        tokens = [_input_of(block, partial(model, pixels)).detach() for pixels in batches]
        return _Layout.of(model).by_image(torch.cat(tokens)), validation.notes()


def _input_of(part: nn.Module, run: Callable[[], object]) -> Tensor:
    """Runs a forward pass until it reaches `part`, and returns the tokens that this part receives."""
    found: list[Tensor] = []

    def reach(*args: Tensor, **kwargs: Any) -> None:
        found.append(tokens_in(args, kwargs))
        raise _Reached

    with suppress(_Reached), replacing_forward(part, reach):
        run()
    return found[0]


class _Reached(Exception):
    """Raised to end a forward pass when it reaches the module whose input was requested."""


def token_importance(model: nn.Module, images: ImageSet) -> list[Float[Tensor, "tokens"]]:
    """Returns the importance of the output tokens of every block: how much they affect the model's outputs.

    The importance is the root mean square of a gradient with respect to the token, scaled to mean 1. A share EVEN of
    the total importance is then distributed equally over all tokens.

    The function differentiates the log-probability of a sampled output (`OutputKind.drawn`), e.g. of a class drawn from
    the predicted probabilities. So the gradient's second moment is the Fisher information. For embeddings, it
    differentiates a random projection of the normalized embedding. If no gradient reaches a block, all of its tokens
    have the same importance.
    """
    # One sampled class per image estimates the diagonal of the Fisher matrix, without labels and without a pass per
    # class. The root of this diagonal gives better fits than the diagonal itself (docs/results/hidden.md).
    family, generator = family_of(model), torch.Generator().manual_seed(0)
    layout, blocks = _Layout.of(model), blocks_of(model, family)
    sums: dict[nn.Module, Tensor] = {}
    kind = output_kind_of(model)
    weight, chosen = _weight(model), images.take(min(round(IMPORTANCE_IMAGES * kind.needed_images), len(images)))
    at_once = min(max(int(GRAPH_MACS / family.costs(model).macs), 1), CHUNK // 2)
    for batch in chosen.batches(at_once, device=weight.device):
        with torch.enable_grad(), recording_calls(blocks, lambda call: call) as calls:
            answers = rows_of(model(batch.images.to(weight.dtype).requires_grad_()))  # so frozen weights have a graph
            drawn = kind.drawn(answers, generator)
        # Block outputs are [batch, tokens, width]. There may be no gradients, if the module computes its blocks without
        # them, or if its outputs use only an earlier block.
        outputs = [call.output_tokens for call in calls if call.output_tokens.requires_grad]
        known = outputs if drawn.requires_grad else []
        found = torch.autograd.grad(drawn, known, allow_unused=True) if known else ()
        slopes = {id(output): slope for output, slope in zip(known, found, strict=True) if slope is not None}
        for call in calls:
            # A module may call a block several times. Only calls with as many tokens as the first call are counted.
            count = layout.by_image(call.tokens).shape[1]
            total = sums.setdefault(call.module, call.tokens.new_zeros(count))
            slope = slopes.get(id(call.output_tokens))
            if slope is not None and count == len(total):
                # The last block of a class-token model may compute only the class token.
                squares = layout.by_image(slope).square().sum((0, -1))
                total[: len(squares)] += squares
    roots = [sums[block].sqrt() for block in blocks]
    return [(1 - EVEN) * root / root.mean().clamp_min(1e-30) + EVEN for root in roots]


class _UpTo(nn.Module):
    """Runs a module only until one of its parts is called, and returns that part's input."""

    def __init__(self, module: nn.Module, part: nn.Module):
        super().__init__()
        self.module = module
        self.part = (part,)  # in a tuple, so that its weights are not registered under a second name

    def forward(self, inputs: Tensor) -> Tensor:
        return _input_of(self.part[0], partial(self.module, inputs))


class _BlockFit:
    """Fits one block to the reference block's output, and measures the relative error on held-out images.

    `tokens` holds the block's inputs. `targets` holds the reference block's outputs, and `without_mlp` the reference
    block's outputs without its MLP. The fit has three stages. Adam fits the attention to `without_mlp`. Least squares
    fits the MLP's second map in closed form. Then Adam fits both maps of the MLP. A stage is kept only if it lowers the
    error of the block's output on held-out images.
    """

    def __init__(self, block: _Block, tokens: Tokens, targets: Tokens, weight: Float[Tensor, "tokens"], knobs: Repair):
        self.block, self.tokens, self.targets, self.weight, self.knobs = block, tokens, targets, weight, knobs
        held_out = torch.arange(len(tokens)) % HELD_OUT == 0
        self.held_out, self.fitted = held_out.nonzero()[:, 0], (~held_out).nonzero()[:, 0]
        self._expected = targets[self.held_out]
        self._block = self._rounded(block.run, tokens)
        self._size = (weight[:, None] * self._expected.square()).mean()
        self.before = self.error = self._block_error()

    def _rounded(self, run: Callable[[Tensor], Tensor], tokens: Tokens) -> Callable[[Tensor], Tensor]:
        """Returns `run` with its maps in `bits` bits, if they are set. The first RANGE_IMAGES images set the ranges."""
        return rounded(run, tokens[:RANGE_IMAGES].split(CHUNK), self.knobs.bits)

    def run(self, without_mlp: Tokens) -> Tokens:
        """Fits the block in place, and returns its outputs."""
        if self.knobs.steps and any(parameter.numel() for parameter in self.block.attention.parameters()):
            self._fit_attention(without_mlp)
        return self._fit_mlp()

    def run_all(self, tokens: Tokens) -> Tokens:
        """Returns the block's outputs for all images."""
        return torch.cat([self._block(part) for part in tokens.split(CHUNK)])

    def _error_of(self, outputs: Tokens) -> float:
        return float((self.weight[:, None] * (outputs - self._expected).square()).mean() / self._size)

    def _block_error(self) -> float:
        return self._error_of(self.run_all(self.tokens[self.held_out]))

    def _descend(self, module: nn.Module, error: Callable[[], float], loss: Any) -> None:
        knobs = self.knobs
        if knobs.steps:
            fit_ = partial(descend_, module, loss, knobs.steps, knobs.learning_rate, knobs.seed)
            self.error = improve_(module, self.error, error, fit_)

    def _fit_attention(self, without_mlp: Tokens) -> None:
        block, weight, fitted, number = self.block, self.weight, self.fitted, self.knobs.images
        with block.without_mlp():
            run = self._rounded(block.run, self.tokens)

        def images_error(generator: torch.Generator) -> Float[Tensor, ""]:
            # Attention mixes the tokens of an image, so a step uses whole images. A few images have enough tokens.
            images = fitted[torch.randint(len(fitted), (number,), generator=generator)]
            # The block itself computes the error, because it may split tokens for its attention and scale its output.
            with block.without_mlp():
                missed = run(self.tokens[images]) - without_mlp[images]
            return (weight[:, None] * missed.square()).mean()

        self._descend(block.attention, self._block_error, images_error)

    def _fit_mlp(self) -> Tokens:
        """Fits the MLP in place, and returns the block's outputs."""
        block, weight, fitted, number = self.block, self.weight, self.fitted, self.knobs.tokens
        mlp = nn.Sequential(block.features(self.tokens[:2]), block.maps[1])
        scale = block.scale(self.tokens[:2])
        with block.without_mlp():
            run = self._rounded(block.run, self.tokens)
            with recording_calls(block.maps[:1], lambda call: call.tokens.detach()) as calls:
                stream = torch.cat([run(part) for part in self.tokens.split(CHUNK)])
        inputs = torch.cat(calls).reshape_as(stream)
        del calls  # they are as large as the tokens of all images
        targets, shares = (self.targets - stream) / scale, weight.cpu()
        compute = self._rounded(mlp, inputs)

        def outputs_of(images: Tensor) -> Tokens:
            # The MLP's output is added to the stream before it, so the rest of the block need not run again.
            return torch.cat([stream[part] + scale * compute(inputs[part]) for part in images.split(CHUNK)])

        def mlp_error() -> float:
            return self._error_of(outputs_of(self.held_out))

        def tokens_error(generator: torch.Generator) -> Float[Tensor, ""]:
            # An MLP computes each token separately. Tokens are sampled in proportion to their importance, so the error
            # needs no weights. Single tokens from many images vary more than all tokens of a few images.
            images = fitted[torch.randint(len(fitted), (number,), generator=generator)]
            drawn = torch.multinomial(shares, number, replacement=True, generator=generator)
            return ((compute(inputs[images, drawn]) - targets[images, drawn]) * scale).square().mean()

        fit_ = partial(_fit_second_, mlp, inputs, targets, fitted, weight, self.knobs.ridge)
        self.error = improve_(mlp, self.error, mlp_error, fit_)
        self._descend(mlp, mlp_error, tokens_error)
        return outputs_of(torch.arange(len(self.tokens)))


def _fit_second_(
    mlp: nn.Sequential, inputs: Tensor, wanted: Tensor, fitted: Tensor, weight: Float[Tensor, "tokens"], ridge: float
) -> None:
    """Fits the MLP's second map, or the second factor of a factored map, by penalized least squares."""
    # The normal equations are summed in float64 over chunks, so memory does not grow with the number of tokens.
    units, second = mlp
    linear: Any = second.second if isinstance(second, LowRankLinear) else second
    features = nn.Sequential(units, *([second.first] if isinstance(second, LowRankLinear) else []))
    has_bias, size = linear.bias is not None, linear.in_features + 1
    moment = torch.zeros(size, size, dtype=torch.float64, device=inputs.device)
    joint = torch.zeros(size, linear.out_features, dtype=torch.float64, device=inputs.device)
    root = weight.sqrt()[:, None]
    for part in fitted.split(CHUNK):
        rows = features(inputs[part])  # [images, tokens, units]
        rows = torch.cat([rows, torch.full_like(rows[..., :1], float(has_bias))], dim=-1)
        # The current map's residual is fitted, so the penalty applies to the map's change.
        residuals = wanted[part] - linear(rows[..., :-1])
        rows, residuals = ((root * each).flatten(0, -2) for each in (rows, residuals))
        with bfloat16_products(inputs.device, False):
            moment += gram(rows).double()
            joint += (rows.T @ residuals).double()
    total = float(weight.sum()) * len(fitted)
    moment, joint = moment / total, joint / total
    # The last feature is 1, so the last column holds the means. Without a bias, this feature is 0, and the mean square
    # replaces the variance.
    mean = moment[:-1, -1]
    variance = float((moment.diagonal()[:-1] - mean.square()).clamp_min(0).mean())
    # The bias has no penalty. Without a bias, its row is zero, and a 1 on the diagonal keeps the matrix invertible.
    penalty = moment.new_full((size,), max(ridge * variance, 1e-30))
    penalty[-1] = 0.0 if has_bias else 1.0
    change = torch.linalg.solve(moment + penalty.diag(), joint).T
    linear.weight.add_(change[:, :-1].to(linear.weight.dtype))
    if has_bias:
        linear.bias.add_(change[:, -1].to(linear.bias.dtype))
