"""Repair: fits the remaining weights of a compressed model, block by block, to the outputs of the original's blocks."""

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from attnrx.data import ImageData, ImageSet
from attnrx.decompositions.hidden_units import RIDGE
from attnrx.errors import InvalidInput, NotSupported, ScaleWarning
from attnrx.model_data import images_for
from attnrx.models import InputValidation, LowRankLinear, block_names, evaluating, family_of, require_all_tokens
from attnrx.progress import track
from attnrx.shapes import Float, Tensor

# The importance of tokens is measured on so many images, and this share of it is the same for all tokens, because the
# outputs of a class-token model do not depend on the patches of its last block, while its dense features do.
IMPORTANCE_IMAGES, EVEN = 64, 0.1
# One image in so many is not fitted to: it decides whether the fit of a block is kept.
HELD_OUT = 8
# Images of a forward pass of one block.
CHUNK = 32


@dataclass(frozen=True)
class Repair:
    """The settings: the penalty of the least-squares fit, then `steps` of Adam per block on `batch` images each.

    `ridge` weights the squared change of the second map of an MLP, relative to the mean variance of its inputs. The
    learning rate is relative to the root mean square of each tensor, and decays to zero by a cosine.
    """

    steps: int = 300
    learning_rate: float = 0.015
    batch: int = 8
    ridge: float = RIDGE
    seed: int = 0

    def __post_init__(self):
        if self.steps < 0 or self.batch < 1 or not 0 < self.learning_rate < 1 or not self.ridge > 0:
            raise InvalidInput(
                f"{self}: give no negative number of steps, at least one image a step, a learning rate between 0 and 1 "
                "and a positive ridge."
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


def repair(
    candidate: nn.Module, reference: nn.Module, calibration: ImageData, settings: Repair | None = None
) -> Repaired:
    """Returns a copy of the candidate whose MLPs are fitted to the outputs of the reference's blocks, without labels.

    Every block is fitted in turn, on what the repaired blocks before it give, to the output of the reference's block on
    what the reference's blocks before it give. So a block also corrects errors of earlier ones and of its own
    attention. First the second map of the MLP is fitted in closed form: least squares with a penalty on its change.
    Then both maps are, by steps of Adam. The squared error of a token is weighted by its importance, the root mean
    square of the gradient of the reference's outputs with respect to the block's. A block keeps the weights with the
    smallest error on one image in eight, which is not fitted to.

    The tokens of all images are in memory about six times. Prune and merge tokens afterwards.

    Raises:
        InvalidInput: The models have different depths, or there are too few images.
        NotSupported: The candidate prunes or merges tokens, or its MLPs are not two linear maps.
        DataError: The images do not have the model's input shape, or contain NaN or infinity.
    """
    knobs, images = settings or Repair(), images_for(reference, calibration, "calibration")
    for model, what in ((candidate, "repair"), (reference, "repair a candidate of")):
        require_all_tokens(model, what)
    result = Repaired(copy.deepcopy(candidate))
    _require_alike(reference, result.model, len(images))
    with evaluating((reference, result.model)):
        weights = _importance(reference, images)
        base, result.notes = _first_tokens(reference, images)
        own, _ = _first_tokens(result.model, images)
        layers = zip(_blocks(reference, images), _blocks(result.model, images), weights, strict=True)
        for original, block, weight in track(list(layers), "repairing blocks"):
            base = original.run_all(base)
            before, after = _repair_block_(block, own, base, weight, knobs)
            result.before.append(before)
            result.after.append(after)
            own = block.run_all(own)
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
    """A block with the arguments that its model passes beside the tokens, and the two maps of its MLP."""

    def __init__(self, module: nn.Module, maps: tuple[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.module, self.maps, self.args, self.kwargs = module, maps, args, kwargs

    def run(self, tokens: Tokens) -> Tokens:
        output = self.module(tokens, *self.args, **self.kwargs)
        return output if isinstance(output, Tensor) else output[0]

    def run_all(self, tokens: Tokens) -> Tokens:
        """Returns the outputs for all images."""
        return torch.cat([self.run(part) for part in tokens.split(CHUNK)])

    def run_recorded(self, tokens: Tokens) -> tuple[Tokens, Tensor, Tensor]:
        """Returns the outputs for all images, the inputs of the first map and the outputs of the second one."""
        inputs, outputs = [], []
        hooks = (
            self.maps[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0])),
            self.maps[1].register_forward_hook(lambda _, given, output: outputs.append(output)),
        )
        try:
            found = self.run_all(tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return found, torch.cat(inputs), torch.cat(outputs)

    def scale(self, tokens: Tokens) -> Float[Tensor, "width"]:
        """Returns the factors between the output of the second map and its share of the block's output (LayerScale)."""
        outputs: list[Tensor] = []

        def record(_: nn.Module, given: object, output: Tensor) -> Tensor:
            outputs.append(output.detach().requires_grad_())
            return outputs[0]

        hook = self.maps[1].register_forward_hook(record)
        try:
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(self.run(tokens).sum(), outputs)
        finally:
            hook.remove()
        found = slope.flatten(0, -2).mean(0)
        if not torch.allclose(slope, found.expand_as(slope), rtol=1e-3) or not bool(found.abs().min() > 0):
            raise NotSupported(
                "a block changes the output of its MLP by more than a constant factor per feature before it is added "
                "(e.g. a norm after the MLP), so repair has no target for it."
            )
        return found

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

        inside = {id(part) for linear in self.maps for part in linear.modules()}
        leaves = [part for part in self.module.modules() if id(part) not in inside and not list(part.children())]
        handles = [self.maps[0].register_forward_hook(begin), self.maps[1].register_forward_pre_hook(end)]
        handles += [part.register_forward_hook(record) for part in leaves]
        try:
            self.run(tokens)
        finally:
            for handle in handles:
                handle.remove()
        found = nn.Sequential(*called)
        if not torch.allclose(found(sides[0]), sides[1], rtol=1e-4, atol=1e-5):
            raise NotSupported(
                "between the two linear maps of an MLP are not only modules that are called one after the other, so "
                "repair cannot compute the MLP alone."
            )
        return found


def _blocks(model: nn.Module, images: ImageSet) -> Iterator[_Block]:
    """Returns the blocks of a model, with the arguments that it passes to them."""
    family, found = family_of(model), {}
    names = block_names(model, family)

    def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = {name: own for name, own in kwargs.items() if name != "hidden_states"}
        found[block] = (args[1:], others)

    with _hooked([model.get_submodule(name) for name in names], keep):
        model(next(iter(images.take(2).batches(2, device=_weight(model).device))).images.to(_weight(model).dtype))
    for name, maps in zip(names, family.mlp(model), strict=True):
        block = model.get_submodule(name)
        yield _Block(block, maps, *found[block])


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
    found: list[Tensor] = []
    family = family_of(model)
    validation = InputValidation(model, family, "repair")

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[0] if args else kwargs["hidden_states"]).detach())

    with _hooked([model.get_submodule(block_names(model, family)[0])], keep), warnings.catch_warnings():
        warnings.simplefilter("ignore", ScaleWarning)
        for batch in images.batches(CHUNK, device=_weight(model).device):
            model(validation.take(batch.images))
        return torch.cat(found), validation.notes()


