"""Tokens that leave a model on their way: stages between its layers, which a reducer decides at."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention, AttentionCapture, CapturedAttention
from attnrx.config import to_dict
from attnrx.errors import InvalidInput, NotSupported
from attnrx.models.blocks import block_names
from attnrx.models.family import Family
from attnrx.models.token_run import TokenRun
from attnrx.shapes import Float, Tensor
from attnrx.tokens import (
    LAST_LAYER,
    MOMENTS,
    MapMoments,
    Part,
    Reduction,
    Shape,
    TokenPolicy,
    TokenState,
    image_keys,
    policy_from_dict,
    sampled_keep,
)

BY = ("mask", "compress")


class TokenReduction(nn.Module):
    """A policy at work in one model: `by="compress"` lets tokens leave, `by="mask"` keeps every shape.

    A masked token stays in its place with size 0: no other token attends to it, and pooling leaves it out. In training
    a learned reducer always masks: it draws which patches stay, at `temperature`, as many as it likes.
    """

    def __init__(self, policy: TokenPolicy, shape: Shape, by: str):
        super().__init__()
        if by not in BY:
            raise InvalidInput(f"by={by!r}: choose from {', '.join(BY)}.")
        self.policy, self.shape, self.by = policy, shape, by
        predictors = 1 if policy.reducer.one_predictor else len(policy.layers)
        self.stages = nn.ModuleList(policy.reducer.predictor(shape) for _ in range(predictors))
        self.run = TokenRun()
        self.temperature = 1.0

    @property
    def draws(self) -> bool:
        """Whether stages draw what stays, to learn from it."""
        return self.training and self.policy.reducer.learned

    @property
    def counts_sizes(self) -> bool:
        """Whether attention must know the sizes of the tokens."""
        return self.by == "mask" or self.policy.reducer.proportional or self.draws

    def sizes(self) -> Float[Tensor, "batch tokens"] | None:
        """The sizes that attention counts tokens by."""
        return self.run.sizes if self.counts_sizes else None

    def predictor(self, stage: int) -> nn.Module:
        """The predictor of a stage, or that of all."""
        return self.stages[0 if self.policy.reducer.one_predictor else stage]

    def begin(self, images: Float[Tensor, "batch channels height width"]) -> None:
        """Starts a batch, or a part of one."""
        self.run.begin()
        if "image_keys" in self.policy.reducer.needs:
            self.run.image_keys = image_keys(images)

    def accumulate(self, scores: Float[Tensor, "part tokens"], part: Part | None = None) -> None:
        """Adds the scores that one layer gives the patches, of all images or of some."""
        run, scores = self.run, scores[:, self.shape.layout.prefix :]
        before = run.accumulated if run.accumulated_layers else None
        if part is None:
            run.accumulated = self.policy.reducer.accumulate(before, scores)
        else:
            if run.accumulated is None:
                run.accumulated = scores.new_empty(part.batch, scores.shape[1])
            own = None if before is None else before[part.images]
            run.accumulated[part.images] = self.policy.reducer.accumulate(own, scores)
        run.accumulated_layers += part is None or part.is_last

    def show(self, heads: tuple[int, ...], captured: CapturedAttention, decides: bool = True) -> None:
        """Takes in what a layer with these heads of the original model showed, of all images or of some.

        A compressed layer stores its heads in another order, and not those that were removed. The reducer sees every
        head in its place, and a removed one as the mask has it: it attends to all tokens alike. What it showed is held
        where the next stage `decides` by it.
        """
        if heads != tuple(range(self.shape.heads)):
            sizes = self.sizes()
            sizes = sizes if sizes is None or captured.part is None else sizes[captured.part.images]
            captured = replace(
                captured,
                attention=_in_place(captured.attention, heads, self.shape.heads, sizes),
                class_attention=_in_place(captured.class_attention, heads, self.shape.heads, sizes),
                value_norms=_with_zeros(captured.value_norms, heads, self.shape.heads),
            )
        if decides:
            self.run.captures = (
                [captured] if captured.part is None or captured.part.start == 0 else [*self.run.captures, captured]
            )
        needs = self.policy.reducer.needs
        if not MOMENTS.isdisjoint(needs) and captured.attention is not None:
            self._take_in(captured.attention, captured.part, "attention_variance" in needs)
        if "class_attention_sum" in needs and captured.class_attention is not None:
            self.accumulate(captured.class_attention.mean(1), captured.part)

    def _take_in(self, attention: Float[Tensor, "part heads queries keys"], part: Part | None, variance: bool) -> None:
        """Adds a layer's maps to the moments."""
        run = self.run
        if part is None:
            before = run.moments
            run.moments = MapMoments.of(attention, variance) if before is None else before.then(attention)
            return
        if run.moments is None:
            run.moments = MapMoments.room(attention, part.batch, variance)
        run.moments.write_(attention, part)

    def decide(self, stage: int, tokens: Float[Tensor, "batch tokens width"]) -> Tensor:
        """Lets the reducer decide, and returns the tokens that go on."""
        prefix, run = self.shape.layout.prefix, self.run
        count = self.policy.counts(self.shape.layout.patches)[stage]
        sizes = tokens.new_ones(tokens.shape[:2]) if run.sizes is None else run.sizes
        if run.places is None:
            self._require_patches(tokens.shape[1] - prefix)
            run.places = torch.arange(tokens.shape[1] - prefix, device=tokens.device).expand(tokens.shape[0], -1)
        if count >= self.shape.layout.patches:  # nothing leaves, so nothing may change
            run.trail.append(run.places)
            return tokens
        captured = CapturedAttention.joined(run.captures)
        showed = (
            captured.class_attention,
            captured.attention,
            run.moments,
            captured.keys,
            run.accumulated,
            run.image_keys,
        )
        whole = self.by == "compress" and not self.draws
        place = {"stage": stage, "layer": self.policy.layers[stage], "depth": self.shape.depth}
        state = TokenState(tokens, prefix, sizes, run.places, *showed, captured.value_norms, **place, whole=whole)
        if self.draws:
            return self._draw(stage, state)
        reduction = self.policy.reducer.reduce(state, count, self.predictor(stage))
        act = _compressed if self.by == "compress" else _masked
        tokens, run.sizes, run.places, run.moments, run.accumulated = act(state, reduction)
        run.trail.append(run.places if self.by == "compress" else _left(run.places, run.sizes[:, prefix:], reduction))
        return tokens

    def _require_patches(self, found: int) -> None:
        """Refuses an image of another size, which the model inside may take but the policy was not attached for."""
        wanted = self.shape.layout.patches
        if found != wanted:
            raise InvalidInput(
                f"{found} patches where {self.policy} was attached for images of {wanted}: give images of the size "
                "that the model states, or adopt the model for this size and attach the policy to that."
            )

    def _draw(self, stage: int, state: TokenState) -> Tensor:
        """Draws what stays; every token stays in its place, with size 1 or 0."""
        reducer, run, prefix = self.policy.reducer, self.run, state.prefix
        scores = reducer.keep_scores(state, self.predictor(stage))
        keep = sampled_keep(scores, state.sizes[:, prefix:], self.temperature, prunes_one=reducer.extra > 0)
        run.sampled.append(keep)
        sampled, sizes = reducer.sampled(state, keep, scores), keep
        if sampled.added is not None:
            sizes = keep.scatter(1, sampled.added, 1.0)
            run.places, run.moments, run.accumulated = _replaced(state, sampled.added)
        run.sizes = torch.cat([state.sizes[:, :prefix], sizes], dim=1)
        return torch.cat([state.tokens[:, :prefix], sampled.patches], dim=1)

    def pooled(self, tokens: Float[Tensor, "batch tokens width"]) -> Tensor:
        """Returns the tokens that the answer is read off, such that those that have left do not count."""
        return tokens if self.run.sizes is None else _POOLED[self.shape.layout.pooled](self, tokens, self.run.sizes)

    def for_mean(self, tokens: Float[Tensor, "batch tokens width"], sizes: Float[Tensor, "batch tokens"]) -> Tensor:
        """Weighs the patches before their mean is taken, so that it is the mean over the patches of the image."""
        prefix = self.shape.layout.prefix
        own = sizes if self.policy.reducer.proportional or self.draws else (sizes > 0).to(sizes.dtype)
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


