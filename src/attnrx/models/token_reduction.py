"""Token pruning and merging inside a model: stages before its layers, at which a reducer selects the tokens."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention, AttentionCapture, CapturedAttention
from attnrx.errors import InvalidInput, NotSupported
from attnrx.models.blocks import block_names
from attnrx.models.family import Family
from attnrx.models.token_run import TokenRun
from attnrx.serialization.config import to_dict
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
    """A policy attached to one model: `by="compress"` removes pruned tokens, `by="mask"` keeps every shape.

    A masked token keeps its index and has size 0: no other token attends to it, and pooling ignores it. In training a
    learned reducer always masks: it samples which patches are kept, at `temperature`, in any number.
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
        """Whether stages sample the kept patches, with a gradient."""
        return self.training and self.policy.reducer.learned

    @property
    def counts_sizes(self) -> bool:
        """Whether attention needs the sizes of the tokens."""
        return self.by == "mask" or self.policy.reducer.proportional or self.draws

    def sizes(self) -> Float[Tensor, "batch tokens"] | None:
        """Returns the token sizes for proportional attention; None where all sizes count as 1."""
        return self.run.sizes if self.counts_sizes else None

    def predictor(self, stage: int) -> nn.Module:
        """Returns the predictor of a stage, or the one of all stages."""
        return self.stages[0 if self.policy.reducer.one_predictor else stage]

    def begin(self, images: Float[Tensor, "batch channels height width"]) -> None:
        """Starts a batch, or a chunk of one."""
        self.run.begin()
        if "image_keys" in self.policy.reducer.needs:
            self.run.image_keys = image_keys(images)

    def accumulate(self, scores: Float[Tensor, "part tokens"], part: Part | None = None) -> None:
        """Adds the patch scores of one layer, for all images or for those of `part`."""
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
        """Receives the captured attention of a layer with these heads of the original model, for all images or some.

        A compressed layer stores its heads in another order and omits removed ones. The reducer receives every head at
        its original index; a removed head attends uniformly, as in the masked model. The capture is stored only where
        the next stage `decides` by it.
        """
        if heads != tuple(range(self.shape.heads)):
            sizes = self.sizes()
            sizes = sizes if sizes is None or captured.part is None else sizes[captured.part.images]
            captured = replace(
                captured,
                attention=_at_all_heads(captured.attention, heads, self.shape.heads, sizes),
                class_attention=_at_all_heads(captured.class_attention, heads, self.shape.heads, sizes),
                value_norms=_with_zeros(captured.value_norms, heads, self.shape.heads),
            )
        if decides:
            self.run.captures = (
                [captured] if captured.part is None or captured.part.start == 0 else [*self.run.captures, captured]
            )
        needs = self.policy.reducer.needs
        if not MOMENTS.isdisjoint(needs) and captured.attention is not None:
            self._add_to_moments(captured.attention, captured.part, "attention_variance" in needs)
        if "class_attention_sum" in needs and captured.class_attention is not None:
            self.accumulate(captured.class_attention.mean(1), captured.part)

    def _add_to_moments(
        self, attention: Float[Tensor, "part heads queries keys"], part: Part | None, variance: bool
    ) -> None:
        """Adds a layer's attention maps to the moments."""
        run = self.run
        if part is None:
            before = run.moments
            run.moments = MapMoments.of(attention, variance) if before is None else before.then(attention)
            return
        if run.moments is None:
            run.moments = MapMoments.room(attention, part.batch, variance)
        run.moments.write_(attention, part)

    def decide(self, stage: int, tokens: Float[Tensor, "batch tokens width"]) -> Tensor:
        """Runs the reducer at one stage, and returns the tokens for the next layer."""
        prefix, run = self.shape.layout.prefix, self.run
        count = self.policy.counts(self.shape.layout.patches)[stage]
        sizes = tokens.new_ones(tokens.shape[:2]) if run.sizes is None else run.sizes
        if run.places is None:
            self._require_patches(tokens.shape[1] - prefix)
            run.places = torch.arange(tokens.shape[1] - prefix, device=tokens.device).expand(tokens.shape[0], -1)
        if count >= self.shape.layout.patches:  # no token is pruned, so the tokens must not change at all
            run.trail.append(run.places)
            return tokens
        captured = CapturedAttention.joined(run.captures)
        statistics = (
            captured.class_attention,
            captured.attention,
            run.moments,
            captured.keys,
            run.accumulated,
            run.image_keys,
        )
        whole = self.by == "compress" and not self.draws
        position = {"stage": stage, "layer": self.policy.layers[stage], "depth": self.shape.depth}
        state = TokenState(
            tokens, prefix, sizes, run.places, *statistics, captured.value_norms, **position, whole=whole
        )
        if self.draws:
            return self._draw(stage, state)
        reduction = self.policy.reducer.reduce(state, count, self.predictor(stage))
        apply = _compressed if self.by == "compress" else _masked
        tokens, run.sizes, run.places, run.moments, run.accumulated = apply(state, reduction)
        run.trail.append(
            run.places if self.by == "compress" else _remaining_indices(run.places, run.sizes[:, prefix:], reduction)
        )
        return tokens

    def _require_patches(self, found: int) -> None:
        """Raises InvalidInput for an image size other than the one the policy was attached for."""
        expected = self.shape.layout.patches
        if found != expected:
            raise InvalidInput(
                f"an image has {found} patches, and {self.policy} was attached for {expected}: give images of the "
                "model's input size, or adopt the model for this size and attach the policy to it."
            )

    def _draw(self, stage: int, state: TokenState) -> Tensor:
        """Samples the kept patches; every token keeps its index, with size 1 or 0."""
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
        """Returns the tokens that are pooled, changed so that pruned tokens do not count."""
        return tokens if self.run.sizes is None else _POOLED[self.shape.layout.pooled](self, tokens, self.run.sizes)

    def for_mean(self, tokens: Float[Tensor, "batch tokens width"], sizes: Float[Tensor, "batch tokens"]) -> Tensor:
        """Scales the patches so that their mean is the mean over the patches of the image."""
        prefix = self.shape.layout.prefix
        counts = sizes if self.policy.reducer.proportional or self.draws else (sizes > 0).to(sizes.dtype)
        patches = counts[:, prefix:]
        weights = patches * (patches.shape[1] / patches.sum(1, keepdim=True))
        return torch.cat([tokens[:, :prefix], tokens[:, prefix:] * weights[..., None]], dim=1)

    def for_max(self, tokens: Float[Tensor, "batch tokens width"], sizes: Float[Tensor, "batch tokens"]) -> Tensor:
        """Overwrites pruned patches by the first remaining one, which does not change the maximum."""
        prefix = self.shape.layout.prefix
        patches, remains = tokens[:, prefix:], sizes[:, prefix:] > 0
        first = remains.to(torch.uint8).argmax(1)[:, None, None].expand(-1, 1, patches.shape[-1])
        patches = torch.where(remains[..., None], patches, patches.gather(1, first))
        return torch.cat([tokens[:, :prefix], patches], dim=1)