def _importance(model: nn.Module, images: ImageSet) -> list[Float[Tensor, "tokens"]]:
    """Returns the weights of the tokens after every block: the root mean square of the gradient of the outputs with
    respect to them, mean 1, mixed with EVEN.

    The gradient is that of the log-probability of a class drawn from the predicted probabilities, so that its second
    moment is the Fisher information; of embeddings, that of a random projection of the normalized embedding.
    """
    family, generator = family_of(model), torch.Generator().manual_seed(0)
    blocks = [model.get_submodule(name) for name in block_names(model, family)]
    outputs: list[Tensor] = []

    def keep(block: nn.Module, args: object, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])

    sums: list[Tensor] = []
    weight, shown = _weight(model), images.take(min(IMPORTANCE_IMAGES, len(images)))
    for batch in shown.batches(CHUNK // 2, device=weight.device):
        outputs.clear()
        with torch.enable_grad(), ExitStack() as hooks:
            for block in blocks:
                hooks.callback(block.register_forward_hook(keep).remove)
            found = model(batch.images.to(weight.dtype).requires_grad_())
            drawn = _drawn(found, family.output_kind(model) == "logits", generator)
            slopes = torch.autograd.grad(drawn, outputs)
        each = [slope.square().sum((0, -1)) for slope in slopes]
        sums = each if not sums else [total + own for total, own in zip(sums, each, strict=True)]
    weights = []
    for total in sums:
        found = total.new_zeros(len(sums[0]))
        found[: len(total)] = total.sqrt()  # the last block of a class-token model may compute that token only
        weights.append((1 - EVEN) * found / found.mean().clamp_min(1e-30) + EVEN)
    return weights


def _drawn(outputs: Float[Tensor, "batch features"], are_logits: bool, generator: torch.Generator) -> Float[Tensor, ""]:
    if are_logits:
        classes = torch.multinomial(outputs.detach().float().softmax(-1).cpu(), 1, generator=generator)
        return outputs.log_softmax(-1).gather(1, classes.to(outputs.device)).sum()
    direction = torch.randn(outputs.shape, generator=generator).to(outputs.device, outputs.dtype)
    return (nn.functional.normalize(outputs, dim=-1) * direction).sum()


def _repair_block_(
    block: _Block, tokens: Tokens, targets: Tokens, weight: Float[Tensor, "tokens"], knobs: Repair
) -> tuple[float, float]:
    """Fits the MLP of a block in place, and returns the relative error of its output before and after."""
    scale, between = block.scale(tokens[:2]), block.between(tokens[:2])
    outputs, inputs, given = block.run_recorded(tokens)
    wanted = given + (targets - outputs) / scale
    mlp = nn.Sequential(block.maps[0], between, block.maps[1])
    held_out = torch.arange(len(tokens)) % HELD_OUT == 0
    size = (weight[:, None] * targets[held_out].square()).mean()

    def error(chosen: Tensor) -> Float[Tensor, ""]:
        missed = (mlp(inputs[chosen]) - wanted[chosen]) * scale
        return (weight[:, None] * missed.square()).mean()

    def state() -> tuple[float, dict[str, Tensor]]:
        parts = held_out.nonzero()[:, 0].split(CHUNK)
        found = sum(float(error(part)) * len(part) for part in parts) / int(held_out.sum())
        return found / float(size), copy.deepcopy(mlp.state_dict())

    found = [state()]
    if found[0][0] > 0:
        fitted = (~held_out).nonzero()[:, 0]
        _fit_second_(mlp, inputs, wanted, fitted, weight, knobs.ridge)
        found.append(state())
        mlp.load_state_dict(min(found, key=lambda each: each[0])[1])
        _descend_(mlp, error, fitted, knobs)
        found.append(state())
        mlp.load_state_dict(min(found, key=lambda each: each[0])[1])
    return found[0][0], min(each for each, _ in found)


def _fit_second_(
    mlp: nn.Sequential, inputs: Tensor, wanted: Tensor, fitted: Tensor, weight: Float[Tensor, "tokens"], ridge: float
) -> None:
    """Fits the second map, or the second factor of it, by least squares with a penalty on the change of its weight."""
    first, between, second = mlp
    linear: Any = second.second if isinstance(second, LowRankLinear) else second
    features = nn.Sequential(first, between, *([second.first] if isinstance(second, LowRankLinear) else []))
    has_bias, size = linear.bias is not None, linear.in_features + 1
    moment = torch.zeros(size, size, dtype=torch.float64, device=inputs.device)
    joint = torch.zeros(size, linear.out_features, dtype=torch.float64, device=inputs.device)
    for part in fitted.split(CHUNK):
        rows = features(inputs[part])
        rows = torch.cat([rows, torch.full_like(rows[..., :1], float(has_bias))], dim=-1)
        # The rest of the current map is fitted, so that the penalty is on its change.
        missed = wanted[part] - linear(rows[..., :-1])
        weighted = (weight[:, None] * rows).flatten(0, -2)
        moment += (weighted.T @ rows.flatten(0, -2)).double()
        joint += (weighted.T @ missed.flatten(0, -2)).double()
    total = float(weight.sum()) * len(fitted)
    moment, joint = moment / total, joint / total
    mean = moment[:-1, -1]
    variance = float((moment.diagonal()[:-1] - mean.square()).clamp_min(0).mean())
    penalty = moment.new_full((size,), max(ridge * variance, 1e-30))
    penalty[-1] = 0.0 if has_bias else 1.0
    change = torch.linalg.solve(moment + penalty.diag(), joint).T
    linear.weight.add_(change[:, :-1].to(linear.weight.dtype))
    if has_bias:
        linear.bias.add_(change[:, -1].to(linear.bias.dtype))


def _descend_(mlp: nn.Sequential, error: Any, fitted: Tensor, knobs: Repair) -> None:
    """Minimizes the error by Adam on random images."""
    rows = [parameter for parameter in mlp.parameters() if parameter.numel()]
    flags = [parameter.requires_grad for parameter in rows]
    groups = [{"params": [row.requires_grad_()], "lr": knobs.learning_rate * _size(row)} for row in rows]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / max(knobs.steps, 1))) / 2
    )
    generator = torch.Generator().manual_seed(knobs.seed)
    with torch.enable_grad():
        for _ in range(knobs.steps):
            chosen = fitted[torch.randint(len(fitted), (knobs.batch,), generator=generator)]
            optimizer.zero_grad()
            error(chosen).backward()
            optimizer.step()
            schedule.step()
    for parameter, flag in zip(rows, flags, strict=True):
        parameter.grad = None
        parameter.requires_grad_(flag)


def _size(row: Tensor) -> float:
    return float(row.detach().double().square().mean().sqrt().clamp_min(1e-12))