def shape_of(model: nn.Module, family: Family, heads: int | None = None) -> Shape:
    """Returns what reducers may have to know of a model that has, or once had, so many heads in every layer."""
    specs = [layer.spec for layer in family.attention(model)]
    stored = max((head + 1 for spec in specs for head in spec.heads), default=0)
    return Shape(specs[0].width, heads or stored, family.token_layout(model), depth=len(specs))


def attach_tokens_(
    model: nn.Module, family: Family, policy: TokenPolicy, by: str = "compress", heads: int | None = None
) -> TokenReduction:
    """Puts a policy into the model, in place, and returns what was put there; its predictors, if any, are fresh.

    `heads` is how many the original had, where some may have been removed from every layer.
    """
    layers = family.attention(model)
    if reduction_of(model) is not None:
        raise InvalidInput("this model lets tokens leave already; attach a policy to the original.")
    shape = shape_of(model, family, heads)
    layout = shape.layout
    policy = policy.on(layout, len(layers))
    weight = next(model.parameters())
    reduction = TokenReduction(policy, shape, by).to(weight.device, weight.dtype)
    model.tokens = reduction
    if policy.counts(layout.patches)[-1] == layout.patches:
        return reduction.train(model.training)  # nothing ever leaves: the model runs as it did, bit for bit
    blocks = [model.get_submodule(name) for name in block_names(model, family)]
    for stage, layer in enumerate(policy.layers):
        _first_(blocks[layer - 1], _Stage(reduction, stage))
    for block in blocks[1 : policy.layers[-1] if "accumulated" in policy.reducer.needs else 1]:
        _first_(block, _Accumulate(reduction))  # what enters one, left the one before
    _first_(family.patch_embedding(model), _Begin(reduction))
    for index, layer in enumerate(layers, 1):
        _capture_(layer, index, reduction)
    if layout.pooled in _POOLED:
        family.pooled_norm(model).register_forward_hook(_Pooled(reduction))
    return reduction.train(model.training)