_POOLED = {"mean": TokenReduction.for_mean, "max": TokenReduction.for_max}


def shape_of(model: nn.Module, family: Family, heads: int | None = None) -> Shape:
    """Returns the model properties that reducers need; `heads` is the number of heads of the original model."""
    specs = [layer.spec for layer in family.attention(model)]
    stored = max((head + 1 for spec in specs for head in spec.heads), default=0)
    return Shape(specs[0].width, heads or stored, family.token_layout(model), depth=len(specs))


def attach_tokens_(
    model: nn.Module, family: Family, policy: TokenPolicy, by: str = "compress", heads: int | None = None
) -> TokenReduction:
    """Attaches a policy to the model, in place, and returns the reduction; its predictors, if any, are fresh.

    `heads` is the number of heads of the original model, where some may have been removed from every layer.
    """
    layers = family.attention(model)
    if reduction_of(model) is not None:
        raise InvalidInput("this model already has a token policy; attach a policy to the original.")
    shape = shape_of(model, family, heads)
    layout = shape.layout
    policy = policy.on(layout, len(layers))
    weight = next(model.parameters())
    reduction = TokenReduction(policy, shape, by).to(weight.device, weight.dtype)
    model.tokens = reduction
    if policy.counts(layout.patches)[-1] == layout.patches:
        return reduction.train(model.training)  # no token is ever pruned: the model stays bit-identical
    blocks = [model.get_submodule(name) for name in block_names(model, family)]
    for stage, layer in enumerate(policy.layers):
        _first_(blocks[layer - 1], _Stage(reduction, stage))
    for block in blocks[1 : policy.layers[-1] if "accumulated" in policy.reducer.needs else 1]:
        _first_(block, _Accumulate(reduction))  # the input of a block is the output of the one before
    _first_(family.patch_embedding(model), _Begin(reduction))
    for index, layer in enumerate(layers, 1):
        _capture_(layer, index, reduction)
    if layout.pooled in _POOLED:
        family.pooled_norm(model).register_forward_hook(_Pooled(reduction))
    return reduction.train(model.training)


