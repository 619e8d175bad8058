"""Token pruning and merging inside a model: stages before its layers, at which a reducer selects the tokens."""

from dataclasses import replace

import torch
from torch import nn

from attnrx.attention import CapturedAttention
from attnrx.errors import InvalidInput
from attnrx.models.token_run import TokenRun
from attnrx.models.token_updates import (
    compressed_state,
    masked_state,
    remaining_indices,
    replaced_state,
)
from attnrx.shapes import Float, Tensor
from attnrx.tokens import (
    MOMENTS,
    MapMoments,
    Part,
    Shape,
    TokenPolicy,
    TokenState,
    image_keys,
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
        if run.patch_indices is None:
            self._require_patches(tokens.shape[1] - prefix)
            run.patch_indices = torch.arange(tokens.shape[1] - prefix, device=tokens.device).expand(tokens.shape[0], -1)
        if count >= self.shape.layout.patches:  # no token is pruned, so the tokens must not change at all
            run.trail.append(run.patch_indices)
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
            tokens, prefix, sizes, run.patch_indices, *statistics, captured.value_norms, **position, whole=whole
        )
        if self.draws:
            return self._draw(stage, state)
        reduction = self.policy.reducer.reduce(state, count, self.predictor(stage))
        apply = compressed_state if self.by == "compress" else masked_state
        tokens, run.sizes, run.patch_indices, run.moments, run.accumulated = apply(state, reduction)
        run.trail.append(
            run.patch_indices
            if self.by == "compress"
            else remaining_indices(run.patch_indices, run.sizes[:, prefix:], reduction)
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
            run.patch_indices, run.moments, run.accumulated = replaced_state(state, sampled.added)
        run.sizes = torch.cat([state.sizes[:, :prefix], sizes], dim=1)
        return torch.cat([state.tokens[:, :prefix], sampled.patches], dim=1)

    def pooled(self, tokens: Float[Tensor, "batch tokens width"]) -> Tensor:
        """Returns the tokens that are pooled, changed so that pruned tokens do not count."""
        return tokens if self.run.sizes is None else POOLED[self.shape.layout.pooled](self, tokens, self.run.sizes)

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


POOLED = {"mean": TokenReduction.for_mean, "max": TokenReduction.for_max}


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