def _first_(block: nn.Module, hook: Any) -> None:
    """Lets the hook see what the block is given before any that is there already."""
    # Not prepend=True: torch 2.11 compiles hooks in the order of their insertion, not in that of the OrderedDict.
    later = dict(block._forward_pre_hooks)
    block._forward_pre_hooks.clear()
    block.register_forward_pre_hook(hook, with_kwargs=True)
    block._forward_pre_hooks.update(later)


def _capture_(layer: Attention, index: int, reduction: TokenReduction) -> None:
    """Lets a layer's attention count sizes and show what the reducer must see, where it has to."""
    policy = reduction.policy
    wanted = _wanted(policy, index)
    sized = reduction.counts_sizes or policy.reducer.learned
    if wanted or (sized and index >= policy.layers[0]):
        show = partial(reduction.show, layer.spec.heads, decides=index + 1 in policy.layers)
        layer.backend = AttentionCapture(reduction.sizes, show, wanted)
        if wanted and not layer.spec.heads:
            layer.register_forward_hook(partial(_show_no_heads, layer.backend))


def described_tokens(model: nn.Module) -> dict[str, Any] | None:
    """Describes the policy of a model as JSON-ready values; None where all tokens stay."""
    reduction = reduction_of(model)
    return (
        None
        if reduction is None
        else {
            "policy": to_dict(reduction.policy),
            "by": reduction.by,
            "heads": reduction.shape.heads,
        }
    )


def attach_described_(model: nn.Module, family: Family, record: Mapping[str, Any]) -> None:
    """Puts the described policy into the model."""
    attach_tokens_(model, family, policy_from_dict(record["policy"]), record["by"], record["heads"])


def reduction_of(model: nn.Module) -> TokenReduction | None:
    """Returns the policy at work in a model; None where all tokens stay."""
    found = getattr(model, "tokens", None)
    return found if isinstance(found, TokenReduction) else None


def require_all_tokens(model: nn.Module, verb: str) -> None:
    """Refuses a model whose tokens leave on their way, for what needs them all in every layer."""
    reduction = reduction_of(model)
    if reduction is not None:
        raise NotSupported(
            f"tokens leave this model on their way ({reduction.policy}), so its layers do not see the same tokens: "
            f"{verb} the original, and let tokens leave last."
        )


def _in_place(maps: Tensor | None, heads: tuple[int, ...], count: int, sizes: Tensor | None) -> Tensor | None:
    """Puts the maps of some heads into their places among all; those of the others are the same for every key."""
    if maps is None:
        return None
    counted = maps.new_ones(maps.shape[0], maps.shape[-1]) if sizes is None else sizes.to(maps.dtype)
    even = (counted / counted.sum(-1, keepdim=True)).view(maps.shape[0], *(1,) * (maps.ndim - 2), -1)
    found = even.expand(maps.shape[0], count, *maps.shape[2:]).clone()
    found[:, list(heads)] = maps
    return found


def _with_zeros(norms: Tensor | None, heads: tuple[int, ...], count: int) -> Tensor | None:
    """Puts the lengths of some heads' values into their places among all; a removed head reads nothing."""
    if norms is None:
        return None
    found = norms.new_zeros(norms.shape[0], count, norms.shape[2])
    found[:, list(heads)] = norms
    return found


def _wanted(policy: TokenPolicy, layer: int) -> tuple[str, ...]:
    """Names what the reducer must see of a layer."""
    needs = set(policy.reducer.needs)
    wanted = needs & LAST_LAYER if layer + 1 in policy.layers else set()
    if needs & MOMENTS and layer < policy.layers[-1]:
        wanted.add("attention")
    if "class_attention_sum" in needs and layer < policy.layers[-1]:
        wanted.add("class_attention")
    return tuple(sorted(wanted))