def _first_(block: nn.Module, hook: Any) -> None:
    """Registers a pre-forward hook that runs before the existing ones."""
    # Not prepend=True: torch 2.11 compiles hooks in the order of their insertion, not in that of the OrderedDict.
    later = dict(block._forward_pre_hooks)
    block._forward_pre_hooks.clear()
    block.register_forward_pre_hook(hook, with_kwargs=True)
    block._forward_pre_hooks.update(later)


def _capture_(layer: Attention, index: int, reduction: TokenReduction) -> None:
    """Makes a layer's attention use token sizes and capture the statistics that the reducer needs."""
    policy = reduction.policy
    statistics = _needed_statistics(policy, index)
    uses_sizes = reduction.counts_sizes or policy.reducer.learned
    if statistics or (uses_sizes and index >= policy.layers[0]):
        show = partial(reduction.show, layer.spec.heads, decides=index + 1 in policy.layers)
        layer.backend = AttentionCapture(reduction.sizes, show, statistics)
        if statistics and not layer.spec.heads:
            layer.register_forward_hook(partial(_capture_no_heads, layer.backend))


def described_tokens(model: nn.Module) -> dict[str, Any] | None:
    """Returns the policy of a model as JSON-ready values; None where it has none."""
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
    """Attaches the described policy to the model."""
    attach_tokens_(model, family, policy_from_dict(record["policy"]), record["by"], record["heads"])


def reduction_of(model: nn.Module) -> TokenReduction | None:
    """Returns the token reduction of a model; None where it has none."""
    found = getattr(model, "tokens", None)
    return found if isinstance(found, TokenReduction) else None


def require_all_tokens(model: nn.Module, verb: str) -> None:
    """Raises NotSupported for a model that prunes or merges tokens; `verb` names the requested operation."""
    reduction = reduction_of(model)
    if reduction is not None:
        raise NotSupported(
            f"this model prunes or merges tokens ({reduction.policy}), so its layers have different tokens: "
            f"{verb} the original, and apply the token policy last."
        )


def _at_all_heads(maps: Tensor | None, heads: tuple[int, ...], count: int, sizes: Tensor | None) -> Tensor | None:
    """Returns the maps of all `count` heads: those of `heads` at their indices, the others uniform over the keys."""
    if maps is None:
        return None
    weights = maps.new_ones(maps.shape[0], maps.shape[-1]) if sizes is None else sizes.to(maps.dtype)
    uniform = (weights / weights.sum(-1, keepdim=True)).view(maps.shape[0], *(1,) * (maps.ndim - 2), -1)
    found = uniform.expand(maps.shape[0], count, *maps.shape[2:]).clone()
    found[:, list(heads)] = maps
    return found


def _with_zeros(norms: Tensor | None, heads: tuple[int, ...], count: int) -> Tensor | None:
    """Returns the value norms of all `count` heads: those of `heads` at their indices, the others zero."""
    if norms is None:
        return None
    found = norms.new_zeros(norms.shape[0], count, norms.shape[2])
    found[:, list(heads)] = norms
    return found


def _needed_statistics(policy: TokenPolicy, layer: int) -> tuple[str, ...]:
    """Returns the statistics that the reducer needs of a layer."""
    needs = set(policy.reducer.needs)
    statistics = needs & LAST_LAYER if layer + 1 in policy.layers else set()
    if needs & MOMENTS and layer < policy.layers[-1]:
        statistics.add("attention")
    if "class_attention_sum" in needs and layer < policy.layers[-1]:
        statistics.add("class_attention")
    return tuple(sorted(statistics))


