"""Tokens that leave a model on their way: stages between its layers, which a reducer decides at."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from attnrx.attention import Tap, Tapped
from attnrx.config import to_dict
from attnrx.errors import InvalidInput
from attnrx.models.blocks import block_names
from attnrx.models.family import Family
from attnrx.shapes import Float, Int, Tensor
from attnrx.tokens import MapMoments, Reduction, Seen, Shape, TokenPolicy, policy_from_dict

BY = ("mask", "compress")


class TokenRun:
    """What is known of the tokens while one batch passes through the model; begun anew with every batch.

    `sizes` is None until the first token has left. `places` says which patch of the image every patch token is, -1 for
    those that a stage added, and `trail` what was left after each stage.
    """

    def __init__(self):
        self.sizes: Float[Tensor, "batch tokens"] | None = None
        self.places: Int[Tensor, "batch patches"] | None = None
        self.moments: MapMoments | None = None
        self.tap = Tap()
        self.trail: list[Int[Tensor, "batch kept"]] = []

    def begin(self) -> None:
        """Forgets the batch before."""
        self.__init__()


class TokenReduction(nn.Module):
    """A policy at work in one model: `by="compress"` lets tokens leave, `by="mask"` keeps every shape.

    A masked token stays in its place with size 0: no other token attends to it, and pooling leaves it out.
    """

    def __init__(self, policy: TokenPolicy, shape: Shape, by: str):
        super().__init__()
        if by not in BY:
            raise InvalidInput(f"by={by!r}: choose from {', '.join(BY)}.")
        self.policy, self.shape, self.by = policy, shape, by
        self.stages = nn.ModuleList(policy.reducer.predictor(shape) for _ in policy.layers)
        self.run = TokenRun()

    @property
    def counts_sizes(self) -> bool:
        """Whether attention must know the sizes of the tokens."""
        return self.by == "mask" or self.policy.reducer.proportional

    def sizes(self) -> Float[Tensor, "batch tokens"] | None:
        """The sizes that attention counts tokens by."""
        return self.run.sizes if self.counts_sizes else None

    def show(self, tap: Tap) -> None:
        """Takes in what a layer showed."""
        self.run.tap = tap
        if "moments" in self.policy.reducer.needs and tap.attention is not None:
            before = self.run.moments
            self.run.moments = MapMoments.of(tap.attention) if before is None else before.then(tap.attention)

    def decide(self, stage: int, tokens: Float[Tensor, "batch tokens width"]) -> Tensor:
        """Lets the reducer decide, and gives the tokens that go on."""
        prefix, run = self.shape.layout.prefix, self.run
        count = self.policy.counts(self.shape.layout.patches)[stage]
        sizes = tokens.new_ones(tokens.shape[:2]) if run.sizes is None else run.sizes
        if run.places is None:
            run.places = torch.arange(tokens.shape[1] - prefix, device=tokens.device).expand(len(tokens), -1)
        if count >= self.shape.layout.patches:  # nothing leaves, so nothing may change
            run.trail.append(run.places)
            return tokens
        tap = run.tap
        seen = Seen(tokens, prefix, sizes, run.places, tap.class_attention, tap.attention, run.moments, tap.keys)
        reduction = self.policy.reducer.reduce(seen, count, self.stages[stage])
        act = _compressed if self.by == "compress" else _masked
        tokens, run.sizes, run.places, moments = act(seen, reduction)
        run.moments = moments
        left = run.sizes[:, prefix:] > 0
        run.trail.append(run.places if self.by == "compress" else _left(run.places, left))
        return tokens

    def pooled(self, tokens: Float[Tensor, "batch tokens width"]) -> Tensor:
        """Gives the tokens that the answer is read off, such that those that have left do not count."""
        return tokens if self.run.sizes is None else _POOLED[self.shape.layout.pooled](self, tokens, self.run.sizes)

    def for_mean(self, tokens: Float[Tensor, "batch tokens width"], sizes: Float[Tensor, "batch tokens"]) -> Tensor:
        """Weighs the patches before their mean is taken, so that it is the mean over the patches of the image."""
        prefix = self.shape.layout.prefix
        own = sizes if self.policy.reducer.proportional else (sizes > 0).to(sizes.dtype)
        patches = own[:, prefix:]
        weights = patches * (patches.shape[1] / patches.sum(1, keepdim=True))
        return torch.cat([tokens[:, :prefix], tokens[:, prefix:] * weights[..., None]], dim=1)

    def for_max(self, tokens: Float[Tensor, "batch tokens width"], sizes: Float[Tensor, "batch tokens"]) -> Tensor:
        """Writes a patch that is there over those that have left: a maximum does not see it twice."""
        prefix = self.shape.layout.prefix
        patches, there = tokens[:, prefix:], sizes[:, prefix:] > 0
        first = there.to(torch.uint8).argmax(1)[:, None, None].expand(-1, 1, patches.shape[-1])
        patches = torch.where(there[..., None], patches, patches.gather(1, first))
        return torch.cat([tokens[:, :prefix], patches], dim=1)


_POOLED = {"mean": TokenReduction.for_mean, "max": TokenReduction.for_max}


def attach_tokens_(model: nn.Module, family: Family, policy: TokenPolicy, by: str = "compress") -> TokenReduction:
    """Puts a policy into the model, in place, and gives what was put there; its predictors, if any, are fresh."""
    layers = family.attention(model)
    if reduction_of(model) is not None:
        raise InvalidInput("this model lets tokens leave already; attach a policy to the original.")
    layout = family.token_layout(model)
    policy.require(layout, len(layers))
    shape = Shape(layers[0].spec.width, len(layers[0].spec.heads), layout)
    weight = next(model.parameters())
    reduction = TokenReduction(policy, shape, by).to(weight.device, weight.dtype)
    model.tokens = reduction
    if policy.counts(layout.patches)[-1] == layout.patches:
        return reduction.train(model.training)  # nothing ever leaves: the model runs as it did, bit for bit
    blocks = [model.get_submodule(name) for name in block_names(model, family)]
    blocks[0].register_forward_pre_hook(_Begin(reduction), with_kwargs=True)
    for stage, layer in enumerate(policy.layers):
        blocks[layer - 1].register_forward_pre_hook(_Stage(reduction, stage), with_kwargs=True)
    for index, layer in enumerate(layers, 1):
        wanted = _wanted(policy, index)
        if wanted or (reduction.counts_sizes and index >= policy.layers[0]):
            layer.backend = Tapped(reduction.sizes, reduction.show, wanted)
    if layout.pooled in _POOLED:
        family.pooled_norm(model).register_forward_hook(_Pooled(reduction))
    return reduction.train(model.training)


def described_tokens(model: nn.Module) -> dict[str, Any] | None:
    """Describes the policy of a model as JSON-ready values; None where all tokens stay."""
    reduction = reduction_of(model)
    return None if reduction is None else {"policy": to_dict(reduction.policy), "by": reduction.by}


def attach_described_(model: nn.Module, family: Family, record: Mapping[str, Any]) -> None:
    """Puts the described policy into the model."""
    attach_tokens_(model, family, policy_from_dict(record["policy"]), record["by"])


def reduction_of(model: nn.Module) -> TokenReduction | None:
    """Gives the policy at work in a model; None where all tokens stay."""
    found = getattr(model, "tokens", None)
    return found if isinstance(found, TokenReduction) else None


def _wanted(policy: TokenPolicy, layer: int) -> tuple[str, ...]:
    """Names what the reducer must see of a layer."""
    needs = policy.reducer.needs
    wanted = set(needs) - {"moments"} if layer + 1 in policy.layers else set()
    if "moments" in needs and layer < policy.layers[-1]:
        wanted.add("attention")
    return tuple(sorted(wanted))


class _Begin:
    def __init__(self, reduction: TokenReduction):
        self.reduction = reduction

    def __call__(self, module: nn.Module, given: tuple, named: Mapping[str, Any]) -> None:
        self.reduction.run.begin()


class _Stage:
    def __init__(self, reduction: TokenReduction, stage: int):
        self.reduction, self.stage = reduction, stage

    def __call__(self, module: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if given:
            return (self.reduction.decide(self.stage, given[0]), *given[1:]), named
        return given, {**named, "hidden_states": self.reduction.decide(self.stage, named["hidden_states"])}


class _Pooled:
    def __init__(self, reduction: TokenReduction):
        self.reduction = reduction

    def __call__(self, module: nn.Module, given: tuple, tokens: Tensor) -> Tensor:
        return self.reduction.pooled(tokens)


Parts = tuple[Tensor, Tensor, Tensor, MapMoments | None]


def _compressed(seen: Seen, reduction: Reduction) -> Parts:
    """Gives the tokens that are left, their sizes, their places in the image, and the moments between them."""
    kept, extra, prefix, places = reduction.kept, reduction.extra, seen.prefix, seen.places
    tokens = [seen.tokens[:, :prefix], reduction.tokens, *([] if extra is None else [extra])]
    sizes, left = _left_sizes(seen, reduction), places.gather(1, kept)
    if extra is not None:
        left = torch.cat([left, left.new_full((len(left), extra.shape[1]), -1)], dim=1)
    first = torch.arange(prefix, device=kept.device).expand(len(kept), -1)
    moments = seen.moments
    if moments is not None:
        moments = moments.at(torch.cat([first, prefix + kept], dim=1))
        moments = moments if extra is None else moments.with_new(extra.shape[1])
    return torch.cat(tokens, dim=1), torch.cat([seen.sizes[:, :prefix], sizes], dim=1), left, moments


def _masked(seen: Seen, reduction: Reduction) -> Parts:
    """Writes what is left into its places, extra tokens into those that become free, and size 0 to the rest."""
    kept, extra, places, moments = reduction.kept, reduction.extra, seen.places, seen.moments
    written, values = kept, reduction.tokens
    if extra is not None:
        leaving = seen.there.scatter(1, kept, 0.0)
        free = leaving.argsort(dim=1, descending=True, stable=True)[:, : extra.shape[1]]
        written, values = torch.cat([kept, free], dim=1), torch.cat([values, extra], dim=1)
        places = places.scatter(1, free, -1)
        moments = None if moments is None else moments.without(seen.prefix + free)
    patches = seen.patches.scatter(1, written[..., None].expand_as(values), values)
    sizes = torch.zeros_like(seen.sizes[:, seen.prefix :]).scatter(1, written, _left_sizes(seen, reduction))
    tokens = torch.cat([seen.tokens[:, : seen.prefix], patches], dim=1)
    return tokens, torch.cat([seen.sizes[:, : seen.prefix], sizes], dim=1), places, moments


def _left_sizes(seen: Seen, reduction: Reduction) -> Tensor:
    if reduction.sizes is not None:
        return reduction.sizes
    own = seen.sizes[:, seen.prefix :].gather(1, reduction.kept)
    return own if reduction.extra is None else torch.cat([own, torch.ones_like(reduction.extra[..., 0])], dim=1)


def _left(places: Tensor, left: Tensor) -> Tensor:
    return places.masked_select(left).view(len(places), -1)