def _show_no_heads(capture: AttentionCapture, layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
    """Shows a layer that has lost all its heads, whose backend does not run."""
    batch, count = output.shape[:2]
    maps = output.new_zeros(batch, 0, count, count)
    capture.show(CapturedAttention(maps, maps[:, :, 0], output.new_zeros(batch, count, 1), maps[:, :, 0]))


class _Hook:
    """What a reduction does beside a block: to every image by itself, so that a batch may pass in parts."""

    by_image = True

    def __init__(self, reduction: TokenReduction):
        self.reduction = reduction


class _Begin(_Hook):
    def __call__(self, module: nn.Module, given: tuple, named: Mapping[str, Any]) -> None:
        self.reduction.begin(given[0])


class _Accumulate(_Hook):
    def __call__(self, module: nn.Module, given: tuple, named: Mapping[str, Any]) -> None:
        tokens = given[0] if given else named["hidden_states"]
        self.reduction.accumulate(self.reduction.policy.reducer.layer_score(tokens))


class _Stage(_Hook):
    def __init__(self, reduction: TokenReduction, stage: int):
        super().__init__(reduction)
        self.stage = stage

    def __call__(self, module: nn.Module, given: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if given:
            return (self.reduction.decide(self.stage, given[0]), *given[1:]), named
        return given, {**named, "hidden_states": self.reduction.decide(self.stage, named["hidden_states"])}


class _Pooled(_Hook):
    def __call__(self, module: nn.Module, given: tuple, tokens: Tensor) -> Tensor:
        return self.reduction.pooled(tokens)


Parts = tuple[Tensor, Tensor, Tensor, MapMoments | None, Tensor | None]


def _compressed(state: TokenState, reduction: Reduction) -> Parts:
    """Returns the tokens that are left, their sizes, their places in the image, and what was gathered of them."""
    kept, extra, prefix, places = reduction.kept, reduction.extra, state.prefix, state.places
    tokens = [state.tokens[:, :prefix], reduction.tokens, *([] if extra is None else [extra])]
    sizes, left = _left_sizes(state, reduction), places.gather(1, kept)
    if extra is not None:
        left = torch.cat([left, left.new_full((left.shape[0], extra.shape[1]), -1)], dim=1)
    moments = state.moments
    if moments is not None:
        first = torch.arange(prefix, device=kept.device).expand(kept.shape[0], -1)
        moments = moments.at(torch.cat([first, prefix + kept], dim=1))
        moments = moments if extra is None else moments.with_new(extra.shape[1])
    gathered = state.accumulated
    if gathered is not None:
        gathered = nn.functional.pad(gathered.gather(1, kept), (0, 0 if extra is None else extra.shape[1]))
    return torch.cat(tokens, dim=1), torch.cat([state.sizes[:, :prefix], sizes], dim=1), left, moments, gathered


def _masked(state: TokenState, reduction: Reduction) -> Parts:
    """Writes what is left into its places, extra tokens into those that become free, and size 0 to the rest."""
    kept, extra, places = reduction.kept, reduction.extra, state.places
    moments, gathered = state.moments, state.accumulated
    written, values = kept, reduction.tokens
    if extra is not None:
        num_pruned = state.there.scatter(1, kept, 0.0)
        free = num_pruned.argsort(dim=1, descending=True, stable=True)[:, : extra.shape[1]]
        written, values = torch.cat([kept, free], dim=1), torch.cat([values, extra], dim=1)
        places, moments, gathered = _replaced(state, free)
    patches = state.patches.scatter(1, written[..., None].expand_as(values), values)
    sizes = torch.zeros_like(state.sizes[:, state.prefix :]).scatter(1, written, _left_sizes(state, reduction))
    tokens = torch.cat([state.tokens[:, : state.prefix], patches], dim=1)
    return tokens, torch.cat([state.sizes[:, : state.prefix], sizes], dim=1), places, moments, gathered


def _replaced(state: TokenState, added: Tensor) -> tuple[Tensor, MapMoments | None, Tensor | None]:
    """Returns the places and what was gathered of the tokens, where new ones stand at the patches `added`."""
    moments, gathered = state.moments, state.accumulated
    return (
        state.places.scatter(1, added, -1),
        None if moments is None else moments.without(state.prefix + added),
        None if gathered is None else gathered.scatter(1, added, 0.0),
    )


def _left_sizes(state: TokenState, reduction: Reduction) -> Tensor:
    if reduction.sizes is not None:
        return reduction.sizes
    own = state.sizes[:, state.prefix :].gather(1, reduction.kept)
    return own if reduction.extra is None else torch.cat([own, torch.ones_like(reduction.extra[..., 0])], dim=1)


def _left(places: Tensor, sizes: Tensor, reduction: Reduction) -> Tensor:
    count = reduction.kept.shape[1] + (0 if reduction.extra is None else reduction.extra.shape[1])
    first = (sizes > 0).to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
    return places.gather(1, first)