def _capture_no_heads(capture: AttentionCapture, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    """Reports a capture for a layer without heads, whose backend does not run."""
    batch, count = output.shape[:2]
    maps = output.new_zeros(batch, 0, count, count)
    capture.show(CapturedAttention(maps, maps[:, :, 0], output.new_zeros(batch, count, 1), maps[:, :, 0]))


class _Hook:
    """A hook of a reduction. It treats the images of a batch independently, so that a batch may be chunked."""

    by_image = True

    def __init__(self, reduction: TokenReduction):
        self.reduction = reduction


class _Begin(_Hook):
    def __call__(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        self.reduction.begin(args[0])


class _Accumulate(_Hook):
    def __call__(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        tokens = args[0] if args else kwargs["hidden_states"]
        self.reduction.accumulate(self.reduction.policy.reducer.layer_score(tokens))


class _Stage(_Hook):
    def __init__(self, reduction: TokenReduction, stage: int):
        super().__init__(reduction)
        self.stage = stage

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if args:
            return (self.reduction.decide(self.stage, args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.reduction.decide(self.stage, kwargs["hidden_states"])}


class _Pooled(_Hook):
    def __call__(self, module: nn.Module, args: tuple, tokens: Tensor) -> Tensor:
        return self.reduction.pooled(tokens)


# tokens, sizes, patch indices, moments, accumulated scores
Reduced = tuple[Tensor, Tensor, Tensor, MapMoments | None, Tensor | None]


def _compressed(state: TokenState, reduction: Reduction) -> Reduced:
    """Returns the remaining tokens, their sizes, their patch indices, and the statistics gathered for them."""
    kept, extra, prefix = reduction.kept, reduction.extra, state.prefix
    tokens = [state.tokens[:, :prefix], reduction.tokens, *([] if extra is None else [extra])]
    sizes, indices = _remaining_sizes(state, reduction), state.places.gather(1, kept)
    if extra is not None:
        indices = torch.cat([indices, indices.new_full((indices.shape[0], extra.shape[1]), -1)], dim=1)
    moments = state.moments
    if moments is not None:
        first = torch.arange(prefix, device=kept.device).expand(kept.shape[0], -1)
        moments = moments.at(torch.cat([first, prefix + kept], dim=1))
        moments = moments if extra is None else moments.with_new(extra.shape[1])
    gathered = state.accumulated
    if gathered is not None:
        gathered = nn.functional.pad(gathered.gather(1, kept), (0, 0 if extra is None else extra.shape[1]))
    return torch.cat(tokens, dim=1), torch.cat([state.sizes[:, :prefix], sizes], dim=1), indices, moments, gathered


def _masked(state: TokenState, reduction: Reduction) -> Reduced:
    """Writes kept tokens at their indices and extra tokens at pruned indices; all other patches get size 0."""
    kept, extra, indices = reduction.kept, reduction.extra, state.places
    moments, gathered = state.moments, state.accumulated
    targets, values = kept, reduction.tokens
    if extra is not None:
        pruned_mask = state.there.scatter(1, kept, 0.0)
        free = pruned_mask.argsort(dim=1, descending=True, stable=True)[:, : extra.shape[1]]
        targets, values = torch.cat([kept, free], dim=1), torch.cat([values, extra], dim=1)
        indices, moments, gathered = _replaced(state, free)
    patches = state.patches.scatter(1, targets[..., None].expand_as(values), values)
    sizes = torch.zeros_like(state.sizes[:, state.prefix :]).scatter(1, targets, _remaining_sizes(state, reduction))
    tokens = torch.cat([state.tokens[:, : state.prefix], patches], dim=1)
    return tokens, torch.cat([state.sizes[:, : state.prefix], sizes], dim=1), indices, moments, gathered


def _replaced(state: TokenState, added: Tensor) -> tuple[Tensor, MapMoments | None, Tensor | None]:
    """Returns patch indices and statistics after new tokens were written at the patches `added`."""
    moments, gathered = state.moments, state.accumulated
    return (
        state.places.scatter(1, added, -1),
        None if moments is None else moments.without(state.prefix + added),
        None if gathered is None else gathered.scatter(1, added, 0.0),
    )


def _remaining_sizes(state: TokenState, reduction: Reduction) -> Tensor:
    if reduction.sizes is not None:
        return reduction.sizes
    sizes = state.sizes[:, state.prefix :].gather(1, reduction.kept)
    return sizes if reduction.extra is None else torch.cat([sizes, torch.ones_like(reduction.extra[..., 0])], dim=1)


def _remaining_indices(indices: Tensor, sizes: Tensor, reduction: Reduction) -> Tensor:
    count = reduction.kept.shape[1] + (0 if reduction.extra is None else reduction.extra.shape[1])
    first = (sizes > 0).to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :count]
    return indices.gather(1, first)
